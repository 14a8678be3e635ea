"""Shift the biases of a block so that its linears and norms give the mean that they gave with full-precision weights.

Bias correction (Nagel et al. 2019, arXiv 1906.04721, section 4.2, with data): quantization moves the mean of a layer's
outputs, and its bias can take that back: b -= E[y_hat] - E[y], for each output, over all tokens of the calibration
text. Layers are corrected in the order in which the block calls them, each measured behind those that are corrected
already; layers that read one tensor are measured together. The last linear is shifted once more where it is the one
that the block ends with, so that the block's output has the mean that the full-precision model's has.

Differences: E[y] is what the layer gives with its own weights, but behind the quantized blocks before this one, whose
shifts the last correction makes up for. A correction is kept only if it makes the error of the block's output smaller
on held-out batches, each token divided by its root mean square, as the next norm does: rounding to few bits shrinks
all outputs alike, which a norm undoes, and beside a shrunken rest a mean of full size is too large. Not done: biases
for linears that have none. Blocks without any bias are left as they are, and the report says so.

Measured on the 8M Llama of the tests with biases of 0 added to all linears, 32,193 tokens scored: rounding to nearest
with 2 bits, groups of 64, rotated: KL 0.1041 -> 0.0874 with 16 samples of 512 tokens, for 22 CPU seconds more. Without
a choice by that error, kept where the plain squared error falls, corrections made it 0.418 (64 samples).
With GPTQ (`int2`, 16 samples) it does harm, though the error of no block grows: KL 0.0520 -> 0.0639. GPTQ keeps the
second moment of its errors small already, means included. Use this with plain rounding, and measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.model.blockwise import attached
from compress.tune.held_block import Batches, BlockSizes, HeldBlock
from compress.types import PackedWeight

SCOPE = "block"


@dataclass(frozen=True)
class Config:
    """Settings of bias correction."""

    held_out: int = 8  # [batches] of which one is not measured, but used to see whether a correction helps

    def __post_init__(self) -> None:
        if self.held_out < 2:
            raise ValueError(f"held_out {self.held_out} is less than 2: no mean would be measured")


def workspace(config: Config, sizes: BlockSizes) -> int:
    """Return the bytes that correction takes beside the block."""
    return sizes.numel * (4 + 4 + 4) + 2 * sizes.states  # the block, and weights, in float32


class _Mean:
    """The mean of vectors [..., channels] over all but the last dimension, summed in float64."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, states: Tensor) -> None:
        rows = states.flatten(0, -2)
        total = rows.sum(0, dtype=torch.float64)
        self.total = total if self.total is None else self.total + total
        self.count += len(rows)


class BlockTuning(HeldBlock):
    """One block whose biases are corrected when its linears are quantized."""

    def __init__(self, block: nn.Module, names: Sequence[str], batches: Batches, count: int, config: Config) -> None:
        """Take what HeldBlock takes."""
        super().__init__(block, names, batches, count, config.held_out)
        self.config = config
        self.changed: dict[str, Tensor] = {}

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, PackedWeight], dict[str, Tensor], str]:
        """Correct the biases; return all packed weights, the biases that have changed, and a note."""
        groups = self.call_order(self._linears_with_bias())
        if not groups:
            return self.packed, {}, "bias correction: no linear or norm of the block has a bias, nothing was done"
        own = {name: parameter.float() for name, parameter in self.block.named_parameters()}
        expected, _, _ = self._means([path for group in groups for path in group], own)
        del own
        first = best = self.error({})
        for group in groups:
            means_now, _, _ = self._means(group, {})
            shifts = {
                path: expected[path] - means_now[path] for path in group if path in expected and path in means_now
            }
            best = self._shift(shifts, best)
        last = groups[-1][-1]
        _, of_block, of_model = self._means([], {})
        if self._bias(last).numel() == of_block.numel():
            best = self._shift({last: of_model - of_block}, best)
        note = f"{len(self.changed)} biases corrected; held-out error of the block: {first:.3g} -> {best:.3g}"
        return self.packed, self.changed, note

    @torch.no_grad()
    def error(self, parameters: Mapping[str, Tensor]) -> float:
        """Return the relative squared error on the held-out batches, each token divided by its root mean square."""
        error, tokens = 0.0, 0
        for hidden, call, target in self.portions.held_out():
            states, expected = (
                x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
                for x in (self.run(parameters, hidden, call), target.float())
            )
            error += (states - expected).square().mean(-1).sum(dtype=torch.float64).item()
            tokens += states[..., 0].numel()
        return error / tokens

    def _bias(self, path: str) -> nn.Parameter:
        return self.model.get_submodule(path).get_parameter("bias")

    def _shift(self, shifts: Mapping[str, Tensor], before: float) -> float:
        """Add to biases, in the types that they are stored in, if the held-out error falls; return what it is then."""
        stored = {}
        for path, shift in shifts.items():
            stored[f"{path}.bias"] = (self._bias(path).double() + shift).to(self.own_type(f"{path}.bias"))
        if not stored or not (after := self.error({name: tensor.float() for name, tensor in stored.items()})) < before:
            return before
        for name, tensor in stored.items():
            self.model.get_parameter(name).copy_(tensor)
        self.changed.update(stored)
        return after

    def _linears_with_bias(self) -> list[str]:
        """Return the paths of modules whose outputs have a bias: linears, and norms, whose weight is a vector."""
        paths = []
        for path, module in self.model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            is_norm = "weight" in own and own["weight"].dim() == 1
            if "bias" in own and (is_norm or isinstance(module, nn.Linear)):
                paths.append(path)
        return paths

    def _means(
        self, paths: Iterable[str], parameters: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the means of these modules' outputs, of the block's, and of the full-precision model's; float64."""
        sums = {path: _Mean() for path in paths}
        means_now, expected = _Mean(), _Mean()

        def hook(path: str, total: _Mean) -> RemovableHandle:
            def note(_: nn.Module, args: object, output: Tensor) -> None:
                total.add(output)

            return self.model.get_submodule(path).register_forward_hook(note)

        with attached([hook(path, total) for path, total in sums.items()]):
            for hidden, call, target in self.portions.others():
                means_now.add(self.run(parameters, hidden, call))
                expected.add(target)
        means = {path: mean.total / mean.count for path, mean in sums.items() if mean.total is not None and mean.count}
        assert means_now.total is not None and expected.total is not None
        return means, means_now.total / means_now.count, expected.total / expected.count
