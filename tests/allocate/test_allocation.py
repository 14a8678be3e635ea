"""From a recipe with a target to a checkpoint: measuring, choosing, and what is said when it cannot be."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress import api, recipe
from compress.allocate import (
    decide,
    decision,
    metrics,
    pareto,
    prepare_options,
    session,
    table,
    variants,
)
from compress.allocate.methods import uniform
from compress.allocate.problem import Problem
from compress.allocate.sensitivity import Measurements
from compress.allocate.variants import TABLE, Database
from compress.errors import BudgetError, CompressError, OutputError, RecipeError
from compress.progress import silent
from compress.recipe.schema import Target
from compress.run import report
from compress.run.job import Job
from compress.storage.workdir import Output
from helpers.pico import save_pico
from helpers.runs import TEXT

RECIPE = """
calibration: {num_samples: 4, seq_len: 24}
quantize: {method: gptq, bits: 4, group_size: 32}
allocate:
  method: knapsack
  samples: 2
  options: [{bits: 2}, {bits: 3}, {bits: 5}, {method: rtn, bits: 8, group_size: 32}, {keep: true}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("model") / "llama")


def asked(model: Path, folder: Path, *overrides: str, text: str = RECIPE) -> Job:
    path = folder / "mine.yaml"
    path.write_text(text)
    return Job(str(model), recipe.load(str(path), overrides), folder / "out", calib=str(TEXT))


@pytest.fixture(scope="module")
def opened(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurements]:
    folder = tmp_path_factory.mktemp("table")
    with session.open_measurements(asked(model, folder), silent) as found:
        yield found


def test_every_level_is_packed_and_counted(opened: Measurements) -> None:
    found = metrics.table(opened, frozenset())
    assert len(found.units) == 8 and {len(unit.entries) for unit in found.units} == {5}
    measured = opened._rows()
    for unit in found.units:
        assert [entry.nbytes for entry in unit.entries] == sorted(entry.nbytes for entry in unit.entries)
        for entry in unit.entries:
            number = found.options.index(entry.option)
            if entry.option == "keep":
                assert entry.nbytes == 4 * unit.numel and entry.damage["weight"] == 0
            else:
                assert entry.nbytes == sum(measured[name][str(number)]["nbytes"] for name in unit.members)
                assert entry.damage["hessian"] > 0


def test_damage_of_a_level_is_that_of_its_decoded_weight(opened: Measurements) -> None:
    skeleton, levels = opened.evaluators.source()
    name = "model.layers.1.mlp.down_proj"
    original = opened.originals(skeleton, 1)[name]
    for number in range(3):
        change = levels.weight(name, str(number), original) - original
        measured = opened._rows()[name][str(number)]
        assert measured["weight"] == pytest.approx(change.double().square().sum().item(), rel=1e-5)
        assert measured["relative"] == pytest.approx((change.norm() / original.norm()).item() ** 2, rel=1e-4)


def test_half_bits_are_allocated_and_reported(model: Path, tmp_path: Path) -> None:
    """All linears take the larger option, which the target leaves room for."""
    text = """
calibration: {num_samples: 4, seq_len: 24}
quantize: {method: trellis, bits: 2, state_bits: 7}
allocate: {method: uniform, samples: 2, target: 5bpw, options: [{bits: 2}, {bits: 2.5}]}
"""
    api.quantize(asked(model, tmp_path, text=text))
    found = report.load(tmp_path / "out")
    assert {row["params"]["bits"] for row in found["layers"]} == {2.5}
    assert set(found["allocation"]["units"].values()) == {"bits=2.5"}


def test_swaps_are_divergences_of_whole_models(opened: Measurements, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = metrics.table(opened, frozenset({"kl_one_at_a_time"}))
    unit = found.units[2]
    _, levels = opened.evaluators.source()
    tokens = opened.calibration.tokens[:2]
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        before = whole(input_ids=tokens).logits.double().log_softmax(-1)
        for name in unit.members:
            linear = whole.get_submodule(name)
            linear.weight.copy_(levels.weight(name, "0", linear.weight.detach()))
        after = whole(input_ids=tokens).logits.double().log_softmax(-1)
    expected = (before.exp() * (before - after)).sum(-1).mean().item()
    assert unit.entries[0].damage["kl_one_at_a_time"] == pytest.approx(expected, rel=1e-3)
    assert next(entry for entry in unit.entries if entry.option == "keep").damage["kl_one_at_a_time"] < 1e-9


def test_a_former_measurement_is_read_under_its_name_of_today(
    opened: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, needs = "kl_one_at_a_time", frozenset({"kl_one_at_a_time"})
    found = metrics.table(opened, needs)
    now, former = (opened.database.folder / f"measured-{each}.json" for each in (name, "swap"))
    content = now.read_text()
    former.write_text(content.replace(f'"{name}"', '"swap"'))
    now.unlink()
    try:
        monkeypatch.delitem(metrics.METRICS, name)  # it is not measured anew
        assert metrics.table(opened, needs).units == found.units
    finally:
        former.unlink()
        now.write_text(content)


@pytest.mark.parametrize("name", sorted(metrics.METRICS))
def test_every_damage_and_score_can_be_measured(name: str, opened: Measurements) -> None:
    found = metrics.table(opened, frozenset({name}))
    if name in found.units[0].scores:
        assert len({unit.scores[name] for unit in found.units}) == 2  # of two blocks
        return
    for unit in found.units:
        values = {entry.option: entry.damage[name] for entry in unit.entries}
        assert values["gptq bits=2"] > values["gptq bits=5"] >= values["keep"] >= 0


def test_the_table_survives_its_file(opened: Measurements) -> None:
    found = metrics.table(opened, frozenset({"kl_one_at_a_time"}))
    assert table.load(opened.database.folder) == found
    held = json.loads((opened.database.folder / TABLE).read_text())
    assert held["units"][0]["entries"][0]["damage"]["kl_one_at_a_time"] >= 0


@pytest.mark.parametrize("bpw", [4.8, 5.5, 7.0, 20.0])
def test_budgets_are_kept_and_spent(bpw: float, opened: Measurements) -> None:
    settings = opened.opened.allocation
    found, problem, result = decision.solve(opened, settings, Target(f"{bpw}bpw"))
    used = problem.nbytes(result.choice)
    assert used <= problem.budget == int(bpw * found.numel / 8)
    estimator = settings.config.estimator
    for unit, i in zip(found.units, result.choice, strict=True):
        for entry in unit.entries:
            better = entry.damage[estimator] < unit.entries[i].damage[estimator]
            assert not (better and used - unit.entries[i].nbytes + entry.nbytes <= problem.budget)


def test_a_bound_on_the_divergence_is_met_by_the_smallest_of_its_kind(opened: Measurements) -> None:
    settings = opened.opened.allocation
    found = metrics.table(opened, frozenset({"kl_one_at_a_time"}))
    bench = metrics.evaluator(opened, found)
    smallest = decision.solve(opened, settings, Target("4.7bpw"))[2].choice
    bound = bench.divergence([smallest], range(2))[0] / 4
    _, _, result = decision.solve(opened, settings, Target(f"{bound:.8f}kl"))
    assert bench.divergence([result.choice], range(2))[0] <= bound
    assert found.bpw(result.choice) < 8


@pytest.mark.parametrize(
    ("target", "message"),
    [("1bpw", "below the least"), ("1KiB", "below the least")],
)
def test_impossible_targets(target: str, message: str, opened: Measurements) -> None:
    with pytest.raises(BudgetError, match=message) as error:
        decision.solve(opened, opened.opened.allocation, Target(target))
    assert "\n" not in str(error.value)


def test_a_target_above_everything(opened: Measurements) -> None:
    """Every unit gets its largest option."""
    _, problem, result = decision.solve(opened, opened.opened.allocation, Target("40bpw"))
    assert problem.nbytes(result.choice) == problem.budget == problem.most


def test_a_quantized_model_has_the_bytes_and_the_options_of_its_allocation(
    opened: Measurements, model: Path, tmp_path: Path
) -> None:
    job = asked(model, tmp_path, "allocate.target=5.5bpw")
    shutil.copytree(opened.database.folder, variants.folder_of(job), ignore=shutil.ignore_patterns("candidates-*"))
    decided = decide.decide(job, silent)
    assert decided.recipe.allocate is None and decided.allocation is not None
    result = api.quantize(job)
    assert result["bpw"] == pytest.approx(decided.allocation["bpw"]) and result["bpw"] <= 5.5
    assert result["nbytes"]["total"] == decided.allocation["nbytes"]
    written = recipe.load(str(tmp_path / "out" / "recipe.yaml"))
    assert written == dataclasses.replace(decided.recipe, name=written.name)
    assert report.load(tmp_path / "out")["allocation"]["units"] == decided.allocation["units"]
    again = decide.decide(job, silent)
    assert again == decided


def test_rules_decide_before_the_allocation(model: Path, tmp_path: Path) -> None:
    text = RECIPE + 'rules: [{match: "*.o_proj", bits: 8}]\nignore: ["*.down_proj"]\n'
    job = asked(model, tmp_path, "allocate.target=6bpw", "allocate.estimator=weight", text=text)
    decided = decide.decide(job, silent)
    result = api.quantize(decided)
    bits = {row["name"].rsplit(".")[-1]: row["bpw"] for row in result["layers"]}
    assert "down_proj" not in bits and bits["o_proj"] > 8
    assert result["bpw"] == pytest.approx(decided.allocation["bpw"])  # type: ignore[index]


@pytest.mark.slow
def test_a_killed_measurement_goes_on_to_the_same_bytes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def levels(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((folder / "levels").iterdir())}

    job = asked(model, tmp_path)
    with session.open_measurements(dataclasses.replace(job, measurements=tmp_path / "whole"), silent):
        pass
    job = dataclasses.replace(job, measurements=tmp_path / "killed")
    add, calls = Database.add, []

    def killed(self: Database, block: int, *rest: Any) -> None:
        calls.append(block)
        if block == 1 and len(calls) == 2:
            raise KeyboardInterrupt
        add(self, block, *rest)

    monkeypatch.setattr(Database, "add", killed)
    with pytest.raises(KeyboardInterrupt), session.open_measurements(job, silent):
        pass
    with session.open_measurements(job, silent):
        pass
    assert calls == [0, 1, 1]
    assert levels(tmp_path / "killed") == levels(tmp_path / "whole")


@pytest.mark.parametrize(
    ("override", "what"),
    [("calibration.num_samples=3", "calibration text, recipe"), ("quantize.bits=6", "recipe")],
)
def test_measurements_of_something_else_are_refused(
    override: str, what: str, opened: Measurements, model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(opened.database.folder, copy, ignore=shutil.ignore_patterns("candidates-*"))
    other = asked(model, tmp_path, override, text=RECIPE.replace("{bits: 3}, ", "")) if "bits" in override else None
    job = dataclasses.replace(other or asked(model, tmp_path, override), measurements=copy)
    with pytest.raises(OutputError, match=f"measured with another {what}"), session.open_measurements(job, silent):
        pass


def test_two_runs_do_not_share_a_folder(opened: Measurements, model: Path, tmp_path: Path) -> None:
    job = asked(model, tmp_path)
    with (
        pytest.raises(OutputError, match="in use by another run"),
        session.open_measurements(dataclasses.replace(job, measurements=opened.database.folder), silent),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (RECIPE, (), "no target"),
        (RECIPE + 'rules: [{match: "*", bits: 4}]\n', ("allocate.target=3bpw",), "leave nothing to allocate"),
    ],
)
def test_nothing_to_decide(text: str, overrides: tuple[str, ...], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        decide.decide(asked(model, tmp_path, *overrides, text=text), silent)


def test_a_level_that_is_missing_is_named(opened: Measurements) -> None:
    with pytest.raises(CompressError, match="no level '9' of model.layers.0.mlp.up_proj"):
        opened.database.weight(0, "model.layers.0.mlp.up_proj", "9", torch.zeros(1))


def test_the_frontier_never_rises(model: Path, tmp_path: Path) -> None:
    job = asked(model, tmp_path, "allocate.target=5.5bpw")
    found = pareto.measure(job, None, 5, silent)
    kls = [row["kl"] for row in found["allocated"]]
    assert kls == sorted(kls, reverse=True) and found["tokens"] == 2 * 24
    assert {row["option"] for row in found["uniform"]} == {"gptq bits=2", "gptq bits=3", "gptq bits=5", "rtn", "keep"}
    assert found["chosen"]["bpw"] <= 5.5
    png, page = pareto.write(found, tmp_path / "plots")
    assert png.read_bytes().startswith(b"\x89PNG") and "data:image/png" in page.read_text()
    assert all(name in page.read_text() for name in found["chosen"]["units"])


def test_between_uniform_options_the_log_of_the_divergence_is_a_line() -> None:
    rows = [{"nbytes": 100, "kl": 1.0}, {"nbytes": 200, "kl": 0.01}, {"nbytes": 300, "kl": 0.0}]
    assert pareto.between(rows, 150) == pytest.approx(0.1)
    assert pareto.between(rows, 99) is None and pareto.between(rows, 250) is None


@pytest.mark.parametrize("transform", ["rotate", "smooth"])
def test_behind_a_transform_kept_weights_change_nothing(transform: str, model: Path, tmp_path: Path) -> None:
    job = asked(model, tmp_path, f"transform=[{{method: {transform}}}]")
    with session.open_measurements(job, silent) as opened:
        found = metrics.table(opened, frozenset())
        kept, low = found.uniform("keep"), found.uniform("gptq bits=2")
        assert kept is not None and low is not None
        kl = metrics.evaluator(opened, found).divergence([kept, low], range(2))
    assert kl[0] < 1e-6 and kl[1] > 1e-4


def test_a_bound_that_the_method_itself_does_not_keep_is_not_claimed(opened: Measurements) -> None:
    found = metrics.table(opened, frozenset())
    bench = metrics.evaluator(opened, found)
    middle = found.uniform("gptq bits=5")
    assert middle is not None
    bound = 1.01 * bench.divergence([middle], range(2))[0]
    settings = dataclasses.replace(opened.opened.allocation, method="uniform", config=uniform.Config(fill="none"))
    table, _, result = decision.solve(opened, settings, Target(f"{bound:.9f}kl"))
    assert result.choice == middle and bench.divergence([result.choice], range(2))[0] <= bound


def test_damages_of_other_samples_are_measured_anew(opened: Measurements) -> None:
    def measure() -> float:
        return metrics.table(opened, frozenset({"gradient"})).units[0].entries[0].damage["gradient"]

    first = measure()
    opened.samples = 1
    try:
        assert measure() != first
    finally:
        opened.samples = 2
    assert measure() == first


def test_bytes_of_a_choice_are_those_of_the_whole_model(opened: Measurements, model: Path) -> None:
    found = metrics.table(opened, frozenset())
    kept = found.uniform("keep")
    assert kept is not None
    assert found.nbytes(kept) == found.source_nbytes == Problem(found.units, 0).nbytes(kept) + found.other_nbytes


def test_options_that_are_measured_by_gradients(model: Path, tmp_path: Path) -> None:
    """They are what the pipeline makes of them; those beside them know nothing of gradients."""
    part = "lowrank: {rank: 4, metric: fisher}"
    text = f"""
calibration: {{num_samples: 4, seq_len: 24}}
quantize: {{method: rtn, bits: 3, group_size: 32}}
allocate: {{samples: 2, options: [{{bits: 3}}, {{bits: 3, lowrank: {{rank: 4}}}}, {{bits: 3, {part}}}]}}
"""
    name = "model.layers.0.mlp.down_proj"
    with session.open_measurements(asked(model, tmp_path, text=text), silent) as found:
        original = found.originals(found.source(), 0)[name]
        levels = [found.database.weight(0, name, number, original) for number in range(3)]
    assert (levels[1] - levels[2]).abs().max() > 1e-4
    for number, lowrank in ((1, "lowrank: {rank: 4}"), (2, part)):
        folder = tmp_path / str(number)
        folder.mkdir()
        alone = f"quantize: {{method: rtn, bits: 3, group_size: 32, {lowrank}}}"
        job = asked(model, folder, text=f"calibration: {{num_samples: 4, seq_len: 24}}\n{alone}\n")
        api.quantize(job)
        packed = compress.load(job.out).get_submodule(name)
        assert torch.equal(packed.dequantize(torch.float32), levels[number])


def test_the_output_is_checked_before_anything_is_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = asked(model, tmp_path, "allocate.target=5bpw")
    monkeypatch.setattr(prepare_options, "options", None)  # nothing is measured without it
    job.out.mkdir()
    with pytest.raises(OutputError, match="exists already"):
        api.quantize(job)
    with pytest.raises(OutputError, match="cannot be an output directory"):
        api.quantize(dataclasses.replace(job, out=Path("..")))
    job.out.rmdir()
    with Output(job.out), pytest.raises(OutputError, match="another run is writing"):
        api.quantize(job)
    foreign = tmp_path / "out.partial"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="not ours"):
        api.quantize(job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "out.partial"]
