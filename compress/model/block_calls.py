"""Record what every decoder block of a model is called with, beside its hidden states.

Most arguments (masks, rotary tables) are the same for all samples, and are kept once for each batch size. Others differ
from sample to sample (the tokens themselves, inputs of each layer that the embeddings give): they are kept like hidden
states. Others again come from an earlier block: a second output that the model hands to the next block, or a mapping
that blocks fill and later blocks read. They are kept for each side of the hidden states, as the blocks are run.

What is what is found before anything is recorded, by running all that lies before the blocks on one sample, on another,
and on both.

In a model of two stacks the blocks of the decoder come behind those of the encoder. They read what the encoder gives:
the states behind its last block, and behind what lies after it (a norm). That is made anew of those states, of either
side, for each block (`Crossing`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, empty, equal, nn
from torch.nn.modules.module import register_module_forward_hook

from compress.errors import UnsupportedModelError, first_line
from compress.model import inputs
from compress.model.inputs import Samples

Place = tuple[Any, ...]  # of keys from the root of a tree of tuples, lists and mappings to a leaf
WIDTHS = (0, 1, 2, 3)  # outputs that a model may want from a block; 0: a tensor, not a tuple
UNFIT_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)  # raised by other numbers of tokens
NO_BLOCK_INPUT = "some decoder blocks are not called with hidden states in a plain forward pass"


class BlockArgs(NamedTuple):
    """The arguments of a block beside its hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_dim: int = 0  # of the hidden states as the block takes and gives them

    @property
    def tree(self) -> dict[str, Any]:
        """All arguments as one tree."""
        return {"args": self.args, "kwargs": self.kwargs}

    def changed(self, values: Mapping[Place, Any]) -> BlockArgs:
        """Return the call with other values at these places of the tree."""
        tree = replace_in_tree(self.tree, values)
        return BlockArgs(tree["args"], tree["kwargs"], self.batch_dim)


class Recorded(NamedTuple):
    """One batch in front of the first block, and all calls."""

    hidden: list[Tensor]  # as the first block of each stack takes it
    calls: list[BlockArgs]
    extra: list[list[Tensor]]  # stands for what a block gives beside hidden states
    between: list[nn.Module]  # what lies behind the last block of an encoder
    crossed: Tensor | None  # what it gives there; None without a second stack


class Layout(NamedTuple):
    """Where in the calls of the blocks there are values that are not the same for all samples."""

    batch_dim: int  # of the hidden states
    varying: dict[tuple[int, Place], tuple[int, Place]]  # block and place -> the first place that has the same tensor
    dims: dict[tuple[int, Place], int]  # first place -> dimension of the samples
    passed: dict[tuple[int, Place], int]  # block and place -> which output of the block before it is
    shared: dict[tuple[int, Place], Place]  # block and place of a mapping that the blocks fill -> its name
    crossing: Crossing | None  # of a model of two stacks


class Crossing(NamedTuple):
    """How the states of an encoder reach the blocks of the decoder."""

    first: int  # number of the first block of the decoder
    modules: list[nn.Module]  # what lies between, with weights of its own: copies
    places: list[tuple[int, Place]]  # block and place in its call

    def give(self, states: Tensor) -> Tensor:
        """Return what the decoder reads of the states behind the last block of the encoder."""
        for module in self.modules:
            states = module(states)
        return states


class _AllSeenError(Exception):
    """Every block has been called: the rest of the forward pass is not needed."""


class _WrongKindError(Exception):
    """A block was given no hidden states: the model wants the other of tensor and tuple from the block before."""


class StandIn(nn.Module):
    """A block's place in a forward pass: has the block's attributes and returns what `gives` does.

    width: 0 where the model takes a tensor from a block, otherwise the number of outputs of a tuple.
    """

    def __init__(self, real: nn.Module, gives: Callable[..., Tensor], width: int, extra: list[Tensor]) -> None:
        super().__init__()
        self.__dict__.update(real=real, gives=gives, width=width, extra=extra)  # not registered as a child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["real"], name)  # attention_type, layer_idx ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        states = self.gives(*args, **kwargs)
        return (states, *self.extra) if self.width else states


@contextmanager
def standing_in(blocks: nn.ModuleList, gives: Callable[..., Tensor], width: int) -> Iterator[list[list[Tensor]]]:
    """While active, `gives` is called in the place of every block; yield what each gives beside hidden states.

    The models of transformers do not say whether they take a tensor from a block, or a tuple: callers try all WIDTHS.
    """
    real = list(blocks)
    extra = [[empty(0) for _ in range(width - 1)] for _ in real]
    for i, block in enumerate(real):
        blocks[i] = StandIn(block, gives, width, extra[i])
    try:
        yield extra
    finally:
        for i, block in enumerate(real):
            blocks[i] = block


class _Behind:
    """Follow the states of an encoder from behind its last block to the first block of the decoder."""

    def __init__(self) -> None:
        self.states: Tensor | None = None  # where they are now
        self.given: Tensor | None = None  # as the decoder gets them
        self.modules: list[nn.Module] = []  # that they have passed

    def pass_block(self, number: int, hidden: Tensor, second: int | None) -> None:
        """See what block `number` is given, and gives; `second` is the first one of the decoder."""
        if second is not None and number == second:
            self.given, self.states = self.states, None
        if second is not None and number == second - 1:
            self.states = hidden

    def see(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        """Hear of any module that has run."""
        is_leaf = next(module.children(), None) is None and not isinstance(module, StandIn)
        if is_leaf and self.states is not None and given and given[0] is self.states and isinstance(output, Tensor):
            self.modules.append(module)
            self.states = output


def record(model: Callable[..., Any], blocks: nn.ModuleList, samples: Samples, second: int | None = None) -> Recorded:
    """Run a model, or what runs it, up to its last block on samples, each block giving what it is given.

    second: number of the block that begins a second stack. Raise UnsupportedModelError if the blocks are not called
    with hidden states.
    """
    reason = ""
    for width in WIDTHS:
        seen: list[tuple[Tensor, BlockArgs]] = []
        behind = _Behind()

        def note(
            *args: Any, seen: list[tuple[Tensor, BlockArgs]] = seen, behind: _Behind = behind, **kwargs: Any
        ) -> Tensor:
            hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states", None), ())
            start = second if second is not None and len(seen) >= second else 0  # of the stack
            if not isinstance(hidden, Tensor) or (len(seen) > start and hidden.shape != seen[start][0].shape):
                raise _WrongKindError
            behind.pass_block(len(seen), hidden, second)
            seen.append((hidden, BlockArgs(rest, kwargs)))
            if len(seen) == len(blocks):
                raise _AllSeenError
            return hidden

        hook = register_module_forward_hook(behind.see) if second is not None else None
        try:
            with standing_in(blocks, note, width) as extra:
                model(samples, use_cache=False)
        except _AllSeenError:
            states = [seen[start][0] for start in (0, second) if start is not None]
            return Recorded(states, [call for _, call in seen], extra, behind.modules, behind.given)
        except _WrongKindError:
            continue
        except UNFIT_ERRORS as error:
            reason = reason or f" ({type(error).__name__}: {first_line(error)})"
        finally:
            if hook is not None:
                hook.remove()
    raise UnsupportedModelError(NO_BLOCK_INPUT + reason)


def layout(model: Callable[..., Any], blocks: nn.ModuleList, samples: Samples, second: int | None = None) -> Layout:
    """Find what differs between samples, by running all before the blocks on the first and the last of these.

    second: as of `record`.
    """
    first, other = inputs.ends(samples)
    one, two, both = (record(model, blocks, each, second) for each in (first, other, inputs.twice(first)))
    names: dict[int, tuple[int, Place]] = {}
    batch_dim = _batch_dim(one.hidden[-1], both.hidden[-1])
    if batch_dim is None or _batch_dim(one.hidden[0], both.hidden[0]) != batch_dim:
        raise UnsupportedModelError(NO_BLOCK_INPUT)
    crossing = None if second is None else Crossing(second, [copy.deepcopy(module) for module in one.between], [])
    made = Layout(batch_dim, {}, {}, {}, {}, crossing)
    for index, call in enumerate(one.calls):
        sentinels = {id(t): k + 1 for k, t in enumerate(one.extra[index - 1])} if index else {}
        others, wide = (dict(leaves(r.calls[index].tree)) for r in (two, both))
        for path, value in leaves(call.tree):
            if id(value) in sentinels:
                made.passed[index, path] = sentinels[id(value)]
            elif crossing is not None and index >= crossing.first and value is one.crossed:
                crossing.places.append((index, path))
            elif isinstance(value, MutableMapping):  # an empty one: others are taken apart
                made.shared[index, path] = path
            elif isinstance(value, Tensor) and not equal_trees(value, others.get(path)):
                name = names.setdefault(id(value), (index, path))
                if (dim := _batch_dim(value, wide[path])) is not None:
                    made.varying[index, path], made.dims[name] = name, dim
    if crossing is not None and not crossing.places:
        raise UnsupportedModelError(
            "the model changes what its encoder gives before the decoder reads it, in a way that cannot be followed; "
            "such a model cannot be quantized block by block"
        )
    return made


def _batch_dim(one: Tensor, two: Tensor) -> int | None:
    """Return the dimension that has one entry for each sample, seen with one sample and with two; None: no such."""
    sizes = list(zip(one.shape, two.shape, strict=False))
    return sizes.index((1, 2)) if (1, 2) in sizes else None


def leaves(tree: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every leaf of a tree of tuples, lists and mappings with its place; an empty one is a leaf itself."""
    if isinstance(tree, (tuple, list, Mapping)) and len(tree):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def replace_in_tree(tree: Any, values: Mapping[Place, Any], path: Place = ()) -> Any:
    """Return the tree with other values at these places; what has none is shared."""
    if path in values:
        return values[path]
    if not any(place[: len(path)] == path for place in values):
        return tree
    if isinstance(tree, Mapping):
        made: Any = {key: replace_in_tree(value, values, (*path, key)) for key, value in tree.items()}
        return made if type(tree) is dict else type(tree)(made)  # type: ignore[call-arg]  # a UserDict
    items = [replace_in_tree(value, values, (*path, key)) for key, value in enumerate(tree)]
    return items if isinstance(tree, list) else type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)


def equal_trees(a: Any, b: Any) -> bool:
    """Return True if two trees of arguments are the same, tensors by value."""
    if a is b:
        return True
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and equal(a, b)
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(equal_trees, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal_trees(a[k], b[k]) for k in a)
    return bool(a == b)
