"""Layerwise: whole blocks by one score, on tables made here; the scores against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import recipe
from compress.allocate import decide
from compress.errors import BudgetError, RecipeError
from compress.model.skeleton import Skeleton
from compress.papers.allocate import block_scores, layerwise
from compress.progress import silent
from compress.run.job import Job
from compress.storage.checkpoint import open_checkpoint
from helpers.allocator_tables import bits, model, problem, run, with_values
from helpers.runs import TEXT

TOKENS = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(1))


def test_layerwise_raises_whole_blocks_by_score() -> None:
    """Scores of a block are weighted by its units' weights: 0.7, 0.9, 0.1, 0.5 for lim."""
    scores = [0.1, 0.9, 0.6, 1.0, 0.4, 0.0, 0.5, 0.5]
    units = model(4, (1, 3), bits=(4, 8))
    given = problem(with_values(units, "lim", scores), 6.3)
    found = run(layerwise, given)
    assert bits(given, found.choice) == [8, 8, 8, 8, 4, 4, 4, 4]
    assert found.facts == {"high": "bits=8", "low": "bits=4", "blocks at high": 2}
    given = problem(with_values(units, "zd", scores), 6.3)  # fewer large weights: more important
    assert bits(given, run(layerwise, given, score="zd").choice) == [4, 4, 4, 4, 8, 8, 8, 8]
    assert layerwise.needs(layerwise.Config(score="zd")) == {"zd"}


def test_layerwise_fills_the_next_block() -> None:
    given = problem(with_values(model(3, (1, 3), bits=(4, 8)), "lim", [3.0, 3.0, 2.0, 2.0, 1.0, 1.0]), 5.8)
    assert bits(given, run(layerwise, given).choice) == [8, 8, 8, 4, 4, 4]
    assert bits(given, run(layerwise, given, fill=False).choice) == [8, 8, 4, 4, 4, 4]
    left = given.budget - given.nbytes(run(layerwise, given).choice)
    assert left < 500  # what the smallest unit would take


def test_layerwise_options_by_name() -> None:
    given = problem(model(3), 3.6)
    assert set(bits(given, run(layerwise, given, low="bits=3", high="bits=4").choice)) == {3, 4}
    with pytest.raises(BudgetError, match="bits=4 everywhere takes 12144 bytes, more than the budget of 10800"):
        run(layerwise, given, low="bits=4")
    with pytest.raises(RecipeError, match="high 'bits=2' is not larger than low 'bits=3'"):
        run(layerwise, given, low="bits=3", high="bits=2")


@pytest.mark.parametrize("spill", [False, True])
def test_lim(spill: bool, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    whole, ends = AutoModelForCausalLM.from_pretrained(pico_dir("qwen2"), dtype="auto").double(), []
    for layer in whole.model.layers:
        layer.register_forward_hook(lambda _, given, out: ends.append((given[0], out)))
    with torch.no_grad():
        whole(TOKENS)
    expected = [-float(((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).mean()) for a, b in ends]
    found = block_scores.lim(
        Skeleton(open_checkpoint(pico_dir("qwen2"))), TOKENS, tmp_path / "states" if spill else None
    )
    assert found == pytest.approx(expected, abs=1e-5) and len(set(found)) == 2
    assert not list(tmp_path.iterdir())


def test_zd() -> None:
    parts = [torch.randn(7, 5, generator=torch.Generator().manual_seed(i)) ** 3 for i in range(3)]
    flat = torch.cat([part.flatten() for part in parts]).double()
    share = ((flat - flat.mean()) / flat.std(correction=0) > 1).double().mean().item()
    assert block_scores.zd(parts) == share == block_scores.zd(parts[::-1])
    assert block_scores.zd([part.T + 5 for part in parts]) == share
    normal = torch.randn(400, 400, generator=torch.Generator().manual_seed(9))
    assert block_scores.zd([normal]) == pytest.approx(0.1587, abs=0.003)
    assert block_scores.zd([normal.bfloat16()]) == pytest.approx(0.1587, abs=0.005)


@pytest.mark.parametrize("score", ["lim", "zd"])
def test_scores_are_measured_where_the_allocator_asks_for_them(
    score: str, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "calibration: {num_samples: 2, seq_len: 24}\n"
        "quantize: {method: rtn, bits: 4, group_size: 32}\n"
        f"allocate: {{method: layerwise, score: {score}, options: [{{bits: 2}}, {{bits: 5}}]}}\n"
    )
    job = Job(str(pico_dir("llama")), recipe.load(str(path)), tmp_path / "out", calib=str(TEXT))
    folder, facts = decide.measure(job, silent)
    assert facts["scores"] == [score] and (folder / f"measured-{score}.json").is_file()
