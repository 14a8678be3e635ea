"""The Triton kernel that looks rows of an `int` table up: interpreted, against the format; its machine code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.formats.int import Params
from compress.kernels.triton import int as int_kernel
from compress.kernels.triton.int import layout
from helpers import (
    interpreter,  # noqa: F401
    offline,
)
from helpers.stored import random_weight

IDS = torch.tensor([36, 9, 9])
BITS = [2, 3, 4, 5, 6, 7, 8]


def cut_off(rows: Tensor) -> Tensor:
    """bfloat16 numbers as the interpreter makes them of float32: it cuts off instead of rounding."""
    return (rows.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def assert_rows(tensors: dict[str, Tensor], params: Params, shape: tuple[int, int], ids: Tensor) -> None:
    exact = int_format.decode_rows(tensors, params, shape, ids.long(), torch.float32)
    half = int_format.decode_rows(tensors, params, shape, ids.long(), torch.float16)
    for dtype, wanted in ((torch.float32, exact), (torch.float16, half), (torch.bfloat16, cut_off(exact))):
        found = int_kernel.look_up(tensors, params, shape, ids, dtype)
        assert found is not None and found.dtype == dtype and torch.equal(found, wanted), dtype


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is not zero."""
    empty = torch.empty

    def poison(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poison)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("group", "columns"), [(-1, 77), (24, 240), (32, 608)])
def test_rows_are_those_of_the_format(bits: int, group: int, columns: int, symmetric: bool) -> None:
    shape, dtype = (37, columns), "bfloat16" if bits % 2 else "float16"
    params = int_format.params_for(bits, group, symmetric, columns, dtype)
    assert_rows(random_weight("int", params, shape, seed=bits).tensors, params, shape, IDS)


@pytest.mark.parametrize("tile_words", int_format.TILE_WORDS)
@pytest.mark.parametrize("bits", [3, 7, 8])
def test_rows_of_every_layout(bits: int, tile_words: int) -> None:
    shape = (37, 1100)  # several programs a row, whole tiles and a tail
    for narrow in (True, False):
        params = Params(bits, 96, False, tile_words, narrow_tail=narrow)
        assert_rows(random_weight("int", params, shape).tensors, params, shape, IDS[:2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_no_other_row_is_read(dtype: torch.dtype) -> None:
    params = Params(6, 32, True, 16, narrow_tail=True)
    tensors = random_weight("int", params, (64, 96)).tensors
    ids = torch.tensor([5, 63, 5], dtype=dtype)
    others = torch.ones(64, dtype=torch.bool)
    others[ids.long()] = False
    tensors["scales"][:, others] = math.nan
    assert_rows(tensors, params, (64, 96), ids)


def test_an_id_outside_gives_nan_and_reads_nothing_outside() -> None:
    params, shape = Params(8, -1, True, 32), (10, 64)  # 16 stored rows
    tensors = random_weight("int", params, shape).tensors
    ids = torch.tensor([-1, 3, 10, 1 << 40])
    found = int_kernel.look_up(tensors, params, shape, ids, torch.float32)
    assert found is not None and found[[0, 2, 3]].isnan().all()
    assert torch.equal(found[1:2], int_format.decode_rows(tensors, params, shape, ids[1:2], torch.float32))


def test_a_table_of_more_words_than_32_bits_count(tmp_path: Path) -> None:
    """A file with holes: only the pages of the rows that are written take memory."""
    shape = (1 << 20, 4352)
    params = Params(8, -1, True, 128)
    words, scales = (int_format.specs(params, shape)[name][0] for name in ("words8", "scales"))
    assert math.prod(words) > 1 << 31
    table = torch.from_file(str(tmp_path / "words"), shared=True, size=math.prod(words), dtype=torch.int16).view(words)
    tensors = {"words8": table, "scales": torch.zeros(scales, dtype=torch.float16)}
    ids = torch.tensor([shape[0] - 1, 0, shape[0] // 2 + 1])
    table[ids] = torch.randint(-(1 << 15), 1 << 15, (3, words[1]), dtype=torch.int16)
    tensors["scales"][:, ids] = torch.rand(1, 3).half()
    assert_rows(tensors, params, shape, ids)


def test_other_types_are_left_to_the_format() -> None:
    params = Params(8, -1, True, 32)
    tensors = random_weight("int", params, (16, 64)).tensors
    assert int_kernel.look_up(tensors, params, (16, 64), IDS[1:3], torch.float64) is None


POINTERS = {"ids": "i64", "words_a": "i16", "words_b": "i16", "words_c": "i16", "zeros": "u8"}
SIZES = ("rows", "in_features", "stored_rows", "whole", "stored")


def case(bits: int, group: int, symmetric: bool, columns: int, arch: int = 90, out: str = "bf16") -> offline.Case:
    """A look-up as it is launched for a table with so many columns."""
    params = int_format.params_for(bits, group, symmetric, columns)
    signature = {name: f"*{kind}" for name, kind in POINTERS.items()} | dict.fromkeys(SIZES, "i32")
    signature |= {"scales": "*fp16", "out": f"*{out}"}
    constants: dict[str, Any] = layout(params) | {"NARROW": params.narrow_tail, "BLOCK": int_kernel.ROW_BLOCK}
    aligned = ("in_features", "stored_rows", "whole", "stored")
    return offline.Case("compress.kernels.triton.int", "read_rows", signature, constants, arch, aligned=aligned)


def assert_lean(built: offline.Built) -> None:
    """Nothing is spilled, nothing goes through shared memory, and results are rounded to the nearest."""
    assert not built.spills and not built.shared
    assert not any(opcode.startswith(("LDL", "STL")) for opcode in built.opcodes)
    assert any(opcode.startswith("STG.E.64") for opcode in built.opcodes), "four results of a thread at once"
    rounding = [opcode for opcode in built.opcodes if opcode.startswith("F2F")]
    assert rounding and not any(mode in opcode for opcode in rounding for mode in (".RZ", ".RM", ".RP"))


def test_machine_code() -> None:
    cases = [case(8, -1, True, 4096), case(3, 64, False, 576), case(7, 24, False, 4096)]
    for built in offline.compile_cases(cases):
        assert_lean(built)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_machine_code_of_every_width(arch: int) -> None:
    cases = [
        case(bits, group, symmetric, columns, arch, out)
        for bits in BITS
        for symmetric in (True, False)
        for group, columns, out in ((-1, 4096, "bf16"), (64, 576, "fp16"))
    ]
    for built in offline.compile_cases(cases):
        assert_lean(built)
