"""Read blocks, and check that a program of each gives what its own module gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from compress.runtime.step.assemble import Assembly, Turns
from compress.runtime.step.caches import Held
from compress.runtime.step.memory import Memory
from compress.runtime.step.reading import BlockCall
from compress.runtime.step.structure import BlockParts, UnreadableBlockError, read

TRIES = 2  # random states of a block: what a router decides may be close
CACHED = 5  # random tokens before them
LARGEST_SCALE = 4  # states over what a block adds to them, root mean squares: more would hide it
# Of what a block adds to its input, and of its output, by the type: rounding in other places.
BOUNDS = {torch.float32: (1e-3, 1e-5), torch.float16: (0.01, 2e-3), torch.bfloat16: (0.04, 1 / 64)}


def read_block(call: BlockCall, turns: tuple[Tensor, Tensor] | None, like: Tensor) -> tuple[BlockParts, int]:
    """Return the parts of a block and how many channels of a head it turns; UnreadableBlockError if it cannot be.

    turns: cos and sin [1 or rows, 1, turned] that the model has given it. like: hidden states [rows, 1, hidden].
    """
    states = _random(like.shape, 0, like.dtype) * call.scale
    heads = _heads(call, states)
    states = _random(like.shape, 0, like.dtype) * call.scale
    parts = read(call.block, lambda twin: _call(call, states, _cache(call, heads, 0, states.dtype), twin), states)
    for turned in _widths(turns):
        if any(_agrees(call, parts, turns, turned, like, seed) for seed in range(TRIES)):
            return parts, turned
    raise UnreadableBlockError(f"{type(call.block).__name__} does not give what was read of it")


def _widths(turns: tuple[Tensor, Tensor] | None) -> Iterator[int]:
    if turns is not None and turns[0].shape[-1] % 2 == 0:
        yield turns[0].shape[-1]
    yield 0


def _heads(call: BlockCall, states: Tensor) -> tuple[int, int]:
    """Return heads and width of the keys that a block stores; its states become so small that what it adds counts."""
    cache = DynamicCache()
    added = float((_call(call, states, cache).float() - states.float()).square().mean().sqrt())
    if 0 < added < call.scale / LARGEST_SCALE:
        call.scale = added * LARGEST_SCALE
    held: list[Any] = cache.layers
    layers = [layer for layer in held if layer.is_initialized and layer.keys.numel()]
    if len(layers) != 1 or layers[0].keys.dim() != 4 or layers[0].keys.shape != layers[0].values.shape:
        raise UnreadableBlockError("a block does not store keys and values of the same shape")
    call.layer = held.index(layers[0])
    return layers[0].keys.shape[1], layers[0].keys.shape[3]


def _cache(call: BlockCall, heads: tuple[int, int], seed: int, dtype: torch.dtype) -> DynamicCache:
    cache, rows = DynamicCache(), call.rows
    keys, values = (_random((rows, heads[0], CACHED, heads[1]), seed + i, dtype) for i in (11, 12))
    cache.update(keys, values, call.layer)
    return cache


def _call(call: BlockCall, states: Tensor, cache: DynamicCache, block: nn.Module | None = None) -> Tensor:
    """Return what a block, or its twin, makes of states [rows, 1, hidden] with a cache of its own."""
    own = {name: value for name, value in call.kwargs.items() if not isinstance(value, DynamicCache)}
    names = [name for name, value in call.kwargs.items() if isinstance(value, DynamicCache)]
    own = {**own, "attention_mask": None, **dict.fromkeys(names, cache)}
    output = (block or call.block)(states, **own)
    return output[0] if isinstance(output, tuple) else output


def _agrees(call: BlockCall, parts: BlockParts, turns: Any, turned: int, like: Tensor, seed: int) -> bool:
    """Return whether a program of one block gives what the block gives, to the output and to its cache."""
    dtype, rows = like.dtype, like.shape[0]
    states = _random(like.shape, seed + 1, dtype) * call.scale
    heads = (parts.attention.stored, parts.attention.width)
    caches = [_cache(call, heads, seed, dtype) for _ in range(2)]
    expected = _call(call, states, caches[0])
    memory = Memory(rows, 1, dtype, 1)
    assembly = Assembly(memory, like.shape[2])
    kept: Turns = None if turns is None else (turns[0].reshape(-1, turned or 1), turns[1].reshape(-1, turned or 1))
    assembly.add_attention(parts, 0, kept, turned)
    assembly.add_mlp(parts)
    steps, layers = assembly.finish(1), [_layer(caches[1], call)]
    held = Held(layers)
    held.prepare(memory, [parts.attention.window], None, CACHED)
    steps.reserve(held.longest)
    assembly.states.copy_(states.view(rows, -1))
    steps.run()
    held.append(layers, 1)
    of_change, of_all = BOUNDS[dtype]
    got, wanted, before = (each.double().view(rows, -1) for each in (assembly.states, expected, states))
    bound = of_change * (wanted - before).norm() + of_all * wanted.norm()
    cached = _layer(caches[0], call)
    pairs = ((layers[0].keys, cached.keys), (layers[0].values, cached.values))
    is_stored = all(
        mine.shape == own.shape and bool((mine.double() - own.double()).norm() <= of_change * own[..., -1:, :].norm())
        for mine, own in pairs
    )
    return is_stored and bool((got - wanted).norm() <= bound)


def _layer(cache: DynamicCache, call: BlockCall) -> Any:
    return cache.layers[call.layer]


def _random(shape: Any, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
