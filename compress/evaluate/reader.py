"""Let a model read text, through a compressed cache or without one: what scores, tasks and speed read through.

A `Candidate` is a cache to be measured, a `Reader` a model with the cache that it reads through. Text goes in in one of
three ways: whole windows without a cache (`predictions`), chunk by chunk with what the cache has stored as past
(`through`), and a context in one pass, as `generate` reads a prompt, with what follows behind it (`behind`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress.errors import NumericalError, RecipeError
from compress.kv import fused, generation, hooks, paging
from compress.kv.cache import make_cache
from compress.kv.fused import CacheReads
from compress.kv.hooks import drops_cache
from compress.kv.layer import CachePath, KVCache
from compress.kv.settings import EXACT, CacheSettings, Coding, Codings, exact
from compress.model import load as lm
from compress.numerics import kl
from compress.recipe.schema import Bos
from compress.runtime.linears import sparse_for

LOGITS_TO_KEEP = "logits_to_keep"  # the argument of forward passes that says of how many last tokens logits are wanted

Say = Callable[[int], None]  # is told how many windows more are done


@dataclass(frozen=True)
class Execution:
    """Settings of how models run. `bos` is part of the figures, which change with the others by rounding only."""

    dtype: str = "float32"  # float32, float16, bfloat16, or auto: as stored
    device: str = "cpu"
    batch: int | None = None  # windows; None: as many as BATCH_NBYTES and BATCH_TOKENS of scores.py allow
    bos: Bos = "auto"  # what each window and each question begins with (calib/prefix.py)

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch {self.batch} is not positive")


@dataclass(frozen=True)
class Candidate:
    """A cache to be measured."""

    name: str
    settings: CacheSettings
    static: Mapping[str, Tensor]
    path: CachePath = "decode"
    extra: int = 0  # tokens that stay exact beyond the recipe's residual_length
    only: str | None = None  # "keys" or "values": the other kind stays exact

    def cache(self, config: Any) -> KVCache:
        """Return a fresh cache for a model of this configuration."""
        cache = self.as_generated(config)
        cache.codings = tuple(
            {k: self._with_more_exact(k, coding) for k, coding in layer.items()} for layer in cache.codings
        )
        cache.exact_prefill = self.settings.exact_prefill or not paging.are_alone(cache.codings)
        return cache

    def is_alone(self, config: Any) -> bool:
        """Return whether every token is read through its own codes from the start, so that text may come in chunks."""
        return not self.cache(config).exact_prefill

    def as_generated(self, config: Any) -> KVCache:
        """Return a fresh cache as `generate` makes it: a prompt is read as its settings say."""
        return make_cache(config, self.settings, self.static, self.path)

    def codings(self, config: Any) -> Codings:
        """Return the codings of a model's layers."""
        return self.cache(config).codings

    def _with_more_exact(self, kind: str, coding: Coding) -> Coding:
        """Return the coding of keys or values with `extra` and `only`."""
        if coding.method == EXACT:
            return coding
        if self.only not in (None, kind):
            return exact(coding.policy.sink)
        policy = replace(coding.policy, residual_length=coding.policy.residual_length + self.extra)
        return replace(coding, policy=policy)


@dataclass(frozen=True, eq=False)
class Reader:
    """A model, and the compressed cache that it reads text through, if any."""

    model: Any
    cache: Candidate | None = None
    name: str = ""  # what errors call the model

    def new_cache(self) -> Any:
        """Return an empty cache; without a candidate that of transformers, which is exact."""
        config = self.model.config
        return DynamicCache(config=config) if self.cache is None else self.cache.cache(config)

    def attach_cache(self) -> None:
        """Let `generate` of the model use the cache; without a candidate the exact one."""
        if self.cache is None:
            generation.detach(self.model)
        else:
            generation.attach(self.model, self.cache.settings, self.cache.static)

    @torch.no_grad()
    def predictions(self, tokens: Tensor) -> Tensor:
        """Return the logits that predict tokens[:, 1:], [batch * (seq_len - 1), vocab_size], read without a cache.

        Linears with activation sparsity leave inputs of all tokens unread, as they do where tokens come one at a time.
        Raises NumericalError for logits that are not finite.
        """
        with sparse_for(self.model, "all"):
            logits = self.model(input_ids=tokens.to(self.model.device), use_cache=False).logits[:, :-1].flatten(0, 1)
        if not all(torch.isfinite(part).all() for part in logits.split(kl.rows_at_a_time(logits.shape[1]))):
            raise NumericalError(
                f"{self.name} gives non-finite logits in {logits.dtype}; its weights are damaged, or overflow"
            )
        return logits

    @torch.no_grad()
    def through(self, tokens: Tensor, chunks: Sequence[tuple[int, int]], cache: Any = None) -> Iterator[Tensor]:
        """Yield the logits [B, n, vocab] of each chunk of tokens [B, seq_len], read through a cache, or a new one."""
        cache = self.new_cache() if cache is None else cache
        for start, stop in chunks:
            logits = read_on(self.model, tokens[:, :stop], start, cache)
            missing = stop - start - logits.shape[1]  # of a prompt that lost tokens on its way, which is not scored
            yield torch.cat((logits[:, :1].expand(-1, missing, -1), logits), 1) if missing else logits

    def behind(self, tokens: Tensor, first: int) -> Tensor:
        """Return the logits [B, seq_len - first, vocab] of tokens [B, seq_len] from `first` on.

        Through a cache the context, tokens[:, :first], goes in one pass, as in `generate`; the rest is read together
        behind what was stored: padding and later tokens make no earlier ones coded.
        """
        tokens = tokens.to(self.model.device)
        if self.cache is not None:
            cache: Any = self.cache.as_generated(self.model.config)
            if first:
                fill(self.model, tokens[:, :first], cache)
            cache.exact_prefill = True
            return read_on(self.model, tokens, first, cache)
        with sparse_for(self.model, "all"):
            if LOGITS_TO_KEEP in inspect.signature(self.model.forward).parameters:
                wanted = {LOGITS_TO_KEEP: tokens.shape[1] - first}
                return self.model(input_ids=tokens, use_cache=False, **wanted).logits
            return self.model(input_ids=tokens, use_cache=False).logits[:, first:]


def fill(model: Any, text: Tensor, cache: Any, start: int = 0) -> Tensor:
    """Feed text int64 [B, n] from token `start` on to a model for what it leaves in a cache.

    Returns the last logits [B, 1, vocab]: those of all tokens take gigabytes at 8,192 tokens.
    """
    wanted = {LOGITS_TO_KEEP: 1} if LOGITS_TO_KEEP in inspect.signature(model.forward).parameters else {}
    tokens = text[:, _first_token(model, text, start, cache) :]
    return model(input_ids=tokens, past_key_values=cache, use_cache=True, **wanted).logits[:, -1:]


def read_on(model: Any, text: Tensor, start: int, cache: Any) -> Tensor:
    """Feed text int64 [B, n] from token `start` on through a cache; return the logits of these tokens."""
    tokens = text[:, _first_token(model, text, start, cache) :]
    logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
    return logits[:, max(0, logits.shape[1] - (text.shape[1] - start)) :]


def _first_token(model: Any, text: Tensor, start: int, cache: Any) -> int:
    """Return `start`; 0 with the cache emptied where `generate` reads the whole text anew at this length."""
    if not drops_cache(model, text, start, cache):
        return start
    cache.reset()
    return 0


def load_model(directory: Path, execution: Execution) -> PreTrainedModel:
    """Load a model and add the hooks that caches need."""
    model = lm.load_model(directory, execution.dtype, execution.device)
    hooks.attach(model)
    if generation.can_read_codes(model):
        generation.switch(model)
    return model


@torch.no_grad()
def readable(model: Any, candidate: Candidate) -> Candidate:
    """Return the candidate, fused if its codecs are read in no other way; RecipeError if they do not fit the model."""
    for path in get_args(CachePath):
        tried = replace(candidate, path=path)
        try:
            _read_a_token(model, tried)
            return tried
        except RecipeError:
            if path == "fused":
                raise
    raise AssertionError


@dataclass(frozen=True)
class Readings:
    """How one cache is read."""

    scored: CacheReads  # in chunks of text, where it is scored
    generated: CacheReads  # token by token, in `generate`

    @property
    def text(self) -> str:
        """Return this in words."""
        if self.scored == self.generated:
            return f"scored and used by generate: {self.scored.text}"
        return f"scored: {self.scored.text}; used by generate: {self.generated.text}"

    def plain(self) -> dict[str, Any]:
        """Return this as JSON values."""
        return asdict(self)


@torch.no_grad()
def readings(model: Any, candidate: Candidate) -> Readings:
    """Return how a candidate is read, seen from a token that goes through the model; it has the hooks of caches."""
    scored = fused.reads_of_cache(_read_a_token(model, candidate), model.device)
    if candidate.path == "fused" or not generation.can_read_codes(model):
        return Readings(scored, scored)
    try:
        generated = _read_a_token(model, replace(candidate, path="fused"))
        return Readings(scored, fused.reads_of_cache(generated, model.device))
    except (RecipeError, AttributeError, TypeError):  # as `generate` finds out
        return Readings(scored, scored)


def _read_a_token(model: Any, candidate: Candidate) -> KVCache:
    """Return a cache that one token has gone through."""
    cache = candidate.cache(model.config)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return cache
