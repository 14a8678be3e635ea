"""Compare a model that writes no text with its original, by what its users look at.

The text is cut into paragraphs: the first sentence of one is a question, the rest is its document. Embeddings
(pooling.py) of both models are compared by their cosine, and by what is found with them: the pairwise cosines of the
documents (Spearman), the ten best documents of each question (nDCG@10, the original's list having the gains 10, 9, ...
1), and how often a question finds its own document (recall@1).

Heads are compared by their outputs. A model with one score for a pair of texts ranks documents for each question
(Kendall's tau-a, and how often the best is the same); the documents are its own and those that follow. Of classes,
tags, answers and masked tokens the divergence KL(original || model) and the share of the same choice are taken.

Sums are float64. Texts are padded on the right to the longest of a batch, which the models are told by a mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from compress.calib.documents import documents, is_text_file, source_name
from compress.errors import CalibrationError, CheckpointError, NumericalError
from compress.evaluate import pooling
from compress.evaluate.pooling import Pooling
from compress.evaluate.reader import Execution
from compress.model import architectures, load
from compress.model.blockwise import attached
from compress.numerics import kl
from compress.progress import Progress

SENTENCE_END = re.compile(r"(?<=[.!?])[\"'\u201d\u2019)\]]*\s+")
WORDS = 12  # fewer make no document
GAINS = 10  # places of a list that count
CANDIDATES = 16  # documents that are ranked for a question
MASKED = 7  # one in so many tokens is masked
BATCH_TOKENS = 4096
MAX_TOKENS, SEQ_LEN = 65_536, 256


@dataclass(frozen=True)
class EncoderScores:
    """How far the outputs of a model are from those of its original; None: not what this model gives."""

    text: str  # file or data set name
    purpose: str  # what the model is for
    pooling: str  # how embeddings are made
    questions: int  # and as many documents
    tokens: int  # of both
    cosine_mean: float  # of the embeddings of documents with the original's
    cosine_p1: float  # the first percentile
    spearman: float  # of the pairwise cosines of documents
    ndcg10: float
    recall1: float
    base_recall1: float
    kendall_tau: float | None = None  # mean over questions
    score_difference: float | None = None  # root mean square, in standard deviations of the original's scores
    kl_mean: float | None = None  # nats
    same_choice: float | None = None  # share


class _Row(NamedTuple):
    """A tokenized text, or pair of texts."""

    ids: list[int]
    types: list[int]  # 1 in the second text of a pair, where the model tells them apart


class _Outputs(NamedTuple):
    """What two models give for texts, the original first."""

    embeddings: list[Tensor]  # float32 [texts, width]
    figures: Tensor  # float64 [4, places]: KL, 1 for the same choice, and the first logit of both


def is_encoder(directory: Path) -> bool:
    """Return whether a model is compared by its embeddings or classes: it writes no text, or is used for embeddings."""
    return architectures.task(load.whole_config(directory)) in architectures.ENCODERS or pooling.is_listed(directory)


def evaluate(
    directory: Path,
    text: str,
    base: Path,
    lengths: tuple[int | None, int | None],
    execution: Execution,
    progress: Progress,
) -> EncoderScores:
    """Return the scores of a model beside its original, on paragraphs of a text.

    lengths: most tokens of a paragraph, the rest of which is cut off, and of all; None: as is usual. Raises
    CheckpointError for a model of another purpose or vocabulary, CalibrationError for a text without paragraphs.
    """
    configs = [load.whole_config(each) for each in (base, directory)]
    purposes = [architectures.task(each) for each in configs]
    tokenizers = [load.load_tokenizer(each) for each in (base, directory)]
    if purposes[0] != purposes[1] or tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise CheckpointError(
            f"{directory.name} and {base.name} differ in purpose or vocabulary; they cannot be compared"
        )
    readers = [_Encoder(each, purposes[0], execution) for each in (base, directory)]
    pools, longest = readers[0].pooling, architectures.most_tokens(readers[0].model)
    limits, max_tokens = (lengths[0] or SEQ_LEN, pools.most_tokens, longest), lengths[1] or MAX_TOKENS
    maker = _RowMaker(tokenizers[0], pools, min(each for each in limits if each))
    questions, answers = maker.cut(text, max_tokens)
    if len(questions) < 2:
        raise CalibrationError(
            f"{text} has no two paragraphs of a sentence and {WORDS} more words within {max_tokens:,} tokens"
        )
    asked, documented = ([maker.row(each) for each in texts] for texts in (questions, answers))
    read = [_read(readers, rows, maker, progress) for rows in (asked, documented)]
    figures: dict[str, float] = {}
    if architectures.scores_pairs(configs[0]):
        pairs = [maker.row(question, answers[at]) for question, at in _pairs(questions)]
        figures = _score_ranking(_read(readers, pairs, maker, progress).figures, len(questions))
    elif readers[0].has_head:
        figures = {"kl_mean": read[1].figures[0].mean().item(), "same_choice": read[1].figures[1].mean().item()}
    return EncoderScores(
        text=source_name(text),
        purpose=architectures.PURPOSES[purposes[0]],
        pooling=" and ".join(pools.modes).replace("_", " "),
        questions=len(questions),
        tokens=sum(len(row.ids) for row in (*asked, *documented)),
        **_score_embeddings(*(each.embeddings for each in read)),
        **figures,
    )


class _Encoder:
    """A loaded model that is run on batches of texts."""

    def __init__(self, directory: Path, purpose: architectures.Task, execution: Execution) -> None:
        self.model: Any = load.load_model(directory, execution.dtype, execution.device, tasks=None)
        self.purpose, self.name = purpose, directory.name
        self.has_head = purpose not in ("language", "embedding")
        self.pooling = pooling.read(directory, self.model)

    @torch.no_grad()
    def read(self, ids: Tensor, mask: Tensor, types: Tensor | None, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings [n, width] and logits [places, classes], float32 on the CPU, of texts [n, tokens].

        places: bool [n, tokens], where the head is compared if it gives something for each token.
        """
        states: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            states.append(output[0])

        values = {"input_ids": ids, "attention_mask": mask, **({} if types is None else {"token_type_ids": types})}
        device, body = self.model.device, self.model.base_model
        with attached([body.register_forward_hook(keep)]):
            run = self.model if self.has_head else body
            output = run(**{name: value.to(device) for name, value in values.items()})
        pooled = self.pooling.pool(states[0].cpu(), mask)
        logits = self._logits(output, places.to(device)).float().cpu() if self.has_head else torch.zeros(0, 1)
        if not (torch.isfinite(pooled).all() and torch.isfinite(logits).all()):
            raise NumericalError(f"{self.name} gives outputs that are not finite; its weights are damaged, or overflow")
        return pooled, logits

    def _logits(self, output: Any, places: Tensor) -> Tensor:
        if self.purpose == "answers":
            lowest = torch.finfo(torch.float16).min  # of what is no part of the text
            return torch.cat([each.masked_fill(~places, lowest) for each in (output.start_logits, output.end_logits)])
        return cast(Tensor, output.logits if self.purpose == "classes" else output.logits[places])


class _RowMaker:
    """Make tokens of texts, as a model's tokenizer and prompts do."""

    def __init__(self, tokenizer: Any, pools: Pooling, most_tokens: int) -> None:
        self.tokenizer, self.pooling, self.most_tokens = tokenizer, pools, most_tokens
        self.pad = tokenizer.pad_token_id or 0
        self.special = {*tokenizer.all_special_ids}

    def cut(self, source: str, max_tokens: int) -> tuple[list[str], list[str]]:
        """Return the questions and documents of a source."""
        questions, answers, tokens = list[str](), list[str](), 0
        for paragraph in _paragraphs(source):
            question, *rest = SENTENCE_END.split(paragraph, maxsplit=1)
            if not rest or len(rest[0].split()) < WORDS:
                continue
            question, answer = (
                self.pooling.prompts.get(kind, "") + each for kind, each in (("query", question), ("document", rest[0]))
            )
            tokens += sum(len(self.row(each).ids) for each in (question, answer))
            if tokens > max_tokens:
                break
            questions.append(question)
            answers.append(answer)
        return questions, answers

    def row(self, *texts: str) -> _Row:
        """Return the tokens of a text, or of a pair."""
        made = self.tokenizer(*texts, truncation=True, max_length=self.most_tokens, verbose=False)
        ids = list(made["input_ids"])
        return _Row(ids, list(made.get("token_type_ids") or [0] * len(ids)))


def _paragraphs(source: str) -> Iterator[str]:
    """Yield the paragraphs of a text file, or the documents of another source, each in one line."""
    for text in documents(
        source, chat=lambda messages, where: "\n".join(str(each.get("content")) for each in messages)
    ):
        for part in re.split(r"\n\s*\n", text) if is_text_file(source) else [text]:
            yield " ".join(part.split())


def _read(readers: Sequence[_Encoder], rows: Sequence[_Row], maker: _RowMaker, progress: Progress) -> _Outputs:
    """Return what both models give for texts, which are run in batches of like length."""
    order = sorted(range(len(rows)), key=lambda at: len(rows[at].ids))
    embeddings: list[dict[int, Tensor]] = [{}, {}]
    figures: dict[int, Tensor] = {}
    while order:
        size = max(1, BATCH_TOKENS // len(rows[order[-1]].ids))
        size = 1 if readers[0].model.config.pad_token_id is None else size  # a head would not know the last token
        batch, order = order[-size:], order[:-size]
        tensors = _tensors([rows[at] for at in batch], maker, readers[0])
        (first, head), (second, other) = (reader.read(*tensors) for reader in readers)
        rows_of = kl.from_logits(head, other).double(), (head.argmax(-1) == other.argmax(-1)).double()
        joined = torch.stack([*rows_of, head[:, 0].double(), other[:, 0].double()])
        by_text = joined.split(len(joined[0]) // len(batch), 1) if readers[0].purpose == "classes" else [joined]
        figures |= dict(zip(batch, by_text, strict=False))
        for kept, pooled in zip(embeddings, (first, second), strict=True):
            kept.update(zip(batch, pooled, strict=True))
        progress("comparing texts", len(rows) - len(order), len(rows))
    return _Outputs(
        [torch.stack([kept[at] for at in range(len(rows))]) for kept in embeddings],
        torch.cat([figures[at] for at in sorted(figures)], 1),
    )


def _tensors(rows: Sequence[_Row], maker: _RowMaker, reader: _Encoder) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return tokens, mask, kinds of tokens (None for a model without), and the places of the head, of a batch."""
    lengths = torch.tensor([len(row.ids) for row in rows])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids, types = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in column], True, value)
        for column, value in (([row.ids for row in rows], maker.pad), ([row.types for row in rows], 0))
    )
    plain = torch.tensor([[token not in maker.special for token in row] for row in ids.tolist()])
    places = mask.bool() & plain
    if reader.purpose == "masked" and maker.tokenizer.mask_token_id is not None:
        places &= torch.arange(ids.shape[1]) % MASKED == MASKED // 2
        ids = ids.masked_fill(places, maker.tokenizer.mask_token_id)
    has_types = getattr(reader.model.config, "type_vocab_size", 0) > 1
    return ids, mask, types if has_types else None, places


# ---------------------------------------------------------------- figures


def _score_embeddings(questions: Sequence[Tensor], answers: Sequence[Tensor]) -> dict[str, float]:
    """Return the figures of embeddings [texts, width] of questions and documents, those of the original first."""
    asked, given = ([nn.functional.normalize(each.double(), dim=-1) for each in both] for both in (questions, answers))
    cosines = (given[0] * given[1]).sum(1)
    above = torch.ones(len(cosines), len(cosines)).triu(1).bool()
    searched = [question @ answer.T for question, answer in zip(asked, given, strict=True)]
    own = torch.arange(len(cosines))
    return {
        "cosine_mean": cosines.mean().item(),
        "cosine_p1": cosines.sort().values[math.ceil(0.01 * len(cosines)) - 1].item(),
        "spearman": spearman(*((each @ each.T)[above] for each in given)),
        "ndcg10": ndcg(*searched),
        "recall1": (searched[1].argmax(1) == own).double().mean().item(),
        "base_recall1": (searched[0].argmax(1) == own).double().mean().item(),
    }


def spearman(first: Tensor, other: Tensor) -> float:
    """Return the rank correlation of two lists [n]; equal values have their mean rank. 1 where a list is constant."""
    ranks = []
    for values in (first, other):
        _, places, counts = values.unique(return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum(0) - (counts - 1) / 2).double()[places])
    one, two = (each - each.mean() for each in ranks)
    norm = (one.square().sum() * two.square().sum()).sqrt().item()
    return (one @ two).item() / norm if norm else 1.0


def ndcg(original: Tensor, other: Tensor) -> float:
    """Return the mean nDCG@10 of lists by cosines [questions, documents]; the original's best ten gain 10 to 1."""
    count = min(GAINS, original.shape[1])
    gains = torch.zeros_like(original)
    best = original.topk(count, 1).indices
    worth = torch.arange(count, 0, -1, dtype=original.dtype)
    gains.scatter_(1, best, worth.expand(len(best), count))
    discounts = torch.arange(2, count + 2, dtype=original.dtype).log2().reciprocal()
    return ((gains.gather(1, other.topk(count, 1).indices) @ discounts) / (worth @ discounts)).mean().item()


def _pairs(questions: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each question with the numbers of its candidates: its own document, and those behind it."""
    for number, question in enumerate(questions):
        for step in range(min(CANDIDATES, len(questions))):
            yield question, (number + step) % len(questions)


def _score_ranking(figures: Tensor, questions: int) -> dict[str, float]:
    """Return the figures of scores, of which a question has as many as candidates; figures: of `_Outputs`."""
    first, other = figures[2].view(questions, -1), figures[3].view(questions, -1)
    same = (first.argmax(1) == other.argmax(1)).double().mean().item()
    spread = first.std().item() or 1.0
    return {
        "kendall_tau": sum(map(kendall, first, other)) / questions,
        "score_difference": (other - first).square().mean().sqrt().item() / spread,
        "same_choice": same,
    }


def kendall(first: Tensor, other: Tensor) -> float:
    """Return Kendall's tau-a of two lists [n]: pairs in the same order, less the others, by the number of all."""
    signs = [(values[:, None] - values).sign() for values in (first, other)]
    count = len(first)
    return (signs[0] * signs[1]).sum().item() / (count * (count - 1))
