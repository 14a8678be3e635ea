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
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, PreTrainedModel

from compress.errors import NumericalError
from compress.evaluate import sampling_text as text
from compress.evaluate.sampling_distances import entropy, expected
from compress.evaluate.sampling_filters import Kept, Setting, dense, of_logits
from compress.evaluate.scores import next_logits, windows_at_a_time
from compress.model import writing
from compress.numerics import kl
from compress.progress import Progress, silent

REPEATED = (2, 3, 4)  # n of rep-n
DISTINCT = (1, 2, 3)  # n of distinct-n
WRITING_NBYTES = 1 << 30  # of the caches and logits of rows that are continued together, an upper bound
COPIES = 16  # float64 tensors [positions, vocabulary] that the figures of a position need at a time, about


class Named(NamedTuple):
    """A model with the name that errors give it."""

    name: str
    model: PreTrainedModel


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


class CoupledDraw(LogitsProcessor):
    """Draw tokens in each of some settings, whose rows follow each other: `rows` of each, all with the same numbers.

    The first half of the rows of a setting draw by uniform numbers, the second half by Gumbel noise.
    """

    def __init__(self, name: str, settings: Sequence[Setting], rows: int, seed: int) -> None:
        self.name, self.settings = name, settings
        self.generators = [_generator(seed, row) for row in range(rows)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [rows, seq] int64, [rows, vocab] float32
        if not torch.isfinite(scores).all():
            raise NumericalError(
                f"{self.name} has non-finite logits at token {input_ids.shape[1]}; its weights are damaged, or overflow"
            )
        uniform, noise = self._numbers(scores.shape[1], scores.device)
        parts = scores.split(len(self.generators))
        tokens = [_drawn(of_logits(*each), uniform, noise) for each in zip(parts, self.settings, strict=True)]
        return torch.full_like(scores, -torch.inf).scatter_(1, torch.cat(tokens), 0.0)

    def _numbers(self, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return uniform numbers [half, 1] and Gumbel noise [half, vocabulary] of the next step, float64."""
        half = len(self.generators) // 2
        uniform = torch.stack([torch.rand(1, dtype=torch.float64, generator=own) for own in self.generators[:half]])
        drawn = [torch.rand(vocab_size, dtype=torch.float64, generator=own) for own in self.generators[half:]]
        noise = -(-torch.stack(drawn).clamp_(min=torch.finfo(torch.float64).tiny).log()).log()
        return uniform.to(device), noise.to(device)


def _drawn(found: Kept, uniform: Tensor, noise: Tensor) -> Tensor:
    """Return a token for each row of a setting, int64 [rows, 1]."""
    half = len(uniform)
    cumulative = found.log_probs[:half].exp().cumsum(-1)
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_(max=cumulative.shape[1] - 1)
    noisy = found.log_probs[half:] + noise.gather(1, found.ids[half:])
    return found.ids.gather(1, torch.cat([place, noisy.argmax(-1, True)]))


def _generator(seed: int, row: int) -> torch.Generator:
    """Return the random numbers of a row; both numbers go through a hash, so that rows of other seeds differ too."""
    digest = hashlib.sha256(f"{seed} {row}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def sampled(
    models: Sequence[Named],
    prompts: Tensor,
    new_tokens: int,
    stop: Sequence[int],
    settings: Sequence[Setting],
    seed: int,
    progress: Progress = silent,
) -> list[Sampled]:
    """Continue prompts int64 [prompts, seq] by (model, base) in each setting, and compare what they write."""
    start, found = prompts.repeat(2, 1), []
    rows, seq = start.shape
    row_nbytes = max(writing.sequence_nbytes(each.model.config.get_text_config(), seq + new_tokens) for each in models)
    step = max(1, WRITING_NBYTES // (rows * row_nbytes))
    for begin in range(0, len(settings), step):
        progress("sampling", begin, len(settings))
        part = settings[begin : begin + step]
        texts = []
        for name, model in models:
            draw = CoupledDraw(name, part, rows, seed)
            written = writing.write(model, start.repeat(len(part), 1), new_tokens, cast(Any, draw), stop=stop)
            cuts = [_cut(row, stop) for row in written[:, seq:].tolist()]
            texts.append([cuts[i : i + rows] for i in range(0, len(cuts), rows)])
        found += [
            _compared(models, start, each, setting, frozenset(stop))
            for setting, *each in zip(part, *texts, strict=True)
        ]
    return found


def _compared(
    models: Sequence[Named],
    start: Tensor,
    cuts: Sequence[Sequence[Sequence[int]]],
    setting: Setting,
    stop: frozenset[int],
) -> Sampled:
    """Compare the continuations of (model, base), each up to its end; start int64 [rows, seq]."""
    base, model = (_described(models[i:], start, cuts[i], setting, stop) for i in (1, 0))
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


def _described(
    models: Sequence[Named],
    start: Tensor,
    cuts: Sequence[Sequence[int]],
    setting: Setting,
    stop: frozenset[int],
) -> Written:
    """Return the figures of the continuations of models[0]; models[-1] is the base."""
    lengths = torch.tensor([len(each) for each in cuts])
    each = _read(models, start, cuts, setting)
    count, tokens = len(cuts), int(lengths.sum())
    totals = each.sum(0) / tokens
    ratio = each[:, 2] - totals[2] * lengths  # error of a ratio of sums
    error = float(ratio.std()) * math.sqrt(count) / tokens if count > 1 else None
    return Written(
        length=tokens / count,
        ended=sum(row[-1] in stop for row in cuts) / count,
        repetition={str(n): text.repetition(cuts, n) for n in REPEATED},
        distinct={str(n): text.distinct(cuts, n) for n in DISTINCT},
        self_bleu=text.self_bleu(cuts),
        entropy=float(totals[0]),
        base_nll=float(totals[1]),
        reverse_kl=float(totals[2]),
        reverse_kl_se=error,
    )


def _read(
    models: Sequence[Named],
    start: Tensor,
    cuts: Sequence[Sequence[int]],
    setting: Setting,
) -> Tensor:
    """Return sums over each continuation of models[0]: float64 [rows, 3].

    They are the entropy of models[0], the negative log-likelihood of models[-1], and the reverse KL. Rows are padded on
    the right, where a causal model does not look.
    """
    ids = pad_sequence([torch.tensor([*a, *b]) for a, b in zip(start.tolist(), cuts, strict=True)], batch_first=True)
    begin = start.shape[1] - 1
    written = torch.arange(ids.shape[1] - 1 - begin) < torch.tensor([[len(each)] for each in cuts])
    at_a_time = windows_at_a_time([each.model for each in models], ids.shape[1])
    sums = torch.zeros(len(cuts), 3, dtype=torch.float64)
    for rows in torch.arange(len(cuts)).split(at_a_time):
        tokens, where = ids[rows].to(models[0].model.device), written[rows]
        logits = []
        for name, model in models:
            of_rows = next_logits(model, name, tokens)
            logits.append(of_rows.view(len(rows), -1, of_rows.shape[1])[:, begin:][where.to(of_rows.device)])
        targets = tokens[:, begin + 1 :][where.to(tokens.device)]
        parts = kl.slices(len(targets), COPIES * logits[0].shape[1])
        figures = [_figures(logits[0][part], logits[-1][part], targets[part], setting) for part in parts]
        sums.index_add_(0, rows.repeat_interleave(where.sum(1)), torch.cat(figures).cpu())
    return sums


def _figures(own: Tensor, base: Tensor, targets: Tensor, setting: Setting) -> Tensor:
    """Return what `_read` sums up at each position: float64 [positions, 3]; own, base: logits [positions, vocab]."""
    drawn_from, plain = of_logits(own, setting), of_logits(base, Setting(setting.temperature)).log_probs
    log_q = dense(drawn_from, own.shape[1]).log_probs
    nll = -plain.gather(1, targets[:, None])[:, 0]
    return torch.stack([entropy(drawn_from.log_probs), nll, expected(log_q.exp(), log_q, plain)], 1)
