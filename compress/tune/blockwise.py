"""Tune a block while it is quantized, so that it gives what it gave with its own weights (block-wise reconstruction).

BRECQ (Li et al. 2021, arXiv 2102.05426) fits a block's rounding to the block's own output. QuIP# (Tseng et al. 2024,
arXiv 2402.04396) tunes the weights that are still to be quantized, so that they make up for those that are: linears are
taken in the groups that read one input (q, k, v; o; gate, up; down), and behind each the rest is trained, with norms
and biases and the scales of channels that are stored around those that are quantized. At the end, with all linears
quantized, what is stored is trained, with norms and biases. How a packed weight is trained is a file of
compress/tune/codes: its codes stay and the numbers beside them move (`fixed`, every format), or its codes are learned,
too: `straight_through`, `signs` and `clips` those of the format `int`, `pv` those of codebooks, E8P and trellises,
`proximal` those of codebooks. A format that these do not serve keeps its codes.

The loss is the relative squared error of the block's output for what the quantized prefix gives, against what the
full-precision model gives behind the block, so that the errors of earlier blocks are made up for, too. Each token's
error is divided by the size of that token: the next block normalizes it, and some models have tokens a thousand times
as large as the others. (`int2` on the bundled model: KL 0.0343 so, 0.0349 with the sizes of all tokens summed.) One
batch in `held_out` is not trained on, and no stage leaves a block with a larger error on these than it found, with all
numbers rounded to what is stored. A trained number moves in units of the root mean square of its tensor.

Measured on the third block of tests/models/books-8m, other tokens than those of training: 100 steps take its error to
98% with `fixed` codes of int4, to 80% with `straight_through` and 83% with `signs`; to 66% with `straight_through` on
int2, all with `codes_rate` 2. Numbers behind codes that start in the middle of the cell bring no more than `fixed`.
Weights that are not yet quantized take the error behind q, k and v of int2 to 95%, 87% and 80% at weights_rate 0.002,
0.0075 and 0.02.

Differences: QuIP# always learns its signs as real vectors, here where a recipe stores such. A step takes about `tokens`
tokens, fewer than a batch of a forward pass. Inputs that are quantized at run time are quantized here, too, from when
their linear is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from compress import formats, plugins
from compress.tune.adamw8bit import States, saved_nbytes
from compress.tune.codes import fixed
from compress.tune.descend import check_codes_rate, check_held_out, check_rate, descend, is_checked
from compress.tune.held_block import MAX_HELD_OUT_BATCHES, Batches, BlockSizes, HeldBlock, relative
from compress.tune.trained import Rates, Trained, TrainedWeight
from compress.types import Fisher, PackedWeight

PRESERVED_NBYTES = 3 * 4  # [bytes] for each weight: a difference, weighed, and its gradient
SCOPE = "block"
CHECKS = 4  # times that the held-out error is measured in the last stage
FIXED = "fixed"  # serves every format
MASTERS = 24  # bytes of a trained number: how far it is, its gradient, two moments, the best so far, what it is now
STATES = 3  # times the activations of a forward pass that a forward and a backward pass take


@dataclass(frozen=True)
class Config:
    """Settings of block-wise tuning."""

    steps: int = 100  # [steps] with all linears quantized; 0: none
    between: int = 40  # [steps] behind each group of linears but the last; 0: none
    rate: float = 0.002  # of AdamW, in units of the root mean square of each tensor
    weights_rate: float = 0.02  # the same, of weights that are not yet quantized
    codes: str = "fixed"  # how packed weights are trained: a file of compress/tune/codes
    codes_rate: float | None = None  # [steps of the grid] that a number behind a code travels, at most; none: RATE of
    # the file of `codes`
    start: Literal["codes", "weights"] = "weights"  # where these numbers begin in the cell of their code
    tokens: int = 512  # [tokens] of a step, about: at least a sample, at most a batch
    held_out: int = 8  # [batches] of which one is not trained on
    preserve: float = 0.0  # weight of the change of what gradients find salient: compress/tune/blockwise.py; 0: none
    optimizer_states: States = "32bit"  # of AdamW; 8bit: a quarter of their memory, slower steps

    tokens_factor: ClassVar[float] = 4.0  # what is trained fits itself to few tokens (calib/enough.py)

    def __post_init__(self) -> None:
        if min(self.steps, self.between) < 0:
            raise ValueError(f"steps {self.steps} and between {self.between} must not be negative")
        check_rate("rate", self.rate)
        check_rate("weights_rate", self.weights_rate)
        if self.codes not in plugins.names("codes"):
            raise ValueError(f"codes {plugins.unknown('way to train codes', self.codes, plugins.names('codes'))}")
        if self.codes_rate is not None:
            check_codes_rate(self.codes_rate)
        if self.tokens < 1:
            raise ValueError(f"tokens {self.tokens} is not positive")
        if not 0 <= self.preserve < float("inf"):
            raise ValueError(f"preserve {self.preserve} must not be negative, nor infinite")
        check_held_out(self.held_out)

    @property
    def needs_gradients(self) -> bool:
        """Return whether linears are weighed by the gradients of the model's loss."""
        return self.preserve > 0


def workspace(config: Config, sizes: BlockSizes) -> int:
    """Return the bytes that tuning takes beside the block."""
    weights = MASTERS if config.between else 0  # those that are left; codes are trained when there are none
    codes = plugins.load("codes", config.codes).BYTES if config.steps else 0
    preserved = PRESERVED_NBYTES if config.steps and config.preserve else 0
    trained = sizes.numel * (4 + 4 + max(weights, codes + preserved))
    of_step = STATES * sizes.states * min(sizes.batch, max(1, config.tokens // sizes.seq_len)) // sizes.batch
    held = 2 * MAX_HELD_OUT_BATCHES * sizes.hidden
    saved = saved_nbytes(sizes.numel, config.optimizer_states) if max(weights, codes) else 0
    return trained - saved + max(of_step, sizes.states) + held


class Stage(NamedTuple):
    """The held-out error of a block before a stage and behind it."""

    before: float
    after: float


class BlockTuning(HeldBlock):
    """One block that is tuned while its linears are quantized, and when they are."""

    def __init__(self, block: nn.Module, names: Sequence[str], batches: Batches, count: int, config: Config) -> None:
        """Take what HeldBlock takes."""
        super().__init__(block, names, batches, count, config.held_out, config.tokens)
        self.config = config
        self.targets: dict[str, Tensor] = {}  # the weights that were quantized, where codes are to be learned
        self.stages: list[Stage] = []

    def add(self, name: str, packed: PackedWeight) -> None:
        """Take a quantized linear."""
        if self.config.codes != FIXED:
            self.targets[name] = self.weight(name)
        super().add(name, packed)

    @torch.no_grad()
    def between(self) -> None:
        """Train the weights that are still to be quantized, norms and biases; called before each group of linears.

        Scales of channels around those that are quantized are trained along.
        """
        if self.packed and self.left and self.config.between:
            share = self.config.weights_rate / self.config.rate
            weights = {f"{name}.weight": share for name in self.left}
            shares = {**weights, **dict.fromkeys(self._vectors(), 1.0)}
            trained = {name: Trained(self.model.get_parameter(name), by) for name, by in shares.items()}
            scaled = self._take_scaled()

            def parameters() -> dict[str, Tensor]:
                tensors = {name: each.value() for name, each in trained.items()}
                return {**tensors, **{f"{name}.weight": each.weight() for name, each in scaled.items()}}

            self._train(trained, scaled, self.config.between, parameters)
            for name, each in trained.items():
                self.model.get_parameter(name).copy_(each.value())
            for name, weight in scaled.items():
                self.packed[name] = weight.pack()
                dense = formats.decode(self.packed[name], torch.float32)
                self.model.get_parameter(f"{name}.weight").copy_(dense)

    def _take_scaled(self) -> dict[str, TrainedWeight]:
        """Return the quantized weights whose scales of channels can be trained, with nothing decoded in a step.

        Those with inputs that are quantized at run time are not among them: their scales decide what is rounded.
        """
        free = {name: packed for name, packed in self.packed.items() if packed.stored.activations is None}
        scaled = {name: fixed.Codes(packed, torch.empty(0)) for name, packed in free.items()}
        return {name: each for name, each in scaled.items() if each.has_scales}

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, PackedWeight], dict[str, Tensor], str]:
        """Train what is stored; return all packed weights, all vectors of the block, and a note."""
        codes_note = self._train_stored() if self.config.steps else ""
        vectors = {name: self.model.get_parameter(name).to(self.own_type(name)) for name in self._vectors()}
        stages = [f"{stage.before:.3g} -> {stage.after:.3g}" for stage in self.stages]
        return (
            self.packed,
            vectors,
            f"tuned; held-out error of the block, stage by stage: {', '.join(stages)}{codes_note}",
        )

    def _train_stored(self) -> str:
        """Train the packed weights, norms and biases; return what the report should say of codes."""
        vectors = {name: Trained(self.model.get_parameter(name)) for name in self._vectors()}
        weights = {name: self._way(packed).Codes(*self._arguments(name)) for name, packed in self.packed.items()}

        def parameters() -> dict[str, Tensor]:
            tensors = {name: each.value() for name, each in vectors.items()}
            return {**tensors, **{f"{name}.weight": each.weight() for name, each in weights.items()}}

        self._train(vectors, weights, self.config.steps, parameters)
        before = {name: self.model.get_parameter(name).clone() for name in parameters()}
        packed = {name: each.pack() for name, each in weights.items()}
        for name, each in vectors.items():
            self.model.get_parameter(name).copy_(each.value().to(self.own_type(name)))
        for name, weight in packed.items():
            self.model.get_parameter(f"{name}.weight").copy_(formats.decode(weight, torch.float32))
        stage = self.stages.pop()
        after = self.error({})
        if is_better := after < stage.before:  # with all rounded to what is stored
            self.packed, stage = packed, stage._replace(after=after)
        else:
            stage = stage._replace(after=stage.before)
            for name, tensor in before.items():
                self.model.get_parameter(name).copy_(tensor)
        self.stages.append(stage)
        return self._codes_note(weights) if is_better else ""

    def _way(self, packed: PackedWeight) -> Any:
        """Return the file of compress/tune/codes that trains a weight."""
        module = plugins.load("codes", self.config.codes)
        return module if module.serves(packed) else plugins.load("codes", FIXED)

    def _arguments(self, name: str) -> tuple[PackedWeight, Tensor, Rates]:
        packed, config = self.packed[name], self.config
        target = self.targets.pop(name) if name in self.targets else torch.empty(0)
        by_way = self._way(packed).RATE if config.codes_rate is None else config.codes_rate
        return packed, target, Rates(config.steps, config.rate, by_way, config.start)

    def _codes_note(self, weights: Mapping[str, TrainedWeight]) -> str:
        """Return how many codes moved, and which could not, in words."""
        changed = {name: each.changed_share() for name, each in weights.items()}
        moved = [f"{name} {share:.1%}" for name, share in changed.items() if share is not None]
        fixed = [name for name, share in changed.items() if share is None and self.config.codes != FIXED]
        return "".join(
            f"; {what}: {', '.join(names)}"
            for what, names in (("codes that moved", moved), (f"codes that {self.config.codes} cannot move", fixed))
            if names
        )

    @torch.no_grad()
    def _train(
        self,
        vectors: Mapping[str, Trained],
        weights: Mapping[str, TrainedWeight],
        steps: int,
        parameters: Callable[[], dict[str, Tensor]],
    ) -> None:
        """Train for some steps and leave what was best on the held-out batches, the start included."""
        moved = [*vectors.values(), *(each for weight in weights.values() for each in weight.trained.values())]
        parts: list[Trained | TrainedWeight] = [*vectors.values(), *weights.values()]
        best = first = self.error(parameters())
        stream = self.portions.endless()
        checks = 1 if self.left else CHECKS
        is_held = not self.left and self.config.preserve  # weights that are not yet quantized are free
        preserved = Preserved(self.block, list(weights), self.fisher) if is_held else None

        def loss(step: int) -> float:
            hidden, call, target = next(stream)
            expected = target.float()
            with torch.enable_grad():
                now = parameters()
                error = relative(self.run(now, hidden, call), expected).mean()
                if preserved is not None:
                    error = error + self.config.preserve * preserved.error(now)
                error.backward()
            return error.item()

        def check(step: int) -> None:
            nonlocal best
            for weight in weights.values():
                weight.behind(step)
            if not is_checked(step, steps, checks):
                return
            if (error := self.error(parameters())) < best:
                best = error
                for part in parts:
                    part.keep()

        by_descent = [each.moved for each in moved] or [nn.Parameter(torch.zeros(0))]  # where signs move all there is
        descend(by_descent, steps, self.config.rate, loss, check, self.config.optimizer_states)
        for part in parts:
            part.restore()
        self.stages.append(Stage(first, best))

    def _vectors(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.dim() == 1]


class Preserved:
    """Hold weights to what they were where the model's loss feels it (ULB-SAPR, arXiv 2504.13932), by `preserve`.

    Saliency-aware partial retraining adds to the loss of a block, for each linear, lambda * sum g^2 (W_eff - W)^2 with
    W the original weight, W_eff the quantized one and the low-rank part beside it, and g the gradient of the model's
    loss on the calibration text. A block's output does not show what the blocks behind it do with it; g does.

    Differences: g^2 is a product of a row's and a column's weight (`Fisher`, calib/fisher.py), not a number for each
    weight: gradients come from the last block to the first and blocks are quantized from the first to the last, so that
    they stay in memory. The term of a linear is divided by sum g^2 W^2, and the mean over the linears of a block is
    taken, so that lambda depends on no size; the paper scales g^2 of a linear to mean 1, which cancels here.

    Measured on one block in 2 bits: lambda 0.01 and 0.1 raise the KL from 0.00092 to 0.00093 and 0.00099
    (docs/results/tuning.md). The stages of the paper, and W_eff without the low-rank part, are those of the method
    `partial_retraining`. Not done: a lambda that changes from block to block; sliced Wasserstein distances.
    """

    def __init__(self, block: nn.Module, names: Sequence[str], fisher: Mapping[str, Fisher]) -> None:
        """names: paths of linears in the block, which has its original weights. fisher: by these names.

        All weights of a linear without an entry in `fisher` count alike.
        """
        self.originals = {name: block.get_parameter(f"{name}.weight").detach() for name in names}
        self.sides = {name: fisher[name] for name in names if name in fisher}
        self.sizes = {name: self._weighed_sum(name, weight.float()) for name, weight in self.originals.items()}

    def error(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the mean over linears of the relative squared error of their weights, weighed; a scalar, float32.

        parameters: has `<name>.weight` [out, in], float32, of each linear.
        """
        tiny = torch.finfo(torch.float32).tiny
        errors = [
            self._weighed_sum(name, parameters[f"{name}.weight"] - weight) / self.sizes[name].clamp(min=tiny)
            for name, weight in self.originals.items()
        ]
        return torch.stack(errors).mean()

    def _weighed_sum(self, name: str, change: Tensor) -> Tensor:
        """Return the sum of the squares of a matrix [out, in], each times the square of its gradient."""
        if name in self.sides:
            rows, columns = (side.to(change.device) for side in self.sides[name])
            change = change * rows[:, None] * columns
        return change.square().sum()
