"""Make sure that a model reads and writes the cache that it was handed.

`generate` lets the model prepare the inputs of each forward pass. A model whose rotary factors change with the length
of the text drops its cache there once the text is longer than the first factors reach, and computes the whole text
anew. The next pass would begin with transformers' own cache. `attach` empties the compressed cache instead and hands it
back, so that it is filled with the keys of the new factors.

Three checks hold for every model: a forward pass returns the cache that it was given, it adds as many tokens to it as
it read, and `generate` ends with a cache that has seen every token but the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin

from compress.errors import UnreadCacheError
from compress.kv.cache import CodedLayer, KVCache

_PREPARE, _GENERATE = "prepare_inputs_for_generation", "generate"
_IN_USE = "_compress_kv_in_use"  # the cache of the running call of `generate`


class _Undo:
    """Takes wrapped methods off a model, as a hook's handle does."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model, self.names = model, names

    def remove(self) -> None:
        for name in self.names:
            vars(self.model).pop(name, None)


def attach(model: nn.Module) -> list[Any]:
    """Add the checks to a model and return handles that remove them."""
    lengths: list[tuple[KVCache, dict[int, int], int] | None] = []

    def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = cache_of(kwargs)
        lengths.append(None if cache is None else (cache, _lengths(cache), _count(args, kwargs)))

    def leave(module: Any, args: Any, output: Any) -> None:
        before = lengths.pop() if lengths else None
        if before is not None and output is not None:  # None: the forward pass has raised
            _check_pass(type(model).__name__, *before, output)

    handles: list[Any] = [model.register_forward_pre_hook(enter, with_kwargs=True)]
    handles.append(model.register_forward_hook(leave, always_call=True))
    wrappers = {_PREPARE: _prepare, _GENERATE: _generate}
    named = [name for name in wrappers if hasattr(type(model), name)]
    for name in named:
        setattr(model, name, MethodType(_wrapped(wrappers[name], getattr(type(model), name)), model))
    return [*handles, _Undo(model, [*named, _IN_USE])]


def _wrapped(wrapper: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method with the signature of `method` that calls `wrapper` with it and the model first."""

    @wraps(method)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(partial(method, model), model, *args, **kwargs)

    return call


def cache_of(kwargs: dict[str, Any]) -> KVCache | None:
    """Return the compressed cache among the arguments; its name differs between models."""
    return next((value for value in kwargs.values() if isinstance(value, KVCache)), None)


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
    given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
    return next((x.shape[1] for x in given if isinstance(x, Tensor) and x.dim() > 1), -1)
