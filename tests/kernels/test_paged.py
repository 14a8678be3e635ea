"""Attention over packed pages, beside the definition in float64 over what the pages decode to."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compress.kernels import dispatch, paged
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


def made(case: Case, seed: int = 0, order: int = 1) -> dict[str, object]:
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


def expected(case: Case, given: dict[str, object]) -> Tensor:
    """The definition, float64 [T, H, d_v]."""
    layout, q = given["layout"], given["q"]
    assert isinstance(layout, Pages) and isinstance(q, Tensor)
    outputs, start = [], 0
    for row, (length, new) in enumerate(case.requests):
        tables = given["key_levels"], given["value_levels"]
        stored = layout.decode_first(given["pages"], given["block_table"][row], length, tables)  # type: ignore[index, arg-type]
        keys, values = (x.double().repeat_interleave(case.heads[0] // case.heads[1], 1).transpose(0, 1) for x in stored)
        scores = q[start : start + new].double().transpose(0, 1) @ keys.mT
        here, there = torch.arange(length - new, length)[:, None], torch.arange(length)
        seen = (there <= here) & (there > here - (case.window or length))
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append((p @ values).transpose(0, 1))
        start += new
    return torch.cat(outputs)


CASES = [
    Case(uniform(8, 64), uniform(8, 64), 16, (9, 3), ((530, 1), (7, 1), (300, 2))),
    Case(uniform(8, 128), uniform(4, 128), 32, (8, 1), ((257, 3), (16, 1)), 100),
    Case(uniform(4, 64), uniform(4, 64), 16, (3, 3), ((129, 1), (33, 33), (5, 0), (1, 1)), None, torch.bfloat16),
    Case(uniform(4, 80), uniform(8, 80, 16), 128, (4, 1), ((300, 1), (128, 1), (90, 40)), 33),
    Case(uniform(4, 256, 64), uniform(4, 256, 64), 16, (2, 1), ((70, 4),)),
    Case(levels(4, 64), levels(3, 64), 32, (6, 2), ((260, 2), (40, 1)), None, torch.bfloat16),
    Case(levels(2, 128), levels(2, 64), 16, (4, 4), ((100, 1), (200, 70))),
    Case(uniform(3, 128, 32), uniform(5, 64), 16, (2, 2), ((90, 1),)),
    Case(levels(6, 64), uniform(6, 128, 64), 48, (4, 2), ((150, 1), (60, 20)), 7),
]


def relative(output: Tensor, reference: Tensor) -> float:
    return float((output.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("way", ["kernel", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_the_definition(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "plain":
        monkeypatch.setattr(dispatch, "pages", lambda device: None)
        monkeypatch.setattr(paged, "TILE_TOKENS", 64)
        monkeypatch.setattr(paged, "TILE_SCORES", 1 << 10)
    given = made(case)
    output = paged.attend(**given)  # type: ignore[arg-type]
    assert output.dtype == torch.float32
    assert relative(output, expected(case, given)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_written_bytes_are_those_of_the_reference(case: Case, dtype: torch.dtype) -> None:
    """Uniform codes to the bit; of levels a norm may be the next float16, and codes at an edge the next ones."""
    layout, generator = Pages(case.keys, case.values, case.tokens), torch.Generator().manual_seed(3)
    tables, count = (table(case.keys), table(case.values)), 2 * case.tokens
    slots = torch.randperm(4 * case.tokens, generator=generator)[:count]
    slots[::5] = -1
    keys, values = (
        (torch.randn(count, case.heads[1], codes.width, generator=generator) * 3).to(dtype)
        for codes in (case.keys, case.values)
    )
    keys[3], values[7, 0], keys[4, :, 3] = 0.25, 0.0, 1e6  # a constant, nothing, more than float16 holds
    pages = torch.full((2, 4, case.heads[1], case.tokens, layout.token_bytes), 77, dtype=torch.uint8)
    paged.write(keys, values, pages[0], slots, layout, *tables)
    layout.encode_into(pages[1], slots, (keys.float(), values.float()), tables)
    for i, codes in enumerate((case.keys, case.values)):
        areas = [layout.areas(own)[2 * i : 2 * i + 2] for own in pages]
        if not codes.levels:
            assert all(torch.equal(*both) for both in zip(*areas, strict=True))
            continue
        norms = [own.view(torch.int16).int() for _, own in areas]
        assert (norms[0] - norms[1]).abs().max() <= 1
        assert (areas[0][0] != areas[1][0]).float().mean() < 1e-3
