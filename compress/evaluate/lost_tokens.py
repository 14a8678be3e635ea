"""Show where predictions are lost: how KL is spread over tokens, and the tokens at which it is largest.

A mean does not tell whether all predictions moved a little or a few of them broke. Tokens are counted in classes of KL,
two to each power of ten; the worst ones come with the text in front of them and with what both models expected there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.evaluate.generation import text_behind
from compress.evaluate.reader import Reader

WORST = 10  # tokens that are shown
BEFORE = 16  # tokens in front of each
PER_POWER = 2  # classes to a power of ten
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


def find(readers: Sequence[Reader], windows: Tensor, kl: Tensor, text: str, decode: Decode) -> LostTokens:
    """Return how KL is spread over a text.

    readers: the compressed model and its original; windows: int64 [n, tokens]; kl: float64 [n, scored], of the
    predictions of the last tokens of each; text: name of the source; decode: token ids to text, special tokens
    included.
    """
    values = kl.flatten().clamp_min(0)
    order = values.argsort(descending=True, stable=True)
    ranked = [index for index in order[:WORST].tolist() if values[index] > 0]
    places = [divmod(index, kl.shape[1]) for index in ranked]
    first = windows.shape[1] - kl.shape[1]  # the first token that is predicted
    fields = [_token(readers, windows[row, : first + at + 1], decode) for row, at in places]
    worst = tuple(WorstToken(float(values[index]), *rest) for index, rest in zip(ranked, fields, strict=True))
    return LostTokens(text, half(values), classes(values), worst)


def half(values: Tensor) -> float:
    """Return the smallest share of the values that has half of their sum; 0 where all are 0."""
    total = float(values.sum())
    if total == 0:
        return 0.0
    reached = values.sort(descending=True).values.cumsum(0) >= total / 2 * (1 - 1e-12)
    return (int(reached.to(torch.uint8).argmax()) + 1) / len(values)


def classes(values: Tensor) -> tuple[dict[str, float], ...]:
    """Return classes of values >= 0 with their shares of the count and of the sum, from the first to the last in use.

    Each holds low <= value < high; the outermost ones hold what lies beyond them, too.
    """
    count, total = (HIGHEST - LOWEST) * PER_POWER, float(values.sum()) or 1.0
    bounds = [10 ** (LOWEST + step / PER_POWER) for step in range(count + 1)]
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
    before, own = tokens[:-1].tolist()[-BEFORE:], int(tokens[-1])
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
