"""Let a compressed model and its base continue the same prompts with the same random numbers.

Every prompt is continued twice. In the first half of the rows a token is looked up in the cumulative distribution, in
the order of the ids, by a uniform number; in the second half Gumbel noise is added to the log-probabilities and the
largest wins. Both draw exactly from the filtered distribution. Each row has random numbers of its own, which depend on
the seed, the row's place and the step alone, so that both models, and every batch size, get the same.

What the models have written is then read by both: the reverse KL of a token is KL(model's filtered distribution ||
base's unfiltered one at the same temperature), in closed form at every position of the model's own text. Its sampled
estimate is the negative log-likelihood under the base minus the model's own entropy. With a filter the base's own text
has a reverse KL as well (what the filter cuts off), which is the floor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from compress.errors import NumericalError
from compress.evaluate import sampling_text as text
from compress.evaluate.sampling_distances import entropy, expected, joined
from compress.evaluate.sampling_filters import Kept, Setting, kept, ordered
from compress.model import load as lm
from compress.numerics import kl

REPEATED = (2, 3, 4)  # n of rep-n
DISTINCT = (1, 2, 3)  # n of distinct-n


@dataclass(frozen=True)
class Written:
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
    base: Written
    model: Written
    same_cdf: float  # tokens until the two models differ, mean, with uniform numbers
    same_gumbel: float  # the same with Gumbel noise

    def plain(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


class CoupledDraw(LogitsProcessor):
    """Draw tokens in one setting: the first half of the rows by uniform numbers, the second by Gumbel noise."""

    def __init__(self, name: str, setting: Setting, rows: int, seed: int) -> None:
        self.name, self.setting = name, setting
        self.generators = [_generator(seed, row) for row in range(rows)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [rows, seq] int64, [rows, vocab] float32
        if not torch.isfinite(scores).all():
            raise NumericalError(
                f"{self.name} has non-finite logits at token {input_ids.shape[1]}; its weights are damaged, or overflow"
            )
        found = kept(ordered(scores), self.setting)
        half = len(scores) // 2
        place = torch.cat([self._by_uniform(found, half), self._by_gumbel(found, half, scores.shape[1])])
        return torch.full_like(scores, -torch.inf).scatter_(1, found.ids.gather(1, place), 0.0)

    def _by_uniform(self, found: Kept, half: int) -> Tensor:
        cumulative = found.log_probs[:half].exp().cumsum(-1)
        uniform = torch.stack([torch.rand(1, dtype=torch.float64, generator=g) for g in self.generators[:half]])
        wanted = uniform.to(cumulative.device) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, wanted, right=True).clamp_(max=cumulative.shape[1] - 1)

    def _by_gumbel(self, found: Kept, half: int, vocab_size: int) -> Tensor:
        drawn = [torch.rand(vocab_size, dtype=torch.float64, generator=own) for own in self.generators[half:]]
        noise = -(-torch.stack(drawn).clamp_(min=torch.finfo(torch.float64).tiny).log()).log()
        return (found.log_probs[half:] + noise.to(found.ids.device).gather(1, found.ids[half:])).argmax(-1, True)


def _generator(seed: int, row: int) -> torch.Generator:
    """Return the random numbers of a row; both numbers go through a hash, so that rows of other seeds differ too."""
    digest = hashlib.sha256(f"{seed} {row}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def sampled(
    models: Sequence[PreTrainedModel],
    names: Sequence[str],
    prompts: Tensor,
    new_tokens: int,
    stop: Sequence[int],
    setting: Setting,
    seed: int,
) -> Sampled:
    """Continue prompts int64 [prompts, seq] by (model, base) in one setting, and compare what they write."""
    start = prompts.repeat(2, 1)
    texts = []
    for model, name in zip(models, names, strict=True):
        draw = CoupledDraw(name, setting, len(start), seed)
        texts.append(lm.write(model, start, new_tokens, cast(Any, draw), stop=stop)[:, start.shape[1] :])
    cuts = [[_cut(row, stop) for row in each.tolist()] for each in texts]
    written = [_described([models[i], models[1]], start, cuts[i], setting, frozenset(stop)) for i in range(2)]
    equal = [float(_common(a, b)) for a, b in zip(*cuts, strict=True)]
    half = len(prompts)
    return Sampled(
        temperature=setting.temperature,
        filters=setting.filters,
        base=written[1],
        model=written[0],
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


def _described(
    pair: Sequence[PreTrainedModel],
    start: Tensor,
    cuts: Sequence[Sequence[int]],
    setting: Setting,
    stop: frozenset[int],
) -> Written:
    """Return the figures of the continuations of pair[0], up to their end; start int64 [rows, seq], pair[1]: base."""
    lengths = [len(each) for each in cuts]
    each = torch.tensor(_read(pair, start, cuts, setting), dtype=torch.float64)
    totals = each.sum(0) / sum(lengths)
    count = len(lengths)
    ratio = each[:, 2] - totals[2] * torch.tensor(lengths, dtype=torch.float64)  # error of a ratio of sums
    error = float(ratio.std()) * math.sqrt(count) / sum(lengths) if count > 1 else None
    return Written(
        length=sum(lengths) / count,
        ended=sum(row[-1] in stop for row in cuts) / count,
        repetition={str(n): text.repetition(cuts, n) for n in REPEATED},
        distinct={str(n): text.distinct(cuts, n) for n in DISTINCT},
        self_bleu=text.self_bleu(cuts),
        entropy=float(totals[0]),
        base_nll=float(totals[1]),
        reverse_kl=float(totals[2]),
        reverse_kl_se=error,
    )


@torch.no_grad()
def _read(
    pair: Sequence[PreTrainedModel], start: Tensor, cuts: Sequence[Sequence[int]], setting: Setting
) -> list[tuple[float, float, float]]:
    """Return the sums over each continuation of own entropy, base's negative log-likelihood, and reverse KL."""
    plain = Setting(setting.temperature)
    begin = start.shape[1] - 1
    found = []
    for row, tokens in enumerate(cuts):
        ids = torch.cat([start[row], torch.tensor(tokens)])[None].to(pair[0].device)
        logits = [each(input_ids=ids, use_cache=False).logits[0, begin:-1] for each in pair]
        sums = [0.0, 0.0, 0.0]
        for part in kl.slices(len(tokens), 16 * logits[0].shape[1]):
            own = kept(ordered(logits[0][part]), setting)
            theirs = kept(ordered(logits[1][part]), plain)
            log_q, log_p, _ = joined(own, theirs)
            target = ids[0, begin + 1 :][part]
            sums[0] += float(entropy(own.log_probs).sum())
            sums[1] -= float(theirs.log_probs.gather(1, target[:, None]).sum())
            sums[2] += float(expected(log_q.exp(), log_q, log_p).sum())
        found.append((sums[0], sums[1], sums[2]))
    return found
