"""GPTQ's and AWQ's integers are decoded as their layouts are specified, by unpacking of numpy and of lists here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.importers import open_checkpoint
from helpers import foreign
from helpers.runs import stored_tensors

GROUP = 32
Q = "model.layers.1.self_attn.q_proj"
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # of AWQ: the output that nibble 0, 1, ... of a word holds


def settings(bits: int, layout: str = "gptq", order: bool = False, group: int = GROUP) -> dict[str, Any]:
    return {
        **{"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "desc_act": order},
        **({"checkpoint_format": layout} if layout else {}),
    }


def rounded(weight: Tensor, bits: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], zeros and float16 scales [out, groups], and W = (code - zero) * scale as fp16 makes it."""
    levels, groups = 2**bits - 1, int(index.max()) + 1
    low = torch.stack([weight[:, index == g].amin(1).clamp(max=0) for g in range(groups)], 1)
    high = torch.stack([weight[:, index == g].amax(1).clamp(min=0) for g in range(groups)], 1)
    scales = ((high - low) / levels).half()
    zeros = (-low / scales.float()).round().clamp(0, levels)
    zeros[0, 0], zeros[1, 0] = 0, levels  # both ends
    zeros = zeros.long()  # no negative zeros
    codes = (weight / scales.float()[:, index] + zeros[:, index]).round().clamp(0, levels).long()
    return codes, zeros, scales, (codes - zeros[:, index]).half() * scales[:, index]


def gptq(bits: int, layout: str, order: bool, group: int = GROUP) -> foreign.Pack:
    def pack(name: str, weight: Tensor) -> foreign.Packed:
        inner = weight.shape[1]
        index = torch.arange(inner) // (group if group > 0 else inner)
        if order:
            index = index[torch.randperm(inner, generator=torch.Generator().manual_seed(1))]
        codes, zeros, scales, decoded = rounded(weight, bits, index)
        less = 0 if layout == "gptq_v2" else 1
        stored = {
            ".qweight": foreign.stream(codes, bits).t(),
            ".qzeros": foreign.stream((zeros.t() - less) % 2**bits, bits),
            ".scales": scales.t(),
            ".g_idx": index.int(),
        }
        if not order and bits == 4:
            del stored[".g_idx"]
        return stored, decoded

    return pack


CASES = [
    *((bits, layout, order) for bits in (2, 4, 8) for layout, order in (("gptq", True), ("gptq_v2", False))),
    *((3, "", False), (3, "gptq_v2", True), (4, "", False)),
]


@pytest.mark.parametrize(("bits", "layout", "order"), CASES)
def test_layouts(bits: int, layout: str, order: bool, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(
        pico_dir("llama"), tmp_path, settings(bits, layout, order), gptq(bits, layout, order), torch.float16
    )
    foreign.check_tensors(both)
    words = f"gptq of {bits} bits in groups of {GROUP}" + (", act-order" if order else "")
    assert open_checkpoint(both.quantized).base == words


def test_one_group_for_a_row(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("qwen2"), tmp_path, settings(4, group=-1), gptq(4, "gptq", False, -1))
    foreign.check_tensors(both)


def test_modules_of_other_bits(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    """As `dynamic` makes them: the configuration says 4 bits, the shapes 8."""

    def pack(name: str, weight: Tensor) -> foreign.Packed | None:
        if "o_proj" in name:
            return None
        return gptq(8 if "down" in name else 4, "gptq", True)(name, weight)

    both = foreign.written(pico_dir("llama"), tmp_path, settings(4, order=True), pack, torch.float16)
    foreign.check_tensors(both)


def test_a_run(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    """Experts too."""
    both = foreign.written(pico_dir("mixtral"), tmp_path, settings(4), gptq(4, "gptq", False), torch.float16)
    foreign.check(both, tmp_path / "out", f"gptq of 4 bits in groups of {GROUP}")


def awq(name: str, weight: Tensor) -> foreign.Packed:
    codes, zeros, scales, decoded = rounded(weight, 4, torch.arange(weight.shape[1]) // GROUP)

    def words(values: Tensor) -> Tensor:  # [rows, out] -> int32 [rows, out / 8]
        eight = values.long().unflatten(1, (-1, 8))
        packed = sum(eight[:, :, output] << (4 * nibble) for nibble, output in enumerate(NIBBLES))
        assert isinstance(packed, Tensor)
        return (packed - (packed >= 2**31) * 2**32).int()

    return {".qweight": words(codes.t()), ".qzeros": words(zeros.t()), ".scales": scales.t()}, decoded


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def test_awq(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, AWQ, awq, torch.float16)
    foreign.check(both, tmp_path / "out", f"awq of 4 bits in groups of {GROUP}")


DAMAGE: list[tuple[str, foreign.Pack, dict[str, Any], dict[str, Any]]] = [
    ("qzeros is missing", gptq(4, "", True), settings(4), {"qzeros": lambda t: None}),
    ("do not belong together", gptq(4, "", True), settings(4), {"scales": lambda t: t[:, :-8]}),
    ("do not belong together", gptq(4, "", True), settings(4), {"qweight": lambda t: t[:, :-8]}),
    ("g_idx has the shape .60., its weight asks for .64.", gptq(4, "", True), settings(4), {"g_idx": lambda t: t[4:]}),
    ("g_idx speaks of group 7, there are 2", gptq(4, "", True), settings(4), {"g_idx": lambda t: t + 6}),
    (
        "scales has 2 groups, 64 inputs in groups of 16",
        gptq(4, "", True),
        settings(4, group=16),
        {"g_idx": lambda t: None},
    ),
    ("scales is stored as int32, not as float16", gptq(4, "", True), settings(4), {"scales": lambda t: t.int()}),
    ("qweight has the shape .8., not .in, out", awq, AWQ, {"qweight": lambda t: t[0]}),
    ("qweight has the shape .0, 8., not .in, out", awq, AWQ, {"qweight": lambda t: t[:0]}),
    ("do not belong together", gptq(4, "", True), settings(4), {"scales": lambda t: t[:, :0]}),
    ("qzeros has the shape .1, 8., its weight asks for .2, 8.", awq, AWQ, {"qzeros": lambda t: t[:1]}),
]


@pytest.mark.parametrize(("pattern", "pack", "written", "change"), DAMAGE)
def test_damage_is_named(
    pattern: str,
    pack: foreign.Pack,
    written: dict[str, Any],
    change: dict[str, Callable[[Tensor], Tensor | None]],
    pico_dir: foreign.Pico,
    tmp_path: Path,
) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, written, pack)
    stored = stored_tensors(both.quantized)
    foreign.restore(both.quantized, {f"{Q}.{key}": make(stored[f"{Q}.{key}"]) for key, make in change.items()})
    foreign.refused(both.quantized, pattern)


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        ({**settings(4), "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is no layout that can be read"),
        ({**settings(4), "is_marlin_format": True}, "checkpoint_format 'marlin' .* what can be: gptq, gptq_v2"),
        ({**settings(4), "bits": "four"}, "bits 'four', not a number"),
        ({**AWQ, "version": "gemv_fast"}, "version 'gemv_fast' is no layout that can be read; what can be: gemm"),
        ({**AWQ, "bits": 3}, "3 bits in this layout cannot be read, only 4"),
    ],
)
def test_layouts_of_kernels_are_refused(
    changed: dict[str, Any], pattern: str, pico_dir: foreign.Pico, tmp_path: Path
) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, changed, awq)
    foreign.refused(both.quantized, pattern)
