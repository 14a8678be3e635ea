"""Quest: the pages that it reads against a slow reference in float64, and that its bounds hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.reading_cases import WIDTH, Case, best, cache, chunks, normal, step


def by_page(case: Case, row: int, queries: Tensor, keys: Tensor, coded: int) -> Tensor:
    size, scores = case.config.page, []
    for head in range(case.heads[1]):
        pages = keys[head].unflatten(0, (-1, size))
        low, high = pages.amin(1).half().double(), pages.amax(1).half().double()
        weights = []
        for q in queries[:, -1].unflatten(0, (case.heads[1], -1))[head].double():
            bounds = torch.stack([torch.maximum(q * a, q * b).sum() for a, b in zip(low, high, strict=True)])
            weights.append((bounds * WIDTH**-0.5).softmax(0))
        scores.append(torch.stack(weights).mean(0))
    pages = math.ceil(math.ceil(case.config.keep * coded) / size)
    return best(torch.stack(scores), pages).repeat_interleave(size, 1)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
@pytest.mark.parametrize("codec", ["identity", "kivi"])
def test_quest(codec: str, heads: tuple[int, int]) -> None:
    read = {"method": "quest", "keep": 0.3, "page": 16, "dense_layers": 0}
    for found, expected in Case(read, codec, heads).run(by_page):
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)


def test_no_score_of_a_page_is_above_its_bound() -> None:
    made = cache({"method": "quest", "keep": 0.2, "dense_layers": 0}, "identity")
    layer: Any = made.layers[0]
    for q, k, v in chunks([150, 1, 1], 1):
        step(layer, q, k, v)
    low, high = layer.reader.bounds.view().float().unbind(3)
    keys = layer.stores["keys"].read()[0, :, 3 : 3 + 16 * low.shape[2]].unflatten(1, (-1, 16))
    q = normal(2, 50, WIDTH, seed=9)
    bounds = q.clamp(min=0) @ high[0].mT + q.clamp(max=0) @ low[0].mT
    scores = torch.einsum("hqc,hpsc->hqps", q, keys).amax(-1)
    assert bool((scores <= bounds + 1e-2).all())


def test_bounds_are_counted_as_bytes_and_cropped() -> None:
    made = cache({"method": "quest", "keep": 0.2, "dense_layers": 0}, "identity")
    layer: Any = made.layers[0]
    for q, k, v in chunks([150, 1], 1):
        step(layer, q, k, v)
    pages = (150 - 3 - 20) // 16  # when the last token came
    assert layer.reader.nbytes().extras == pages * 2 * 2 * WIDTH * 2
    layer.crop(-40)
    assert layer.reader.bounds.length <= layer.stores["keys"].coded // 16


@pytest.mark.parametrize(("key", "value"), [("keep", 0.0), ("page", 0), ("dense_layers", -1)])
def test_impossible_settings_are_refused(key: str, value: float) -> None:
    from compress.papers.sparse import quest

    with pytest.raises(ValueError, match=key):
        quest.Config(**{key: value})  # type: ignore[arg-type]
