"""Inputs coded by PVQ: values against the formula, tokens by themselves, bits, and what recipes and checkpoints say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress import api, formats, recipe
from compress.errors import CheckpointError, RecipeError
from compress.formats import stored
from compress.papers.formats import pvq as pvq_format
from compress.papers.inputs import pvq
from compress.papers.quant.pvq import gain_levels, search
from compress.run.job import Job
from compress.runtime import activation_quant
from compress.types import Activations
from helpers.runs import TEXT

PVQ4 = Activations(4, dtype="pvq")
X = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))


def test_values_are_those_of_the_formula() -> None:
    """scale * level * y / ||y||, the level nearest to the projection on y."""
    pulses = pvq.count_pulses(4)
    levels = gain_levels(pvq_format.Params(32, pulses, 4), 96).double()
    for token, coded in zip(X, pvq.round_inputs(X, PVQ4), strict=True):
        scale = token.double().square().mean().mul(32).sqrt().float().bfloat16().double()
        for start in range(0, 96, 32):
            vector = token[start : start + 32]
            point = search(vector[None], pulses)[0].double()
            assert point.abs().sum() == pulses and torch.equal(point, point.round())
            length = (vector.double() * point).sum() / point.norm() / scale
            level = min(levels.tolist(), key=lambda each: abs(each - length.item()))
            expected = scale * level * point / point.norm()
            torch.testing.assert_close(coded[start : start + 32].double(), expected, rtol=1e-4, atol=1e-5)


def test_no_token_is_no_error() -> None:
    """As an expert that is given none has it."""
    assert pvq.round_inputs(torch.empty(0, 96), PVQ4).shape == (0, 96)


@pytest.mark.parametrize("bits", range(2, 7))
def test_codes_have_the_bits_of_the_settings(bits: int) -> None:
    pulses = pvq.count_pulses(bits)
    field = [pvq.GAIN_BITS + pvq_format.rank_bits(pvq.VECTOR_DIM, k) for k in (pulses, pulses + 1)]
    assert field[0] <= bits * pvq.VECTOR_DIM < field[1]


def test_more_bits_than_are_counted_are_refused() -> None:
    with pytest.raises(ValueError, match="bits 8: pvq has 2 to 6"):
        stored.check_inputs(Activations(8, dtype="pvq"))


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_gaussian_inputs_lose_less_than_on_the_best_integers(bits: int) -> None:
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    losses = [
        (activation_quant.fake_quantize(x, Activations(bits, clip=clip)) - x).square().mean()
        for clip in (1.0, 0.9, 0.75, 0.6)
    ]
    loss = (activation_quant.fake_quantize(x, Activations(bits, dtype="pvq")) - x).square().mean()
    assert loss < 0.65 * min(losses)


def test_a_token_depends_on_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pvq.round_inputs(X, PVQ4)
    monkeypatch.setattr(pvq, "CHUNK", 4)
    assert torch.equal(pvq.round_inputs(X.flip(0), PVQ4).flip(0), whole)
    for index in range(5):
        assert torch.equal(pvq.round_inputs(X[index], PVQ4), whole[index])
    assert torch.equal(pvq.round_inputs(X.view(5, 1, 96), PVQ4)[:, 0], whole)
    torch.testing.assert_close(pvq.round_inputs(8 * X, PVQ4), 8 * whole)


def test_odd_widths_and_extreme_tokens() -> None:
    x = torch.stack([torch.zeros(40), torch.full((40,), 1e30), torch.full((40,), 1e-30), torch.eye(40)[3]])
    coded = activation_quant.fake_quantize(x, PVQ4)
    assert torch.isfinite(coded).all() and not coded[0].any()
    assert (coded[1] - x[1]).double().norm() < 0.2 * x[1].double().norm()
    broken = torch.cat([x[:1], torch.full((1, 40), torch.nan)])
    assert activation_quant.fake_quantize(broken, PVQ4).isnan().all(1).tolist() == [False, True]


def test_gradients_go_straight_through() -> None:
    x = X.clone().requires_grad_()
    activation_quant.fake_quantize(x, PVQ4).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(X))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{dtype: pvqs, bits: 4}", "unknown dtype of activations 'pvqs'; known: int, fp8, .*pvq; did you mean 'pvq'"),
        ("{dtype: pvq}", "bits 8: pvq has 2 to 6"),
        ("{dtype: pvq, bits: 4, clip: 0.9}", "pvq codes whole tokens; remove clip"),
        ("{dtype: pvq, bits: 4, scale: tensor}", "pvq codes whole tokens"),
    ],
)
def test_recipes_are_refused_in_a_line(given: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"quantize: {{method: rtn, activations: {given}}}\n")
    with pytest.raises(RecipeError, match=reason):
        recipe.load(str(tmp_path / "mine.yaml"))


def test_a_checkpoint_keeps_them(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "calibration: {num_samples: 2, seq_len: 24}\n"
        "quantize: {method: pvq, bpw: 4.5, activations: {dtype: pvq, bits: 5}}\n"
    )
    out = tmp_path / "out"
    api.quantize(Job(str(pico_dir("llama")), recipe.load(str(tmp_path / "mine.yaml")), out, calib=str(TEXT)))
    model = api.load(out)
    linears = [m for m in model.modules() if getattr(m, "activations", None) is not None]
    assert linears and all(m.activations == Activations(5, dtype="pvq") for m in linears)
    tokens = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(1))
    assert torch.isfinite(model(tokens).logits).all()


def test_a_table_with_an_unknown_type_is_refused() -> None:
    table = {"format": "dense", "params": {}, "activations": {"bits": 4, "dtype": "../pvq"}}
    with pytest.raises(CheckpointError, match="unknown dtype of activations"):
        stored.from_dict(table, "here")


def test_columns_of_such_linears_are_not_cut() -> None:
    with pytest.raises(ValueError, match="inputs are quantized with the scale of a whole token"):
        formats._check_input_cut(PVQ4, range(0, 32), 96)
