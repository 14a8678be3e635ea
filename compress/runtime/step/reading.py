"""Read a whole model by one of its own forward passes: what it embeds, turns, runs and normalizes, in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.runtime.step.structure import UnreadableBlockError

TURNS = "position_embeddings"  # among the arguments of blocks


@dataclass
class BlockCall:
    """How the model calls a block."""

    block: nn.Module
    kwargs: dict[str, Any]
    scale: float  # root mean square of the hidden states that it read
    rows: int  # sequences
    turning: int = -1  # which of the rotary modules' results it is given; -1: none
    layer: int = 0  # of the cache, that it stores its keys in


@dataclass
class Turning:
    """How the model calls a rotary module: with hidden states and positions in these places."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: tuple[Tensor, Tensor]

    def again(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of other positions [B, 1]."""

        def replace(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return states if value.is_floating_point() else positions

        args = [replace(value) for value in self.args]
        cos, sin = self.module(*args, **{name: replace(value) for name, value in self.kwargs.items()})
        return cos, sin


@dataclass
class ModelReading:
    """What a forward pass has shown."""

    embed: nn.Module | None = None
    factor: float = 1.0  # embeddings are multiplied by it
    calls: list[BlockCall] = field(default_factory=list)
    turnings: list[Turning] = field(default_factory=list)
    norm: nn.Module | None = None
    output: Any = None  # of the whole


class PassWatch:
    """Watches a forward pass of a body, the module that holds the blocks, in the thread that makes the watch."""

    def __init__(self, body: nn.Module, blocks: nn.ModuleList) -> None:
        self.body, self.blocks = body, blocks
        self.reading = ModelReading()
        self._alive: list[Any] = []
        self._last: Tensor | None = None  # the newest hidden states
        self._embedded: Tensor | None = None
        self._normed: Tensor | None = None
        self._error: UnreadableBlockError | None = None
        self._thread = threading.get_ident()  # other threads may run the same modules

    def run(self, forward: Callable[[], Any]) -> Any:
        """Return what the forward pass returns."""
        with ExitStack() as stack:
            for block in self.blocks:
                before = block.register_forward_pre_hook(self._enter, with_kwargs=True)
                after = block.register_forward_hook(self._leave)
                stack.callback(before.remove)
                stack.callback(after.remove)
            for child in self.body.children():
                if child is not self.blocks:
                    stack.callback(child.register_forward_hook(self._beside, with_kwargs=True).remove)
            self.reading.output = forward()
        return self.reading.output

    def _enter(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._is_elsewhere():
            return
        try:
            self._see_call(block, args, kwargs)
        except UnreadableBlockError as error:  # the pass goes on
            self._error = self._error or error

    def _see_call(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        named = dict(kwargs)
        states = args[0] if args else named.pop("hidden_states", None)
        if len(args) > 1 or not isinstance(states, Tensor):
            raise UnreadableBlockError("a block is not given hidden states first and the rest by name")
        call = BlockCall(block, named, float(states.float().square().mean().sqrt()), len(states))
        turns = named.get(TURNS)
        for number, each in enumerate(self.reading.turnings):
            if isinstance(turns, tuple) and turns[0] is each.result[0] and turns[1] is each.result[1]:
                call.turning = number
        if turns is not None and call.turning < 0:
            raise UnreadableBlockError("a block is given rotary factors that no module of the body has made")
        if self._last is None and self._embedded is not None:
            self.reading.factor = _factor(self._embedded, states)
        elif self._last is not None and states is not self._last:
            raise UnreadableBlockError("something lies between two blocks")
        self._last = states
        self.reading.calls.append(call)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        if not self._is_elsewhere():
            self._last = output[0] if isinstance(output, tuple) else output

    def _is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def _beside(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._is_elsewhere():
            return
        self._alive.append(output)
        if isinstance(output, tuple) and len(output) == 2 and all(isinstance(each, Tensor) for each in output):
            self.reading.turnings.append(Turning(module, args, dict(kwargs), output))
        elif self._last is None and isinstance(module, nn.Module) and isinstance(output, Tensor):
            self.reading.embed, self._embedded = module, output
        elif isinstance(output, Tensor) and self._last is not None and args and args[0] is self._last:
            self.reading.norm, self._normed = module, output

    def check(self) -> ModelReading:
        """Return what was seen; UnreadableBlockError where the pass does more than is read."""
        if self._error is not None:
            raise self._error
        reading, output = self.reading, self.reading.output
        if [call.block for call in reading.calls] != list(self.blocks):
            raise UnreadableBlockError("the blocks do not run once each, in order")
        if not isinstance(output, Mapping) or set(output.keys()) - {"last_hidden_state", "past_key_values"}:
            raise UnreadableBlockError("the body returns more than hidden states and a cache")
        last = self._last if reading.norm is None else self._normed
        if output["last_hidden_state"] is not last:
            raise UnreadableBlockError("what the body returns is not its norm's")
        return reading


def _factor(embedded: Tensor, states: Tensor) -> float:
    """Return what embeddings are multiplied by before the first block, 1 for nothing."""
    if embedded is states or (embedded.data_ptr() == states.data_ptr() and embedded.shape == states.shape):
        return 1.0
    if embedded.shape == states.shape:
        place = embedded.abs().flatten().argmax()
        factor = float(states.flatten()[place].double() / embedded.flatten()[place].double())  # NaN of 0 / 0
        if torch.equal(embedded * factor, states):
            return factor
    raise UnreadableBlockError("embeddings are changed before the first block")
