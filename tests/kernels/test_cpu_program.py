"""Compiled pieces of a decode step against float64, and tables of calls on several threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.calls import ActivationRows, CompiledCall
from compress.kernels.cpu.attention_tables import CACHE, table
from compress.kernels.cpu.copy_rows import CopyRows
from compress.kernels.cpu.gate import Add, Gate
from compress.kernels.cpu.norm import Norm, NormKind
from compress.kernels.cpu.program import Program
from compress.kernels.cpu.rotary import HeadKinds, SplitHeads
from compress.runtime.linear import PackedLinear
from helpers import problems
from helpers.cpu_weights import int_weight

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]
TYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1 / 128}  # rounded once


def assert_rounded(got: Tensor, expected: Tensor) -> None:
    """Every number is that of float64, rounded once to its type, up to errors of float32."""
    error = (got.double() - expected).abs()
    assert bool((error <= TYPES[got.dtype] * expected.abs() + 3e-6).all())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("width", [5, 64, 200])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(dtype: torch.dtype, rows: int, width: int, offset: bool, centred: bool) -> None:
    x, weight, bias = problems.random(rows, width).to(dtype), problems.random(width), problems.random(width, seed=2)
    kind = NormKind(1e-3, weight.dtype, offset, centred, bias.dtype if centred else None)
    out = torch.zeros_like(x)
    llvm.function(Norm, kind, dtype)(*(each.data_ptr() for each in (x, weight, bias, out)), rows, width)
    wide = x.double() - x.double().mean(-1, keepdim=True) * centred
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight.double() + offset)
    assert_rounded(out, expected + bias.double() * centred)


CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("rows", [1, 3])
def test_gates(dtype: torch.dtype, name: str, rows: int) -> None:
    x = (problems.random(rows, 2 * 71) * 6).to(dtype)
    x[0, :4] = torch.tensor([0.0, -80.0, 80.0, -300.0])
    out = torch.zeros(rows, 71, dtype=dtype)
    up = x.data_ptr() + 71 * x.element_size()
    llvm.function(Gate, name, dtype)(x.data_ptr(), up, out.data_ptr(), rows, 71, 142)
    assert_rounded(out, CURVES[name](x[:, :71].double()) * x[:, 71:].double())


def test_a_gate_passes_nan_on() -> None:
    x, out = torch.full((1, 4), torch.nan), torch.zeros(1, 2)
    llvm.function(Gate, "silu", torch.float32)(x.data_ptr(), x.data_ptr() + 8, out.data_ptr(), 1, 2, 4)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("step", [0, 37])
def test_sums_and_copies(dtype: torch.dtype, step: int) -> None:
    x, y = problems.random(3, 50).to(dtype), problems.random(3, 37, seed=1)
    got = x.clone()
    llvm.function(Add, dtype, y.dtype, 0.5)(got.data_ptr(), y.data_ptr(), 3, 37, 50, step)
    assert torch.equal(got[:, 37:], x[:, 37:])
    assert_rounded(got[:, :37], x[:, :37].double() + 0.5 * (y if step else y[:1]).double())
    narrow = y.to(dtype)
    llvm.function(CopyRows, dtype)(narrow.data_ptr(), got.data_ptr(), 3, 37, 50)
    assert torch.equal(got[:, :37], narrow) and torch.equal(got[:, 37:], x[:, 37:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("width", "turned"), [(32, 32), (48, 20), (16, 0)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads(dtype: torch.dtype, width: int, turned: int, has_norms: bool) -> None:
    rows, queries, stored, room, tokens = 3, 4, 2, 9, 6
    x = problems.random(rows, (queries + 2 * stored) * width).to(dtype)
    angles = problems.random(rows, max(turned, 2))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [problems.random(width, seed=seed) for seed in (3, 4)]
    buffer = torch.zeros(2, rows, stored, room, width, dtype=dtype)
    strides = buffer.stride()[1:4]
    cache = table((buffer[0].data_ptr(), buffer[1].data_ptr(), *strides, *strides, 0, 0))
    state = table((tokens, 1, rows, 0))
    kind = NormKind(1e-3, weights[0].dtype) if has_norms else None
    q = torch.zeros(rows, queries, width, dtype=dtype)
    function = llvm.function(SplitHeads, HeadKinds(queries, stored, width, turned, kind, kind), dtype)
    places = [each.data_ptr() for each in (state, cache, x, cos, sin, *weights, q)]
    function(*places, rows, x.shape[1], cos.shape[1])
    assert len(cache) == len(CACHE)
    heads = x.double().view(rows, -1, width)

    def turn(part: Tensor, weight: Tensor) -> Tensor:
        if has_norms:
            part = part / (part.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
        if not turned:
            return part
        first, rest = part[..., :turned], part[..., turned:]
        swapped = torch.cat([-first[..., turned // 2 :], first[..., : turned // 2]], -1)
        return torch.cat([first * cos[:, None].double() + swapped * sin[:, None].double(), rest], -1)

    assert_rounded(q, turn(heads[:, :queries], weights[0]))
    assert_rounded(buffer[0, :, :, tokens - 1], turn(heads[:, queries : queries + stored], weights[1]))
    assert torch.equal(buffer[1, :, :, tokens - 1].double(), heads[:, queries + stored :])
    buffer[:, :, :, tokens - 1] = 0
    assert not buffer.any()


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_programs_give_what_layers_give(rows: int, threads: int) -> None:
    """Two layers, one after the other, often: with any number of threads the bits are those of one."""
    first, second = (PackedLinear.from_packed(int_weight(shape, 4, 64, False)) for shape in ((320, 256), (96, 320)))
    x = problems.random(rows, 256).bfloat16()
    with torch.no_grad():
        middle = first(x)
        expected = second(middle)
    kept, calls = list[Tensor](), list[CompiledCall]()

    def take(nbytes: int) -> int:
        kept.append(torch.zeros(nbytes, dtype=torch.uint8))
        return kept[-1].data_ptr()

    inner, out = torch.zeros_like(middle), torch.zeros_like(expected)
    for layer, source, target in ((first, x, inner), (second, inner, out)):
        kernel = layer._weight.prepared(x, layer._parameters)
        assert kernel is not None
        width = target.shape[1]
        made = kernel.calls(ActivationRows(rows, x.dtype, source.data_ptr(), target.data_ptr(), width), take)
        assert made is not None
        calls += [call._replace(least=1) for call in made]
    program = Program(calls, threads)
    for _ in range(20):
        inner.zero_(), out.zero_()
        program.run()
        assert torch.equal(out, expected)


def test_an_empty_program_does_nothing() -> None:
    Program([]).run()
