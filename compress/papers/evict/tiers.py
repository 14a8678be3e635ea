"""Keep the tokens of a prompt in two tiers, the important ones and the others: the cache layer of zipvl.py.

Each tier is a `Store` with bits of its own: first come the tokens of the lower one, then the important ones and what
came after the prompt. Attention does not depend on the order of tokens once keys have their rotary embedding; codecs of
keys before it are told the columns of each tier. Rows of a batch have different numbers of important tokens: each tier
is filled up at its left with copies, which the layer's mask closes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compress import plugins
from compress.errors import CompressError, RecipeError
from compress.kv.codec import Codec
from compress.kv.evict.head_stores import in_storage_order, in_token_order
from compress.kv.evict.layer import UNSEEN, EvictingLayer, join_mask
from compress.kv.evict.placing import KeptRope
from compress.kv.layer import Call, Logits, MakeLayer, build
from compress.kv.settings import KINDS, CacheSettings, Coding, Policy
from compress.kv.token_store import Bytes, Store

SCORES = 1 << 24  # float32 scores held at a time


class TierStores:
    """Offers what readers of a `Store` use; tiers lie one behind the other, the one that grows last."""

    columns: Tensor | None = None  # columns are in token order within a tier, unlike those of a padded `Store`
    keeps_halves = False
    coded = 0  # that one kernel could read for both tiers

    def __init__(self, tiers: Sequence[Store]) -> None:
        self.tiers, self.high = tuple(tiers), tiers[-1]

    @property
    def codec(self) -> Codec:
        return self.high.codec

    @property
    def _used(self) -> list[Store]:
        return [store for store in self.tiers if len(store)]

    def __len__(self) -> int:
        return sum(len(store) for store in self.tiers)

    @property
    def batch(self) -> int:
        return self.high.batch

    def append(self, x: Tensor, pads: Tensor | None = None, queries: Tensor | None = None) -> None:
        """Add tokens x [B, h, n, width] to the upper tier; pads int64 [B, 1]: its first columns without a token."""
        self.high.append(x, None if pads is None else pads[:, 0], queries)

    def read(self, new: Tensor | None = None) -> Tensor:
        """Return all tokens, then those of `new`, [B, h, tokens, width]."""
        lower = [store.read() for store in self._used if store is not self.high]
        return torch.cat((*lower, self.high.read(new)), 2) if lower else self.high.read(new)

    def scores(self, q: Tensor, out: Tensor) -> None:
        """Write products of q [B, h, m, width] float32 with all keys into out [B, h, m, tokens]."""
        start = 0
        for store in self._used:
            own = q.new_empty(*q.shape[:3], len(store))
            store.scores(q, own)
            out[..., start : start + len(store)] = in_token_order(own, store.columns)
            start += len(store)

    def mix(self, p: Tensor) -> Tensor:
        """Return the sum of all values [B, h, m, width], weighted by p [B, h, m, tokens] float32."""
        used = self._used
        parts = p.split([len(store) for store in used], -1)
        mixed = [store.mix(in_storage_order(x, store.columns)) for store, x in zip(used, parts, strict=True)]
        return torch.stack(mixed).sum(0)

    def crop(self, count: int) -> None:
        """Forget the last tokens, which are in the upper tier."""
        self.high.crop(count)

    def select(self, index: Tensor) -> None:
        """Take rows of the batch by index int64."""
        for store in self._used:
            store.select(index)

    def settle(self) -> None:
        """Code what was only held."""
        self.high.settle()

    def clear(self) -> None:
        """Forget everything."""
        for store in self.tiers:
            store.clear()

    def nbytes(self) -> Bytes:
        """Return the bytes of all tiers, by part."""
        return sum((store.nbytes() for store in self.tiers), Bytes())


def refusal_of_low(coding: Coding) -> str | None:
    """Return why tokens cannot be stored in fewer bits beside others of a coding; None: they can."""
    if plugins.load("kv", coding.method).NEEDS:
        return f"{coding.method} is calibrated for one number of bits; choose kivi or lloyd, or set low: 0"
    if not hasattr(coding.config, "bits"):
        return f"{coding.method} has no bits that `low` could change; choose kivi or lloyd, or set low: 0"
    return None


class TieredLayer(EvictingLayer):
    """A layer whose prompt is judged before its attention runs, and then kept in two tiers."""

    @classmethod
    def of_cache(cls, config: Any, settings: CacheSettings, types: Collection[str]) -> MakeLayer:
        """Return what makes the layers. RecipeError where each is given a share of its own."""
        if settings.evict is not None and settings.evict.budget.keep is None:
            raise RecipeError("kv_cache.evict: keep_by_layer is not possible with zipvl; set tau, or keep")
        return super().of_cache(config, settings, types)

    def _begin(self) -> None:
        super()._begin()
        self.low_rope = KeptRope(self.cache.rope)
        self.important: list[Tensor] = []  # of each row the columns of the important tokens, while the prompt is read
        self.shares: list[float] = []  # important tokens of each row, as a share of its prompt
        self.closed: Tensor | None = None  # bool [B, c]: of the first stored columns, those that hold no token

    def _store_of(self, kind: str, states: Tensor) -> Any:
        high = super()._store_of(kind, states)
        if self.is_exempt:
            return high
        coding, low, tiers = self.cache.codings[self.index][kind], self.eviction.config.low, []
        assert isinstance(high, Store), "heads: ada is refused"
        if low:
            codec = build(coding.over({"bits": low}), high.codec.spec, {})
            tiers.append(Store(codec, Policy(0, 0, 1), self.low_rope))  # type: ignore[arg-type]
        return TierStores([*tiers, high])

    def before(self, call: Call, mask: Any, tokens: int) -> Any:
        self.call = call
        stored = self.stored_tokens
        if not self.seen or (self.closed is None and (mask is None or mask.shape[-1] == stored + tokens)):
            return mask
        joined = join_mask(mask, torch.zeros(1, 1, dtype=torch.long), stored, tokens, self.cache.queries)
        if self.closed is None:
            return joined
        if joined is None:
            joined = torch.ones(1, 1, tokens, stored + tokens, dtype=torch.bool, device=self.closed.device)
        closed = functional.pad(self.closed, (0, joined.shape[-1] - self.closed.shape[1]))[:, None, None]
        return joined.masked_fill(closed, False if joined.dtype == torch.bool else torch.finfo(joined.dtype).min)

    def read_prompt(self, query: Tensor, new: tuple[Tensor, Tensor], mask: Any, logits: Logits) -> Tensor | None:
        if self.is_exempt or self.seen != query.shape[2]:
            return None
        self._judge_rows(query, new[0], logits.scaling)
        if self.eviction.config.prefill == "all" or logits.softcap is not None:
            return None
        read = among_important if self.eviction.config.prefill == "important" else to_important
        rows = []
        for row, chosen in enumerate(self.important):
            own = mask[min(row, len(mask) - 1)][..., : query.shape[2]] if isinstance(mask, Tensor) else None
            rows.append(read(query[row], new[0][row], new[1][row], chosen, own, logits.scaling))
        return torch.stack(rows).to(query.dtype)

    @torch.no_grad()
    def _judge_rows(self, queries: Tensor, keys: Tensor, scaling: float) -> None:
        """Find the important tokens of each row, from queries [B, H, n, width] and keys [B, h, n, width]."""
        config, budget = self.eviction.config, self.eviction.budget
        self.important, self.shares = [], []
        for row, first in enumerate(self._firsts(len(keys), keys.device).tolist()):
            own = keys[row, :, first:]
            columns = self.plugin.probe_columns(config, own.shape[1]).to(keys.device)
            mass = self.plugin.attention_mass(queries[row, :, first:][:, columns] * scaling, columns, own)
            kept = self.plugin.important_tokens(config, mass, columns, budget.keep, (self.sink, budget.recent))
            self.important.append(kept + first)
            self.shares.append(len(kept) / own.shape[1])

    def _evict_prompt(self, new: tuple[Tensor, Tensor], queries: Tensor | None) -> None:
        if self.call is None or queries is None:
            raise CompressError(UNSEEN)
        keys = new[0]
        if not self.important:  # attention was not ours to run
            self._judge_rows(queries, keys, getattr(self.call.module, "scaling", None) or keys.shape[-1] ** -0.5)
        chosen, self.important = self.important, []
        firsts = self._firsts(len(keys), keys.device).tolist()
        if all(len(x) == self.seen - first for x, first in zip(chosen, firsts, strict=True)):
            self._append(new, queries)
            return
        others = [_without(x, first, self.seen) for x, first in zip(chosen, firsts, strict=True)]
        tiers = [others, chosen] if self.eviction.config.low else [chosen]
        placed = [_align(rows, self.seen) for rows in tiers]
        if self.stores["keys"].codec.rope == "pre":
            for rope, (index, _) in zip([self.rope, self.low_rope], reversed(placed), strict=False):
                rope.place(index, self.seen)
        for kind, x in zip(KINDS, new, strict=True):
            stores = self.stores[kind]
            assert isinstance(stores, TierStores)
            for store, (index, pads) in zip(stores.tiers, placed, strict=True):
                kept = x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
                store.append(kept, pads if bool(pads.any()) else None, queries[:, :, -self.eviction.budget.recent :])
        closed = torch.cat([torch.arange(i.shape[1], device=keys.device) < pads[:, None] for i, pads in placed], 1)
        self.closed = closed if bool(closed.any()) else None
        self.pads = placed[-1][1][:, None]
        self.newest, self.since = self.eviction.budget.recent, 0

    def _select(self, index: Tensor) -> None:
        super()._select(index)
        self.low_rope.select(index)
        if self.closed is not None:
            self.closed = self.closed[index.to(self.closed.device)]

    def nbytes(self) -> Bytes:
        state = self.low_rope.nbytes + (0 if self.closed is None else self.closed.numel())
        return super().nbytes() + Bytes(state=state, allocated=state)


def _without(chosen: Tensor, first: int, stop: int) -> Tensor:
    """Return the columns first..stop that are not among those chosen, int64."""
    is_left = torch.ones(stop, dtype=torch.bool, device=chosen.device)
    is_left[:first] = False
    is_left[chosen] = False
    return is_left.nonzero()[:, 0]


def _align(rows: Sequence[Tensor], tokens: int) -> tuple[Tensor, Tensor]:
    """Return the columns [B, m] of all rows, filled up at the left with the first one, and by how many, int64 [B]."""
    longest = max(len(x) for x in rows)
    last = rows[0].new_tensor([tokens - 1])
    filled = [torch.cat(((x if len(x) else last)[:1].expand(longest - len(x)), x)) for x in rows]
    return torch.stack(filled), rows[0].new_tensor([longest - len(x) for x in rows])


def among_important(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Return the attention of important tokens to each other [n, H, width], 0 for the others.

    query [H, n, width], key and value [h, n, width], chosen int64 ascending; mask [1 or H, n, n], None: causal.
    """
    own = None if mask is None else mask[:, chosen][:, :, chosen][None]
    output = functional.scaled_dot_product_attention(
        query[None, :, chosen],
        key[None, :, chosen],
        value[None, :, chosen],
        attn_mask=own,
        is_causal=own is None,
        scale=scaling,
        enable_gqa=True,
    )
    whole = query.new_zeros(query.shape[1], query.shape[0], value.shape[2])
    whole[chosen] = output[0].transpose(0, 1)
    return whole


def to_important(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Return the attention of all tokens to the important ones and to themselves [n, H, width].

    Shapes as of `among_important`.
    """
    heads, tokens, width = query.shape
    grouped = (query.float() * scaling).unflatten(0, (key.shape[0], -1))  # h, H / h, n, width
    keys, values = key.float(), value.float()
    parts = []
    for places in torch.arange(tokens, device=query.device).split(max(1, SCORES // (heads * (len(chosen) + 1)))):
        q = grouped[:, :, places]
        scores = q @ keys[:, None, chosen].mT
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + mask[0, places][:, chosen]
        is_open = chosen <= places[:, None] if mask is None or mask.dtype != torch.bool else mask[0, places][:, chosen]
        scores = scores.masked_fill(~is_open | (chosen == places[:, None]), -torch.inf)
        itself = (q * keys[:, None, places]).sum(-1, keepdim=True)
        p = torch.cat((scores, itself), -1).softmax(-1)
        parts.append(p[..., :-1] @ values[:, None, chosen] + p[..., -1:] * values[:, None, places])
    return torch.cat(parts, 2).flatten(0, 1).transpose(0, 1).to(query.dtype)
