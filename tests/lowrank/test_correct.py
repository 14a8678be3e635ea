"""Corrections of quantized weights: each is the best for what rounding left, and a run carries it to the end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import api, formats, plugins, recipe
from compress.errors import RecipeError
from compress.formats import lowrank
from compress.lowrank import correct
from compress.numerics.linalg import truncate_rank
from compress.quant import gptq, rtn, trellis
from compress.run import plan, sizes, verify, write
from compress.types import (
    NO_TRANSFORMS,
    Correction,
    Fisher,
    LayerPlan,
    LinearSpec,
    LowRank,
    PackedWeight,
    Quantized,
    Stats,
    Stored,
)
from helpers import problems
from helpers.pico import save_pico
from helpers.runs import GPTQ, RTN, contents, job, report_of, stored_tensors

SHAPE = (48, 64)


def problem(tokens: int = 200) -> tuple[Tensor, Stats]:
    return problems.random(*SHAPE), problems.stats(problems.inputs(tokens, SHAPE[1]))


def rounder(bits: int = 2, stats: Stats | None = None) -> correct.Callable[[Tensor], Quantized]:
    """GPTQ, or round to nearest without statistics."""
    if stats is None:
        return lambda target: rtn.quantize(target, None, rtn.Config(bits, 32))
    return lambda target: gptq.quantize(target, stats, gptq.Config(bits, 32))


def loss(weight: Tensor, packed: PackedWeight, stats: Stats | None) -> float:
    return problems.loss(weight, problems.decoded(packed), torch.eye(SHAPE[1]) if stats is None else stats.hessian)


def plain(weight: Tensor, stats: Stats) -> tuple[PackedWeight, float]:
    packed = rounder(2, stats)(weight).weight
    return packed, loss(weight, packed, stats)


@pytest.mark.parametrize("tokens", [200, 20])
@pytest.mark.parametrize("rank", [1, 6, 48])
def test_after_the_rounding_the_best_of_that_rank_is_added(rank: int, tokens: int) -> None:
    weight, stats = problem(tokens)
    base, _ = plain(weight, stats)
    found = correct.quantize_with_part(weight, stats, Correction(rank, start="rounding"), rounder(2, stats), 0).weight
    assert {key: found.tensors[key] for key in base.tensors}.keys() == base.tensors.keys()
    assert all(torch.equal(found.tensors[key], tensor) for key, tensor in base.tensors.items())
    best = truncate_rank(weight - problems.decoded(base).float(), stats.hessian, rank).losses
    assert loss(weight, found, stats) == pytest.approx(best[rank].item(), rel=1e-3, abs=1e-5 * best[0].item())
    assert found.stored.lowrank == LowRank(rank) and found.nbytes == base.nbytes + 2 * rank * sum(SHAPE)


def test_before_the_rounding_is_better_still() -> None:
    weight, stats = problem()
    _, before = plain(weight, stats)
    after, first = (
        loss(weight, correct.quantize_with_part(weight, stats, settings, rounder(2, stats), 0).weight, stats)
        for settings in (Correction(6, start="rounding"), Correction(6))
    )
    assert first < 0.95 * after < 0.95 * before, (first, after, before)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("start", ["weight", "rounding"])
def test_factors_of_few_bits(bits: int, start: str) -> None:
    weight, stats = problem()
    _, before = plain(weight, stats)
    wide = Correction(6, start=start)  # type: ignore[arg-type]
    narrow = dataclasses.replace(wide, bits=bits)
    losses = [
        loss(weight, correct.quantize_with_part(weight, stats, settings, rounder(2, stats), 0).weight, stats)
        for settings in (wide, narrow)
    ]
    assert losses[1] < before
    if bits == 8 or start == "rounding":
        assert losses[1] < 1.2 * losses[0], (losses, before)


def test_a_is_solved_for_again_when_b_is_rounded() -> None:
    weight, _ = problem()  # in the plain metric the rounding of A costs the same either way
    stored = LowRank(6, 4)
    part = correct.split(weight, correct.Metric(), stored, 0)
    found = truncate_rank(weight, None, 6)
    size = found.right.norm(dim=1, keepdim=True).sqrt()
    apart = lowrank.decode(lowrank.pack(found.right / size, found.left.T * size, stored), stored, SHAPE, torch.float32)
    assert (weight - part.product).norm() < (weight - apart).norm()
    norms = [lowrank.factor(n, part.tensors, stored, s, torch.float32).norm(dim=1) for n, s in (("a", 64), ("b", 48))]
    assert ((norms[0] / norms[1] - 1).abs() < 0.2).all()


def test_more_iterations_are_never_worse() -> None:
    weight, stats = problem()
    for start in ("weight", "rounding"):
        for bits in (16, 4):
            losses = []
            for iterations in (1, 2, 5):
                settings = Correction(4, bits, iterations=iterations, start=start)  # type: ignore[arg-type]
                packed = correct.quantize_with_part(weight, stats, settings, rounder(2, stats), 0).weight
                losses.append(loss(weight, packed, stats))
            assert losses[2] <= losses[1] <= losses[0], (start, bits, losses)


def test_the_loop_of_lq_lora_in_the_plain_metric() -> None:
    """Q = round(W - L), L = SVD(W - Q), the best of the tries, by torch's own SVD."""
    weight, _ = problem()
    settings = Correction(5, iterations=6, metric="none")
    found = loss(weight, correct.quantize_with_part(weight, None, settings, rounder(2), 0).weight, None)
    part, best = torch.zeros_like(weight), float("inf")
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    part = left[:, :5] * values[:5] @ right[:5]
    for _ in range(6):
        rounded = problems.decoded(rounder(2)(weight - part).weight).float()
        left, values, right = torch.linalg.svd(weight - rounded, full_matrices=False)
        part = left[:, :5] * values[:5] @ right[:5]
        best = min(best, (weight - rounded - part).square().sum().item())
    assert found == pytest.approx(best, rel=0.03)
    assert found < 0.9 * loss(weight, rounder(2)(weight).weight, None)


def test_metrics_of_the_baselines() -> None:
    weight, stats = problem()
    losses = {}
    for metric in ("inputs", "sizes", "none"):
        settings = Correction(6, start="rounding", metric=metric)  # type: ignore[arg-type]
        packed = correct.quantize_with_part(weight, stats, settings, rounder(2, stats), 0).weight
        losses[metric] = loss(weight, packed, stats)
    assert losses["inputs"] < 0.9 * min(losses["sizes"], losses["none"]), losses


def test_without_a_token_the_metric_is_the_plain_one() -> None:
    weight, stats = problem()
    unseen = Stats(torch.zeros_like(stats.hessian), 0)
    settings = Correction(6)
    packed = [correct.quantize_with_part(weight, given, settings, rounder(2), 0).weight for given in (None, unseen)]
    assert torch.equal(packed[0].tensors["lowrank_a"], packed[1].tensors["lowrank_a"])


def test_zeros_are_corrected_to_zeros() -> None:
    _, stats = problem()
    packed = correct.quantize_with_part(torch.zeros(SHAPE), stats, Correction(3, 4), rounder(2, stats), 0).weight
    assert not problems.decoded(packed).any()


def test_any_format_can_be_corrected() -> None:
    weight, stats = problem()
    config = trellis.Config(state_bits=6)

    def quantize(target: Tensor) -> Quantized:
        return trellis.quantize(target, stats, config, 0)

    before = loss(weight, quantize(weight).weight, stats)
    packed = correct.quantize_with_part(weight, stats, Correction(8), quantize, 0).weight
    assert packed.format == "trellis" and loss(weight, packed, stats) < 0.8 * before


@pytest.mark.slow
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("setup", [RTN.set("bits=3"), GPTQ.set("bits=2")], ids=["rtn", "gptq"])
def test_a_run_from_the_recipe_to_a_loaded_model(setup: object, rotated: bool, tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model")
    out = tmp_path / "out"
    part = ("lowrank={rank: 4, bits: 8}", f"incoherence={str(rotated).lower()}", "calibration.num_samples=4")
    sized = setup.set(*part, "calibration.seq_len=32")  # type: ignore[attr-defined]
    api.quantize(job(model, sized, out))
    report = report_of(out)
    assert report["layers"][0]["lowrank"] == {"rank": 4, "bits": 8, "group_size": 64, "dtype": "float16"}
    assert all("+ rank 4 in 8 bits" in group["format"] for group in report["plan"])
    assert sum(row["nbytes"] for row in report["layers"]) == report["nbytes"]["quantized linears"]
    verify.verify(out)
    api.quantize(job(model, setup.set(*part[1:], "calibration.seq_len=32"), tmp_path / "plain"))  # type: ignore[attr-defined]
    errors = [row["output_error"] for row in report["layers"]]
    others = [row["output_error"] for row in report_of(tmp_path / "plain")["layers"]]
    if others[0] is not None:
        assert sum(errors) < 0.9 * sum(others)
    tensors = stored_tensors(out)
    row = report["layers"][0]
    assert tensors[f"{row['name']}.lowrank_a"].shape == (4, row["shape"][1])
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        packed = loaded(tokens).logits
        torch.testing.assert_close(packed, loaded.dequantize()(tokens).logits, rtol=1e-4, atol=1e-4)


def test_an_interrupted_run_goes_on_from_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_pico("llama", tmp_path / "model")
    setup = GPTQ.set("bits=2", "lowrank={rank: 4, bits: 4}", "incoherence=true")
    api.quantize(job(model, setup, tmp_path / "whole"))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(write, "finish", stop)
        api.quantize(job(model, setup, tmp_path / "out"))
    result = api.quantize(job(model, setup, tmp_path / "out"))
    assert result["resumed_blocks"] == result["blocks"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_recipe_keys() -> None:
    base = recipe.load("int4", ["lowrank={rank: 8, bits: 4}", 'rules=[{match: "*.down_proj", lowrank: {rank: 32}}]'])
    assert base.quantize.lowrank == Correction(8, 4)
    assert base.rules[0].scheme is not None and base.rules[0].scheme.lowrank == Correction(32, 4)
    off = recipe.load("int4", ["lowrank={rank: 8}", 'rules=[{match: "*.down_proj", lowrank: null}]'])
    assert off.rules[0].scheme is not None and off.rules[0].scheme.lowrank is None
    assert recipe.fingerprint(base) != recipe.fingerprint(recipe.load("int4"))
    with pytest.raises(RecipeError, match="lowrank: bits 3 of a low-rank factor is not 16, 8 or 4"):
        recipe.load("int4", ["lowrank={bits: 3}"])
    with pytest.raises(RecipeError, match="unknown key 'ranc'; known: rank"):
        recipe.load("int4", ["lowrank={ranc: 3}"])


def test_a_rank_above_the_dimension_is_one_clear_line(tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model")
    with pytest.raises(RecipeError, match=r"q_proj \(\d+ x \d+\): rank 999 is above \d+, the smaller side"):
        api.quantize(job(model, GPTQ.set("lowrank={rank: 999}"), tmp_path / "out"))


def test_statistics_are_collected_for_a_correction_alone() -> None:
    spec = LinearSpec("a.b", SHAPE, torch.float32, 0, "a.b")
    chosen = recipe.load("int8", ["lowrank={rank: 4}"]).quantize
    params = plugins.load("quant", "rtn").plan_params(chosen.config, SHAPE)
    stored = Stored("int", params)
    layer = LayerPlan(spec, chosen, stored, formats.nbytes(stored, SHAPE))
    assert list(sizes.readers([layer])) == ["a.b"]
    blind = dataclasses.replace(chosen, lowrank=Correction(4, metric="none"))
    assert not sizes.readers([dataclasses.replace(layer, scheme=blind)])


# ---------------------------------------------------------------- weights for rows and columns


def fisher_of(seed: int = 5) -> Fisher:
    return Fisher(problems.random(SHAPE[0], seed=seed).exp(), problems.random(SHAPE[1], seed=seed + 1).exp())


@pytest.mark.parametrize("rank", [3, 48])
def test_weights_for_rows_and_columns_are_a_weighted_svd(rank: int) -> None:
    weight, fisher = problems.random(*SHAPE), fisher_of()
    part = correct.split(weight, correct.metric(None, "fisher", fisher=fisher), LowRank(rank), 0)
    rows, columns = fisher.rows.double(), fisher.columns.double()
    weighted = rows[:, None] * weight.double() * columns
    left, values, right = torch.linalg.svd(weighted, full_matrices=False)
    expected = (left[:, :rank] * values[:rank] @ right[:rank]) / rows[:, None] / columns
    assert (part.product - expected).norm() < 2e-3 * weight.norm()


def test_a_rounded_factor_is_solved_for_in_the_weighted_metric() -> None:
    weight, fisher = problems.random(*SHAPE), fisher_of()
    measure, stored = correct.metric(None, "fisher", fisher=fisher), LowRank(6, 4)
    part = correct.split(weight, measure, stored, 0)
    b = lowrank.factor("b", part.tensors, stored, SHAPE[0], torch.float64)
    a = torch.linalg.lstsq(
        fisher.rows.double()[:, None] * b.T, fisher.rows.double()[:, None] * weight.double()
    ).solution
    found = lowrank.factor("a", part.tensors, stored, SHAPE[1], torch.float64)
    expected = lowrank.factor("a", lowrank.pack_factor("a", a.float(), stored), stored, SHAPE[1], torch.float64)
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_the_loop_keeps_the_best_of_the_weighted_error() -> None:
    weight, fisher = problems.random(*SHAPE), fisher_of()
    measure = correct.metric(None, "fisher", fisher=fisher)

    def weighted(metric: str) -> float:
        settings = Correction(5, iterations=5, metric=metric)  # type: ignore[arg-type]
        packed = correct.quantize_with_part(weight, fisher, settings, rounder(2), 0).weight
        return measure.loss(weight - problems.decoded(packed).float())

    assert weighted("fisher") < 0.8 * weighted("none")


def test_without_gradients_the_metric_is_the_plain_one() -> None:
    weight = problems.random(*SHAPE)
    plain, blind = (
        correct.quantize_with_part(weight, None, Correction(4, metric=metric), rounder(2), 0).weight  # type: ignore[arg-type]
        for metric in ("none", "fisher")
    )
    assert all(torch.equal(plain.tensors[key], tensor) for key, tensor in blind.tensors.items())


def test_a_rotated_basis_has_no_gradients() -> None:
    with pytest.raises(RecipeError, match="q_proj: metric fisher is not known in a rotated basis"):
        spec = LinearSpec("q_proj", SHAPE, torch.float32, 0, "x")
        chosen = recipe.load("int8", ["lowrank={rank: 4, metric: fisher}", "incoherence=true"]).quantize
        plan._layer(spec, chosen, plugins.load("quant", "rtn"), NO_TRANSFORMS)
