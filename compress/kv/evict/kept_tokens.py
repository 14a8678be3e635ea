"""Count the tokens that stay in a layer, and those that layers store at a context, before there is a cache.

A context of n tokens is a prompt, from which tokens are evicted, and its last AFTER tokens, which came later and stay:
as many as those on which errors of eviction are measured (compress/evaluate/cache_scores.py).

Not exact where the text decides: `layers: variance` and `heads: ada` count as layers and heads that keep the mean. Nor
with `lazyllm`, whose layers count as such, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compress.kv.cache import make_cache
from compress.kv.evict import select
from compress.kv.evict.settings import Eviction
from compress.kv.settings import CacheSettings

AFTER = 64  # tokens of a context that follow the prompt


def prompt_of(context: int, evicts: bool = True) -> int:
    """Return how many tokens of a context are the prompt: all but AFTER, or half of a short one; 0: nothing evicts."""
    return context - min(AFTER, context // 2) if evicts else 0


def kept(
    eviction: Eviction,
    sink: int,
    layer: int,
    evicting: Sequence[int],
    tokens: int,
    variances: Sequence[float] | None = None,
) -> int:
    """Return how many of so many tokens of a sequence stay in a layer that evicts.

    sink: first tokens, which stay. evicting: the numbers of all layers that evict, ascending. variances: how uneven the
    attention of each of them is; None: that does not count.
    """
    budget, shares, whole = eviction.budget, [1.0] * len(evicting), set[int]()
    keep = budget.keep if budget.keep is not None else min(1.0, (budget.tokens or 0) / tokens)
    if budget.keep_by_layer:
        keep = budget.keep_by_layer[layer]
    if budget.layers == "pyramid":
        shares = select.pyramid(len(evicting))
    if variances is not None:
        shares, whole = select.by_variance(variances), {0, 1, len(evicting) - 1}
    fraction = select.fractions(keep, shares, whole)[evicting.index(layer)]
    return select.count(tokens, fraction, sink + eviction.newest(0))


def by_layer(config: Any, settings: CacheSettings, context: int) -> list[int]:
    """Return how many tokens of the prompt of a context stay in each layer of a model of this configuration."""
    layers, prompt = make_cache(config, settings).layers, prompt_of(context)
    evicting = [index for index, layer in enumerate(layers) if not getattr(layer, "is_exempt", True)]
    found = [prompt] * len(layers)
    for index in evicting:
        assert settings.evict is not None, "layers evict"
        found[index] = kept(settings.evict, settings.keys.policy.sink, index, evicting, prompt)
    return found


def places(kept: int, is_before_rope: bool) -> int:
    """Return the bytes in which a layer remembers where the tokens stood that it kept, of one sequence.

    is_before_rope: keys are stored before the rotary embedding, whose rows are then found by column.
    """
    return 8 + (4 * kept if is_before_rope else 0)
