"""Patterns of sparse prompts: counted exactly, causal, and at most the share of products that was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import sparse_prefill  # noqa: E402


def test_products_of_lines_are_counted_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    for n, columns, diagonals in ((50, 7, 9), (33, 1, 33), (20, 20, 1)):
        a, b = (torch.randperm(n, generator=generator)[:count] for count in (columns, diagonals))
        slow = sum(j in a.tolist() or i - j in b.tolist() for i in range(n) for j in range(i + 1))
        assert sparse_prefill._products(a, b, n) == slow


@pytest.mark.parametrize("pattern", sparse_prefill.PATTERNS)
@pytest.mark.parametrize("share", [0.5, 0.25, 0.1])
def test_patterns_keep_to_their_share(pattern: str, share: float) -> None:
    """Within a twentieth below it; no later token is seen, and every query sees itself and the first token."""
    n = 800
    q, k = (torch.randn(3, n, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    made = sparse_prefill.PATTERNS[pattern](q, k, share)
    assert not bool(made.triu(1).any())
    assert bool(made.diagonal(dim1=1, dim2=2).all()) and bool(made[:, :, 0].all())
    found = made.sum((1, 2)) / (n * (n + 1) / 2)
    assert bool((found <= share + 0.02).all() and (found >= share - 0.06).all())


def test_lines_that_matter_are_chosen() -> None:
    """A key that all queries look at is a column; keys that each query looks at 40 tokens back are a diagonal."""
    n, width = 256, 64
    q, k = torch.zeros(1, n, width), torch.zeros(1, n, width)
    q[0, :, 0], k[0, 77, 0] = 8.0, 8.0
    found = sparse_prefill.vertical_slash(q, k, 0.2)[0]
    assert bool(found[77:, 77].all())
    phase = torch.randn(n + 40, width - 1, generator=torch.Generator().manual_seed(0))
    k[0, :, 0], q[0, :, 0] = 0, 0
    k[0, :, 1:], q[0, :, 1:] = phase[40:], phase[:n]
    found = sparse_prefill.vertical_slash(q, k, 0.2)[0]
    assert bool(found[torch.arange(40, n), torch.arange(n - 40)].all())
