"""What is written with drafts has exactly the target's law, whatever the draft, the length and the processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compress.speculate.acceptance import judge
from compress.speculate.drafting import Draft, Proposal
from compress.speculate.loop import Loop, Planned
from compress.speculate.session import Session
from helpers.tiny_laws import exact_law, session_of, stopping

VOCAB, NEW, RUNS = 4, 3, 3000
PROMPT = (0, 1, 2)
CHI_SQUARE_SIGMAS = 4.5  # of a chi-square sum, near its normal law: once in 300,000 runs, and the seed is fixed


def table(seed: int, spread: float = 1.5) -> Tensor:
    return torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def nothing(ids: Tensor, scores: Tensor) -> Tensor:
    return scores


class BadDraft(Draft):
    """Draws from another table, by the session's own processors; stops by what it has drawn."""

    def __init__(self, law: Tensor, is_one_hot: bool = False) -> None:
        self.table, self.is_one_hot = law, is_one_hot

    def propose(self, session: Session, count: int) -> Proposal:
        text, tokens, laws = list(session.tokens), list[int](), list[Tensor]()
        while len(tokens) < count:
            logits = self.table[text[-2], text[-1]]
            law = session.law(logits, tokens)
            token = int(logits.argmax()) if self.is_one_hot else session.draw(law)
            tokens.append(token)
            laws.append(law)
            text.append(token)
            if token == 0 and len(tokens) > 1:  # the length depends on what was drafted
                break
        return Proposal(tokens, None if self.is_one_hot else laws)


def chi_square(counts: Tensor, law: Tensor) -> float:
    """How many standard deviations the sum of squares lies above its mean; cells that expect little are joined."""
    expected, counts = law.flatten() * counts.sum(), counts.flatten().double()
    assert not counts[expected == 0].any(), "a token that the law forbids"
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    total = ((counts - expected).square() / expected).sum()
    return float((total - freedom) / (2 * freedom) ** 0.5)


def written(draft: Draft, length: int | None, processors: Any) -> Tensor:
    """Counts [VOCAB] * NEW of texts."""
    counts, target = torch.zeros((VOCAB,) * NEW), table(0)
    generator = torch.Generator().manual_seed(1)
    planned = Planned("draft", draft, length)
    for _ in range(RUNS):
        session = session_of(target, PROMPT, processors)
        session.generator = generator
        Loop(session, [planned], stopping(len(PROMPT) + NEW)).run(target[PROMPT[-2], PROMPT[-1]][None])
        assert session.passes.cached == session.tokens[:-1]  # type: ignore[attr-defined]
        counts[tuple(session.tokens[len(PROMPT) :])] += 1
    return counts


PROCESSORS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "temperature and top-k": lambda: LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)]),
    "repetition": lambda: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.5), TopPLogitsWarper(0.95)]),
}


@pytest.mark.parametrize("is_one_hot", [False, True])
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_law_is_that_of_the_target(name: str, is_one_hot: bool) -> None:
    processors = PROCESSORS[name]()
    law = exact_law(table(0), PROMPT, NEW, processors or nothing)
    assert abs(chi_square(written(BadDraft(table(9), is_one_hot), 2, processors), law)) < CHI_SQUARE_SIGMAS


def test_the_check_of_the_law_sees_another_law() -> None:
    law = exact_law(table(0) * 0.7, PROMPT, NEW, nothing)
    assert chi_square(written(BadDraft(table(9)), 2, None), law) > 2 * CHI_SQUARE_SIGMAS


def test_a_draft_of_the_targets_own_law_is_always_accepted() -> None:
    session, target = session_of(table(0), PROMPT), table(0)
    draft = BadDraft(target)
    session.append([3])
    for _ in range(300):
        proposal = draft.propose(session, 2)
        rows = session.forward([session.tokens[-1], *proposal.tokens])
        accepted, _, _ = judge(session, proposal, rows)
        assert accepted == len(proposal.tokens)
        session.crop(len(proposal.tokens) + 1)


def test_a_rejection_by_rounding_draws_from_the_target() -> None:
    """p = q up to rounding leaves no rest of probability to draw from."""
    session = session_of(table(0), PROMPT)
    logits = torch.tensor([[0.0, 0.0, -30.0, -torch.inf]] * 2)
    p = logits[0].softmax(-1)
    session.uniform = lambda: 1.0  # type: ignore[method-assign]  # rejects whatever has p / q <= 1
    session.draw = lambda weights: int(weights.argmax())  # type: ignore[method-assign]
    accepted, token, _ = judge(session, Proposal([1], [p.clone()]), logits)
    assert (accepted, token) == (0, 0)
    accepted, token, _ = judge(session, Proposal([1]), logits)
    assert (accepted, token) == (0, 0), "a token chosen without chance is not drawn again"


def test_draws_follow_their_weights() -> None:
    session = session_of(table(0), PROMPT)
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0])
    drawn = torch.tensor([session.draw(weights) for _ in range(4000)]).bincount(minlength=4)
    assert drawn[0] == drawn[3] == 0 and abs(float(drawn[2]) / 4000 - 0.75) < 0.03
    session.uniform = lambda: 1.0  # type: ignore[method-assign]
    assert session.draw(weights) == 2  # never a token without weight


@pytest.mark.parametrize("name", PROCESSORS)
def test_greedy_text_is_that_of_plain_steps(name: str) -> None:
    processors, target, texts = PROCESSORS[name](), table(3), []
    for length in (None, 1, 3):
        session = session_of(target, PROMPT, processors, is_sampling=False)
        drafts = [] if length is None else [Planned("draft", BadDraft(table(4), True), length)]
        Loop(session, drafts, stopping(40)).run(target[PROMPT[-2], PROMPT[-1]][None])
        texts.append(session.tokens)
        assert len(session.tokens) == 40
    assert texts[0] == texts[1] == texts[2]
    assert sum(session.passes.rows) > len(session.passes.rows)  # type: ignore[attr-defined]


def test_processors_see_each_text_once_and_in_order() -> None:
    seen: list[list[int]] = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    session = session_of(table(3), PROMPT, watch, is_sampling=False)
    Loop(session, [Planned("draft", BadDraft(table(3), True), 3)], stopping(20)).run(table(3)[1, 2][None])
    assert session.statistics.accepted > 0
    of_target = [ids for i, ids in enumerate(seen) if ids not in seen[:i]]
    assert all(session.tokens[: len(ids)] == ids for ids in of_target)
    assert [len(ids) for ids in of_target] == list(range(3, 20))
