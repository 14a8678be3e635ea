"""Run a model one block at a time, with the hidden states between the blocks in memory or on disk.

Every decoder block is replaced once by a stand-in while the model runs on the calibration tokens. The hidden states
that reach the first block are kept, and each block's other arguments (compress/model/block_calls.py).

Target correction carries two sets of hidden states through the blocks in lockstep, the sides of one `HiddenStates`:
those that the quantized prefix produces, and those of the full-precision model.
"""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.errors import NumericalError, UnsupportedModelError, first_line
from compress.model import block_calls, paging
from compress.model.block_calls import BlockArgs, Layout, Place, Recorded, equal_trees, leaves, replace_in_tree
from compress.model.skeleton import Skeleton
from compress.numerics import checks, products
from compress.progress import note
from compress.runtime.linear import PackedModule
from compress.storage.files import new_descriptor

BlockInputs = Callable[[], Iterable[tuple[Tensor, BlockArgs]]]  # all batches of a block, the same at every call

DIFFERING = (
    "the decoder blocks take arguments that differ between samples or come from other blocks; a part of the recipe "
    "cannot be done with such a model: use one that only quantizes, such as int4"
)
QUANTIZED, FULL = 0, 1  # sides of hidden states: of the quantized prefix, of the full-precision model


class BlockPass(NamedTuple):
    """A batch's pass through a block: the side it is read from, the side that keeps the output, and what watches it."""

    source: int
    target: int | None = None
    watch: Callable[[slice], AbstractContextManager[None]] = lambda _: nullcontext()  # given the samples of the batch


class HiddenStates:
    """Hidden states [samples, tokens, hidden], for each side, on the CPU: in memory or in slices of a file.

    Memory is pinned where they come from a GPU; copies to and from it then run while it computes (paging.py).
    """

    def __init__(self, samples: int, file: Path | None, sides: int = 1) -> None:
        self.samples, self.file, self.sides = samples, file, sides
        self.tensor: Tensor | None = None
        self.slice_shape: tuple[int, ...] = ()
        self.dtype = torch.float32
        self.descriptor = -1
        self.beside: dict[Any, HiddenStates] = {}  # what else goes from block to block with them
        self.pager: paging.Pager | None = None
        self.written: torch.cuda.Event | None = None  # when the last of them has come from the GPU

    def write(self, start: int, states: Tensor, side: int = QUANTIZED) -> None:
        """Put states [batch, tokens, hidden] at sample `start` of a side."""
        start += side * self.samples
        if not self.slice_shape:
            self.slice_shape, self.dtype = tuple(states.shape[1:]), states.dtype
            if self.file is None:
                self.tensor = paging.host_memory((self.sides * self.samples, *self.slice_shape), states)
            else:
                self.descriptor = new_descriptor(self.file, 0o600)
        if self.pager is not None:
            self.pager.forget(start, start + states.shape[0])
        if self.tensor is not None:
            self.written = paging.send_back(states, self.tensor[start : start + states.shape[0]]) or self.written
            return
        raw = memoryview(cast(Any, states.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        offset = start * self._nbytes()
        while raw:
            written = os.pwrite(self.descriptor, raw, offset)
            raw, offset = raw[written:], offset + written

    def read(self, start: int, count: int, side: int = QUANTIZED) -> Tensor:
        """Return states [count, tokens, hidden] from sample `start` of a side; a view when in memory."""
        start += side * self.samples
        if self.tensor is not None:
            if self.written is not None:
                self.written.synchronize()
                self.written = None
            return self.tensor[start : start + count]
        states = torch.empty(count, *self.slice_shape, dtype=self.dtype)
        raw = memoryview(cast(Any, states.reshape(-1).view(torch.uint8).numpy()))
        offset = start * self._nbytes()
        while raw:
            got = os.preadv(self.descriptor, [raw], offset)
            if got == 0:
                raise OSError(f"{self.file} is shorter than the hidden states written to it")
            raw, offset = raw[got:], offset + got
        return states

    def fetch(self, start: int, count: int, device: torch.device, side: int = QUANTIZED) -> Tensor:
        """Return what `read` does, on a device; a GPU then gets the samples behind them, too, while it works on these.

        That is so where the states are in memory: a file is read when they are asked for.
        """
        if device.type != "cuda" or self.tensor is None:
            return self.read(start, count, side).to(device)
        held = self.tensor
        self.pager = self.pager or paging.Pager(device, lambda first, end: held[first:end])
        first = side * self.samples
        states = self.pager.take(first + start, first + start + count)
        behind = min(count, self.samples - start - count)
        if behind > 0:
            self.pager.send(first + start + count, first + start + count + behind)
        return states

    def close(self) -> None:
        """Free the memory or the file."""
        for store in self.beside.values():
            store.close()
        self.tensor = self.pager = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _nbytes(self) -> int:
        return int(torch.Size(self.slice_shape).numel()) * self.dtype.itemsize


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

    def __len__(self) -> int:
        return len(self.fixed)

    def __iter__(self) -> Iterator[dict[int, BlockArgs]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[int, BlockArgs]:
        """Return the calls of a block by batch size. Raise UnsupportedModelError where they differ between samples."""
        if self.layout.varying or self.layout.passed:
            raise UnsupportedModelError(DIFFERING)
        empty = {path: AloneDict() for block, path in self.layout.shared if block == index}
        return {size: call.changed(empty) for size, call in self.fixed[index].items()} if empty else self.fixed[index]

    def alone(self, index: int, sample: int) -> BlockArgs:
        """Return the call of a block with one sample, without anything of other blocks: UnsupportedModelError."""
        return self[index][1] if self.layout.passed or self.layout.shared else self.at(index, sample, 1)

    def add(self, start: int, batch: Recorded) -> None:
        """Keep the calls of a batch that begins at sample `start`."""
        for index, call in enumerate(batch.calls):
            values = dict(leaves(call.tree))
            removed: dict[Place, Any] = {}
            for (block, path), name in self.layout.varying.items():
                if block == index:
                    removed[path] = None
                    if name == (block, path):
                        self._store(name).write(start, values[path].movedim(self.layout.dims[name], 0))
            removed |= {path: None for block, path in self.layout.passed if block == index}
            call = call._replace(batch_dim=self.layout.batch_dim).changed(removed)
            size = batch.hidden.shape[self.layout.batch_dim]
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
        return [self.stream, *(self._store(name) for name in left)]

    def split(self) -> None:
        """Give the full-precision side what the quantized one has."""
        for store in self.stream.beside.values():
            if store.sides > 1:
                store.write(0, store.read(0, store.samples), FULL)

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
            self._store(store, self.stream.sides).write(start, values[path], side)
        self.kept.setdefault(name, {})[index] = replace_in_tree(tree, stores), tuple(stores)

    def _tree(self, name: Any, index: int, start: int, size: int, side: int) -> Any:
        """Return what the blocks before this one have left, {} if nothing: it may be changing what is kept itself."""
        before = [block for block in self.kept.get(name, {}) if block < index]
        if not before:
            return {}
        tree, places = self.kept[name][max(before)]
        return replace_in_tree(tree, {path: self._read((name, path), start, size, side) for path in places})


@torch.no_grad()
def record_inputs(
    skeleton: Skeleton,
    tokens: Tensor,
    batch: int,
    stream: HiddenStates,
    device: torch.device,
    change: Callable[[], None] = lambda: None,
) -> ModelArgs:
    """Run all before the first block on tokens [samples, seq_len]; fill `stream`, return all blocks' arguments.

    change: called once all before the first block is loaded, to give it other weights in place.
    """
    skeleton.load_rest(device)
    model, blocks = skeleton.read, skeleton.blocks
    try:
        change()
        calls = ModelArgs(len(blocks), block_calls.layout(model, blocks, tokens[:2].to(device)), stream, device)
        for start in range(0, tokens.shape[0], batch):
            recorded = block_calls.record(model, blocks, tokens[start : start + batch].to(device))
            stream.write(start, recorded.hidden.movedim(calls.layout.batch_dim, 0))
            calls.add(start, recorded)
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
