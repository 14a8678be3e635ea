"""Run many variants of a model block by block in one process, and compute only once what agrees up to a block.

A `VariantPath` says for each block which of its linears are changed, and to which variant; in front of the blocks it
says so of the token embeddings, behind them of the output head. Paths that begin alike form a tree; each of its nodes
is computed once from its parent's hidden states, with the changed linears' weights in place of the original ones. Paths
that differ in their head alone share all nodes. A node's states take its parent's place as soon as no other child needs
them, so that there are never more than there are paths; past a limit they are in a file.

Blocks are loaded one at a time, or all are kept where memory allows. Then samples go through the model as many at a
time as their states stay in memory; otherwise all go together, so that a block is loaded once.

A path's result depends on the path and its samples alone: each sample is run as it would be by itself.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from compress import process_memory
from compress.allocate import memory_split
from compress.allocate.memory_split import MemorySplit
from compress.calib import reference_logprobs
from compress.errors import BudgetError
from compress.model import blockwise, lm_head
from compress.model.skeleton import Skeleton
from compress.numerics import kl

DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")

Variant = Hashable  # what a linear is at; None: as it is
BlockVariants = tuple[tuple[str, Variant], ...]  # full name of a linear of one block (or of a table), and its variant
VariantPath = tuple[BlockVariants, ...]  # of the embeddings, of every block, of the output head


class VariantWeights(Protocol):
    """The source of the weights of changed linears.

    A class may also have `prepare(index: int, block: nn.Module) -> None`, called on every loaded block before anything
    else: what a transform inside blocks makes of norms and of the weights that are not changed, in place.
    """

    def weight(self, name: str, variant: Variant, original: Tensor) -> Tensor:
        """Return the effective weight [out, in] of a linear at this variant, in the dtype of `original`, unchanged."""


ModelSource = Callable[
    [], tuple[Skeleton, VariantWeights]
]  # edits have begun; nobody else uses the skeleton until `close`


def path(skeleton: Skeleton, assignment: Mapping[str, Variant]) -> VariantPath:
    """Return the path of an assignment linear -> variant; None, and what is not named, stays original.

    The embeddings and the output head go by the names of their modules; a tied table has the name of either.
    """
    parts: list[list[tuple[str, Variant]]] = [[] for _ in range(len(skeleton.blocks) + 2)]
    for name, variant in sorted(assignment.items()):
        for stage in _stages(skeleton, name):
            if variant is not None:
                parts[stage].append((name, variant))
    return tuple(map(tuple, parts))


def _stages(skeleton: Skeleton, name: str) -> list[int]:
    """Return where in a path a linear or a table stands: one place, or both ends for a tied table."""
    inner = name.removeprefix(f"{skeleton.blocks_name}.")
    number = inner.partition(".")[0]
    if inner != name and number.isdigit() and int(number) < len(skeleton.blocks):
        return [1 + int(number)]
    ends = {0: skeleton.model.get_input_embeddings(), -1: skeleton.model.get_output_embeddings()}
    with suppress(AttributeError):  # there is no such module, or it has no weight
        weight = skeleton.model.get_submodule(name).weight
        if stages := [stage for stage, module in ends.items() if getattr(module, "weight", None) is weight]:
            return stages
    raise ValueError(f"{name} is no linear of the blocks {skeleton.blocks_name}, and no table outside of them")


def passes(paths: Sequence[VariantPath]) -> int:
    """Count the block passes that these paths take: the nodes of their tree."""
    blocks = range(1, len(paths[0]) - 1) if paths else ()
    return sum(len({one[: index + 1] for one in paths}) for index in blocks)


@dataclass
class _PathNode:
    """Paths that are the same so far."""

    slot: int  # of its states; below 0: the embedded tokens, -1 those of the first embeddings
    members: list[int]
    waiting: int = 0  # children that are still to be computed


class _States:
    """Hidden states of samples for every path, in memory as far as they fit."""

    def __init__(self, slots: int, samples: int, slot_nbytes: int, room: int, file: Path) -> None:
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
        """Return a copy, whose alignment in memory does not depend on what else is there."""
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

    def __init__(self, variants: VariantWeights, nbytes: int) -> None:
        self.variants, self.left = variants, nbytes
        self.kept: OrderedDict[tuple[str, Variant], Tensor] = OrderedDict()

    @torch.no_grad()
    def weight(self, name: str, variant: Variant, original: Tensor) -> Tensor:
        weight = self.kept.pop((name, variant), None)
        if weight is None:
            weight = self.variants.weight(name, variant, original).to(original.device)
            if weight.shape != original.shape or weight.dtype != original.dtype:
                raise ValueError(
                    f"{name} at {variant!r} is {list(weight.shape)} {weight.dtype}, not {list(original.shape)} "
                    f"{original.dtype}"
                )
            self.left -= weight.nbytes
        self.kept[name, variant] = weight
        while self.left < 0 and self.kept:
            self.left += self.kept.popitem(last=False)[1].nbytes
        return weight


@dataclass(frozen=True)
class Resources:
    """The means that an evaluation may use."""

    device: str = "cpu"
    processes: int = 1  # 1: this one
    top_k: int = reference_logprobs.TOP_K  # log-probabilities that are kept of each position of the original
    max_memory: int | None = None  # bytes of all processes for weights and hidden states; None: 80% of what is free
    memory: MemorySplit | None = None  # of each process, in place of what max_memory gives
    dtype: str = "float32"  # that blocks compute in, or "auto": as stored
    table: int = 0  # weights of the largest table outside of the blocks that has variants

    def __post_init__(self) -> None:
        for name in ("processes", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is less than 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")

    def within(self, skeleton: Skeleton, seq_len: int) -> MemorySplit:
        """Return the memory of one process; max_memory is given."""
        assert self.memory is not None or self.max_memory is not None, "joint_kl.py sets one"
        if self.memory is not None:
            return self.memory
        needed = memory_split.sizes(skeleton, seq_len, self.top_k, skeleton.dtype.itemsize, self.table)
        return MemorySplit.within(needed, (self.max_memory or 0) // self.processes)


class PathEvaluator:
    """An evaluator of paths in one process, with its files in a folder of its own."""

    def __init__(self, source: ModelSource, tokens: Tensor, folder: Path, resources: Resources) -> None:
        self.skeleton, variants = source()
        dtype = None if resources.dtype == "auto" else getattr(torch, resources.dtype)
        self.end = self.skeleton.free if dtype is None else blockwise.computing_in(self.skeleton, dtype)
        try:
            self.memory = resources.within(self.skeleton, tokens.shape[1])
        except BudgetError:
            self.end()
            raise
        self.prepare: Callable[[int, nn.Module], None] | None = getattr(variants, "prepare", None)
        self.tokens, self.folder, self.device = tokens, folder, torch.device(resources.device)
        self.decoded = _Decoded(variants, self.memory.decoded)
        self.loaded: set[int] = set()  # blocks that are kept
        self.has_head = False
        self.embedded: dict[BlockVariants, blockwise.HiddenStates] = {}  # what variants of the embeddings give
        self.calls: blockwise.ModelArgs  # set with the first of them, the original's

    @process_memory.reusing()
    @torch.no_grad()
    def per_sample(
        self, paths: Sequence[VariantPath], samples: Sequence[int], reference: reference_logprobs.ReferenceLogprobs
    ) -> list[list[float]]:
        """Return for each path KL(original || variant) of each sample, nats a token; the paths differ."""
        for variants in dict.fromkeys([(), *(one[0] for one in paths)]):
            if variants not in self.embedded:
                self._embed(variants)
        kls: list[list[float]] = [[] for _ in paths]
        for some in self._windows(len(paths), samples):
            for row, new in zip(kls, self._window(paths, some, reference), strict=True):
                row += new
        return kls

    def close(self) -> None:
        """Free all memory and remove the files."""
        self.end()
        self.loaded.clear()
        self.has_head = False
        self.decoded.kept.clear()
        while self.embedded:
            self.embedded.popitem()[1].close()

    def _embed(self, variants: BlockVariants) -> None:
        """Keep what reaches the first block behind these embeddings, and what every block is called with."""
        samples, number = self.tokens.shape[0], len(self.embedded)
        file = self.folder / f"embedded-{os.getpid()}-{number}"
        fits = (number + 1) * samples * self._sample_nbytes() <= self.memory.states // 2
        stream = blockwise.HiddenStates(samples, None if fits else file)
        self.loaded.clear()  # all weights are freed
        self.has_head = False
        with ExitStack() as failed, ExitStack() as changed:
            failed.callback(stream.close)

            def change() -> None:
                module = self.skeleton.model.get_input_embeddings()
                changed.enter_context(self._with_variants([(module, *variant) for variant in variants]))

            calls = blockwise.record_inputs(self.skeleton, self.tokens, 1, stream, self.device, change)
            if not variants:
                self.calls = calls
            self.embedded[variants] = stream
            failed.pop_all()

    def _sample_nbytes(self) -> int:
        """Return the bytes of the hidden states of one sample."""
        hidden = self.skeleton.config.get_text_config().hidden_size
        return self.tokens.shape[1] * hidden * self.skeleton.dtype.itemsize

    def _windows(self, paths: int, samples: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the samples that go through all blocks together: as many as their states fit, at least one."""
        allowed = self.memory.states
        if not self.memory.keeps:
            allowed = max(allowed, shutil.disk_usage(self.folder).free // 4)
        most = max(1, allowed // (paths * self._sample_nbytes()))
        for start in range(0, len(samples), most):
            yield samples[start : start + most]

    def _window(
        self, paths: Sequence[VariantPath], samples: Sequence[int], reference: reference_logprobs.ReferenceLogprobs
    ) -> Iterator[list[float]]:
        file = self.folder / f"states-{os.getpid()}"
        states = _States(len(paths), len(samples), len(samples) * self._sample_nbytes(), self.memory.states, file)
        try:
            roots = [(-1 - n, [i for i, one in enumerate(paths) if one[0] == v]) for n, v in enumerate(self.embedded)]
            nodes = [_PathNode(slot, members) for slot, members in roots if members]
            for index in range(len(self.skeleton.blocks)):
                nodes = self._through(index, nodes, paths, samples, states)
            kls: dict[int, list[float]] = {}
            for variants in dict.fromkeys(one[-1] for one in paths):
                slots = {i: leaf.slot for leaf in nodes for i in leaf.members if paths[i][-1] == variants}
                kls |= self._compare(slots, variants, samples, states, reference)
        finally:
            states.close()
        return (kls[number] for number in range(len(paths)))

    def _through(
        self, index: int, nodes: list[_PathNode], paths: Sequence[VariantPath], samples: Sequence[int], states: _States
    ) -> list[_PathNode]:
        """Return the children of these nodes, behind the block."""
        parents: dict[BlockVariants, list[tuple[_PathNode, list[int]]]] = {}  # so that equal weights follow each other
        for node in nodes:
            children: dict[BlockVariants, list[int]] = {}
            for member in node.members:
                children.setdefault(paths[member][index + 1], []).append(member)
            for variants, members in children.items():
                parents.setdefault(variants, []).append((node, members))
            node.waiting = len(children)
        made = []
        with self._block(index) as block:
            for variants, pairs in parents.items():
                with self._with_variants([(self.skeleton.linear(block, name), name, at) for name, at in variants]):
                    for parent, members in pairs:
                        parent.waiting -= 1
                        is_last = parent.waiting == 0 and parent.slot >= 0
                        child = _PathNode(parent.slot if is_last else states.new(), members)
                        self._run(index, block, (parent.slot, child.slot), samples, states)
                        made.append(child)
        return made

    def _run(
        self, index: int, block: nn.Module, slots: tuple[int, int], samples: Sequence[int], states: _States
    ) -> None:
        """Run the block on the states of one slot, sample by sample, into the other."""
        name, embedded = self.skeleton.block_prefix(index).rstrip("."), list(self.embedded.values())
        for position, sample in enumerate(samples):
            start = slots[0]
            hidden = embedded[-1 - start].read(sample, 1).clone() if start < 0 else states.read(start, position, 1)
            states.write(
                slots[1], position, blockwise.run_block(block, self.calls[index][1], hidden.to(self.device), name)
            )

    def _compare(
        self,
        slots: Mapping[int, int],
        head: BlockVariants,
        samples: Sequence[int],
        states: _States,
        reference: reference_logprobs.ReferenceLogprobs,
    ) -> dict[int, list[float]]:
        """Return number of the path -> the mean divergence of each sample behind the last block and this head.

        slots: of the paths with this head, where their states are.
        """
        kls: dict[int, list[float]] = {number: [] for number in slots}
        length = self.tokens.shape[1]
        parts = kl.slices(length, self.skeleton.vocab_size)
        with self._head(head) as logits:
            for position, sample in enumerate(samples):
                row = reference.row(sample, self.device)
                for number, slot in slots.items():
                    hidden = states.read(slot, position, 1).to(self.device)
                    sums = [reference_logprobs.divergence(row, part, logits(hidden[:, part])) for part in parts]
                    kls[number].append(sum(sums) / length)
        return kls

    @contextmanager
    def _block(self, index: int) -> Iterator[nn.Module]:
        """Load a block; it is freed afterwards unless it is kept."""
        if index in self.loaded:
            yield self.skeleton.blocks[index]
            return
        try:
            block = self.skeleton.load_block(index, self.device)
            if self.prepare is not None:
                self.prepare(index, block)
            if self.memory.keeps:
                self.loaded.add(index)
            yield block
        finally:
            if not self.memory.keeps:
                self.skeleton.free()

    @contextmanager
    def _with_variants(self, variants: Sequence[tuple[nn.Module, str, Variant]]) -> Iterator[None]:
        """Give these loaded modules, each with its name, the weights of their variants while active."""
        before: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for module, name, variant in variants:
                parameter = module.get_parameter("weight")
                original = parameter.data
                new = self.decoded.weight(name, variant, original)
                before.append((parameter, original))
                parameter.data = new
            yield
        finally:
            for parameter, original in before:
                parameter.data = original

    @contextmanager
    def _head(self, variants: BlockVariants) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield the function hidden states [1, tokens, hidden] -> logits, with a variant of the head."""
        with ExitStack() as stack:
            if not self.memory.keeps:
                stack.callback(self.skeleton.free)
            if not self.has_head:
                lm_head.load(self.skeleton, self.device)
                self.has_head = self.memory.keeps
            head = self.skeleton.model.get_output_embeddings()
            stack.enter_context(self._with_variants([(head, name, variant) for name, variant in variants]))
            yield lambda hidden: lm_head.logits(self.skeleton, hidden)[0]
