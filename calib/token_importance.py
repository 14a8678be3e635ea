"""Weigh calibration tokens in the statistics of a block by their importance (RSQ, arXiv 2503.01820).

A token of weight r counts in the Hessian as r tokens would: H = sum r x x^T, one r for all linears of a block. Scores
come from the block before it is quantized, on what the quantized prefix hands it; within each sequence they are mapped
to weights from `minimum` (the lowest score) to 1 (the highest), and these divided by their mean. The paper's score is
`attention`, the attention that a token receives; the others are those that it compares with.

Differences from the paper: the probabilities of `attention` are summed while they are computed and never held together;
and where the weights are so unequal that fewer tokens than an eighth of a linear's inputs would be left to count, they
are evened out (see `weights`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress import ranks
from compress.errors import UnsupportedModelError
from compress.model.blockwise import BlockInputs, run_block

SCORES = 1 << 18  # attention scores computed at a time: 1 MiB, which stays in the cache
FIRST = 8  # `first_tokens` are one in so many: the first eighth of a sequence
INPUTS_PER_TOKEN = 8  # a linear may have no more inputs for each effective token
BISECTIONS = 40
LOG2_E = math.log2(math.e)

AUTO_SCORE = "auto"
Score = Callable[[nn.Module, str, BlockInputs, Tensor], Tensor]


def weights(
    name: str,
    block: nn.Module,
    where: str,
    batches: BlockInputs,
    tokens: Tensor,
    minimum: float,
    skip_first: bool = False,
) -> tuple[Tensor | None, str | None]:
    """Return token weights [samples, seq_len] float32 on the CPU, mean 1 over each sequence; and a note or None.

    name: a key of SCORES_OF, or AUTO: attention, and no weights where a block's attention cannot be seen; block: loaded
    and not quantized, called `where` in messages; tokens: int64 [samples, seq_len], what the batches were made of;
    minimum: the weight of the least important token before the division, above 0 and at most 1; skip_first: the first
    token, which often receives most of the attention, does not set the maximum.

    `minimum` is raised until the effective number of tokens, (sum r)^2 / sum r^2, is an eighth of the inputs of the
    block's widest linear. Raises UnsupportedModelError where a block's attention cannot be seen.
    """
    try:
        scores = SCORES_OF["attention" if name == AUTO_SCORE else name](block, where, batches, tokens)
        if len(scores) < len(tokens):  # the batches are those of this process
            scores = torch.cat(ranks.current().gather(scores))
    except UnsupportedModelError as error:
        if name != AUTO_SCORE:
            raise
        return None, f"its tokens count alike: {str(error).removesuffix(f'; {_OTHERWISE}')}"
    return of_scores(scores, block, minimum, skip_first)


def of_scores(scores: Tensor, block: nn.Module, minimum: float, skip_first: bool = False) -> tuple[Tensor, str | None]:
    """Return what `weights` does, given the scores [samples, seq_len] of all samples.

    A sequence has the same weights among others as alone, unless there is a note.
    """
    relative = _relative(scores.double(), skip_first)
    columns = max((m.in_features for m in block.modules() if isinstance(m, nn.Linear)), default=0)
    effective_tokens, needed = effective(_map_to_minimum(relative, minimum)), columns / INPUTS_PER_TOKEN
    if effective_tokens >= needed:
        return _map_to_minimum(relative, minimum).float(), None
    raised = _raise_minimum(relative, minimum, needed)
    return _map_to_minimum(relative, raised).float(), (
        f"by their importance only {effective_tokens:.0f} tokens would count for {columns} inputs: importance_min "
        f"raised from {minimum:g} to {raised:.2g}"
    )


def of_batch(scores: Tensor, minimum: float) -> Tensor:
    """Return the weights [samples, seq_len] float32 of some samples with these scores, not evened out."""
    return _map_to_minimum(_relative(scores.double(), skip_first=False), minimum).float()


def effective(weights: Tensor) -> float:
    """Return the number of tokens of equal weight that are as much evidence."""
    return (weights.sum().square() / weights.square().sum()).item()


def _relative(scores: Tensor, skip_first: bool) -> Tensor:
    """Map scores [samples, seq_len] to 0 at a sequence's lowest and 1 at its highest; 1 where all are the same."""
    low = scores.amin(1, keepdim=True)
    high = scores[:, int(skip_first and scores.shape[1] > 1) :].amax(1, keepdim=True)
    return torch.where(high > low, (scores - low) / (high - low), 1.0).clamp(max=1)


def _map_to_minimum(relative: Tensor, minimum: float) -> Tensor:
    raw = minimum + (1 - minimum) * relative
    return raw / raw.mean(1, keepdim=True)


def _raise_minimum(relative: Tensor, minimum: float, needed: float) -> float:
    """Return the lowest minimum with `needed` effective tokens, which grow with it; 1 if there are not so many."""
    low, high = minimum, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if effective(_map_to_minimum(relative, middle)) < needed:
            low = middle
        else:
            high = middle
    return high


# ---------------------------------------------------------------- scores, [samples, seq_len] on the CPU


def attention(block: nn.Module, where: str, batches: BlockInputs, tokens: Tensor) -> Tensor:
    """Score by the attention a token receives: probabilities summed over heads and tokens that look at it.

    The first batch goes through the whole block, the others as far as its last attention.
    """
    scores, count = list[Tensor](), 0
    for hidden, call in batches():
        with watched(block, where, count) as masses, suppress(_Seen):
            run_block(block, call, hidden, where)
        count = len(masses)
        scores.append(received_in_all(masses, where, hidden.shape[:2]))
    return torch.cat(scores)


def received_in_all(masses: list[Tensor], where: str, shape: Sequence[int]) -> Tensor:
    """Return the sum [samples, tokens], of this shape, of what tokens receive in the attentions of a block.

    Raises UnsupportedModelError where there is none, or one that is not between these tokens.
    """
    if not masses:
        raise UnsupportedModelError(
            f"no attention of {where} goes through transformers' attention interface; {_OTHERWISE}"
        )
    if any(part.shape != tuple(shape) for part in masses):
        raise UnsupportedModelError(f"the attention of {where} is not between the tokens it is given; {_OTHERWISE}")
    return torch.stack(masses).sum(0).cpu()


def first_tokens(block: nn.Module, where: str, batches: BlockInputs, tokens: Tensor) -> Tensor:
    """Score 1 for the first eighth of a sequence, 0 for the others."""
    return (torch.arange(tokens.shape[1]) * FIRST < tokens.shape[1]).float().expand(tokens.shape)


def activation_norm(block: nn.Module, where: str, batches: BlockInputs, tokens: Tensor) -> Tensor:
    """Score by the norm of a token where it enters the block."""
    return torch.cat([hidden.float().norm(dim=-1).cpu() for hidden, _ in batches()])


def input_output_difference(block: nn.Module, where: str, batches: BlockInputs, tokens: Tensor) -> Tensor:
    """Score by how little the block changes a token: the norm of the difference, negated."""
    scores = []
    for hidden, call in batches():
        out = run_block(block, call, hidden, where)
        scores.append(-(out.float() - hidden.float()).norm(dim=-1).cpu())
    return torch.cat(scores)


def token_rarity(block: nn.Module, where: str, batches: BlockInputs, tokens: Tensor) -> Tensor:
    """Score by how seldom a token occurs in the calibration text: the count, negated."""
    return -tokens.flatten().bincount()[tokens].float()


def token_similarity(block: nn.Module, where: str, batches: BlockInputs, tokens: Tensor) -> Tensor:
    """Score by how unlike its sequence a token is where it enters the block: the mean squared distance to the others.

    But for a constant this is the squared distance to their mean.
    """
    centred = (hidden.float() - hidden.float().mean(1, keepdim=True) for hidden, _ in batches())
    return torch.cat([x.square().sum(-1).cpu() for x in centred])


SCORES_OF: dict[str, Score] = {
    score.__name__: score
    for score in (attention, first_tokens, activation_norm, input_output_difference, token_rarity, token_similarity)
}
_OTHERWISE = f"set calibration.importance to auto, none or one of {', '.join(list(SCORES_OF)[1:])}"


# ---------------------------------------------------------------- attention


@dataclass(frozen=True)
class Probabilities:
    """Settings by which an attention turns queries and keys into probabilities (transformers' attention interface)."""

    scaling: float
    causal: bool = True  # where there is no mask, and so is `window`
    window: int | None = None  # tokens that a query sees, itself included
    mask: Tensor | None = None  # [batch or 1, heads or 1, queries, keys]: bool, what a query sees, or to be added
    bias: Tensor | None = None  # to be added likewise
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [heads]: score for attending to nothing

    @property
    def is_plain(self) -> bool:
        """Whether a token attends to itself and all before it, by nothing but scaled products."""
        rest = (self.window, self.mask, self.bias, self.softcap, self.sinks)
        return self.causal and all(setting is None for setting in rest)

    def received(
        self, query: Tensor, key: Tensor, value: Tensor | None, sample: int, start: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the probabilities of the first keys [key_value_heads, keys, head_dim] of a sample, summed: [keys].

        They are summed over query [heads, rows, head_dim], float32: the sample's queries from row `start`; head h reads
        key head h // (heads / key_value_heads). Beside it the values [key_value_heads, keys, value_dim] weighed by
        them: [heads, rows, value_dim].
        """
        heads, rows, width = query.shape
        grouped = query.reshape(key.shape[0], -1, width)  # [key_value_heads, heads / key_value_heads * rows, head_dim]
        unit = LOG2_E if self.is_plain else 1.0  # there scores are the logarithms to base 2 from the start
        scores = ((grouped * (unit * self.scaling)) @ key.transpose(1, 2)).view(heads, rows, -1)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + _part(self.bias, sample, start, scores)
        scores = self._masked(scores, sample, start)
        top, sinks = scores.amax(-1), None if self.sinks is None else self.sinks.float().view(-1, 1)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        powers = scores.sub_(top[..., None])
        powers = (powers if self.is_plain else powers.mul_(LOG2_E)).exp2_()  # `exp` is slow where it underflows
        total = powers.sum(-1)
        if sinks is not None:
            total += (sinks - top).exp_()
        inverse = total.reciprocal_()
        sums, out = inverse.flatten() @ powers.flatten(0, 1), None
        if value is not None:
            out = (powers.view(key.shape[0], -1, powers.shape[-1]) @ value).view(heads, rows, -1)
            out *= inverse[..., None]
        return sums, out

    def _masked(self, scores: Tensor, sample: int, start: int) -> Tensor:
        never, (_, rows, columns) = torch.finfo(torch.float32).min, scores.shape
        if self.mask is not None:
            mask = _part(self.mask, sample, start, scores)
            return scores.masked_fill_(~mask, never) if mask.dtype == torch.bool else scores + mask
        if self.causal:
            later = torch.ones(rows, columns, dtype=torch.bool, device=scores.device)
            scores[..., start:].masked_fill_(later[:, start:].triu(1), never)
            if self.window is not None:
                scores.masked_fill_(later.tril(start - self.window), never)
        return scores


def _part(full: Tensor, sample: int, start: int, scores: Tensor) -> Tensor:
    """Return the part of [batch or 1, heads or 1, queries, keys] for these scores [heads, rows, keys]."""
    return full[sample % full.shape[0], :, start : start + scores.shape[1], : scores.shape[2]]


def mass(query: Tensor, key: Tensor, how: Probabilities) -> Tensor:
    """Sum attention probabilities over heads and queries: [batch, keys] float32.

    query [batch, heads, tokens, head_dim], key [batch, key_value_heads, tokens, head_dim]. Sequence by sequence,
    whatever the batch, and in chunks of query rows.
    """
    return attended(query, key, None, how)[0]


def attended(query: Tensor, key: Tensor, value: Tensor | None, how: Probabilities) -> tuple[Tensor, Tensor | None]:
    """Return what `mass` does, and what the attention gives: [batch, tokens, heads, value_dim], of the query's type.

    value [batch, key_value_heads, tokens, value_dim]; None: nothing but the sums.
    """
    batch, heads, rows, _ = query.shape
    total = torch.zeros(batch, key.shape[2], dtype=torch.float32, device=query.device)
    out = None if value is None else query.new_empty(batch, rows, heads, value.shape[-1])
    chunk = max(1, SCORES // (heads * key.shape[2]))
    for sample in range(batch):
        q, k = query[sample].float(), key[sample].float()
        v = None if value is None else value[sample].float()
        for start in range(0, rows, chunk):
            end = min(start + chunk, rows)
            seen = end if how.causal and how.mask is None else k.shape[1]
            part = None if v is None else v[:, :seen]
            sums, given = how.received(q[:, start:end], k[:, :seen], part, sample, start)
            total[sample, :seen] += sums
            if out is not None and given is not None:
                out[sample, start:end] = given.transpose(0, 1)
    return total, out


class _Seen(Exception):
    """Ends a block whose attention has been seen."""


def _stop(masses: list[Tensor]) -> None:
    raise _Seen


@contextmanager
def watched(
    block: nn.Module,
    where: str,
    count: int = 0,
    act: Callable[[list[Tensor]], None] = _stop,
    is_shared: bool = False,
) -> Iterator[list[Tensor]]:
    """While active, add the `mass` of each call of the block's attention to the list.

    The call goes on as ever. Before that, the last of `count` calls `act` with the list; by default it ends the block.
    is_shared: on CPUs, the probabilities of a plain attention by torch's function serve for its output, too.
    The function is replaced that transformers' table has under the name in the model's configuration. A name of our
    own there would not do: some models mask the keys themselves for the names they know, and for others do not.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own, masses = set(block.modules()), []
    names = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in own} - {None}
    former = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in names}

    def replacing(function: Callable[..., Any] | None) -> Callable[..., Any]:
        def attend(  # as the interface has it; `others` differ between models and are handed on
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **others: Any
        ) -> Any:
            if module in own:
                how, out = _probabilities(module, where, query, attention_mask, others), None
                if is_shared and function is sdpa_attention_forward and _computes_plainly(how, query, key, others):
                    received, out = attended(query, key, value, how)
                else:
                    received = mass(query, key, how)
                masses.append(received)
                if len(masses) == count:
                    act(masses)
                if out is not None:
                    return out, None
            return (function or _plain(module, where))(module, query, key, value, attention_mask, **others)

        return attend

    try:
        for name, function in former.items():
            ALL_ATTENTION_FUNCTIONS[name] = replacing(function)
        yield masses
    finally:
        for name, function in former.items():
            del ALL_ATTENTION_FUNCTIONS[name]  # which lays bare what lies below in the table
            if function is not None and ALL_ATTENTION_FUNCTIONS.get(name) is not function:
                ALL_ATTENTION_FUNCTIONS[name] = function


def _computes_plainly(how: Probabilities, query: Tensor, key: Tensor, others: Mapping[str, Any]) -> bool:
    """Return whether `attended` gives what torch's attention does, on a CPU."""
    as_usual = not others.get("dropout") and others.get("cache") is None
    return how.is_plain and as_usual and query.device.type == "cpu" and query.shape[2] == key.shape[2]


def _probabilities(module: nn.Module, where: str, query: Tensor, mask: Any, others: Mapping[str, Any]) -> Probabilities:
    """Read the settings from the arguments of an attention function."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        raise UnsupportedModelError(f"the attention mask of {where} is not a tensor of 4 dimensions; {_OTHERWISE}")
    scaling, causal = others.get("scaling"), others.get("is_causal")
    return Probabilities(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=getattr(module, "is_causal", True) if causal is None else causal,
        window=others.get("sliding_window"),
        mask=mask,
        bias=others.get("position_bias"),
        softcap=others.get("softcap"),
        sinks=others.get("s_aux"),
    )


def _plain(module: nn.Module, where: str) -> Callable[..., Any]:
    """Return a model's own plain attention, which is of the same name in the files of all models."""
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise UnsupportedModelError(f"the plain attention function of {where} is not found; {_OTHERWISE}")
    return function
