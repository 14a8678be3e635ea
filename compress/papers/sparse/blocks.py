"""Turn chosen blocks of tokens into the tokens that attention reads: what methods share that retrieve whole blocks."""

from __future__ import annotations

import torch

from compress.kv.sparse.reader import QueryPiece, TokenChoice


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
