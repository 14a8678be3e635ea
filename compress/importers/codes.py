"""Unpack codes: integers of 1 to 8 bits in words, the lowest bits of a word first, and e2m1 numbers of 4 bits.

An e2m1 number is a sign, two bits of exponent and one of mantissa. Two lie in a byte, the low half first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes uint8 [..., count] of integers [..., words]; a code may lie in two words."""
    octets = words.contiguous().view(torch.uint8)
    octets = pad(octets, (0, -octets.shape[-1] % bits)).unflatten(-1, (-1, bits))  # eight codes in `bits` bytes
    codes = torch.empty(*octets.shape[:-1], 8, dtype=torch.uint8)
    for index in range(8):
        octet, shift = divmod(index * bits, 8)
        code = octets[..., octet] >> shift
        if shift + bits > 8:
            code = code | octets[..., octet + 1] << (8 - shift)
        codes[..., index] = code & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count]


def unpack_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers [..., 2 n] in a packed uint8 tensor [..., n]."""
    levels = torch.tensor(E2M1_NUMBERS, dtype=dtype)
    table = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], -1)  # [byte, half]
    return table[packed.int()].flatten(-2)
