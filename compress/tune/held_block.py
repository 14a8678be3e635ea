"""Hold a block while it is quantized, and measure how far it is from what it gave, on batches that are held out.

What all methods of `tune` for blocks share: a copy of the block in float32 that takes the quantized weights one by one,
its runs with other parameters, and its relative squared error on the held-out batches, token by token, against what
the full-precision model gives behind the block. Inputs that are quantized at run time are quantized here, too, from
when their linear is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from compress import formats
from compress.formats import transforms
from compress.model.block_calls import BlockArgs, leaves
from compress.model.blockwise import attached, call_block
from compress.runtime import activation_quant
from compress.types import IN_SCALE, Fisher, PackedWeight

MAX_HELD_OUT_BATCHES = 2  # batches that are held out, at most: they stay in memory
SAME = 1e-3  # share that what a block gives for some samples differs by from what it gives for them among others
Batch = tuple[Tensor, BlockArgs, Tensor]  # hidden states, other arguments, and what the block should give for them
Batches = Callable[[], Iterable[Batch]]
Run = Callable[[Tensor, BlockArgs], Tensor]


class Portions:
    """The batches of a block."""

    def __init__(self, batches: Batches, count: int, held_out: int, tokens: int | None, run: Run) -> None:
        """batches: `count` at every call. held_out: one in so many. tokens: of a step, about; None: a batch.

        run: gives what the block gives.
        """
        self.batches, self.count, self.tokens, self.run = batches, count, tokens, run
        self.every = max(held_out, -(-count // MAX_HELD_OUT_BATCHES))
        self._held: list[Batch] | None = None
        self._can_cut: bool | None = None

    def held_out(self) -> list[Batch]:
        """Return the batches that are held out; a single one is trained on, too."""
        if self._held is None:
            self._held = [batch for number, batch in enumerate(self.batches()) if number % self.every == 0]
        return self._held

    def others(self) -> Iterator[Batch]:
        """Yield the batches that are not held out, in order; a single one is both."""
        for number, batch in enumerate(self.batches()):
            if self.count == 1 or number % self.every:
                yield batch

    def endless(self) -> Iterator[Batch]:
        """Yield what each step trains on: the batches that are not held out, cut, and again."""
        while True:
            for batch in self.others():
                yield from self._cut(batch)

    def _cut(self, batch: Batch) -> Iterator[Batch]:
        samples, length = batch[0].shape[0], batch[0].shape[1]
        size = samples if self.tokens is None else max(1, self.tokens // length)
        if size >= samples or not self._cuttable(batch):
            yield batch
            return
        for start in range(0, samples, size):
            yield batch_part(batch, slice(start, start + size))

    @torch.no_grad()
    def _cuttable(self, batch: Batch) -> bool:
        """Return whether the block gives for one sample alone what it gives for it among others; tried once."""
        if self._can_cut is None:
            try:
                hidden, call, _ = batch_part(batch, slice(0, 1))
                alone, among = self.run(hidden, call), self.run(*batch[:2])[:1]
                self._can_cut = bool((alone - among).square().sum() <= SAME**2 * among.square().sum())
            except (IndexError, RuntimeError, ValueError):
                self._can_cut = False
        return self._can_cut


def batch_part(batch: Batch, samples: slice) -> Batch:
    """Return some samples of a batch, with the arguments that have an entry for each."""
    hidden, call, target = batch
    own = {p: t[samples] for p, t in leaves(call.tree) if isinstance(t, Tensor) and t.shape[:1] == hidden.shape[:1]}
    return hidden[samples], call.changed(own), target[samples]


class BlockSizes(NamedTuple):
    """What the memory of tuning a block depends on."""

    numel: int  # weights of the block
    states: int  # bytes in float32 of all that modules of the block read and write in a forward pass of a batch
    hidden: int  # bytes of the hidden states of a batch, as they are kept between blocks
    batch: int  # [samples]
    seq_len: int  # [tokens]


class HeldBlock:
    """One block, its linears partly quantized; `block` has its own weights, and stays as it is."""

    def __init__(
        self,
        block: nn.Module,
        names: Sequence[str],
        batches: Batches,
        count: int,
        held_out: int,
        tokens: int | None = None,
    ) -> None:
        """Copy the block.

        names: paths in the block of the linears that are to be quantized. batches: `count` at every call, of which
        one in `held_out` is held out. tokens: of what `portions.endless` yields, about; None: whole batches.
        """
        self.block, self.left = block, list(names)
        self.packed: dict[str, PackedWeight] = {}
        self.fisher: dict[str, Fisher] = {}  # of linears that are weighed by the gradients of the model's loss
        self.model = copy.deepcopy(block).float().requires_grad_(False)
        self.portions = Portions(batches, count, held_out, tokens, lambda x, call: self.run({}, x, call))

    def weight(self, name: str) -> Tensor:
        """Return the weight [out, in] of a linear that is quantized next, in the type of the block."""
        weight = f"{name}.weight"
        return self.model.get_parameter(weight).detach().to(self.own_type(weight), copy=True)  # `add` changes ours

    @torch.no_grad()
    def add(self, name: str, packed: PackedWeight) -> None:
        """Take a quantized linear."""
        self.left.remove(name)
        self.packed[name] = packed
        self.model.get_submodule(name).get_parameter("weight").copy_(formats.decode(packed, torch.float32))
        attach_quantized_inputs(self.model.get_submodule(name), packed)

    def between(self) -> None:
        """Change nothing before the next group of linears."""

    def own_type(self, name: str) -> torch.dtype:
        """Return the type in which a parameter is stored."""
        return self.block.get_parameter(name).dtype

    def call_order(self, paths: Iterable[str]) -> list[list[str]]:
        """Return modules in the order in which the block calls them, together where they read one tensor.

        Those that are not called for a batch that is trained on are left out.
        """
        order: dict[str, Tensor] = {}

        def hook(path: str) -> RemovableHandle:
            def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                order.setdefault(path, args[0] if args else torch.empty(0))

            return self.model.get_submodule(path).register_forward_pre_hook(note)

        with attached([hook(path) for path in paths]):
            hidden, call, _ = next(self.portions.others())
            self.run({}, hidden, call)
        groups: list[list[str]] = []
        for path, states in order.items():
            if groups and order[groups[-1][0]] is states:
                groups[-1].append(path)
            else:
                groups.append([path])
        return groups

    def run(self, parameters: Mapping[str, Tensor], hidden: Tensor, call: BlockArgs) -> Tensor:
        """Return what the block gives with these parameters in the place of its own, in float32."""

        def run(*args: object, **kwargs: object) -> object:
            return functional_call(self.model, dict(parameters), args, kwargs)

        return call_block(run, _wide(call), hidden.float())[0]

    @torch.no_grad()
    def error(self, parameters: Mapping[str, Tensor]) -> float:
        """Return the relative squared error on the held-out batches with these parameters."""
        error = size = 0.0
        for hidden, call, target in self.portions.held_out():
            expected = target.float()
            error += relative(self.run(parameters, hidden, call), expected).sum(dtype=torch.float64).item()
            size += expected.shape[:-1].numel()
        return error / size


def relative(states: Tensor, expected: Tensor) -> Tensor:
    """Return the relative squared error of each token [...], of what a block gives [..., channels]."""
    size = expected.square().mean(-1)
    return (states - expected).square().mean(-1) / size.clamp(min=torch.finfo(torch.float32).tiny)


def _wide(call: BlockArgs) -> BlockArgs:
    """Return a call with 16-bit tensors in float32."""
    half = (torch.float16, torch.bfloat16)
    return call.changed({p: t.float() for p, t in leaves(call.tree) if isinstance(t, Tensor) and t.dtype in half})


def attach_quantized_inputs(linear: nn.Module, packed: PackedWeight) -> None:
    """Let a linear with the decoded weight of `packed` see what the packed one will see, if its inputs are quantized.

    Inputs are rounded in the basis of the stored matrix, and turned back. Gradients pass straight through the rounding.
    A low-rank part is taken to read them, too.
    """
    activations, ops = packed.stored.activations, packed.stored.ops
    if activations is None:
        return
    own = {name: tensor for name, tensor in packed.tensors.items() if name == IN_SCALE or name.startswith("in_")}

    def quantize_inputs(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        turned = transforms.apply_input(x, ops, own)
        rounded = activation_quant.fake_quantize(turned, activations, own.get(IN_SCALE))
        return transforms.undo_input(rounded, ops, own), *args[1:]

    linear.register_forward_pre_hook(quantize_inputs)
