"""Measure how repetitive and how diverse continuations are, on token ids.

- rep-n (Welleck et al. 2020, arXiv 1908.04319): share of the n-grams of one continuation that it has had before,
  averaged over continuations. 0 says that nothing comes twice.
- distinct-n (Li et al. 2016, arXiv 1510.03055): different n-grams of all continuations, to all of their n-grams.
- self-BLEU (Zhu et al. 2018, arXiv 1802.01886): mean BLEU-4 of each continuation against all others; the higher, the
  more they are alike. BLEU has the brevity penalty against the closest reference length, and a precision without a
  match counts as 0.1 matches (method 1 of Chen and Cherry 2014), as the paper's code has it.

A continuation that is shorter than n has no n-gram and does not count in rep-n; one of fewer than four tokens takes the
orders that it has in BLEU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

ORDER = 4  # of BLEU
MISSED = 0.1  # matches, where there is none

Tokens = Sequence[int]


def ngrams(tokens: Tokens, n: int) -> Counter[tuple[int, ...]]:
    """Return how often each n-gram comes."""
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def repetition(continuations: Sequence[Tokens], n: int) -> float:
    """Return the mean share of n-grams that repeat; 0 where no continuation has any."""
    shares = [1 - len(found) / found.total() for each in continuations if (found := ngrams(each, n))]
    return sum(shares) / len(shares) if shares else 0.0


def distinct(continuations: Sequence[Tokens], n: int) -> float:
    """Return the share of different n-grams in all; 0 where there are none."""
    found = sum((ngrams(each, n) for each in continuations), Counter[tuple[int, ...]]())
    return len(found) / found.total() if found else 0.0


def self_bleu(continuations: Sequence[Tokens]) -> float:
    """Return the mean BLEU of each continuation against the others; 0 for fewer than two that have tokens."""
    texts = [each for each in continuations if len(each)]
    if len(texts) < 2:
        return 0.0
    counts = [[ngrams(each, n) for n in range(1, ORDER + 1)] for each in texts]
    most = [_two_largest([row[n] for row in counts]) for n in range(ORDER)]
    return sum(_bleu(i, texts, counts[i], most) for i in range(len(texts))) / len(texts)


Largest = dict[tuple[int, ...], tuple[int, int]]  # n-gram -> its two largest counts in a text


def _two_largest(counts: Sequence[Counter[tuple[int, ...]]]) -> Largest:
    """Return the two largest counts of each n-gram; the second is the largest elsewhere for the text with the first."""
    found: Largest = {}
    for row in counts:
        for gram, count in row.items():
            first, second = found.get(gram, (0, 0))
            found[gram] = (count, first) if count > first else (first, max(second, count))
    return found


def _bleu(own: int, texts: Sequence[Tokens], counts: Sequence[Counter[tuple[int, ...]]], most: list[Largest]) -> float:
    logs = []
    for n, grams in enumerate(counts):
        if not grams:
            continue
        matches = 0
        for gram, count in grams.items():
            first, second = most[n][gram]
            matches += min(count, second if count == first else first)
        logs.append(math.log((matches or MISSED) / grams.total()))
    length = len(texts[own])
    closest = min((abs(len(each) - length), len(each)) for i, each in enumerate(texts) if i != own)[1]
    brevity = min(0.0, 1 - closest / length)
    return math.exp(brevity + sum(logs) / len(logs))
