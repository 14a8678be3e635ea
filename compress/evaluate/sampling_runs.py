"""Let a compressed model and its base continue the same prompts with the same random numbers.

Every prompt is continued twice. In the first half of the rows a token is looked up in the cumulative distribution, in
the order of the ids, by a uniform number; in the second half Gumbel noise is added to the log-probabilities and the
largest wins. Both draw exactly from the filtered distribution. Each row has random numbers of its own, which depend on
the seed, the row's place and the step alone, so that both models, all settings, and every batch size get the same.

The rows of all settings go through a model together, with one cache, as far as WRITING_NBYTES allow. What they write
is what each setting writes alone, but for the rounding of sums of another order.

What the models have written is then read by both: the reverse KL of a token is KL(model's filtered distribution ||
base's unfiltered one at the same temperature), in closed form at every position of the model's own text. Its sampled
estimate is the negative log-likelihood under the base minus the model's own entropy. With a filter the base's own text
has a reverse KL as well (what the filter cuts off), which is the floor.

How repetitive and how diverse continuations are is measured on token ids:

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

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor

from compress.errors import NumericalError
from compress.evaluate.reader import Reader
from compress.evaluate.sampling_distributions import (
    FilteredLaw,
    SamplingSetting,
    dense,
    entropy,
    mean_log_ratio,
    of_logits,
    penalize,
)
from compress.evaluate.scores import windows_at_a_time
from compress.model import writing
from compress.numerics import kl
from compress.progress import Progress, silent

REPEATED = (2, 3, 4)  # n of rep-n
DISTINCT = (1, 2, 3)  # n of distinct-n
WRITING_NBYTES = 1 << 30  # an upper bound: caches and logits of rows that are continued together
COPIES = 16  # float64 tensors [positions, vocabulary] that the figures of a position need at a time, about


@dataclass(frozen=True)
class ContinuationFigures:
    """What one model's continuations are like, on their tokens."""

    length: float  # tokens, mean; the end of text counts
    ended: float  # share of continuations that came to an end of text
    repetition: dict[str, float]  # n -> rep-n
    distinct: dict[str, float]  # n -> distinct-n
    self_bleu: float
    entropy: float  # of the model's own filtered distributions, nats a token
    base_nll: float  # of the tokens, by the base without filters at the same temperature, nats a token
    reverse_kl: float  # KL(own filtered || base unfiltered), closed form, nats a token
    reverse_kl_se: float | None  # over continuations; None for a single one


@dataclass(frozen=True)
class Sampled:
    """Continuations of both models in one setting."""

    temperature: float
    filters: str
    base: ContinuationFigures
    model: ContinuationFigures
    same_cdf: float  # tokens until the two models differ, mean, with uniform numbers
    same_gumbel: float  # the same with Gumbel noise


class CoupledDraw(LogitsProcessor):
    """Draw tokens in each of some settings, whose rows follow each other: `rows` of each, all with the same numbers.

    The first half of the rows of a setting draw by uniform numbers, the second half by Gumbel noise.
    """

    leaves_choice = False  # as of compress.model.writing.Draw

    def __init__(self, name: str, settings: Sequence[SamplingSetting], rows: int, seed: int) -> None:
        self.name, self.settings = name, settings
        self.generators = [_generator(seed, row) for row in range(rows)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [rows, seq] int64, [rows, vocab] float32
        if not torch.isfinite(scores).all():
            raise NumericalError(
                f"{self.name} has non-finite logits at token {input_ids.shape[1]}; its weights are damaged, or overflow"
            )
        uniform, noise = self._numbers(scores.shape[1], scores.device)
        tokens, rows = [], len(self.generators)
        for setting, part, text in zip(self.settings, scores.split(rows), input_ids.split(rows), strict=True):
            law = of_logits(penalize(part, text, setting.repetition_penalty), setting)
            tokens.append(_draw(law, uniform, noise))
        return torch.full_like(scores, -torch.inf).scatter_(1, torch.cat(tokens), 0.0)

    def _numbers(self, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return uniform numbers [half, 1] and Gumbel noise [half, vocabulary] of the next step, float64."""
        half = len(self.generators) // 2
        uniform = torch.stack([torch.rand(1, dtype=torch.float64, generator=own) for own in self.generators[:half]])
        drawn = [torch.rand(vocab_size, dtype=torch.float64, generator=own) for own in self.generators[half:]]
        noise = -(-torch.stack(drawn).clamp_(min=torch.finfo(torch.float64).tiny).log()).log()
        return uniform.to(device), noise.to(device)


def _draw(law: FilteredLaw, uniform: Tensor, noise: Tensor) -> Tensor:
    """Return a token for each row of a setting, int64 [rows, 1]."""
    half = len(uniform)
    cumulative = law.log_probs[:half].exp().cumsum(-1)
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_(max=cumulative.shape[1] - 1)
    noisy = law.log_probs[half:] + noise.gather(1, law.ids[half:])
    return law.ids.gather(1, torch.cat([place, noisy.argmax(-1, True)]))


def _generator(seed: int, row: int) -> torch.Generator:
    """Return the random numbers of a row; both numbers go through a hash, so that rows of other seeds differ too."""
    digest = hashlib.sha256(f"{seed} {row}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def continue_prompts(
    readers: Sequence[Reader],
    prompts: Tensor,
    new_tokens: int,
    stop: Sequence[int],
    settings: Sequence[SamplingSetting],
    seed: int,
    progress: Progress = silent,
) -> list[Sampled]:
    """Continue prompts int64 [prompts, seq] by (model, base) in each setting, and compare what they write."""
    start, continuations = prompts.repeat(2, 1), []
    rows, seq = start.shape
    row_nbytes = max(writing.sequence_nbytes(each.model.config.get_text_config(), seq + new_tokens) for each in readers)
    step = max(1, WRITING_NBYTES // (rows * row_nbytes))
    for begin in range(0, len(settings), step):
        progress("sampling", begin, len(settings))
        part = settings[begin : begin + step]
        texts = []
        for reader in readers:
            draw = CoupledDraw(reader.name, part, rows, seed)
            written = writing.write(reader.model, start.repeat(len(part), 1), new_tokens, cast(Any, draw), stop=stop)
            cuts = [_cut(row, stop) for row in written[:, seq:].tolist()]
            texts.append([cuts[i : i + rows] for i in range(0, len(cuts), rows)])
        continuations += [
            _compare(readers, start, each, setting, frozenset(stop))
            for setting, *each in zip(part, *texts, strict=True)
        ]
    return continuations


@dataclass(frozen=True)
class BeamSearch:
    """What both models write by beam search, which draws nothing: the likeliest text of those that are followed."""

    beams: int  # 1: the likeliest token each time
    base: ContinuationFigures
    model: ContinuationFigures
    same: float  # tokens until the two models differ, mean


def search_beams(
    readers: Sequence[Reader], prompts: Tensor, new_tokens: int, stop: Sequence[int], beams: Sequence[int]
) -> list[BeamSearch]:
    """Continue prompts int64 [prompts, seq] by (model, base) with each number of beams, and compare what they write.

    Figures are those of draws at temperature 1 without filters. The cumulated log-probability is divided by the length,
    as in transformers.
    """
    searches, plain = [], SamplingSetting(1.0)
    for count in beams:
        cuts = [
            [
                _cut(row, stop)
                for part in prompts.split(max(1, len(prompts) // count))
                for row in writing.search(reader.model, part, new_tokens, count, stop)[:, prompts.shape[1] :].tolist()
            ]
            for reader in readers
        ]
        base, model = (_describe(readers[i:], prompts, cuts[i], plain, frozenset(stop)) for i in (1, 0))
        same = [float(_common(a, b)) for a, b in zip(*cuts, strict=True)]
        searches.append(BeamSearch(count, base, model, sum(same) / len(same)))
    return searches


def _compare(
    readers: Sequence[Reader],
    start: Tensor,
    cuts: Sequence[Sequence[Sequence[int]]],
    setting: SamplingSetting,
    stop: frozenset[int],
) -> Sampled:
    """Compare the continuations of (model, base), each up to its end; start int64 [rows, seq]."""
    base, model = (_describe(readers[i:], start, cuts[i], setting, stop) for i in (1, 0))
    equal = [float(_common(a, b)) for a, b in zip(*cuts, strict=True)]
    half = len(equal) // 2
    return Sampled(
        temperature=setting.temperature,
        filters=setting.filters,
        base=base,
        model=model,
        same_cdf=sum(equal[:half]) / half,
        same_gumbel=sum(equal[half:]) / half,
    )


def _cut(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """Return a continuation up to its end of text, which counts."""
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two continuations begin with in common."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _describe(
    readers: Sequence[Reader],
    start: Tensor,
    cuts: Sequence[Sequence[int]],
    setting: SamplingSetting,
    stop: frozenset[int],
) -> ContinuationFigures:
    """Return the figures of the continuations of readers[0]; readers[-1] is the base."""
    lengths = torch.tensor([len(each) for each in cuts])
    each = _read(readers, start, cuts, setting)
    count, tokens = len(cuts), int(lengths.sum())
    totals = each.sum(0) / tokens
    ratio = each[:, 2] - totals[2] * lengths  # error of a ratio of sums
    error = float(ratio.std()) * math.sqrt(count) / tokens if count > 1 else None
    return ContinuationFigures(
        length=tokens / count,
        ended=sum(row[-1] in stop for row in cuts) / count,
        repetition={str(n): repetition(cuts, n) for n in REPEATED},
        distinct={str(n): distinct(cuts, n) for n in DISTINCT},
        self_bleu=self_bleu(cuts),
        entropy=float(totals[0]),
        base_nll=float(totals[1]),
        reverse_kl=float(totals[2]),
        reverse_kl_se=error,
    )


def _read(
    readers: Sequence[Reader],
    start: Tensor,
    cuts: Sequence[Sequence[int]],
    setting: SamplingSetting,
) -> Tensor:
    """Return sums over each continuation of readers[0]: float64 [rows, 3].

    They are the entropy of readers[0], the negative log-likelihood of readers[-1], and the reverse KL. Rows are padded
    on the right, where a causal model does not look.
    """
    ids = pad_sequence([torch.tensor([*a, *b]) for a, b in zip(start.tolist(), cuts, strict=True)], batch_first=True)
    begin = start.shape[1] - 1
    written = torch.arange(ids.shape[1] - 1 - begin) < torch.tensor([[len(each)] for each in cuts])
    at_a_time = windows_at_a_time(readers, ids.shape[1])
    sums = torch.zeros(len(cuts), 3, dtype=torch.float64)
    for rows in torch.arange(len(cuts)).split(at_a_time):
        tokens, where = ids[rows].to(readers[0].model.device), written[rows]
        logits = []
        for reader in readers:
            of_rows = reader.predictions(tokens)
            logits.append(of_rows.view(len(rows), -1, of_rows.shape[1])[:, begin:][where.to(of_rows.device)])
        targets = tokens[:, begin + 1 :][where.to(tokens.device)]
        row, place = (each.to(tokens.device) for each in where.nonzero(as_tuple=True))
        front = torch.arange(tokens.shape[1], device=tokens.device) <= begin + place[:, None]  # of each position
        figures = []
        for part in kl.slices(len(targets), COPIES * logits[0].shape[1]):
            own = penalize(logits[0][part], tokens[row[part]], setting.repetition_penalty, front[part])
            figures.append(_figures(own, logits[-1][part], targets[part], setting))
        sums.index_add_(0, rows.repeat_interleave(where.sum(1)), torch.cat(figures).cpu())
    return sums


def _figures(own: Tensor, base: Tensor, targets: Tensor, setting: SamplingSetting) -> Tensor:
    """Return what `_read` sums up at each position: float64 [positions, 3]; own, base: logits [positions, vocab]."""
    drawn_from, plain = of_logits(own, setting), of_logits(base, SamplingSetting(setting.temperature)).log_probs
    log_q = dense(drawn_from, own.shape[1]).log_probs
    nll = -plain.gather(1, targets[:, None])[:, 0]
    return torch.stack([entropy(drawn_from.log_probs), nll, mean_log_ratio(log_q.exp(), log_q, plain)], 1)


BLEU_ORDER = 4
MATCHES_WHERE_NONE = 0.1

Tokens = Sequence[int]


def ngrams(tokens: Tokens, n: int) -> Counter[tuple[int, ...]]:
    """Return how often each n-gram comes."""
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def repetition(continuations: Sequence[Tokens], n: int) -> float:
    """Return the mean share of n-grams that repeat; 0 where no continuation has any."""
    shares = [1 - len(grams) / grams.total() for each in continuations if (grams := ngrams(each, n))]
    return sum(shares) / len(shares) if shares else 0.0


def distinct(continuations: Sequence[Tokens], n: int) -> float:
    """Return the share of different n-grams in all; 0 where there are none."""
    grams = sum((ngrams(each, n) for each in continuations), Counter[tuple[int, ...]]())
    return len(grams) / grams.total() if grams else 0.0


def self_bleu(continuations: Sequence[Tokens]) -> float:
    """Return the mean BLEU of each continuation against the others; 0 for fewer than two that have tokens."""
    texts = [each for each in continuations if len(each)]
    if len(texts) < 2:
        return 0.0
    counts = [[ngrams(each, n) for n in range(1, BLEU_ORDER + 1)] for each in texts]
    most = [_two_largest([row[n] for row in counts]) for n in range(BLEU_ORDER)]
    return sum(_bleu(i, texts, counts[i], most) for i in range(len(texts))) / len(texts)


Largest = dict[tuple[int, ...], tuple[int, int]]  # n-gram -> its two largest counts in a text


def _two_largest(counts: Sequence[Counter[tuple[int, ...]]]) -> Largest:
    """Return the two largest counts of each n-gram; the second is the largest elsewhere for the text with the first."""
    largest: Largest = {}
    for row in counts:
        for gram, count in row.items():
            first, second = largest.get(gram, (0, 0))
            largest[gram] = (count, first) if count > first else (first, max(second, count))
    return largest


def _bleu(own: int, texts: Sequence[Tokens], counts: Sequence[Counter[tuple[int, ...]]], most: list[Largest]) -> float:
    logs = []
    for n, grams in enumerate(counts):
        if not grams:
            continue
        matches = 0
        for gram, count in grams.items():
            first, second = most[n][gram]
            matches += min(count, second if count == first else first)
        logs.append(math.log((matches or MATCHES_WHERE_NONE) / grams.total()))
    length = len(texts[own])
    closest = min((abs(len(each) - length), len(each)) for i, each in enumerate(texts) if i != own)[1]
    brevity = min(0.0, 1 - closest / length)
    return math.exp(brevity + sum(logs) / len(logs))
