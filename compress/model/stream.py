"""Follow the residual stream through a forward pass on the meta device: what is added to it, and what reads it.

A tensor over the hidden size is the sum of what some modules gave: the stream as it reached the block, linears,
embeddings, norms. Sums, factors of a whole token, changes of type and of order of the tokens keep it that. All other
operations (a factor for each channel, an activation) leave a part that is marked as changed: it commutes with no
rotation of the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compress.model.meta_pass import SkippedExperts

STREAM, WRITER, NORM, OTHER = "stream", "writer", "norm", "other"  # kinds of parts

SUMS = {"add", "sub", "rsub", "cat", "stack", "index_add", "index_put", "slice_scatter", "select_scatter", "copy"}
SAME = {"_to_copy", "clone", "index_select", "index", "sum", "mean", "neg", "roll", "flip", "contiguous"}
SCALES = {"mul", "div"}
EMPTY = {"zeros", "new_zeros", "zeros_like"}
WITH_DIM = {"cat", "stack", "index_select", "sum", "mean", "roll", "flip"}  # their second argument


class Part(NamedTuple):
    """One of the summands of a tensor."""

    kind: str
    name: str  # of the module that gave it; of kind OTHER: of the module in which it was made, or ""
    change: str = ""  # the operation that was done to its channels; "": none


Parts = frozenset[Part]


class Flow(TorchDispatchMode):
    """Note the parts of every tensor over the hidden size that is made while this mode is active."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.known: dict[int, Parts] = {}  # by memory
        self.alive: list[Tensor] = []  # memory that is freed would be used again

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {memory_of(x) for x in _tensors((args, kwargs or {}))}
        for tensor in _tensors(out):
            self.alive.append(tensor)
            if memory_of(tensor) not in given or func._schema.is_mutable:  # else it is a view
                self.known[memory_of(tensor)] = self._parts_of_output(
                    func._schema.name.split("::")[-1].rstrip("_"), args, tensor
                )
        return out

    def parts(self, tensor: Tensor) -> Parts:
        """Return the parts of a tensor."""
        return self.known.get(memory_of(tensor), frozenset((Part(OTHER, "", "a tensor of its own"),)))

    def give(self, tensor: Tensor, parts: Iterable[Part]) -> None:
        """Say what a tensor is the sum of."""
        self.alive.append(tensor)
        self.known[memory_of(tensor)] = frozenset(parts)

    def _parts_of_output(self, name: str, args: tuple[Any, ...], out: Tensor) -> Parts:
        """Return the parts of what an operation gives."""
        if name in EMPTY:
            return frozenset()
        tensors = [x for x in _tensors(args) if x.is_floating_point()]
        wide = [x for x in tensors if x.dim() and x.shape[-1] == self.width]
        parts = frozenset[Part]().union(*map(self.parts, wide))
        if not wide or not out.dim() or out.shape[-1] != self.width:
            return frozenset((Part(OTHER, "", name),))
        if name in SCALES:
            is_divisor = name == "div" and args[0] is not wide[0]
            narrow = [x for x in tensors if x.dim() == 0 or x.shape[-1] == 1]
            is_kept = len(wide) == 1 and len(wide) + len(narrow) == len(tensors) and not is_divisor
        elif name in SUMS:
            numbers = [x for x in args[:2] if isinstance(x, int | float)] if name in ("add", "sub", "rsub") else []
            is_kept = len(wide) == len(tensors) and not any(numbers) and not _is_last(name, args, out)
        else:
            is_kept = name in SAME and len(tensors) == 1 and not _is_last(name, args, out)
        return parts if is_kept else frozenset(part._replace(change=part.change or name) for part in parts)


def _is_last(name: str, args: tuple[Any, ...], out: Tensor) -> bool:
    """Return whether an operation works along the channels."""
    first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
    if name == "index":
        return len(args[1]) >= first.dim() and args[1][-1] is not None
    if name not in WITH_DIM:
        return False
    dims = args[-1 if name in ("roll", "flip") else 1] if len(args) > 1 else 0 if name in ("cat", "stack") else None
    size = out.dim() if name == "stack" else first.dim()
    if dims is None:  # over all
        return True
    return size - 1 in [dim % size for dim in (dims if isinstance(dims, list | tuple) else [dims])]


def is_plain_norm(module: nn.Module, width: int) -> bool:
    """Return whether a module without parameters normalizes vectors of this width."""
    if any(part is not None for own in (module._parameters, module._buffers, module._modules) for part in own.values()):
        return False
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            normed = module(3 * x)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    if not isinstance(normed, Tensor) or normed.shape != x.shape:
        return False
    return any(
        torch.allclose(normed, y / y.square().mean(-1, keepdim=True).sqrt(), rtol=0.01, atol=1e-3)
        for y in (x, x - x.mean(-1, keepdim=True))
    )


def memory_of(tensor: Tensor) -> int:
    """Return a number of the tensor's memory, the same for views of one tensor."""
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Watch:
    """What a forward pass shows of the residual stream, by the full names of modules."""

    def __init__(self, model: nn.Module, blocks: list[str], width: int, is_norm: Callable[[nn.Module], bool]) -> None:
        """Put hooks on a model on the meta device. blocks: names of its decoder blocks."""
        self.flow = Flow(width)
        self.reads: dict[str, Parts] = {}  # module with weights -> what it was given
        self.plain: set[str] = set()  # norms without weights
        self.before: Parts = frozenset()  # what reached the first block
        self.after: dict[str, Parts] = {}  # block -> what it gave
        for name, module in model.named_modules():
            is_plain = is_plain_norm(module, width)
            if is_plain:
                self.plain.add(name)
            kind = NORM if is_plain or is_norm(module) else WRITER if has_matrix(module) else OTHER
            if name in blocks:
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(lambda _, args, out, name=name: self._leave(name, out))
            elif kind != OTHER:
                module.register_forward_pre_hook(lambda _, args, name=name: self._read(name, args))
                part = Part(kind, name)
                module.register_forward_hook(lambda _, args, out, part=part: self._give(part, out))
            elif name:
                module.register_forward_hook(lambda _, args, out, name=name: self._name(name, out))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = next((x for x in _tensors((args, kwargs)) if x.is_floating_point()), None)
        if states is not None:
            if not self.after:
                self.before = self.flow.parts(states)
            self.flow.give(states, [Part(STREAM, "")])

    def _leave(self, name: str, out: Any) -> None:
        for states in _tensors(out)[:1]:
            self.after[name] = self.flow.parts(states)
            self.flow.give(states, [Part(STREAM, "")])

    def _read(self, name: str, args: tuple[Any, ...]) -> None:
        for states in _tensors(args)[:1]:
            self.reads[name] = self.flow.parts(states)

    def _give(self, part: Part, out: Any) -> None:
        states = out if isinstance(out, Tensor) else None
        if states is None or not states.is_floating_point() or states.shape[-1] != self.flow.width:
            return
        if part.name in self.plain and not any(p.kind == STREAM for p in self.reads.get(part.name, ())):
            self.flow.give(states, self.reads.get(part.name, ()))  # commutes with a rotation: as if it were not there
        else:
            self.flow.give(states, [part])

    def _name(self, name: str, out: Any) -> None:
        """Say in which module, the innermost, a part was made of which nothing else is known."""
        for states in _tensors(out):
            if states.is_floating_point() and memory_of(states) in self.flow.known:
                parts = self.flow.parts(states)
                if any(part.kind == OTHER and not part.name for part in parts):
                    named = (part._replace(name=part.name or name) if part.kind == OTHER else part for part in parts)
                    self.flow.give(states, named)


def has_matrix(module: nn.Module) -> bool:
    """Return whether a module has a matrix, or those of experts, that it multiplies its input with."""
    weight = getattr(module, "weight", None)
    return isinstance(module, SkippedExperts) or (isinstance(weight, Tensor) and weight.dim() == 2)
