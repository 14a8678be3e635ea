"""Run a model one block at a time, with the hidden states between the blocks in memory or on disk.

Every decoder block is replaced once by a stand-in while the model runs on the calibration tokens. The hidden states
that reach the first block are kept, and each block's other arguments (compress/model/block_calls.py).

A model of two stacks has hidden states for each: those of the decoder lie beside those of the encoder, which stay what
its last block gave.

Target correction carries two sets of hidden states through the blocks in lockstep, the sides of one `HiddenStates`:
those that the quantized prefix produces, and those of the full-precision model.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.errors import NumericalError, UnsupportedModelError, first_line
from compress.model import block_calls, inputs
from compress.model.block_calls import BlockArgs, Layout, Place, Recorded, equal_trees, leaves, replace_in_tree
from compress.model.hidden_states import FULL, QUANTIZED, HiddenStates
from compress.model.inputs import Samples
from compress.model.skeleton import Skeleton
from compress.numerics import checks, products
from compress.progress import note
from compress.runtime.linear import PackedModule

BlockInputs = Callable[[], Iterable[tuple[Tensor, BlockArgs]]]  # all batches of a block, the same at every call

DIFFERING = (
    "the decoder blocks take arguments that differ between samples or come from other blocks; a part of the recipe "
    "cannot be done with such a model: use one that only quantizes, such as int4"
)
DECODER = "decoder"  # name of its hidden states, which lie beside those of the encoder


class BlockPass(NamedTuple):
    """A batch's pass through a block: the side it is read from, the side that keeps the output, and what watches it."""

    source: int
    target: int | None = None
    watch: Callable[[slice], AbstractContextManager[None]] = lambda _: nullcontext()  # given the samples of the batch


def computing_in(skeleton: Skeleton, dtype: torch.dtype) -> Callable[[], None]:
    """Load weights, and compute blocks, in this type until the returned function is called.

    All weights must be free now; the end frees them.
    """
    owners = [(module, name, p.dtype) for module in skeleton.model.modules() for name, p in _own(module)]
    before = skeleton.dtype
    _retype(skeleton, dtype, [(module, name, dtype) for module, name, _ in owners])

    def end() -> None:
        skeleton.free()
        _retype(skeleton, before, owners)

    return end


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module that follow its type: those of a format do not."""
    packed = module.specs if isinstance(module, PackedModule) else {}
    return [(name, p) for name, p in module.named_parameters(recurse=False) if name not in packed]


def _retype(skeleton: Skeleton, dtype: torch.dtype, owners: list[tuple[nn.Module, str, torch.dtype]]) -> None:
    for module, name, chosen in owners:
        empty = torch.empty_like(module.get_parameter(name), dtype=chosen, device="meta")
        module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    skeleton.dtype = dtype
    skeleton.model.tie_weights()


class AloneDict(UserDict[Any, Any]):
    """A mapping that blocks fill for each other, for a block that is run without the others."""

    def __missing__(self, key: Any) -> Any:
        raise UnsupportedModelError(DIFFERING)


class ModelArgs:
    """What every block is called with, for the batches of a stream of hidden states.

    `calls[block][size]` is the call with a batch of this size where it is the same for all samples. `at` serves every
    model: it needs to know the samples, and what earlier blocks gave for them must have been kept by `keep`.
    """

    def __init__(self, blocks: int, layout: Layout, stream: HiddenStates, device: torch.device) -> None:
        self.fixed: list[dict[int, BlockArgs]] = [{} for _ in range(blocks)]
        self.layout, self.stream, self.device = layout, stream, device
        self.kept: dict[Any, dict[int, Any]] = {}  # what is kept -> block that left it so -> its tree
        self.same: dict[Any, Tensor] = {}  # what is kept once, being the same for all samples

    def __len__(self) -> int:
        return len(self.fixed)

    def __iter__(self) -> Iterator[dict[int, BlockArgs]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[int, BlockArgs]:
        """Return the calls of a block by batch size. Raise UnsupportedModelError where they differ between samples."""
        if self.layout.varying or self.layout.passed or self.layout.crossing is not None:
            raise UnsupportedModelError(DIFFERING)
        empty = {path: AloneDict() for block, path in self.layout.shared if block == index}
        return {size: call.changed(empty) for size, call in self.fixed[index].items()} if empty else self.fixed[index]

    def alone(self, index: int, sample: int) -> BlockArgs:
        """Return the call of a block with one sample, without anything of other blocks: UnsupportedModelError."""
        return self[index][1] if self.layout.passed or self.layout.shared else self.at(index, sample, 1)

    def states(self, index: int) -> HiddenStates:
        """Return the hidden states that a block takes, and that take its output: those of its stack."""
        crossing = self.layout.crossing
        return self._store(DECODER) if crossing is not None and index >= crossing.first else self.stream

    @property
    def stacks(self) -> list[HiddenStates]:
        """The hidden states of all stacks."""
        return [self.stream] if self.layout.crossing is None else [self.stream, self._store(DECODER)]

    def add(self, start: int, batch: Recorded) -> None:
        """Keep the hidden states and the calls of a batch that begins at sample `start`."""
        if self.layout.crossing is not None:
            self._store(DECODER, self.stream.sides)
        for states, hidden in zip(self.stacks, batch.hidden, strict=True):
            states.write(start, hidden.movedim(self.layout.batch_dim, 0))
        for index, call in enumerate(batch.calls):
            values = dict(leaves(call.tree))
            removed: dict[Place, Any] = {}
            for (block, path), name in self.layout.varying.items():
                if block == index:
                    removed[path] = None
                    if name == (block, path):
                        self._store(name).write(start, values[path].movedim(self.layout.dims[name], 0))
            removed |= {path: None for block, path in (*self.layout.passed, *self._encoder_places()) if block == index}
            call = call._replace(batch_dim=self.layout.batch_dim).changed(removed)
            size = batch.hidden[0].shape[self.layout.batch_dim]
            if not equal_trees(self.fixed[index].setdefault(size, call), call):
                raise UnsupportedModelError(
                    "the decoder blocks take arguments that differ between samples; such a model cannot be "
                    "calibrated block by block"
                )

    def at(self, index: int, start: int, size: int, side: int = QUANTIZED) -> BlockArgs:
        """Return the call of a block with `size` samples from `start` on a side of the stream."""
        layout, values = self.layout, dict[Place, Any]()
        for (block, path), name in layout.varying.items():
            if block == index:
                values[path] = self._read(name, start, size).movedim(0, layout.dims[name])
        for (block, path), number in layout.passed.items():
            if block == index and (index - 1, number) in self.kept:
                values[path] = self._tree((index - 1, number), index, start, size, side)
        for path in [path for block, path in self._encoder_places() if block == index]:
            assert layout.crossing is not None, "there are places of it"
            read = self.stream.fetch(start, size, self.device, side)
            values[path] = layout.crossing.give(read.movedim(0, layout.batch_dim))
        for block, path in layout.shared:
            if block == index:
                held = self.fixed[index][size].tree
                for key in path:
                    held = held[key]
                values[path] = type(held)(self._tree(path, index, start, size, side))
        return self.fixed[index][size].changed(values) if values else self.fixed[index][size]

    def keep(self, index: int, start: int, call: BlockArgs, outputs: tuple[Any, ...], side: int = QUANTIZED) -> None:
        """Keep what a block gave for later ones: its outputs behind the hidden states, and what it put into mappings.

        `call` is that of `at`, with which the block was run.
        """
        for number in {n for (block, _), n in self.layout.passed.items() if block == index + 1}:
            self._write((index, number), outputs[number - 1], index, start, side)
        for block, path in self.layout.shared:
            if block == index:
                held = call.tree
                for key in path:
                    held = held[key]
                self._write(path, dict(held), index, start, side)

    def stores(self, index: int) -> list[HiddenStates]:
        """Return where all that a block has left for later ones is kept: hidden states, and what goes beside them."""
        left = [(name, path) for name, kept in self.kept.items() if index in kept for path in kept[index][1]]
        return [self.states(index), *(self._store(name) for name in left if name in self.stream.beside)]

    def split(self) -> None:
        """Give the full-precision side what the quantized one has."""
        for store in (self.stream, *self.stream.beside.values()):
            if store.sides > 1:
                store.write(0, store.read(0, store.samples), FULL)

    def _encoder_places(self) -> list[tuple[int, Place]]:
        return [] if self.layout.crossing is None else self.layout.crossing.places

    def _store(self, name: Any, sides: int = 1) -> HiddenStates:
        beside, file = self.stream.beside, self.stream.file
        if name not in beside:
            spilled = file and file.with_name(f"{file.name}.{len(beside)}")
            beside[name] = HiddenStates(self.stream.samples, spilled, sides)
        return beside[name]

    def _read(self, name: Any, start: int, size: int, side: int = QUANTIZED) -> Tensor:
        return self._store(name).read(start, size, side).to(self.device)

    def _write(self, name: Any, tree: Any, index: int, start: int, side: int) -> None:
        """Store a tree that a block has left, whose tensors have the samples as their first dimension."""
        values = dict(leaves(tree))
        stores = {path: (name, path) for path, value in values.items() if isinstance(value, Tensor)}
        for path, store in stores.items():
            if not self._is_same(store, values[path], side):
                self._store(store, self.stream.sides).write(start, values[path], side)
        self.kept.setdefault(name, {})[index] = replace_in_tree(tree, stores), tuple(stores)

    def _tree(self, name: Any, index: int, start: int, size: int, side: int) -> Any:
        """Return what the blocks before this one have left, {} if nothing: it may be changing what is kept itself."""
        before = [block for block in self.kept.get(name, {}) if block < index]
        if not before:
            return {}
        tree, places = self.kept[name][max(before)]
        same = {path: self.same.get(((name, path), side)) for path in places}
        read = {
            path: self._read((name, path), start, size, side) if same[path] is None else same[path] for path in places
        }
        return replace_in_tree(tree, read)

    def _is_same(self, name: Any, value: Tensor, side: int) -> bool:
        """Keep a value of two stacks once that is the same for all samples, as relative positions; False for others.

        It has one entry where others have one for each sample. One that was kept and differs now is stored for each, of
        both sides.
        """
        key, known = (name, side), self.same.get((name, side))
        if self.layout.crossing is None or value.shape[0] > 1 or name in self.stream.beside:
            return False
        if known is not None and not torch.equal(known, value):
            for each in range(self.stream.sides):
                if (kept := self.same.pop((name, each), None)) is not None:
                    shape = self.stream.samples, *kept.shape[1:]
                    self._store(name, self.stream.sides).write(0, kept.expand(shape), each)
            return False
        self.same[key] = value
        return True


@torch.no_grad()
def record_inputs(
    skeleton: Skeleton,
    tokens: Samples,
    batch: int,
    stream: HiddenStates,
    device: torch.device,
    change: Callable[[], None] = lambda: None,
) -> ModelArgs:
    """Run all before the first block on tokens [samples, seq_len] or pairs; fill `stream`, return blocks' arguments.

    change: called once all before the first block is loaded, to give it other weights in place.
    """
    skeleton.load_rest(device)
    model, blocks, second = skeleton.read, skeleton.blocks, skeleton.second
    count = inputs.count(tokens)
    try:
        change()
        layout = block_calls.layout(model, blocks, inputs.part(tokens, slice(0, 2), device), second)
        calls = ModelArgs(len(blocks), layout, stream, device)
        for start in range(0, count, batch):
            samples = inputs.part(tokens, slice(start, start + batch), device)
            calls.add(start, block_calls.record(model, blocks, samples, second))
    finally:
        skeleton.free()
    return calls


@contextmanager
def attached(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks of modules at the end."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def states_of(output: Any) -> Tensor:
    """Return the hidden states in what a block returns: a tensor, or a tuple or list with the states first."""
    return cast(Tensor, output[0] if isinstance(output, (tuple, list)) else output)


def call_block(run: Callable[..., Any], call: BlockArgs, hidden: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """Call a block, or what stands for it, with hidden states [batch, ...]; return those it gives, and the rest."""
    output = run(hidden.movedim(0, call.batch_dim), *call.args, **call.kwargs)
    return states_of(output).movedim(call.batch_dim, 0), tuple(output[1:]) if isinstance(output, (tuple, list)) else ()


def run_block(block: nn.Module, call: BlockArgs, hidden: Tensor, name: str) -> Tensor:
    """Run a block on hidden states [batch, tokens, hidden]; raise NumericalError if its output is not finite."""
    return run_block_fully(block, call, hidden, name)[0]


@torch.no_grad()
def run_block_fully(
    block: nn.Module, call: BlockArgs, hidden: Tensor, name: str, takes_overflow: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    """Run a block as `run_block` does; return also what it gives beside hidden states.

    takes_overflow: what finite weights give in float16 is cut to its range. Raise UnsupportedModelError where the
    block's own code fails, as some does on 16-bit states.
    """
    try:
        with products.Widened():
            states, beside = call_block(block, call, hidden)
    except RuntimeError as error:
        if checks.is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            f"transformers' {type(block).__name__} ({name}) fails on hidden states {list(hidden.shape)} of "
            f"{str(hidden.dtype).removeprefix('torch.')}: {first_line(error)}; quantizing with --dtype float32 may work"
        ) from error
    try:
        checks.finite(name, states)
    except ValueError as error:
        if not takes_overflow or states.dtype != torch.float16 or not checks.all_finite(block.parameters()):
            raise NumericalError(f"the output of {name} is not finite; {checks.advice(states.dtype)}") from error
        states = states.nan_to_num()
        note(f"{name} overflows float16, as the original does; with --dtype float32 the result loads in a wider type")
    return states, beside


def propagate(
    skeleton: Skeleton,
    index: int,
    calls: ModelArgs,
    stream: HiddenStates,
    batch: int,
    device: torch.device,
    sides: tuple[int, int],
) -> None:
    """Load a block, run it on one side of the stream, write what comes out to the other, and free the block."""
    block, name = skeleton.load_block(index, device), skeleton.block_prefix(index).rstrip(".")
    stream = calls.states(index)
    for start in range(0, stream.samples, batch):
        hidden = stream.fetch(start, min(batch, stream.samples - start), device, sides[0])
        call = calls.at(index, start, len(hidden), sides[0])
        states, beside = run_block_fully(block, call, hidden, name)
        stream.write(start, states, sides[1])
        calls.keep(index, start, call, beside, sides[1])
    skeleton.free()


@torch.enable_grad()
def pull_back(
    block: nn.Module, call: BlockArgs, hidden: Tensor, gradient: Tensor, weights: Sequence[Tensor] = ()
) -> tuple[Tensor | None, ...]:
    """Return gradients by hidden [batch, tokens, hidden] and by weights, of a loss with `gradient` by the output.

    None for a weight that has no part in the output.
    """
    hidden = hidden.detach().clone().requires_grad_()
    states, _ = call_block(block, call, hidden)
    return torch.autograd.grad(states, (hidden, *weights), gradient, allow_unused=True)
