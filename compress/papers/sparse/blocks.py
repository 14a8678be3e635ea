"""Keep facts of each block of tokens, and list the tokens of chosen blocks, for methods that retrieve whole blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compress.kv.sparse.reader import QueryPiece, TokenChoice, decode_tokens

STEP = 2048  # tokens that are decoded at a time


def iterate_blocks(piece: QueryPiece, size: int, known: int) -> Iterator[Tensor]:
    """Yield the keys of candidates in blocks of `size`, some blocks at a time [B, h, blocks, size, width].

    known: how many blocks are left out at the beginning.
    """
    keys, stop = piece.layer.stores["keys"], piece.count // size * size
    unit = size * keys.codec.granularity
    step = max(STEP // unit, 1) * unit
    for start in range(known * size, stop, step):
        yield decode_tokens(keys, start, min(start + step, stop)).unflatten(2, (-1, size))


def hide_unseen(scores: Tensor, piece: QueryPiece, size: int) -> Tensor:
    """Return scores of blocks [B, h, query heads, n, blocks], -inf where a query may see no token of a block."""
    if piece.allowed is None:
        return scores
    is_seen = piece.allowed.unflatten(-1, (-1, size)).any(-1)
    return scores.masked_fill(~is_seen[:, None, None], -torch.inf)


def expand_blocks(choice: TokenChoice, piece: QueryPiece, size: int) -> TokenChoice:
    """Return the tokens of chosen blocks: places [B, h, n, k] of blocks -> [B, h, n, k x size] of tokens."""
    inner = torch.arange(size, device=choice.places.device)
    places = (choice.places[..., None] * size + inner).flatten(-2)
    valid = choice.valid
    if valid is not None:
        valid = valid[..., None].expand(*valid.shape, size).flatten(-2)
    if piece.allowed is not None:
        seen = piece.allowed[:, None].expand(*places.shape[:3], -1).gather(3, places)
        valid = seen if valid is None else valid & seen
    return TokenChoice(places, valid)
