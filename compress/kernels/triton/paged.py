"""Attend to packed pages on a GPU, and write them: the kernels are in `_paged.py`.

Rows of queries of a KV head, all that share it and of several queries of a request, are one operand of the products of
tensor cores; the tokens that they see are cut into a fixed number of splits, each with a running softmax, which a
second launch joins. The number of programs depends on the shapes of the arguments only, and nothing is read by the
host: a CUDA graph of a step holds for other lengths and blocks. Codes become float16, scores and sums are float32,
queries are multiplied by a power of two that float16 has room for.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.paged import LevelPair, PageLayout, Requests, TokenCodes
from compress.kernels.triton import products

HEAD_WIDTHS = (64, 128, 256)
LEAST_PIECE = 16  # channels of a piece: the least that tensor cores sum over
LEAST_COLUMNS = 8  # columns of an operand, which are rows of queries
MOST_COLUMNS = {64: 64, 128: 32, 256: 16}  # registers have room for so many, by the width of heads
FEW, MANY = (32, 2), (64, 4)  # tokens of a step and warps, with the least and with more columns: nothing is spilled
MOST_SPLITS = 64
PROGRAM_SLOTS = 4  # programs that a multiprocessor runs at once
LEAST_SPLIT = 256  # tokens


class PageTiling(NamedTuple):
    """How a call is cut into programs."""

    rows: int  # of queries, of all heads that share a KV head
    tokens: int  # of a step
    warps: int
    splits: int


def supports(q: Tensor, pages: Tensor, layout: PageLayout) -> bool:
    """Return whether the kernels read pages of this layout for such queries."""
    groups = q.shape[1] // pages.shape[1]
    return q.stride(2) == 1 and _fits(pages, layout) and groups <= MOST_COLUMNS[_width(layout)]


def writes(keys: Tensor, values: Tensor, pages: Tensor, layout: PageLayout) -> bool:
    """Return whether pages of this layout are written here."""
    return keys.stride(2) == values.stride(2) == 1 and _fits(pages, layout)


def _fits(pages: Tensor, layout: PageLayout) -> bool:
    is_run = pages.stride(3) == 1 and pages.stride(2) == layout.token_bytes
    is_even = all(number % 2 == 0 for number in (pages.data_ptr(), *pages.stride()[:2]))
    return is_run and is_even and all(_is_read(codes) for codes in (layout.keys, layout.values))


def _is_read(codes: TokenCodes) -> bool:
    is_power = codes.group & (codes.group - 1) == 0
    return codes.width in HEAD_WIDTHS and is_power and codes.width * max(codes.planes) // 8 >= LEAST_PIECE


def _width(layout: PageLayout) -> int:
    return max(layout.keys.width, layout.values.width)


def attend(
    q: Tensor, pages: Tensor, requests: Requests, layout: PageLayout, tables: LevelPair, window: int | None
) -> Tensor:
    """Return what `attend` of compress/kernels/paged.py does. Launches two kernels, or one."""
    from compress.kernels.triton import _paged

    count, heads, most = requests.lengths.shape[0], pages.shape[1], requests.block_table.shape[1] * layout.tokens
    groups, width = q.shape[1] // heads, layout.values.width
    plan = tiling(layout, groups, (q.shape[0], count, heads, most), q.device)
    out = torch.zeros(*q.shape[:2], width, dtype=torch.float32, device=q.device)
    sums, stats = out, out
    if plan.splits > 1:
        sums = torch.empty(*q.shape[:2], plan.splits, width, dtype=torch.float32, device=q.device)
        stats = torch.zeros(*q.shape[:2], plan.splits, 2, dtype=torch.float32, device=q.device)
    tiles = q.shape[0] // (plan.rows // groups) + count
    table = requests.block_table if requests.block_table.stride(1) == 1 else requests.block_table.contiguous()
    levels = (out if x is None else x for x in tables)
    with torch.cuda.device_of(q):
        _paged.attend[tiles, heads, plan.splits](
            q, pages, table, requests.query_starts, requests.lengths, *levels, sums, stats, count, window or 0,
            table.stride(0), *pages.stride()[:2], *q.stride()[:2], **constants(layout), GROUPS=groups, ROWS=plan.rows,
            TOKENS=plan.tokens, SPLITS=plan.splits, num_warps=plan.warps,
        )  # fmt: skip
        if plan.splits > 1:
            _paged.merge[q.shape[0] * q.shape[1],](sums, stats, out, WIDTH=width, SPLITS=plan.splits, num_warps=1)
    return out


def write(keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor, layout: PageLayout, tables: LevelPair) -> None:
    """Do what `write` of compress/kernels/paged.py does, in one launch."""
    from compress.kernels.triton import _paged

    levels = [keys if x is None else x for x in tables]
    edges = [keys if x is None else _edges(x) for x in tables]
    with torch.cuda.device_of(keys):
        _paged.encode[slots.shape[0], pages.shape[1]](
            keys, values, pages, slots, *levels, *edges, *keys.stride()[:2], *values.stride()[:2], *pages.stride()[:2],
            **constants(layout), num_warps=1,
        )  # fmt: skip


def _edges(levels: Tensor) -> Tensor:
    """Return what lies between levels, and infinity."""
    return torch.nn.functional.pad((levels[1:] + levels[:-1]) / 2, (0, 1), value=torch.inf)


@cache
def constants(layout: PageLayout) -> dict[str, Any]:
    """Return the constants of the kernels that depend on the layout only."""
    result: dict[str, Any] = {"PAGE": layout.tokens}
    for name, codes in (("K", layout.keys), ("V", layout.values)):
        result |= {f"{name}_BITS": codes.bits, f"{name}_WIDTH": codes.width, f"{name}_GROUP": codes.group}
        result[f"{name}_LEVELS"] = codes.levels
    return result


def tiling(layout: PageLayout, groups: int, sizes: tuple[int, int, int, int], device: torch.device) -> PageTiling:
    """Return how to cut up the work of (queries, requests, KV heads, the most tokens of a request)."""
    queries, requests, heads, most = sizes
    width, each = _width(layout), -(-queries // max(requests, 1))
    rows = min(max(LEAST_COLUMNS, 1 << (each * groups - 1).bit_length()), MOST_COLUMNS[width])
    programs = (queries // (rows // groups) + requests) * heads
    slots = PROGRAM_SLOTS * products.properties(device).multiprocessors
    splits = max(1, min(slots // programs, most // LEAST_SPLIT, MOST_SPLITS))
    return PageTiling(rows, *(FEW if rows == LEAST_COLUMNS else MANY), 1 << (splits.bit_length() - 1))
