"""Pass over attentions and MLPs of a decoder model for a while, as drafts of speculative decoding do.

    with bypassed(model, {(4, "attention"), (4, "mlp"), (7, "mlp")}):
        model(...)   # these add nothing to the hidden states; their norms are not run either

An attention that is passed over stores zeros in the cache (compress/runtime/zeros.py), so that all layers stay equally
long: they have to be cropped away before another pass without this bypass reads them. An early exit is a set, too.

No family is known by name. The first use watches a pass of one token: which child of a block stores keys and values,
which others have weight matrices (MLP, or router and experts: together they are the "mlp"), and which norms lie
directly before and behind them. A second pass with everything passed over must leave the hidden states what they are,
up to a factor; models of which it does not (norms in the residual stream, keys and values that layers share,
recurrences) are refused. Norms that several sublayers read are run as long as one of these is.

Entering costs an attribute. What a thread passes over is its own. Each forward function of the classes that hold
sublayers and norms then asks for the mark of a module. Not for what torch.compile traces: what is passed over would
become part of the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from compress.errors import UnreadCacheError, UnsupportedModelError, first_line, shown
from compress.runtime import zeros
from compress.runtime.bodies import blocks_of, bodies
from compress.runtime.linear import PackedLinear
from compress.runtime.step.structure import is_reading
from compress.runtime.zeros import ResultShape, StoredShape

MARK = "_compress_bypass"  # attribute of bodies, of their sublayers and norms, and of the classes' forward functions
ATTENTION, MLP = "attention", "mlp"
KINDS = (ATTENTION, MLP)
Sublayer = tuple[int, str]  # number of the block, and "attention" or "mlp"
NOTHING: frozenset[Sublayer] = frozenset()
# What 16 bits round in a block, relative to hidden states for which everything was passed over.
TOLERANCE = 0.02


class Bypass:
    """What can be passed over in a model, and what is, in each thread. A copy begins with nothing passed over."""

    def __init__(self, known: tuple[Sublayer, ...]) -> None:
        self.known = known  # in the order they run
        self._own = threading.local()

    def __reduce__(self) -> Any:
        return Bypass, (self.known,)

    @property
    def active(self) -> frozenset[Sublayer]:
        """Return what this thread passes over."""
        active: frozenset[Sublayer] = getattr(self._own, "active", NOTHING)
        return active

    @active.setter
    def active(self, sublayers: frozenset[Sublayer]) -> None:
        self._own.active = sublayers


@dataclass
class _MarkedModule:
    """A module that is not run where all these sublayers are passed over."""

    bypass: Bypass
    sublayers: frozenset[Sublayer]
    result: ResultShape | None  # None: a norm, which gives what it is given
    stored: StoredShape | None = None

    def forward(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the module returns, or zeros."""
        if not self.sublayers <= self.bypass.active or is_reading():
            return original(module, *args, **kwargs)
        x = zeros.states_of(args, kwargs)
        if self.result is None:
            return x
        cache = zeros.cache_of(args, kwargs)
        if cache is not None and self.stored is not None:
            if zeros.evicts(cache):
                raise UnreadCacheError(
                    "a cache that drops tokens by what attention reads cannot have layers passed over"
                )
            self.stored.append(cache, x)
        return self.result.zeros(x)


class Bypassing:
    """Pass over sublayers of a model in this thread; what was passed over before is again at the end.

    A class, since it is entered for each drafted text: a generator costs three times as much.
    """

    def __init__(self, model: nn.Module, sublayers: Iterable[Sublayer]) -> None:
        """UnsupportedModelError for a model of another shape; ValueError for sublayers that it does not have."""
        self._bypass = prepare(model)
        self._wanted = sublayers if isinstance(sublayers, frozenset) else frozenset(sublayers)
        if unknown := self._wanted.difference(self._bypass.known):
            raise ValueError(f"{shown(sorted(unknown))}: not among the sublayers of {type(model).__name__}")
        self._before = NOTHING

    def __enter__(self) -> None:
        self._before, self._bypass.active = self._bypass.active, self._wanted

    def __exit__(self, *_: object) -> None:
        self._bypass.active = self._before


bypassed = Bypassing


def active(module: nn.Module) -> frozenset[Sublayer]:
    """Return what this thread passes over in a model, or in the body that holds its blocks."""
    bypass = vars(module).get(MARK)
    return NOTHING if bypass is None else bypass.active


def sublayers_of(model: nn.Module) -> tuple[Sublayer, ...]:
    """Return what of a model can be passed over, in the order it runs; UnsupportedModelError as `bypassed`."""
    return prepare(model).known


def early_exit(model: nn.Module, blocks: int) -> frozenset[Sublayer]:
    """Return the sublayers behind the first `blocks` blocks: what an early exit does not run."""
    return frozenset(each for each in sublayers_of(model) if each[0] >= blocks)


def blocks_in(model: nn.Module) -> nn.ModuleList:
    """Return the decoder blocks of a model; UnsupportedModelError as `bypassed`."""
    prepare(model)
    blocks = blocks_of(next(bodies(model)))
    assert blocks is not None
    return blocks


def modules_of(model: nn.Module) -> dict[Sublayer, list[nn.Module]]:
    """Return the modules of each sublayer, without its norms; UnsupportedModelError as `bypassed`."""
    modules: dict[Sublayer, list[nn.Module]] = {each: [] for each in sublayers_of(model)}
    for module in model.modules():
        part = vars(module).get(MARK)
        if isinstance(part, _MarkedModule) and part.result is not None:
            for each in part.sublayers:
                modules[each].append(module)
    return modules


def prepare(model: nn.Module) -> Bypass:
    """Return what is known of a model; the first call watches two passes of one token."""
    known = vars(model).get(MARK)
    if known is None:
        held = list(bodies(model))
        if len(held) != 1:
            raise UnsupportedModelError(f"{type(model).__name__} has {len(held)} stacks of decoder blocks, not one")
        known = vars(held[0]).get(MARK) or _mark(held[0])
        vars(model)[MARK] = known
    assert isinstance(known, Bypass)
    return known


@dataclass
class _ChildCall:
    """A call of a child of a block."""

    module: nn.Module
    given: Any  # its hidden states
    output: Any
    stored: list[StoredShape]

    @property
    def first(self) -> Any:
        return zeros.first_and_others(self.output)[0]


@torch.no_grad()
def _mark(body: nn.Module) -> Bypass:
    """Find the sublayers of a body and mark them; UnsupportedModelError if that cannot be."""
    blocks = blocks_of(body)
    assert blocks is not None
    calls = _watch(body, blocks)
    bypass = Bypass(())
    parts: dict[nn.Module, _MarkedModule] = {}
    for number, own in enumerate(calls):
        _find_parts(number, own, bypass, parts)
    held = {each for part in parts.values() if part.result for each in part.sublayers}
    bypass.known = tuple((i, kind) for i in range(len(blocks)) for kind in KINDS if (i, kind) in held)
    for module, part in parts.items():
        zeros.let_class_ask(type(module), MARK)
        vars(module)[MARK] = part
    bypass.active = frozenset(held)
    try:
        if sum(part.stored is not None for part in parts.values()) != len(blocks) or not _leaves_states(body, blocks):
            raise UnsupportedModelError(
                f"layers of {type(body).__name__} cannot be passed over: its blocks do more than add attention and MLP "
                "to the hidden states, or share keys and values"
            )
    except BaseException:
        for module in parts:
            del vars(module)[MARK]
        raise
    finally:
        bypass.active = NOTHING
    vars(body)[MARK] = bypass
    return bypass


def _run(body: Any) -> None:
    device = next(body.parameters()).device
    token = body.config.get_text_config(decoder=True).vocab_size // 2  # of the first one, padding, all may be zeros
    ids = torch.full((1, 1), token, dtype=torch.int64, device=device)
    try:
        body(input_ids=ids, past_key_values=DynamicCache(config=body.config), use_cache=True)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{type(body).__name__} does not run with a plain cache: {first_line(error)}"
        ) from error


def _watch(body: nn.Module, blocks: nn.ModuleList) -> list[list[_ChildCall]]:
    """Return the calls of the children of each block in a pass of one token."""
    calls: list[list[_ChildCall]] = [[] for _ in blocks]
    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            for child in block.children():
                watch = _ChildWatch(calls[number])
                stack.callback(child.register_forward_pre_hook(watch.enter, with_kwargs=True).remove)
                stack.callback(child.register_forward_hook(watch.leave, with_kwargs=True).remove)
        _run(body)
    return calls


class _ChildWatch:
    """Writes down the calls of a child of a block."""

    def __init__(self, calls: list[_ChildCall]) -> None:
        self._calls = calls
        self._stack: ExitStack | None = None
        self._stored: list[StoredShape] = []

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._stack = ExitStack()
        self._stored = self._stack.enter_context(zeros.recorded_updates(zeros.cache_of(args, kwargs)))

    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        assert self._stack is not None
        self._stack.close()
        self._calls.append(_ChildCall(module, zeros.states_of(args, kwargs), output, self._stored))


def _find_parts(number: int, calls: list[_ChildCall], bypass: Bypass, parts: dict[nn.Module, _MarkedModule]) -> None:
    """Find in the calls of a block what its sublayers are, and the norms directly before and behind them."""
    whole = [each for each in calls if _has_matrices(each.module) and _is_shaped(each)]
    kinds = {id(each): ATTENTION if each.stored else MLP for each in whole}
    for each in whole:
        if isinstance(each.module, PackedLinear) or _is_of_torch(each.module):
            continue  # an MLP without a module of its own
        stored = each.stored[0] if len(each.stored) == 1 else None
        own = frozenset([(number, kinds[id(each)])])
        parts[each.module] = _MarkedModule(bypass, own, zeros.shape_of(each.output), stored)
    for norm in calls:
        if _has_matrices(norm.module) or _is_of_torch(norm.module) or not _is_shaped(norm):
            continue
        around = [each for each in whole if each.given is norm.first or each.first is norm.given]
        if around and all(each.module in parts for each in around):
            parts[norm.module] = _MarkedModule(bypass, frozenset((number, kinds[id(each)]) for each in around), None)


def _is_shaped(call: _ChildCall) -> bool:
    """Return whether a child makes hidden states of hidden states."""
    return isinstance(call.given, Tensor) and isinstance(call.first, Tensor) and call.first.shape == call.given.shape


def _has_matrices(module: nn.Module) -> bool:
    return any(isinstance(each, PackedLinear) for each in module.modules()) or any(
        each.dim() > 1 for each in module.parameters()
    )


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether a class is torch's own, whose forward function is everybody's."""
    return type(module).__module__.startswith("torch.")


def _leaves_states(body: nn.Module, blocks: nn.ModuleList) -> bool:
    """Return whether each block gives its hidden states, times a number, in a pass that passes over everything."""
    are_kept = list[bool]()

    def compare(block: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given, result = zeros.states_of(args, kwargs), zeros.first_and_others(output)[0]
        x, y = given.double().flatten(), result.double().flatten()
        factor = float(x @ y) / max(float(x @ x), torch.finfo(x.dtype).tiny)
        are_kept.append(factor > 0 and float((y - factor * x).norm()) <= TOLERANCE * float(y.norm()))

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_hook(compare, with_kwargs=True).remove)
        _run(body)
    return len(are_kept) == len(blocks) and all(are_kept)
