"""TidalDecode: the layers that choose, and what the others read, against slow references in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.papers.sparse import tidal
from helpers.reading_cases import attended, best, cache, chunks, shared, step


@pytest.mark.parametrize("heads", ["each", "all"])
@pytest.mark.parametrize("codec", ["identity", "kivi"])
def test_tidal(heads: str, codec: str) -> None:
    """Layers 0 to 4: 0 is dense, 1 and 3 choose, 2 reads what 1 chose, 4 what 3 chose."""
    read = {"method": "tidal", "keep": 0.2, "dense_layers": 1, "layers": [1, 3], "heads": heads}
    made = cache(read, codec, layers=5)
    data = [[(x[0] + i, x[1] + i / 3, x[2]) for x in chunks([150, 1, 6, 1])] for i in range(5)]
    for part in range(4):
        for i in range(5):
            layer: Any = made.layers[i]
            coded = layer.candidates()
            before = [store.read() for store in layer.stores.values()] if layer.stores else None
            q, k, v = data[i][part]
            found = step(layer, q, k, v)
            if before is None:
                continue
            keys, values = (torch.cat((b, x), 2) for b, x in zip(before, (k, v), strict=True))
            if i in (1, 3):
                chooser = keys[:, :, 3 : 3 + coded], q
            for row, n in ((row, n) for row in range(2) for n in range(q.shape[2])):
                seen = before[0].shape[2] + n + 1
                tokens = torch.ones(2, seen, dtype=torch.bool)
                if i in (2, 4):
                    scores = shared(chooser[1][row, :, n], chooser[0][row])
                    scores = scores if heads == "each" else scores.mean(0).expand_as(scores)
                    tokens[:, 3 : 3 + coded] = best(scores, math.ceil(0.2 * coded))
                expected = attended(q[row, :, n], keys[row, :, :seen], values[row, :, :seen], tokens)
                torch.testing.assert_close(found[row, n].double(), expected, atol=2e-5, rtol=0)


def test_tidal_layers_by_default() -> None:
    assert tidal.choosing(tidal.Config(), 32) == (2, 13)
    assert tidal.choosing(tidal.Config(dense_layers=5), 8) == (5,)


def published_choice(q: Tensor, keys: Tensor, k: int) -> list[set[int]]:
    """The authors' choice (DerrickYLJ/TidalDecode): for each query head the k largest products with all past keys.

    q [H, width], keys [h, n, width], the newest one included; masks of one layer are those of the later ones.
    """
    repeated = keys.repeat_interleave(q.shape[0] // keys.shape[0], 0)
    scores = torch.einsum("hc,hnc->hn", q.double(), repeated.double()) / math.sqrt(q.shape[1])
    return [set(row.topk(k).indices.tolist()) for row in scores]


def choice_of(heads: tuple[int, int]) -> tuple[list[set[int]], list[list[set[int]]], int]:
    """Return what a layer chose of the coded tokens, each published choice (by k) of its query heads, and `coded`."""
    read = {"method": "tidal", "keep": 0.2, "dense_layers": 1, "layers": [1]}
    made = cache(read, "identity", layers=2, heads=heads)
    layer: Any = made.layers[1]
    for q, k, v in chunks([150, 1, 1], 1, heads):
        coded = layer.candidates()
        keys = None if not layer.stores else torch.cat((layer.stores["keys"].read(), k), 2)
        step(layer, q, k, v)
    assert keys is not None
    _, choice = layer.reader.found[0]
    own = [{3 + place for place in row.tolist()} for row in choice.places[0, :, 0]]
    published = [published_choice(q[0, :, 0], keys[0], count) for count in range(1, keys.shape[2] + 1)]
    return own, published, coded


def test_the_tokens_are_those_of_the_authors_code_where_each_query_head_has_its_keys() -> None:
    """Of the coded tokens the same ones; sinks and newest tokens are in the code's budget, and come on top of ours."""
    own, published, coded = choice_of((4, 4))
    candidates = set(range(3, 3 + coded))
    for head, chosen in enumerate(own):
        assert chosen in [by_count[head] & candidates for by_count in published]
        assert len(chosen) == math.ceil(0.2 * coded)


def test_query_heads_that_share_keys_have_one_choice_here_and_one_each_in_the_authors_code() -> None:
    own, published, coded = choice_of((4, 2))
    candidates, size = set(range(3, 3 + coded)), len(own[0])
    by_head = [
        next(found for found in (by_count[head] & candidates for by_count in published) if len(found) == size)
        for head in range(4)
    ]
    assert by_head[0] != by_head[1] and by_head[0] != own[0]
    assert all(len(own[head // 2] & by_head[head]) > size / 3 for head in range(4))


def test_a_choosing_layer_reads_everything_and_the_code_does_so_too() -> None:
    """Layer 2 and the correction layer of the code mask nothing of their own; by default they are layers 2 and 9."""
    made = cache({"method": "tidal", "keep": 0.1, "dense_layers": 0, "layers": [0]}, "identity", layers=1)
    dense = cache(None, "identity", layers=1)
    for q, k, v in chunks([150, 1, 1], 1):
        assert torch.equal(step(made.layers[0], q, k, v), step(dense.layers[0], q, k, v))
