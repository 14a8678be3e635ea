"""Attention over packed pages, beside the definition in float64 over what the pages decode to."""

from __future__ import annotations

import pytest
import torch

from compress.kernels import dispatch, llvm, paged
from compress.kernels.cpu import paged as kernel
from compress.kernels.cpu import paged_codes
from compress.kv.pages import PageCodes, Pages
from helpers.paged_cases import Case, expected, levels, made, relative, table, uniform

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

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")


@pytest.mark.parametrize("way", ["kernel", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_the_definition(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "plain":
        monkeypatch.setattr(dispatch, "pages", lambda device: None)
        monkeypatch.setattr(paged, "TILE_TOKENS", 64)
        monkeypatch.setattr(paged, "TILE_SCORES", 1 << 10)
    given = made(case)
    assert kernel.supports(given["q"], given["pages"], given["layout"])
    output = paged.attend(**given)
    assert output.dtype == torch.float32
    assert relative(output, expected(case, given)) < 2e-6


def test_results_do_not_depend_on_where_tokens_lie_or_who_else_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, threads and other requests change no bit; chunks and sizes of pages the rounding of float32 only."""
    case = Case(uniform(4, 64), uniform(8, 64), 16, (6, 2), ((700, 3), (300, 40), (20, 1)), 400)
    given = made(case)
    output = paged.attend(**given)
    assert torch.equal(output, paged.attend(**made(case, order=2)))
    monkeypatch.setattr(kernel, "THREAD", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert relative(paged.attend(**given), output) < 1e-6  # those of torch's products; of ours below
    few = {**given, "query_starts": torch.tensor([0, 3, 3, 3]).int(), "q": given["q"][:3]}
    assert torch.equal(paged.attend(**few), output[:3])
    torch.set_num_threads(threads)
    start = 0
    for row, (_, new) in enumerate(case.requests):
        q, starts = given["q"][start : start + new], torch.tensor([0, new]).int()
        parts = {"block_table": given["block_table"][row, None], "lengths": given["lengths"][row, None]}
        assert torch.equal(paged.attend(**{**given, **parts, "q": q, "query_starts": starts}), output[start:][:new])
        first = {"q": q[: new // 2], "query_starts": starts // 2, "lengths": parts["lengths"] - new + new // 2}
        chunk = paged.attend(**{**given, **parts, **first})
        assert new == 1 or relative(chunk, output[start : start + new // 2].double()) < 1e-6
        start += new
    for size in (32, 128):
        assert relative(paged.attend(**made(case._replace(tokens=size))), output.double()) < 1e-6


def test_rows_without_a_request_are_zero() -> None:
    given = made(CASES[0])
    longer = torch.cat((given["q"], given["q"][:3]))
    output = paged.attend(**{**given, "q": longer})
    assert torch.equal(output[:-3], paged.attend(**given))
    assert not output[-3:].any()
    nothing = {**given, "lengths": given["lengths"] * 0}
    assert not paged.attend(**nothing).any()


@pytest.mark.parametrize("layout", [(levels(4, 64), uniform(4, 64)), (levels(3, 64), uniform(2, 64))])
def test_processors_without_permutations_read_the_same(
    layout: tuple[PageCodes, PageCodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_codes.PageEmitter, "_tables", lambda self, codes, pointer: [])
    pages, tables = Pages(*layout, 16), [table(codes) for codes in layout]
    stored = torch.randint(0, 60, (2, 1, 16, pages.token_bytes), dtype=torch.uint8)
    blocks = torch.tensor([1, 0]).int()
    keys, values = torch.empty(25, 64), torch.empty(25, 64)
    pointers = [x.data_ptr() for x in (stored, blocks, *tables, keys, values) if x is not None]
    llvm.compiled(paged_codes.DecodePages(pages))(*pointers, 0, 25, stored.stride(0))
    exact = pages.decode_first(stored, blocks, 25, (tables[0], tables[1]))
    for found, wanted in zip((keys, values), exact, strict=True):
        assert (found - wanted[:, 0]).abs().max() <= 1e-6 * wanted.abs().max()


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
    assert kernel.writes(keys, values, pages[0], layout)
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
