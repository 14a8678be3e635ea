"""Fewer channels for each head, by rank, head, layer and kind (MatryoshkaKV, arXiv 2410.14731); calibrated.

Keys after the rotary embedding and values of a KV head are centred and turned, and the leading r columns stay:

    z = ((x - mean) U)[:r],   score = (q U)[:r] z + q mean,   output = (sum of p z) U[:r]^T + mean (sum of p)

so that nothing is rebuilt when attention reads: the query is turned once, the sum of values turned back once. q mean is
added, because sinks and the newest tokens keep their exact keys beside these. The columns are nested: any first r of
them serve, and one basis serves all budgets.

`basis: orthogonal` is the paper's: U starts as the principal components of the states (`steps: 0` leaves it there) and
is trained through the Cayley map, at ranks that are drawn anew at each step for each head, layer and kind.
`train: model` is the paper's training: the model with all keys and values cut at once is distilled to the model itself
and to the next token, one block in memory at a time (model_distillation.py). `train: layer` keeps the output of
attention instead, layer by layer, keys and values each with the other exact.
`basis: weighted` has a closed form in its place: with S the second moment of what meets the states (keys: the queries;
values: the gradient of the model's loss by the output of attention), the components of S^1/2 cov S^1/2, whose lost part
costs least in scores or in the loss. U^T is then the inverse of U, which is not orthogonal.

Ranks are chosen by greedy search: from all channels on, the head and kind whose next `unit` channels hurt least loses
them, until `keep` of the channels of all layers are left. The damage of a rank is the squared error of attention's
output on the calibration text in the metric of the loss, the second moment of its gradient by that output
(attended_text.py); all layers and both kinds are measured in this one unit.

Differences from the paper: `language`, the share of the next token in the loss, is 0 and not 0.75; sinks and the newest
tokens are exact, in training (`exact_tail`), too; damages add up over heads and kinds, where the paper runs the model
for each step; U is the start times a Cayley map, which needs no column signs; coefficients may have fewer bits, as
unit-variance levels times a norm for each token and head.
Static: mean and `back` (U times deviations) in float16, h width^2 numbers, ranks and their damages.
What it does not do: fold U into the model's weights; code keys before the rotary embedding, whose subspace is smaller
(cskv.py and compress/kv/codecs/pca.py do); measure damages with the bound on scores that some models have (softcap).

Outside the core because subspaces behind the rotary embedding break beyond the calibration's length: a KL of 3.1 at
8,192 tokens of SmolLM2-135M, half of the channels (docs/results/kv_frontier.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from compress.calib.kv import TextPass
from compress.errors import RecipeError
from compress.kv.codec import Block, Codec, Spec
from compress.numerics import checks
from compress.papers.codecs import model_distillation
from compress.papers.codecs.attended_text import AttendedText, cayley
from compress.papers.codecs.coefficients import Rows, greedy, grid

NEEDS = frozenset({"keys", "values", "keys_sink", "values_sink", "queries_scaled", "gradients_output"})
WORK = 48  # bytes that calibrating takes for each number of its largest sample
ALONE = {"ranks": ("model", "layer")}
RANK_LEVELS = 8  # training through the model draws the ranks of a head from so many, evenly spaced


@dataclass(frozen=True)
class Config:
    keep: float = 0.5  # [share] of the channels that stay
    bits: Literal[16, 8, 4] = 16  # [bits] of a coefficient: 16 is float16, 8 and 4 are levels times a norm
    basis: Literal["weighted", "orthogonal"] = "weighted"  # the closed form, or the paper's basis
    ranks: Literal["model", "layer", "even"] = "model"  # greedy over all layers, heads and both kinds; over the heads
    # of a layer and kind; or the same for each head
    unit: int = 4  # [channels] that a step of the greedy search takes
    steps: int = 0  # [steps] of training, of an orthogonal basis
    train: Literal["model", "layer"] = "layer"  # what these keep: the model's predictions, all layers together, as the
    # paper has it; or the output of attention, layer by layer
    rate: float = 1e-3  # of Adam, on the entries of the skew matrix and on the mean
    batch_tokens: int = 2048  # [tokens] of a step of `train: model`, about: at least a sample
    language: float = 0.0  # [share] of the loss of `train: model` that is the nll of the next token; the rest is KL
    exact_tail: int = 128  # [tokens] before a query that calibration takes as exact, as residual_length has them
    seed: int = 0  # of the text positions and ranks that training draws

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep {self.keep} is not above 0 and at most 1")
        if self.unit < 1:
            raise ValueError(f"unit {self.unit} is not 1 or more")
        if self.steps < 0 or not self.rate > 0:
            raise ValueError("steps is 0 or more, rate above 0")
        if self.steps and self.basis != "orthogonal":
            raise ValueError(f"steps {self.steps} train an orthogonal basis; set basis: orthogonal, or steps: 0")
        if self.exact_tail < 0 or self.batch_tokens < 1:
            raise ValueError("exact_tail is 0 or more, batch_tokens 1 or more")
        if not 0 <= self.language <= 1:
            raise ValueError(f"language {self.language} is not between 0 and 1")


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples as compress/kv/__init__.py describes them; ranks are those of this layer and kind alone."""
    text = AttendedText(spec, samples, config.exact_tail)
    mean, back = text.basis(config.basis == "weighted")
    if config.steps and config.train == "layer":
        mean, back = text.train(mean, back, config.steps, config.rate, config.unit, config.seed)
    return _with_ranks(config, spec, text, (mean, back))


def _with_ranks(config: Config, spec: Spec, text: AttendedText, basis: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return all that is stored for a basis: mean [h, width] and back [h, width, width]."""
    mean, back = basis
    learned = {"mean": mean.half(), "back": back.half()}
    ranks = grid(spec.width, config.unit)
    learned["damages"] = text.damages(learned["mean"].double(), learned["back"].double(), ranks).float().cpu()
    if config.ranks == "even":
        return learned | typical(config, spec)
    chosen = greedy([*learned["damages"]], [ranks] * spec.heads, _budget(config, spec))
    return learned | {"ranks": torch.tensor(chosen, dtype=torch.int32)}


def _budget(config: Config, spec: Spec) -> int:
    """Return how many channels of a layer's keys or values stay."""
    return int(config.keep * spec.heads * spec.width + 1e-6)


def typical(config: Config, spec: Spec) -> dict[str, Tensor]:
    """Return ranks that are the same for all heads."""
    ranks = grid(spec.width, config.unit)
    even = max(rank for rank in ranks if rank <= max(_budget(config, spec) // spec.heads, ranks[0]))
    return {"ranks": torch.full((spec.heads,), even, dtype=torch.int32)}


class NestedSubspace:
    """Nested columns in training: a skew matrix for each head, turned into a rotation of the start, and the mean."""

    def __init__(self, start: Mapping[str, Tensor], device: torch.device) -> None:
        """start: mean [h, width] and back [h, width, width] of orthogonal columns, in any sizes."""
        back = start["back"].to(device).double()
        turn, upper = torch.linalg.qr(back)  # rounding of what is stored has bent them
        self.start = (turn * upper.diagonal(dim1=1, dim2=2).sign()[:, None]).float()
        self.free, self.mean = (
            nn.Parameter(x) for x in (torch.zeros_like(self.start), start["mean"].to(device).float())
        )
        self.parameters = [self.free, self.mean]
        self.is_kept = torch.ones(self.start.shape[0], 1, self.start.shape[2], device=device)

    def draw(self, generator: torch.Generator) -> None:
        """Choose the rank of each head, of the eighths of its width."""
        heads, width = self.start.shape[:2]
        ranks = torch.randint(1, RANK_LEVELS + 1, (heads, 1, 1), generator=generator) * width / RANK_LEVELS
        self.is_kept = (torch.arange(width) < ranks.round().clamp(min=1)).to(self.start)

    def cut(self, states: Tensor, turns: model_distillation.Turns) -> Tensor:
        """Return states [B, h, n, width] projected on the columns that are kept."""
        kept, mean = (self.start @ cayley(self.free)) * self.is_kept, self.mean[:, None]
        return ((states.float() - mean) @ kept) @ kept.mT + mean


def distil(learned: Sequence[tuple[Config, Spec, dict[str, Tensor]]], text: TextPass) -> None:
    """Train the bases whose settings say so through the model, and measure the damages of what they became; in place.

    What decides the training is taken from the first of them.
    """
    chosen = [each for each in learned if each[0].steps and each[0].train == "model"]
    if not chosen:
        return
    subspaces: dict[tuple[int, str], NestedSubspace] = {
        (spec.layer, spec.kind): NestedSubspace(static, text.device) for _, spec, static in chosen
    }
    first = chosen[0][0]
    settings = model_distillation.DistillationSettings(
        first.steps, first.rate, first.batch_tokens, first.language, first.exact_tail, first.seed
    )
    model_distillation.train(text, subspaces, settings)
    layers = {spec.layer for _, spec, _ in chosen}
    needs = [NEEDS if index in layers else frozenset() for index in range(chosen[0][1].layers)]
    for index, samples, _ in text.layers(needs):
        for config, spec, static in chosen:
            if spec.layer == index:
                seen, trained = AttendedText(spec, samples, config.exact_tail), subspaces[index, spec.kind]
                mean = trained.mean.detach().double()
                back = seen.scale_columns(mean, trained.start.double() @ cayley(trained.free.detach().double()))
                new = _with_ranks(config, spec, seen, (mean, back))
                static.update({name: tensor.cpu() for name, tensor in new.items()})


def balance(learned: Sequence[tuple[Config, Spec, dict[str, Tensor]]]) -> None:
    """Choose the ranks of all heads, kinds and layers whose settings say so, within one budget; in place."""
    shared = [each for each in learned if each[0].ranks == "model"]
    damages = [curve for _, _, static in shared for curve in static["damages"]]
    grids = [grid(spec.width, config.unit) for config, spec, _ in shared for _ in range(spec.heads)]
    budget = sum(config.keep * spec.heads * spec.width for config, spec, _ in shared)
    chosen = iter(greedy(damages, grids, int(budget + 1e-6)))
    for _, spec, static in shared:
        static["ranks"] = torch.tensor([next(chosen) for _ in range(spec.heads)], dtype=torch.int32)


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives, for keys and for values."""
    channels = (spec.heads, spec.width)
    return {
        "mean": (channels, torch.float16),
        "back": ((*channels, spec.width), torch.float16),
        "damages": ((spec.heads, len(grid(spec.width, config.unit))), torch.float32),
        "ranks": ((spec.heads,), torch.int32),
    }


def check(static: Mapping[str, Tensor], config: Config, spec: Spec) -> None:
    """Check that ranks are possible; ValueError."""
    checks.within("ranks", static["ranks"], 1, spec.width)


class Nested(Codec):
    """Leading coefficients of each head, all heads in one row for each token."""

    def __init__(self, spec: Spec, config: Config, static: Mapping[str, Tensor]) -> None:
        back = static["back"].double()
        inverse, info = torch.linalg.inv_ex(back)
        if bool(info.any()):
            raise RecipeError(f"{spec.where}: back holds a singular matrix; calibrate the cache again")
        ranks = static["ranks"].tolist()
        is_kept = torch.arange(max(ranks), device="cpu") < static["ranks"].cpu()[:, None]  # of a head's columns
        tensors = {
            "mean": static["mean"].float()[:, None],
            "back": (back[..., : max(ranks)] * is_kept[:, None]).float().contiguous(),
            "forward": inverse.mT[..., : max(ranks)].float().contiguous(),
        }
        super().__init__(spec, tensors)
        self.rows = Rows(ranks, config.bits, tensors["back"].square().sum(1))
        self.fields = self.rows.fields

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        return self.rows.encode((x - self._static("mean", x)) @ self._static("forward", x))

    def decode(self, block: Block) -> Tensor:
        z = self.rows.decode(block)
        return z @ self._static("back", z).mT + self._static("mean", z)

    def query(self, q: Tensor, state: Block) -> Tensor:
        """Turn the queries and append a column, the constant that the mean adds to all scores."""
        return torch.cat((q @ self._static("back", q), q @ self._static("mean", q).mT), -1)

    def scores(self, query: Tensor, block: Block) -> Tensor:
        return query[..., :-1] @ self.rows.decode(block).mT + query[..., -1:]

    def mix(self, p: Tensor, block: Block) -> Tensor:
        """Return sums of coefficients [B, h, m, largest rank]."""
        return p @ self.rows.decode(block)

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        return mixed @ self._static("back", mixed).mT + mass * self._static("mean", mixed)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return Nested(spec, config, static)
