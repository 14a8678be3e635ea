"""Attend with one new token to packed keys and values on a GPU: codes are read as they are stored, once.

The sequence is cut into parts (Flash-Decoding); each keeps a running softmax, and the program that ends last weighs the
parts by their maxima, in order: one launch, no result depends on which part came last. Codes become float16 in
registers, scale and minimum included; queries are multiplied by a power of two that float16 has room for; scores,
softmax and sums are float32. Query heads of a KV head are columns of one product, so that nothing is read twice. Exact
tokens (sink, tail, the new one) are read in their own type by the last part.

The kernel is in `_kv_attention.py`. What it can read: codes of 1, 2, 3, 4 and 8 bits in the words of
compress/numerics/packing.py, one row of words for each token, a tile being the whole row, of heads of 64, 128 or 256
channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.contract import Attended, CodedHeads, HeadLayout, Query
from compress.kernels.triton import products
from compress.numerics.packing import FIELDS

MOST_GROUPS = 16  # query heads of a KV head
MOST_TOKENS = 4  # of a row of a matrix
LEAST_COLUMNS = 16  # of a product of tensor cores; 8 on the other side
SUMS = 2048  # float32 sums of values that 32 threads have registers for
MOST_WARPS = 2
STAGES = {(2, 64): 4, (2, 128): 4, (4, 64): 4}  # by bits and channels of keys, else 3; with these, nothing is spilled
BLOCKS = (32, 16, 64)  # tokens of a step, the first that divides the groups: more take registers that are not there
PART = 256  # tokens of a part, at least
PROGRAMS = 8  # that a multiprocessor of sm_90 runs at once, by registers and shared memory


class Tiling(NamedTuple):
    """How the products of a launch are cut up, for two layouts and a number of query heads."""

    tokens: int  # of a row of a matrix
    rows: int  # queries, with zeros
    block: int  # tokens of a step
    warps: int
    stages: int


def _words(layout: HeadLayout) -> int:
    """Return the words of a piece, see `_kv_attention.py`."""
    words = min(layout.width // FIELDS[layout.bits], LEAST_COLUMNS)
    return min(words, layout.group) if layout.kind == "token" else words


def supports(keys: HeadLayout, values: HeadLayout, groups: int) -> bool:
    """Return whether the kernel can read these, `groups` query heads to a KV head."""
    return all(_fits(layout) for layout in (keys, values)) and _plan(keys, values, groups) is not None


def has_room(heads: int, keys: HeadLayout, values: HeadLayout, groups: int) -> bool:
    """Return whether the workspace holds the results of so many KV heads, those of all sequences."""
    plan = _plan(keys, values, groups)
    if plan is None:
        return False
    return heads <= products.COUNTERS and heads * (plan.tokens + 1) * groups * (values.width + 2) <= products.FLOATS


def attend(
    query: Query,
    keys: CodedHeads,
    values: CodedHeads,
    exact: Sequence[tuple[Tensor, Tensor]],
    scaling: float,
    mask: Tensor | None = None,
) -> Attended:
    """Return the attention of query.q [B, H, width]; B * h must be a number that `has_room` for. Launches one kernel.

    exact: (keys, values [B, h, n, width]) of the first, the last and the new tokens, n may be 0, of one type; mask:
    bool or uint8 [B, tokens], false for tokens that are not seen, in the order first, coded, last, new.
    """
    from compress.kernels.triton import _kv_attention

    q, batch, heads = query.q.contiguous(), *keys.planes[0].shape[:2]
    groups, coded, width = q.shape[1] // heads, keys.planes[0].shape[2], values.layout.width
    plan = _plan(keys.layout, values.layout, groups)
    assert plan is not None
    parts = _parts(batch * heads, coded, plan, groups * (width + 2), q.device)
    attended = _empty(q, values.layout)
    stored = [_tensors(side) for side in (keys, values)]
    segments = [_by_head(x) for pair in exact for x in pair]
    seen = q if mask is None else mask.to(torch.uint8).contiguous()
    first, last, new = (pair[0].shape[2] for pair in exact)
    workspace = products.workspace(q.device)
    _kv_attention.attend[batch * heads, parts + (parts > 1)](
        q, q if query.coded is None else query.coded.contiguous(),
        q if query.bias is None else query.bias.contiguous(),
        attended.out, attended.out if attended.exact is None else attended.exact,
        attended.out if attended.mass is None else attended.mass,
        seen, *stored[0], *stored[1], *segments, workspace.partials, workspace.counters,
        *(x.stride(1) for i in (0, 1) for x in (stored[i][0], stored[i][3])), *(x.stride(1) for x in segments),
        coded, first, last, new, seen.shape[-1], heads, parts, scaling * math.log2(math.e),
        **constants(keys.layout, values.layout, groups), MASKED=mask is not None, BIASED=query.bias is not None,
        PRECISION="tf32x3" if segments[0].dtype == torch.float32 else "tf32", USE_ASM=_kv_attention.COMPILED,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return attended


def _empty(q: Tensor, values: HeadLayout) -> Attended:
    shape, floats = (*q.shape[:2], values.width), {"dtype": torch.float32, "device": q.device}
    if values.kind != "norm":
        return Attended(torch.empty(shape, dtype=q.dtype, device=q.device))
    return Attended(*(torch.empty(size, **floats) for size in (shape, shape, q.shape[:2])))  # type: ignore[call-overload]


@cache
def constants(keys: HeadLayout, values: HeadLayout, groups: int) -> dict[str, Any]:
    """Return the constants of the kernel that depend on the layouts only."""
    plan = _plan(keys, values, groups)
    assert plan is not None
    found: dict[str, Any] = {}
    for name, side in (("K", keys), ("V", values)):
        found |= {f"{name}_BITS": side.bits, f"{name}_KIND": side.kind, f"{name}_GROUP": side.group}
        found |= {f"{name}_WIDTH": side.width, f"{name}_WORDS": _words(side)}
    exact_rows = max(8, 1 << (groups - 1).bit_length())
    return {
        **found,
        "GROUPS": groups,
        "ROWS": plan.rows,
        "EXACT_ROWS": exact_rows,
        "TOKENS": plan.tokens,
        "BLOCK": plan.block,
    }


def _fits(layout: HeadLayout) -> bool:
    if layout.bits not in FIELDS or layout.width not in (64, 128, 256):
        return False
    group = layout.group
    return layout.kind != "token" or (layout.width % group == 0 and group & (group - 1) == 0)


@cache
def _plan(keys: HeadLayout, values: HeadLayout, groups: int) -> Tiling | None:
    tokens = max(1, *(LEAST_COLUMNS // _words(side) for side in (keys, values)))
    rows = max(8 // tokens, 1 << (groups - 1).bit_length())
    warps = max(1 + (rows > 8), values.width * tokens * tokens * rows // SUMS)
    if tokens > MOST_TOKENS or groups > MOST_GROUPS or warps > MOST_WARPS:
        return None
    by_group = [side.group for side in (keys, values) if side.kind == "channel"]
    blocks = [b for b in BLOCKS if b >= LEAST_COLUMNS * tokens and all(g % b == 0 for g in by_group)]
    block = blocks[0] if blocks else max(BLOCKS[0], LEAST_COLUMNS * tokens)
    fewest = warps > 1 or tokens == MOST_TOKENS
    return Tiling(tokens, rows, block, warps, 2 if fewest else STAGES.get((keys.bits, keys.width), 3))


def _parts(heads: int, coded: int, plan: Tiling, floats: int, device: torch.device) -> int:
    """Of the coded tokens of a head, so that a device is filled once and every part has work."""
    slots = products.properties(device).multiprocessors * PROGRAMS
    room = (products.FLOATS // (heads * floats) - 1) // plan.tokens
    return max(1, min(coded // PART, slots // heads, room))


def _tensors(side: CodedHeads) -> tuple[Tensor, ...]:
    """Words a, b, c, scales, minima, levels; something of the right type where there is none."""
    first, *rest = (_by_head(plane) for plane in side.planes)
    second, third = rest if rest else (first, first)
    scales = _by_head(side.scales)
    assert second.stride(1) == third.stride(1) == first.stride(1)
    minima = scales if side.minima is None else _by_head(side.minima)
    assert minima.stride(1) == scales.stride(1)
    return first, second, third, scales, minima, scales if side.levels is None else side.levels


def _by_head(x: Tensor) -> Tensor:
    """x [B, h, ...] whose heads are equally far apart and contiguous in themselves; copied if they are not."""
    is_apart = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if is_apart and x[0, 0].is_contiguous() else x.contiguous()
