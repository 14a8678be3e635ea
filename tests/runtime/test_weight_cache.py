"""What the cache of derived weights counts, without the layers that use it."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch
from torch import nn

from compress.runtime.weight_cache import WeightCache


class Sized:
    """In place of a tensor: counts how often its size is asked for."""

    asked = 0

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def nbytes(self) -> int:
        Sized.asked += 1
        return self.size


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def summed(cache: WeightCache) -> int:
    return sum(e.derived[0].size for entries in cache._entries.values() for e in entries.values())  # type: ignore


def step(cache: WeightCache, layers: list[Layer], chance: random.Random) -> None:
    """One of all that may happen to a cache."""
    what, place = chance.random(), chance.randrange(len(layers))
    if what < 0.6:
        cache.get(layers[place], chance.choice("abc"), lambda: (Sized(chance.randrange(1, 50)),))  # type: ignore
    elif what < 0.75:
        cache.drop(layers[place])
    elif what < 0.9:
        layers[place] = Layer()  # and the old one dies
    elif what < 0.99:
        with torch.no_grad():
            layers[place].weight.add_(1)  # what was derived is stale
    else:
        cache.clear()


@pytest.mark.parametrize("seed", range(5))
def test_the_total_is_the_sum_after_anything(seed: int) -> None:
    chance, cache = random.Random(seed), WeightCache(400)
    layers = [Layer() for _ in range(12)]
    for _ in range(600):
        step(cache, layers, chance)
        assert cache.nbytes == summed(cache) <= cache.limit
    layers.clear()
    gc.collect()
    assert cache.nbytes == 0 and not cache._entries


@pytest.mark.parametrize("limit", [10**9, 1000])
def test_a_miss_does_not_look_at_what_other_layers_hold(limit: int) -> None:
    cache, layers = WeightCache(limit), [Layer() for _ in range(300)]
    for layer in layers:
        Sized.asked = 0
        cache.get(layer, "key", lambda: (Sized(10),))  # type: ignore
        assert Sized.asked == 1, "only what is new is measured"
    assert cache.nbytes == min(limit, 3000)


def test_the_total_is_right_after_many_threads() -> None:
    cache = WeightCache(2000)

    def work(seed: int) -> None:
        chance, layers = random.Random(seed), [Layer() for _ in range(5)]
        for _ in range(300):
            step(cache, layers, chance)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert cache.nbytes == summed(cache) == 0
