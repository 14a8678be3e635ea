"""Tune a block while it is quantized, so that it gives what it gave with its own weights (block-wise reconstruction).

BRECQ (Li et al. 2021, arXiv 2102.05426) fits a block's rounding to the block's own output. QuIP# (Tseng et al. 2024,
arXiv 2402.04396) tunes the weights that are still to be quantized, so that they make up for those that are: linears are
taken in the groups that read one input (q, k, v; o; gate, up; down), and behind each the rest is trained, with norms
and biases. At the end, with all codes chosen, the numbers that lie beside them are trained: scales, codebooks,
lattices, gains, low-rank factors, norms and biases. Gradients go through the format's own decoding, so that this serves
every format.

The loss is the relative squared error of the block's output for what the quantized prefix gives, against what the
full-precision model gives behind the block, so that the errors of earlier blocks are made up for, too. One batch in
`held_out` is not trained on, and no stage leaves a block with a larger error on these than it found. A trained number
moves in units of the root mean square of its tensor.

Differences: QuIP# learns its signs as real vectors, too. Not done: codes that move (PV-Tuning, rounding by signs of
gradients); inputs that are quantized at run time; training over the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress import formats
from compress.model.block_calls import BlockArgs, leaves
from compress.model.blockwise import call_block
from compress.tune.descend import descend
from compress.types import IN_SCALE, PackedWeight

SCOPE = "block"
CHECKS = 8  # times that the held-out error is measured in a stage
MASTERS = 24  # bytes of a trained number: where it began, how far it is, its gradient, two moments, the best so far
STATES = 4  # times the activations of a forward pass that a forward and a backward pass take


@dataclass(frozen=True)
class Config:
    """Settings of block-wise tuning."""

    steps: int = 100  # [steps] with all codes chosen; 0: none
    between: int = 40  # [steps] behind each group of linears but the last; 0: none
    rate: float = 0.002  # of AdamW, in units of the root mean square of each tensor
    held_out: int = 8  # [batches] of which one is not trained on

    def __post_init__(self) -> None:
        if min(self.steps, self.between) < 0:
            raise ValueError(f"steps {self.steps} and between {self.between} must not be negative")
        if not 0 < self.rate < 1:
            raise ValueError(f"rate {self.rate} is not between 0 and 1")
        if self.held_out < 2:
            raise ValueError(f"held_out {self.held_out} is less than 2: nothing would be trained on")


def workspace(config: Config, numel: int, states: int) -> int:
    """Return the bytes that tuning takes beside a block of `numel` weights; states: bytes of a forward pass."""
    return numel * (4 + 4 + MASTERS) + 2 * STATES * states


Batch = tuple[Tensor, BlockArgs, Tensor]  # hidden states, other arguments, and what the block should give for them
Batches = Callable[[], Iterable[Batch]]


class Stage(NamedTuple):
    """The held-out error of a block before a stage and behind it."""

    before: float
    after: float


class BlockTuning:
    """One block, its linears partly quantized; `block` has its own weights, and stays as it is."""

    def __init__(self, block: nn.Module, names: Sequence[str], batches: Batches, count: int, config: Config) -> None:
        """names: paths in the block of the linears that are to be quantized. batches: `count` at every call."""
        self.block, self.batches, self.count, self.config = block, batches, count, config
        self.left = list(names)
        self.packed: dict[str, PackedWeight] = {}
        self.model = copy.deepcopy(block).float().requires_grad_(False)
        self.stages: list[Stage] = []

    def weight(self, name: str) -> Tensor:
        """Return the weight [out, in] of a linear that is quantized next, in the type of the block."""
        return self.model.get_submodule(name).get_parameter("weight").detach().to(self._type(name))

    @torch.no_grad()
    def add(self, name: str, packed: PackedWeight) -> None:
        """Take a quantized linear."""
        self.left.remove(name)
        self.packed[name] = packed
        self.model.get_submodule(name).get_parameter("weight").copy_(formats.decode(packed, torch.float32))

    @torch.no_grad()
    def between(self) -> None:
        """Train the weights that are still to be quantized, norms and biases; called before each group of linears."""
        if self.packed and self.left and self.config.between:
            weights = [f"{name}.weight" for name in self.left]
            trained = {name: _Trained(self.model.get_parameter(name)) for name in [*weights, *self._vectors()]}
            self._train(trained, self.config.between, lambda: {n: each.value() for n, each in trained.items()})
            for name, each in trained.items():
                self.model.get_parameter(name).copy_(each.value())

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, PackedWeight], dict[str, Tensor], str]:
        """Train what lies beside the codes; return all packed weights, all vectors of the block, and a note."""
        if self.config.steps:
            self._beside_codes()
        vectors = {name: self.model.get_parameter(name).to(self._type(name)) for name in self._vectors()}
        found = [f"{stage.before:.3g} -> {stage.after:.3g}" for stage in self.stages]
        return self.packed, vectors, f"tuned; held-out error of the block, stage by stage: {', '.join(found)}"

    def _beside_codes(self) -> None:
        vectors = {name: _Trained(self.model.get_parameter(name)) for name in self._vectors()}
        inner = {name: _floats(packed) for name, packed in self.packed.items()}

        def parameters() -> dict[str, Tensor]:
            tensors = {name: each.value() for name, each in vectors.items()}
            for name, packed in self.packed.items():
                changed = {key: each.value() for key, each in inner[name].items()}
                moved = PackedWeight(packed.stored, {**packed.tensors, **changed}, packed.shape)
                tensors[f"{name}.weight"] = formats.decode(moved, torch.float32)
            return tensors

        trained = {**vectors, **{f"{name} {key}": each for name, of in inner.items() for key, each in of.items()}}
        self._train(trained, self.config.steps, parameters)
        before = {name: self.model.get_parameter(name).clone() for name in parameters()}
        packed = {name: _rounded(weight, inner[name]) for name, weight in self.packed.items()}
        for name, each in vectors.items():
            self.model.get_parameter(name).copy_(each.value().to(self._type(name)))
        for name, weight in packed.items():
            self.model.get_parameter(f"{name}.weight").copy_(formats.decode(weight, torch.float32))
        stage = self.stages.pop()
        after = self._error(lambda: {})
        if after < stage.before:  # with all rounded to what is stored
            self.packed, stage = packed, stage._replace(after=after)
        else:
            stage = stage._replace(after=stage.before)
            for name, tensor in before.items():
                self.model.get_parameter(name).copy_(tensor)
        self.stages.append(stage)

    @torch.no_grad()
    def _train(self, trained: Mapping[str, _Trained], steps: int, parameters: Callable[[], dict[str, Tensor]]) -> None:
        """Train for some steps and leave what was best on the held-out batches, the start included."""
        parts = list(trained.values())
        best = first = self._error(parameters)
        stream = self._endless()

        def loss(step: int) -> float:
            hidden, call, target = next(stream)
            expected = target.float()
            with torch.enable_grad():
                found = self._run(parameters(), hidden, call)
                error = (found - expected).square().mean() / expected.square().mean()
                error.backward()
            return error.item()

        def check(step: int) -> None:
            nonlocal best
            if (step + 1) % max(1, steps // CHECKS) and step + 1 < steps:
                return
            if (error := self._error(parameters)) < best:
                best = error
                for part in parts:
                    part.best.copy_(part.moved)

        descend([part.moved for part in parts], steps, self.config.rate, loss, check)
        for part in parts:
            part.moved.data.copy_(part.best)
        self.stages.append(Stage(first, best))

    def _vectors(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.dim() == 1]

    def _type(self, name: str) -> torch.dtype:
        owner = self.block.get_submodule(name) if name in self.left else None
        return (owner.get_parameter("weight") if owner is not None else self.block.get_parameter(name)).dtype

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield from self._chosen(is_held=False)

    def _chosen(self, is_held: bool) -> Iterator[Batch]:
        """Yield the batches that are held out, or the others; a single one is both."""
        for number, batch in enumerate(self.batches()):
            if self.count == 1 or (number % self.config.held_out == 0) == is_held:
                yield batch

    def _run(self, parameters: Mapping[str, Tensor], hidden: Tensor, call: BlockArgs) -> Tensor:
        """Return what the block gives with these parameters, in float32."""

        def run(*args: object, **kwargs: object) -> object:
            return functional_call(self.model, dict(parameters), args, kwargs)

        return call_block(run, _wide(call), hidden.float())[0]

    @torch.no_grad()
    def _error(self, parameters: Callable[[], dict[str, Tensor]]) -> float:
        """Return the relative squared error on the held-out batches."""
        tensors, error, size = parameters(), 0.0, 0.0
        for hidden, call, target in self._chosen(is_held=True):
            expected = target.float()
            error += (self._run(tensors, hidden, call) - expected).square().sum(dtype=torch.float64).item()
            size += expected.square().sum(dtype=torch.float64).item()
        return error / size


class _Trained:
    """A tensor that is trained: it begins as it is, and moves in units of its root mean square."""

    def __init__(self, start: Tensor) -> None:
        self.start = start.detach().float()
        self.unit = float(self.start.square().mean().sqrt()) or 1.0
        self.moved = nn.Parameter(torch.zeros_like(self.start))
        self.best = torch.zeros_like(self.start)

    def value(self) -> Tensor:
        """Return the tensor as it is now, float32."""
        return self.start + self.unit * self.moved


def _floats(packed: PackedWeight) -> dict[str, _Trained]:
    """Return the stored floating-point numbers of a weight, but for the scale of its inputs."""
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    return {name: _Trained(t) for name, t in packed.tensors.items() if t.dtype in kinds and name != IN_SCALE}


@torch.no_grad()
def _rounded(packed: PackedWeight, trained: Mapping[str, _Trained]) -> PackedWeight:
    """Return a weight with trained numbers in the types that they are stored in."""
    moved = {name: each.value().to(packed.tensors[name].dtype).contiguous() for name, each in trained.items()}
    return PackedWeight(packed.stored, {**packed.tensors, **moved}, packed.shape)


def _wide(call: BlockArgs) -> BlockArgs:
    """Return a call with 16-bit tensors in float32."""
    half = (torch.float16, torch.bfloat16)
    return call.changed({p: t.float() for p, t in leaves(call.tree) if isinstance(t, Tensor) and t.dtype in half})
