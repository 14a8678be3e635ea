"""Read a body once, and make programs of it: for each shape of passes, and for each part of the model that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from compress.runtime.bypass import ATTENTION, KINDS, Sublayer
from compress.runtime.step.assemble import Assembly, Steps
from compress.runtime.step.caches import Held
from compress.runtime.step.check import read_block
from compress.runtime.step.memory import Memory
from compress.runtime.step.reading import ModelReading, PassWatch, Turning
from compress.runtime.step.requests import StepRequest
from compress.runtime.step.structure import BlockParts, UnreadableBlockError

# A program with a smaller part of its linears compiled gains nothing.
LEAST_COMPILED = 0.5
FULL, WINDOWED = "full_attention", "sliding_attention"  # kinds of layers, as configurations call them
Levels = tuple[int | None, ...]


@dataclass(frozen=True)
class BlockReading:
    """What a block is made of, and its rotary embedding: which of the body's, for how many channels of a head."""

    parts: BlockParts
    turning: int  # -1: none
    turned: int


@dataclass(frozen=True)
class BodyReading:
    """What a body does in every pass, whatever its shape."""

    blocks: list[BlockReading]
    turnings: list[Turning]
    embed: nn.Module
    factor: float  # embeddings are multiplied by it
    norm: nn.Module | None
    output: type
    hidden: int
    dtype: torch.dtype

    @property
    def windows(self) -> list[int]:
        """Return how many positions each block sees; 0: all."""
        return [block.parts.attention.window for block in self.blocks]

    @property
    def is_causal(self) -> bool:
        """Return whether no token sees those behind it."""
        return all(getattr(block.parts.attention.module, "is_causal", True) for block in self.blocks)

    def fits(self, layers: list[Any], batch: int) -> bool:
        """Return whether programs read and write such layers of a cache."""
        return len(layers) == len(self.blocks) and all(
            _fits(layer, block.parts, batch, self.dtype) for layer, block in zip(layers, self.blocks, strict=True)
        )


def _fits(layer: Any, parts: BlockParts, batch: int, dtype: torch.dtype) -> bool:
    own = parts.attention
    if layer.is_sliding and layer.sliding_window != own.window:  # the cache forgets what attention sees
        return False
    return all(
        each.is_cpu and each.dtype == dtype and (*each.shape[:2], each.shape[3]) == (batch, own.stored, own.width)
        for each in (layer.keys, layer.values)
    )


def read_body(body: Any, blocks: nn.ModuleList, original: Callable[..., Any], request: StepRequest) -> BodyReading:
    """Watch a pass of one token with a cache of its own; UnreadableBlockError for what is of another shape."""
    ids = request.given[:1, -1:].clone()
    positions = torch.full((1, 1), request.seen, dtype=torch.int64, device="cpu")
    watch, cache = PassWatch(body, blocks), DynamicCache()
    watch.run(lambda: original(body, input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True))
    reading = watch.check()
    last = reading.output["last_hidden_state"]
    if reading.embed is None or last.dtype != request.layers[0].keys.dtype:
        raise UnreadableBlockError("embeddings, or the type of the cache, are unusual")
    if any(each.dtype != last.dtype for turning in reading.turnings for each in turning.result):
        raise UnreadableBlockError("rotary factors have another type than hidden states")
    read = [_read_block(reading, number, last) for number in range(len(blocks))]
    _check_windows(body.config, [block.parts.attention.window for block in read])
    sizes = last.shape[2], last.dtype
    return BodyReading(
        read, reading.turnings, reading.embed, reading.factor, reading.norm, type(reading.output), *sizes
    )


def _read_block(reading: ModelReading, number: int, last: Tensor) -> BlockReading:
    call = reading.calls[number]
    turns = None if call.turning < 0 else reading.turnings[call.turning].result
    kept = (
        None if turns is None else (turns[0].reshape(-1, turns[0].shape[-1]), turns[1].reshape(-1, turns[1].shape[-1]))
    )
    parts, turned = read_block(call, kept, last)
    if call.layer != number:
        raise UnreadableBlockError("blocks and layers of the cache are not in the same order")
    return BlockReading(parts, call.turning, turned)


def _check_windows(config: Any, windows: list[int]) -> None:
    """Raise UnreadableBlockError if masks may hide more than attention was told: positions out of a window or chunk."""
    width = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or [WINDOWED if width else FULL] * len(windows)
    for window, kind in zip(windows, kinds, strict=True):
        if kind not in (FULL, WINDOWED) or window != (width if kind == WINDOWED else 0):
            raise UnreadableBlockError(f"attention of the kind {kind} is told a window of {window} positions")


class Workspace:
    """What all programs of passes of one shape share: memory, rotary factors of the new tokens, calls of sublayers."""

    def __init__(self, reading: BodyReading, batch: int, new: int) -> None:
        self.reading = reading
        self.memory = Memory(batch, new, reading.dtype, len(reading.blocks))
        self.turns: list[tuple[Tensor, Tensor]] = []
        for turning in reading.turnings:
            cos, sin = (torch.zeros(batch * new, each.shape[-1], dtype=each.dtype) for each in turning.result)
            self.turns.append((cos, sin))
        self._sublayers: dict[tuple[int, str, Levels], Assembly] = {}

    def sublayer(self, number: int, kind: str, levels: Levels) -> Assembly:
        """Return the calls of the "attention" or the "mlp" of a block at the present levels of the weights."""
        known = self._sublayers.get((number, kind, levels))
        if known is None:
            block, known = self.reading.blocks[number], Assembly(self.memory, self.reading.hidden)
            turns = None if block.turning < 0 else self.turns[block.turning]
            if kind == ATTENTION:
                known.add_attention(block.parts, number, turns, block.turned)
            else:
                known.add_mlp(block.parts)
            self._sublayers[number, kind, levels] = known
        return known

    def turn(self, turnings: list[Turning], states: Tensor, positions: Tensor) -> None:
        """Write the rotary factors of positions [1 or batch, new]."""
        shape = self.memory.batch, self.memory.new, -1
        for turning, kept in zip(turnings, self.turns, strict=True):
            for own, made in zip(kept, turning.again(states, positions), strict=True):
                own.view(shape).copy_(made)


class StepProgram:
    """A program of passes of one shape, in which some sublayers may not run."""

    def __init__(self, space: Workspace, threads: int, passed: frozenset[Sublayer], levels: Levels) -> None:
        """passed: sublayers that are passed over; levels: those that the weights have now.

        UnreadableBlockError if too little is compiled.
        """
        self.space, self.memory, self.reading = space, space.memory, space.reading
        self.blanks = sorted(number for number, kind in passed if kind == ATTENTION)
        assembly = Assembly(space.memory, self.reading.hidden)
        for number in range(len(self.reading.blocks)):
            for kind in KINDS:
                if (number, kind) not in passed:
                    assembly.extend(space.sublayer(number, kind, levels))
            if assembly.compiled < LEAST_COMPILED * assembly.linears:  # of the first blocks, which is as good as of all
                raise UnreadableBlockError(f"{assembly.compiled} of {assembly.linears} linears are compiled")
        self.states = assembly.states
        norm = self.reading.norm
        self.final = assembly.states if norm is None else assembly.add_norm(norm)
        self.steps: Steps = assembly.finish(threads)

    def run(self, request: StepRequest, held: Held) -> Any:
        """Return what the body returns; the cache, which `held` is the buffers of, has the new tokens then."""
        reading, memory = self.reading, self.memory
        held.prepare(memory, reading.windows, request.pads, request.seen)
        held.blank(self.blanks, memory.new)
        self.steps.reserve(held.longest)
        given = request.given
        states = given if given.is_floating_point() else reading.embed(given)
        states = states if reading.factor == 1 else states * reading.factor
        self.states.copy_(states.view_as(self.states))
        positions = request.positions
        if positions is None:
            positions = torch.arange(request.seen, request.seen + memory.new, device="cpu").unsqueeze(0)
        self.space.turn(reading.turnings, states, positions)
        self.steps.run()
        held.append(request.layers, memory.new)
        final = memory.by_sequence(self.final.clone())
        return reading.output(last_hidden_state=final, past_key_values=request.cache)
