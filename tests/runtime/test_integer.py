"""Products of quantized inputs with integer codes, and layers and checkpoints whose inputs are quantized."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import dense
from compress.formats import int as int_format
from compress.kernels import dispatch, llvm, measured, processors
from compress.kernels.cpu import emitter
from compress.runtime import activation_quant as inputs
from compress.runtime import integer
from compress.runtime.activation_quant import quantize
from compress.runtime.linear import PackedLinear
from compress.runtime.weight_cache import CACHE, CACHE_LIMIT_NBYTES, set_cache_limit
from compress.types import Activations, PackedWeight, Stored
from helpers.cpu_weights import is_real
from helpers.pico import round_to_nearest

BF16 = torch.bfloat16
INT8, INT4, FP8 = Activations(), Activations(4), Activations(8, dtype="fp8")
STATIC = Activations(8, "tensor")
IN_SCALE = {"in_scale": torch.tensor([0.02])}
needs_bytes = pytest.mark.skipif(
    bool(integer._missing("int", processors.processor("cpu"))),
    reason="int8 products are not exact, or slow, on this CPU",
)


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    set_cache_limit(CACHE_LIMIT_NBYTES)
    yield
    set_cache_limit(CACHE_LIMIT_NBYTES)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int_weight(shape: tuple[int, int], bits: int, group: int, codes: Tensor | None = None) -> PackedWeight:
    """Random codes with scales of its own for each row and group."""
    params = int_format.params_for(bits, group, True, shape[1])
    generator = torch.Generator().manual_seed(bits)
    if codes is None:
        codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    count = 1 if group == -1 else -(-shape[1] // group)
    scales = (0.01 + torch.rand(shape[0], count, generator=generator)).half().float()
    return PackedWeight(Stored("int", params), int_format.pack(codes, scales, None, params), shape)


def layer_of(weight: PackedWeight, activations: Activations, bias: bool = False) -> PackedLinear:
    static = IN_SCALE if activations.scale == "tensor" else {}
    packed = PackedWeight(
        dataclasses.replace(weight.stored, activations=activations), {**weight.tensors, **static}, weight.shape
    )
    return PackedLinear.from_packed(packed, random(weight.shape[0], seed=1) if bias else None)


def product_of(weight: PackedWeight, activations: Activations) -> integer.IntegerProduct:
    return integer.IntegerProduct(weight.format, weight.params, weight.shape, activations)


def reference(layer: PackedLinear, x: Tensor) -> Tensor:
    """s q times the decoded weight, in float64."""
    assert layer.activations is not None
    q, scale = quantize(x, layer.activations, layer.tensors.get("in_scale"))
    return q.double() * scale.double() @ formats.decode_stored(layer.packed(), torch.float64).T


# ---------------------------------------------------------------- integers


@needs_bytes
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 17, 33])
@pytest.mark.parametrize(
    ("shape", "bits", "group"),
    [
        ((64, 128), 8, -1),
        ((37, 51), 8, -1),
        ((1, 1), 8, -1),
        ((40, 300), 8, 64),
        ((64, 128), 4, -1),
        ((37, 51), 4, -1),
        ((24, 256), 4, 64),
        ((37, 200), 4, 128),  # the last group is shorter
        ((33, 66), 4, 128),  # and the only one
        ((18, 130), 3, 64),
        ((16, 70), 5, -1),
        ((16, 70), 2, -1),
    ],
)
def test_products_are_those_of_the_integers(shape: tuple[int, int], bits: int, group: int, tokens: int) -> None:
    weight = int_weight(shape, bits, group)
    for kind in (INT8, INT4, STATIC):
        assert is_real(weight.format, weight.params, shape, kind, "cpu")
        layer, x = layer_of(weight, kind), random(tokens, shape[1])
        y, expected = layer(x), reference(layer, x)
        assert (y.dtype, y.shape, y.is_contiguous()) == (torch.float32, (tokens, shape[0]), True)
        size = (shape[1] ** 0.5) * expected.abs().amax() * 1e-7
        torch.testing.assert_close(y.double(), expected, rtol=3e-7, atol=float(size))


@needs_bytes
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize(("bits", "group"), [(8, -1), (8, 64), (4, -1), (4, 64)])
@pytest.mark.parametrize("extreme", [False, True])
def test_sums_are_exact_to_the_last_unit(bits: int, group: int, tokens: int, extreme: bool) -> None:
    """Integers come out as they are where all scales are 1, however large their products."""
    shape = (20, 192)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    x = torch.randint(-127, 128, (tokens, shape[1]), generator=generator).float()
    if extreme:
        codes[:10], codes[10:] = 0, 2**bits - 1
        x = torch.where(torch.arange(tokens)[:, None] % 2 == 0, 127.0, -127.0).expand(-1, shape[1]).contiguous()
    x[:, 0] = 127
    params = int_format.params_for(bits, group, True, shape[1])
    count = 1 if group == -1 else 3
    packed = PackedWeight(Stored("int", params), int_format.pack(codes, torch.ones(20, count), None, params), shape)
    expected = x.double() @ (codes.double() - 2 ** (bits - 1)).T
    assert torch.equal(layer_of(packed, INT8)(x).double(), expected)


@needs_bytes
@pytest.mark.parametrize(("bits", "group"), [(8, -1), (4, 64)])
def test_products_do_not_depend_on_pieces(bits: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(int_weight((150, 192), bits, group), INT8), random(11, 192)
    whole = layer(x)
    monkeypatch.setattr(integer, "PIECE", 3 * 192)  # 3 tokens, and 64 outputs
    monkeypatch.setattr(integer, "LEAST_WIDTH", 64)
    assert torch.equal(layer(x), whole)


@needs_bytes
@pytest.mark.parametrize(("bits", "group"), [(8, -1), (4, -1), (4, 64)])
def test_a_token_does_not_depend_on_the_others(bits: int, group: int) -> None:
    layer, x = layer_of(int_weight((48, 128), bits, group), INT8), random(9, 128)
    whole = layer(x)
    for size in (1, 4, 5):
        assert torch.equal(torch.cat([layer(part) for part in x.split(size)]), whole)
    assert torch.equal(layer(x.view(3, 3, 128)), whole.view(3, 3, 48))
    assert torch.equal(layer(x[0]), whole[0])
    assert layer(x[:0]).shape == (0, 48) and layer(x[:0].view(2, 0, 128)).shape == (2, 0, 48)
    spread = random(128, 9).T  # not contiguous
    assert torch.equal(layer(spread), layer(spread.contiguous()))


@needs_bytes
@pytest.mark.parametrize(("bits", "group"), [(8, -1), (4, -1), (4, 32)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_tokens_of_zeros_and_of_what_is_no_number(bits: int, group: int, bad: float) -> None:
    x = random(6, 64)
    for kind in (INT8, STATIC):
        layer = layer_of(int_weight((32, 64), bits, group), kind, bias=True)
        assert layer.bias is not None
        clean = layer(x)
        damaged = x.clone()
        damaged[2, 5], damaged[4] = bad, 0
        y = layer(damaged)
        assert y[2].isnan().all() and torch.equal(y[4], layer.bias)
        assert torch.equal(y[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@needs_bytes
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float64])
def test_outputs_are_rounded_once_to_the_type_of_the_inputs(dtype: torch.dtype) -> None:
    layer, x = layer_of(int_weight((48, 96), 8, -1), INT8), random(7, 96, dtype=dtype)
    y, expected = layer(x), reference(layer, x)
    assert y.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-5)
    else:
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), expected, rtol=0.5001 * step, atol=1e-5)


def test_wrong_width_is_an_error_and_not_another_shape() -> None:
    for bits in (4, 8):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            layer_of(int_weight((64, 64), bits, -1), INT8)(random(2, 128))


# ---------------------------------------------------------------- what a GPU is given, computed on the CPU


@pytest.mark.parametrize("tokens", [1, 16, 17, 33])
def test_the_products_of_a_gpu_are_padded(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    int_mm = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (seen.append((*a.shape, b.shape[1])), int_mm(a, b))[1])
    codes = torch.randint(-8, 8, (37, 51), dtype=torch.int8)
    q = torch.randint(-127, 128, (tokens, 51), dtype=torch.int8)
    sums = integer._on_gpu(q, integer._pad(codes, integer.PADDED_MULTIPLE))
    ((rows, columns, outputs),) = seen
    assert rows > 16 and columns % 16 == outputs % 16 == rows % 16 == 0
    assert torch.equal(sums[:, :37].double(), q.double() @ codes.double().T)


@pytest.mark.parametrize("shape", [(48, 64), (37, 51)])
@pytest.mark.parametrize("kind", [INT8, FP8], ids=inputs.describe)
def test_layers_of_a_gpu(kind: Activations, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "_missing", lambda *_: "")
    monkeypatch.setattr(integer, "_is_on_cpu", lambda _: False)
    integer._obstacle.cache_clear()
    for bits in (2, 4, 5):
        weight = int_weight(shape, bits, -1)
        name = integer.describe("int", weight.params, shape, kind, "cpu")
        assert name.partition(";")[0] == ("fp8 x fp8 matmul" if kind == FP8 else "int8 x int8 integer matmul")
        _, codes = integer.operands(product_of(weight, kind), weight.tensors)
        assert codes.dtype == (torch.float8_e4m3fn if kind == FP8 else torch.int8) and codes.shape == (48, 64)
        layer, x = layer_of(weight, kind), random(5, shape[1])
        torch.testing.assert_close(layer(x).double(), reference(layer, x), rtol=1e-5, atol=1e-4)
    integer._obstacle.cache_clear()
    weight = int_weight(shape, 6, -1)
    assert is_real("int", weight.params, shape, kind, "cpu") == (kind == INT8), "6 bits are not numbers of fp8"
    integer._obstacle.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 64])
@pytest.mark.parametrize("kind", [INT8, INT4, FP8], ids=inputs.describe)
@pytest.mark.parametrize(("bits", "shape"), [(8, (64, 128)), (4, (37, 51)), (4, (1024, 2048))])
def test_products_on_a_gpu(bits: int, shape: tuple[int, int], kind: Activations, tokens: int) -> None:
    for dtype in (torch.float32, BF16):
        layer, x = layer_of(int_weight(shape, bits, -1), kind), random(tokens, shape[1], dtype=dtype)
        expected = reference(layer, x)
        y = layer.cuda()(x.cuda()).cpu()
        bound = 1e-5 if dtype == torch.float32 else 8e-3
        assert (y.double() - expected).norm() <= bound * expected.norm()


# ---------------------------------------------------------------- which product it is


def test_what_stands_in_the_way_is_named() -> None:
    asymmetric = round_to_nearest(random(32, 128), 4, 32, symmetric=False)
    values = dense.Params("float32")
    long = (16, 1 << 17)
    cases: list[tuple[str, Any, tuple[int, int], Activations, str, str]] = [
        ("dense", values, (4, 8), INT8, "cpu", "fake: the format dense has no integer codes"),
        ("int", asymmetric.params, (32, 128), INT8, "cpu", "fake: the weight has zero points"),
        ("int", int_format.Params(4, 32, True, 16), (32, 128), INT8, "cpu", "fake: the weight has a scale for 32 col"),
        ("int", int_format.Params(4, 64, True, 16), (32, 128), INT8, "cuda", "fake: the weight has a scale for 64 col"),
        ("int", int_format.Params(8, -1, True, 16), long, INT8, "cpu", "fake: sums over 131072 columns leave int32"),
        ("int", int_format.Params(8, -1, True, 16), (4, 8), FP8, "cpu", "fake: codes of 8 bits are not numbers of fp8"),
        ("int", int_format.Params(4, -1, True, 16), (4, 8), FP8, "cpu", "fake: no fp8 matrix multiplication on cpu"),
        ("int", int_format.Params(8, -1, True, 16), (4, 8), INT8, "meta", "fake: no int matrix multiplication on meta"),
    ]
    for format, params, shape, kind, device, expected in cases:
        text = integer.describe(format, params, shape, kind, device)
        assert text.startswith(expected), text
        assert not is_real(format, params, shape, kind, device)


@needs_bytes
def test_the_real_product_has_a_name() -> None:
    for group in (-1, 64, 128):
        params = int_format.Params(4, group, True, 16)
        assert integer.describe("int", params, (32, 128), INT4, "cpu") == "int8 x int8 integer matmul"  # a small layer
    kernel = "int8 x int8 integer matmul; few rows by the kernel of packed weights"
    assert integer.describe("int", int_format.Params(4, 128, True, 16), (256, 512), INT4, "cpu") == kernel


@pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")
@pytest.mark.usefixtures("small_weights_too")
def test_integers_are_left_to_the_kernel_where_torch_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed decides, measured, not exactness alone; what comes out is the same to the rounding of inputs of 16 bits."""
    monkeypatch.setattr(integer, "_cpu_is_exact", lambda: True)
    monkeypatch.setattr(emitter, "widens", lambda dtype: True)
    layer, x = layer_of(int_weight((64, 512), 8, -1), INT8), random(40, 512)
    for fastest, real in (("kernel", False), ("torch", True)):
        monkeypatch.setattr(measured, "fastest", lambda *_, answer=fastest: answer)
        integer._obstacle.cache_clear()
        assert integer.takes_integers(product_of(layer.packed(), INT8), x) == real
        text = integer.describe("int", layer.params, layer.shape, INT8, "cpu")
        assert text.startswith("int8 x int8" if real else "fake: int8 products are slower on this CPU")
        expected = reference(layer, x.to(BF16))
        if not real:
            assert (layer(x.to(BF16)).double() - expected).norm() <= 4e-3 * expected.norm()
    integer._obstacle.cache_clear()


# ---------------------------------------------------------------- fake quantization, gradients, kernels


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("kind", [INT8, INT4, FP8, STATIC], ids=inputs.describe)
def test_other_weights_are_multiplied_with_what_the_inputs_become(kind: Activations, dtype: torch.dtype) -> None:
    values = dense.Params("float32")
    plain = PackedWeight(Stored("dense", values), dense.pack(random(40, 64), values), (40, 64))
    for weight in (plain, round_to_nearest(random(40, 64), 4, 32), round_to_nearest(random(40, 64), 3, -1, False)):
        layer, x = layer_of(weight, kind, bias=True).to(dtype), random(5, 64, dtype=dtype)
        y, expected = layer(x), reference(layer, x) + layer.bias.double()
        assert y.dtype == dtype
        assert (y.double() - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize(("bits", "group"), [(8, -1), (4, -1), (4, 64), (4, 32)])
def test_gradients_are_those_of_the_dequantized_weight(bits: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(int_weight((24, 128), bits, group), INT8, bias=True), random(5, 128)
    expected = layer(x)
    monkeypatch.setattr(integer, "multiply", lambda *_: pytest.fail("integers have no gradients"))
    trained = x.clone().requires_grad_()
    y = layer(trained)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-3)
    weights = random(5, 24, seed=3)
    (y * weights).sum().backward()
    assert trained.grad is not None
    torch.testing.assert_close(trained.grad, weights @ layer.dequantize(torch.float32), rtol=1e-5, atol=1e-3)


@needs_bytes
def test_without_gradients_integers_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(int_weight((24, 128), 8, -1), INT8), random(5, 128).requires_grad_()
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.detach()))
    with torch.inference_mode():
        assert torch.equal(layer(x), layer(x.detach()))


@needs_bytes
@pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")
@pytest.mark.usefixtures("small_weights_too")
def test_few_rows_are_left_to_the_kernel_that_reads_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, few, many = layer_of(int_weight((32, 96), 4, -1), INT8), random(3, 96, dtype=BF16), random(99, 96)
    assert dispatch.taken("int", layer.params, layer.shape, few)
    assert not dispatch.taken("int", layer.params, layer.shape, many.to(BF16))
    count = []
    multiply = integer.multiply
    monkeypatch.setattr(integer, "multiply", lambda *given: (count.append(given), multiply(*given))[1])
    y, expected = layer(few), reference(layer, few)
    assert not count and (y.double() - expected).norm() <= 0.01 * expected.norm()
    assert layer(many.to(BF16)).shape == (99, 32) and len(count) == 1
    eight = layer_of(int_weight((32, 96), 8, -1), INT8)
    eight(few)
    assert len(count) == 2, "codes of 8 bits are read as they are stored by both"


# ---------------------------------------------------------------- the layer


@needs_bytes
@pytest.mark.parametrize(
    ("bits", "group", "kept"), [(8, -1, 0), (4, -1, 48 * 128 + 48 * 4), (4, 64, 48 * 128 + 96 * 4)]
)
def test_codes_are_kept_in_the_cache(bits: int, group: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(int_weight((48, 128), bits, group), INT8), random(7, 128)
    count = []
    unpack = int_format.unpack
    monkeypatch.setattr(int_format, "unpack", lambda *given: (count.append(1), unpack(*given))[1])
    first, second = layer(x), layer(x)
    assert CACHE.nbytes == kept and len(count) == (1 if kept else 0)
    set_cache_limit(0)
    assert torch.equal(layer(x), first) and torch.equal(second, first)
    set_cache_limit(CACHE_LIMIT_NBYTES)
    layer(x)
    with torch.no_grad():
        layer.get_parameter("scales").mul_(2)
    assert torch.equal(layer(x), 2 * first)


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize(("bits", "group", "kind"), [(8, -1, INT8), (4, 64, STATIC), (4, 32, INT4), (4, -1, FP8)])
def test_a_layer_compiles_whole(bits: int, group: int, kind: Activations) -> None:
    torch._dynamo.reset()  # what other tests have compiled counts towards a limit
    layer = layer_of(int_weight((32, 128), bits, group), kind, bias=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = random(5, 128)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
        assert torch.equal(compiled(x.view(1, 5, 128)), layer(x)[None])
    gradients = []
    for module in (layer, compiled):
        trained = x.clone().requires_grad_()
        (module(trained) ** 2).sum().backward()
        gradients.append(trained.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-3)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [INT8, STATIC], ids=inputs.describe)
def test_the_operator_keeps_its_promises(kind: Activations) -> None:
    weight = int_weight((32, 128), 4, 64)
    in_scale = IN_SCALE["in_scale"] if kind == STATIC else None
    texts = dispatch.described(weight.format, weight.params, weight.shape), json.dumps(dataclasses.asdict(kind))
    given = (random(5, 128), list(weight.tensors.values()), in_scale, *texts)
    torch.library.opcheck(integer.linear, given, test_utils=("test_schema", "test_faketensor"))
