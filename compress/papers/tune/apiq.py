"""Begin adapters and a quantized weight together, so that activations stay what they were (ApiQ, arXiv 2402.05147).

An adapter that is to be fine-tuned beside a quantized weight usually begins as nothing (QLoRA), so that training
begins with all the error of rounding, or with the singular vectors of that error (LoftQ), which leaves the outputs of
blocks wrong, and more so from block to block. ApiQ (Liao et al. 2024) trains, for what the quantized blocks before
give, the factors A, B and two clip factors of each group of a weight, beta of its lower end and gamma of its upper one:

    scale = (sigmoid(gamma) max W - sigmoid(beta) min W) / (2**bits - 1),  zero = round(-sigmoid(beta) min W / scale)
    weight = scale * (clamp(round(W / scale) + zero, 0, 2**bits - 1) - zero) + (16 / rank) B A

against what the full-precision model gives. `scope: block` is ApiQ-bw: all linears of a block together, against the
output of the block; with `own_target`, also against what the block's own weights give for the same inputs (`aug_loss`
of the released code). `scope: linear` is ApiQ-lw: one linear after the other, those before it in the block as they have
become, against what the linear gives in the full-precision block. All is as published: gamma = beta = 4, A is random
as LoRA's, B = 0; W itself is rounded, its gradient passes straight through and that of zero points is none; AdamW with
a `rate` of factors and a `clip_rate` of gamma and beta, both with a `decay` of 0.1, which shrinks ranges in the end.

What the method of `quantize` stored is replaced, whatever it is: take `rtn`, and `lowrank: {rank: R}` for the factors.
Without a low-rank part the clip factors alone are trained, which is the weight clipping of OmniQuant. `steps: 0` writes
the start, which is QLoRA's: whole ranges and an adapter that does nothing.

Differences: a step takes about `tokens` tokens, and there are `steps` of them where the paper has 20 epochs of 128
samples of 2048 tokens (2560 steps), so that default rates are larger (its own: 0.0005 and 0.005); rates rise over the
first steps and fall along a cosine. The error of each token is divided by its size, as in compress/tune/held_block.py:
some models have tokens that are a thousand times as large as the others. What is kept is what was best on batches that
no step takes. ApiQ-lw minimizes over the whole calibration text, by sums of x x^T (compress/papers/tune/adaquant.py),
and its full-precision linear reads what it reads behind the quantized blocks. A group's range includes 0.

Figures: docs/studies/adapter_starts.md. Not done: formats other than `int`, which stay as they are; adapters other
than LoRA (DoRA); factors of fewer than 16 bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from compress import formats
from compress.errors import NumericalError, RecipeError
from compress.formats import lowrank
from compress.papers.tune import adaquant
from compress.tune.codes.latent import Latent
from compress.tune.descend import FINAL_RATE_SHARE, check_held_out, check_rate, is_checked
from compress.tune.held_block import MAX_HELD_OUT_BATCHES, Batches, BlockSizes, HeldBlock, relative
from compress.tune.trained import Trained, add_surroundings, strip_surroundings
from compress.types import PackedWeight

SCOPE = "block"
CHECKS = 8  # times that the held-out error is measured
CLIP_START = 4.0  # gamma and beta begin so, as published: ends times 0.982
LORA_ALPHA = 16.0  # the published one: the product counts LORA_ALPHA / rank times
MIN_SCALE = 1e-5
WARM_UP_STEPS_SHARE = 0.03
WEIGHT_NBYTES = 60  # [bytes] for each weight of a block: the copy, what is rounded, the stored codes, and a step
STATES = 5  # times the activations of a forward pass that the passes of a step take


@dataclass(frozen=True)
class Config:
    """Settings of ApiQ."""

    scope: Literal["block", "linear"] = "block"  # what is trained together: ApiQ-bw, or ApiQ-lw
    steps: int = 200  # [steps] for each block, or for each linear; 0: the start
    rate: float = 0.006  # of AdamW, for A and B
    clip_rate: float = 0.02  # of AdamW, for gamma and beta
    decay: float = 0.1  # of all of these, as AdamW decays weights
    own_target: bool = False  # add the error against what the block's own weights give for the same inputs
    tokens: int = 512  # [tokens] of a step of a block, about: at least a sample, at most a batch
    held_out: int = 8  # [batches] of which one is not trained on

    target_inputs: ClassVar[str] = "full"  # what the full-precision linear reads: as in AdaQuant's settings

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps {self.steps} must not be negative")
        check_rate("rate", self.rate)
        check_rate("clip_rate", self.clip_rate)
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay {self.decay} is not at least 0 and below 1")
        if self.tokens < 1:
            raise ValueError(f"tokens {self.tokens} is not positive")
        if self.own_target and self.scope == "linear":
            raise ValueError("own_target is of scope: block; a linear has one target")
        check_held_out(self.held_out)


def workspace(config: Config, sizes: BlockSizes) -> int:
    """Return the bytes that training takes beside the block: a bound."""
    sums = 4 * adaquant.GRAM_SHARE if config.scope == "linear" else 0
    held = 2 * MAX_HELD_OUT_BATCHES * sizes.hidden
    return (WEIGHT_NBYTES + sums) * sizes.numel + STATES * sizes.states + held


class ClippedWeight(Latent):
    """One packed weight of the format `int`, with clip factors of its groups and low-rank factors in training."""

    def __init__(self, packed: PackedWeight, target: Tensor, seed: int) -> None:
        """target: the original weight [out, in]; seed: of the random A."""
        super().__init__(packed, target, "codes")
        self.bare = PackedWeight(dataclasses.replace(packed.stored, lowrank=None), packed.tensors, packed.shape)
        matrix = strip_surroundings(target, self.bare)
        assert matrix is not None, "a scale of a channel around the weight is 0"
        self.values = self._in_groups(matrix)
        low, high = self.values.aminmax(dim=-1, keepdim=True)
        self.ends = {"low": low.clamp(max=0), "high": high.clamp(min=0)}
        self.clips = {name: _begin(torch.full_like(end, CLIP_START)) for name, end in self.ends.items()}
        self.beside = self._begin_factors(seed)
        self.trained = {**self.beside, **self.clips}
        del self.latent, self.centre

    def _begin_factors(self, seed: int) -> dict[str, Trained]:
        """Return A, random, and B = 0, by their stored names; none without a low-rank part."""
        part = self.packed.stored.lowrank
        if part is None:
            return {}
        if part.bits < 16:
            raise RecipeError(f"ApiQ trains low-rank factors of 16 bits, not {part.bits}; set quantize.lowrank.bits=16")
        out_features, in_features = self.packed.shape
        random = torch.rand(part.rank, in_features, generator=torch.Generator().manual_seed(seed))
        a = ((2 * random - 1) * in_features**-0.5).to(self.values.device)
        b = torch.zeros(out_features, part.rank, device=a.device)
        return {lowrank.PREFIX + "a": _begin(a), lowrank.PREFIX + "b": _begin(b, LORA_ALPHA / part.rank)}

    def _grid(self) -> tuple[Tensor, Tensor]:
        """Return scales and zero points [out, groups, 1] as they are now; gradients pass through scales alone."""
        low, high = (self.ends[name] * torch.sigmoid(self.clips[name].value()) for name in ("low", "high"))
        if self.packed.params.symmetric:
            scales = torch.maximum(high, -low) / ((self.top - 1) // 2 or 1)
            return self._as_stored(scales.clamp(min=MIN_SCALE)), self.zeros
        scales = self._as_stored(((high - low) / self.top).clamp(min=MIN_SCALE))
        return scales, (-low / scales).round().detach()

    def effective(self, has_part: bool = True) -> Tensor:
        """Return the dense weight [out, in], float32, with or without the low-rank part."""
        scales, zeros = self._grid()
        matrix = self._dense(self.values / scales, scales, zeros)
        return self._around(matrix) if has_part else add_surroundings(matrix, self.bare, self.packed.tensors)

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        return self.effective()

    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        scales, zeros = self._grid()
        return self._pack_latent(self.values / scales, scales, zeros)


def _begin(start: Tensor, unit: float = 1.0) -> Trained:
    """Return a trained tensor that is `unit` times what AdamW moves, so that this decays as published."""
    trained = Trained(torch.zeros_like(start), unit=unit)
    trained.moved.data.copy_(start / unit)
    trained.keep()
    return trained


def train(
    weights: Mapping[str, ClippedWeight], config: Config, loss: Callable[[int], float], error: Callable[[], float]
) -> tuple[float, float]:
    """Train weights by AdamW, and leave them where the error was least; return the error at the start and then.

    loss(step) leaves gradients behind. Raise NumericalError where it is not finite.
    """
    first = best = error()
    if not config.steps:
        return first, first
    factors = [each.moved for weight in weights.values() for each in weight.beside.values()]
    clips = [each.moved for weight in weights.values() for each in weight.clips.values()]
    groups = [{"params": factors, "lr": config.rate}, {"params": clips, "lr": config.clip_rate}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=config.decay)
    starts = [group["lr"] for group in optimizer.param_groups]
    for step in range(config.steps):
        for group, rate in zip(optimizer.param_groups, starts, strict=True):
            group["lr"] = rate * rate_share(step, config.steps)
        optimizer.zero_grad()
        if not math.isfinite(value := loss(step)):
            raise NumericalError(f"the loss of ApiQ is {value} at step {step + 1}; lower tune.rate and tune.clip_rate")
        optimizer.step()
        if is_checked(step, config.steps, CHECKS) and (now := error()) < best:
            best = now
            for weight in weights.values():
                weight.keep()
    for weight in weights.values():
        weight.restore()
    return first, best


def rate_share(step: int, steps: int) -> float:
    """Return what the rate of a step is of the largest one."""
    warmth = min(1.0, (step + 1) / max(1.0, WARM_UP_STEPS_SHARE * steps))
    return warmth * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * step / steps)) / 2)


class BlockTuning(adaquant.BlockTuning):
    """One block whose quantized weights and adapters begin together, when all linears are quantized."""

    config: Config  # type: ignore[assignment]

    def __init__(self, block: nn.Module, names: Sequence[str], batches: Batches, count: int, config: Config) -> None:
        """Take what HeldBlock takes."""
        HeldBlock.__init__(self, block, names, batches, count, config.held_out, config.tokens)
        self.config = config
        self.originals: dict[str, Tensor] = {}

    def add(self, name: str, packed: PackedWeight) -> None:
        """Take a quantized linear."""
        self.originals[name] = self.weight(name)
        super().add(name, packed)

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, PackedWeight], dict[str, Tensor], str]:
        """Train the block; return all packed weights, no vectors, and a note."""
        weights = {
            name: ClippedWeight(packed, self.originals[name], seed)
            for seed, (name, packed) in enumerate(self.packed.items())
            if packed.format == "int"
        }
        if not weights:
            return self.packed, {}, "no weight of the block is in the format int: ApiQ has trained nothing"
        quantized = self.error({})
        for name, each in weights.items():
            self._place(name, each.weight(), None)
        first = self.error({})
        if self.config.scope == "block":
            self._train_block(weights)
        else:
            self._train_linears(weights)
        for name, each in weights.items():
            self.packed[name] = each.pack()
            self._place(name, formats.decode(self.packed[name], torch.float32), None)
        ends = f"{first:.3g} as it began, {self.error({}):.3g} trained"
        return self.packed, {}, f"ApiQ; held-out error of the block: {quantized:.3g} as it was quantized, {ends}"

    def _train_block(self, weights: Mapping[str, ClippedWeight]) -> None:
        """Train all linears together, against the output of the block."""
        original = HeldBlock(self.block, (), self.portions.batches, self.portions.count, self.config.held_out)
        stream = self.portions.endless()

        def now() -> dict[str, Tensor]:
            return {f"{name}.weight": each.weight() for name, each in weights.items()}

        def loss(step: int) -> float:
            with torch.enable_grad():
                total = torch.zeros(())
                if share := self._output_share(step):
                    hidden, call, target = next(stream)
                    targets = [target.float()] + ([original.run({}, hidden, call)] if self.config.own_target else [])
                    states = self.run(now(), hidden, call)
                    total = share * torch.stack([relative(states, each).mean() for each in targets]).sum()
                if (held := self._penalty(step, weights)) is not None:
                    total = total + held
                total.backward()
            return total.item()

        train(weights, self.config, loss, lambda: self.error(now()))

    def _output_share(self, step: int) -> float:
        """Return the weight of the error of the block's output in the loss of a step."""
        return 1.0

    def _penalty(self, step: int, weights: Mapping[str, ClippedWeight]) -> Tensor | None:
        """Return what is added to the loss of a step, a scalar; None for nothing."""
        return None

    def _train_linears(self, weights: Mapping[str, ClippedWeight]) -> None:
        """Train one linear after the other, against what it gives in the full-precision block."""
        full = HeldBlock(self.block, (), self.portions.batches, self.portions.count, self.config.held_out)
        for name, original in self.originals.items():
            self._place(name, original.float(), None)  # those behind the trained ones read what they will read
        for group in self.call_order(self.packed):
            held = list(self._inputs(group[0], self.portions.held_out(), full))
            moments = adaquant.InputMoments(self.originals[group[0]].shape[1], self.originals[group[0]].device)
            sums = {name: adaquant.Sums(self.originals[name].float(), None, moments) for name in group}
            for inputs in self._inputs(group[0], self.portions.others(), full):
                moments.add(inputs)
                for each in sums.values():
                    each.add(inputs)
            for name in group:
                if name in weights:
                    _train_linear(weights[name], sums[name], held, self.config)
                self._place(name, weights[name].weight() if name in weights else self._decode(name), None)

    def _decode(self, name: str) -> Tensor:
        return formats.decode(self.packed[name], torch.float32)


def _train_linear(
    weight: ClippedWeight, sums: adaquant.Sums, batches: Sequence[adaquant.Inputs], config: Config
) -> None:
    held = adaquant.HeldOutError(sums.weight, None, batches)
    if not (held.size and sums.size):  # an expert that no token reached
        return

    def loss(step: int) -> float:
        with torch.enable_grad():
            now = weight.weight()
        error, by_weight, _ = sums.gradient(now.detach(), None)
        now.backward(by_weight)
        return error

    train({"": weight}, config, loss, lambda: held.error(weight.weight(), None))
