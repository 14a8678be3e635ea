"""Selective values: what is left out, and the bound of its error, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.reading_cases import SIZES, WIDTH, cache, chunks, step


@pytest.mark.parametrize("codec", ["identity", "kivi", "lloyd", "gear"])
def test_selective_values_and_its_bound(codec: str) -> None:
    """What is left out is wrong by at most its weight times the largest norm, and is what the docstring says."""
    eps, made = 0.01, cache({"method": "selective_values", "eps": 0.01}, codec)
    layer: Any = made.layers[0]
    dropped = 0
    for q, k, v in chunks(SIZES):
        coded = layer.candidates()
        before = [store.read() for store in layer.stores.values()] if layer.stores else None
        found = step(layer, q, k, v)
        for row, n in [] if before is None else [(row, n) for row in range(2) for n in range(q.shape[2])]:
            assert before is not None
            keys, values = (torch.cat((b[row], x[row, :, : n + 1]), 1) for b, x in zip(before, (k, v), strict=True))
            for head in range(2):
                group = q[row, 2 * head : 2 * head + 2, n].double()
                p = (group @ keys[head].double().T * WIDTH**-0.5).softmax(-1)
                read = torch.ones(p.shape[1], dtype=torch.bool)
                read[3 : 3 + coded] = p[:, 3 : 3 + coded].amax(0) > eps
                dropped += int((~read).sum())
                own = found[row, n, 2 * head : 2 * head + 2].double()
                torch.testing.assert_close(own, (p * read) @ values[head].double(), atol=2e-5, rtol=0)
                lost = own - p @ values[head].double()
                norms = torch.cat((values[head][~read].double().norm(dim=-1), torch.zeros(1, dtype=torch.float64)))
                assert (lost.norm(dim=-1) <= (p * ~read).sum(-1) * norms.max() + 2e-5).all()
    assert dropped > 500
