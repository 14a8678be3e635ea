"""PackedLinear, its cache and the CPU fast paths."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress import formats
from compress.formats import dense, lowrank
from compress.formats import int as int_format
from compress.runtime import linear
from compress.runtime.linear import PackedLinear
from compress.runtime.weight_cache import CACHE, CACHE_LIMIT_NBYTES, set_cache_limit
from compress.types import Activations, LowRank, PackedWeight, Stored
from helpers.pico import round_to_nearest

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    set_cache_limit(CACHE_LIMIT_NBYTES)
    yield
    set_cache_limit(CACHE_LIMIT_NBYTES)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_linear(
    shape: tuple[int, int] = (48, 96), bits: int = 3, group: int = 32, symmetric: bool = True, bias: bool = False
) -> PackedLinear:
    weight = round_to_nearest(random(*shape) * 0.1, bits, group, symmetric)
    return PackedLinear.from_packed(weight, random(shape[0], seed=1) if bias else None)


# ---------------------------------------------------------------- the module


@pytest.mark.parametrize(("bits", "symmetric", "bias"), [(3, True, False), (5, False, True), (4, True, True)])
def test_the_state_is_what_the_format_stores(bits: int, symmetric: bool, bias: bool) -> None:
    layer = packed_linear(bits=bits, symmetric=symmetric, bias=bias)
    expected = formats.get("int").specs(layer.params, layer.shape)
    state = layer.state_dict()
    assert set(state) == set(expected) | ({"bias"} if bias else set())
    assert {name: (tuple(state[name].shape), state[name].dtype) for name in expected} == expected
    assert not any(layer.get_parameter(name).requires_grad for name in expected)


def test_packed_gives_back_what_it_was_made_from() -> None:
    weight = round_to_nearest(random(48, 96), 4, 32)
    back = PackedLinear.from_packed(weight).packed()
    assert (back.format, back.params, back.shape) == (weight.format, weight.params, weight.shape)
    assert back.tensors.keys() == weight.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in weight.tensors.items())
    assert all(back.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in weight.tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_forward_is_linear_with_the_decoded_weight(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    layer = packed_linear(bias=True).to(dtype)
    x = random(*leading, 96, dtype=dtype, seed=2)
    expected = F.linear(x, formats.decode(layer.packed(), dtype), layer.bias)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x), expected)  # from the cache


def test_the_dense_format_runs_too() -> None:
    values = random(40, 24, dtype=BF16)
    params = dense.Params("bfloat16")
    layer = PackedLinear.from_packed(PackedWeight(Stored("dense", params), dense.pack(values, params), (40, 24)))
    x = random(3, 24, dtype=BF16, seed=1)
    assert torch.equal(layer(x), F.linear(x, values))


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32, torch.float64])
def test_casting_the_model_casts_the_bias_only(dtype: torch.dtype) -> None:
    layer = packed_linear(bias=True, symmetric=False)
    before = {name: tensor.clone() for name, tensor in layer.tensors.items()}
    layer = nn.Sequential(layer).to(dtype)[0]
    assert layer.bias.dtype == dtype
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.tensors.items())
    assert all(tensor.dtype == before[name].dtype for name, tensor in layer.tensors.items())


def test_moving_to_a_device_moves_everything_and_keeps_types() -> None:
    layer = packed_linear(bias=True).to("meta", BF16)
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert layer.get_parameter("scales").dtype == torch.float16
    assert layer.bias is not None and layer.bias.dtype == BF16


def test_wrong_width_is_an_error_and_not_another_shape() -> None:
    layer = packed_linear((64, 64), bits=4, group=32)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        layer(random(2, 128, dtype=BF16))


def test_repr_names_the_format_parameters() -> None:
    assert "bits=3" in repr(packed_linear()) and "in_features=96" in repr(packed_linear())


def test_a_copy_is_independent() -> None:
    layer = packed_linear()
    x = random(2, 96)
    before = layer(x)
    other = copy.deepcopy(layer)
    assert torch.equal(other(x), before)
    with torch.no_grad():
        other.get_parameter("scales").mul_(2)
    torch.testing.assert_close(other(x), 2 * before)
    assert torch.equal(layer(x), before)


def test_the_width_of_a_padded_weight_is_the_real_one() -> None:
    layer = packed_linear((33, 40), bits=4, group=32)
    assert int_format.padded_shape(layer.params, layer.shape) != (33, 40)
    assert layer(random(2, 40)).shape == (2, 33)


# ---------------------------------------------------------------- the cache


class Counter:
    """Counts the decodes of all layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        decode = formats.decode_stored  # every decode goes through it
        monkeypatch.setattr(formats, "decode_stored", lambda *a: (self._tick(), decode(*a))[1])

    def _tick(self) -> None:
        self.count += 1


def test_a_decoded_weight_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, decodes = packed_linear(), Counter(monkeypatch)
    for _ in range(3):
        layer(random(2, 96))
    assert decodes.count == 1
    assert CACHE.nbytes == 48 * 96 * 4
    layer(random(2, 96, dtype=torch.float16))  # another type is another weight
    assert decodes.count == 2


def test_the_limit_holds_and_what_came_first_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cache_limit(2 * 48 * 96 * 4)
    layers, decodes = [packed_linear() for _ in range(4)], Counter(monkeypatch)
    for _ in range(3):
        for layer in layers:
            layer(random(2, 96))
            assert CACHE.nbytes <= CACHE.limit
    assert CACHE.nbytes == CACHE.limit
    assert decodes.count == 4 + 2 + 2  # two are kept; recency would have missed all twelve times


@pytest.mark.parametrize(("bits", "dtype"), [(3, torch.float32), (4, BF16), (4, torch.float32)])
def test_numbers_do_not_depend_on_the_cache(bits: int, dtype: torch.dtype) -> None:
    layer = packed_linear(bits=bits, group=32)
    for rows in (1, 2, 33):
        x = random(rows, 96, dtype=dtype)
        set_cache_limit(CACHE_LIMIT_NBYTES)
        cold, warm = layer(x), layer(x)
        set_cache_limit(0)
        without = layer(x)
        assert CACHE.nbytes == 0
        assert torch.equal(cold, warm) and torch.equal(cold, without)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        set_cache_limit(-1)


def test_entries_die_with_their_layer() -> None:
    layer = packed_linear()
    layer(random(2, 96))
    assert CACHE.nbytes > 0
    del layer
    gc.collect()
    assert CACHE.nbytes == 0


def test_moving_a_layer_frees_its_entries() -> None:
    layer = packed_linear()
    layer(random(2, 96))
    layer.to("meta")
    assert CACHE.nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_loading_other_tensors_is_seen(dtype: torch.dtype) -> None:
    layer = packed_linear((64, 64), bits=4)
    other = PackedLinear.from_packed(round_to_nearest(random(64, 64, seed=9), 4, 32))
    x = random(2, 64, dtype=dtype)
    layer(x)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))


def test_first_used_in_inference_mode_then_trained_through() -> None:
    layer = packed_linear()
    with torch.inference_mode():
        layer(random(2, 96))
    x = random(2, 96).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.dequantize(torch.float32).sum(0).expand(2, -1))


# ---------------------------------------------------------------- the bias


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
@pytest.mark.parametrize("kind", ["kernel", "decoded", "lowrank", "quantized", "traced"])
@pytest.mark.usefixtures("small_weights_too")
def test_the_type_of_the_outputs_is_that_of_the_inputs(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the type of the bias: in a model that is cast part by part it may be another."""
    monkeypatch.setattr(linear, "_is_traced", lambda: kind == "traced")
    weight = round_to_nearest(random(64, 128) * 0.1, 4, 64)
    if kind == "quantized":
        weight = PackedWeight(Stored("int", weight.params, activations=Activations()), weight.tensors, weight.shape)
    if kind == "lowrank":
        a, b = (random(5, columns, seed=3) * 0.1 for columns in (128, 64))
        part = {lowrank.PREFIX + name: t for name, t in lowrank.pack(a, b, LowRank(5)).items()}
        stored = Stored("int", weight.params, lowrank=LowRank(5))
        weight = PackedWeight(stored, {**weight.tensors, **part}, weight.shape)
    for bias_dtype in (torch.float32, torch.float64, torch.float16):
        bias = random(64, seed=1)
        layer = PackedLinear.from_packed(weight, bias, bias_dtype)
        x = random(33 if kind == "decoded" else 2, 128, dtype=dtype)
        with torch.no_grad():
            y, without = layer(x), PackedLinear.from_packed(weight)(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y, (without + bias.to(bias_dtype)).to(dtype), rtol=2e-2, atol=2e-2)
