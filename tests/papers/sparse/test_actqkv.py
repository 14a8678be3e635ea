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


def weighted_probe(window: Tensor) -> Tensor:
    """The probe of the authors' code, of queries [tokens, H x width] float64, in its first window."""
    mean, variance = window.mean(0), window.var(0, unbiased=True)
    weights = ((window - mean) ** 2 / (variance + variance.mean() / 100)).mean(1)
    return (weights / weights.sum()) @ window


def by_published_code(case: Case, row: int, queries: Tensor, keys: Tensor, coded: int, kept: int = 0) -> Tensor:
    """The authors' choice: one of blocks for all heads; kept: keys that stand for a block (0: all of them).

    Which keys those are follows from attention there; here it is the one that the last query attends to most.
    """
    size, groups = case.config.block, case.heads[0] // case.heads[1]
    window = queries[:, -case.config.window :].double().transpose(0, 1).flatten(1)  # tokens, H x width
    probe = weighted_probe(window) if len(window) > 1 else window[0]
    repeated = keys.double().repeat_interleave(groups, 0)  # H, n, width
    blocks = repeated.unflatten(1, (-1, size))  # H, blocks, size, width
    if kept:
        scores = (blocks * queries[:, -1, None, None].double()).sum(-1)
        blocks = blocks.gather(2, scores.topk(kept, 2).indices[..., None].expand(-1, -1, -1, WIDTH))
    vectors = blocks.mean(2).transpose(0, 1).flatten(1)  # blocks, H x width
    cosines = torch.nn.functional.normalize(vectors, dim=-1) @ torch.nn.functional.normalize(probe, dim=-1)
    count = math.ceil(math.ceil(case.config.keep * coded) / size)
    return best(cosines.expand(case.heads[1], -1), count).repeat_interleave(size, 1)


PUBLISHED = {"method": "actqkv", "form": "published", "keep": 0.3, "block": 8, "budget": "equal", "dense_layers": 0}


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_published_form_chooses_what_the_authors_code_does(window: int, heads: tuple[int, int]) -> None:
    for found, expected in Case({**PUBLISHED, "window": window}, "identity", heads).run(by_published_code):
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)


def test_a_block_that_is_known_by_one_key_is_chosen_otherwise() -> None:
    """Where we differ from the authors' code: it knows a block by the keys that are attended to most."""
    case = Case({**PUBLISHED, "window": 5}, "identity", (4, 2))

    def by_one_key(*args: Tensor) -> Tensor:
        return by_published_code(*args, kept=1)  # type: ignore[arg-type]

    assert any(not torch.allclose(a.double(), b, atol=1e-3) for a, b in case.run(by_one_key))


def test_published_densities_are_normalized_entropies() -> None:
    """Of a softmax of cosines, which are at most 1 and so leave hardly any difference between layers."""
    made = cache({**PUBLISHED, "budget": "density", "window": 1}, "identity", layers=2)
    for q, k, v in chunks([300, 1, 1, 1], 1):
        step(made.layers[0], 3 * q, k, v)
        step(made.layers[1], q, k, v)
    densities = [float(layer.reader.density) for layer in made.layers]  # type: ignore[attr-defined]
    assert densities[0] == pytest.approx(densities[1], abs=1e-5) and 0.98 < densities[0] < 1


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
