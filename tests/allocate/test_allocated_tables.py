"""Embeddings and output head among the options of an allocation: damages, bytes, resumption, what is told."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import api, recipe
from compress.allocate import (
    cost,
    decide,
    decision,
    forecast,
    metrics,
    prepare_options,
    session,
    table,
)
from compress.allocate.joint_kl import JointKL, TokenSeconds
from compress.allocate.sensitivity import Measurements
from compress.allocate.table import TABLE_KL
from compress.allocate.variants import Database
from compress.errors import BudgetError, RecipeError
from compress.progress import silent
from compress.recipe.schema import Target
from compress.run import tables
from compress.run.job import Job
from helpers.runs import TEXT, cli, interrupt, report_of, stored_tensors

RECIPE = """
calibration: {num_samples: 4, seq_len: 24}
quantize: {method: rtn, bits: 4, group_size: 32}
allocate:
  method: knapsack
  samples: 2
  target: 5bpw
  estimator: kl_one_at_a_time
  options: [{bits: 2}, {bits: 3}, {bits: 6}]
  tables:
    - {bits: 8, group_size: -1}
    - {bits: 3, group_size: 32}
    - {method: gptq, bits: 4, group_size: 32}
    - {keep: true}
"""
MODELS = ("llama", "llama_tied")
NAMES = {"llama": ["model.embed_tokens", "lm_head"], "llama_tied": ["model.embed_tokens"]}


def asked(model: Path, folder: Path, *overrides: str, text: str = RECIPE) -> Job:
    path = folder / "mine.yaml"
    path.write_text(text)
    return Job(str(model), recipe.load(str(path), overrides), folder / "out", calib=str(TEXT))


@pytest.fixture(scope="module", params=MODELS)
def measured(
    request: pytest.FixtureRequest, pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Measurements]]:
    """The name of a model, its directory, and its opened measurements."""
    directory = pico_dir(request.param)
    with session.open_measurements(asked(directory, tmp_path_factory.mktemp("table")), silent) as store:
        yield request.param, directory, store


def kl_of(directory: Path, tokens: Tensor, weights: Mapping[str, Tensor]) -> float:
    """KL of the model in float64 with these weights in it, nats a token, over the whole vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        before = model(input_ids=tokens).logits.log_softmax(-1)
        for name, weight in weights.items():
            model.get_submodule(name).weight.copy_(weight)
        after = model(input_ids=tokens).logits.log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


def variants(store: Measurements, directory: Path, numbers: Mapping[str, str]) -> dict[str, Tensor]:
    """The decoded weight of each linear or table at its option."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    _, weights = store.evaluators.source()
    return {name: weights.weight(name, at, model.get_submodule(name).weight.detach()) for name, at in numbers.items()}


def test_units_have_exact_bytes_and_only_options_they_can_have(measured: tuple[str, Path, Measurements]) -> None:
    name, _, store = measured
    found = metrics.table(store, frozenset())
    units = [unit for unit in found.units if unit.is_table]
    assert [unit.name for unit in units] == NAMES[name] and found.units[-1].is_table
    packed = store.database.measurements_of(2)
    for unit in units:
        offered = {entry.option for entry in unit.entries}
        needs_inputs = name == "llama_tied" or unit.name == "lm_head"
        assert ("table gptq" in offered) == needs_inputs and len(offered) == 3 + needs_inputs
        for entry in unit.entries:
            number = found.options.index(entry.option)
            kept = entry.option == "table keep"
            assert entry.nbytes == (4 * unit.numel if kept else packed[unit.name][str(number)]["nbytes"])
    assert table.load(store.database.folder) == found


def test_a_damage_is_the_divergence_of_the_model_with_one_table_changed(
    measured: tuple[str, Path, Measurements],
) -> None:
    """Of a tied table at both ends; the same under the name of every estimator."""
    name, directory, store = measured
    found = metrics.table(store, frozenset({"kl_one_at_a_time", "kl_shares"}))
    tokens = store.calibration.tokens[:2]
    for unit in found.units[-len(NAMES[name]) :]:
        for entry in unit.entries:
            numbers = {} if entry.option == "table keep" else {unit.name: str(found.options.index(entry.option))}
            expected = kl_of(directory, tokens, variants(store, directory, numbers))
            assert entry.damage["kl_one_at_a_time"] == pytest.approx(expected, rel=1e-3, abs=1e-9)
            assert len(set(entry.damage.values())) == 1 and {TABLE_KL, "kl_shares"} <= set(entry.damage)


def test_joint_choices_are_divergences_of_whole_models(measured: tuple[str, Path, Measurements]) -> None:
    name, directory, store = measured
    found = metrics.table(store, frozenset())
    evaluator = metrics.evaluator(store, found)
    asked_for = [tuple((i + k) % len(unit.entries) for i, unit in enumerate(found.units)) for k in range(4)]
    kls = evaluator.divergence(asked_for, range(2))
    for choice, kl in zip(asked_for, kls, strict=True):
        weights = variants(store, directory, evaluator.assignment(choice))
        assert kl == pytest.approx(kl_of(directory, store.calibration.tokens[:2], weights), rel=1e-3)
    assert evaluator.divergence(asked_for[2:3], range(2)) == kls[2:3], "alone as beside others"
    shares = evaluator.shares(asked_for[0])
    at = found.units[-1].entries[asked_for[0][-1]]
    assert shares[-1] == at.damage[TABLE_KL] and len(shares) == len(found.units)


def test_passes_are_counted_as_they_are_computed(measured: tuple[str, Path, Measurements]) -> None:
    """A head of its own takes one pass for all its options, embeddings one for each."""
    name, _, store = measured
    metrics.table(store, frozenset())
    work = cost.count_passes(store.opened, "weight", store.samples)
    assert work.block_tokens / 2 == pytest.approx(store.read_unfinished(TABLE_KL)["forwards"])
    assert work.block_tokens / (2 * 2 * 24) == (3 if name == "llama_tied" else 2 + 1)


@pytest.mark.parametrize("bpw", [3.5, 5.0, 6.0])
def test_budgets_are_kept(bpw: float, measured: tuple[str, Path, Measurements]) -> None:
    _, _, store = measured
    found, problem, result = decision.solve(store, store.opened.allocation, Target(f"{bpw}bpw"))
    assert problem.nbytes(result.choice) <= problem.budget == int(bpw * found.numel / 8)
    assert found.numel == sum(unit.numel for unit in found.units) and found.bpw(result.choice) <= bpw


@pytest.mark.slow
@pytest.mark.parametrize("target", ["3.4bpw", "5.5bpw", "60KiB"])
def test_the_checkpoint_has_the_bytes_of_the_choice(
    target: str, measured: tuple[str, Path, Measurements], tmp_path: Path
) -> None:
    name, directory, store = measured
    job = dataclasses.replace(asked(directory, tmp_path, f"allocate.target={target}"), measurements=tmp_path / "m")
    shutil.copytree(store.database.folder, tmp_path / "m", ignore=shutil.ignore_patterns("candidates-*"))
    decided = decide.decide(job, silent)
    facts = decided.allocation
    assert facts is not None and facts["with tables"]
    result = api.quantize(job)
    on_disk = sum(tensor.nbytes for tensor in stored_tensors(job.out).values())
    assert on_disk == result["nbytes"]["total"] == facts["nbytes"]
    assert on_disk <= 60 << 10 if target == "60KiB" else facts["bpw"] <= float(target[:3])
    written = recipe.load(str(job.out / "recipe.yaml"))
    assert written == dataclasses.replace(decided.recipe, name=written.name) and written.allocate is None
    rows = {row["name"]: row for row in result["layers"]}
    for unit in NAMES[name]:
        option = report_of(job.out)["allocation"]["units"][unit]
        assert (unit in rows) == (option != "table keep")
    sections = (written.embeddings, written.head)
    assert (written.embeddings is None) == (name == "llama_tied" or NAMES[name][0] not in rows), sections


@pytest.mark.slow
def test_a_killed_measurement_goes_on(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed behind the last block, and between two tables, it ends with the same files."""

    def contents(folder: Path) -> dict[str, bytes]:
        paths = sorted([*(folder / "levels").iterdir(), *folder.glob("measured-*.json")])
        return {path.name: path.read_bytes() for path in paths}

    def run(folder: str) -> None:
        with session.open_measurements(dataclasses.replace(job, measurements=tmp_path / folder), silent) as store:
            metrics.table(store, frozenset())

    job, divergence, made = asked(pico_dir("llama"), tmp_path), JointKL.divergence, []
    run("whole")
    with monkeypatch.context() as patched:
        patched.setattr(tables, "quantize_each", lambda *_: iter([].pop()))
        with pytest.raises(IndexError):
            run("killed")
    assert Database(tmp_path / "killed").finished() == 2

    def killed(self: JointKL, assignments: Any, samples: Any) -> list[float]:
        made.append({name for assignment in assignments for name in assignment})
        if len(made) == 2:
            raise KeyboardInterrupt
        return divergence(self, assignments, samples)

    monkeypatch.setattr(JointKL, "divergence", killed)
    with pytest.raises(KeyboardInterrupt):
        run("killed")
    assert not json.loads((tmp_path / "killed" / f"measured-{TABLE_KL}.json").read_text())["complete"]
    run("killed")
    assert made == [{"model.embed_tokens"}, {"lm_head"}, {"lm_head"}]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_table_that_is_ignored_or_cannot_be_packed_is_no_unit(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = asked(pico_dir("llama"), tmp_path, "ignore=[lm_head]")
    opened = prepare_options.options(job)
    assert [each.spec.name for each in opened.tables] == ["model.embed_tokens"]
    assert opened.notes == ("lm_head stays as it is: kept by the recipe",)
    plain = prepare_options.options(asked(pico_dir("llama"), tmp_path, "allocate.tables=[]"))
    sizes, without = (table.assemble(each, {}, {}, 0, {}) for each in (opened, plain))
    keep, dense = sizes.units[-1].entries[-1], 4 * 264 * 64
    assert keep.nbytes == dense and sizes.other_nbytes == without.other_nbytes - dense
    monkeypatch.setattr("compress.model.towers._why_refused", lambda *_: "an odd thing")
    assert prepare_options.options(job).tables == ()


def test_options_that_suit_no_table_are_refused(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    text = "allocate.tables=[{method: gptq, bits: 4}, {keep: true}]"
    with pytest.raises(
        RecipeError, match="no option of tables is one for model.embed_tokens: embeddings: gptq works by"
    ):
        prepare_options.options(asked(pico_dir("llama"), tmp_path, text))
    text = "allocate.tables=[{method: nf, bits: 4}, {bits: 8}]"
    (tied,) = prepare_options.options(asked(pico_dir("llama_tied"), tmp_path, text)).tables
    assert list(tied.layers) == [1]


def test_auto_takes_only_what_can_be_added_to_the_kl_of_tables(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    job = asked(pico_dir("llama"), tmp_path, "allocate.estimator=auto")
    opened = prepare_options.options(job)
    known = TokenSeconds(1.0, 1.0)
    assert {each.estimator for each in cost.rank_estimators(opened, known, 32)} == {"kl_one_at_a_time", "kl_shares"}
    found, said = cost.best_estimator(opened, known, 32, 0.0)
    assert (found.estimator, found.samples) == ("kl_shares", 8) and "does not fit" in said
    plain = prepare_options.options(asked(pico_dir("llama"), tmp_path, "allocate.tables=[]"))
    cheaper = cost.count_passes(plain, "kl_shares", 2)
    assert cost.count_passes(opened, "kl_shares", 2).block_tokens - cheaper.block_tokens == 3 * 2 * 2 * 24
    short = dataclasses.replace(job, budget=1e-9)
    with pytest.raises(BudgetError, match="more than --budget"):
        decide.measure(dataclasses.replace(asked(pico_dir("llama"), tmp_path), budget=1e-9), silent)
    with pytest.raises(BudgetError, match="least that tables can be allocated by"):
        decide.measure(short, silent)


@pytest.mark.parametrize(
    "settings",
    [
        "{method: knapsack, estimator: kl_shares, rounds: 1}",
        "{method: knapsack, estimator: hessian, scale: noise}",
        "{method: adaquant}",
        "{method: evolve, estimator: kl_shares, generations: 1, offspring: 2, survivors: [1], tokens: [24]}",
        "{method: evolve, start: uniform, surrogate: false, generations: 1, survivors: [1], tokens: [24]}",
    ],
)
def test_every_allocator_that_adds_up_or_measures_takes_tables(
    settings: str, measured: tuple[str, Path, Measurements], tmp_path: Path
) -> None:
    name, directory, store = measured
    text = RECIPE.replace("  method: knapsack\n", "").replace("  estimator: kl_one_at_a_time\n", "")
    text = text.replace("allocate:\n", "allocate:\n" + "".join(f"  {x}\n" for x in _lines(settings)))
    found = decision.decide_target(store, asked(directory, tmp_path, text=text).recipe.allocate, Target("5bpw"))  # type: ignore[arg-type]
    assert found["bpw"] <= 5 and set(NAMES[name]) <= set(found["units"])


def _lines(settings: str) -> list[str]:
    import yaml

    return [f"{key}: {json.dumps(value)}" for key, value in yaml.safe_load(settings).items()]


def test_in_a_rotated_basis_both_tables_are_units(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    job = asked(pico_dir("llama_tied"), tmp_path, "transform=[{method: rotate}]", "allocate.target=4bpw")
    decided = decide.decide(job, silent)
    assert decided.allocation is not None and decided.allocation["units"].keys() >= set(NAMES["llama"])
    result = api.quantize(job)
    on_disk = sum(tensor.nbytes for tensor in stored_tensors(job.out).values())
    assert on_disk == result["nbytes"]["total"] == decided.allocation["nbytes"]
    with session.open_measurements(job, silent) as store:
        found = metrics.table(store, frozenset())
        kept = [unit.entries[-1].damage[TABLE_KL] for unit in found.units if unit.is_table]
        nearly = [unit.entries[-2].damage[TABLE_KL] for unit in found.units if unit.is_table]
    assert kept == [0, 0] and all(0 < kl < 1e-2 for kl in nearly), "at 8 bits nearly the original"


@pytest.mark.slow
def test_a_cache_shares_the_target_with_tables(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    text = RECIPE + "kv_cache: {method: kivi, bits: 2, sink: 2, residual_length: 16, flush: 8}\n"
    overrides = ("allocate.target=90KiB", "allocate.context=64", "allocate.cache_bits=[2, 4]", "calibration.seq_len=96")
    job = asked(pico_dir("llama"), tmp_path, *overrides, text=text)
    facts = decide.decide(job, silent).allocation
    assert facts is not None and facts["nbytes"] <= 90 << 10 and "lm_head" in facts["units"]
    assert api.quantize(job)["nbytes"]["total"] == facts["nbytes"] - facts["cache"]["nbytes"]


@pytest.mark.slow
def test_the_command_line_says_what_a_target_counts(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    model, out, file = pico_dir("llama"), tmp_path / "out", tmp_path / "mine.yaml"
    file.write_text(RECIPE)
    words = [str(model), "--recipe", str(file), "--calib", str(TEXT), "--measurements", str(tmp_path / "m")]
    planned = cli("plan", *words)
    assert "and 4 options of model.embed_tokens and lm_head on 96 calibration tokens" in planned.out
    assert "target 5bpw of linears, embeddings and head together" in planned.out
    killed = interrupt("compress.run.tables", "_chunk", 3)
    assert cli("quantize", *words, "--out", str(out), prepare=killed).code == -9
    assert cli("quantize", *words, "--out", str(out)).code == 0
    again = cli("plan", *words)
    assert "lm_head" in again.out and "model.embed_tokens" in again.out
    shown = cli("allocate", *words, "--points", "2", "--text", str(TEXT))
    assert "knapsack at 5bpw of linears, embeddings and head together: " in shown.out
    assert "  model.embed_tokens: table " in shown.out and "embeddings and head at their largest option" in shown.out
    assert cli("verify", str(out)).code == 0


def test_a_plan_without_measurements_lists_the_tables(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    found = forecast.forecast(asked(pico_dir("llama_tied"), tmp_path), silent)
    assert isinstance(found, forecast.Unmeasured)
    assert (found.tables, found.table_options, found.linears) == (("model.embed_tokens",), 4, 14)
    assert [row["option"] for row in found.uniform] == ["bits=2", "bits=3", "bits=6"]
