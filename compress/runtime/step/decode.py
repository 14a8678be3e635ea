"""Decode a few new tokens of each sequence by a program, where the model and the call allow it.

`install(model)` marks the bodies of a model, the modules that hold its blocks, and lets the forward function of their
classes ask for the mark. A pass of up to 16 new tokens together, of one sequence or several, a plain cache and no
gradient is run by a program. Before the first such pass one of a single token is watched; each block that was read is
compared with its own module. A program is made for each shape of passes (sequences, new tokens, threads), for each set
of sublayers that are passed over and for each level of the weights, at the first pass of the kind; which one runs is a
look-up. Whatever is unusual is left to transformers, in this pass and only in this.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from compress.kernels import llvm
from compress.runtime import bypass
from compress.runtime.bodies import blocks_of, bodies
from compress.runtime.linear import PackedModule
from compress.runtime.step.caches import Held
from compress.runtime.step.programs import BodyReading, SharedSpace, StepProgram, read_body
from compress.runtime.step.requests import StepRequest, read_request
from compress.runtime.step.structure import UnreadableBlockError
from compress.runtime.step.unchanged import Unchanged

MARK = "_compress_step"
MAX_PROGRAMS = 64  # the least recently used one makes way
# What may be raised where a model is of another shape than what is read.
FAILURES = (UnreadableBlockError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_log = logging.getLogger(__name__)


class ProgramKey(NamedTuple):
    """What a program is made for."""

    batch: int
    new: int  # tokens of each sequence
    threads: int
    passed: frozenset[bypass.Sublayer] = bypass.NOTHING  # sublayers that do not run
    levels: tuple[int | None, ...] = ()  # of the weights that have levels


class StepState:
    """What is known of a body. Copies begin anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def __reduce__(self) -> Any:
        return StepState, ()

    def forget(self) -> None:
        """Let go of all programs and buffers."""
        self.running: dict[ProgramKey, StepProgram] = {}
        self._without: set[ProgramKey] = set()  # passes that there cannot be a program for
        self.refused = ""  # why there is no program at all
        self._reading: BodyReading | None = None
        self._spaces: dict[tuple[int, int], SharedSpace] = {}
        self._unchanged: Unchanged | None = None
        self._leveled: list[dict[str, Any]] = []  # attributes of the modules whose weights have levels
        self._held: WeakKeyDictionary[Any, Held] = WeakKeyDictionary()
        self._owner: int = 0

    def forward(self, body: nn.Module, original: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Return what the body's own forward pass returns, by a program where there is one."""
        if not self._lock.acquire(blocking=False):
            return original(body, **kwargs)
        try:
            output = self._try(body, original, kwargs)
        finally:
            self._lock.release()
        return original(body, **kwargs) if output is None else output

    def _try(self, body: nn.Module, original: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Return what a program gives, None where there is none."""
        blocks = blocks_of(body)
        request = None if blocks is None else read_request(body, len(blocks), kwargs)
        if request is None or blocks is None or not self._is_current(body):
            return None
        with torch.inference_mode(False), torch.no_grad():
            if self._reading is None and not self._read(body, blocks, original, request):
                return None
            assert self._reading is not None
            if request.new > 1 and not self._reading.is_causal:
                return None
            shape = len(request.given), request.new, torch.get_num_threads()
            key = ProgramKey(*shape, bypass.active(body), tuple([own["level"] for own in self._leveled]))
            program = self._program(self._reading, key)
            held = None if program is None else self._held_of(self._reading, request)
            return None if program is None or held is None else program.run(request, held)

    def _is_current(self, body: nn.Module) -> bool:
        """Return whether there may be a program; what was known of other modules is forgotten."""
        if self._owner not in (0, id(body)):
            return False  # a copy of the body that shares this object
        if self._unchanged is not None and not self._unchanged.holds():
            self.forget()
        return not self.refused

    def _read(self, body: nn.Module, blocks: nn.ModuleList, original: Callable[..., Any], request: StepRequest) -> bool:
        """Read the body; return whether that was possible."""
        if request.given.is_floating_point():
            return False  # in another pass: embeddings do not show what embeds
        self._owner = id(body)
        beside = [child for child in body.children() if child is not blocks and _is_read(child)]
        known, own = [*blocks.modules(), *beside], [body._modules]
        self._unchanged = Unchanged(known, own)
        if not self._unchanged.is_plain:
            self.refused = "hooks, or tensors that are elsewhere"
            return False
        try:
            all_run = bypass.bypassed(body, ()) if bypass.active(body) else nullcontext()
            with llvm.without_collections(), all_run:
                self._reading = read_body(body, blocks, original, request)
        except FAILURES as error:
            self.refused = f"{type(error).__name__}: {error}"
            _log.info("%s decodes without a program: %s", type(body).__name__, self.refused)
        self._unchanged = Unchanged(known, own)
        self._leveled = [vars(each) for each in known if isinstance(each, PackedModule) and each.known_levels]
        return self._reading is not None

    def _held_of(self, reading: BodyReading, request: StepRequest) -> Held | None:
        """Return the buffers of a cache; None for one of other sizes or types."""
        held = self._held.get(request.cache)
        if held is None or not held.is_of(request.layers):
            if not reading.fits(request.layers, len(request.given)):
                return None
            self._held[request.cache] = held = Held(request.layers)
        return held

    def _program(self, reading: BodyReading, key: ProgramKey) -> StepProgram | None:
        """Return the program for a kind of passes, None where there cannot be one."""
        if key in self.running:
            self.running[key] = program = self.running.pop(key)
            return program
        if key in self._without:
            return None
        shape = key.batch, key.new
        try:
            with llvm.without_collections():
                if shape not in self._spaces:
                    self._spaces[shape] = SharedSpace(reading, *shape)
                program = StepProgram(self._spaces[shape], key.threads, key.passed, key.levels)
                if self._unchanged is not None:
                    self._unchanged.note_kernels()
        except FAILURES as error:
            _log.info("passes of %d x %d tokens run without a program: %s", *shape, error)
            self._without.add(key)
            return None
        self.running[key] = program
        if len(self.running) > MAX_PROGRAMS:
            del self.running[next(iter(self.running))]
        return program


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
