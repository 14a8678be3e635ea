"""Divide what is read of a long past between compiled code, which takes whole blocks, and plain code."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compress.kernels import kv_contract
from compress.kernels.kv_contract import Rotary
from compress.kv.codec import Block, Codec

NO_TURNS = Rotary(0, *(torch.empty(1, 1, 0, device="cpu") for _ in range(2)))


def can_turn(rotary: int) -> bool:
    """Return whether compiled code can turn so many channels: half of them must be whole pieces."""
    return rotary % (2 * kv_contract.PIECE) == 0


def whole_tokens(codes: Tensor, reach: int) -> int:
    """Return how many of the first tokens compiled code may read, which reads `reach` bytes of a row of codes [B, 1, n,
    bytes], so that it may read some of those that follow.
    """
    more = -(-max(0, reach - codes.shape[3]) // max(1, codes.shape[3]))
    return max(0, codes.shape[2] - more) // kv_contract.BLOCK * kv_contract.BLOCK


def turns(codec: Codec, block: Block, whole: int) -> tuple[int, Rotary]:
    """Return how many of the first tokens, `whole` at most, compiled code can turn, or need not, and their rotary
    embedding.
    """
    if codec.rope == "post":
        return whole, NO_TURNS
    halves = block.get("halves")
    if halves is None or halves.dtype not in kv_contract.DTYPES or not can_turn(2 * halves.shape[-1]):
        return 0, NO_TURNS
    return whole, Rotary(2 * halves.shape[-1], halves[:, 0], halves[:, 1])


def rest(codec: Codec, block: Block, first: int) -> Iterator[tuple[slice, Block]]:
    """Yield the tokens from `first` on, as plain code reads them."""
    for start in range(first, block["codes"].shape[2], codec.block):
        tokens = slice(start, start + codec.block)
        rows = {name: block[name][:, :, tokens] for name in codec.fields}
        rows |= {name: block[name][:, tokens] for name in ("cos", "sin") if name in block}
        if "halves" in block:
            both = torch.cat((block["halves"][:, :, tokens],) * 2, -1)
            rows |= {"cos": both[:, 0], "sin": both[:, 1]}
        yield tokens, rows
