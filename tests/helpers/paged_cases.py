"""Requests over packed pages, and the definition of attention in float64 over what the pages decode to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kv.pages import PageCodes, Pages


class Case(NamedTuple):
    """Requests are (tokens, queries)."""

    keys: PageCodes
    values: PageCodes
    tokens: int  # of a page
    heads: tuple[int, int]  # query heads, KV heads
    requests: tuple[tuple[int, int], ...]
    window: int | None = None
    dtype: torch.dtype = torch.float32


def uniform(bits: int, width: int, group: int = 0) -> PageCodes:
    return PageCodes(bits, width, group or width)


def levels(bits: int, width: int) -> PageCodes:
    return PageCodes(bits, width, width, levels=True)


def table(codes: PageCodes) -> Tensor | None:
    return torch.linspace(-2.5, 2.5, 2**codes.bits).sign() * torch.linspace(-1.6, 1.6, 2**codes.bits) ** 2


def made(case: Case, seed: int = 0, order: int = 1) -> dict[str, Any]:
    """Pages that hold random tokens of all requests, in blocks in some order, and queries."""
    generator = torch.Generator().manual_seed(seed)
    layout = Pages(case.keys, case.values, case.tokens)
    counts = [-(-length // case.tokens) for length, _ in case.requests]
    places = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(order)).int()
    block_table = torch.full((len(counts), max(*counts, 1) + 1), 1 << 30, dtype=torch.int32)
    pages = torch.full((sum(counts) + 2, case.heads[1], case.tokens, layout.token_bytes), 255, dtype=torch.uint8)
    tables = table(case.keys), table(case.values)
    taken, queries = 0, []
    for row, ((length, new), count) in enumerate(zip(case.requests, counts, strict=True)):
        block_table[row, :count] = places[taken : taken + count]
        taken += count
        token = torch.arange(length)
        slots = block_table[row, token // case.tokens].long() * case.tokens + token % case.tokens
        keys, values = (
            torch.randn(length, case.heads[1], codes.width, generator=generator) + 0.2
            for codes in (case.keys, case.values)
        )
        layout.encode_into(pages, slots, (keys, values), tables)
        queries.append(torch.randn(new, case.heads[0], case.keys.width, generator=generator) * 0.3)
    starts = torch.tensor([0, *(new for _, new in case.requests)]).cumsum(0).int()
    return {
        "q": torch.cat(queries).to(case.dtype), "pages": pages, "block_table": block_table, "query_starts": starts,
        "lengths": torch.tensor([length for length, _ in case.requests]).int(), "layout": layout,
        "key_levels": tables[0], "value_levels": tables[1], "window": case.window,
    }  # fmt: skip


def expected(case: Case, given: dict[str, Any]) -> Tensor:
    """The definition, float64 [T, H, d_v]."""
    layout, q = given["layout"], given["q"]
    outputs, start = [], 0
    for row, (length, new) in enumerate(case.requests):
        tables = given["key_levels"], given["value_levels"]
        stored = layout.decode_first(given["pages"], given["block_table"][row], length, tables)
        keys, values = (x.double().repeat_interleave(case.heads[0] // case.heads[1], 1).transpose(0, 1) for x in stored)
        scores = q[start : start + new].double().transpose(0, 1) @ keys.mT
        here, there = torch.arange(length - new, length)[:, None], torch.arange(length)
        seen = (there <= here) & (there > here - (case.window or length))
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append((p @ values).transpose(0, 1))
        start += new
    return torch.cat(outputs)


def relative(output: Tensor, reference: Tensor) -> float:
    return float((output.double() - reference).norm() / reference.norm())
