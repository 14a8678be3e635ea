"""How much attention reads of cached tokens, against plain sums in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.calib import kv_attended
from compress.calib.kv_attended import attention_by_key

HEADS, GROUPS, WIDTH = 2, 3, 8


def states(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, h, tokens, WIDTH, generator=generator) for h in (HEADS * GROUPS, HEADS))
    return 2 * q, k


def plain(q: Tensor, k: Tensor, seen: Tensor, near: int, scaling: float, softcap: float | None = None) -> Tensor:
    """seen bool [n, n]."""
    tokens = k.shape[2]
    found = torch.zeros(len(k), HEADS, tokens, dtype=torch.float64)
    for b in range(len(k)):
        for head in range(HEADS * GROUPS):
            for i in range(near, tokens):
                scores = k[b, head // GROUPS].double() @ q[b, head, i].double() * scaling
                if softcap is not None:
                    scores = (scores / softcap).tanh() * softcap
                p = scores.masked_fill(~seen[i], float("-inf")).softmax(0)
                found[b, head // GROUPS, : i - near + 1] += p[: i - near + 1].square()
    return found


def test_against_plain_sums() -> None:
    (q, k), causal = states(2, 40), torch.ones(40, 40, dtype=torch.bool).tril()
    found = attention_by_key(q, k, None, (None, None), 7)
    expected = plain(q, k, causal, 7, WIDTH**-0.5)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    assert not found[:, :, 34:].any()  # no query is far enough behind them
    capped = attention_by_key(q, k, None, (0.5, 2.0), 7)
    torch.testing.assert_close(capped.double(), plain(q, k, causal, 7, 0.5, 2.0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [1, HEADS * GROUPS])
def test_masks(heads: int) -> None:
    """A window of 20 tokens, as a mask of either kind."""
    q, k = states(2, 40)
    window = torch.ones(40, 40, dtype=torch.bool).tril().triu(-19)
    expected = plain(q, k, window, 5, WIDTH**-0.5)
    for mask in (window, torch.zeros(40, 40).masked_fill(~window, -1e30)):
        found = attention_by_key(q, k, mask.expand(1, heads, 40, 40), (None, None), 5)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def test_batches_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = states(3, 300)
    whole = attention_by_key(q, k, None, (None, None), 20)
    for i in range(3):
        assert torch.equal(attention_by_key(q[i : i + 1], k[i : i + 1], None, (None, None), 20)[0], whole[i])
    monkeypatch.setattr(kv_attended, "SCORES", 1)
    torch.testing.assert_close(attention_by_key(q, k, None, (None, None), 20), whole)


def test_few_tokens_and_few_queries() -> None:
    """What is near is at most half of the text; of many queries some are looked at, those of a longer text alike."""
    q, k = states(1, 30)
    near = attention_by_key(q, k, None, (None, None), 1000)
    assert torch.equal(near, attention_by_key(q, k, None, (None, None), 15)) and bool(near[:, :, :15].all())
    q, k = states(1, 300)
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    every = plain(q[:, ::GROUPS].repeat_interleave(GROUPS, 1), k, causal, 20, WIDTH**-0.5)
    some = attention_by_key(q[:, ::GROUPS].repeat_interleave(GROUPS, 1), k, None, (None, None), 20).double()
    assert float((some.sum() * 3 / every.sum() - 1).abs()) < 0.1  # one query in three
