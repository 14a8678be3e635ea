"""Linears of other classes than nn.Linear: found by what they compute, packed, loaded, and given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from compress import api
from compress.formats import dense
from compress.runtime import linears
from compress.runtime.linear import PackedLinear
from compress.types import PackedWeight, Stored
from helpers.pico import of_type, pico_tokenizer, round_to_nearest
from helpers.runs import GPTQ, RTN, Setup, job, stored_tensors

SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}


class Own(nn.Linear):
    """A linear with a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:
        out = input @ self.weight.T
        return out if self.bias is None else out + self.bias


class Scaled(nn.Linear):
    """No linear: it doubles."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Router(nn.Linear):
    """No linear: it gives two tensors."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(input)
        return out, out.softmax(-1)  # type: ignore[return-value]


@pytest.mark.parametrize("format", ["int", "dense"])
def test_a_decoded_linear_shares_nothing_with_the_packed_one(format: str) -> None:
    """It is trained, or merged into, while the packed one waits."""
    linear = nn.Linear(32, 48)
    kept = PackedWeight(Stored("dense", dense.Params("float32")), {"values": linear.weight.detach().clone()}, (48, 32))
    weight = kept if format == "dense" else round_to_nearest(linear.weight, 8, 16)
    packed = PackedLinear.from_packed(weight, linear.bias)
    decoded, before = packed.to_linear(torch.float32), {k: v.clone() for k, v in packed.state_dict().items()}
    with torch.no_grad():
        decoded.weight += 1
        decoded.bias += 1
    assert all(torch.equal(packed.state_dict()[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("rows", "columns"), [(48, 32), (32, 32)])
def test_linears_are_told_by_what_they_compute(rows: int, columns: int, device: str) -> None:
    with torch.device(device):
        modules = {
            "plain": nn.Linear(columns, rows),
            "own": Own(columns, rows, bias=False),
            "turned": Conv1D(rows, columns),
            "scaled": Scaled(columns, rows),
            "router": Router(columns, rows),
            "table": nn.Embedding(rows, columns),
            "norm": nn.LayerNorm(rows),
        }
    found = {name for name, module in modules.items() if linears.shape_of(module) == (rows, columns)}
    assert found == {"plain", "own", "turned"}
    assert {name for name, module in modules.items() if linears.shape_of(module) is not None} == found


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_takes_the_place_of_another_class(bias: bool) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    for module in (Own(32, 48, bias), Conv1D(48, 32)):
        wanted = module(x)
        linear = linears.as_linear(module)
        assert linear.weight.shape == (48, 32) and linear.weight.is_contiguous()
        torch.testing.assert_close(linear(x), wanted)
        stored = linears.as_stored(linear, "weight", linear.weight)
        assert stored.shape == module.get_parameter("weight").shape


@pytest.mark.parametrize("setup", [RTN, GPTQ], ids=["rtn", "gptq"])
def test_turned_weights_are_packed_and_given_back(setup: Setup, tmp_path: Path) -> None:
    """The packed matrix is [out, in]; what is kept, and what is dequantized, has the checkpoint's layout."""
    model = of_type("gpt2", SIZES)
    model.save_pretrained(tmp_path / "model")
    pico_tokenizer().save_pretrained(tmp_path / "model")
    setup = setup.set('ignore=["transformer.h.1.mlp.c_fc"]')
    report = api.quantize(job(tmp_path / "model", setup, tmp_path / "out"))
    assert len(report["layers"]) == 7
    shapes = {layer["name"].removeprefix("transformer.h.0."): tuple(layer["shape"]) for layer in report["layers"]}
    assert shapes["attn.c_attn"] == (192, 64) and shapes["mlp.c_proj"] == (64, 256)
    original = stored_tensors(tmp_path / "model")
    kept = stored_tensors(tmp_path / "out")["transformer.h.1.mlp.c_fc.weight"]
    assert torch.equal(kept, original["transformer.h.1.mlp.c_fc.weight"])
    tokens = torch.arange(40)[None]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert isinstance(loaded.get_submodule("transformer.h.0.attn.c_attn"), PackedLinear)
    packed = loaded(tokens).logits
    wanted = model(tokens).logits
    assert (packed - wanted).norm() < 0.5 * wanted.norm()
    plain = loaded.dequantize()
    assert isinstance(plain.get_submodule("transformer.h.0.attn.c_attn"), Conv1D)
    plain.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    torch.testing.assert_close(again(tokens).logits, packed, rtol=1e-3, atol=1e-3)
