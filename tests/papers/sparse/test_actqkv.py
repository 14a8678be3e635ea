"""ActQKV: what it chooses and what comes out, against slow references in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kv.sparse.reader import Tally
from compress.papers.sparse import actqkv
from helpers.reading_cases import WIDTH, Case, best, cache, chunks, step


def by_block(case: Case, row: int, queries: Tensor, keys: Tensor, coded: int) -> Tensor:
    """ActQKV with equal budgets."""
    size, scores = case.config.block, []
    window = queries[:, -case.config.window :].double()  # H, up to window, width
    for head in range(case.heads[1]):
        means = keys[head].double().unflatten(0, (-1, size)).mean(1)
        weights = []
        for q in window.unflatten(0, (case.heads[1], -1))[head]:
            bias = (q - q.mean(0)).norm(dim=-1)
            anchors = [i for i in range(len(q)) if bias[i] >= bias.mean() or i == len(q) - 1]
            probe = torch.stack([q[i] for i in anchors]).mean(0)
            weights.append((means @ probe * WIDTH**-0.5).softmax(0))
        scores.append(torch.stack(weights).mean(0))
    blocks = math.ceil(math.ceil(case.config.keep * coded) / size)
    return best(torch.stack(scores), blocks).repeat_interleave(size, 1)


@pytest.mark.parametrize("codec", ["identity", "kivi"])
def test_actqkv(codec: str) -> None:
    read = {"method": "actqkv", "keep": 0.3, "window": 5, "block": 32, "budget": "equal", "dense_layers": 0}
    for found, expected in Case(read, codec, (4, 2)).run(by_block):
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)


def test_actqkv_gives_more_to_layers_that_spread_their_attention() -> None:
    """Budgets are keep x density over the mean density; here one layer's queries are three times as large."""
    read = {"method": "actqkv", "keep": 0.25, "dense_layers": 0, "window": 1, "block": 8}
    made = cache(read, "identity", layers=2)
    for q, k, v in chunks([300, 1, 1, 1], 1):
        step(made.layers[0], 3 * q, k, v)
        step(made.layers[1], q, k, v)
    densities, means = [], []
    for layer, scale in zip(made.layers, (3, 1), strict=True):
        reader: Any = layer.reader
        assert isinstance(reader, actqkv.ActQKV)
        means.append(reader.means.view()[0].double())
        weights = [
            (means[-1][head] @ (scale * q[0, 2 * head + i, 0].double()) * WIDTH**-0.5).softmax(0)
            for head in range(2)
            for i in range(2)
        ]
        mixed = [(weights[2 * head] + weights[2 * head + 1]) / 2 for head in range(2)]
        blocks = len(mixed[0])
        densities.append(sum(float((-(w * w.log()).sum()).exp()) for w in mixed) / 2 / blocks)
        assert float(reader.density) == pytest.approx(densities[-1], rel=1e-4)
    assert densities[0] < densities[1]
    for layer in made.layers:
        layer.reader.tally = Tally()
    q, k, v = chunks([300, 1, 1, 1], 1)[-1]
    for layer, scale in zip(made.layers, (3, 1), strict=True):
        step(layer, scale * q, k, v)
    read_by = [layer.reader.tally.keys for layer in made.layers]
    assert read_by[0] < read_by[1]
