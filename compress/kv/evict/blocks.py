"""Slice what goes into the decoder's blocks, where a cache drops tokens of the prompt between layers (pruned.py).

The model hands the same masks, positions and rotary rows to all blocks. A hook before each block takes those of the
tokens that are left, and the rows of the hidden states that the block before it gave. Whatever else has a row for each
token is refused, and so are models whose blocks are not found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.kv.cache import KVCache
from compress.kv.evict.pruned import PrunedLayer, Pruning
from compress.kv.evict.revival import Revival

UNSLICED = (
    "kv_cache.evict: tokens cannot be dropped between the layers of this model, whose decoder is no list of blocks "
    "that are given hidden states and rotary rows; choose another method, such as snapkv"
)
MASK, POSITIONS, TURNS = "attention_mask", "position_ids", "position_embeddings"
WATCHED = ("sdpa", "eager", "compress_kv")  # attention functions that a gap between positions does not mislead

CacheOf = Callable[[dict[str, Any]], KVCache | None]


def blocks(model: nn.Module) -> list[nn.Module] | None:
    """Return the decoder's blocks in order; None where there are none that can be given fewer tokens."""
    config: Any = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return None
    count = config.get_text_config(decoder=True).num_hidden_layers
    for found in model.modules():
        if isinstance(found, nn.ModuleList) and len(found) == count and all(map(_is_block, found, range(count))):
            return list(found)
    return None


def _is_block(module: nn.Module, index: int) -> bool:
    """Return whether a module is the block of this number, and is given hidden states first, and rotary rows."""
    numbers = {getattr(each, "layer_idx", None) for each in module.modules()} - {None}
    names = list(inspect.signature(module.forward).parameters)
    return numbers == {index} and names[0] == "hidden_states" and TURNS in names


def attach(model: nn.Module, cache_of: CacheOf) -> list[Any]:
    """Add hooks to a model and return their handles; cache_of finds a cache among the arguments of a forward pass."""
    found = blocks(model)
    handles: list[Any] = [model.register_forward_pre_hook(partial(_enter, found, cache_of), with_kwargs=True)]
    for index, block in enumerate(found or ()):
        if index:
            handles.append(block.register_forward_pre_hook(partial(_block, index, cache_of), with_kwargs=True))
    if found:
        handles.append(found[-1].register_forward_hook(partial(_last, cache_of), with_kwargs=True))
    return handles


def _enter(found: list[nn.Module] | None, cache_of: CacheOf, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Check a forward pass of the whole model."""
    cache = cache_of(kwargs)
    first = cache.layers[0] if cache is not None and cache.layers else None
    if isinstance(first, PrunedLayer) and not first.seen:  # all layers of such a cache are
        _check(model, found, kwargs, first.eviction.budget.recent)


def _block(index: int, cache_of: CacheOf, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a block of this number; None: they stay."""
    cache = cache_of(kwargs)
    before, layer = (None, None) if cache is None else cache.layers[index - 1 : index + 1]
    if not isinstance(before, PrunedLayer) or not isinstance(layer, PrunedLayer):
        return None
    if layer.seen:
        revival = layer.pruning.revival
        return None if revival is None or not revival.is_stepping else _joined(revival, args, kwargs)
    return None if layer.pruning.columns is None else _sliced(before, args, kwargs)


def _last(cache_of: CacheOf, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Return the new token alone, for what follows the blocks, where others came back with it; None: it is alone."""
    cache = cache_of(kwargs)
    layer = None if cache is None else cache.layers[-1]
    if not isinstance(layer, PrunedLayer) or layer.pruning.revival is None or not layer.pruning.revival.count:
        return None
    layer.pruning.revival.columns = None
    return (output[0][:, -1:], *output[1:]) if isinstance(output, tuple) else output[:, -1:]


def _check(model: Any, found: list[nn.Module] | None, kwargs: dict[str, Any], recent: int) -> None:
    """Raise CompressError for a forward pass of a prompt that cannot lose tokens but the `recent` newest."""
    if found is None:
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
    asked = kwargs.get("logits_to_keep")
    if isinstance(asked, int) and asked > recent:
        raise CompressError(
            f"kv_cache.evict: logits_to_keep asks for {asked} tokens of the prompt, of which only the newest {recent} "
            "are sure to stay; raise kv_cache.evict.recent"
        )
    own = model.config._attn_implementation
    if own is not None and not own.startswith(WATCHED):
        raise CompressError(
            f"kv_cache.evict: attention {own!r} takes gaps between positions for other texts; set it to sdpa or eager"
        )


def _hidden(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if len(args) > 1 or not isinstance(hidden, Tensor):
        raise CompressError(UNSLICED)
    return hidden


def _with(hidden: Tensor, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a block with other hidden states."""
    return ((hidden,), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _joined(revival: Revival, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a block with the rows of dropped tokens that come back in this step."""
    hidden = revival.enter(_hidden(args, kwargs))
    if revival.count:
        kwargs = {**kwargs, POSITIONS: revival.with_new(revival.positions, kwargs.get(POSITIONS))}
        if revival.turns is not None and isinstance(kwargs.get(TURNS), tuple):
            both = zip(revival.turns, kwargs[TURNS], strict=True)
            kwargs[TURNS] = tuple(revival.with_new(whole, new) for whole, new in both)
    return _with(hidden, args, kwargs)


def _sliced(before: PrunedLayer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of the block behind a layer with the rows of the tokens that are left."""
    hidden, pruning = _hidden(args, kwargs), before.pruning
    if pruning.moves is not None:
        if pruning.revival is not None and before.columns is not None:
            is_left = torch.ones(hidden.shape[1], dtype=torch.bool, device=hidden.device)
            is_left[pruning.moves[0].to(hidden.device)] = False
            pruning.revival.leave(before.index, hidden[:, is_left], before.columns[is_left])
            pruning.revival.turns, pruning.revival.positions = kwargs.get(TURNS), kwargs.get(POSITIONS)
        hidden = _take(hidden, pruning.moves)
        pruning.moves = None
    pruning.turns, pruning.positions = kwargs.get(TURNS), kwargs.get(POSITIONS)
    kwargs = {**kwargs, **{name: _left(pruning, name, given) for name, given in kwargs.items()}}
    return _with(hidden, args, kwargs)


def _left(pruning: Pruning, name: str, given: Any) -> Any:
    """Return an argument of the tokens that are left; the same for all blocks behind the one that dropped some."""
    if given is None or name == "hidden_states":
        return given
    known = pruning.sliced.get(name)
    if known is not None and known[0] is given:
        return known[1]
    assert pruning.columns is not None and pruning.pads is not None
    found: Any
    if name == MASK:
        found = _mask(given, pruning.columns, pruning.pads)
    elif name == TURNS and isinstance(given, tuple):
        found = tuple(_take(rows, pruning.columns) for rows in given)
    elif name == POSITIONS and isinstance(given, Tensor) and given.dim() == 2:
        found = _take(given, pruning.columns)
    elif isinstance(given, Tensor) and pruning.tokens in given.shape or name in (TURNS, POSITIONS):
        raise CompressError(f"{UNSLICED} ({name} is not known)")
    else:
        found = given
    pruning.sliced[name] = given, found
    return found


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """x [B or 1, n, ...], columns int64 [B, m] -> [B, m, ...]."""
    columns = columns.to(x.device)
    if len(columns) == 1 and len(x) == 1:
        return x.index_select(1, columns[0])
    x = x.expand(len(columns), *x.shape[1:])
    return x.gather(1, columns.view(*columns.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


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
