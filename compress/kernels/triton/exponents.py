"""Decode ranked codes of the `exponents` format on a GPU: bfloat16 weights bit for bit, by integers alone.

A program joins 512 columns of a row: one byte holds two codes, another one sign and mantissa. Escapes, about 1 of 3,000
weights, are put in their places behind. torch multiplies what is decoded, so that results are bit for bit those of the
plain weight. Huffman codes have no kernel: such weights are decoded when a model is loaded.

There is no product with the codes themselves: a weight is decoded to memory of its own for each of them.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from compress.formats.exponents import Params
from compress.kernels.contract import Prepared, Shape

BLOCK = 256  # bytes of codes of a program
WARPS = 1


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the decoder of a weight with ranked codes."""
    return _RankedWeight(tensors, params, shape) if params.coding == "ranked" else None


class _RankedWeight(Prepared):
    """A weight that is decoded as a whole."""

    types = (torch.bfloat16, torch.float16, torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.decode(x.dtype))

    def most_rows(self, dtype: torch.dtype) -> int:
        return 0

    def decode(self, dtype: torch.dtype) -> Tensor:
        rows, columns = self.shape
        fractions, codes = self.tensors["fractions"], self.tensors["codes"]
        out = torch.empty(rows, columns, dtype=torch.int16, device=codes.device)
        pitch = codes.shape[1]
        join[rows, -(-pitch // BLOCK)](
            fractions, codes, out, columns, pitch, self.params.base, BLOCK=BLOCK, num_warps=WARPS
        )
        if self.params.escapes:
            out.view(-1)[self.tensors["escapes"].long()] = self.tensors["escaped"]
        return out.view(torch.bfloat16).to(dtype)


@triton.jit(do_not_specialize=["base"])
def join(fractions, codes, out, columns, pitch, base, BLOCK: tl.constexpr):
    """out int16 [rows, columns], the bits of bfloat16; program (row, BLOCK bytes of its codes)."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    both = tl.load(codes + row * pitch + j, mask=j < pitch, other=0).to(tl.int32)
    ranks = tl.reshape(tl.join(both & 0xF, both >> 4), (2 * BLOCK,))
    column = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    mask = column < columns
    fraction = tl.load(fractions + row * columns + column, mask=mask, other=0).to(tl.int32)
    exponent = tl.where(ranks == 0, 0, ranks + base)
    bits = (fraction & 0x80) << 8 | exponent << 7 | (fraction & 0x7F)
    tl.store(out + row * columns + column, bits.to(tl.int16), mask=mask)
