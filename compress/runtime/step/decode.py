"""Decode one new token of each sequence by a program, where the model and the call allow it.

`install(model)` marks the bodies of a model, the modules that hold its blocks, and lets the forward function of their
classes ask for the mark. A pass of up to MOST_ROWS sequences with one new token each, a plain cache and no gradient is
run by a program. Before the first such pass an ordinary one is watched; the program is made from what was seen, and
each block is compared with its own module. Whatever is unusual is left to transformers, in this pass and only in this.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from compress.kernels import llvm
from compress.runtime import bypass
from compress.runtime.bodies import blocks_of, bodies
from compress.runtime.step.assemble import Assembly, Steps, Turns
from compress.runtime.step.caches import Held, layers_of
from compress.runtime.step.check import read_block
from compress.runtime.step.memory import Memory
from compress.runtime.step.reading import ModelReading, PassWatch, Turning
from compress.runtime.step.structure import UnreadableBlockError
from compress.runtime.step.unchanged import Unchanged

MARK = "_compress_step"
MOST_ROWS = 16
# A program with a smaller part of its linears compiled gains nothing.
LEAST_COMPILED = 0.5
TYPES = (torch.bfloat16, torch.float16, torch.float32)
USED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache"}
# Layers that forget tokens count them here.
TOKEN_COUNT = "cumulative_length"
FULL, WINDOWED = "full_attention", "sliding_attention"  # kinds of layers, as configurations call them
FLAGS = ("output_attentions", "output_hidden_states", "output_router_logits")
# What may be raised where a model is of another shape than what is read.
FAILURES = (UnreadableBlockError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_log = logging.getLogger(__name__)


@dataclass
class _StepRequest:
    """A forward pass of one new token of each sequence."""

    given: Tensor  # token ids [rows, 1], or embeddings
    cache: Any
    layers: list[Any]
    seen: int  # tokens in the cache
    positions: Tensor | None
    pads: Tensor | None  # padding at the left [rows], None for none


@dataclass
class _StepProgram:
    """A program for a number of sequences."""

    memory: Memory
    steps: Steps
    states: Tensor
    final: Tensor
    windows: list[int]
    turns: list[tuple[Tensor, Tensor]]
    turnings: list[Turning]
    embed: nn.Module
    factor: float
    output: type
    heads: list[tuple[int, int]]  # of keys, and their width, by layer
    bound: Any = None  # refers to the buffers that the tables say; None after an error, when they may say anything

    def fits(self, layers: list[Any]) -> bool:
        """Return whether the program reads and writes such layers of a cache."""
        rows, dtype = self.memory.rows, self.memory.dtype
        return len(layers) == len(self.heads) and all(
            each.is_cpu and each.dtype == dtype and (*each.shape[:2], each.shape[3]) == (rows, stored, width)
            for layer, (stored, width) in zip(layers, self.heads, strict=True)
            for each in (layer.keys, layer.values)
        )


class StepState:
    """What is known of a body. Copies begin anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def __reduce__(self) -> Any:
        return StepState, ()

    def forget(self) -> None:
        """Let go of all programs and buffers."""
        self.running: dict[tuple[int, int], _StepProgram] = {}
        self.refused = ""  # why there is no program
        self._unchanged: Unchanged | None = None
        self._held: WeakKeyDictionary[Any, Held] = WeakKeyDictionary()
        self._owner: int = 0

    def forward(self, body: nn.Module, original: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Return what the body's own forward pass returns, by a program where there is one."""
        if not self._lock.acquire(blocking=False):
            return original(body, **kwargs)
        try:
            asked = _request(body, kwargs)
            if asked is None or bypass.active(body) or not self._is_current(body):
                return original(body, **kwargs)
            key = len(asked.given), torch.get_num_threads()
            if key not in self.running:
                return self._read(body, original, kwargs, asked, key)
            output = self._run(self.running[key], asked)
            return original(body, **kwargs) if output is None else output
        finally:
            self._lock.release()

    def _is_current(self, body: nn.Module) -> bool:
        """Return whether there may be a program; what was known of other modules is forgotten."""
        if self._owner not in (0, id(body)):
            return False  # a copy of the body that shares this object
        if self._unchanged is not None and not self._unchanged.holds():
            self.forget()
        return not self.refused

    def _read(
        self, body: nn.Module, original: Callable[..., Any], kwargs: dict[str, Any], asked: _StepRequest, key: Any
    ) -> Any:
        """Run an ordinary pass, and make a program of what it shows."""
        blocks = blocks_of(body)
        assert blocks is not None
        watch, self._owner = PassWatch(body, blocks), id(body)
        beside = [child for child in body.children() if child is not blocks and _is_read(child)]
        known, own = [*blocks.modules(), *beside], [body._modules]
        unchanged = Unchanged(known, own)
        if not unchanged.is_plain:
            self.refused, self._unchanged = "hooks, or tensors that are elsewhere", unchanged
            return original(body, **kwargs)
        before = [(layer.keys, layer.values, getattr(layer, TOKEN_COUNT, None)) for layer in asked.layers]
        output = watch.run(lambda: original(body, **kwargs))
        try:
            with torch.inference_mode(False), torch.no_grad(), llvm.without_collections():
                self.running[key] = _make(watch.check(), asked, key[1], body.config)
        except FAILURES as error:
            self.refused = f"{type(error).__name__}: {error}"
            _log.info("%s decodes without a program: %s", type(body).__name__, self.refused)
            self._unchanged = Unchanged(known, own)
            return output
        self._unchanged = Unchanged(known, own)
        for layer, (keys, values, count) in zip(asked.layers, before, strict=True):
            layer.keys, layer.values = keys, values
            if count is not None:
                setattr(layer, TOKEN_COUNT, count)
        return self._run(self.running[key], asked)  # so that every pass is rounded alike

    def _run(self, running: _StepProgram, asked: _StepRequest) -> Any:
        """Return what the program gives; None for a cache of other sizes or types."""
        memory, layers = running.memory, asked.layers
        held = self._held.get(asked.cache)
        is_new = held is None or not held.is_of(layers)
        if held is None or is_new:
            if not running.fits(layers):
                return None
            with torch.inference_mode(False), torch.no_grad():
                self._held[asked.cache] = held = Held(layers)
        is_bound = running.bound is not None and running.bound() is held
        running.bound = None
        held.prepare(memory, running.windows, asked.pads, asked.seen, is_new or not is_bound)
        running.steps.reserve(held.longest)
        states = running.embed(asked.given) if not asked.given.is_floating_point() else asked.given
        states = states if running.factor == 1 else states * running.factor
        running.states.copy_(states.view_as(running.states))
        positions = asked.positions
        if positions is None:
            positions = torch.full((1, 1), asked.seen, dtype=torch.int64, device="cpu")
        for turning, (cos, sin) in zip(running.turnings, running.turns, strict=True):
            made = turning.again(states, positions)
            cos.copy_(made[0].view(-1, cos.shape[1]))
            sin.copy_(made[1].view(-1, sin.shape[1]))
        running.steps.run()
        held.append(layers)
        running.bound = weakref.ref(held)  # which lives as long as the cache
        final = running.final.clone().unsqueeze(1)
        return running.output(last_hidden_state=final, past_key_values=asked.cache)


def _request(body: nn.Module, kwargs: dict[str, Any]) -> _StepRequest | None:
    """Return what a pass is asked for if a program may run it."""
    given = _new_tokens(kwargs)
    if given is None or not _is_usual(body, kwargs):
        return None
    blocks, cache = blocks_of(body), kwargs.get("past_key_values")
    layers = None if blocks is None else layers_of(cache, len(blocks))
    if layers is None or cache is None:
        return None
    seen, first = layers[0].get_seq_length(), layers[0].keys
    if len(first) != len(given) or first.dtype not in TYPES or not first.is_cpu:
        return None
    if given.is_floating_point() and given.dtype != first.dtype:
        return None
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != 1):
        return None
    if mask is None or (isinstance(mask, dict) and all(value is None for value in mask.values())):
        return _StepRequest(given, cache, layers, seen, positions, None)
    pads = _padding(mask, len(given), seen + 1)
    return (
        None
        if pads is None
        else _StepRequest(given, cache, layers, seen, positions, pads if bool(pads.any()) else None)
    )


def _new_tokens(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the new tokens [rows, 1], or their embeddings, where they are few, and one of each sequence."""
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = ids if embeds is None else embeds
    if (ids is None) == (embeds is None) or type(given) is not Tensor or not given.is_cpu:
        return None
    if given.dim() != (2 if embeds is None else 3) or given.shape[1] != 1 or not 0 < len(given) <= MOST_ROWS:
        return None
    return given


def _is_usual(body: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a pass has no gradient, and is asked for hidden states and a cache alone."""
    if body.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.jit.is_tracing():
        return False
    if any(value is not None and value is not False for name, value in kwargs.items() if name not in USED):
        return False
    config: Any = body.config
    uses_cache = kwargs.get("use_cache")
    uses_cache = getattr(config, "use_cache", True) if uses_cache is None else uses_cache
    is_asked_more = not uses_cache or any(getattr(config, flag, False) for flag in FLAGS)
    return not is_asked_more and getattr(config, "return_dict", True) and kwargs.get("return_dict") is not False


def _padding(mask: Any, rows: int, tokens: int) -> Tensor | None:
    """Return how many zeros a mask [rows, tokens] begins with in each row; None if it has others."""
    if not isinstance(mask, Tensor) or mask.shape != (rows, tokens):
        return None
    counted = mask.bool()
    if bool(counted.all()):
        return torch.zeros(rows, dtype=torch.int64, device="cpu")
    pads = (counted.cumsum(-1) == 0).sum(-1)
    is_left = torch.equal(counted.sum(-1) + pads, torch.full_like(pads, tokens))
    return pads if is_left and bool(counted[:, -1].all()) else None


@torch.no_grad()
def _make(reading: ModelReading, asked: _StepRequest, threads: int, config: Any) -> _StepProgram:
    """Return the program of what was read; UnreadableBlockError where there is none."""
    last = reading.output["last_hidden_state"]
    rows, _, hidden = last.shape
    if reading.embed is None or last.dtype != asked.layers[0].keys.dtype:
        raise UnreadableBlockError("embeddings, or the type of the cache, are unusual")
    memory = Memory(rows, last.dtype, len(reading.calls))
    turns = []
    for turning in reading.turnings:
        pair = [each.reshape(-1, each.shape[-1]).expand(rows, -1).clone() for each in turning.result]
        if any(each.dtype != last.dtype for each in pair):
            raise UnreadableBlockError("rotary factors have another type than hidden states")
        turns.append((pair[0], pair[1]))
    assembly = Assembly(memory, hidden, threads)
    windows, heads = list[int](), list[tuple[int, int]]()
    for layer, call in enumerate(reading.calls):
        own: Turns = turns[call.turning] if call.turning >= 0 else None
        parts, turned = read_block(call, own, last)
        if call.layer != layer:
            raise UnreadableBlockError("blocks and layers of the cache are not in the same order")
        assembly.add_block(parts, layer, own, turned)
        windows.append(parts.attention.window)
        heads.append((parts.attention.stored, parts.attention.width))
        if assembly.compiled < LEAST_COMPILED * assembly.linears:  # of the first blocks, which is as good as of all
            raise UnreadableBlockError(f"{assembly.compiled} of {assembly.linears} linears are compiled")
    _check_windows(config, windows, asked.layers)
    final = assembly.states if reading.norm is None else assembly.add_norm(reading.norm)
    output = type(reading.output)
    embed, factor = reading.embed, reading.factor
    steps = assembly.finish()
    states, turnings = assembly.states, reading.turnings
    return _StepProgram(memory, steps, states, final, windows, turns, turnings, embed, factor, output, heads)


def _check_windows(config: Any, windows: list[int], layers: list[Any]) -> None:
    """Raise UnreadableBlockError if masks may hide more than attention was told: positions out of a window or chunk."""
    width = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or [WINDOWED if width else FULL] * len(windows)
    for window, kind, layer in zip(windows, kinds, layers, strict=True):
        if kind not in (FULL, WINDOWED) or window != (width if kind == WINDOWED else 0):
            raise UnreadableBlockError(f"attention of the kind {kind} is told a window of {window} positions")
        if layer.is_sliding and layer.sliding_window != window:
            raise UnreadableBlockError("the cache forgets what attention sees")


def _is_read(child: nn.Module) -> bool:
    """Return whether a program knows where the tensors of a module beside the blocks lie, rather than calling it."""
    is_called = isinstance(child, nn.Embedding) or (child._buffers and not child._parameters)
    return next(child.children(), None) is None and not is_called


def install(model: nn.Module) -> None:
    """Let a model decode by programs; again does no harm."""
    if not llvm.available():
        return
    for body in bodies(model):
        _let_class_ask(type(body))
        vars(body).setdefault(MARK, StepState())


def remove(model: nn.Module) -> None:
    """Let a model decode as transformers does it, and free what programs hold."""
    for module in model.modules():
        vars(module).pop(MARK, None)


def _let_class_ask(kind: type) -> None:
    """Let the forward function of a class ask each module for the mark; those without it run as before."""
    original: Any = kind.__dict__.get("forward")
    if original is None or hasattr(original, MARK):
        return

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args:
            return original(self, *args, **kwargs)
        step = vars(self).get(MARK)
        return original(self, **kwargs) if step is None else step.forward(self, original, kwargs)

    setattr(forward, MARK, True)
    kind.forward = forward  # type: ignore[attr-defined]
