"""Hold a block while it is quantized, and measure how far it is from what it gave, on batches that are kept apart.

What methods of `tune` share that do not change the codes: a copy of the block in float32 that takes the quantized
weights one by one, its runs with other parameters, and its relative squared error on the held-out batches, against
what the full-precision model gives behind the block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress import formats
from compress.model.block_calls import BlockArgs, leaves
from compress.model.blockwise import call_block
from compress.types import PackedWeight

Batch = tuple[Tensor, BlockArgs, Tensor]  # hidden states, other arguments, and what the block should give for them
Batches = Callable[[], Iterable[Batch]]


class HeldBlock:
    """One block, its linears partly quantized; `block` has its own weights, and stays as it is."""

    def __init__(self, block: nn.Module, names: Sequence[str], batches: Batches, count: int, held_out: int) -> None:
        """Copy the block.

        names: paths in the block of the linears that are to be quantized. batches: `count` at every call, of which
        one in `held_out` is kept apart.
        """
        self.block, self.batches, self.count, self.held_out = block, batches, count, held_out
        self.left = list(names)
        self.packed: dict[str, PackedWeight] = {}
        self.model = copy.deepcopy(block).float().requires_grad_(False)

    def weight(self, name: str) -> Tensor:
        """Return the weight [out, in] of a linear that is quantized next, in the type of the block."""
        return self.block.get_submodule(name).get_parameter("weight").detach()

    @torch.no_grad()
    def add(self, name: str, packed: PackedWeight) -> None:
        """Take a quantized linear."""
        self.left.remove(name)
        self.packed[name] = packed
        self.model.get_submodule(name).get_parameter("weight").copy_(formats.decode(packed, torch.float32))

    def between(self) -> None:
        """Change nothing before the next group of linears."""

    def own_type(self, name: str) -> torch.dtype:
        """Return the type in which a parameter is stored."""
        return self.block.get_parameter(name).dtype

    def chosen(self, is_held: bool) -> Iterator[Batch]:
        """Yield the batches that are kept apart, or the others; a single one is both."""
        for number, batch in enumerate(self.batches()):
            if self.count == 1 or (number % self.held_out == 0) == is_held:
                yield batch

    def endless(self) -> Iterator[Batch]:
        """Yield the batches that are not kept apart, again and again."""
        while True:
            yield from self.chosen(is_held=False)

    def run(self, parameters: Mapping[str, Tensor], hidden: Tensor, call: BlockArgs) -> Tensor:
        """Return what the block gives with these parameters in the place of its own, in float32."""

        def run(*args: object, **kwargs: object) -> object:
            return functional_call(self.model, dict(parameters), args, kwargs)

        return call_block(run, _wide(call), hidden.float())[0]

    @torch.no_grad()
    def error(self, parameters: Mapping[str, Tensor]) -> float:
        """Return the relative squared error on the held-out batches with these parameters."""
        error = size = 0.0
        for hidden, call, target in self.chosen(is_held=True):
            expected = target.float()
            error += (self.run(parameters, hidden, call) - expected).square().sum(dtype=torch.float64).item()
            size += expected.square().sum(dtype=torch.float64).item()
        return error / size


def _wide(call: BlockArgs) -> BlockArgs:
    """Return a call with 16-bit tensors in float32."""
    half = (torch.float16, torch.bfloat16)
    return call.changed({p: t.float() for p, t in leaves(call.tree) if isinstance(t, Tensor) and t.dtype in half})
