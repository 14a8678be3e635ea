"""LQ-LoRA's integer program against all choices of a small table."""

from __future__ import annotations

import pytest

from compress.papers.allocate import lq_lora
from helpers.allocator_tables import best, model, problem, run


@pytest.mark.parametrize("estimator", ["weight", "fisher"])
def test_lq_lora_is_exact(estimator: str) -> None:
    given = problem(model(2, seed=2), 3.1)
    found = run(lq_lora, given, estimator=estimator)
    least = best(given, lambda unit, entry: entry.damage[estimator])
    assert given.damage(found.choice, estimator) == pytest.approx(least, rel=1e-5)
    assert lq_lora.needs(lq_lora.Config(estimator=estimator)) == {estimator}  # type: ignore[arg-type]
