"""Measure whether a model finds through a compressed cache what stands somewhere in a long text (needles).

Each context is a window of the text with a sentence at each of DEPTHS, "The password of Oslo is amber feather.", names
and passwords drawn anew. All of them lie outside of what every cache keeps exact. The prompt goes through the model in
one pass, as in `generate`, then comes a question for each needle, "The password of Oslo is", and what follows is
scored: the negative log-likelihood of a token of the answer, and whether all its tokens are the likeliest ones, which
is what greedy decoding would write. The past of a question is read as it is stored; questions and answers of other
needles stand between it and the prompt.

A cell is a needle of a context. Cells that the model does not answer through the exact cache say nothing of a cache:
they are left out, and counted. Standard errors are over contexts, whose cells are not independent.

The recall of repeated passages (cache_scores.py) needs a model that makes use of a repetition; this one needs one that
follows a reference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CalibrationError
from compress.evaluate.cache_scores import exact_tokens, policies
from compress.evaluate.items import encode_with
from compress.evaluate.needles import DEPTHS, FIRST, NAMES, SECOND, Encode, make_needle, plant
from compress.evaluate.reader import Candidate, Reader, Say, fill, read_on
from compress.evaluate.scores import TextWindows
from compress.model import load as lm
from compress.progress import Progress, make_counter

SEED = 0


@dataclass(frozen=True)
class NeedleContext:
    """A prompt with needles, and the questions for them."""

    prompt: Tensor  # int64 [1, tokens]
    questions: tuple[tuple[Tensor, int], ...]  # by depth: question with answer int64 [1, n], tokens of the answer
    order: tuple[int, ...]  # in which they are asked


@dataclass(frozen=True)
class DepthScore:
    """The needles at one depth that the exact cache finds."""

    depth: float
    cells: int
    right: float | None  # share of them; None without any
    nll: float | None  # nats a token of the answer, above those through the exact cache


@dataclass(frozen=True)
class NeedleScore:
    """How well one cache keeps needles."""

    asked: int  # cells
    kept: int  # cells that are answered through the exact cache; the figures below are of these
    exact_nll: float | None  # nats a token of the answer
    right: float | None  # share of cells
    right_se: float | None  # standard error over contexts; None with fewer than two that have such cells
    nll: float | None  # above exact_nll
    nll_se: float | None
    depths: tuple[DepthScore, ...]


def contexts(
    windows: Tensor, encode: Encode, count: int, candidates: Sequence[Candidate], config: Any, begun: int = 0
) -> list[NeedleContext]:
    """Return so many contexts, each as long as a window with its questions; windows int64 [n, seq_len].

    begun: tokens that every window begins with, which stay where they are.

    None of them where the windows have no room outside of what these caches keep exact.
    """
    codings = [candidate.codings(config) for candidate in candidates]
    sink = max(begun, *(policy.sink for each in codings for policy in policies(each)))
    exact = sink, max(map(exact_tokens, codings))
    planted = [_context(windows[i % len(windows)], encode, i, exact) for i in range(count)]
    return [context for context in planted if context is not None]


def _context(window: Tensor, encode: Encode, number: int, exact: tuple[int, int]) -> NeedleContext | None:
    """Return a context with needles, None without room; exact: tokens at the start and at the end that stay exact."""
    draw = random.Random(f"{SEED} {number}")
    names = draw.sample(NAMES, len(DEPTHS))
    words = zip(names, draw.sample(FIRST, len(DEPTHS)), draw.sample(SECOND, len(DEPTHS)), strict=True)
    planted = [make_needle(encode, *each) for each in words]
    if any(not needle.cue or not needle.answer for needle in planted):
        raise CalibrationError("the tokenizer gives no tokens for the text of a needle; measure without needles")
    questions = [(torch.tensor([[*needle.cue, *needle.answer]]), len(needle.answer)) for needle in planted]
    order = draw.sample(range(len(DEPTHS)), len(DEPTHS))  # of the questions
    asked_tokens = sum(question.shape[1] for question, _ in questions)
    filler = len(window) - sum(len(needle.sentence) for needle in planted) - asked_tokens
    room = filler - sum(exact)
    if room < len(DEPTHS):
        return None
    at = [exact[0] + round(depth * room) for depth in DEPTHS]
    prompt = torch.tensor([plant(window[:filler].tolist(), planted, at)])
    return NeedleContext(prompt, tuple(questions), tuple(order))


def measure_text(
    model: Any, directory: Path, cut: TextWindows, candidates: Sequence[Candidate], count: int, progress: Progress
) -> Sequence[NeedleScore | None]:
    """Return how well each cache keeps needles in so many contexts as long as the windows of a text."""
    planted: list[NeedleContext] = []
    if count:
        encode = encode_with(lm.load_tokenizer(directory))
        planted = contexts(cut.tokens, encode, count, candidates, model.config, len(cut.prefix.tokens))
    if not planted:
        return [None] * len(candidates)
    say = make_counter(progress, f"asking for needles at {cut.tokens.shape[1]} tokens", len(planted))
    return measure(model, planted, candidates, say)


def measure(
    model: Any, planted: Sequence[NeedleContext], candidates: Sequence[Candidate], say: Say
) -> list[NeedleScore]:
    """Return the scores of each cache; one pass through the model for each context and cache, and for the exact one."""
    cells = torch.zeros(1 + len(candidates), 2, len(planted), len(DEPTHS), dtype=torch.float64)
    readers = [Reader(model), *(Reader(model, candidate) for candidate in candidates)]
    for column, context in enumerate(planted):
        for row, reader in enumerate(readers):
            cells[row, :, column] = answers(model, context, reader.new_cache())
        say(1)
    return [score(cells[0], of_cache) for of_cache in cells[1:]]


@torch.no_grad()
def answers(model: Any, context: NeedleContext, cache: Any) -> Tensor:
    """Feed the prompt, then ask: nll of a token of the answer, and whether it is right, by depth: float64 [2, DEPTHS].

    A cache that holds the prompt already goes to `ask`.
    """
    fill(model, context.prompt.to(model.device), cache)
    return ask(model, context, cache)


@torch.no_grad()
def ask(model: Any, context: NeedleContext, cache: Any) -> Tensor:
    """Return what `answers` does for a cache that holds the prompt."""
    cells, text = torch.zeros(2, len(DEPTHS), dtype=torch.float64), context.prompt.to(model.device)
    for index in context.order:
        tokens, count = context.questions[index]
        tokens, start = tokens.to(model.device), text.shape[1]
        text = torch.cat((text, tokens), 1)
        logits = read_on(model, text, start, cache)[:, -count - 1 : -1].float()
        answer = tokens[:, -count:]
        cells[0, index] = -logits.log_softmax(-1).gather(-1, answer[..., None]).double().mean().cpu()
        cells[1, index] = float((logits.argmax(-1) == answer).all())
    return cells


def score(exact: Tensor, cells: Tensor) -> NeedleScore:
    """Return the score of one cache; exact, cells float64 [2, contexts, DEPTHS]: nll and whether it is right."""
    kept, more = exact[1] > 0, cells[0] - exact[0]
    count = int(kept.sum())
    by_depth = tuple(
        DepthScore(depth, int(own.sum()), _mean(cells[1, :, i][own]), _mean(more[:, i][own]))
        for i, depth in enumerate(DEPTHS)
        for own in (kept[:, i],)
    )
    return NeedleScore(
        kept.numel(),
        count,
        _mean(exact[0][kept]),
        _mean(cells[1][kept]),
        _error(cells[1], kept),
        _mean(more[kept]),
        _error(more, kept),
        by_depth,
    )


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if values.numel() else None


def _error(values: Tensor, kept: Tensor) -> float | None:
    """Return the standard error of the mean of the kept values [contexts, DEPTHS], rows being what is independent."""
    rows = int(kept.any(1).sum())
    if rows < 2:
        return None
    apart = torch.where(kept, values - values[kept].mean(), 0).sum(1)
    return math.sqrt(float(apart.square().sum()) * rows / (rows - 1)) / int(kept.sum())
