"""Many variants of a model at once, block by block, in one process: what agrees up to a block is computed once.

A `Path` says for each block which of its linears are changed, and to what level. Paths that begin alike form a tree;
each of its nodes is computed once from its parent's hidden states, with the changed linears' weights put in place of
the original ones. A node's states take its parent's place as soon as no other child needs them, so that there are never
more than there are paths; past a limit they are in a file.

Blocks are loaded one at a time, or all are kept where memory allows. Then samples go through the model as many at a
time as their states stay in memory; otherwise all go together, so that a block is loaded once.

A path's result depends on the path, its samples and their batches alone: each batch is run as it would be by itself.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path as File
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from compress import process_memory
from compress.allocate import reference_logprobs
from compress.errors import BudgetError
from compress.model import blockwise, lm_head
from compress.model.skeleton import Skeleton
from compress.numerics import kl

Level = Hashable  # what a linear is at; None: as it is
Part = tuple[tuple[str, Level], ...]  # full name of a linear of one block, and its level
Path = tuple[Part, ...]  # of every block
Batch = Sequence[int]  # samples that go through the blocks together


class Levels(Protocol):
    """Where the weights of changed linears come from.

    A class may also have `prepare(index: int, block: nn.Module) -> None`, called on every loaded block before anything
    else: what a transform inside blocks makes of norms and of the weights that are not changed, in place.
    """

    def weight(self, name: str, level: Level, original: Tensor) -> Tensor:
        """The effective weight [out, in] of a linear at this level, in the type of `original`, which is not changed."""


Source = Callable[[], tuple[Skeleton, Levels]]  # edits have begun; nobody else uses the skeleton until `close`


@dataclass(frozen=True)
class Room:
    """Memory of one process, in bytes."""

    keeps: bool  # all blocks and the head stay loaded
    decoded: int  # changed weights that are kept for the next node, or call
    states: int  # hidden states in memory; what does not fit is in a file

    @classmethod
    def within(cls, skeleton: Skeleton, allowed: int) -> Room:
        """Everything kept where it leaves as much again for the rest; else the largest block goes off first."""
        item = skeleton.dtype.itemsize
        whole = {id(p): p.numel() * item for p in skeleton.model.parameters()}
        keeps = 2 * sum(whole.values()) <= allowed
        largest = max(sum(p.numel() for p in block.parameters()) * item for block in skeleton.blocks)
        rest = allowed - (sum(whole.values()) if keeps else largest)
        if rest < 0:
            raise BudgetError(
                f"comparing variants of the model takes at least {process_memory.show(largest)} for a block, more than "
                f"the {process_memory.show(allowed)} there are; raise the memory limit"
            )
        return cls(keeps, rest // 2, rest // 2)


def path(skeleton: Skeleton, assignment: Mapping[str, Level]) -> Path:
    """The path of an assignment linear -> level; None, and what is not named, stays original."""
    parts: list[list[tuple[str, Level]]] = [[] for _ in skeleton.blocks]
    for name, level in sorted(assignment.items()):
        inner = name.removeprefix(f"{skeleton.blocks_name}.")
        number = inner.partition(".")[0]
        if inner == name or not number.isdigit() or int(number) >= len(parts):
            raise ValueError(f"{name} is no linear of the blocks {skeleton.blocks_name}")
        if level is not None:
            parts[int(number)].append((name, level))
    return tuple(map(tuple, parts))


def passes(paths: Sequence[Path]) -> int:
    """How often some block is run for these paths: the nodes of their tree."""
    depth = len(paths[0]) if paths else 0
    return sum(len({one[: index + 1] for one in paths}) for index in range(depth))


@dataclass
class _Node:
    """Paths that are the same so far."""

    slot: int  # of its states; -1: the embedded tokens
    members: list[int]
    waiting: int = 0  # children that are still to be computed


class _States:
    """Hidden states of samples for every path, in memory as far as they fit."""

    def __init__(self, slots: int, samples: int, slot_nbytes: int, room: int, file: File) -> None:
        self.inside = min(slots, room // slot_nbytes)
        self.streams = (
            blockwise.HiddenStates(samples, None, self.inside),
            blockwise.HiddenStates(samples, file, slots - self.inside),
        )
        self.used = 0

    def new(self) -> int:
        self.used += 1
        return self.used - 1

    def read(self, slot: int, start: int, count: int) -> Tensor:
        """A copy, so that where it lies in memory is the same whatever else is there."""
        stream, side = self._where(slot)
        return stream.read(start, count, side).clone()

    def write(self, slot: int, start: int, states: Tensor) -> None:
        stream, side = self._where(slot)
        stream.write(start, states, side)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    def _where(self, slot: int) -> tuple[blockwise.HiddenStates, int]:
        return (self.streams[0], slot) if slot < self.inside else (self.streams[1], slot - self.inside)


class _Decoded:
    """The latest weights of changed linears, up to so many bytes."""

    def __init__(self, levels: Levels, nbytes: int) -> None:
        self.levels, self.left = levels, nbytes
        self.kept: OrderedDict[tuple[str, Level], Tensor] = OrderedDict()

    @torch.no_grad()
    def weight(self, name: str, level: Level, original: Tensor) -> Tensor:
        found = self.kept.pop((name, level), None)
        if found is None:
            found = self.levels.weight(name, level, original).to(original.device)
            if found.shape != original.shape or found.dtype != original.dtype:
                raise ValueError(
                    f"{name} at {level!r} is {list(found.shape)} {found.dtype}, not {list(original.shape)} "
                    f"{original.dtype}"
                )
            self.left -= found.nbytes
        self.kept[name, level] = found
        while self.left < 0 and self.kept:
            self.left += self.kept.popitem(last=False)[1].nbytes
        return found


@dataclass(frozen=True)
class Setting:
    """How variants are run."""

    batch: int  # samples in a forward pass
    room: Room | int  # or the bytes that there are
    device: torch.device
    dtype: torch.dtype | None  # None: as stored


class Evaluator:
    """The divergences of paths, in one process, in a folder of its own."""

    def __init__(self, source: Source, tokens: Tensor, folder: File, setting: Setting) -> None:
        self.skeleton, levels = source()
        self.end = self.skeleton.free if setting.dtype is None else blockwise.computing_in(self.skeleton, setting.dtype)
        try:
            room = setting.room
            self.room = room if isinstance(room, Room) else Room.within(self.skeleton, room)
        except BudgetError:
            self.end()
            raise
        self.prepare: Callable[[int, nn.Module], None] | None = getattr(levels, "prepare", None)
        self.tokens, self.folder, self.batch, self.device = tokens, folder, setting.batch, setting.device
        self.decoded = _Decoded(levels, self.room.decoded)
        self.loaded: set[int] = set()  # blocks that are kept
        self.has_head = False
        self.embedded: blockwise.HiddenStates | None = None
        self.calls: blockwise.ModelArgs = []

    @torch.no_grad()
    def per_sample(
        self, paths: Sequence[Path], batches: Sequence[Batch], reference: reference_logprobs.Teacher
    ) -> list[list[float]]:
        """Of each path, KL(original || changed) of each sample in the order of the batches, nats a token.

        The paths differ from each other; a batch has `batch` samples or one.
        """
        self._embed()
        found: list[list[float]] = [[] for _ in paths]
        for some in self._windows(len(paths), batches):
            for mine, new in zip(found, self._window(paths, some, reference), strict=True):
                mine += new
        return found

    def close(self) -> None:
        """Free everything."""
        self.end()
        self.loaded.clear()
        self.has_head = False
        self.decoded.kept.clear()
        if self.embedded is not None:
            self.embedded.close()
            self.embedded = None

    def _embed(self) -> None:
        """Keep what reaches the first block, and what every block is called with."""
        if self.embedded is not None:
            return
        samples = self.tokens.shape[0]
        file = self.folder / f"embedded-{os.getpid()}"
        fits = samples * self._sample_nbytes() <= self.room.states // 2
        self.embedded = blockwise.HiddenStates(samples, None if fits else file)
        self.calls = blockwise.record_inputs(self.skeleton, self.tokens, self.batch, self.embedded, self.device)
        single = blockwise.record_inputs(
            self.skeleton, self.tokens[:1], 1, blockwise.HiddenStates(1, None), self.device
        )
        for call, other in zip(self.calls, single, strict=True):
            call.update(other)

    def _sample_nbytes(self) -> int:
        """Bytes of the hidden states of one sample."""
        hidden = self.skeleton.config.get_text_config().hidden_size
        return self.tokens.shape[1] * hidden * self.skeleton.dtype.itemsize

    def _windows(self, paths: int, batches: Sequence[Batch]) -> Iterator[list[Batch]]:
        """The batches that go through all blocks together: as many as their states fit, at least one."""
        allowed = self.room.states
        if not self.room.keeps:
            allowed = max(allowed, shutil.disk_usage(self.folder).free // 4)
        most = max(1, allowed // (paths * self._sample_nbytes()))  # samples
        window: list[Batch] = []
        for batch in batches:
            if window and sum(map(len, window)) + len(batch) > most:
                yield window
                window = []
            window.append(batch)
        if window:
            yield window

    def _window(
        self, paths: Sequence[Path], batches: list[Batch], reference: reference_logprobs.Teacher
    ) -> Iterator[list[float]]:
        samples = sum(map(len, batches))
        file = self.folder / f"states-{os.getpid()}"
        states = _States(len(paths), samples, samples * self._sample_nbytes(), self.room.states, file)
        try:
            nodes = [_Node(-1, list(range(len(paths))))]
            for index in range(len(self.skeleton.blocks)):
                nodes = self._through(index, nodes, paths, batches, states)
            found = self._compare(nodes, batches, states, reference)
        finally:
            states.close()
        return (found[number] for number in range(len(paths)))

    def _through(
        self, index: int, nodes: list[_Node], paths: Sequence[Path], batches: list[Batch], states: _States
    ) -> list[_Node]:
        """The children of these nodes, behind the block."""
        wanted: dict[Part, list[tuple[_Node, list[int]]]] = {}  # nodes with the same weights, one after the other
        for node in nodes:
            children: dict[Part, list[int]] = {}
            for member in node.members:
                children.setdefault(paths[member][index], []).append(member)
            for part, members in children.items():
                wanted.setdefault(part, []).append((node, members))
            node.waiting = len(children)
        made = []
        with self._block(index) as block:
            for part, pairs in wanted.items():
                with self._changed(block, part):
                    for parent, members in pairs:
                        parent.waiting -= 1
                        is_last = parent.waiting == 0 and parent.slot >= 0
                        child = _Node(parent.slot if is_last else states.new(), members)
                        self._run(index, block, (parent.slot, child.slot), batches, states)
                        made.append(child)
        return made

    def _run(self, index: int, block: nn.Module, slots: tuple[int, int], batches: list[Batch], states: _States) -> None:
        """The block on the states of one slot, batch by batch, into the other."""
        name, start = self.skeleton.block_prefix(index).rstrip("."), 0
        for batch in batches:
            if slots[0] < 0:
                embedded = cast(blockwise.HiddenStates, self.embedded)
                hidden = torch.cat([embedded.read(sample, 1) for sample in batch])
            else:
                hidden = states.read(slots[0], start, len(batch))
            out = blockwise.run_block(block, self.calls[index][len(batch)], hidden.to(self.device), name)
            states.write(slots[1], start, out)
            start += len(batch)

    def _compare(
        self, leaves: list[_Node], batches: list[Batch], states: _States, reference: reference_logprobs.Teacher
    ) -> dict[int, list[float]]:
        """Number of the path -> the mean divergence of each sample behind the last block."""
        found: dict[int, list[float]] = {leaf.members[0]: [] for leaf in leaves}
        length = self.tokens.shape[1]
        parts = kl.slices(length, self.skeleton.vocab_size)
        with self._head() as logits:
            for position, sample in enumerate(sample for batch in batches for sample in batch):
                row = reference.row(sample, self.device)
                for leaf in leaves:
                    hidden = states.read(leaf.slot, position, 1).to(self.device)
                    sums = [reference_logprobs.divergence(row, part, logits(hidden[:, part])) for part in parts]
                    found[leaf.members[0]].append(sum(sums) / length)
        return found

    @contextmanager
    def _block(self, index: int) -> Iterator[nn.Module]:
        """A block with its weights; freed afterwards unless it is kept."""
        if index in self.loaded:
            yield self.skeleton.blocks[index]
            return
        try:
            block = self.skeleton.load_block(index, self.device)
            if self.prepare is not None:
                self.prepare(index, block)
            if self.room.keeps:
                self.loaded.add(index)
            yield block
        finally:
            if not self.room.keeps:
                self.skeleton.free()

    @contextmanager
    def _changed(self, block: nn.Module, part: Part) -> Iterator[None]:
        """While active, these linears of the block have the weights of their levels."""
        before: list[tuple[nn.Linear, Tensor]] = []
        try:
            for name, level in part:
                linear = self.skeleton.linear(block, name)
                original = linear.weight.data
                new = self.decoded.weight(name, level, original)
                before.append((linear, original))
                linear.weight.data = new
            yield
        finally:
            for linear, original in before:
                linear.weight.data = original

    @contextmanager
    def _head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Hidden states [1, tokens, hidden] -> logits."""
        with nullcontext() if self.room.keeps else _freed(self.skeleton):
            if not self.has_head:
                lm_head.load(self.skeleton, self.device)
                self.has_head = self.room.keeps
            yield lambda hidden: lm_head.logits(self.skeleton, hidden)[0]


@contextmanager
def _freed(skeleton: Skeleton) -> Iterator[None]:
    try:
        yield
    finally:
        skeleton.free()
