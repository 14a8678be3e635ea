"""Drop tokens between the layers of the prompt's forward pass: the layers of such a cache.

A layer of `Pruning.stays` scores its tokens when it is given those of the prompt, with the queries that its attention
shows, and the layers behind it are given the others no more (`slice_blocks`). Every layer counts all tokens as seen.
Positions are those of the text; later passes get masks of their own for each layer, as `EvictingLayer` makes them.

Left padding: a row of the batch drops what it would drop alone. Where rows keep different numbers of tokens, the
shorter ones are filled up at the left with copies of their first token, which no query attends to.
Given all tokens although others dropped some (when attention is measured by itself), a layer stores those that stay.

The model hands the same masks, positions and rotary rows to all blocks. A hook before each block takes those of the
tokens that are left, and the rows of the hidden states that the block before it gave. Whatever else has a row for each
token is refused, and so are models whose blocks are not found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress import plugins
from compress.errors import CompressError, RecipeError
from compress.kv.cache import CODED
from compress.kv.evict import select
from compress.kv.evict.layer import UNSEEN, EvictingLayer
from compress.kv.evict.settings import Eviction
from compress.kv.hooks import TURNS, decoder_blocks
from compress.kv.layer import UNSLICED, Call, KVCache, MakeLayer
from compress.kv.settings import CacheSettings
from compress.kv.token_store import Bytes
from compress.papers.evict.pruning import PromptPruning, Revival

MASK, POSITIONS = "attention_mask", "position_ids"
WATCHED = ("sdpa", "eager", "compress_kv")  # attention functions that a gap between positions does not mislead
ALONE = (
    "kv_cache.evict: revive: true takes one sequence without padding (no beams either); give one prompt at a time, or "
    "set it to false"
)


class PrunedLayer(EvictingLayer):
    """A layer of a cache whose prompt loses tokens from layer to layer."""

    def __init__(self, index: int, cache: KVCache, eviction: Eviction, pruning: PromptPruning) -> None:
        super().__init__(index, cache, eviction, is_exempt=False)
        self.pruning = pruning

    @classmethod
    def of_cache(cls, config: Any, settings: CacheSettings, types: Collection[str]) -> MakeLayer:
        """Return what makes the layers of a cache, which share a `PromptPruning`."""
        eviction = settings.evict
        assert eviction is not None and eviction.budget.keep is not None, "the method's `check` leaves nothing else"
        super().of_cache(config, settings, types)  # for its errors
        if others := sorted(set(types) - {CODED}):
            raise RecipeError(
                f"kv_cache.evict: {eviction.method} drops tokens within the forward pass, which layers of type "
                f"{', '.join(others)} do not allow; choose another method, such as snapkv"
            )
        try:
            method = plugins.load("evict", eviction.method)
            stays = method.fractions(eviction.config, eviction.budget.keep, len(types))
        except ValueError as error:
            raise RecipeError(f"kv_cache.evict ({eviction.method}): {error}") from error
        pruning = PromptPruning(stays, revival=Revival() if getattr(eviction.config, "revive", False) else None)
        return lambda index, cache: cls(index, cache, eviction, pruning)

    def enter(self, model: nn.Module, kwargs: Mapping[str, Any]) -> list[Any]:
        pruning = self.pruning
        if not self.seen:
            pruning.blocks = check_pass(model, kwargs, self.eviction.budget.recent)
        elif pruning.revival is None:
            return []
        return slice_blocks(model, self.cache.layers)

    def _begin(self) -> None:
        super()._begin()
        self.columns: Tensor | None = None  # int64 [stored]: in the order of the store, where tokens may come back

    def before(self, call: Call, mask: Any, tokens: int) -> Any:
        pruning, revival = self.pruning, self.pruning.revival
        if not self.seen:
            if self.index == 0:
                pruning.begin(tokens)
            elif pruning.turns is not None:
                self._give_rotation(call, pruning.turns, pruning.positions)
        elif revival is not None:
            if self.index == 0:
                revival.step(tokens)
            elif revival.count and call.turns is not None:
                positions = None if call.positions is None else call.positions[:, -1:]
                self._give_rotation(call, (call.turns[0][:, -1:], call.turns[1][:, -1:]), positions)
                self.call = call
                assert self.columns is not None
                return revival.mask(self.columns, self.seen, mask)
        return super().before(call, mask, tokens)

    def _give_rotation(self, call: Call, turns: tuple[Tensor, Tensor], positions: Tensor | None) -> None:
        """Let rotary rows be kept as they are of all new tokens of the text, whichever layer needs them first."""
        self.turns = turns
        if positions is not None and len(self.cache.rope) == self.seen:
            self.cache.rope.announce(positions, call.makers)

    def _needs_queries(self, count: int) -> bool:
        revival = self.pruning.revival
        is_step = revival is not None and revival.is_stepping
        return self.index in self.pruning.stays and (self.seen == count or is_step)

    def _store(self, new: tuple[Tensor, Tensor], queries: Tensor | None = None) -> None:
        count = new[0].shape[2]
        if queries is None and self._needs_queries(count):
            self._pending = new  # until attention has shown them
            return
        if self.seen == count:
            self._store_prompt(new, queries)
        elif self.columns is not None:
            self._store_step(new, queries)
        else:
            self._append(new, queries)
            self.newest += count
        self.call = None

    def _store_step(self, new: tuple[Tensor, Tensor], queries: Tensor | None) -> None:
        """Store new tokens behind those that came back with them, and say who comes back behind this layer."""
        revival = self.pruning.revival
        assert revival is not None and self.columns is not None, "columns are held for it"
        count = revival.count if self.index else 0
        self.seen -= count  # which were seen before
        text = torch.arange(self.seen - new[0].shape[2] + count, self.seen, device=self.columns.device)
        parts = (self.columns, revival.columns, text) if count and revival.columns is not None else (self.columns, text)
        self.columns = torch.cat(parts)
        if count and self.stores["keys"].codec.rope == "pre":
            self.rope.place(self.columns[None], self.seen)
        self._append(new, queries)
        if self.index in self.pruning.stays and revival.is_stepping:
            assert queries is not None, "commit has checked"
            keys = self.stores["keys"].read()
            scores = self._scores(keys[0], keys[0], queries[0, :, -1:])
            sink, recent = self.sink, self.eviction.budget.recent
            scores[:, (self.columns < sink) | (self.columns >= self.seen - recent)] = torch.inf
            kept = select.count(self.seen, self.pruning.stays[self.index], sink + recent)
            revival.choose(self.index, self.columns[select.best(scores, [min(kept, len(self.columns))])[0]])

    def _store_prompt(self, new: tuple[Tensor, Tensor], queries: Tensor | None) -> None:
        pruning = self.pruning
        if self.call is None:
            raise CompressError(UNSEEN)
        self.newest = self.seen
        if pruning.columns is not None:
            columns = pruning.columns.to(new[0].device)
            if new[0].shape[2] == pruning.tokens != columns.shape[1]:
                new = (_rows(new[0], columns), _rows(new[1], columns))
                queries = None if queries is None else _rows(queries, columns)
            assert pruning.pads is not None
            self.pads = pruning.pads[:, None]
            if self.stores["keys"].codec.rope == "pre":
                self.rope.place(columns, pruning.tokens)
            self.seen, self.newest = pruning.tokens, self.eviction.budget.recent
        self._append(new, queries)
        if pruning.revival is not None:
            self.columns = torch.arange(self.seen, device=new[0].device) if pruning.columns is None else columns[0]
        if self.index in pruning.stays:
            assert queries is not None, "commit has checked"
            self._choose(new, queries, pruning.stays[self.index])
        if self.index == len(self.cache.layers) - 1:
            pruning.forget()

    @torch.no_grad()
    def _choose(self, new: tuple[Tensor, Tensor], queries: Tensor, fraction: float) -> None:
        """Drop tokens of the prompt behind this layer, of which it was given these [B, h, n, width]."""
        keys, values = new
        width = keys.shape[2]
        if self.pruning.revival is not None and (len(keys) > 1 or self.cache.pads is not None):
            raise CompressError(ALONE)
        prompts = self._firsts(len(keys), keys.device).tolist()
        filled = self.pruning.pads
        firsts = prompts if filled is None else filled.tolist()
        chosen = []
        for row, (first, pads) in enumerate(zip(firsts, prompts, strict=True)):
            parts = (keys[row, :, first:], values[row, :, first:], queries[row, :, first:])
            chosen.append(self._stay(row, pads, parts, fraction) + first)
        if any(len(row) < width - first for row, first in zip(chosen, firsts, strict=True)):
            self.pruning.drop(chosen, keys.device)

    def _stay(self, row: int, pads: int, parts: tuple[Tensor, Tensor, Tensor], fraction: float) -> Tensor:
        """Return the places of the tokens of one row that stay, int64 ascending; pads: how many the prompt began with.

        parts: its keys and values [h, n, width] and queries [H, n, width].
        """
        scores, recent = self._scores(*parts), self.eviction.budget.recent
        kept = select.count(self.pruning.tokens - pads, fraction, self.sink + recent)
        return select.best(select.protect(scores, self.sink, recent), [min(kept, scores.shape[1])])[0]

    def _scores(self, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        """Return the scores [1, n] of tokens [h, n, width] by queries [H, m, width] of the newest."""
        assert self.call is not None
        scaling = getattr(self.call.module, "scaling", None) or keys.shape[-1] ** -0.5
        seen = select.Seen(keys, values, queries, scaling, self.sink)
        return self.plugin.score(self.eviction.config, seen).mean(0, keepdim=True)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove < 0 and self.pruning.revival is not None:
            raise CompressError(
                "kv_cache.evict: revive: true cannot take tokens back (assisted decoding); set it to false"
            )
        uncut = [layer for layer in self._layers() if layer.seen == self.seen and layer.pads is not None]
        least = min(uncut, key=lambda layer: layer.newest, default=self)
        if least is not self and -tokens_to_remove > least.newest:
            EvictingLayer.crop(least, tokens_to_remove)  # says why not, before any layer is cut
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.pruning.begin(0)

    def _select(self, index: Tensor) -> None:
        if self.pruning.revival is not None and len(index) > 1:
            raise CompressError(ALONE)
        super()._select(index)

    def nbytes(self) -> Bytes:
        state = 0 if self.columns is None else self.columns.numel() * self.columns.element_size()
        if self.index == 0 and self.pruning.revival is not None:
            state += self.pruning.revival.nbytes
        return super().nbytes() + Bytes(state=state, allocated=state)


def _rows(x: Tensor, columns: Tensor) -> Tensor:
    """x [B, h, n, width], columns [B, m] -> [B, h, m, width]."""
    return x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def slice_blocks(model: nn.Module, layers: list[Any]) -> list[Any]:
    """Add hooks to the blocks for one forward pass and return their handles; layers: those of the cache."""
    blocks: list[nn.Module] = layers[0].pruning.blocks
    handles: list[Any] = [
        block.register_forward_pre_hook(partial(_slice_block, *layers[index : index + 2]), with_kwargs=True)
        for index, block in enumerate(blocks[1:])
    ]
    return [*handles, blocks[-1].register_forward_hook(partial(_leave_last, layers[-1].pruning))]


def _slice_block(before: Any, layer: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the arguments of the block of a layer, behind the layer `before`; None: they stay."""
    pruning: PromptPruning = layer.pruning
    if layer.seen:
        revival = pruning.revival
        return None if revival is None or not revival.is_stepping else _join(revival, args, kwargs)
    return None if pruning.columns is None else _slice(before, args, kwargs)


def _leave_last(pruning: PromptPruning, module: nn.Module, args: Any, output: Any) -> Any:
    """Return the new token alone, for what follows the blocks, where others came back with it; None: it is alone."""
    if pruning.revival is None or not pruning.revival.count:
        return None
    pruning.revival.columns = None
    return (output[0][:, -1:], *output[1:]) if isinstance(output, tuple) else output[:, -1:]


def check_pass(model: Any, kwargs: Mapping[str, Any], recent: int) -> list[nn.Module]:
    """Return the decoder's blocks. CompressError for a prompt that cannot lose tokens but the `recent` newest."""
    blocks = decoder_blocks(model)
    if blocks is None:
        raise CompressError(UNSLICED)
    if model.training and torch.is_grad_enabled():
        raise CompressError("kv_cache.evict: a cache that drops tokens of the prompt is not for training; remove it")
    for name in ("labels", "output_hidden_states", "output_attentions"):
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise CompressError(
                f"kv_cache.evict: {name} asks for all tokens of the prompt, of which some are dropped; give no {name}, "
                "or another cache"
            )
    logits = kwargs.get("logits_to_keep")
    if isinstance(logits, int) and logits > recent:
        raise CompressError(
            f"kv_cache.evict: logits_to_keep asks for {logits} tokens of the prompt, of which only the newest {recent} "
            "are sure to stay; raise kv_cache.evict.recent"
        )
    attention = model.config._attn_implementation
    if attention is not None and not attention.startswith(WATCHED):
        raise CompressError(
            f"kv_cache.evict: attention {attention!r} takes gaps between positions for other texts; set it to sdpa or "
            "eager"
        )
    return blocks


def _hidden_states(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if len(args) > 1 or not isinstance(hidden, Tensor):
        raise CompressError(UNSLICED)
    return hidden


def _with(hidden: Tensor, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a block with other hidden states."""
    return ((hidden,), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _join(revival: Revival, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a block with the rows of dropped tokens that come back in this step."""
    hidden = revival.enter(_hidden_states(args, kwargs))
    if revival.count:
        kwargs = {**kwargs, POSITIONS: revival.with_new(revival.positions, kwargs.get(POSITIONS))}
        if revival.turns is not None and isinstance(kwargs.get(TURNS), tuple):
            both = zip(revival.turns, kwargs[TURNS], strict=True)
            kwargs[TURNS] = tuple(revival.with_new(whole, new) for whole, new in both)
    return _with(hidden, args, kwargs)


def _slice(before: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of the block behind a layer with the rows of the tokens that are left."""
    hidden, pruning = _hidden_states(args, kwargs), before.pruning
    if pruning.moves is not None:
        if pruning.revival is not None and before.columns is not None:
            is_left = torch.ones(hidden.shape[1], dtype=torch.bool, device=hidden.device)
            is_left[pruning.moves[0].to(hidden.device)] = False
            pruning.revival.leave(before.index, hidden[:, is_left], before.columns[is_left])
            pruning.revival.turns, pruning.revival.positions = kwargs.get(TURNS), kwargs.get(POSITIONS)
        if pruning.joins is not None:
            hidden = _join_rows(hidden, pruning.joins)
            pruning.joins = None
        hidden = _take(hidden, pruning.moves)
        pruning.moves = None
    pruning.turns, pruning.positions = kwargs.get(TURNS), kwargs.get(POSITIONS)
    kwargs = {**kwargs, **{name: _remaining(pruning, name, given) for name, given in kwargs.items()}}
    if kwargs.get(MASK) is None and pruning.pads is not None and bool(pruning.pads.any()):
        kwargs[MASK] = _causal_mask(pruning.pads.to(hidden.device), hidden.shape[1])
    return _with(hidden, args, kwargs)


def _remaining(pruning: PromptPruning, name: str, given: Any) -> Any:
    """Return an argument of the tokens that are left; the same for all blocks behind the one that dropped some."""
    if given is None or name == "hidden_states":
        return given
    known = pruning.sliced.get(name)
    if known is not None and known[0] is given:
        return known[1]
    assert pruning.columns is not None and pruning.pads is not None
    left: Any
    if name == MASK:
        left = _mask(given, pruning.columns, pruning.pads)
    elif name == TURNS and isinstance(given, tuple):
        left = tuple(_take(rows, pruning.columns) for rows in given)
    elif name == POSITIONS and isinstance(given, Tensor) and given.dim() == 2:
        left = _take(given, pruning.columns)
    elif isinstance(given, Tensor) and pruning.tokens in given.shape or name in (TURNS, POSITIONS):
        raise CompressError(f"{UNSLICED} ({name} is not known)")
    else:
        left = given
    pruning.sliced[name] = given, left
    return left


def _join_rows(hidden: Tensor, joins: Tensor) -> Tensor:
    """Return hidden states [B, n, hidden] where each place has the mean of those that join it, int64 [B, n].

    Places that nobody joins are 0.
    """
    index = joins.to(hidden.device)[..., None]
    total = torch.zeros_like(hidden).scatter_add_(1, index.expand_as(hidden), hidden)
    count = torch.zeros_like(hidden[..., :1]).scatter_add_(1, index, torch.ones_like(hidden[..., :1]))
    return total / count.clamp(min=1)


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """x [B or 1, n, ...], columns int64 [B, m] -> [B, m, ...]."""
    columns = columns.to(x.device)
    if len(columns) == 1 and len(x) == 1:
        return x.index_select(1, columns[0])
    x = x.expand(len(columns), *x.shape[1:])
    return x.gather(1, columns.view(*columns.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def _causal_mask(pads: Tensor, tokens: int) -> Tensor:
    """Return a mask bool [B, 1, n, n] of rows that were filled up with so many columns, where the model gives none."""
    is_token = torch.arange(tokens, device=pads.device) >= pads[:, None, None, None]
    return is_token & torch.ones(tokens, tokens, dtype=torch.bool, device=pads.device).tril()


def _mask(given: Any, columns: Tensor, pads: Tensor) -> Tensor:
    """Return a mask [B or 1, 1 or H, n, n], bool or additive, of these columns [B, m]; filled-up ones are closed."""
    if not (isinstance(given, Tensor) and given.dim() == 4):
        raise CompressError(
            "kv_cache.evict: the mask of this attention function has another form; set attention to sdpa or eager"
        )
    columns, pads = columns.to(given.device), pads.to(given.device)
    tokens = given.shape[-2]
    mask = given[..., :tokens].expand(len(columns), -1, -1, -1)
    rows = columns[:, None, :, None].expand(-1, mask.shape[1], -1, tokens)
    mask = mask.gather(2, rows)
    mask = mask.gather(3, columns[:, None, None].expand(-1, *mask.shape[1:3], -1))
    closed = torch.arange(columns.shape[1], device=given.device) < pads[:, None]
    value = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return mask.masked_fill(closed[:, None, None], value)
