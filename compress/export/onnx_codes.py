"""Lay plain integers out as ONNX Runtime multiplies with them (MatMulNBits) and looks them up (GatherBlockQuantized).

    codes       uint8 [rows, blocks, block * bits / 8]   2, 4 or 8 bits each, one after the other, the lowest bits first
    scales      float32 or float16 [rows, blocks]        w = scale * (code - zero)
    zeros       uint8 [rows, ceil(blocks * bits / 8)]    packed like codes; left out where all are 2 ** (bits - 1)
    row_zeros   uint8 [rows, blocks, 1]                  the same, one a byte, as lookups read them

Codes of 3, 5, 6 and 7 bits take the next wider form. Scales of groups that are larger than a block are repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compress.export.weights import EMBEDDINGS, IntWeight, Weight

WIDTHS = (2, 4, 8)  # bits of a stored code
BLOCKS = (256, 128, 64, 32, 16)  # columns that share a scale
SCALE = 4  # bytes that a scale is taken to cost, whatever its type: blocks do not depend on it


class Form(NamedTuple):
    """How the integers of a weight are stored."""

    bits: int  # of a code: one of WIDTHS
    block: int  # columns that share a scale: one of BLOCKS
    blocks: int  # of a row; the last one may be padded
    has_zeros: bool

    @property
    def row(self) -> int:
        """Bytes of the codes and scales of a row."""
        return self.blocks * (self.block * self.bits // 8 + SCALE)


def form_of(weight: Weight) -> Form | None:
    """Return the form of the fewest bytes that holds a weight of plain integers; None if its groups fit no block."""
    params, columns = weight.stored.params, weight.shape[1]
    group = params.group(columns)
    bits = next(width for width in WIDTHS if width >= params.bits)
    blocks = [block for block in BLOCKS if group % block == 0 or group >= columns]
    forms = [Form(bits, block, -(-columns // block), not params.symmetric) for block in blocks]
    return min(forms, key=lambda form: form.row, default=None)


def specs(form: Form, weight: Weight, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> shape and type of what is stored for a weight: zero points as its products and lookups read them.

    dtype: of the scales.
    """
    rows = weight.shape[0]
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((rows, form.blocks, form.block * form.bits // 8), torch.uint8),
        "scales": ((rows, form.blocks), dtype),
    }
    if form.has_zeros and weight.roles != (EMBEDDINGS,):
        stored["zeros"] = (rows, -(-form.blocks * form.bits // 8)), torch.uint8
    if form.has_zeros and EMBEDDINGS in weight.roles:
        stored["row_zeros"] = (rows, form.blocks, 1), torch.uint8
    return stored


def tensor(weight: IntWeight, form: Form, name: str, dtype: torch.dtype) -> Tensor:
    """Return one of the tensors of `specs`; ExportError for scales that `dtype` does not hold."""
    group = torch.arange(form.blocks) * form.block // weight.group_size  # of each block
    if name == "codes":
        middle = 0 if form.has_zeros else (1 << (form.bits - 1)) - (1 << (weight.bits - 1))
        padding = form.blocks * form.block - weight.shape[1]
        codes = torch.nn.functional.pad(weight.codes + middle, (0, padding))
        return _packed(codes, form.bits).view(weight.shape[0], form.blocks, -1)
    if name == "scales":
        return weight.scales_in(dtype)[:, group]
    zeros = weight.full_zeros()[:, group]
    return _packed(zeros, form.bits) if name == "zeros" else zeros[:, :, None]


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [rows, n] as bytes [rows, ceil(n * bits / 8)], the lowest bits first."""
    each = 8 // bits
    split = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    packed = split[:, :, 0].clone()
    for index in range(1, each):
        packed |= split[:, :, index] << (bits * index)
    return packed
