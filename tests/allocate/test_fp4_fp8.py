"""The recipe that mixes NVFP4 and FP8: the best choice within its bytes, one type for fused linears, two exports."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compress import api
from compress.allocate import decision, session
from compress.allocate.sensitivity import Measurements
from compress.export import convert
from compress.export.source import open_source
from compress.progress import silent
from compress.recipe.schema import Target
from helpers.grids import set_tensor_scales
from helpers.pico import save_pico
from helpers.runs import Setup, job

SMALL = ("calibration.num_samples=4", "calibration.seq_len=24", "calibration.importance=none", "allocate.samples=2")
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("model") / "llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def opened(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurements]:
    out = tmp_path_factory.mktemp("table") / "out"
    with session.open_measurements(job(model, Setup("fp4-fp8", SMALL), out), silent) as measurements:
        yield measurements


@pytest.mark.parametrize("bpw", [4.6, 5.0, 5.5, 6.5, 8.0])
def test_the_choice_is_the_best_within_the_bytes(bpw: float, opened: Measurements) -> None:
    """Against all choices of one type for each of the eight groups; exactly with the exact solver."""
    settings = opened.opened.allocation
    for solver in ("hull", "milp"):
        asked = dataclasses.replace(settings, config=dataclasses.replace(settings.config, solver=solver))
        table, problem, result = decision.solve(opened, asked, Target(f"{bpw}bpw"))
        assert len(table.units) == 8 and all(len(unit.entries) == 2 for unit in table.units)
        assert problem.nbytes(result.choice) <= problem.budget <= bpw * table.numel / 8
        estimator = settings.config.estimator
        every = itertools.product((0, 1), repeat=8)
        best = min(problem.damage(choice, estimator) for choice in every if problem.nbytes(choice) <= problem.budget)
        found = problem.damage(result.choice, estimator)
        assert found >= best * (1 - 1e-9) and float(result.facts["bound"]) <= best * (1 + 1e-9)
        if solver == "milp":
            assert found == pytest.approx(best, rel=1e-5)


def test_what_is_written_has_one_type_in_fused_linears_and_is_exported(model: Path, tmp_path: Path) -> None:
    target = 5.5
    api.quantize(job(model, Setup("fp4-fp8", (*SMALL, f"allocate.target={target}bpw")), tmp_path / "packed"))
    weights = open_source(tmp_path / "packed").packed
    assert sum(8 * w.nbytes for w in weights) <= target * sum(w.shape[0] * w.shape[1] for w in weights)
    kinds: dict[str, set[str]] = {}
    for weight in weights:
        *path, part = weight.name.split(".")
        kinds.setdefault(".".join((*path, FUSED.get(part, part))), set()).add(weight.stored.params.values)
    assert len(kinds) == 8 and all(len(each) == 1 for each in kinds.values())
    assert set.union(*kinds.values()) == {"e2m1", "e4m3"}
    set_tensor_scales(tmp_path / "packed", {"": 2.0**-11})
    for target_name, key, value in (
        ("compressed-tensors", "format", "mixed-precision"),
        ("modelopt", "quant_algo", "MIXED_PRECISION"),
    ):
        convert.export(tmp_path / "packed", target_name, tmp_path / target_name)
        settings = json.loads((tmp_path / target_name / "config.json").read_text())["quantization_config"]
        assert settings[key] == value and len(settings["config_groups"]) == 2
