"""Rows of a table are looked up by a kernel where there is one, and are those of its format to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import CompressError, TokenIdError
from compress.formats import int as int_format
from compress.formats.int import Params
from compress.kernels import dispatch, llvm
from compress.kernels.cpu import int as int_kernel
from helpers.stored import random_weight

IDS = torch.tensor([36, 0, 9, 9, 16])
TYPES = (torch.float32, torch.float16, torch.bfloat16)
compiled = pytest.mark.skipif(not llvm.available(), reason="nothing is compiled here")


@compiled
@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("group", "columns"), [(-1, 77), (32, 608)])
def test_compiled_rows_are_those_of_the_format(bits: int, group: int, columns: int, symmetric: bool) -> None:
    shape, scales = (37, columns), "bfloat16" if bits % 2 else "float16"
    params = int_format.params_for(bits, group, symmetric, columns, scales)
    tensors = random_weight("int", params, shape, seed=bits).tensors
    for dtype in TYPES:
        found = int_kernel.look_up(tensors, params, shape, IDS, dtype)
        assert found is not None and torch.equal(found, int_format.decode_rows(tensors, params, shape, IDS, dtype))


@compiled
def test_a_table_of_more_words_than_32_bits_count(tmp_path: Path) -> None:
    """A file with holes: only the pages of the rows that are written take memory."""
    shape = (1 << 20, 4352)
    params = Params(8, -1, True, 128)
    words, scales = (int_format.specs(params, shape)[name][0] for name in ("words8", "scales"))
    table = torch.from_file(str(tmp_path / "words"), shared=True, size=math.prod(words), dtype=torch.int16).view(words)
    tensors = {"words8": table, "scales": torch.zeros(scales, dtype=torch.float16)}
    ids = torch.tensor([shape[0] - 1, 0, shape[0] // 2 + 1])
    table[ids] = torch.randint(-(1 << 15), 1 << 15, (3, words[1]), dtype=torch.int16)
    tensors["scales"][:, ids] = torch.rand(1, 3).half()
    found = int_kernel.look_up(tensors, params, shape, ids, torch.bfloat16)
    assert found is not None
    assert torch.equal(found, int_format.decode_rows(tensors, params, shape, ids, torch.bfloat16))


@compiled
def test_rows_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (5000, 512)
    params = int_format.params_for(4, 64, True, shape[1])
    tensors = random_weight("int", params, shape).tensors
    ids = torch.randint(shape[0], (5000,), generator=torch.Generator().manual_seed(0))
    wanted = int_format.decode_rows(tensors, params, shape, ids, torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(dispatch.rows(ids, tensors, "int", params, shape, torch.bfloat16), wanted)


@pytest.mark.parametrize("group", [64, 24])  # a kernel reads the one, the other is decoded by its format
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_dispatch(group: int, dtype: torch.dtype) -> None:
    shape = (70, 960)
    params = int_format.params_for(5, group, False, shape[1])
    tensors = random_weight("int", params, shape).tensors
    wanted = int_format.decode_rows(tensors, params, shape, IDS, dtype)
    for ids in (IDS, IDS.int(), IDS.to(torch.uint8), torch.stack([IDS, IDS], 1)[:, 0]):
        assert torch.equal(dispatch.rows(ids, tensors, "int", params, shape, dtype), wanted)
    assert torch.equal(dispatch.rows(IDS[:0], tensors, "int", params, shape, dtype), wanted[:0])
    apart = {name: torch.stack([t, t], -1)[..., 0] for name, t in tensors.items()}  # no kernel reads these
    assert torch.equal(dispatch.rows(IDS, apart, "int", params, shape, dtype), wanted)


def test_a_kernel_is_taken_where_it_reads_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    params, shape = Params(8, -1, True, 64), (40, 512)
    weight = random_weight("int", params, shape)
    seen = []

    def look_up(*arguments: Any) -> torch.Tensor:
        seen.append(arguments)
        return torch.zeros(len(arguments[3]), shape[1], dtype=arguments[4])

    monkeypatch.setattr(int_kernel, "look_up", look_up)
    assert not dispatch.rows(IDS, weight.tensors, "int", params, shape, torch.float32).any()
    assert len(seen) == 1


@pytest.mark.parametrize("group", [64, 24])
@pytest.mark.parametrize("wrong", [-1, 33, 40, 1 << 40])  # 48 rows are stored
def test_an_id_that_is_no_row_is_an_error(wrong: int, group: int) -> None:
    params, shape = int_format.params_for(5, group, True, 960), (33, 960)
    tensors = random_weight("int", params, shape).tensors
    with pytest.raises(TokenIdError, match=f"token id {wrong} is not in the table of 33 rows") as caught:
        dispatch.rows(torch.tensor([0, wrong, 1]), tensors, "int", params, shape, torch.float32)
    assert isinstance(caught.value, IndexError) and isinstance(caught.value, CompressError)


@compiled
@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize(("bits", "group"), [(3, 64), (3, 32), (3, 16), (5, 48), (7, -1)])
def test_tiles_of_16_words(bits: int, group: int) -> None:
    """Vectors of two fields, where groups allow them; rows and products are right."""
    shape, params = (40, 700), Params(bits, group, False, 16, narrow_tail=group % 32 == 0 or group == -1)
    tensors = random_weight("int", params, shape).tensors
    for dtype in (torch.float32, torch.bfloat16):
        wanted = int_format.decode_rows(tensors, params, shape, IDS, dtype)
        assert torch.equal(dispatch.rows(IDS, tensors, "int", params, shape, dtype), wanted)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ int_format.decode(tensors, params, shape, torch.float64).T
    found = dispatch.product(x, tensors, "int", params, shape).double()
    assert (found - exact).norm() < 4e-3 * exact.norm()
