"""Train a whole model with ternary weights, from a checkpoint or from scratch (BitNet b1.58 Reloaded).

BitNet b1.58 (arXiv 2402.17764) trains a language model whose linears see ternary weights and inputs of 8 bits: a full
precision weight W lies behind each, and a step computes with

    W_q = scale * clamp(round(W / scale), -1, 1)      x_q = round(127 x / max|x|) max|x| / 127 of each token

The scale is the mean of |W|, or its median (Reloaded, arXiv 2407.09527, which trains models of 100 thousand to 48
million parameters so). Gradients pass straight through both roundings. With `ramp`, a weight moves from what it is to
what it becomes over a share of the steps: W + lambda (W_q - W), lambda from 0 to 1, and inputs likewise. The loss is
that of the next token on the calibration text; norms, biases, embeddings and output head are trained along where they
are stored as they are. This is training, not fitting: it takes far more text than other methods do, and what comes of
it has forgotten what that text does not show.

Weights that compress/papers/quant/bitnet.py has written are trained; their inputs are rounded as the recipe says
(`activations`).

Differences: Reloaded normalizes the inputs of every linear by a LayerNorm without weights. Here a model keeps its own
architecture, so that its checkpoint is served as any other: q, k, v, gate and up read what the model's own norm gives,
o and down what is not normalized, of which the scale of each token takes care. Not done: ternary values that are drawn
at random; a teacher; models that do not fit in memory five times in float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from compress.errors import RecipeError
from compress.model.load import empty_model, load_model
from compress.model.skeleton import Skeleton
from compress.papers.quant import bitnet as rounding
from compress.papers.quant.bitnet import Scale
from compress.runtime import activation_quant
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import Readable, open_checkpoint
from compress.tune.descend import check_descent, check_held_out, descend, is_checked
from compress.tune.trained import DiskSizes, TuningResult, TuningWork, WholeModelSizes
from compress.types import Stored

SCOPE = "model"
FROM_SOURCE = True  # it trains the weights of the source, not those that a transform made of them
CHECKS = 5  # times that the held-out loss is measured behind the start
MASTERS = 24  # bytes of a parameter: itself, its gradient, two moments, the best so far, as a step rounds it
STATES = 4  # float32 numbers kept of a number that a linear reads or writes
LOGITS = 4  # times the float32 logits of a sample that are alive at a time
SEED = 0  # equal runs draw equal weights


@dataclass(frozen=True)
class Config:
    """Settings of training with ternary weights."""

    steps: int = 500  # [steps] of training
    rate: float = 0.001  # of AdamW
    batch_tokens: int = 2048  # [tokens] of a step
    scale: Scale = "median"  # of magnitudes: the scale of a weight
    start: Literal["checkpoint", "random"] = "checkpoint"  # the weights before the first step
    ramp: float = 0.0  # [fraction] of the steps in which rounding sets in; 0: it is there from the first
    held_out: int = 20  # [samples] of which one is not trained on

    tokens_factor: ClassVar[float] = 16.0  # all weights are trained (calib/enough.py)

    def __post_init__(self) -> None:
        check_descent(self.steps, self.rate)
        check_held_out(self.held_out)
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens {self.batch_tokens} is not positive")
        if not 0 <= self.ramp <= 1:
            raise ValueError(f"ramp {self.ramp} is not between 0 and 1")


def workspace(config: Config, sizes: WholeModelSizes, batch: int, is_spilled: bool) -> int:
    """Return the bytes that `train` takes on a CPU, one sample at a time; hidden states are not spilled."""
    blocks = len(sizes.packed)
    states = STATES * 4 * sizes.seq_len * sizes.states * blocks
    return MASTERS * (sizes.rest + blocks * sizes.block) + states + LOGITS * 4 * sizes.seq_len * sizes.vocabulary


def positions(config: Config, samples: int, seq_len: int) -> int:
    """Return the tokens that `train` takes through the model: those of a step three times."""
    of_step, held = max(config.batch_tokens, seq_len), max(1, samples // config.held_out)
    return 3 * config.steps * of_step + (CHECKS + 1) * held * seq_len


def disk(config: Config, sizes: DiskSizes) -> int:
    """Return the bytes that `train` has in its folder: none."""
    return 0


def train(config: Config, work: TuningWork) -> TuningResult:
    """Train the model of a packed checkpoint; its files stay as they are."""
    started = time.monotonic()
    packed = Skeleton(open_checkpoint(work.directory))
    layers = {path: each.stored for path, each in packed.model.named_modules() if _is_ternary(each)}
    if not layers:
        raise RecipeError("tune: bitnet trains what method: bitnet of `quantize` has written, and there is none")
    model = load_model(work.original.directory, torch.float32, str(work.device))
    _take_experts_apart(model, list(layers))
    trained = {name: _one_source(packed, name) for name, _ in model.named_parameters()}
    names = {name: source for name, source in trained.items() if source is not None}
    for path, stored in layers.items():
        model.set_submodule(path, TernaryLinear(cast(nn.Linear, model.get_submodule(path)), config, stored))
    training = Training(config, work, model, [*names, *(f"{path}.weight" for path in layers)])
    training.run()
    tensors = {names[name].name: p.detach().to(names[name].dtype) for name, p in training.parameters(names)}
    for path, stored in layers.items():
        linear = cast(TernaryLinear, model.get_submodule(path))
        made = rounding.as_packed(*rounding.to_trits(linear.weight.detach(), config.scale), stored)
        tensors |= {packed.sources[f"{path}.{key}"][0].name: tensor for key, tensor in made.tensors.items()}
    note = training.note(time.monotonic() - started)
    return TuningResult(note, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def _take_experts_apart(model: nn.Module, paths: list[str]) -> None:
    """Give experts linears of their own, as the packed model has them, where these paths lead to some."""
    for name, module in list(model.named_modules()):
        if is_fused_experts(module) and any(path.startswith(f"{name}.") for path in paths):
            model.set_submodule(name, Experts.from_fused(module))


def _is_ternary(module: nn.Module) -> bool:
    """Return whether a packed linear holds what `bitnet` writes, with nothing around or beside it."""
    if not isinstance(module, PackedLinear) or module.format != rounding.FORMAT:
        return False
    return bool(module.params.tensor_scale) and not module.stored.ops and module.stored.lowrank is None


def _one_source(packed: Skeleton, name: str) -> Readable | None:
    """Return the stored tensor that a parameter of the original is, None if it is packed or made of several."""
    sources = packed.sources.get(name, [])
    own = dict(packed.model.named_parameters()).get(name)
    if own is None or len(sources) != 1 or sources[0].name in packed.split:
        return None
    return sources[0] if sources[0].shape == tuple(own.shape) and sources[0].dtype.is_floating_point else None


class TernaryLinear(nn.Module):
    """A linear with a full-precision weight that computes with a ternary one, and rounds its inputs."""

    def __init__(self, linear: nn.Linear, config: Config, stored: Stored) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.activations = config.scale, stored.activations
        self.share = 1.0  # of the way from what is rounded to what it becomes

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with x [..., in], in float32."""
        trits, scale = rounding.to_trits(self.weight.detach(), self.scale)
        weight = self.weight + self.share * (trits * scale - self.weight).detach()
        if self.activations is not None and self.activations.scale == "token":
            x = x + self.share * (activation_quant.fake_quantize(x.detach(), self.activations) - x.detach())
        return nn.functional.linear(x, weight, self.bias)


class Training:
    """A model in training, and the best that it has been."""

    def __init__(self, config: Config, work: TuningWork, model: nn.Module, names: list[str]) -> None:
        """names: of the parameters that are trained."""
        self.config, self.work, self.model, self.names = config, work, model, frozenset(names)
        held = max(1, len(work.tokens) // config.held_out)
        self.used, self.unseen = (
            (work.tokens[:-held], work.tokens[-held:]) if len(work.tokens) > 1 else 2 * (work.tokens,)
        )
        if config.start == "random":
            self._draw()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.names)
        self.samples = max(1, config.batch_tokens // work.tokens.shape[1])
        self.first = self.best = self.held_out_loss()
        self.kept = {name: p.detach().clone() for name, p in self.parameters(self.names)}
        self.seen = 0  # tokens

    @torch.no_grad()
    def _draw(self) -> None:
        """Give all that is trained the random values with which transformers begins such a model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            fresh = dict(empty_model(cast(Any, self.model).config, torch.float32).named_parameters())
        for name, parameter in self.parameters(self.names):
            parameter.copy_(fresh[name])

    def parameters(self, names: object) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of these names."""
        return ((name, p) for name, p in self.model.named_parameters() if name in names)  # type: ignore[operator]

    def run(self) -> None:
        """Take all steps, and leave the model where its held-out loss was least, the start included."""
        descend(
            [p for _, p in self.parameters(self.names)], self.config.steps, self.config.rate, self._loss, self._check
        )
        with torch.no_grad():
            for name, parameter in self.parameters(self.names):
                parameter.copy_(self.kept[name])

    def _set_share(self, share: float) -> None:
        for module in self.model.modules():
            if isinstance(module, TernaryLinear):
                module.share = share

    def _loss(self, step: int) -> float:
        """Leave the gradients of the mean loss of a step behind, and return it."""
        self.work.say(f"training ternary weights, step {step + 1} of {self.config.steps}")
        self._set_share(min(1.0, (step + 1) / (self.config.ramp * self.config.steps)) if self.config.ramp else 1.0)
        total = 0.0
        for number in range(step * self.samples, (step + 1) * self.samples):
            with torch.enable_grad():
                loss = self._of_sample(self.used[number % len(self.used)]) / self.samples
                loss.backward()
            total += loss.item()
        self.seen += self.samples * self.used.shape[1]
        return total

    def _of_sample(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next token, of a sample [tokens]; a scalar."""
        tokens = tokens.to(self.work.device)
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        return nn.functional.cross_entropy(logits, tokens[1:])

    def _check(self, step: int) -> None:
        if not is_checked(step, self.config.steps, CHECKS):
            return
        if (loss := self.held_out_loss()) < self.best:
            self.best = loss
            for name, parameter in self.parameters(self.names):
                self.kept[name].copy_(parameter.detach())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss of the next token on what is not trained on, all rounded, in nats."""
        self._set_share(1.0)
        return sum(float(self._of_sample(tokens)) for tokens in self.unseen) / len(self.unseen)

    def note(self, seconds: float) -> str:
        """Return what the report should say."""
        count = sum(p.numel() for _, p in self.parameters(self.names))
        return (
            f"{count} parameters trained with ternary weights ({self.config.scale}, start: {self.config.start}) on "
            f"{self.seen} tokens in {seconds:.0f} s: loss on held-out calibration text {self.first:.4f} -> "
            f"{self.best:.4f} nats a token; errors of linears are from before it"
        )
