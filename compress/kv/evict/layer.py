"""Forget tokens of one layer: after the prompt, and every so many tokens while decoding where `decode` is set.

The prompt is the first forward pass. Its tokens attend to each other exactly; then those that stay are stored, and the
codecs see no others. Attention of later passes reads the stored tokens and its own: transformers makes one mask for all
layers, of the length of the first one, so each layer gets a mask of its own here (`mask`), in the place of that one.

Left padding: pads are never scored and never stay, but where a row of the batch has fewer tokens to keep than another.
Such columns stand at its left and are masked, so that a row keeps what it would keep alone.

Queries come from fused attention, or from queries.py. compress/kv/hooks.py tells of the module and of the rotary rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress import plugins
from compress.errors import CompressError, RecipeError
from compress.kv.codec import Spec, unrotate
from compress.kv.evict import select
from compress.kv.evict.head_stores import HeadStores
from compress.kv.evict.judging import (
    QueryMoments,
    coming_rows,
    linear_matrix,
    output_norms,
    output_projection,
    turn_moments,
)
from compress.kv.evict.placing import KeptRope, KeptTokens, align_rows, by_head
from compress.kv.evict.settings import Eviction, refusal
from compress.kv.layer import Call, CodedLayer, KVCache, MakeLayer, build
from compress.kv.settings import KINDS, CacheSettings
from compress.kv.token_store import Bytes, Store

UNSEEN = (
    "kv_cache.evict: a forward pass went by unseen; call compress.kv.hooks.attach(model) before it, and give the cache "
    "by name to the whole model, past_key_values=..."
)


Prompt = tuple[tuple[Tensor, Tensor], list["Judged"], Tensor | None]  # keys and values, judged rows, queries


@dataclass
class Judged:
    """The scores of one sequence, where it begins, and how uneven its attention is."""

    scores: Tensor  # float32 [h, n]
    norms: Tensor | None  # float32 [h, n], of CriticalKV
    first: int  # column
    variance: float


class EvictingLayer(CodedLayer):
    """A `CodedLayer` that stores fewer tokens than it has seen."""

    is_told_of_passes = True
    can_be_saved = False

    def __init__(self, index: int, cache: KVCache, eviction: Eviction, is_exempt: bool) -> None:
        super().__init__(index, cache)
        self.eviction, self.is_exempt = eviction, is_exempt  # exempt: it keeps all tokens
        self.plugin = plugins.load("evict", eviction.method)
        self.sink = cache.codings[index]["keys"].policy.sink
        self._begin()

    @classmethod
    def of_cache(cls, config: Any, settings: CacheSettings, types: Collection[str]) -> MakeLayer:
        """Return what makes layers that evict; those to be skipped keep all tokens."""
        eviction = settings.evict
        assert eviction is not None, "it chose this class of layers"
        if getattr(config, "num_kv_shared_layers", 0):
            raise RecipeError("kv_cache.evict: layers of this model share keys and values; remove evict")
        skipped = {index % config.num_hidden_layers for index in settings.skip_layers}
        count = len(eviction.budget.keep_by_layer)
        if count not in (0, config.num_hidden_layers):
            raise RecipeError(
                f"kv_cache.evict: keep_by_layer has {count} numbers, the model {config.num_hidden_layers} layers; give "
                "one for each"
            )
        return lambda index, cache: cls(index, cache, eviction, index in skipped or eviction.exempts(index))

    def _begin(self) -> None:
        """Forget everything about the sequences."""
        self.call: Call | None = None
        self.pads: Tensor | None = None  # int64 [B, h or 1]: first columns of each store without a token; None: evicts
        self.rope = KeptRope(self.cache.rope)
        self.moments = QueryMoments()
        self.window: Tensor | None = None  # [B, H, <= window, width]: newest queries, for evictions while decoding
        self.waiting: Prompt | None = None  # until all layers are known
        self.newest = 0  # tokens at the end between which none was evicted
        self.since = 0  # tokens since the last eviction

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self.stores:
            return
        for kind, states in zip(KINDS, (key_states, value_states), strict=True):
            self.stores[kind] = self._store_of(kind, states)  # type: ignore[assignment]
        self.is_initialized = True

    def _store_of(self, kind: str, states: Tensor) -> Store | HeadStores:
        coding, codec = self.cache.codings[self.index][kind], self.cache.codec(self.index, kind, states)
        reason = None if self.is_exempt else refusal(self.eviction, coding, kind, codec.rope == "pre")
        if reason is not None:
            raise RecipeError(f"{codec.spec.where}: {reason}")
        if self.is_exempt or self.eviction.budget.heads != "ada":
            return Store(codec, coding.policy, self.rope)  # type: ignore[arg-type]
        spec = codec.spec
        alone = Spec(spec.kind, spec.layer, spec.layers, 1, spec.width, spec.queries, spec.dtype)
        return HeadStores(build(coding, alone, {}), coding.policy, spec.heads)

    def before(self, call: Call, mask: Any, tokens: int) -> Any:
        """Take note of the forward pass of an attention module; return the mask for so many new tokens."""
        self.call = call
        self._settle()
        if not self.seen or (self.pads is None and (mask is None or mask.shape[-1] == self.stored_tokens + tokens)):
            return mask
        starts = self._starts()
        return join_mask(mask, starts, self.stored_tokens, tokens, self.cache.queries)

    def _starts(self) -> Tensor:
        """Return how many first columns hold no token, int64 [B, h or 1]."""
        keys = self.stores["keys"]
        pads = self._store_pads()
        if pads is None:
            pads = torch.zeros(1, 1, dtype=torch.long)
        if isinstance(keys, HeadStores):
            pads = pads + torch.tensor([len(keys) - len(store) for store in keys.heads], device=pads.device)
        return pads

    def commit(self, queries: Tensor | None = None) -> None:
        if self._pending is not None and queries is None and self._needs_queries(self._pending[0].shape[2]):
            raise CompressError(UNSEEN)
        super().commit(queries)

    def _needs_queries(self, count: int) -> bool:
        """Return whether the queries of a pass of `count` tokens, which `seen` includes, are needed."""
        budget = self.eviction.budget
        needed = bool(self.plugin.NEEDS) or budget.critical or budget.layers == "variance"
        return not self.is_exempt and needed and (self.seen == count or budget.decode)

    def _store(self, new: tuple[Tensor, Tensor], queries: Tensor | None = None) -> None:
        count = new[0].shape[2]
        if queries is None and self._needs_queries(count):
            self._pending = new  # until attention has shown them
            return
        if queries is not None and self._needs_queries(count):
            self._watch(queries)
        if self.seen != count or self.is_exempt:
            self._append(new, queries)
            self.newest, self.since = self.newest + count, self.since + count
            if self.eviction.budget.decode and not self.is_exempt and self.since >= self.eviction.budget.interval:
                self._evict_stored()
        else:
            self.newest, self.since = count, 0
            self._evict_prompt(new, queries)
            if not self.eviction.budget.decode:
                self.moments = QueryMoments()  # it is needed for the prompt alone
        self.call = None

    def _append(self, new: tuple[Tensor, Tensor], queries: Tensor | None) -> None:
        pads = self._store_pads()
        for kind, x in zip(KINDS, new, strict=True):
            store = self.stores[kind]
            store_pads = pads[:, 0] if pads is not None and isinstance(store, Store) else pads
            store.append(x, store_pads, queries)

    def _store_pads(self) -> Tensor | None:
        """Return how many first columns of each store hold no token, int64 [B, h or 1]; None: they all do."""
        if self.pads is not None:
            return self.pads
        return None if self.cache.pads is None else self.cache.pads[:, None]

    def _watch(self, queries: Tensor) -> None:
        """Take note of queries [B, H, n, width] of the newest tokens."""
        count, plugin = queries.shape[2], self.plugin
        if queries.shape[3] != self.stores["keys"].codec.spec.width:
            raise CompressError("kv_cache.evict: what this model caches is not what its attention reads; remove evict")
        if "moments" in plugin.NEEDS:
            plain = queries
            if self.call is not None and self.call.turns is not None:
                plain = unrotate(queries, *self.call.turns)
            column = torch.arange(self.seen - count, self.seen, device=queries.device)
            self.moments.add(plain, column >= self._firsts(queries.shape[0], queries.device)[:, None] + self.sink)
        if self.eviction.budget.decode and "queries" in plugin.NEEDS:
            both = queries if self.window is None else torch.cat((self.window, queries), 2)
            self.window = both[:, :, -plugin.keeps(self.eviction.config, 0) :].clone()

    def _firsts(self, batch: int, device: torch.device) -> Tensor:
        """Return the first column that is no pad, int64 [B]."""
        pads = self.cache.pads
        return torch.zeros(batch, dtype=torch.long, device=device) if pads is None else pads.to(device)

    def _evict_prompt(self, new: tuple[Tensor, Tensor], queries: Tensor | None) -> None:
        keys, values = new
        if self.call is None:
            raise CompressError(UNSEEN)
        firsts = self._firsts(len(keys), keys.device).tolist()
        judged = [
            self._judge(row, first, keys[row, :, first:], values[row, :, first:], queries)
            for row, first in enumerate(firsts)
        ]
        if self.eviction.budget.layers != "variance":
            self._keep(new, judged, queries)
            return
        self.waiting = new, judged, queries
        others = self._layers()
        if all(layer.waiting is not None for layer in others):
            self._settle()

    def _settle(self) -> None:
        """Evict what layers hold that wait for each other's attention."""
        if self.waiting is None:
            return
        layers = {layer: layer.waiting for layer in self._layers() if layer.waiting is not None}
        variances = {layer.index: [row.variance for row in judged] for layer, (_, judged, _) in layers.items()}
        for layer, waiting in layers.items():
            layer.waiting = None
            layer._keep(*waiting, variances)

    def _layers(self) -> list[EvictingLayer]:
        """Return the layers of the cache that evict."""
        return [x for x in self.cache.layers if isinstance(x, EvictingLayer) and not x.is_exempt]

    @torch.no_grad()
    def _judge(self, row: int, first: int, keys: Tensor, values: Tensor, queries: Tensor | None) -> Judged:
        """Score the tokens [h, n, width] of one sequence, whose first column is `first`."""
        module = None if self.call is None else self.call.module
        scaling = getattr(module, "scaling", None) or keys.shape[-1] ** -0.5
        newest = None if queries is None else queries[row, :, max(0, queries.shape[2] - keys.shape[1]) :]
        moments = None
        if "moments" in self.plugin.NEEDS:
            moments = self.moments.of(row)
            if self.call is not None and self.call.turns is not None:
                rows = coming_rows(self.call, row, self.eviction.config.positions)
                moments = turn_moments(moments, *rows)
        seen = select.Seen(keys, values, newest, scaling, self.sink, moments)
        norms = None
        if self.eviction.budget.critical:
            assert module is not None, "hooks are attached: commit has checked"
            weight = linear_matrix(output_projection(module), self.cache.queries * values.shape[-1], values)
            norms = output_norms(values, weight)
        uneven = select.attention_variance(seen.mass) if self.eviction.budget.layers == "variance" else 0.0
        return Judged(self.plugin.score(self.eviction.config, seen), norms, first, uneven)

    def _survivors(self, judged: Judged, tokens: int, variances: dict[int, float] | None = None) -> list[Tensor]:
        """Return the indices of the tokens that stay for each head, of a sequence that has seen so many tokens.

        variances: of the layers that wait for each other, by number.
        """
        budget, uneven = self.eviction.budget, None if variances is None else list(variances.values())
        heads, stored_tokens = judged.scores.shape
        evicting = list(variances or (layer.index for layer in self._layers()))
        kept = select.count_kept(self.eviction, self.sink, self.index, evicting, tokens, uneven)
        if kept >= stored_tokens:
            return [torch.arange(stored_tokens, device=judged.scores.device)] * heads
        scores = judged.scores.mean(0, keepdim=True) if budget.heads == "shared" else judged.scores
        scores = select.protect(scores, self.sink, self.eviction.newest(kept))
        counts = select.head_counts(scores, kept) if budget.heads == "ada" else [kept] * len(scores)
        if judged.norms is not None:
            norms = judged.norms.mean(0, keepdim=True) if budget.heads == "shared" else judged.norms
            scores = select.critical(scores, norms, counts)
        survivors = select.best(scores, counts)
        return survivors * heads if budget.heads == "shared" else survivors

    def _keep(
        self,
        new: tuple[Tensor, Tensor],
        judged: list[Judged],
        queries: Tensor | None,
        variances: dict[int, list[float]] | None = None,
    ) -> None:
        """Store what stays of the prompt; variances: of each layer by its number, and by row."""
        rows = []
        for row, each in enumerate(judged):
            uneven = None if variances is None else {index: by_row[row] for index, by_row in variances.items()}
            rows.append([x + each.first for x in self._survivors(each, self.seen - each.first, uneven)])
        if all(len(x) == self.seen - each.first for heads, each in zip(rows, judged, strict=True) for x in heads):
            self._append(new, queries)
            return
        if self.stores["keys"].codec.rope == "pre":
            self.rope.place(align_rows(rows)[0][:, 0], self.seen)
        self._place(new, KeptTokens(rows, self.sink, self.eviction.budget.merge), queries)

    def _place(self, dense: tuple[Tensor, Tensor], kept: KeptTokens, queries: Tensor | None) -> None:
        """Store these rows of keys and values [B, h, n, width] in stores that are empty."""
        self.newest, self.since = self.eviction.budget.recent, 0
        last = None if queries is None else queries[:, :, -self.eviction.budget.recent :]  # they see all that stays
        if isinstance(self.stores["keys"], HeadStores):
            both_by_head, self.pads = by_head(dense, kept)
            for kind, by_kind in zip(KINDS, both_by_head, strict=True):
                self.stores[kind].place(by_kind, self.pads)
            return
        both, self.pads = kept.gather(dense)
        pads = self.pads[:, 0] if bool(self.pads.any()) else None
        for kind, x in zip(KINDS, both, strict=True):
            self.stores[kind].append(x, pads, last)

    @torch.no_grad()
    def _evict_stored(self) -> None:
        """Choose among all stored tokens anew; what is coded is decoded, and coded once more."""
        dense = (self.stores["keys"].read(), self.stores["values"].read())
        starts = self._starts().expand(len(dense[0]), -1)[:, 0].tolist()
        firsts = self._firsts(len(dense[0]), dense[0].device).tolist()
        rows = []
        for row, first in enumerate(starts):
            judged = self._judge(row, first, dense[0][row, :, first:], dense[1][row, :, first:], self.window)
            rows.append([x + first for x in self._survivors(judged, self.seen - firsts[row])])
        self.since = 0
        if all(len(x) == dense[0].shape[2] - first for heads, first in zip(rows, starts, strict=True) for x in heads):
            return
        columns = self.rope.all_columns(dense[0].shape[2], len(rows))
        for store in self.stores.values():
            store.clear()
        if self.stores["keys"].codec.rope == "pre":
            self.rope.place(columns.gather(1, align_rows(rows)[0][:, 0].to(columns.device)), self.seen)
        self._place(dense, KeptTokens(rows, self.sink, False), None)

    @property
    def stored_tokens(self) -> int:
        return super().stored_tokens + (0 if self.waiting is None else self.waiting[0][0].shape[2])

    def crop(self, tokens_to_remove: int) -> None:
        self._settle()
        count = min(-tokens_to_remove, self.seen)
        if count > 0 and self.eviction.budget.decode and not self.is_exempt:
            raise CompressError(
                "kv_cache.evict: decode: true cannot take tokens back (assisted decoding); set it to false"
            )
        if count > self.newest and self.pads is not None:
            raise CompressError(
                f"kv_cache.evict: cannot take back {count} tokens, because others were evicted among them; "
                f"{self.newest} are left. Raise kv_cache.evict.recent, or use a fresh cache"
            )
        super().crop(tokens_to_remove)
        self.newest = max(0, self.newest - count)

    def reset(self) -> None:
        super().reset()
        self._begin()

    def _select(self, index: Tensor) -> None:
        self._settle()
        super()._select(index)
        self.rope.select(index)
        self.moments.select(index)
        if self.pads is not None:
            self.pads = self.pads[index.to(self.pads.device)]
        if self.window is not None:
            self.window = self.window[index.to(self.window.device)]

    def nbytes(self) -> Bytes:
        self._settle()
        tensors = [x for x in (self.pads, self.window) if x is not None]
        state = self.moments.nbytes + self.rope.nbytes + sum(x.numel() * x.element_size() for x in tensors)
        return super().nbytes() + Bytes(state=state, allocated=state)


def join_mask(given: Any, starts: Tensor, stored_tokens: int, tokens: int, queries: int) -> Tensor | None:
    """Return the mask of `tokens` new queries over `stored_tokens` tokens and themselves; None where nothing is masked.

    given: the model's own mask, bool or additive [B or 1, 1 or H, tokens, any length], whose last columns are those of
    the new tokens; None: it has none, and the new tokens are causal. starts: int64 [B, h or 1], first stored columns
    without a token. queries: query heads of the model. -> [B or 1, 1 or H, tokens, stored + tokens], of the kind of
    `given`. CompressError for a mask of another form.
    """
    if given is not None and not (isinstance(given, Tensor) and given.dim() == 4):
        raise CompressError(
            "kv_cache.evict: the mask of this attention function has another form; set attention to sdpa or eager"
        )
    is_open = not bool(starts.any())
    if tokens == 1 and is_open and given is None:
        return None
    device = starts.device if given is None else given.device
    recent = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]
    recent = recent if given is None else given[..., -tokens:]
    past = torch.arange(stored_tokens, device=device) >= starts.to(device)[..., None]  # B, h or 1, stored
    if past.shape[1] > 1:
        past = past.repeat_interleave(queries // past.shape[1], 1)
    if recent.dtype != torch.bool:
        past = torch.zeros_like(past, dtype=recent.dtype).masked_fill_(~past, torch.finfo(recent.dtype).min)
    shape = torch.broadcast_shapes(past.shape[:2], recent.shape[:2])
    past = past[:, :, None].expand(*shape, tokens, stored_tokens)
    return torch.cat((past, recent.expand(*shape, tokens, tokens)), -1)
