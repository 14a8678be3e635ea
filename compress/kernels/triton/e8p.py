"""Multiply with the `e8p` format on a GPU: lattice points become operands of tensor cores in registers, for a few rows.

    out^T [n, m] = sum over codes of point(code) x, times scale and row scale

One word is looked up for eight weights: a nibble of it is 8 + 2 v, v being an absolute value before the shift, an odd
number (-v where the table's sum is odd, coordinate 7). Exclusive or with 14 changes the sign of 2 v, and with 1 takes
one off: so with the signs and the parity p of the code spread over the nibbles, a nibble is 8 + 2 v - p, and the
weight, v + (1 - 2 p) / 4, is (nibble - 7.5) / 2. Residual points of 3 bits need no signs: their nibbles are 8 + 2 v.

Two nibbles 16 bits apart are a pair of float16 after a mask: a number that small is itself the fraction of a subnormal
float16, which tensor cores multiply exactly. The nibbles in bits 4 to 7 count sixteenfold and are summed apart. The
offset is taken off in the same way, as a constant operand that meets all activations.

The pairs of a code are the columns (0, 2), (1, 3), (4, 6), (5, 7): what a multiplication that spreads four bits gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.formats import e8p as e8p_format
from compress.formats.e8p import DIM, RHO, Params
from compress.kernels.contract import Shape
from compress.kernels.triton import split_k
from compress.kernels.triton.product import Product, tile_rows
from compress.kernels.triton.split_k import Grid

BLOCK_ROWS = 64
BLOCK_CODES = {8: 32, 16: 16}  # of a step, for a tile of rows of x: 256 or 128 columns
WARPS = 2
OCCUPANCY = 5  # programs that a multiprocessor holds
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # of the coordinates
DECODED = (4, 64)  # rows, and codes of each, of a program of the decoder


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Product:
    """Return the product with a weight of any width."""
    return _E8p(tensors, params, shape)


@cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 magnitudes and the 256 short vectors, int32 [256] each, as the head of this file says."""
    signed = 2 * e8p_format.magnitudes()
    signed[:, -1] *= torch.where(e8p_format.odd_sum(), -1, 1)
    shifts = 4 * torch.tensor(NIBBLES)
    packed = [((8 + values).long() << shifts).sum(1) for values in (signed, 2 * e8p_format.ball())]
    first, second = (torch.where(words < 1 << 31, words, words - (1 << 32)).int().to(device) for words in packed)
    return first, second


def configuration(params: Params, rows: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The kernel's constants but for SPLIT and USE_ASM."""
    block_m = tile_rows(rows)
    codes = BLOCK_CODES[block_m]
    return {
        "BITS": params.bits, "RHO": RHO.get(params.bits, 1.0), "ROW_SCALES": params.row_scales,
        "BLOCK_N": BLOCK_ROWS, "BLOCK_M": block_m, "BLOCK_CODES": codes, "MASKED": shape[1] % (DIM * codes) != 0,
    }  # fmt: skip


def decode_constants(params: Params) -> dict[str, Any]:
    """Return the constants of the decoder but for USE_ASM."""
    rows, columns = DECODED
    return {
        "BITS": params.bits, "RHO": RHO.get(params.bits, 1.0), "ROW_SCALES": params.row_scales,
        "BLOCK_N": rows, "BLOCK_CODES": columns,
    }  # fmt: skip


class _E8p(Product):
    def multiply(self, x: Tensor, out: Tensor) -> None:
        from compress.kernels.triton import _e8p

        constants, codes = configuration(self.params, x.shape[0], self.shape), self.tensors["codes"]
        stored_rows, code_columns = codes.shape
        tiles, steps = -(-stored_rows // BLOCK_ROWS), -(-code_columns // constants["BLOCK_CODES"])
        split_k.launch(
            _e8p.multiply,
            (x, *self._pointers(x)), out, (x.shape[0], *self.shape[::-1], stored_rows, code_columns // DIM),
            Grid(tiles, steps, constants["BLOCK_M"] * BLOCK_ROWS, OCCUPANCY),
            USE_ASM=_e8p.COMPILED, num_warps=WARPS, **constants,
        )  # fmt: skip

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once, as formats/e8p.py does; in one pass."""
        from compress.kernels.triton import _e8p

        code_columns, (rows, columns) = self.tensors["codes"].shape[1], DECODED
        out = torch.empty(self.shape, dtype=dtype, device=self.tensors["codes"].device)
        _e8p.decode[-(-code_columns // columns), -(-self.shape[0] // rows)](
            *self._pointers(out), out, *self.shape[::-1], code_columns // DIM, USE_ASM=_e8p.COMPILED, num_warps=WARPS,
            **decode_constants(self.params),
        )  # fmt: skip
        return out

    def _pointers(self, absent: Tensor) -> tuple[Tensor, ...]:
        """Return codes, residuals, both tables, the scale and the scales of rows."""
        codes = self.tensors["codes"]
        residual, row_scales = self.stored("residual", codes), self.stored("row_scales", absent)
        return codes, residual, *tables(codes.device), self.tensors["scale"], row_scales
