"""Multiply with the `trellis` format on a GPU: windows become operands of tensor cores in registers, for a few rows.

    out^T [n, m] = sum over columns of code(window of row n) x[m, column], times scale and row scale

Rows that lie 16 apart have the same shift, so that one program takes 16 groups of 16 rows: 16 products, one for each
place in a group, whose left operands are [groups, columns]. Their values are made of the words of two neighbouring
columns at a time by the assembly of `row_text`: the two halves of a register, low and high, are two numbers whose sum
is the value, and meet the same activation. So a byte sum needs no conversion and no subtraction (the half 0x6400 + sum
is 1024 + sum, the other half is -1534), and the halves of `3inst` and `mcg` no addition, which also skips the rounding
of that addition: for those two codes the product is that of the sum before it.

Activations are taken as float16, those of other types times a power of two of each row (`_parts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.formats.trellis import BYTE_SUMS, HALVES, Params
from compress.kernels.contract import Shape
from compress.kernels.triton import split_k
from compress.kernels.triton.product import Product, tile_rows
from compress.kernels.triton.split_k import Grid

GROUP = 16  # rows that share their words, and groups of a program: the height of a tensor-core operand
WARPS = 4  # of a program; each takes columns of its own
OCCUPANCY = {8: 3, 16: 2}  # for a tile of rows of x: programs that the registers of a multiprocessor hold
DECODED = 1024  # columns that a program of the decoder takes


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Product | None:
    """Return the product with computed codes only: a table would be read at random for every weight."""
    return _Product(tensors, params, shape) if params.code != "hyb" else None


class Code(NamedTuple):
    """A computed code: state * factor + addend, and what becomes of it."""

    factor: int
    addend: int
    divisor: float
    halves: bool  # two float16 numbers, or else four bytes


def computed(code: str) -> Code:
    return Code(*HALVES[code], 1.0, True) if code in HALVES else Code(*BYTE_SUMS[code], False)


def configuration(params: Params, rows: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The kernel's constants but for SPLIT and USE_ASM."""
    block_m = tile_rows(rows)  # 16 rows add a sixteenth to the instructions of a weight, but 64 registers
    block_k = 256 // block_m
    factor, addend, divisor, halves = computed(params.code)
    return {
        "BITS": params.bits, "STATE_BITS": params.state_bits, "TILE_GROUPS": params.tile_rows // GROUP,
        "FACTOR": factor, "ADDEND": addend, "DIVISOR": divisor, "HALVES": halves, "ROW_SCALES": params.row_scales,
        "GROUPS": GROUP, "BLOCK_M": block_m, "BLOCK_K": block_k, "WARPS": WARPS,
        "MASKED": shape[1] % (WARPS * block_k) != 0,
    }  # fmt: skip


def decode_constants(params: Params) -> dict[str, Any]:
    """The constants of the decoder but for USE_ASM."""
    factor, addend, divisor, halves = computed(params.code)
    ratio = Fraction(str(divisor))
    return {
        "BITS": params.bits, "STATE_BITS": params.state_bits, "TILE_GROUPS": params.tile_rows // GROUP,
        "FACTOR": factor, "ADDEND": addend, "HALVES": halves, "NUMERATOR": ratio.denominator,
        "DENOMINATOR": ratio.numerator, "ROW_SCALES": params.row_scales, "BLOCK": DECODED,
    }  # fmt: skip


class _Product(Product):
    def multiply(self, x: Tensor, out: Tensor) -> None:
        from compress.kernels.triton import _trellis

        params, (outputs, inputs), rows = self.params, self.shape, x.shape[0]
        constants = configuration(params, rows, self.shape)
        block_m, step = constants["BLOCK_M"], WARPS * constants["BLOCK_K"]
        groups = trellis_format.padded_rows(params, outputs) // GROUP
        grid = Grid(-(-groups // GROUP), -(-inputs // step), GROUP * GROUP * block_m, OCCUPANCY[block_m])
        split_k.launch(
            _trellis.multiply, (x, *self._pointers(x)), out, (rows, inputs, outputs, groups), grid,
            USE_ASM=_trellis.COMPILED, num_warps=WARPS, **constants,
        )  # fmt: skip

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once, as formats/trellis.py does; in one pass.

        Byte sums are divided by 1477 / 10 instead of by 147.7, which float32 does not have: the quotients are the same.
        """
        from compress.kernels.triton import _trellis

        outputs, inputs = self.shape
        out = torch.empty(self.shape, dtype=dtype, device=self.tensors["words"].device)
        _trellis.decode[-(-inputs // DECODED), -(-outputs // GROUP)](
            *self._pointers(out), out, inputs, outputs, USE_ASM=_trellis.COMPILED, num_warps=WARPS,
            **decode_constants(self.params),
        )  # fmt: skip
        return out

    def _pointers(self, absent: Tensor) -> tuple[Tensor, ...]:
        return self.tensors["words"], self.tensors["scale"], self.stored("row_scales", absent)
