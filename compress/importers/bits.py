"""Unpack codes of 1 to 8 bits that lie one after another in words, the lowest bits of a word first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
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
