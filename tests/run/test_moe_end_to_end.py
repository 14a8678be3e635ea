"""A mixture of experts from its recipe to a model that prunes: allocated, quantized, killed, resumed, loaded."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import api, recipe
from compress.allocate import decide, metrics, session, table
from compress.cli import tables
from compress.errors import RecipeError
from compress.progress import silent
from compress.run import prepare, sizes, verify
from compress.runtime.experts import Experts
from compress.types import ExpertPruning
from helpers.expert_counts import counting
from helpers.pico import VOCAB_SIZE, save_pico
from helpers.runs import GPTQ, Setup, cli, command, contents, interrupt, one_line, report_of, stored_tensors
from helpers.runs import job as job_of

FEW = ("calibration.num_samples=8", "calibration.seq_len=32")
OPTIONS = "allocate.options=[{bits: 2}, {bits: 4}, {bits: 8}]"
MOE = Setup("moe2.5bit", (OPTIONS, "allocate.target=4.6bpw", "experts.layers=1", "sweeps=0", "clip_search=false", *FEW))
WIDTHS = {"hidden_size": 128, "intermediate_size": 128}  # 2 bits are padded to 128 columns
EXPERTS = 4  # of a block
OPEN, FIXED = 12, 4  # linears of experts, with three options each, and of attention in a block

NAMES = [f"model.layers.{block}.mlp.experts" for block in (0, 1)]


class Made(NamedTuple):
    out: Path
    folder: Path  # measurements
    report: dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("mixtral", tmp_path_factory.mktemp("mixtral"), changes=WIDTHS)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("moe")
    asked = dataclasses.replace(job_of(model, MOE, folder / "out"), measurements=folder / "measured")
    return Made(folder / "out", folder / "measured", api.quantize(asked))


def test_the_budget_is_kept_and_spent(made: Made) -> None:
    found = table.load(made.folder)
    units, chosen = found.units, made.report["allocation"]["units"]
    assert made.report["bpw"] == pytest.approx(made.report["allocation"]["bpw"]) and made.report["bpw"] <= 4.6
    entries = {unit.name: {entry.option: entry for entry in unit.entries} for unit in units}
    assert len(units) == 2 * EXPERTS and set(chosen) == set(entries)
    spent = sum(entries[name][option].nbytes for name, option in chosen.items())
    left = made.report["allocation"]["budget"] - spent
    dearer = [
        other.nbytes - entries[name][option].nbytes
        for name, option in chosen.items()
        for other in entries[name].values()
        if other.damage["expert_squares"] < entries[name][option].damage["expert_squares"]
    ]
    assert left >= 0 and min(dearer) > left
    for row in made.report["layers"]:
        unit = next((u for u in units if row["name"] in u.members), None)
        assert row["params"]["bits"] == (int(chosen[unit.name].removeprefix("bits=")) if unit else 4)


def test_the_report_shows_what_each_expert_got(made: Made) -> None:
    rows = made.report["experts"]
    assert list(rows) == NAMES and json.loads((made.out / "report.json").read_text())["experts"] == rows
    bits_of = {row["name"]: 8 * row["nbytes"] / (row["shape"][0] * row["shape"][1]) for row in made.report["layers"]}
    for name, row in rows.items():
        assert row["tokens"] == 8 * 32 and sum(row["counts"]) == 2 * row["tokens"] and len(row["bits"]) == EXPERTS
        assert row["share"] == [count / (2 * row["tokens"]) for count in row["counts"]]
        for number, bits in enumerate(row["bits"]):  # three linears of one size each
            own = [bits_of[f"{name}.{number}.{part}"] for part in ("gate_proj", "up_proj", "down_proj")]
            assert bits == pytest.approx(sum(own) / 3)
    pruned = min(NAMES, key=lambda name: rows[name]["harm"])
    for name in NAMES:
        is_pruned = name == pruned
        assert [rows[name][key] is not None for key in ("threshold", "protected", "taken")] == 3 * [is_pruned]
        assert (rows[name]["dropped"] > 0.1) == is_pruned
    lines = tables.result_lines(made.report, "out")
    share = rows[pruned]["dropped"] / 2
    assert any(line.startswith(f"experts pruned in 1 of 2 blocks that have any: {share:.1%}") for line in lines)


def test_what_is_loaded_prunes_as_the_report_says(made: Made) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(made.out)
    for name, row in made.report["experts"].items():
        module = loaded.get_submodule(name)
        assert isinstance(module, Experts)
        found = dataclasses.asdict(module.pruning) if module.pruning is not None else {}
        assert found == {key: row[key] for key in ("threshold", "protected", "taken") if row["threshold"] is not None}
    tokens = torch.randint(VOCAB_SIZE, (2, 64), generator=torch.Generator().manual_seed(0))
    with counting(loaded) as pairs:
        loaded(input_ids=tokens)
    for name, row in made.report["experts"].items():
        assert (pairs[name].dropped > 0) == (row["threshold"] is not None)
    verify.verify(made.out)


def test_pruning_changes_no_weight(model: Path, made: Made, tmp_path: Path) -> None:
    asked = dataclasses.replace(job_of(model, MOE, tmp_path / "out"), measurements=made.folder)
    asked = decide.decide(asked, silent)
    plain = dataclasses.replace(asked, recipe=dataclasses.replace(asked.recipe, experts=None))
    report = api.quantize(plain)
    assert "experts" not in report and "experts" not in json.loads((plain.out / "config.json").read_text())
    mine, other = stored_tensors(made.out), stored_tensors(plain.out)
    assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def test_modules_with_experts_that_are_not_packed_are_not_pruned(model: Path, tmp_path: Path) -> None:
    setup = GPTQ.set("experts.prune=true", 'ignore=["*.0.mlp.experts.*"]')
    rows = api.quantize(job_of(model, setup, tmp_path / "out"))["experts"]
    assert [rows[name]["threshold"] is not None for name in NAMES] == [False, True]
    assert rows[NAMES[0]]["bits"] == [None] * EXPERTS


# ---------------------------------------------------------------- killed


def test_a_resumed_run_measures_nothing_twice(model: Path, made: Made, tmp_path: Path) -> None:
    """Killed in block 1: its routing alone is measured again, and all bytes are the same."""
    words = [*command(model, MOE, tmp_path / "out"), "--measurements", str(made.folder)]
    in_block_1 = interrupt("compress.quant.gptq", "quantize_rows", OPEN + FIXED + 4)
    assert cli(*words, prepare=in_block_1).code == -signal.SIGKILL
    result = cli(*words, prepare=interrupt("compress.calib.expert_routing", "measure", 2))
    assert result.code == 0 and "experts pruned in 1 of 2 blocks" in result.out, result.err
    assert report_of(tmp_path / "out")["resumed_blocks"] == 1
    assert contents(tmp_path / "out") == contents(made.out)
    assert report_of(tmp_path / "out")["experts"] == made.report["experts"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        interrupt("compress.quant.gptq", "quantize_rows", 3 * OPEN + FIXED + 5),  # in block 1
        interrupt("compress.storage.workdir", "write_text", 3),  # run.json, block 0, and before block 1 is recorded
    ],
    ids=["in a block", "before the last record"],
)
def test_resumed_measurements_are_the_same(where: str, model: Path, made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "measured"
    words = ["allocate", "--measure", *command(model, MOE, folder)[1:]]
    assert cli(*words, prepare=where).code == -signal.SIGKILL
    assert (folder / "levels/00000.json").exists() and not (folder / "levels/00001.json").exists()
    result = cli(*words)
    assert result.code == 0 and "expert, expert_squares" in result.out, result.err
    for file in ("levels/00001.json", "levels/00001.safetensors"):
        assert (folder / file).read_bytes() == (made.folder / file).read_bytes(), file


# ---------------------------------------------------------------- the table


def test_the_table_has_all_damages_of_all_units(model: Path, made: Made, tmp_path: Path) -> None:
    """Here attention is open, too, one option keeps the weights, and every change is measured in a pass of its own."""
    setup = MOE.set("rules=[]", "allocate.method=knapsack", "allocate.estimator=hessian")
    setup = setup.set("allocate.options=[{bits: 2}, {bits: 4}, {bits: 8}, {keep: true}]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "split_passes", lambda sizes, allowed: [[key] for key in sizes])
        with session.open_measurements(job_of(model, setup, tmp_path / "out"), silent) as opened:
            found = metrics.table(opened, frozenset({"expert", "expert_squares", "share", "routing"}))
    before = {unit.name: unit for unit in table.load(made.folder).units}
    for unit in found.units:
        damages = {entry.option: entry.damage for entry in unit.entries}
        assert damages["keep"]["expert"] == damages["keep"]["expert_squares"] == 0
        for name in ("expert", "expert_squares"):
            assert damages["bits=2"][name] > damages["bits=4"][name] > damages["bits=8"][name] > 0
        for entry in unit.entries[:3]:
            norms, squares = entry.damage["expert"], entry.damage["expert_squares"]
            if unit.is_expert:
                assert norms**2 <= 8 * 32 * squares * (1 + 1e-9)
            else:
                assert squares == pytest.approx(8 * 32 * entry.damage["hessian"])
                assert norms == pytest.approx((8 * 32 * squares) ** 0.5)
    for unit in found.units:
        if unit.is_expert and unit.block == 0:  # behind the same inputs: what is measured is the same
            old = {entry.option: entry.damage for entry in before[unit.name].entries}
            for entry in unit.entries[:3]:
                assert entry.damage["expert_squares"] == pytest.approx(old[entry.option]["expert_squares"], rel=1e-5)
    for name in ("share", "routing"):
        for block in (0, 1):
            values = [unit.scores[name] for unit in found.units if unit.is_expert and unit.block == block]
            assert len(values) == EXPERTS and sum(values) == pytest.approx(1)


# ---------------------------------------------------------------- recipes


def test_the_recipe_says_it_and_keeps_it(tmp_path: Path) -> None:
    plain = GPTQ.load()
    assert plain.experts is None and plain.pruning is None and "experts" not in recipe.dump(plain)
    asked = GPTQ.set("experts.prune=true", "experts.protected=0.1").load()
    assert asked.experts == asked.pruning == ExpertPruning(True, 10, 0.1)
    assert GPTQ.set("experts.layers=3").load().pruning is None
    assert recipe.fingerprint(asked) != recipe.fingerprint(plain)
    path = tmp_path / "again.yaml"
    path.write_text(recipe.dump(asked))
    assert recipe.load(str(path)) == asked


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("experts=true", "must be keys with values|keys with values"),
        ("experts.prune=1", "prune must be true or false"),
        ("experts.prunes=true", "did you mean 'prune'"),
        ("experts.layers=-1", "layers -1 is negative"),
        ("experts.protected=1", "protected 1.0 is not a share"),
        ("allocate.method=experts", "chooses for whole experts; set allocate.units to expert, not fused"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as found:
        GPTQ.set(override).load()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("setup", "kind", "message"),
    [
        (GPTQ, "llama", "prunes experts, but quantizes none of this model"),
        (GPTQ.set('ignore=["*.experts.*"]'), "mixtral", "prunes experts, but quantizes none"),
    ],
)
def test_pruning_that_cannot_be(
    setup: Setup, kind: str, message: str, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    words = command(pico_dir(kind), setup.set("experts.prune=true"), tmp_path / "out")
    result = cli(*words)
    assert result.code == 1 and message in one_line(result) and not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match=message):
        prepare.prepare(job_of(pico_dir(kind), setup.set("experts.prune=true"), tmp_path / "out"))


def test_experts_are_allocated_where_there_are_any(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    asked = job_of(pico_dir("llama"), MOE, tmp_path / "out")
    with pytest.raises(RecipeError, match="there are no experts among the units"):
        decide.decide(
            dataclasses.replace(
                asked, recipe=MOE.set("rules=[]", "allocate.target=9bpw", "experts.prune=false").load()
            ),
            silent,
        )
