"""Find the random rotation, of several, that leaves the roughly quantized model closest to the original.

The original model and the same model in each of the rotated bases run side by side, block by block, on a few
calibration samples. The rotated models are rounded to nearest: weights on the integer grids of the recipe, inputs as at
run time. They are judged by KL(original || rounded) of the predicted tokens, the mean over all positions. One block is
in memory at a time; the hidden states, one stream more than there are rotations, are in a file. Logits are made for so
many positions at a time that they stay small, with everything that the model itself does to them.

This is only a proxy: the recipe's method may do better than the nearest, weights of methods without an integer grid
count as they are, and a static scale is that of the batch. Cost: each block is loaded and run once more than there are
rotations, and its grids are searched for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from compress.formats import transforms
from compress.model import blockwise
from compress.model.blockwise import run_block
from compress.model.edits import EditContext, Edits
from compress.model.graph import Graph
from compress.model.lm_head import edited_by, logits_of
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.quant import grid, incoherence
from compress.runtime import activation_quant
from compress.transform.bases import Orthogonal
from compress.transform.search import fake_weight
from compress.types import NO_TRANSFORMS, Activations, Plan, Scheme, WeightTransforms


class SearchSettings(Protocol):
    """The part of the transform's `Config` that the search reads."""

    @property
    def seeds(self) -> int: ...

    @property
    def search_samples(self) -> int: ...

    @property
    def learn(self) -> int: ...


class SearchedRotation(Edits, Protocol):
    """A rotation of a model (compress/transform/rotate.py) whose bases can be exchanged."""

    skeleton: Skeleton
    graph: Graph
    seed: int
    width: int  # of the residual stream
    keep_mean: bool  # whether the vector of ones must stay in its place
    basis: Orthogonal | None  # of the residual stream
    values: Mapping[int, Orthogonal]  # block -> of each head's values

    @property
    def config(self) -> SearchSettings: ...

    def draw(self, number: int) -> None:
        """Take the random rotation of this number."""

    def use(self, residual: Orthogonal | None, values: Mapping[int, Orthogonal]) -> None:
        """Take these bases: of the residual stream, and of the values of each block."""

    def use_identity(self) -> None:
        """Only move the norms' weights into their readers."""


class LinearRounding(NamedTuple):
    """How one linear is rounded: the grid of its weight, its inputs, and the operations around what is stored."""

    config: grid.GridConfig | None  # None: the weight stays
    activations: Activations | None
    ops: WeightTransforms
    tensors: dict[str, Tensor]  # of the operations


def roundings(
    plan: Plan, seed: int, device: torch.device, has_grid: Callable[[Scheme], bool] = lambda _: True
) -> dict[str, LinearRounding]:
    """Return full name -> rounding of every linear that is rounded at all; seed: of the job."""
    layers = {layer.spec.name: layer for layer in plan.layers}
    rounded_layers = {}
    for name, scheme in plan.schemes.items():
        config = scheme.part_configs[0] if isinstance(scheme.config, grid.GridConfig) and has_grid(scheme) else None
        layer = layers.get(name)  # None: only transformed, not packed; nothing is left to run time
        tensors = incoherence.draw(layer.spec, seed, layer.stored.ops) if layer is not None else {}
        tensors = {key: tensor.to(device) for key, tensor in tensors.items()}
        if config is not None or scheme.activations is not None:
            around = layer.stored.ops if layer is not None else NO_TRANSFORMS
            rounded_layers[name] = LinearRounding(config, scheme.activations, around, tensors)
    return rounded_layers


def rounded_input(x: Tensor, settings: Activations | None) -> Tensor:
    """Return x [..., n] as the layer sees it; a static scale is that of x itself. Differentiable in x."""
    if settings is None or x.numel() == 0:
        return x
    scale = None
    if settings.scale == "tensor":
        largest = activation_quant.LargestInput()
        largest.add(x)
        scale = largest.in_scale(settings, "an input").to(x.device)
    return activation_quant.fake_quantize(x, settings, scale)


@contextmanager
def round_inputs(skeleton: Skeleton, block: nn.Module, layers: Mapping[str, LinearRounding]) -> Iterator[None]:
    """Round the inputs of these linears of a loaded block while active. Their weights are rounded for good."""
    hooks = []
    try:
        for name, layer in layers.items():
            linear = skeleton.linear(block, name)
            linear.weight.data.copy_(_rounded_weight(linear.weight.detach(), layer))

            def change(_: nn.Module, inputs: tuple[Any, ...], layer: LinearRounding = layer) -> tuple[Any, ...]:
                x = transforms.apply_input(inputs[0], layer.ops, layer.tensors)
                return (rounded_input(x, layer.activations), *inputs[1:])

            hooks.append(linear.register_forward_pre_hook(change))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounded_weight(weight: Tensor, layer: LinearRounding) -> Tensor:
    """Return the rounded weight [out, in], float32, to be multiplied by inputs behind their operations."""
    stored = transforms.rotate(weight, layer.ops, layer.tensors)
    if layer.config is not None:
        stored = fake_weight(stored, layer.config)
    return transforms.effective(stored, WeightTransforms(output=layer.ops.output), layer.tensors)


def choose(rotation: SearchedRotation, bench: EditContext) -> tuple[int, list[str]]:
    """Return the number of the best rotation, the lowest of equals, and what the report should say."""
    count = rotation.config.seeds
    if count == 1:
        return 0, []
    layers = roundings(bench.plan, rotation.seed, bench.device)
    if bench.tokens is None or not layers:
        why = "there is no calibration text" if bench.tokens is None else "the recipe rounds nothing on integer grids"
        return 0, [f"{why}: the first of {count} rotations is used, none has been tried"]
    scores = search(rotation, bench, layers)
    best = min(range(count), key=scores.__getitem__)
    samples = min(rotation.config.search_samples, bench.tokens.shape[0])
    listed = ", ".join(f"{score:.5g}" for score in scores)
    return best, [f"rotation {best} of 0 to {count - 1} is used: KL {listed} on {samples} samples, rounded to nearest"]


def search(rotation: SearchedRotation, bench: EditContext, layers: Mapping[str, LinearRounding]) -> list[float]:
    """Return the KL of each rotation, in nats a token; `rotation` is left with the last one."""
    assert bench.tokens is not None, "the caller asks"
    skeleton, numbers = rotation.skeleton, range(rotation.config.seeds)
    tokens = bench.tokens[: rotation.config.search_samples]
    stream = blockwise.HiddenStates(tokens.shape[0], bench.folder / "stream", len(numbers) + 1)
    try:
        with edited_by(skeleton, None):
            bench.say("embedding samples to compare rotations on")
            calls = blockwise.record_inputs(skeleton, tokens, bench.batch, stream, bench.device)
        for number in numbers:
            rotation.draw(number)
            for sample in range(stream.samples):
                states = stream.read(sample, 1).to(bench.device)
                if rotation.basis is not None:
                    states = rotation.basis.forward(states.float()).to(states.dtype)
                stream.write(sample, states, number + 1)
        for index in range(len(skeleton.blocks)):
            prefix = skeleton.block_prefix(index)
            inside = {name: layer for name, layer in layers.items() if name.startswith(prefix)}
            _block(index, None, {}, rotation, bench, calls, stream)
            for number in numbers:
                bench.say(f"trying rotation {number + 1} of {len(numbers)}, block {index + 1}")
                _block(index, number, inside, rotation, bench, calls, stream)
        bench.say("comparing rotations")
        return _compare(rotation, bench.device, stream)
    finally:
        stream.close()


def _block(
    index: int,
    number: int | None,
    layers: Mapping[str, LinearRounding],
    rotation: SearchedRotation,
    bench: EditContext,
    calls: blockwise.ModelArgs,
    stream: blockwise.HiddenStates,
) -> None:
    """Take one side of the stream, that of a rotation or (None) of the original, through one block."""
    skeleton, side = rotation.skeleton, 0 if number is None else number + 1
    if number is not None:
        rotation.draw(number)
    try:
        with edited_by(skeleton, None if number is None else rotation):
            block = skeleton.load_block(index, bench.device)
        name = skeleton.block_prefix(index).rstrip(".")
        with round_inputs(skeleton, block, layers):
            for start in range(0, stream.samples, bench.batch):
                states = stream.read(start, min(bench.batch, stream.samples - start), side).to(bench.device)
                stream.write(start, run_block(block, calls[index][states.shape[0]], states, name), side)
    finally:
        skeleton.free()


@torch.no_grad()
def _compare(rotation: SearchedRotation, device: torch.device, stream: blockwise.HiddenStates) -> list[float]:
    """Return the mean KL of every side of the stream but the first to the first, behind the last block."""
    totals = [0.0] * rotation.config.seeds
    positions = 0
    with logits_of(rotation.skeleton, device) as logits:
        for sample in range(stream.samples):
            sides = [stream.read(sample, 1, side).to(device) for side in range(stream.sides)]
            for number in range(len(totals)):
                rotation.draw(number)
                if rotation.basis is not None:
                    sides[number + 1] = rotation.basis.transpose(sides[number + 1].float()).to(sides[0].dtype)
            for part in kl.slices(sides[0].shape[1], rotation.skeleton.vocab_size):
                original = logits(sides[0][:, part])
                positions += original.shape[0]
                for number in range(len(totals)):
                    divergence = kl.from_logits(original, logits(sides[number + 1][:, part]))
                    totals[number] += divergence.sum(dtype=torch.float64).item()
    return [total / positions for total in totals]
