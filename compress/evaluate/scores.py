"""Measure the perplexity of a checkpoint, and how far its predictions are from those of another one.

Windows of seq_len tokens that do not overlap are cut from the start of the text. Each begins with what the tokenizer
puts before a text by itself (calib/prefix.py), which is read and not scored. Every other token but a window's first is
predicted from those before it in the window. Perplexity = exp(mean negative log-likelihood). KL = mean over the same
positions of KL(base || model) on the full distributions. Log-probabilities are float32, sums float64.

Both models are in memory, and a batch of windows goes through one after the other. The processes of torchrun share out
the batches; the figures are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress import ranks
from compress.calib import prefix
from compress.calib.data import token_windows
from compress.calib.documents import source_name
from compress.calib.prefix import Prefix
from compress.errors import CalibrationError, CheckpointError
from compress.evaluate.reader import Execution, Reader
from compress.model import load
from compress.model.architectures import max_positions
from compress.numerics import kl
from compress.recipe.schema import Bos

BATCH_NBYTES = 256 << 20  # all logits of a batch take about so many
BATCH_TOKENS = 4096  # most tokens of a batch: products are efficient, activations small


@dataclass(frozen=True)
class Scores:
    """Figures of how well a model predicts a text."""

    text: str  # file or data set name
    perplexity: float  # exp(nll)
    nll: float  # nats a token, mean
    tokens: int  # scored
    windows: int
    seq_len: int
    begins_with: str  # what each window begins with, by the tokenizer's name of it; "" for nothing


@dataclass(frozen=True)
class Comparison(Scores):
    """Scores beside those of a base model. KL in nats a token, over the scored positions."""

    base_perplexity: float
    perplexity_ratio: float  # model to base
    kl_mean: float
    kl_se: float | None  # standard error of kl_mean over windows; None for a single window
    kl_p95: float
    kl_p99: float
    kl_max: float
    same_top1: float  # share of positions at which both find the same token likeliest


@dataclass(frozen=True, eq=False)
class TextWindows:
    """The windows of a text to score."""

    tokens: Tensor  # int64 [windows, seq_len]
    prefix: Prefix  # what each of them begins with


DEFAULT = Execution()


def evaluate(
    model_directory: str | Path,
    text: str | Path,
    base: str | Path | None = None,
    seq_len: int = 512,
    max_tokens: int = 131_072,
    execution: Execution = DEFAULT,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Return scores of a checkpoint on the first max_tokens tokens of a text; a Comparison if a base is given.

    text is anything that calibration takes: a file, or the name of a data set. progress is told (windows done, windows
    in all). Raises CheckpointError, CalibrationError, or NumericalError for logits that are not finite.
    """
    directories = [Path(model_directory)] if base is None else [Path(model_directory), Path(base)]
    cut = text_windows(directories, text, seq_len, max_tokens, execution.bos)
    windows = cut.tokens
    with ranks.joined(execution.device) as processes:
        gathered = processes.gather(_columns(directories, windows, execution, progress))
        columns = [column for of_process in gathered for column in of_process]
    figures = torch.cat(columns, 1).view(len(columns[0]), len(windows), seq_len - 1)  # figure, window, position
    return summary(figures[..., cut.prefix.unscored :], source_name(text), seq_len, cut.prefix.text)


def _columns(
    directories: list[Path], windows: Tensor, execution: Execution, progress: Callable[[int, int], None] | None
) -> list[Tensor]:
    """Return what `score` gives for each batch of windows that is this process's."""
    readers = [
        Reader(load.load_model(directory, execution.dtype, execution.device), name=directory.name)
        for directory in directories
    ]
    batch = execution.batch or windows_at_a_time(readers, windows.shape[1])
    begins = list(range(0, len(windows), batch))
    share = ranks.current().part(len(begins))
    columns: list[Tensor] = []
    for begin in begins[share]:
        columns.append(positions(readers, windows[begin : begin + batch]))
        if progress is not None:
            progress(min(begin + batch, len(windows)), min(begins[share.stop - 1] + batch, len(windows)))
    return columns


def positions(readers: Sequence[Reader], windows: Tensor) -> Tensor:
    """Return what `score` gives for windows int64 [n, seq_len] that go through models together, without caches."""
    logits = [reader.predictions(windows) for reader in readers]
    return score(logits, windows[:, 1:].flatten().to(logits[0].device))


def text_windows(
    directories: list[Path], text: str | Path, seq_len: int, max_tokens: int, bos: Bos = "auto"
) -> TextWindows:
    """Return the windows to score, and find what is wrong before a model is loaded."""
    configs = [load.load_config(directory) for directory in directories]
    tokenizers = [load.load_tokenizer(directory) for directory in directories]
    for directory, config, tokenizer in zip(directories[1:], configs[1:], tokenizers[1:], strict=True):
        if config.vocab_size != configs[0].vocab_size or tokenizer.get_vocab() != tokenizers[0].get_vocab():
            raise CheckpointError(
                f"{directories[0].name} and {directory.name} do not share a vocabulary ({len(tokenizers[0])} and "
                f"{len(tokenizer)} tokens); they cannot be compared"
            )
    longest = min(max_positions(config) or seq_len for config in configs)
    begun = prefix.of_tokenizer(tokenizers[0], bos)
    shortest = max(2, len(begun.tokens) + 1)
    if not shortest <= seq_len <= longest:
        raise CalibrationError(f"windows of {seq_len} tokens cannot be scored; {shortest} to {longest} can")
    if max_tokens < seq_len:
        raise CalibrationError(f"{max_tokens} tokens are less than one window of {seq_len}; raise max_tokens")
    windows, available = token_windows(text, tokenizers[0], seq_len, configs[0].vocab_size, max_tokens, bos)
    if not len(windows):
        raise CalibrationError(
            f"evaluation text {text} has only {available} tokens, one window needs {seq_len}; "
            "give more text or lower seq_len"
        )
    return TextWindows(windows[: max_tokens // seq_len], begun)


def windows_at_a_time(readers: Sequence[Reader], seq_len: int) -> int:
    """Return how many windows go through these models together."""
    vocab_size = readers[0].model.config.get_text_config().vocab_size
    window_nbytes = sum(seq_len * vocab_size * reader.model.dtype.itemsize for reader in readers)
    return max(1, min(BATCH_NBYTES // window_nbytes, BATCH_TOKENS // seq_len))


def score(logits: list[Tensor], targets: Tensor) -> Tensor:
    """Compare predictions with what follows: figures of each position, float64 on the CPU.

    logits [positions, vocab_size] of the model, and of the base if there is one; targets [positions].
    Returns [1, positions] nll, or [4, positions] nll, base nll, KL(base || model), same likeliest token.
    """
    step = kl.rows_at_a_time(logits[0].shape[1])
    parts = [part.split(step) for part in logits]
    figures: list[Tensor] = []
    for i, target in enumerate(targets.split(step)):
        log_probs = [torch.log_softmax(part[i].float(), -1) for part in parts]
        rows = [-log_prob.gather(-1, target[:, None])[:, 0].double() for log_prob in log_probs]
        if len(logits) == 2:
            log_q, log_p = log_probs
            rows.append(kl.from_log_probs(log_p, log_q, torch.float64))
            rows.append((parts[0][i].argmax(-1) == parts[1][i].argmax(-1)).double())
        figures.append(torch.stack(rows).cpu())
    return torch.cat(figures, 1)


def summary(positions: Tensor, text: str, seq_len: int, begins_with: str = "") -> Scores:
    """Return the scores of a text. positions: what `score` gives, [1 or 4, windows, at most seq_len - 1]."""
    windows = positions.shape[1]
    nll = float(positions[0].mean())
    scores = Scores(text, _exp(nll), nll, positions[0].numel(), windows, seq_len, begins_with)
    if len(positions) == 1:
        return scores
    base_nll, kl = float(positions[1].mean()), positions[2]
    ascending = kl.flatten().sort().values

    def percentile(share: float) -> float:  # nearest rank
        return float(ascending[math.ceil(share * len(ascending)) - 1])

    return Comparison(
        **vars(scores),
        base_perplexity=_exp(base_nll),
        perplexity_ratio=_exp(nll - base_nll),
        kl_mean=float(kl.mean()),
        kl_se=float(kl.mean(1).std()) / math.sqrt(windows) if windows > 1 else None,
        kl_p95=percentile(0.95),
        kl_p99=percentile(0.99),
        kl_max=float(ascending[-1]),
        same_top1=float(positions[3].mean()),
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf  # of float64, about; a broken model can get there
