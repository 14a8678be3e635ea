"""The compiled Hadamard transform on a CPU: the numbers of compress/numerics/hadamard.py, signs included."""

from __future__ import annotations

import pytest
import torch

from compress.formats import transforms
from compress.formats.transforms import Diagonal, pack_diagonal, pack_signs, unpack_signs
from compress.kernels import dispatch, llvm
from compress.kernels.cpu import hadamard
from compress.numerics import hadamard as reference
from compress.types import WeightTransforms
from helpers import problems

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")

SIZES = [16, 32, 128, 448, 576, 1024, 2816, 4096]  # Sylvester, and tables of both kinds of Paley
HARTLEY = 16 * 59  # no table of +-1 is known


@pytest.mark.parametrize("size", [*SIZES, HARTLEY])
def test_transform_is_that_of_the_package(size: int) -> None:
    x = problems.random(3, size)
    assert hadamard.supports(x)
    expected = reference.transform(x.double())
    torch.testing.assert_close(hadamard.transform(x).double(), expected, rtol=0, atol=5e-6)
    for dtype, error in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        found, exact = hadamard.transform(x.to(dtype)), reference.transform(x.to(dtype).double())
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=error, atol=1e-6)


@pytest.mark.parametrize("size", [*SIZES, HARTLEY])
def test_the_transpose_is_that_of_the_package(size: int) -> None:
    x = problems.random(3, size)
    expected = reference.transpose(x.double())
    torch.testing.assert_close(hadamard.transform(x, is_transposed=True).double(), expected, rtol=0, atol=5e-6)
    if reference.order(size).kind == "paley1":  # whose table is not symmetric
        assert (expected - reference.transform(x.double())).abs().max() > 0.1


@pytest.mark.parametrize("name", ["signs", "channel_scale16", "channel_scale8"])
@pytest.mark.parametrize("size", [64, 320])
def test_diagonals_before_and_after(size: int, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, size, generator=generator)
    assert x[0].numel() // size < hadamard.MANY_ROWS <= x.numel() // size
    before, after = (Diagonal(name, pack_diagonal(name, torch.randn(size, generator=generator))) for _ in range(2))
    exact = reference.transform(x.double() * before.values(size, torch.float64))
    both = exact * after.values(size, torch.float64)
    torch.testing.assert_close(hadamard.transform(x, before).double(), exact, rtol=0, atol=5e-6)
    torch.testing.assert_close(hadamard.transform(x, before, after).double(), both, rtol=0, atol=1e-5)
    assert torch.equal(hadamard.transform(x[0], before, after), hadamard.transform(x, before, after)[0])
    half = hadamard.transform(x.bfloat16(), before, after).double()
    exact = reference.transform(x.bfloat16().double() * before.values(size, torch.float64))
    torch.testing.assert_close(half, exact * after.values(size, torch.float64), rtol=2**-8, atol=1e-5)


def test_any_shape_strides_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = problems.random(7, 256)
    expected = hadamard.transform(x)
    assert torch.equal(hadamard.transform(x[3]), expected[3])
    assert hadamard.transform(x[:0]).shape == (0, 256)
    wide = torch.stack([x, x + 1], -1)
    assert torch.equal(hadamard.transform(wide[..., 0]), expected)
    monkeypatch.setattr(hadamard, "THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(hadamard.transform(x), expected)


@pytest.mark.parametrize(("size", "dtype"), [(36, torch.float32), (8, torch.bfloat16), (64, torch.float64)])
def test_other_sizes_and_types_are_left_to_the_package(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, size, dtype=dtype)
    assert not hadamard.supports(x)
    assert torch.equal(hadamard.transform(x, is_transposed=True), reference.transpose(x))
    signs = pack_signs(torch.rand(size) < 0.5)
    assert torch.equal(
        hadamard.transform(x, Diagonal("signs", signs)), reference.transform(x * unpack_signs(signs, size, dtype))
    )


@pytest.mark.parametrize("name", ["signs", "channel_scale16", "channel_scale8"])
def test_layers_take_it_where_no_gradient_passes(name: str) -> None:
    ops = WeightTransforms(input=(name, "hadamard"), output=("hadamard", name))
    around = [Diagonal(name, pack_diagonal(name, problems.random(64, seed=seed))) for seed in (5, 6)]
    stored = {f"in_{name}": around[0].stored, f"out_{name}": around[1].stored}
    x = problems.random(2, 64)
    found = dispatch.before(x, ops, stored)
    assert torch.equal(found, hadamard.transform(x, around[0]))
    torch.testing.assert_close(found, transforms.apply_input(x, ops, stored))
    assert torch.equal(dispatch.after(x, ops, stored), hadamard.transform(x, after=around[1]))
    learned = x.clone().requires_grad_()
    dispatch.after(dispatch.before(learned, ops, stored), ops, stored).sum().backward()
    assert learned.grad is not None and learned.grad.abs().sum() > 0


def test_gradients_reach_scales_of_layers() -> None:
    """Inputs without a gradient, as those of the first linear of a block that is trained."""
    ops = WeightTransforms(input=("channel_scale16", "hadamard"), output=("hadamard", "channel_scale16"))
    stored = {f"{side}_channel_scale16": problems.random(64, seed=i).half() for i, side in enumerate(("in", "out"))}
    for tensor in stored.values():
        tensor.requires_grad_()
    dispatch.after(dispatch.before(problems.random(2, 64), ops, stored), ops, stored).square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in stored.values())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing_records_the_transform() -> None:
    ops = WeightTransforms(input=("signs", "hadamard"), output=())
    signs = {"in_signs": pack_signs(torch.arange(64) % 3 == 0)}
    x, other = problems.random(2, 64), problems.random(2, 64, seed=1)
    traced = torch.jit.trace(lambda x: dispatch.before(x, ops, signs), x)
    torch.testing.assert_close(traced(other), dispatch.before(other, ops, signs))
