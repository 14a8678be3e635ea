"""Two loaded models, the original and the compressed one: opened together, and compared on text.

Where a cache is named, the compressed model reads through it, and the original without: its own cache is exact.

The noise floor is the KL of the original to itself in another number type, weights and arithmetic both: bfloat16 beside
float32 (float32 where the scores are in another type), on the first windows of a text. A difference of that size is
rounding, and says nothing of the compression.

A mean does not tell whether all predictions moved a little or a few of them broke. Tokens are counted in classes of KL,
two to each power of ten; the worst ones come with the text in front of them and with what both models expected there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.evaluate import cache_scores
from compress.evaluate.cache_candidates import check, open_reader
from compress.evaluate.generation import text_behind
from compress.evaluate.reader import Execution, Reader
from compress.evaluate.scores import Comparison, TextWindows, positions, summary, windows_at_a_time
from compress.kv.settings import CacheSettings
from compress.model import load as lm
from compress.progress import Progress

FLOOR_WINDOWS = 4  # windows of a text that the noise floor is measured on
WORST_TOKENS = 10
TOKENS_BEFORE = 16
CLASSES_PER_POWER = 2  # classes of KL to a power of ten
LOWEST, HIGHEST = -6, 1  # powers of ten; KL beyond them counts in the outermost classes

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class WorstToken:
    """A token at which the predictions of two models are far apart. Probabilities are those in front of it."""

    kl: float  # nats
    before: str  # text in front of it
    token: str  # as the text has it
    base_probability: float  # of that token
    probability: float
    base_expected: str  # the token that the original finds likeliest
    base_confidence: float  # probability of it
    expected: str  # the same of the compressed model
    confidence: float


@dataclass(frozen=True)
class LostTokens:
    """How the divergence from the original is spread over the tokens of a text."""

    text: str
    half: float  # share of the tokens, the worst ones, that have half of all KL
    classes: tuple[Mapping[str, float], ...]  # "low" and "high" bound of KL, shares of "tokens" and of "kl"
    worst: tuple[WorstToken, ...]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        values = dataclasses.asdict(self)
        return {**values, "classes": list(values["classes"]), "worst": list(values["worst"])}


@dataclass(frozen=True)
class Pair:
    """A model and its original, with their tokenizers, the original first."""

    directories: tuple[Path, Path]
    base: Reader
    model: Reader
    tokenizers: tuple[Any, Any]

    @property
    def configs(self) -> tuple[Any, Any]:
        """The configurations of the text models."""
        base, model = (each.model.config.get_text_config() for each in (self.base, self.model))
        return base, model


def open_pair(
    directory: Path,
    base: Path,
    execution: Execution,
    caches: Mapping[str, CacheSettings] | None,
    calib: str | None,
    progress: Progress,
) -> Pair:
    """Load a model and its original. CheckpointError where they cannot be compared: other numbers of token ids.

    caches: the one that the model reads through, by name; empty: its own; None: none. calib: text to calibrate it on.
    """
    sizes = [lm.load_config(each).vocab_size for each in (base, directory)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{base.name} knows {sizes[0]:,} token ids, {directory.name} {sizes[1]:,}; predictions over other tokens "
            "cannot be compared"
        )
    if caches is not None:
        check(directory, caches, calib)
    tokenizers = lm.load_tokenizer(base), lm.load_tokenizer(directory)
    original = Reader(lm.load_model(base, execution.dtype, execution.device), name=base.name)
    if caches is None:
        model = Reader(lm.load_model(directory, execution.dtype, execution.device), name=directory.name)
    else:
        original.attach_cache()  # the exact one, where the original stores another
        model = open_reader(directory, execution, caches, calib, progress)
    return Pair((base, directory), original, model, tokenizers)


def compare_text(pair: Pair, name: str, cut: TextWindows, progress: Progress) -> tuple[Comparison, LostTokens | None]:
    """Return the scores of a text, and where they were lost; None for that through a cache. name: of the text."""
    if pair.model.cache is not None:
        return cache_scores.compare_text(pair.model, pair.base.model, cut, name, progress), None
    windows, unscored = cut.tokens, cut.prefix.unscored
    readers = [pair.model, pair.base]
    batch, figures = windows_at_a_time(readers, windows.shape[1]), []
    for begin in range(0, len(windows), batch):
        figures.append(positions(readers, windows[begin : begin + batch]))
        progress(f"scoring {name}", min(begin + batch, len(windows)), len(windows))
    by_window = _by_window(figures, windows, unscored)
    comparison = summary(by_window, name, windows.shape[1], cut.prefix.text)
    assert isinstance(comparison, Comparison)
    lost = find_lost_tokens(readers, windows, by_window[2], name, pair.tokenizers[0].decode)
    return comparison, lost


def noise_floor(pair: Pair, cut: TextWindows, execution: Execution, progress: Progress) -> dict[str, Any]:
    """Return the KL of the original to itself in another number type."""
    progress("measuring the noise floor", 0, 0)
    dtype = str(pair.base.model.dtype).removeprefix("torch.")
    other_dtype = "bfloat16" if dtype == "float32" else "float32"
    directory = pair.directories[0]
    other = Reader(lm.load_model(directory, other_dtype, execution.device), name=directory.name)
    windows = cut.tokens[:FLOOR_WINDOWS]
    readers = [other, pair.base]
    batches = windows.split(windows_at_a_time(readers, windows.shape[1]))
    by_window = _by_window([positions(readers, batch) for batch in batches], windows, cut.prefix.unscored)
    return {
        "kl_mean": float(by_window[2].mean()),
        "same_top1": float(by_window[3].mean()),
        "tokens": by_window[0].numel(),
        "path": f"the original in {other_dtype} against itself in {dtype}",
    }


def _by_window(figures: list[Tensor], windows: Tensor, unscored: int) -> Tensor:
    """Return what `scores.positions` gives for batches of windows as [4, windows, scored tokens]."""
    return torch.cat(figures, 1).view(4, len(windows), windows.shape[1] - 1)[..., unscored:]


def find_lost_tokens(readers: Sequence[Reader], windows: Tensor, kl: Tensor, text: str, decode: Decode) -> LostTokens:
    """Return how KL is spread over a text.

    readers: the compressed model and its original; windows: int64 [n, tokens]; kl: float64 [n, scored], of the
    predictions of the last tokens of each; text: name of the source; decode: token ids to text, special tokens
    included.
    """
    values = kl.flatten().clamp_min(0)
    order = values.argsort(descending=True, stable=True)
    ranked = [index for index in order[:WORST_TOKENS].tolist() if values[index] > 0]
    places = [divmod(index, kl.shape[1]) for index in ranked]
    first = windows.shape[1] - kl.shape[1]  # the first token that is predicted
    fields = [_token(readers, windows[row, : first + at + 1], decode) for row, at in places]
    worst = tuple(WorstToken(float(values[index]), *rest) for index, rest in zip(ranked, fields, strict=True))
    return LostTokens(text, half_share(values), kl_classes(values), worst)


def half_share(values: Tensor) -> float:
    """Return the smallest share of the values that has half of their sum; 0 where all are 0."""
    total = float(values.sum())
    if total == 0:
        return 0.0
    reached = values.sort(descending=True).values.cumsum(0) >= total / 2 * (1 - 1e-12)
    return (int(reached.to(torch.uint8).argmax()) + 1) / len(values)


def kl_classes(values: Tensor) -> tuple[dict[str, float], ...]:
    """Return classes of values >= 0 with their shares of the count and of the sum, from the first to the last in use.

    Each holds low <= value < high; the outermost ones hold what lies beyond them, too.
    """
    count, total = (HIGHEST - LOWEST) * CLASSES_PER_POWER, float(values.sum()) or 1.0
    bounds = [10 ** (LOWEST + step / CLASSES_PER_POWER) for step in range(count + 1)]
    places = torch.bucketize(values, torch.tensor(bounds[1:-1], dtype=values.dtype), right=True)
    tokens = torch.bincount(places, minlength=count)
    sums = torch.zeros(count, dtype=values.dtype).index_add_(0, places, values)
    used = tokens.nonzero().flatten().tolist()
    return tuple(
        {
            "low": bounds[at],
            "high": bounds[at + 1],
            "tokens": int(tokens[at]) / len(values),
            "kl": float(sums[at]) / total,
        }
        for at in range(used[0], used[-1] + 1)
    )


def _token(readers: Sequence[Reader], tokens: Tensor, decode: Decode) -> tuple[Any, ...]:
    """Return the fields of a WorstToken, but for its KL; tokens: those in front of it, and itself."""
    before, own = tokens[:-1].tolist()[-TOKENS_BEFORE:], int(tokens[-1])
    laws = [reader.predictions(tokens[None])[-1].float().softmax(-1) for reader in readers]
    (expected, confidence), (base_expected, base_confidence) = (
        (_piece(decode, before, int(law.argmax())), float(law.max())) for law in laws
    )
    own_probability, base_probability = (float(law[own]) for law in laws)
    return (
        *(decode(before), _piece(decode, before, own), base_probability, own_probability),
        *(base_expected, base_confidence, expected, confidence),
    )


def _piece(decode: Decode, before: Sequence[int], token: int) -> str:
    """Return the text of a token behind others; alone where it has none of its own, as one that is left out."""
    return text_behind(decode, [*before, token], len(before)) or decode([token])
