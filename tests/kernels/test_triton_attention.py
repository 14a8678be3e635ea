"""The Triton kernel of decode attention, interpreted, against decoded keys and values in float64; its machine code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from compress.kernels.contract import Attended, HeadLayout
from compress.kernels.triton import kv_attention as kernel
from compress.kernels.triton import products
from compress.kv import fused
from compress.kv.cache import make_cache
from compress.kv.layer import CodedLayer, KVCache
from helpers import (
    interpreter,  # noqa: F401
    offline,
)

KIVI = {"method": "kivi", "sink": 3, "residual_length": 5, "flush": 1}
SCALING = 0.1


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU and float32 too, and fresh memory is not a number."""
    monkeypatch.setattr(fused, "kernel_for", lambda device, dtype: kernel)
    empty = kernel._empty
    monkeypatch.setattr(kernel, "_empty", lambda q, values: poisoned(empty(q, values)))
    products.forget()
    products.workspace(torch.device("cpu")).partials.fill_(torch.nan)
    yield
    assert not products.workspace(torch.device("cpu")).counters.any(), "counters are not back at zero"
    products.forget()


def poisoned(found: Attended) -> Attended:
    for x in found:
        if x is not None:
            x.fill_(torch.nan)
    return found


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(
    recipe: dict[str, Any], tokens: int, heads: tuple[int, int], widths: tuple[int, int], pads: list[int] | None = None
) -> tuple[KVCache, CodedLayer]:
    """A cache of one layer with two sequences; heads: query heads, KV heads; widths of keys and values."""
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=heads[0], num_key_value_heads=heads[1], hidden_size=64 * heads[0]
    )
    made = make_cache(config, recipe, path="fused")
    made.pads = None if pads is None else torch.tensor(pads)
    batch = 1 if pads is None else len(pads)
    states = [normal(batch, heads[1], tokens, width, seed=i) for i, width in enumerate(widths)]
    layer = made.layers[0]
    assert isinstance(layer, CodedLayer)
    layer.update(*states)
    layer.commit()
    return made, layer


def check(
    recipe: dict[str, Any],
    tokens: int,
    heads: tuple[int, int] = (4, 1),
    widths: tuple[int, int] = (128, 128),
    pads: list[int] | None = None,
    bound: float = 1e-3,
) -> None:
    """One new token: decode-then-attend in float64, from float32 keys and values."""
    made, layer = filled(recipe, tokens, heads, widths, pads)
    batch = 1 if pads is None else len(pads)
    new = normal(batch, heads[1], 1, widths[0], seed=5), normal(batch, heads[1], 1, widths[1], seed=6)
    q = 3 * normal(batch, heads[0], 1, widths[0], seed=7)
    stores = layer.stores["keys"], layer.stores["values"]
    k, v = (s.read(x).double().repeat_interleave(heads[0] // heads[1], 1) for s, x in zip(stores, new, strict=True))
    mask = torch.ones(batch, 1, 1, tokens + 1, dtype=torch.bool)
    for row, count in enumerate(pads or []):
        mask[row, ..., :count] = False
    expected = ((q.double() @ k.mT * SCALING).masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)
    columns, stored_mask = stores[0].columns, None
    if pads is not None:
        assert columns is not None
        stored_mask = torch.cat((mask.gather(3, columns[:, None, None]), mask[..., columns.shape[1] :]), 3)
    found = fused.attend(layer, q, new, stored_mask, SCALING)
    assert found is not None
    assert found.shape == expected.shape
    assert found.dtype == q.dtype
    assert (found - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize(
    ("bits", "widths", "heads", "tokens"),
    [
        ((4, 4), (128, 128), (4, 1), 45),
        ((2, 3), (128, 128), (1, 1), 41),
        ((8, 2), (64, 128), (3, 1), 78),
        ((3, 8), (128, 64), (2, 2), 43),
        ((3, 4), (64, 64), (4, 1), 77),
    ],
)
def test_min_max_integers(bits: tuple[int, int], widths: tuple[int, int], heads: tuple[int, int], tokens: int) -> None:
    """Keys end in a whole group, values after any number of tokens: what only one has coded is decoded."""
    settings = {"keys": {"bits": bits[0]}, "values": {"bits": bits[1]}}
    check({**KIVI, **settings}, tokens, heads, widths)


@pytest.mark.parametrize("groups", [16, 48])
def test_other_groups(groups: int) -> None:
    """Fewer or more tokens in a group of keys than in a step, fewer channels in one of values than words in a field."""
    check({**KIVI, "bits": 8, "keys": {"group_size": groups}, "values": {"group_size": 16}}, 57, (1, 1), (64, 64))


def test_swapped_axes() -> None:
    check({**KIVI, "bits": 4, "keys": {"axis": "token"}, "values": {"axis": "channel"}}, 45, (2, 1), (64, 64))


def test_left_padding() -> None:
    check({**KIVI, "bits": 4}, 53, (2, 1), (64, 64), [0, 40])


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PART", 32)
    check({**KIVI, "bits": 4}, 110, (2, 1), (64, 64))


@pytest.mark.parametrize("centre", ["none", "first"])
def test_levels_and_norms(centre: str) -> None:
    recipe = {"method": "lloyd", "bits": 4, "sink": 2, "residual_length": 7, "keys": {"rope": "post", "centre": centre}}
    check(recipe, 48, (2, 1), (64, 64))


def test_what_is_left_to_the_other_way() -> None:
    for recipe in (
        {**KIVI, "bits": 5},
        {"method": "identity", "residual_length": 5},
        {
            "method": "lloyd",
            "keys": {"rope": "post", "norm_bits": 8, "centre": "none"},
            "residual_length": 5,
            "sink": 0,
        },
        {**KIVI, "residual_length": 100},
    ):
        _, layer = filled(recipe, 70, (2, 1), (64, 64))
        assert fused.attend(layer, normal(1, 2, 1, 64), None, None, SCALING) is None
    _, layer = filled(KIVI, 70, (2, 1), (64, 64))
    assert fused.attend(layer, normal(1, 2, 2, 64), None, None, SCALING) is None
    assert fused.attend(layer, normal(1, 2, 1, 64), None, torch.zeros(1, 1, 1, 70), SCALING) is None
    keys, values = HeadLayout(4, 128, "channel", 32), HeadLayout(4, 128, "token", 32)
    assert kernel.supports(keys, values, 16)
    assert not kernel.supports(keys, values, 17)
    assert not kernel.supports(keys, HeadLayout(4, 96, "token", 32), 4)
    assert not kernel.has_room(1 << 14, keys, values, 4)


STORED = "k k_scale v v_scale sink_k sink_v tail_k tail_v new_k new_v"
COUNTS = "coded sinks tails news columns heads parts"
WORDS = "k_a k_b k_c v_a v_b v_c"
HALVES = "k_scales k_minima k_levels v_scales v_minima v_levels"
OWN = "q coded_q out exact_out sink_k sink_v tail_k tail_v new_k new_v"
STRIDES = tuple(f"{name}_stride" for name in STORED.split())
SIGNATURE: dict[str, str] = dict.fromkeys((*STRIDES, *COUNTS.split()), "i32") | dict.fromkeys(WORDS.split(), "*i16")
SIGNATURE |= dict.fromkeys(HALVES.split(), "*fp16") | dict.fromkeys(OWN.split(), "*bf16")
SIGNATURE |= {"mask": "*u8", "bias": "*fp32", "mass": "*fp32", "partials": "*fp32", "counters": "*i32", "scale": "fp32"}


def case(keys: HeadLayout, values: HeadLayout, groups: int, masked: bool = False, arch: int = 90) -> offline.Case:
    settings = {"MASKED": masked, "BIASED": False, "PRECISION": "tf32", "USE_ASM": True}
    plan = kernel._plan(keys, values, groups)
    assert plan is not None
    constants = kernel.constants(keys, values, groups) | settings
    module = "compress.kernels.triton._kv_attention"
    return offline.Case(module, "attend", SIGNATURE, constants, arch, plan.warps, plan.stages, STRIDES)


def kivi(bits: int, width: int, group: int = 32) -> tuple[HeadLayout, HeadLayout]:
    return HeadLayout(bits, width, "channel", group), HeadLayout(bits, width, "token", group)


def assert_lean(cases: list[offline.Case]) -> None:
    for one, built in zip(cases, offline.compile_cases(cases), strict=True):
        assert not [op for op in built.opcodes if op.startswith(("LDL", "STL"))], one
        assert built.shared < 228 * 1024 / kernel.PROGRAMS - 1024, one
        assert built.registers * 32 * one.warps * kernel.PROGRAMS <= 1 << 16 or one.warps > 1, one


@pytest.mark.slow
def test_machine_code() -> None:
    assert_lean([case(*kivi(4, 128), 4)])


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "width"), [(3, 64)])
def test_machine_code_of_an_odd_width(bits: int, width: int) -> None:
    norms = HeadLayout(bits, width, "norm")
    assert_lean([case(*kivi(bits, width), 4), case(*kivi(bits, width), 1, masked=True), case(norms, norms, 4)])
