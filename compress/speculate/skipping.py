"""Choose, write and score sets of sublayers among inner blocks, for drafts that pass over them.

A set of sublayers is written like `3/7-9/12a/15m`: blocks 3 and 7 to 9, the attention of 12, the MLP of 15.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import shown
from compress.runtime.bypass import ATTENTION, MLP, Sublayer, bypassed, sublayers_of
from compress.speculate.drafting import Reduction
from compress.speculate.session import Session

_ITEM = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?([am]?)")
_KINDS = {"": (ATTENTION, MLP), "a": (ATTENTION,), "m": (MLP,)}


class Skip(Reduction):
    """The model without a set of its sublayers; subclasses change the set."""

    def __init__(self, sublayers: Iterable[Sublayer] = ()) -> None:
        self.sublayers = frozenset(sublayers)

    def reduce(self, session: Session) -> AbstractContextManager[Any]:
        """Return a context in which the sublayers do not run."""
        return bypassed(session.model, self.sublayers)


def inner_sublayers(model: nn.Module) -> tuple[Sublayer, ...]:
    """Return the sublayers of all blocks but the first and the last, without which no draft is any good."""
    known = sublayers_of(model)
    last = max(block for block, _ in known)
    return tuple(each for each in known if 0 < each[0] < last)


def evenly(places: Sequence[int], count: int) -> list[int]:
    """Return `count` of the places, at even distances."""
    return [places[(2 * i + 1) * len(places) // (2 * count)] for i in range(count)]


def even_set(known: Sequence[Sublayer], count: int) -> frozenset[Sublayer]:
    """Return `count` of the known sublayers: those of whole blocks at even distances, and an attention if it is odd."""
    blocks = sorted({block for block, _ in known})
    chosen = set(evenly(blocks, (count * len(blocks) + len(known) - 1) // len(known)))
    return frozenset([each for each in known if each[0] in chosen][:count])


def write_set(sublayers: Iterable[Sublayer]) -> str:
    """Return a set as text."""
    blocks: dict[int, str] = {}
    for block, kind in sorted(sublayers):
        blocks[block] = "" if block in blocks else kind[0]
    return "/".join(f"{block}{kind}" for block, kind in blocks.items())


def read_set(text: str) -> frozenset[Sublayer]:
    """Return the set that a text means; ValueError for what means none."""
    chosen = set[Sublayer]()
    for item in text.split("/") if text else []:
        matched = _ITEM.fullmatch(item.strip())
        if matched is None:
            raise ValueError(f"{shown(item)} is no block like 7, 7-9, 7a (its attention) or 7m (its MLP)")
        first, last = int(matched[1]), int(matched[2] or matched[1])
        chosen |= {(block, kind) for block in range(first, last + 1) for kind in _KINDS[matched[3]]}
    return frozenset(chosen)


@torch.no_grad()
def likeliest(model: Any, ids: Tensor, count: int, sublayers: frozenset[Sublayer] = frozenset()) -> Tensor:
    """Return what a model without sublayers writes in the place of the last `count` tokens of a text, int64 [count].

    ids: int64 [1, tokens]. One pass without a cache: the tokens before the last `count` are all that it reads.
    """
    with bypassed(model, sublayers):
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=count).logits
    tokens: Tensor = logits[0].argmax(-1)
    return tokens


def matching_share(model: Any, ids: Tensor, wanted: Tensor, sublayers: frozenset[Sublayer]) -> float:
    """Return the share of wanted tokens, int64 [count], that `likeliest` gives for the last tokens of a text."""
    return float((likeliest(model, ids, len(wanted), sublayers) == wanted).float().mean())
