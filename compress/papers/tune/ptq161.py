"""Learn the scales of rows and columns of binary weights, block by block (PTQ1.61, arXiv 2502.13179).

Of each weight in the format `salient` the scale alpha of the signs, a scale r1 of rows and one r2 of columns are
trained. Signs, means, and the columns in 4 bits stay. The block's output y is compared with two targets: y1, what the
full-precision model gives behind the block, and y2, what the block's own weights give for the same inputs, those that
the quantized prefix gives. The loss is

    MSE(y1, y) + MSE(y2, y) - log|cos(y1, y)| - log|cos(y2, y)|

with the cosine of each token's vector, on average. r1 is then multiplied into alpha and the mean.

Differences: the paper trains alpha at 5e-4 and r1, r2 at 1e-3 for 20 epochs; here `rate` is that of r1 and r2, and
alpha moves in units of its root mean square, ALPHA_SHARE times as fast. What is kept is the best on the batches that
are held out, by the relative squared error against y1, with numbers as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress import formats
from compress.papers.formats import salient as salient_format
from compress.tune.descend import check_descent, check_held_out, descend, is_checked
from compress.tune.held_block import Batches, BlockSizes, HeldBlock
from compress.tune.trained import Trained, TrainedWeight, add_surroundings
from compress.types import PackedWeight

SCOPE = "block"
FORMAT = "salient"
CHECKS = 8  # times that the held-out error is measured
STATES = 5  # times the activations of a forward pass that the passes of a step take
ALPHA_SHARE = 2.0  # rate of alpha over that of r1 and r2


@dataclass(frozen=True)
class Config:
    """Settings of the learning of scales."""

    steps: int = 200  # [steps] of training in a block
    rate: float = 0.005  # of AdamW, for scales that begin at 1
    tokens: int = 512  # [tokens] of a step, about: at least a sample, at most a batch
    held_out: int = 8  # [batches] of which one is not trained on

    def __post_init__(self) -> None:
        check_descent(self.steps, self.rate)
        check_held_out(self.held_out)
        if self.tokens < 1:
            raise ValueError(f"tokens {self.tokens} is not positive")


def workspace(config: Config, sizes: BlockSizes) -> int:
    """Return the bytes that learning takes beside the block."""
    return sizes.numel * 6 * 4 + 2 * STATES * sizes.states


def loss_of(states: Tensor, targets: Sequence[Tensor]) -> Tensor:
    """Return the loss of what a block gives against each target, all [..., channels] float32; a scalar."""
    cosines = [torch.cosine_similarity(states, target, dim=-1).mean() for target in targets]
    squares = [(states - target).square().mean() for target in targets]
    tiny = torch.finfo(torch.float32).tiny
    return torch.stack(squares).sum() - torch.stack(cosines).abs().clamp(min=tiny).log().sum()


class LearnedScales(TrainedWeight):
    """One binary weight, its two scales of rows and one of columns in training."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__(packed)
        tensors, shape = packed.tensors, packed.shape
        fields = salient_format.unpack(tensors, packed.stored.params, shape)
        signs = torch.zeros(shape, device=fields.mask.device)
        signs[:, ~fields.mask] = 2.0 * fields.signs - 1
        self.signs, self.others = signs, (~fields.mask).float()
        self.salient = formats.decode_stored(packed, torch.float32) * fields.mask
        self.means = tensors["means"].float()[:, None]
        self.trained = {
            "alphas": Trained(tensors["alphas"], ALPHA_SHARE),
            "rows": Trained(torch.ones_like(self.means[:, 0])),
            "column_scales": Trained(tensors["column_scales"]),
        }

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        rows, alphas = (self.trained[name].value()[:, None] for name in ("rows", "alphas"))
        columns = torch.zeros_like(self.others)
        columns = columns.masked_scatter(self.others.bool(), self.trained["column_scales"].value())
        binary = rows * (alphas * self.signs + self.means * self.others) * columns
        return add_surroundings(self.salient + binary, self.packed, self.packed.tensors)

    def pack(self) -> PackedWeight:
        """Return the packed weight: the scale of rows is in both vectors of rows."""
        rows = self.trained["rows"].value().detach()
        alphas = rows * self.trained["alphas"].value().detach()
        changed = {"alphas": alphas.bfloat16(), "means": (rows * self.means[:, 0]).bfloat16()}
        return self._pack_with(changed)


class BlockTuning(HeldBlock):
    """One block whose scales are learned when all of its linears are quantized."""

    def __init__(self, block: nn.Module, names: Sequence[str], batches: Batches, count: int, config: Config) -> None:
        """Take what HeldBlock takes."""
        super().__init__(block, names, batches, count, config.held_out, config.tokens)
        self.config = config

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, PackedWeight], dict[str, Tensor], str]:
        """Learn the scales; return all packed weights, no other tensors, and a note."""
        weights = {name: LearnedScales(each) for name, each in self.packed.items() if each.format == FORMAT}
        if not weights:
            return self.packed, {}, f"no weight of the block is in the format {FORMAT}: no scales were learned"
        original = HeldBlock(self.block, (), self.portions.batches, self.portions.count, self.config.held_out)
        stream = self.portions.endless()
        first = best = self.error({})
        kept: dict[str, PackedWeight] = {}

        def loss(step: int) -> float:
            hidden, call, target = next(stream)
            targets = target.float(), original.run({}, hidden, call)
            with torch.enable_grad():
                now = {f"{name}.weight": each.weight() for name, each in weights.items()}
                error = loss_of(self.run(now, hidden, call), targets)
                error.backward()
            return error.item()

        def check(step: int) -> None:
            nonlocal best, kept
            if not is_checked(step, self.config.steps, CHECKS):
                return
            made = {name: each.pack() for name, each in weights.items()}
            stored = {f"{name}.weight": formats.decode(each, torch.float32) for name, each in made.items()}
            if (error := self.error(stored)) < best:
                best, kept = error, made

        parameters = [part.moved for each in weights.values() for part in each.parts()]
        descend(parameters, self.config.steps, self.config.rate, loss, check)
        note = f"scales of binary weights learned; held-out error of the block: {first:.3g} -> {best:.3g}"
        return {**self.packed, **kept}, {}, note
