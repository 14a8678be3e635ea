"""Give a cache what `update` is not given, and check that a model reads and writes the cache that it was handed.

`attach(model)` adds hooks that look for a `KVCache` among the arguments of each forward pass, and do nothing where
there is none. generate and plain calls of the model both pass through them. They give it the left padding, the rotary
embedding of each token and, to layers that evict, the pass of each attention module.

Three checks hold for every model: a forward pass returns the cache that it was given, it adds as many tokens to it as
it read, and `generate` ends with a cache that has seen every token but the last one.

`generate` lets the model prepare the inputs of each forward pass. A model whose rotary factors change with the length
of the text drops its cache there once the text is longer than the first factors reach, and computes the whole text
anew. The next pass would begin with transformers' own cache. The compressed cache is emptied instead and handed back,
so that it is filled with the keys of the new factors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin

from compress.errors import UnreadCacheError
from compress.kv.evict import queries
from compress.kv.layer import Call, CodedLayer, KVCache
from compress.kv.rope import sources

TURNS = "position_embeddings"  # among the arguments of blocks and of attention modules

_MARK = "_compress_kv_hooks"
_PREPARE, _GENERATE = "prepare_inputs_for_generation", "generate"
_IN_USE = "_compress_kv_in_use"  # the cache of the running call of `generate`


class _Undo:
    """Takes wrapped methods off a model, as a hook's handle does."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model, self.names = model, names

    def remove(self) -> None:
        for name in self.names:
            vars(self.model).pop(name, None)


def attach(model: nn.Module) -> None:
    """Add the hooks to a model; again does no harm."""
    if hasattr(model, _MARK):
        return
    handles: list[Any] = [model.register_forward_pre_hook(_padding, with_kwargs=True)]
    makers = sources(model)

    def tell_layer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        _rotation(module, kwargs, makers)
        return _attention(module, args, kwargs, makers)

    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            handles.append(module.register_forward_pre_hook(tell_layer, with_kwargs=True))
    setattr(model, _MARK, [*handles, *queries.attach(model, cache_of), *_attach_checks(model)])


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    for handle in getattr(model, _MARK, ()):
        handle.remove()
    if hasattr(model, _MARK):
        delattr(model, _MARK)


def decoder_blocks(model: nn.Module) -> list[nn.Module] | None:
    """Return the decoder's blocks in order; None where there are none that can be given fewer tokens."""
    config: Any = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return None
    count = config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and all(map(_is_block, module, range(count))):
            return list(module)
    return None


def _is_block(module: nn.Module, index: int) -> bool:
    """Return whether a module is the block of this number, and is given hidden states first, and rotary rows."""
    numbers = {getattr(each, "layer_idx", None) for each in module.modules()} - {None}
    names = list(inspect.signature(module.forward).parameters)
    return numbers == {index} and names[0] == "hidden_states" and TURNS in names


def _padding(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Count the leading zeros of the attention mask [B, tokens] of a first chunk."""
    cache, mask = cache_of(kwargs), kwargs.get("attention_mask")
    if cache is None or max(_lengths(cache).values(), default=1) or not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    pads = (mask.cumsum(-1) == 0).sum(-1)
    cache.pads = pads if bool(pads.any()) else None


def _rotation(module: nn.Module, kwargs: dict[str, Any], makers: list[nn.Module]) -> None:
    """Pass on cos and sin of the new tokens, for the layer that is about to store them, and their positions."""
    cache, turns = cache_of(kwargs), kwargs.get(TURNS)
    index = module.layer_idx
    if cache is None or not isinstance(turns, tuple) or not isinstance(index, int) or index >= len(cache.layers):
        return
    layer, positions = cache.layers[index], kwargs.get("position_ids")
    if isinstance(layer, CodedLayer):
        layer.turns = turns
        if isinstance(positions, Tensor) and positions.dim() == 2 and len(cache.rope) == layer.seen:
            cache.rope.announce(positions, makers)


def _attention(module: nn.Module, args: Any, kwargs: dict[str, Any], makers: list[nn.Module]) -> Any:
    """Give a layer that evicts the pass of its attention module; return the arguments with a mask of its own."""
    cache, index = cache_of(kwargs), module.layer_idx
    layer = cache.layers[index] if cache is not None and isinstance(index, int) and index < len(cache.layers) else None
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(layer, CodedLayer) or not layer.is_told_of_passes or not isinstance(hidden, Tensor):
        return None
    turns, positions = kwargs.get(TURNS), kwargs.get("position_ids")
    call = Call(
        module,
        turns if isinstance(turns, tuple) else None,
        positions if isinstance(positions, Tensor) else None,
        makers,
    )
    setattr(module, queries.LAYER_ATTRIBUTE, layer)
    return args, {**kwargs, "attention_mask": layer.before(call, kwargs.get("attention_mask"), hidden.shape[1])}


def _attach_checks(model: nn.Module) -> list[Any]:
    """Add what checks and serves whole forward passes, and return handles that remove it."""
    passes: list[tuple[KVCache, dict[int, int], int] | None] = []
    for_pass: list[list[Any]] = []

    def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = cache_of(kwargs)
        passes.append(None if cache is None else (cache, _lengths(cache), _count(args, kwargs)))
        for_pass.append([])
        first = next(iter(cache.layers), None) if cache is not None else None
        if isinstance(first, CodedLayer):
            for_pass[-1] = first.enter(module, kwargs)

    def leave(module: Any, args: Any, output: Any) -> None:
        for handle in for_pass.pop() if for_pass else ():
            handle.remove()
        before = passes.pop() if passes else None
        if before is not None and output is not None:  # None: the forward pass has raised
            _check_pass(type(model).__name__, *before, output)

    handles: list[Any] = [model.register_forward_pre_hook(enter, with_kwargs=True)]
    handles.append(model.register_forward_hook(leave, always_call=True))
    wrappers = {_PREPARE: _prepare, _GENERATE: _generate}
    names = [name for name in wrappers if hasattr(type(model), name)]
    for name in names:
        setattr(model, name, MethodType(_wrap(wrappers[name], getattr(type(model), name)), model))
    return [*handles, _Undo(model, [*names, _IN_USE])]


def _wrap(wrapper: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method with the signature of `method` that calls `wrapper` with it and the model first."""

    @wraps(method)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(partial(method, model), model, *args, **kwargs)

    return call


def cache_of(kwargs: dict[str, Any]) -> KVCache | None:
    """Return the compressed cache among the arguments; its name differs between models."""
    return next((value for value in kwargs.values() if isinstance(value, KVCache)), None)


def cache_argument(model: nn.Module) -> str:
    """Return the name by which a model takes its cache; models without attention have one of their own."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in names), "past_key_values")


def use(model: Any, cache: KVCache) -> None:
    """Note the cache of the running call of `generate`."""
    setattr(model, _IN_USE, cache)


def drops_cache(model: Any, text: Tensor, start: int, cache: Any) -> bool:
    """Return whether `generate` would compute text [B, n] anew though the cache holds its first `start` tokens."""
    prepare = getattr(type(model), _PREPARE, None)
    if not start or prepare is None or prepare is GenerationMixin.prepare_inputs_for_generation:
        return False
    count = text.shape[1] - start
    inputs = prepare(
        model,
        text,
        past_key_values=cache,
        attention_mask=torch.ones_like(text),
        next_sequence_length=count,
        use_cache=True,
    )
    is_whole = isinstance(inputs.get("input_ids"), Tensor) and inputs["input_ids"].shape[1] == text.shape[1]
    return is_whole and not any(isinstance(value, Cache) for value in inputs.values())


def _prepare(inner: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the inputs of a forward pass, with the cache emptied and put back where the model has dropped it."""
    inputs = inner(*args, **kwargs)
    name = next((name for name, value in kwargs.items() if isinstance(value, KVCache)), None)
    if name is None or any(value is kwargs[name] for value in inputs.values()):
        return inputs
    if any(isinstance(value, Cache) for value in inputs.values()):
        raise UnreadCacheError(_message(type(model).__name__, "prepares a forward pass with another cache"))
    if missing := _missing_tokens(inputs):
        raise UnreadCacheError(
            f"kv_cache: {type(model).__name__} computes its cache anew at this length, and {missing} tokens of the "
            "text are not among the inputs; pass the whole text at once, without prefill_chunk_size"
        )
    cache = kwargs[name]
    cache.reset()
    inputs[name] = cache
    return inputs


def _missing_tokens(inputs: dict[str, Any]) -> int:
    """Return how many tokens lie before the inputs of a forward pass, by their mask or their positions."""
    mask, ids, positions = (inputs.get(key) for key in ("attention_mask", "input_ids", "position_ids"))
    if isinstance(mask, Tensor) and isinstance(ids, Tensor):
        return mask.shape[-1] - ids.shape[1]
    first = int(positions[..., 0].min()) if isinstance(positions, Tensor) else 0
    return first if first > 1 else 0  # 1 is what padding may have


def _generate(inner: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what `generate` returns; UnreadCacheError unless its cache has seen the text."""
    outer = vars(model).pop(_IN_USE, None)
    handed = cache_of(kwargs)
    if handed is not None:
        use(model, handed)
    try:
        output = inner(*args, **kwargs)
        cache = vars(model).get(_IN_USE)
    finally:
        vars(model).pop(_IN_USE, None)
        if outer is not None:
            use(model, outer)
    if cache is None:
        return output
    returned = getattr(output, "past_key_values", None)
    tokens = (output if isinstance(output, Tensor) else output.sequences).shape[1]
    seen = max(_lengths(cache).values(), default=tokens)
    if seen < tokens - 1 or (returned is not None and returned is not cache):
        where = f"generated a text of {tokens} tokens, of which its cache has seen {seen}"
        raise UnreadCacheError(_message(type(model).__name__, where))
    return output


def _check_pass(model: str, cache: KVCache, before: dict[int, int], count: int, output: Any) -> None:
    """Raise UnreadCacheError unless a forward pass of `count` tokens has returned the cache and filled it."""
    returned = getattr(output, "past_key_values", None)
    if returned is not None and returned is not cache:
        raise UnreadCacheError(_message(model, f"returns a {type(returned).__name__} in place of its cache"))
    added = max((length - before[index] for index, length in _lengths(cache).items()), default=count)
    if count >= 0 and added != count:
        raise UnreadCacheError(_message(model, f"has read {count} tokens and put {added} into its cache"))


def _message(model: str, what: str) -> str:
    return (
        f"kv_cache: {model} {what}, so that nothing is saved by it; remove kv_cache, or generate with use_cache=False"
    )


def _lengths(cache: KVCache) -> dict[int, int]:
    """Return how many tokens each coded layer has seen, by layer number."""
    return {i: layer.seen for i, layer in enumerate(cache.layers) if isinstance(layer, CodedLayer)}


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of tokens of a forward pass; -1 where the inputs do not tell."""
    inputs = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
    return next((x.shape[1] for x in inputs if isinstance(x, Tensor) and x.dim() > 1), -1)
