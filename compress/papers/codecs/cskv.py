"""Channel shrinking: fewer channels, shared by all heads of a layer (CSKV, arXiv 2409.10593); calibrated.

Keys before the rotary embedding and values of all heads of a layer, C = h width numbers a token, lie close to a
subspace. A token keeps its r coefficients there, in 16, 8 or 4 bits. The newest tokens stay exact: the window of the
paper is `residual_length` here.

    x = mean + back z,   z = forward (x - mean),   back and forward [C, r]

Values are read without being rebuilt: probabilities meet the coefficients, and one product turns the sum back. Keys are
rebuilt at each step, because the rotary embedding stands between, which costs tokens * r * C products.

The paper factors the weights, W = B A, from a start by ASVD (inputs scaled by the square root of their mean magnitude)
and fine-tunes A and B for the squared error of keys and values. Whatever A and B are, B A x lies in a subspace of r
dimensions, so that this error is at least that of the projection of k = W x on the leading eigenvectors of its second
moment. That projection is such a product itself. It needs no gradient descent, and no hidden states, since it depends
on keys and values alone. `metric: states` is this closed form, about the mean. Other metrics weigh errors with a matrix
S and take the leading eigenvectors of S^1/2 cov S^1/2. `scores`: for keys, S is the second moment of the queries of
each KV head. `loss`: S is the second moment of the gradients of the model's loss by the keys or the values.

`steps` heal what is lost: back, forward and mean of all layers are trained together through the model, towards its own
predictions and the next token, with coefficients rounded as they are stored (gradients pass the rounding), one block in
memory at a time (model_distillation.py). The paper trains each layer for itself, where the closed form has no
rest that descent could take away, and rounds in training only for 4-bit codes.

Ranks are chosen by greedy search: of the keys and values of all layers, that one loses a channel next whose loss hurts
least, until `keep` of all channels are left. The damage of leaving out a component is the mean of the squared product
of a gradient of the model's loss with it (`damages`), which has one unit for all layers and both kinds.

Differences from the paper: the closed form in place of fine-tuning; a mean; metrics; ranks by layer and kind; the
window slides by `flush` tokens and is never empty, where the published one empties at each multiple of its length;
rounding of fewer bits is that of compress/papers/codecs/coefficients.py, not KIVI's.
Static: the mean, `back` and `forward` in float16, 2 C r numbers (in the file up to MAX_RANK_FACTOR times that); at run
time in float32. What it does not do: folding into weights; reading keys without rebuilding them.

Outside the core because principal components lose less in fewer bytes on SmolLM2-135M: 0.0077 of KL in 5,043 bytes a
token, 0.0187 in 5,750 here (docs/results/kv_structure.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.calib.kv import TextPass
from compress.kv.codec import Block, Codec, Spec, head_rows, rotate, token_rows, unrotate
from compress.kv.codecs.components import moments, roots
from compress.numerics import checks
from compress.papers.codecs import model_distillation
from compress.papers.codecs.coefficients import FLOAT_BITS, Rows, greedy, grid
from compress.tune.trained import Trained

NEEDS = frozenset({"keys_pre", "queries_pre", "values", "gradients"})
WORK = 32  # bytes that calibrating takes for each number of its largest sample
METRIC_DAMP = 1e-3  # what weighs errors gets this share of its mean diagonal
MIN_RELATIVE_DEVIATION = 1e-3  # deviation of a coefficient, relative to the root mean square of all
MAX_RANK_FACTOR = 2  # a layer may have so many times the even rank
MIN_DEVIATION = 1e-4  # deviation of a coefficient: what divides by it is float16
ALONE = {"ranks": ("model", "even")}


@dataclass(frozen=True)
class Config:
    keep: float = 0.5  # [share] of the channels of all heads that stay
    bits: Literal[16, 8, 4] = 16  # [bits] of a coefficient: 16 is float16, 8 and 4 are levels times a norm
    metric: Literal["states", "scores", "loss"] = "states"  # the error that the subspace makes least: in the model's
    # loss, in the scores of keys (values: as states), or in the states themselves, as the paper has it
    ranks: Literal["model", "even"] = "model"  # greedy over the keys and values of all layers, or the same everywhere
    steps: int = 0  # [steps] of training through the model, with even ranks
    rate: float = 0.003  # of AdamW, in units of the root mean square of each matrix
    batch_tokens: int = 2048  # [tokens] of a step, about: at least a sample
    language: float = 0.0  # [share] of the loss that is the nll of the next token; the rest is KL to the model

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep {self.keep} is not above 0 and at most 1")
        if self.steps < 0 or self.batch_tokens < 1 or not 0 < self.rate < 1:
            raise ValueError("steps is 0 or more, batch_tokens 1 or more, rate between 0 and 1")
        if not 0 <= self.language <= 1:
            raise ValueError(f"language {self.language} is not between 0 and 1")
        if self.steps and self.ranks != "even":
            raise ValueError(f"steps {self.steps} train fixed ranks; set ranks: even, or steps: 0")


def even(config: Config, spec: Spec) -> int:
    """Return the coefficients of a token where all layers have the same."""
    return max(1, round(config.keep * spec.heads * spec.width))


def most(config: Config, spec: Spec) -> int:
    """Return the coefficients that a token may have at most."""
    whole = spec.heads * spec.width
    return even(config, spec) if config.ranks == "even" else min(whole, MAX_RANK_FACTOR * even(config, spec))


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples [tokens, h or H, width]; sums over tokens in float64, so that their order does not matter."""
    x = samples["keys_pre" if spec.kind == "keys" else "values"].flatten(1).double()
    mean = x.mean(0)
    x = x - mean
    covariance = x.T @ x / x.shape[0]
    slopes = samples["gradients"].flatten(1).double()
    fisher = slopes.T @ slopes / slopes.shape[0]
    metric = torch.eye(x.shape[1], dtype=torch.float64, device=x.device)
    if config.metric == "loss":
        metric = add_damp(fisher)
    elif config.metric == "scores" and spec.kind == "keys":
        metric = add_damp(torch.block_diag(*moments(samples["queries_pre"], spec.heads)))
    root, inverse = roots(metric)
    variances, turn = torch.linalg.eigh(root @ covariance @ root)
    turn, variances = turn.flip(1), variances.flip(0).clamp(min=0)
    sizes = variances.sqrt().clamp(min=MIN_RELATIVE_DEVIATION * float(variances.mean().sqrt())).clamp(min=MIN_DEVIATION)
    back, forward = inverse @ turn * sizes, root @ turn / sizes
    felt = ((fisher @ back) * back).sum(0) * variances / sizes.square()  # the damage of leaving out each
    count = most(config, spec)
    damages = felt.flip(0).cumsum(0).flip(0)  # of keeping fewer: damages[r] of r
    return {
        "mean": mean.half(),
        "back": back[:, :count].half(),
        "forward": forward[:, :count].half(),
        "damages": torch.cat((damages, damages.new_zeros(1)))[: count + 1].float(),
        **typical(config, spec),
    }


class SharedSubspace:
    """The subspace of all heads of a layer in training."""

    def __init__(self, config: Config, spec: Spec, static: Mapping[str, Tensor], device: torch.device) -> None:
        self.heads, self.is_before_rope, self.bits = spec.heads, spec.kind == "keys", config.bits
        self.numbers = {name: Trained(static[name].to(device)) for name in ("mean", "back", "forward")}
        self.parameters = [each.moved for each in self.numbers.values()]
        self.rows = Rows([static["back"].shape[1]], config.bits, static["back"].float().square().sum(0)[None])

    def draw(self, generator: torch.Generator) -> None:
        """Choose nothing: the rank is fixed."""

    def cut(self, states: Tensor, turns: model_distillation.Turns) -> Tensor:
        """Return states [B, h, n, width] as the cache would give them back, keys turned back and again."""
        is_turned = self.is_before_rope and turns is not None
        x = token_rows(unrotate(states, *turns) if is_turned else states.float())  # type: ignore[misc]
        mean, back, forward = (each.value() for each in self.numbers.values())
        z = (x - mean) @ forward
        if self.bits < FLOAT_BITS:
            z = z + (self.rows.decode(self.rows.encode(z.detach()[:, None]))[:, 0] - z).detach()
        rebuilt = head_rows(z @ back.mT + mean, self.heads)
        return rotate(rebuilt, *turns) if is_turned else rebuilt  # type: ignore[misc]


def distil(learned: Sequence[tuple[Config, Spec, dict[str, Tensor]]], text: TextPass) -> None:
    """Train the subspaces whose settings say so through the model; in place.

    What decides the training is taken from the first of them, for keys and values alike.
    """
    chosen = [each for each in learned if each[0].steps]
    if not chosen:
        return
    first = chosen[0][0]
    how = first.steps, first.rate, first.batch_tokens, first.language
    settings = model_distillation.DistillationSettings(*how, text.tap.near, 0)
    subspaces: dict[tuple[int, str], SharedSubspace] = {
        (spec.layer, spec.kind): SharedSubspace(config, spec, x, text.device) for config, spec, x in chosen
    }
    model_distillation.train(text, subspaces, settings)
    for _, spec, static in chosen:
        trained = subspaces[spec.layer, spec.kind].numbers
        static.update({name: each.value().detach().half().cpu() for name, each in trained.items()})


def balance(learned: Sequence[tuple[Config, Spec, dict[str, Tensor]]]) -> None:
    """Choose the ranks of all kinds and layers whose settings say so, within one budget; in place."""
    shared = [(config, spec, static) for config, spec, static in learned if config.ranks == "model"]
    grids = [grid(most(config, spec), 1) for config, spec, _ in shared]
    curves = [static["damages"][1:] for _, _, static in shared]
    chosen = greedy(curves, grids, sum(even(config, spec) for config, spec, _ in shared))
    for (_, _, static), count in zip(shared, chosen, strict=True):
        static["rank"] = torch.tensor([count], dtype=torch.int32)


def add_damp(moment: Tensor) -> Tensor:
    """Return a second moment [n, n] with a mean diagonal of 1 and no direction without weight."""
    size = moment.diagonal().mean()
    one = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
    return (moment / size if float(size) > 0 else one) + METRIC_DAMP * one


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives, for keys and for values."""
    channels, count = spec.heads * spec.width, most(config, spec)
    return {
        "mean": ((channels,), torch.float16),
        "back": ((channels, count), torch.float16),
        "forward": ((channels, count), torch.float16),
        "damages": ((count + 1,), torch.float32),
        "rank": ((1,), torch.int32),
    }


def typical(config: Config, spec: Spec) -> dict[str, Tensor]:
    """Return the rank that layers have on average."""
    return {"rank": torch.tensor([even(config, spec)], dtype=torch.int32)}


def check(static: Mapping[str, Tensor], config: Config, spec: Spec) -> None:
    """Check that the rank is possible; ValueError."""
    checks.within("rank", static["rank"], 1, most(config, spec))


class Shrunk(Codec):
    """Coefficients of all heads together in one row for each token."""

    def __init__(self, spec: Spec, config: Config, static: Mapping[str, Tensor]) -> None:
        rank = int(static["rank"])
        tensors = {"mean": static["mean"].float()}
        tensors |= {name: static[name][:, :rank].float().contiguous() for name in ("back", "forward")}
        super().__init__(spec, tensors)
        self.rope = "pre" if spec.kind == "keys" else "post"
        self.rows = Rows([rank], config.bits, tensors["back"].square().sum(0)[None])
        self.fields = self.rows.fields

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        z = (token_rows(x) - self._static("mean", x)) @ self._static("forward", x)
        return self.rows.encode(z[:, None])

    def decode(self, block: Block) -> Tensor:
        z = self.rows.decode(block)[:, 0]
        return head_rows(z @ self._static("back", z).T + self._static("mean", z), self.spec.heads)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        """Return sums of coefficients [B, h, m, r]."""
        mixed = p.flatten(1, 2) @ self.rows.decode(block)[:, 0]
        return mixed.unflatten(1, p.shape[1:3])

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        back = self._static("back", mixed).unflatten(0, (self.spec.heads, -1))
        mean = self._static("mean", mixed).view(self.spec.heads, 1, -1)
        return mixed @ back.mT + mass * mean


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return Shrunk(spec, config, static)
