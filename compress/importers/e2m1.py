"""Unpack numbers of 4 bits: a sign, two bits of exponent, one of mantissa; two in a byte, the low half first."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpacked(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers [..., 2 n] in a packed uint8 tensor [..., n]."""
    levels = torch.tensor(LEVELS, dtype=dtype)
    table = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], -1)  # [byte, half]
    return table[packed.int()].flatten(-2)
