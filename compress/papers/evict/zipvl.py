"""ZipVL, arXiv 2410.08584: the share of important tokens is chosen for each layer and input from its attention.

A few probe tokens of the prompt, its newest ones and some at random, show how a layer's attention is spread. The
important tokens are the fewest whose accumulated attention is the share `tau` of all: many where attention is spread,
few where it is not. Which ones: those of most attention by probe that can see them, so that early tokens, which more
probes see, are not preferred. Two things follow. In the prompt's forward pass attention runs among the important tokens
alone; the others get nothing from it and keep what the residual stream has. In the cache they have the bits that
kv_cache says, and the others `low` bits (the first version of the paper: 4 and 2), or none at all (`low: 0`, the
second version).

    kv_cache: {method: kivi, bits: 4, evict: {method: zipvl, tau: 0.975, low: 2}}

`tau: null` makes `keep` the share of important tokens in all layers, which is what the paper compares itself with;
beside `tau`, `keep` is the most that may be important. What came after the prompt has the bits of the important ones.

Where we differ: attention is the mean over heads, and the same tokens are important in all heads of a layer. The first
`sink` tokens and the newest `recent` ones are important always. `prefill: keys` lets all tokens attend, to the
important ones and to themselves, and `all` leaves the prompt as it is. The paper counts probes in shares of the prompt,
here they are numbers. The authors' code was not at hand; this follows the abstracts and notes on the paper.

What it does not do: judge again while decoding; codecs that are calibrated (their tables are of one number of bits).
Models whose attention has a bound on scores (`softcap`), sink logits or position biases have their prompt computed in
full.

Outside the core because no table has it on the frontier (docs/results/kv_vision.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compress.kv.evict.select import Seen
from compress.papers.evict.tiers import TieredLayer, refusal_of_low

NEEDS = frozenset({"queries"})
PROMPT_ONLY = True
LAYER = TieredLayer
DEFAULTS: Mapping[str, Any] = {"heads": "shared", "keep": 1.0}
_FIXED: Mapping[str, Any] = {"heads": "shared", "critical": False, "layers": "equal", "merge": False}


@dataclass(frozen=True)
class Config:
    tau: float | None = 0.975  # [fraction] of the attention that the important tokens hold; null: `keep` says how many
    low: int = 2  # [bits] of the tokens that are not important; 0: they are dropped
    prefill: Literal["important", "keys", "all"] = "important"  # what attends in the prompt's pass: important tokens to
    # each other; all tokens to important ones; all to all
    recent_probes: int = 64  # [tokens] newest of the prompt, whose attention is judged by
    random_probes: int = 64  # [tokens] others, at random
    seed: int = 0  # of these

    def __post_init__(self) -> None:
        if self.tau is not None and not 0 < self.tau <= 1:
            raise ValueError(f"tau {self.tau} is not a fraction above 0 and at most 1")
        if not 0 <= self.low <= 8:
            raise ValueError(f"low {self.low} is not a number of bits from 0 to 8")
        if self.recent_probes < 1 or self.random_probes < 0:
            raise ValueError("recent_probes must be 1 or more, random_probes 0 or more")


def check(budget: Any) -> None:
    """Raise ValueError, which begins with a field's name, for settings of a `Budget` that it has no use for."""
    if budget.tokens is not None:
        raise ValueError("tokens is not possible with zipvl, which chooses a share; set keep")
    if budget.keep_by_layer:
        raise ValueError("keep_by_layer is not possible with zipvl, whose layers choose their shares; set tau")
    for name, only in _FIXED.items():
        if getattr(budget, name) != only:
            raise ValueError(f"{name} is not possible with zipvl, which judges whole tokens; remove it")


def refusal(config: Config, coding: Any) -> str | None:
    """Return why tokens that are not important cannot have fewer bits than a `Coding` gives; None: they can."""
    return None if not config.low else refusal_of_low(coding)


def keeps_all(config: Config) -> bool:
    """Return whether tokens that are not important stay, with fewer bits."""
    return config.low > 0


def probe_columns(config: Config, tokens: int) -> Tensor:
    """Return the places of the probes among so many tokens, int64 [p], ascending: the same for the same number."""
    newest = torch.arange(max(0, tokens - config.recent_probes), tokens)
    others = tokens - len(newest)
    generator = torch.Generator().manual_seed(config.seed)
    chosen = torch.randperm(others, generator=generator)[: config.random_probes]
    return torch.cat((chosen.sort().values, newest))


def attention_mass(queries: Tensor, columns: Tensor, keys: Tensor) -> Tensor:
    """Return the attention that probes give to each token, mean over heads, summed over probes, float32 [n].

    queries [H, p, width], scaled, of the tokens of these columns int64 [p]; keys [h, n, width].
    """
    grouped = queries.float().unflatten(0, (keys.shape[0], -1))
    follows = torch.arange(keys.shape[1], device=keys.device) > columns.to(keys.device)[:, None]
    logits = grouped.flatten(1, 2) @ keys.float().mT
    logits = logits.unflatten(1, grouped.shape[1:3]).masked_fill_(follows, -torch.inf)
    return logits.softmax(-1).mean((0, 1)).sum(0)


def important_tokens(config: Config, mass: Tensor, columns: Tensor, keep: float, protected: tuple[int, int]) -> Tensor:
    """Return the places of the important tokens, int64 ascending, from what `attention_mass` returned [n].

    keep: the share of tokens that are important at most, or without `tau` exactly. protected: how many first and newest
    tokens are important whatever their attention.
    """
    tokens, (sink, recent) = len(mass), protected
    count = max(1, int(keep * tokens + 1e-9))
    if config.tau is not None:
        held = mass.double().sort(descending=True).values.cumsum(0)
        count = min(count, int((held < config.tau * held[-1]).sum()) + 1)
    visible = (columns.to(mass.device)[:, None] >= torch.arange(tokens, device=mass.device)).sum(0)
    score = mass / visible
    score[:sink] = torch.inf
    score[max(0, tokens - recent) :] = torch.inf
    count = min(tokens, max(count, sink + recent))
    return score.argsort(descending=True, stable=True)[:count].sort().values


def attention_work(config: Config, tokens: int, important: int) -> float:
    """Return the pairs of a query and a key that a prompt's attention reads, probes included, as a share of all."""
    pairs = {
        "important": important * (important + 1) / 2,
        "keys": important * (tokens + 1) / 2,  # on average: important tokens lie anywhere
        "all": tokens * (tokens + 1) / 2,
    }
    probes = min(tokens, config.recent_probes + config.random_probes)
    return (pairs[config.prefill] + probes * tokens) / (tokens * (tokens + 1) / 2)


def score(config: Config, seen: Seen) -> Tensor:
    """Return the mean attention of the newest queries that see a token, float32 [h, n]: the same for each KV head."""
    assert seen.queries is not None
    tokens = seen.keys.shape[1]
    columns = torch.arange(tokens - min(config.recent_probes, seen.queries.shape[1]), tokens)
    mass = attention_mass(seen.queries[:, -len(columns) :] * seen.scaling, columns, seen.keys)
    visible = (columns[:, None] >= torch.arange(tokens)).sum(0).to(mass.device)
    return (mass / visible).expand(len(seen.keys), -1)
