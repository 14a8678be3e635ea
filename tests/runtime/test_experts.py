"""Fused experts taken apart, packed and put together again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compress.runtime.expert_layouts import PROJECTIONS
from compress.runtime.experts import Experts, is_fused_experts, is_supported
from compress.runtime.linear import PackedLinear
from helpers.pico import PICO, round_to_nearest


def fused_experts(name: str) -> nn.Module:
    model = PICO[name]()
    model.set_experts_implementation("eager")
    return model.get_submodule("model.layers.0.mlp.experts")


def routed(fused: nn.Module, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    weights, index = torch.rand(tokens, fused.num_experts, generator=torch.Generator().manual_seed(4)).topk(2)
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(5)), index, weights


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize(("name", "tolerance"), [("mixtral", 0.0), ("qwen3_moe", 1e-6)])
def test_experts_compute_what_the_fused_module_does(name: str, tolerance: float, tokens: int) -> None:
    fused = fused_experts(name)
    inputs = routed(fused, tokens)
    expected, got = fused(*inputs), Experts.from_fused(fused)(*inputs)
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@torch.no_grad()
def test_a_token_of_another_process_is_skipped() -> None:
    fused = fused_experts("mixtral")
    x, index, weights = routed(fused, 5)
    index[2] = fused.num_experts
    experts, rest = Experts.from_fused(fused), [0, 1, 3, 4]
    got = experts(x, index, weights)
    assert not got[2].any()
    torch.testing.assert_close(got[rest], fused(x[rest], index[rest], weights[rest]))


def test_experts_are_views_under_the_names_on_disk() -> None:
    fused = fused_experts("mixtral")
    experts = Experts.from_fused(fused)
    assert list(experts) == ["0", "1", "2", "3"]
    assert {name for name, _ in experts.named_parameters()} == {
        f"{i}.{projection}.weight" for i in range(4) for projection in PROJECTIONS
    }
    storages = {fused.gate_up_proj.untyped_storage().data_ptr(), fused.down_proj.untyped_storage().data_ptr()}
    assert {p.untyped_storage().data_ptr() for p in experts.parameters()} == storages
    assert torch.equal(experts.get_parameter("3.up_proj.weight"), fused.gate_up_proj[3, 96:])


def test_experts_on_meta() -> None:
    experts = Experts.from_fused(fused_experts("qwen3_moe").to("meta"))
    assert len(experts) == 8 and all(parameter.is_meta for parameter in experts.parameters())
    assert experts.get_submodule("7.down_proj").out_features == 64


def test_fusing_again_gives_the_same_module() -> None:
    fused = fused_experts("mixtral")
    again = Experts.from_fused(fused).fuse(torch.float32)
    assert type(again) is type(fused) and is_supported(again)
    assert all(torch.equal(again.get_parameter(name), p) for name, p in fused.named_parameters())
    assert not any(parameter.is_meta for parameter in again.parameters())


@torch.no_grad()
def test_packed_experts_run_and_fuse_to_their_decoded_weights() -> None:
    fused = fused_experts("mixtral")
    experts = Experts.from_fused(fused)
    for name, linear in list(experts.named_modules()):
        if isinstance(linear, nn.Linear):
            experts.set_submodule(name, PackedLinear.from_packed(round_to_nearest(linear.weight, 4, 32)))
    again = experts.fuse(torch.float32)
    inputs = routed(fused, 9)
    assert torch.equal(experts(*inputs), again(*inputs))
    assert not torch.equal(again(*inputs), fused(*inputs))


def test_a_linear_is_no_experts_module() -> None:
    assert not is_fused_experts(nn.Linear(4, 4)) and not is_supported(nn.Linear(4, 4))
