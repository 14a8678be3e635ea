"""Compiled CPU kernels against decoded weights in float64: every layout, ragged shapes, any number of rows."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import trellis
from compress.kernels import dispatch, llvm
from compress.kernels.cpu import emitter
from compress.runtime.linear import PackedLinear
from helpers import problems, stored
from helpers.cpu_weights import WEIGHTS, codebook_weight, int_weight, kernel_of, ternary_weight

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]


@pytest.mark.parametrize("make, case", WEIGHTS)
def test_products(make: Any, case: Any) -> None:
    """Relative error of activations in 16 bits: measured 1e-5 to 5e-5, a tenth of what bfloat16 activations have."""
    weight = make(*case)
    kernel = kernel_of(weight)
    for count in (1, 3, 12):
        x = problems.random(count, weight.shape[1], seed=count) + 0.5  # not centred: an error in zeros would add up
        y = kernel(x)
        expected = stored.product(x, weight)
        assert y.shape == (count, weight.shape[0])
        assert (y - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("make, case", WEIGHTS)
def test_a_row_does_not_depend_on_others(make: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the number of threads: to the bit."""
    monkeypatch.setattr(emitter, "THREAD", 1)
    weight = make(*case)
    kernel = kernel_of(weight)
    x = problems.random(13, weight.shape[1])
    whole = kernel(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        apart = [kernel(row[None]) for row in x]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole, torch.cat(apart))


@pytest.mark.parametrize("make, case", WEIGHTS)
def test_outputs_are_rounded_once(make: Any, case: Any) -> None:
    """To bfloat16 and float16 as to float32, from the same activations; any shape in front; nothing past the end."""
    weight = make(*case)
    product = kernel_of(weight)
    for dtype in (torch.bfloat16, torch.float16):
        x = problems.random(5, weight.shape[1]).to(dtype)
        expected = product(x.float()).to(dtype)
        assert torch.equal(product(x), expected)
        assert torch.equal(product(x[None, :3]), expected[None, :3])


def test_layers_notice_that_tensors_changed() -> None:
    """In place, replaced, or copied with the layer: what was prepared for the old ones is not used for the new."""
    first, second = (int_weight((64, 256), 4, 64, False) for _ in range(2))
    second = stored.random_weight("int", second.params, second.shape, seed=1)
    layer, other = PackedLinear.from_packed(first), PackedLinear.from_packed(second)
    x = problems.random(2, 256).bfloat16()
    one, two = layer(x), other(x)
    assert not torch.equal(one, two)
    copied = copy.deepcopy(layer)
    loaded = copy.deepcopy(copied)
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(layer(x), two) and torch.equal(copied(x), one) and torch.equal(loaded(x), one)
    copied.load_state_dict(other.state_dict())
    assert torch.equal(copied(x), two) and torch.equal(loaded(x), one)
    loaded.scales.data = other.scales.data * 2
    assert not torch.equal(loaded(x), one)


def test_indices_of_a_damaged_file_stay_inside() -> None:
    """Orders and outlier columns that point nowhere are read as the last column."""
    settings = {"bits": (4,), "vector_dim": 2, "tile_words": 16, "permuted": True, "outliers": 2}
    weight = codebook_weight((32, 256), settings)
    kernel = kernel_of(weight)
    x = problems.random(2, 256)
    results = []
    for wrong in (255, 32000):
        weight.tensors["order"][7], weight.tensors["outlier_index"][0] = wrong, wrong
        results.append(kernel(x))
    assert torch.equal(*results)


def test_extreme_activations() -> None:
    """Large next to small ones, zeros only, and values that are not finite, which must not pass unseen."""
    weight = int_weight((32, 256), 4, 64, False)
    kernel = kernel_of(weight)
    x = problems.random(4, 256)
    x[0, :64] *= 1e30
    x[1] = 0
    x[2, 200] = float("inf")
    x[3, 3] = float("nan")
    y = kernel(x)
    expected = stored.product(x[:1], weight)
    assert (y[0] - expected).norm() < 1e-4 * expected.norm()
    assert not y[1].any() and y[2:].isnan().all()


@pytest.mark.parametrize("code", ["3inst", "mcg", "hyb"])
def test_other_codes_of_trellises_decode(code: str) -> None:
    assert dispatch.supported("cpu", "trellis", trellis.Params(2, 16, 64, code), (64, 64)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_takes_the_kernel_for_few_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitter, "MOST_FLOAT16", emitter.MOST)
    monkeypatch.setattr(emitter, "widens", lambda dtype: False)
    weight = int_weight((64, 256), 4, 64, False)
    layer = PackedLinear.from_packed(weight, torch.ones(64, dtype=dtype))
    kernel = kernel_of(weight)
    x = (problems.random(emitter.MOST, 256) + 0.5).to(dtype)
    few = kernel(x).to(dtype) + layer.bias
    assert torch.equal(layer(x), few)
    many = torch.cat([x, x])
    assert torch.equal(layer(many), F.linear(many, layer.dequantize(dtype)) + layer.bias)
    assert layer(x[:0]).shape == (0, 64)
    exact = stored.product(x, weight) + 1
    assert (few.double() - exact).norm() < 4e-3 * exact.norm()


def test_float32_activations_are_not_rounded() -> None:
    weight = int_weight((64, 256), 4, 64, False)
    layer, x = PackedLinear.from_packed(weight), problems.random(1, 256)
    assert torch.equal(layer(x), F.linear(x, layer.dequantize(torch.float32)))


def test_gradients_pass_where_a_kernel_has_none() -> None:
    weight = int_weight((64, 256), 4, 64, False)
    layer, x = PackedLinear.from_packed(weight), problems.random(2, 256).bfloat16().requires_grad_()
    layer(x).sum().backward()
    expected = layer.dequantize(torch.float32).sum(0).expand(2, -1)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("count", [1, emitter.MOST_OF_INTEGERS + 1])
def test_a_layer_compiles_whole(count: int) -> None:
    """One graph, the same numbers; the operator's fake and gradient agree with what it does."""
    weight = int_weight((64, 256), 4, 64, False)
    layer = PackedLinear.from_packed(weight, torch.ones(64, dtype=torch.bfloat16))
    x = problems.random(count, 256).bfloat16()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    tensors = [weight.tensors[name] for name in layer._matrix]
    torch.library.opcheck(
        dispatch.linear,
        (x.float().requires_grad_(), tensors, layer._described),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    assert gradient_of(compiled, x).equal(gradient_of(layer, x))


def test_the_operator_prepares_a_weight_once_and_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, prepared = int_weight((64, 256), 4, 64, False), []
    prepare = dispatch.prepare
    monkeypatch.setattr(dispatch, "prepare", lambda *given: prepared.append(given) or prepare(*given))
    layer, x, held = PackedLinear.from_packed(weight), problems.random(1, 256).bfloat16(), len(dispatch._WEIGHTS)
    given = [getattr(layer, name) for name in layer._matrix], layer._described
    first, again = dispatch.linear(x, *given), dispatch.linear(x, *given)
    assert torch.equal(first, again) and torch.equal(first, layer(x))
    assert len(prepared) == 2 and len(dispatch._WEIGHTS) == held + 1  # by the operator, and by the layer
    prepared.clear()
    del weight, layer, given
    assert len(dispatch._WEIGHTS) == held


def gradient_of(layer: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_without_a_compiler_everything_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "available", lambda: False)
    weight = int_weight((64, 256), 4, 64, False)
    layer, x = PackedLinear.from_packed(weight), problems.random(1, 256).bfloat16()
    assert torch.equal(layer(x), F.linear(x, layer.dequantize(torch.bfloat16)))


@pytest.mark.parametrize("make, case", [WEIGHTS[i].values for i in (0, 11, 25, 29)])
def test_the_defaults_of_torch_do_not_matter(make: Any, case: Any) -> None:
    """Memory that compiled code writes is of the type and on the device that it expects."""
    weight = make(*case)
    kernel = kernel_of(weight)
    x = problems.random(3, weight.shape[1])
    expected = kernel(x)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            assert torch.equal(kernel(x), expected)
    finally:
        torch.set_default_dtype(before)
    with torch.device("meta"):
        assert torch.equal(kernel(x), expected)


def test_stored_tensors_that_a_kernel_cannot_read() -> None:
    """Strided ones, and those of another device, are left to PyTorch: a kernel would read what is not there."""
    weight = int_weight((64, 256), 4, 64, False)
    layer, x = PackedLinear.from_packed(weight), problems.random(2, 256).bfloat16()
    layer.scales = torch.nn.Parameter(layer.scales.detach().T.contiguous().T, requires_grad=False)
    assert torch.equal(layer(x), F.linear(x, layer.dequantize(torch.bfloat16)))
    assert not dispatch._readable(layer.scales, x) and not dispatch._readable(layer.words4.to("meta"), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tracing_records_the_product() -> None:
    layer = PackedLinear.from_packed(int_weight((64, 256), 4, 64, False))
    x, other = (problems.random(2, 256, seed=seed).bfloat16() for seed in (1, 2))
    traced = torch.jit.trace(layer, x)
    assert torch.equal(traced(other), layer(other))


def test_threads_are_waited_for() -> None:
    """What fails in one range does not leave others at work on memory that goes away."""
    done: list[int] = []

    def work(first: int, last: int) -> None:
        if first == 0:
            raise KeyboardInterrupt
        time.sleep(0.1)
        done.append(first)

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            llvm.parallel(work, 3)
    finally:
        torch.set_num_threads(threads)
    assert sorted(done) == [1, 2]


@pytest.mark.parametrize("make, case", [weight.values for weight in WEIGHTS if weight.values[0] is ternary_weight][::2])
def test_ternary_products_without_some_instructions(make: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are exact whatever instructions there are: what another processor computes is the same to the bit."""
    weight = make(*case)
    x = problems.random(5, weight.shape[1])
    expected = kernel_of(weight)(x)
    monkeypatch.setattr(llvm, "features", frozenset)
    monkeypatch.setattr(llvm, "function", lambda kind, *settings: llvm.compiled(kind(*settings)))
    assert torch.equal(kernel_of(weight)(x), expected)
