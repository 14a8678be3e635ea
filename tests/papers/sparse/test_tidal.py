"""TidalDecode: the layers that choose, and what the others read, against slow references in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

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
