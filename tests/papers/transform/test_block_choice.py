"""Which blocks are dropped: rules on known figures, the divergence of sets, and searches that go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.papers.transform import block_choice
from compress.papers.transform.block_choice import Choosing, DroppedKL
from compress.storage.checkpoint import open_checkpoint
from helpers.dropped_blocks import logits
from helpers.pico import build, save

TOKENS = torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(2))
LAYERS = 5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama", {"num_hidden_layers": LAYERS}), tmp_path_factory.mktemp("llama") / "m")


def bench(folder: Path, tokens: Tensor = TOKENS) -> EditContext:
    return EditContext(torch.device("cpu"), tokens, None, 2, folder, None, lambda text: None)  # type: ignore[arg-type]


def test_divergence_is_that_of_the_model_without_the_blocks(llama: Path, tmp_path: Path) -> None:
    sets = [frozenset({1, 3}), frozenset({1, 2}), frozenset({0}), frozenset({4, 3})]
    evaluator = DroppedKL(open_checkpoint(llama), TOKENS, bench(tmp_path), tmp_path)
    measured = evaluator.per_sample(sets, range(4))
    shared = evaluator.block_tokens
    assert torch.equal(evaluator.per_sample(sets[::-1], [2, 0])[:, 0], measured.flip(0)[:, 2])  # order, samples, batch
    evaluator.close()
    assert shared == 4 * 24 * (1 + 2 + 3 + 2 + 3)  # nodes of the tree at each block that run it
    model = AutoModelForCausalLM.from_pretrained(llama)
    original = logits(model, TOKENS)
    for row, each in zip(measured, sets, strict=True):
        expected = torch.stack(
            [kl.from_logits(*pair).mean() for pair in zip(original, logits(model, TOKENS, set(each)), strict=True)]
        )
        torch.testing.assert_close(row.float(), expected, rtol=1e-3, atol=1e-6)


def test_rules_on_known_figures() -> None:
    figures = dict(enumerate([(0.1, 0.4), (0.9, 0.2), (0.8, 0.1), (0.7, 0.3), (0.95, 0.5)]))
    assert block_choice.choose_window(figures, range(5), 2) == [2, 3]
    assert block_choice.choose_window(figures, range(3, 5), 2) == [3, 4]
    assert block_choice.choose_least(figures, range(5), 3) == [1, 2, 4]
    for layers in range(4, 40):
        for count in range(1, layers - 1):
            dropped = block_choice.choose_evenly(layers, range(layers), count)
            assert len(dropped) == count and not {0, layers - 1} & set(dropped)


def test_a_search_goes_on_and_never_gets_worse(llama: Path, tmp_path: Path) -> None:
    def choose(rule: block_choice.Rule, generations: int, name: str) -> block_choice.BlockChoice:
        original = Skeleton(open_checkpoint(llama))
        choosing = Choosing(original, range(LAYERS), 2, bench(tmp_path), tmp_path / name / "choice.json", 2)
        return choosing.choose(rule, generations, 3, 0)

    whole, greedy = choose("evolve", 2, "whole"), choose("kl", 0, "greedy")
    half = choose("evolve", 1, "half")
    half.is_done = False
    (tmp_path / "half" / "choice.json").write_text(json.dumps(vars(half)))
    assert choose("evolve", 2, "half") == whole
    falls = [row[1] for row in whole.trace]
    assert falls == sorted(falls, reverse=True) and whole.kl == falls[-1]
    assert len(whole.dropped) == len(greedy.dropped) == 2 and len(greedy.trace) == 2
