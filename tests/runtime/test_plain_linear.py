"""Linears that are not packed, multiplied by compiled functions."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.kernels import llvm
from compress.kernels.cpu import dense
from compress.runtime.linear import is_plain_linear
from compress.runtime.plain_linear import CompiledLinear, compile_linears

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")


def linear(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(384, 300), nn.Linear(3, 2)).to(dtype).requires_grad_(False)
    compile_linears(model)
    first = model[0]
    assert isinstance(first, CompiledLinear)
    return first


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """What was multiplied by compiled functions."""
    inputs: list[Tensor] = []
    multiply = dense.multiply

    def note(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        inputs.append(x)
        return multiply(x, weight, bias)

    monkeypatch.setattr(dense, "multiply", note)
    yield inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_outputs_are_at_least_as_near_as_those_of_torch(dtype: torch.dtype, calls: list[Tensor]) -> None:
    module = linear(dtype)
    for shape in ((384,), (1, 384), (2, 3, 384)):
        x = torch.randn(shape).to(dtype)
        y, reference = module(x), F.linear(x.double(), module.weight.double(), module.bias.double())
        theirs = F.linear(x, module.weight, module.bias)
        assert y.shape == reference.shape and y.dtype == dtype
        assert (y - reference).norm() < 1.05 * (theirs - reference).norm() + 1e-6 * reference.norm()
    assert len(calls) == 3


def test_a_slow_type_is_compiled_for_any_number_of_rows(calls: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = linear(), torch.randn(2 * dense.PIECE + 5, 384).bfloat16()
    for is_slow in (True, False):
        monkeypatch.setattr(dense.emitter, "widens", lambda dtype, is_slow=is_slow: is_slow)
        y = module(x)
        reference = F.linear(x.double(), module.weight.double(), module.bias.double())
        assert (y - reference).norm() < 3e-3 * reference.norm()
    assert len(calls) == 1


def test_whatever_is_unusual_is_left_to_torch(calls: list[Tensor]) -> None:
    module = linear()
    x = torch.randn(2, 384).bfloat16()
    module(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.detach().float()).dtype == torch.bfloat16
    module(torch.empty(0, 384, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError):
        module(x.detach()[:, :100])
    with pytest.raises(RuntimeError):
        module(x.detach().float())
    assert not calls
    module.requires_grad_()
    with torch.no_grad():
        module(x)
    assert len(calls) == 1


def test_it_stays_a_plain_linear() -> None:
    module = linear()
    assert isinstance(module, nn.Linear) and is_plain_linear(module)
    other = copy.deepcopy(module)
    assert type(other) is CompiledLinear and list(other.state_dict()) == ["weight", "bias"]

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input

    model = nn.Sequential(Own(3, 3))
    compile_linears(model)
    assert type(model[0]) is Own
