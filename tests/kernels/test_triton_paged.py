"""The Triton kernels of packed pages, interpreted, against the definition in float64; their machine code."""

from __future__ import annotations

import pytest
import torch

from compress.kernels import dispatch, paged
from compress.kernels.triton import paged as kernel
from compress.kv.pages import Pages
from helpers import (
    interpreter,  # noqa: F401
    offline,
)
from helpers.paged_cases import Case, expected, levels, made, relative, table, uniform

CASES = [
    Case(uniform(8, 64), uniform(4, 64), 16, (6, 2), ((150, 1), (7, 1), (66, 1))),
    Case(uniform(4, 128), levels(2, 64), 32, (3, 1), ((97, 3), (16, 1), (5, 0), (20, 2)), 33, torch.bfloat16),
    Case(levels(3, 64), uniform(6, 64, 16), 16, (4, 4), ((40, 1), (30, 19))),
    Case(uniform(4, 64, 32), uniform(5, 64), 16, (2, 1), ((600, 1),)),
]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU too."""
    monkeypatch.setattr(dispatch, "pages", lambda device: kernel)
    monkeypatch.setattr(kernel, "LEAST_SPLIT", 64)


@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = made(case)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    assert kernel.supports(given["q"], given["pages"], given["layout"])
    output = paged.attend(**given)
    assert relative(output, expected(case, given)) < 1e-3


@pytest.mark.parametrize("case", CASES[1:3])
def test_written_bytes_are_those_of_the_reference(case: Case) -> None:
    layout, generator = Pages(case.keys, case.values, case.tokens), torch.Generator().manual_seed(3)
    tables = table(case.keys), table(case.values)
    slots = torch.tensor([3, -1, 40, 0, 17])
    keys, values = (torch.randn(5, 2, codes.width, generator=generator) for codes in (case.keys, case.values))
    keys[0], values[2, 0] = 0.25, 0.0
    pages = torch.full((2, 4, 2, case.tokens, layout.token_bytes), 77, dtype=torch.uint8)
    assert kernel.writes(keys, values, pages[0], layout)
    paged.write(keys, values, pages[0], slots, layout, *tables)
    layout.encode_into(pages[1], slots, (keys, values), tables)
    assert torch.equal(*pages)


HALVES = "key_levels value_levels"
NUMBERS = "requests window table_step block_step head_step q_token q_head"
WRITTEN = "key_token key_head value_token value_head block_step head_step"
SIGNATURE = dict.fromkeys(NUMBERS.split(), "i32") | dict.fromkeys(f"sums stats {HALVES}".split(), "*fp32")
SIGNATURE |= dict.fromkeys(["table", "starts", "lengths"], "*i32") | {"q": "*bf16", "pages": "*u8"}
WRITER = dict.fromkeys(WRITTEN.split(), "i32") | dict.fromkeys(HALVES.split(), "*fp32")
WRITER |= {"keys": "*bf16", "values": "*bf16", "key_edges": "*fp32", "value_edges": "*fp32"}
WRITER |= {"pages": "*u8", "slots": "*i64"}
MODULE = "compress.kernels.triton._paged"


def attending(layout: Pages, groups: int, each: int, arch: int = 90) -> offline.Case:
    """`each` queries of each of four requests."""
    plan = kernel.tiling(layout, groups, (4 * each, 4, 8, 4096), torch.device("cpu"))
    sizes = {"GROUPS": groups, "ROWS": plan.rows, "TOKENS": plan.tokens, "SPLITS": plan.splits}
    aligned = ("table_step", "block_step", "head_step", "q_token", "q_head")
    constants = {**kernel.constants(layout), **sizes}
    return offline.Case(MODULE, "attend", SIGNATURE, constants, arch, plan.warps, 3, aligned)


@pytest.mark.slow
def test_machine_code() -> None:
    """Nothing is spilled, and a multiprocessor holds as many programs as are counted on."""
    layouts = [
        (Pages(uniform(8, 128), uniform(4, 128), 16), 4, 1),
        (Pages(uniform(4, 64), uniform(4, 64), 16), 3, 4),
        (Pages(levels(3, 128), uniform(8, 128), 32), 4, 512),
        (Pages(uniform(8, 256), uniform(8, 256), 16), 8, 1),
    ]
    cases = [attending(*given) for given in layouts]
    for case, built in zip(cases, offline.compile_cases(cases), strict=True):
        assert not [op for op in built.opcodes if op.startswith(("LDL", "STL"))], case
        programs = kernel.PROGRAM_SLOTS * kernel.FEW[1] // case.warps
        assert built.shared < 228 * 1024 / programs - 1024, case
        assert built.registers * 32 * case.warps * programs <= 1 << 16, case
        assert [op for op in built.opcodes if op.startswith(("HMMA", "HGMMA"))], case
    merged = {"sums": "*fp32", "stats": "*fp32", "out": "*fp32"}
    others = [offline.Case(MODULE, "encode", WRITER, kernel.constants(layout), warps=1) for layout, *_ in layouts]
    others.append(offline.Case(MODULE, "merge", merged, {"WIDTH": 128, "SPLITS": 64}, warps=1))
    assert len(offline.compile_cases(others)) == len(others)
