"""Count the tokens that layers store at a context, for what is said of bytes before there is a cache.

A context of n tokens is a prompt, from which tokens are evicted, and its last AFTER tokens, which came later and stay:
as many as those on which errors of eviction are measured (compress/evaluate/cache_scores.py).

Not exact where the text decides: `layers: variance` and `heads: ada` count as layers and heads that keep the mean. Nor
with `lazyllm`, whose layers count as such, too.
"""

from __future__ import annotations

from collections.abc import Collection

from compress import plugins
from compress.kv.evict import select
from compress.kv.evict.settings import Eviction

AFTER = 64  # tokens of a context that follow the prompt


def prompt_of(context: int, evicts: bool = True) -> int:
    """Return how many tokens of a context are the prompt: all but AFTER, or half of a short one; 0: nothing evicts."""
    return context - min(AFTER, context // 2) if evicts else 0


def kept(eviction: Eviction, sink: int, layer: int, evicting: Collection[int], context: int) -> int:
    """Return how many tokens of the prompt of a context stay in a layer.

    sink: first tokens, which stay. evicting: the numbers of the layers that evict; another keeps all.
    """
    prompt, budget = prompt_of(context), eviction.budget
    if layer not in evicting:
        return prompt
    shares = [1.0] * len(evicting)
    if budget.keep_by_layer:
        share = budget.keep_by_layer[layer]
    else:
        share = budget.keep if budget.keep is not None else min(1.0, (budget.tokens or 0) / prompt)
        if budget.layers == "pyramid":
            shares = select.pyramid(len(evicting))
    fraction = select.fractions(share, shares)[sorted(evicting).index(layer)]
    keeps = getattr(plugins.load("evict", eviction.method), "keeps", lambda config, kept: 0)
    return select.count(prompt, fraction, sink + max(budget.recent, keeps(eviction.config, 0)))


def places(kept: int, is_before_rope: bool) -> int:
    """Return the bytes in which a layer remembers where the tokens stood that it kept, of one sequence.

    is_before_rope: keys are stored before the rotary embedding, whose rows are then found by column.
    """
    return 8 + (4 * kept if is_before_rope else 0)
