"""Compare a model of an encoder and a decoder with its original: one that makes a text of another, or of speech.

The encoder reads windows of a text, or pieces of sound. The original writes what it finds likeliest, token for token.
KL(original || model) is taken at every token of that, with the original's tokens before it (teacher-forced). Then the
model writes, too: the share of tokens that are the same at the same place, of the longer output each time, and the word
errors of its outputs, the original's being the reference (insertions, deletions and replacements to words of the
reference). Of speech that is the usual word error rate between the two transcripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calib import pairs
from compress.calib.data import token_windows
from compress.calib.documents import source_name
from compress.errors import CalibrationError, CheckpointError
from compress.evaluate import encoders
from compress.evaluate.reader import Execution
from compress.model import architectures, inputs, load
from compress.model.inputs import Pairs
from compress.progress import Progress

WINDOW_TOKENS, TEXT_TOKENS = 256, 16_384  # an encoder reads so many at a time, and in all
BATCH = 8  # samples
PURPOSES: dict[str, str] = {each: architectures.PURPOSES[each] for each in pairs.WRITERS}


@dataclass(frozen=True)
class WriterScores:
    """How far what a model writes is from what its original writes."""

    text: str  # file, folder or data set name
    purpose: str  # what the model is for
    samples: int  # windows of text, or pieces of sound
    tokens: int  # that the original has written, and KL is taken at
    kl_mean: float  # nats a token
    kl_se: float | None  # standard error over samples; None for one
    kl_p99: float
    same_top1: float  # share of tokens at which both find the same one likeliest, behind the original's tokens
    same_tokens: float  # share of the tokens that both write by themselves
    same_outputs: float  # share of the samples of which both write the same
    word_error: float | None  # None where the original writes no words


def scorer(directory: Path) -> Callable[..., Any] | None:
    """Return what compares a model that has an encoder with its original; None for a language model."""
    if architectures.task(load.whole_config(directory)) in PURPOSES:
        return evaluate
    return encoders.evaluate if encoders.is_encoder(directory) else None


def evaluate(
    directory: Path,
    text: str,
    base: Path,
    lengths: tuple[int | None, int | None],
    execution: Execution,
    progress: Progress,
) -> WriterScores:
    """Return the scores of a model beside its original on a text, or on a folder of .wav files.

    lengths: tokens of a window and of the text; None: as is usual. Raises CheckpointError for two models that cannot be
    compared, CalibrationError for a text of less than a window, or no sound.
    """
    configs = [load.whole_config(each) for each in (base, directory)]
    purposes = [architectures.task(each) for each in configs]
    tokenizers = [load.load_tokenizer(each) for each in (base, directory)]
    if purposes[0] != purposes[1] or tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise CheckpointError(
            f"{directory.name} and {base.name} differ in purpose or vocabulary; they cannot be compared"
        )
    read = _read(text, base, tokenizers[0], configs[0], lengths)
    models = [
        load.load_model(each, execution.dtype, execution.device, tasks=pairs.WRITERS) for each in (base, directory)
    ]
    names = [each.name for each in (base, directory)]
    outputs = [
        pairs.write(model, read, say=partial(progress, f"writing with {name}"))
        for model, name in zip(models, names, strict=True)
    ]
    figures = _teacher_forced(models, read, outputs[0], progress)
    means = torch.stack([each[0].mean() for each in figures])
    kl, same = torch.cat(figures, 1)
    words = [[_words(tokenizers[0], row) for row in rows] for rows in outputs]
    return WriterScores(
        text=Path(text).name if inputs.reads_sound(configs[0]) else source_name(text),
        purpose=PURPOSES[purposes[0]],
        samples=len(read),
        tokens=kl.numel(),
        kl_mean=kl.mean().item(),
        kl_se=means.std().item() / math.sqrt(len(means)) if len(means) > 1 else None,
        kl_p99=kl.quantile(0.99).item(),
        same_top1=same.mean().item(),
        same_tokens=_share_of_tokens(*outputs),
        same_outputs=sum(map(torch.equal, *outputs)) / len(read),
        word_error=word_error(*words),
    )


def _read(text: str, base: Path, tokenizer: Any, config: Any, lengths: tuple[int | None, int | None]) -> Tensor:
    """Return what the encoders read: token ids [samples, tokens], or features of sound."""
    if inputs.reads_sound(config):
        return pairs.read_sound(pairs.check_sound(text, base, "--text"), base)
    longest = architectures.max_positions(config) or WINDOW_TOKENS
    seq_len, most = min(lengths[0] or WINDOW_TOKENS, longest), lengths[1] or TEXT_TOKENS
    windows, available = token_windows(text, tokenizer, seq_len, config.vocab_size, most)
    if not len(windows):
        raise CalibrationError(f"{text} has only {available} tokens, a window has {seq_len}; give more text")
    return windows


@torch.no_grad()
def _teacher_forced(models: Sequence[Any], read: Tensor, written: list[Tensor], progress: Progress) -> list[Tensor]:
    """Return for each sample [2, tokens] float64: KL of two models, and 1 where both find the same token likeliest.

    written: by the first model, each begun by a token that is not predicted.
    """
    figures: list[Tensor] = []
    for start in range(0, len(read), BATCH):
        rows = written[start : start + BATCH]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)[:, :-1]  # nothing looks ahead
        batch = Pairs(read[start : start + BATCH], padded)
        logits = []
        for model in models:
            given = batch.part(slice(None), model.device)
            given = given._replace(encoder=inputs.in_type(model, given.encoder))
            logits.append(model(**inputs.arguments(model, given), use_cache=False).logits.float().cpu().log_softmax(-1))
        for row, before, after in zip(rows, *logits, strict=True):
            before, after = before[: len(row) - 1], after[: len(row) - 1]
            kl = (before.exp() * (before - after)).sum(-1, dtype=torch.float64)
            figures.append(torch.stack((kl, (before.argmax(-1) == after.argmax(-1)).double())))
        progress("scoring", min(start + BATCH, len(read)), len(read))
    return figures


def _share_of_tokens(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the share of tokens that are the same at the same place, of the longer of two outputs each time.

    The token that begins both does not count.
    """
    same = total = 0
    for a, b in zip(first, second, strict=True):
        shorter = min(len(a), len(b))
        same += int((a[1:shorter] == b[1:shorter]).sum())
        total += max(len(a), len(b)) - 1
    return same / max(1, total)


def _words(tokenizer: Any, tokens: Tensor) -> list[str]:
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).lower().split()


def word_error(references: Sequence[Sequence[str]], others: Sequence[Sequence[str]]) -> float | None:
    """Return the edits that turn references into the others, to a word of the references; None without words."""
    total = sum(map(len, references))
    return sum(map(edits, references, others)) / total if total else None


def edits(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the least number of insertions, deletions and replacements that turn a sequence into another."""
    row = list(range(len(second) + 1))
    for number, word in enumerate(first, 1):
        diagonal, row[0] = row[0], number
        for at, other in enumerate(second, 1):
            diagonal, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, diagonal + (word != other))
    return row[-1]
