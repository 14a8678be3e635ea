"""Score the items of a task with a model: batched, and with logits only where answers stand.

Rows are context and answer, padded on the right, where a causal model does not look. They are sorted by length, and a
batch holds as many as the logits of its answers (BATCH_NBYTES) and its tokens (BATCH_TOKENS) allow. Rows with the same
input are read once: answers of one token behind the same context cost one pass.

Context and answer are tokenized together, and the answer is what follows the tokens of the context alone, as in
lm-evaluation-harness; spaces at the end of a context go to the answer.

Through a cache a context goes in one pass, as in `generate`, all but its last token. That one and the answer are read
behind what the cache has stored, together: what becomes old meanwhile stays exact. Batches hold contexts of one length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.errors import CalibrationError, NumericalError
from compress.evaluate.generation import text_behind
from compress.evaluate.items import Item, Material, Outcome, Task, Text
from compress.evaluate.reader import Reader
from compress.evaluate.scores import BATCH_NBYTES, BATCH_TOKENS
from compress.model import writing


@dataclass(frozen=True)
class AnswerRow:
    """A context with one of its answers."""

    item: int
    answer: int
    inputs: tuple[int, ...]  # context and answer without its last token
    target: tuple[int, ...]  # the tokens of the answer
    nbytes: int  # of its text

    @property
    def first(self) -> int:
        """The place of the input that predicts the answer's first token: the last one of the context."""
        return len(self.inputs) - len(self.target)


@dataclass(frozen=True)
class _Likelihood:
    """What a model gives an answer."""

    log_likelihood: float  # nats, summed
    likeliest: tuple[int, ...]  # token at each place
    kl: float | None  # KL(law || model), nats a token


def score(reader: Reader, task: Task, material: Material, batch_tokens: int = BATCH_TOKENS) -> list[Outcome]:
    """Return the outcome of each item, in their order.

    Answers are read behind contexts in the reader's cache, or without one in one pass. What is written goes through the
    cache that is attached to the model, if any. The tokenizer is that of `material`.

    Raises CalibrationError for an item without tokens or longer than the model can read, NumericalError for logits that
    are not finite.
    """
    if task.way == "written":
        stop = writing.end_tokens(reader.model)
        return [_write(reader.model, task, item, material, stop) for item in task.items]
    rows = [row for i, item in enumerate(task.items) for row in _rows(i, item, task, material)]
    read = _read(reader, rows, task, batch_tokens)
    outcomes = []
    for i, item in enumerate(task.items):
        of_item = {row.answer: (row, read[k]) for k, row in enumerate(rows) if row.item == i}
        outcomes.append(_choose(item, of_item) if task.way == "likelihood" else _judge(item, of_item[item.right]))
    return outcomes


def longest_context(task: Task, material: Material) -> int:
    """Return the tokens of the longest context of a task that is not written."""
    rows = (row for i, item in enumerate(task.items) for row in _rows(i, item, task, material))
    return max(row.first for row in rows) + 1


def _rows(number: int, item: Item, task: Task, material: Material) -> Iterator[AnswerRow]:
    """Yield the rows of an item: one for each answer, or for the right one only."""
    for k, answer in enumerate(item.answers):
        if task.way == "greedy" and k != item.right:
            continue
        context, target = _tokens(item.context, answer, material)
        if not context or not target:
            what = "context" if not context else f"answer {k + 1}"
            raise CalibrationError(f"task {task.name}, item {item.name}: the {what} has no tokens; give at least one")
        inputs = (*context, *target[:-1])
        if len(inputs) > material.positions:
            raise CalibrationError(
                f"task {task.name}, item {item.name}: {len(inputs)} tokens, the model reads {material.positions}; "
                "shorten it"
            )
        text = answer if isinstance(answer, str) else material.decode(answer)
        yield AnswerRow(number, k, inputs, target, max(1, len(text.encode())))


def _tokens(context: Text, answer: Text, material: Material) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of a context, with those that begin a text, and of an answer behind it."""
    if isinstance(context, str) and isinstance(answer, str):
        bare = context.rstrip(" ")
        first = material.encode(bare)
        whole = material.encode(context + answer)
        return (*material.begin, *first), tuple(whole[len(first) :])
    first = [*material.begin, *material.encode(context)] if isinstance(context, str) else list(context)
    return tuple(first), tuple(material.encode(answer) if isinstance(answer, str) else answer)


@torch.no_grad()
def _read(reader: Reader, rows: Sequence[AnswerRow], task: Task, batch_tokens: int) -> list[_Likelihood]:
    """Return what the model gives each row."""
    by_row: dict[int, _Likelihood] = {}
    logit_nbytes = reader.model.config.get_text_config().vocab_size * reader.model.dtype.itemsize
    for alike in _together(rows, reader.cache is not None):
        for batch in _batches(alike, rows, logit_nbytes, batch_tokens):
            first = min(rows[k].first for inputs in batch for k in alike[inputs])
            logits = reader.behind(_pad(batch), first)
            for place, inputs in enumerate(batch):
                for k in alike[inputs]:
                    of_answer = logits[place, rows[k].first - first : len(inputs) - first].float()
                    if not torch.isfinite(of_answer).all():
                        raise NumericalError(
                            f"the model gives non-finite logits in {logits.dtype}; its weights are damaged, or overflow"
                        )
                    law = task.items[rows[k].item].law
                    by_row[k] = _likelihood(of_answer.log_softmax(-1), rows[k].target, law)
    return [by_row[k] for k in range(len(rows))]


def _together(rows: Sequence[AnswerRow], one_length: bool) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """Yield the rows that may share a batch, as inputs -> rows: all of them, or those with contexts of one length."""
    groups: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for k, row in enumerate(rows):
        groups.setdefault(row.first if one_length else 0, {}).setdefault(row.inputs, []).append(k)
    yield from groups.values()


def _likelihood(log_probs: Tensor, target: tuple[int, ...], law: Any) -> _Likelihood:
    """Return what log_probs float32 [tokens, vocab] at the places of an answer give it."""
    index = torch.tensor(target, device=log_probs.device)
    total = float(log_probs.gather(-1, index[:, None]).double().sum())
    kl = None
    if law is not None:
        terms = [
            p * (torch.tensor(p, dtype=torch.float64).log() - log_probs[k, token].double().cpu())
            for k, here in enumerate(law)
            for token, p in here.items()
            if p > 0
        ]
        kl = float(torch.stack(terms).sum()) / len(target)
    return _Likelihood(total, tuple(log_probs.argmax(-1).tolist()), kl)


def _batches(
    alike: dict[tuple[int, ...], list[int]], rows: Sequence[AnswerRow], logit_nbytes: int, batch_tokens: int
) -> Iterator[list[tuple[int, ...]]]:
    """Yield inputs that go through the model together; the longest come first."""
    batch: list[tuple[int, ...]] = []
    first = 0
    for inputs in sorted(alike, key=lambda each: (-len(each), each)):
        start = min(rows[k].first for k in alike[inputs])
        low = min(first, start) if batch else start
        longest = len(batch[0]) if batch else len(inputs)
        count = len(batch) + 1
        if batch and (count * longest > batch_tokens or count * (longest - low) * logit_nbytes > BATCH_NBYTES):
            yield batch
            batch, low = [], start
        batch.append(inputs)
        first = low
    if batch:
        yield batch


def _pad(batch: Sequence[tuple[int, ...]]) -> Tensor:
    """Return inputs as int64 [batch, tokens], the last token of each repeated on the right."""
    longest = max(map(len, batch))
    return torch.tensor([[*inputs, *[inputs[-1]] * (longest - len(inputs))] for inputs in batch])


def _choose(item: Item, of_item: dict[int, tuple[AnswerRow, _Likelihood]]) -> Outcome:
    """Return the outcome of a choice by likelihood; of equal ones the first counts."""
    total = [of_item[k][1].log_likelihood for k in range(len(item.answers))]
    by_bytes = [value / of_item[k][0].nbytes for k, value in enumerate(total)]
    choice = total.index(max(total))
    nll = -total[item.right] / len(of_item[item.right][0].target)
    return Outcome(item.name, choice == item.right, str(choice), nll, by_bytes.index(max(by_bytes)) == item.right)


def _judge(item: Item, of_answer: tuple[AnswerRow, _Likelihood]) -> Outcome:
    """Return the outcome of an answer that is asked token by token."""
    row, read = of_answer
    hits = [a == b for a, b in zip(read.likeliest, row.target, strict=True)]
    return Outcome(
        item.name,
        all(hits),
        " ".join(map(str, read.likeliest)),
        -read.log_likelihood / len(row.target),
        tokens_right=sum(hits) / len(hits),
        kl=read.kl,
    )


def _write(model: Any, task: Task, item: Item, material: Material, stop: Sequence[int]) -> Outcome:
    """Return the outcome of an item that is answered by free greedy decoding."""
    if task.correct is None:
        raise TypeError(f"task {task.name} lets models write, and has no `correct`")
    text = isinstance(item.context, str)
    start = [*material.begin, *material.encode(item.context)] if isinstance(item.context, str) else list(item.context)
    if not start or len(start) + item.new_tokens > material.positions:
        raise CalibrationError(
            f"task {task.name}, item {item.name}: {len(start)} tokens and {item.new_tokens} new ones, the model reads "
            f"1 to {material.positions}"
        )
    draw = writing.Draw(str(model.name_or_path), 0.0, torch.Generator())
    whole = writing.write(model, torch.tensor([start]), item.new_tokens, draw, stop)[0].tolist()
    written = text_behind(material.decode, whole, len(start)) if text else material.decode(whole[len(start) :])
    figures = task.figures(item, written) if task.figures is not None else {}
    return Outcome(item.name, task.correct(item, written), written, figures=figures)
