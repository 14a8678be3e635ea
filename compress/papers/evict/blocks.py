"""Slice what goes into the decoder's blocks, where a cache drops tokens of the prompt between layers (pruned.py).

The model hands the same masks, positions and rotary rows to all blocks. A hook before each block takes those of the
tokens that are left, and the rows of the hidden states that the block before it gave. Whatever else has a row for each
token is refused, and so are models whose blocks are not found.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.kv.hooks import TURNS, decoder_blocks
from compress.kv.layer import UNSLICED
from compress.papers.evict.pruning import Pruning, Revival

MASK, POSITIONS = "attention_mask", "position_ids"
WATCHED = ("sdpa", "eager", "compress_kv")  # attention functions that a gap between positions does not mislead


def attach(model: nn.Module, layers: list[Any]) -> list[Any]:
    """Add hooks to the blocks for one forward pass and return their handles; layers: those of the cache."""
    blocks: list[nn.Module] = layers[0].pruning.blocks
    handles: list[Any] = [
        block.register_forward_pre_hook(partial(_slice_block, *layers[index : index + 2]), with_kwargs=True)
        for index, block in enumerate(blocks[1:])
    ]
    return [*handles, blocks[-1].register_forward_hook(partial(_leave_last, layers[-1].pruning))]


def _slice_block(before: Any, layer: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the arguments of the block of a layer, behind the layer `before`; None: they stay."""
    pruning: Pruning = layer.pruning
    if layer.seen:
        revival = pruning.revival
        return None if revival is None or not revival.is_stepping else _join(revival, args, kwargs)
    return None if pruning.columns is None else _slice(before, args, kwargs)


def _leave_last(pruning: Pruning, module: nn.Module, args: Any, output: Any) -> Any:
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
        hidden = _take(hidden, pruning.moves)
        pruning.moves = None
    pruning.turns, pruning.positions = kwargs.get(TURNS), kwargs.get(POSITIONS)
    kwargs = {**kwargs, **{name: _remaining(pruning, name, given) for name, given in kwargs.items()}}
    return _with(hidden, args, kwargs)


def _remaining(pruning: Pruning, name: str, given: Any) -> Any:
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
