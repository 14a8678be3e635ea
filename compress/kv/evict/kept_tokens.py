"""Count the tokens that stay in a layer, and those that layers store at a context, before there is a cache.

A context of n tokens is a prompt, from which tokens are evicted, and TOKENS_AFTER_PROMPT tokens, which came later and
stay: as many as those on which errors of eviction are measured (compress/evaluate/cache_scores.py).

Not exact where the text decides: `layers: variance` and `heads: ada` count as layers and heads that keep the mean. Nor
with methods that drop tokens within the prompt's pass, whose layers count as such, too.
"""

from __future__ import annotations

from typing import Any

from compress.kv.cache import make_cache
from compress.kv.evict import select
from compress.kv.settings import CacheSettings

TOKENS_AFTER_PROMPT = 64


def prompt_of(context: int, evicts: bool = True) -> int:
    """Return how many tokens of a context are the prompt: all but TOKENS_AFTER_PROMPT, or half of a short one.

    0 where nothing evicts.
    """
    return context - min(TOKENS_AFTER_PROMPT, context // 2) if evicts else 0


def by_layer(config: Any, settings: CacheSettings, context: int) -> list[int]:
    """Return how many tokens of the prompt of a context stay in each layer of a model of this configuration."""
    layers, prompt = make_cache(config, settings).layers, prompt_of(context)
    evicting = [index for index, layer in enumerate(layers) if not getattr(layer, "is_exempt", True)]
    counts = [prompt] * len(layers)
    for index in evicting:
        assert settings.evict is not None, "layers evict"
        counts[index] = select.count_kept(settings.evict, settings.keys.policy.sink, index, evicting, prompt)
    return counts


def places(kept: int, is_before_rope: bool) -> int:
    """Return the bytes in which a layer remembers where the tokens stood that it kept, of one sequence.

    is_before_rope: keys are stored before the rotary embedding, whose rows are then found by column.
    """
    return 8 + (4 * kept if is_before_rope else 0)
