"""LoRD: the best product of its rank, the share of parameters that it is to have, and its baselines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import api, formats, recipe
from compress.errors import RecipeError
from compress.numerics.linalg import truncate_rank
from compress.papers.quant import lord
from compress.run import verify
from compress.types import Stats, Stored
from helpers import problems
from helpers.pico import save_pico
from helpers.runs import GPTQ, job, report_of

SHAPE = (48, 64)


def problem() -> tuple[Tensor, Stats]:
    return problems.random(*SHAPE), problems.stats(problems.inputs(200, SHAPE[1]))


def loss(config: lord.Config) -> float:
    weight, stats = problem()
    return problems.loss(weight, problems.decoded(lord.quantize(weight, stats, config).weight), stats.hessian)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.8, 1.0])
def test_parameters_are_the_share_that_was_asked_for(ratio: float) -> None:
    for shape in (SHAPE, (64, 48), (256, 1024)):
        params = lord.plan_params(lord.Config(ratio), shape)
        share = params.rank * sum(shape) / (shape[0] * shape[1])
        assert share <= ratio < share + sum(shape) / (shape[0] * shape[1])
        assert 8 * formats.nbytes(Stored("lowrank", params), shape) / (shape[0] * shape[1]) == pytest.approx(16 * share)
    assert lord.plan_params(lord.Config(0.001), SHAPE).rank == 1


@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_it_is_the_best_product_of_its_rank(ratio: float) -> None:
    weight, stats = problem()
    config = lord.Config(ratio, dtype="float16")
    rank = lord.plan_params(config, SHAPE).rank
    left, values, right = torch.linalg.svd(weight.double() @ torch.linalg.cholesky(stats.hessian.double()))
    whitened = values[rank:].square().sum().item()  # what SVD-LLM leaves
    assert loss(config) == pytest.approx(whitened, rel=1e-3)
    assert whitened == pytest.approx(truncate_rank(weight, stats.hessian, rank).losses[rank].item(), rel=1e-5)


def test_full_rank_loses_only_the_rounding() -> None:
    weight, stats = problem()
    whole = problems.loss(weight, torch.zeros(SHAPE), stats.hessian)
    assert loss(lord.Config(2.0, dtype="float16")) < 1e-6 * whole
    assert loss(lord.Config(2.0)) < 5e-5 * whole


def test_baselines_are_worse() -> None:
    aware, scaled, plain = (loss(lord.Config(0.5, metric=m)) for m in ("inputs", "sizes", "none"))  # type: ignore[arg-type]
    assert aware < scaled < plain


def test_the_scaling_of_asvd() -> None:
    """SVD of W S, unscaled, S the root of the inputs' root mean square; by torch's own SVD."""
    weight, stats = problem()
    config = lord.Config(0.5, metric="sizes", dtype="float16")
    rank = lord.plan_params(config, SHAPE).rank
    scale = stats.hessian.double().diagonal().sqrt().pow(0.5)
    left, values, right = torch.linalg.svd(weight.double() * scale, full_matrices=False)
    expected = left[:, :rank] * values[:rank] @ right[:rank] / scale
    found = problems.decoded(lord.quantize(weight, stats, config).weight)
    assert (found - expected).norm() < 2e-3 * expected.norm()


def test_inputs_that_no_token_reached() -> None:
    weight, stats = problem()
    found = lord.quantize(weight, Stats(torch.zeros_like(stats.hessian), 0), lord.Config(0.5))
    assert found.notes == ("no calibration token gave this input a size: plain SVD",)
    plain = lord.quantize(weight, stats, lord.Config(0.5, metric="none"))
    assert not plain.notes
    assert all(torch.equal(found.weight.tensors[k], tensor) for k, tensor in plain.weight.tensors.items())


def test_a_run_from_the_recipe_to_a_loaded_model(tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model")
    rules = 'rules=[{match: "*.down_proj", ratio: 0.5, bits: 8}]'
    setup = GPTQ.set("method=lord", "ratio=0.75", "bits=16", rules)
    api.quantize(job(model, setup, tmp_path / "out"))
    report = report_of(tmp_path / "out")
    for row in report["layers"]:
        bits, ratio = (8, 0.5) if row["name"].endswith("down_proj") else (16, 0.75)
        assert row["format"] == "lowrank" and row["params"]["bits"] == bits
        assert row["params"]["rank"] == int(ratio * row["shape"][0] * row["shape"][1] / sum(row["shape"]))
    verify.verify(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        packed = loaded(tokens).logits
        torch.testing.assert_close(packed, loaded.dequantize()(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("setting", "said"),
    [("ratio=0", "ratio 0.0 is not above 0"), ("bits=3", "bits 3 of a low-rank factor")],
)
def test_settings_that_cannot_be(setting: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe.load("int4", ["method=lord", setting])
