"""Write integers with zero points as signed integers, for formats that have a fixed zero.

Symmetric codes of b bits less their middle are signed integers of b bits. Asymmetric ones less their zero points take
one bit more. Both are exact, so that a target without zero points still holds every weight of up to 7 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.export.weights import IntWeight, Weight


def width(weight: Weight) -> int:
    """Return the bits of the signed integers that a weight of plain integers is."""
    return int(weight.stored.params.bits) + (not weight.stored.params.symmetric)


def signed(weight: IntWeight, rows: Tensor | slice = slice(None)) -> Tensor:
    """Return codes less zero points, int8 [rows, in]; they fit (`width` is at most 8)."""
    codes = weight.codes[rows]
    if weight.zeros is None:
        return (codes - (1 << (weight.bits - 1))).view(torch.int8)  # wraps around as two's complement does
    zeros = weight.zeros[rows].repeat_interleave(weight.group_size, 1)[:, : weight.shape[1]]
    return (codes - zeros).view(torch.int8)


def scales_of(weight: IntWeight, group: int, dtype: torch.dtype) -> Tensor:
    """Return a scale for each `group` columns, which divide the weight's own groups: [out, in / group] in `dtype`.

    Raises ExportError where a scale is no number of that type.
    """
    return weight.scales_in(dtype).repeat_interleave(weight.group_size // group, 1)[:, : weight.shape[1] // group]
