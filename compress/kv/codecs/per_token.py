"""Every token of a head coded alone, after a Hadamard rotation: what engines hold in packed pages; no calibration.

QuaRot (arXiv 2404.00456) rotates keys after the rotary embedding and values, so that no channel of a head is much
larger than the others, and rounds each token to integers with a scale and a least value of its own (`levels: uniform`).
`levels: lloyd` has a norm in place of these, and the levels that are best for Gaussian numbers (TurboQuant, arXiv
2504.19874). Bytes are those of compress/kv/pages.py. A token does not depend on others: pages can be written in any
order, shared by prefixes and cut anywhere. Bits per element: bits + 32 / group_size, of lloyd bits + 16 / width.

With `sink: 0`, `residual_length: 0`, `flush: 1` and `exact_prefill: false` all tokens, those of the same pass too, are
read through their codes; then generation here is what an engine with pages computes.

Differences from the papers: one rotation of random signs for all layers; the norm of lloyd is that of least error.
What it does not do: tokens are not kept exact by the codec; there is no compiled reader in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kv import pages
from compress.kv.codec import Block, Codec, Field, Spec, check_bits
from compress.kv.codecs.lloyd import levels
from compress.kv.pages import PageCodes, PagedCodes, Turn
from compress.numerics import hadamard

NEEDS: frozenset[str] = frozenset()
Levels = Literal["uniform", "lloyd"]


@dataclass(frozen=True)
class Config:
    bits: int = 4  # [bits] of one code: 1 to 8
    group_size: int | None = None  # [channels] that share a scale and a least value; null: those of a head
    levels: Levels = "uniform"  # integers between the least and the largest number, or levels for a Gaussian

    def __post_init__(self) -> None:
        check_bits(self.bits)


def rotation(width: int) -> Tensor:
    """Return a Hadamard matrix with random signs, orthogonal, float32 [width, width]."""
    with torch.device("cpu"):
        signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(0)) * 2 - 1
        return hadamard.transform(torch.diag(signs.float()))


def page_codes(spec: Spec, bits: int, group_size: int | None, kind: Levels) -> PageCodes:
    """Return the layout of the codes of a token; RecipeError where they do not fit the head."""
    try:
        return PageCodes(bits, spec.width, group_size or spec.width, kind == "lloyd")
    except ValueError as error:
        raise RecipeError(f"{spec.where}: {error}; choose other bits or another group_size") from error


def page_coding(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> PagedCodes:
    """Return how pages hold the keys or the values of a layer."""
    forward = rotation(spec.width)
    codes = page_codes(spec, config.bits, config.group_size, config.levels)
    return PagedCodes(codes, Turn(forward, forward.mT.contiguous()), levels(config.bits) if codes.levels else None)


class PerToken(Codec):
    """Codes [B, h, n, code bytes] and parameters [B, h, n, parameter bytes], uint8."""

    fields = {"codes": Field("codes"), "parameters": Field("scales")}

    def __init__(self, spec: Spec, held: PagedCodes) -> None:
        turn = {"forward": held.turn.forward, "inverse": held.turn.inverse}
        super().__init__(spec, turn | ({} if held.turn.mean is None else {"mean": held.turn.mean}))
        self.codes, self.table = held.codes, held.levels

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        turned = self._turn(x).into(x.transpose(1, 2)).transpose(1, 2)
        return pages.encode(turned, self.codes, self.table)._asdict()

    def decode(self, block: Block) -> Tensor:
        x = self._decode_turned(block)
        return self._turn(x).out_of(x.transpose(1, 2)).transpose(1, 2)

    def query(self, q: Tensor, state: Block) -> Tensor:
        """Turn the queries and append a column, the constant that the mean adds to all scores."""
        turn = self._turn(q)
        bias = q.new_zeros(*q.shape[:3], 1) if turn.mean is None else q @ turn.mean[..., None]
        return torch.cat((turn.query(q.transpose(1, 2)).transpose(1, 2), bias), -1)

    def scores(self, query: Tensor, block: Block) -> Tensor:
        return query[..., :-1] @ self._decode_turned(block).mT + query[..., -1:]

    def mix(self, p: Tensor, block: Block) -> Tensor:
        return p @ self._decode_turned(block)

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        turn = self._turn(mixed)
        x = Turn(turn.forward, turn.inverse).out_of(mixed.transpose(1, 2)).transpose(1, 2)
        return x if turn.mean is None else x + mass * turn.mean[:, None]

    def _decode_turned(self, block: Block) -> Tensor:
        """Return what the codes stand for, float32 [B, h, n, width]."""
        return pages.decode(block["codes"], block["parameters"], self.codes, self.table)

    def _turn(self, like: Tensor) -> Turn:
        return Turn(**{name: tensor.to(like.device) for name, tensor in self.static.items()})


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return PerToken(spec, page_coding(config, spec, static))
