"""Take the gradients of the model's loss at the outputs of linears: G = sum over tokens of g g^T, [out, out].

The labels are drawn from the model's own softmax, one for each position, and the loss is the cross entropy: G is then
the output side of the loss's Fisher matrix as G (x) H, the second-order KL (YAQA, arXiv 2505.22988, sketch A with the
tokens taken for independent and no power iteration). A factor of G cancels wherever it is used, so none is undone.

Gradients are those of the original model. Each token's are kept in float16 as a share of a power of two, at least half
of its largest entry: 11 bits of each token's entries, however small its loss. Of a linear that has fewer tokens than
outputs the gradients themselves are the result, which are less than G and can be rotated exactly; else it is G, summed
in float32 in the order of the tokens. So neither the batches nor the number of processes changes a bit of it.

Of a model that writes no text, whose states are what is used, G is the output side of their squared change.

Regularization: to G, scaled to a mean diagonal of 1, 0.2 of the identity is added. With 8,192 tokens that was better
than 0.025 and 1 (SmolLM2-135M, two blocks). With fewer than out / 8 tokens, as experts have, it grows in proportion.

compress/calib/gradient_store.py keeps them in a folder.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from compress.errors import NumericalError
from compress.model import blockwise
from compress.model.blockwise import BlockArgs
from compress.numerics import products

REGULARIZATION = 0.2  # share of the identity that is added to G of mean diagonal 1
FEW = 8  # outputs to a token above which regularization grows
CHUNK = 2048  # tokens of a product
PANELS = 8  # column panels: what lies below those on the diagonal is left out
MIN_SCALE_EXPONENT = -100
MAX_SCALE = 2.0**56  # squares of larger gradients cannot be summed up in float32; a hidden state of zeros makes such


class SampledLabels:
    """The cross entropy of labels that are drawn from the model's own predictions (`Loss` of backward_pass.py).

    positions: of a sample. What is drawn depends on the seed, the sample's number (`first` is that of sample 0), the
    position and the prediction alone.
    """

    def __init__(self, positions: int, seed: int, first: int = 0) -> None:
        self.positions, self.seed, self.first = positions, seed, first

    def __call__(self, sample: int, part: slice, logits: Tensor) -> Tensor:
        """Return the sum over the positions `part`."""
        return cast(Tensor, _CrossEntropy.apply(logits, partial(self.draw, sample, part)))

    def draw(self, sample: int, part: slice, probabilities: Tensor) -> Tensor:
        """Return labels int64 [positions] of these positions; probabilities [positions, vocabulary] float32."""
        shares = torch.rand(self.positions, generator=self.generator(sample), dtype=torch.float64)[part, None]
        return draw_entries(probabilities, shares.to(probabilities.device))

    def generator(self, sample: int) -> torch.Generator:
        """Return the random numbers of a sample."""
        digest = hashlib.sha256(f"{self.seed} labels {self.first + sample}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class SampledStates(SampledLabels):
    """The squared distance of a model's states to what is drawn around them, with unit variance (`Loss`).

    It is to the squared change of the states what `SampledLabels` is to the divergence of predictions: their gradient
    is the noise that was drawn.
    """

    def __call__(self, sample: int, part: slice, logits: Tensor) -> Tensor:
        """Return half the sum over the positions `part`; logits: the states [positions, hidden] float32."""
        noise = torch.randn(self.positions, logits.shape[-1], generator=self.generator(sample))[part].to(logits.device)
        return (logits - (logits.detach() + noise)).square().sum() / 2


def draw_entries(probabilities: Tensor, shares: Tensor) -> Tensor:
    """Return int64 [rows]: of each row [rows, entries] float32 the entry where its running sum passes a share of it.

    shares: float64 [rows, 1], from 0 to 1. The runs of entries are looked through first, and then one of them.
    """
    rows, entries = probabilities.shape
    width = max(1, math.isqrt(entries))
    whole = probabilities[:, : entries // width * width].view(rows, -1, width)
    rest = probabilities[:, whole.shape[1] * width :]
    runs = torch.cat([whole.sum(2, dtype=torch.float64), rest.sum(1, dtype=torch.float64, keepdim=True)], 1).cumsum(1)
    wanted = shares * runs[:, -1:]
    run = torch.searchsorted(runs, wanted, right=True).clamp_(max=runs.shape[1] - 1)
    before = torch.where(run > 0, runs.gather(1, (run - 1).clamp_(min=0)), 0.0)
    place = run * width + torch.arange(width, device=probabilities.device)
    inside = probabilities.gather(1, place.clamp(max=entries - 1)).double() * (place < entries)
    within = torch.searchsorted(inside.cumsum(1), wanted - before, right=True).clamp_(max=width - 1)
    return (run * width + within)[:, 0].clamp_(max=entries - 1)


class _CrossEntropy(torch.autograd.Function):
    """The cross entropy, summed over positions, of labels that are drawn from the predictions themselves.

    The gradient is the probabilities less one at the labels: they are computed once for both.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        probabilities = logits.softmax(-1)
        labels = draw(probabilities)[:, None]
        ctx.save_for_backward(probabilities, labels)
        return -probabilities.gather(1, labels).clamp_(min=torch.finfo(logits.dtype).tiny).log_().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        probabilities, labels = ctx.saved_tensors
        own = probabilities.scatter_add_(1, labels, -torch.ones_like(labels, dtype=probabilities.dtype))
        return own.mul_(gradients[0]), None


class GradientRows(NamedTuple):
    """The gradients of tokens at the outputs of a linear: entries [tokens, out] float16 times scales [tokens]."""

    entries: Tensor
    scales: Tensor  # float32, powers of two; NaN where an entry is not finite

    @classmethod
    def of(cls, gradients: Tensor) -> GradientRows:
        """Return gradients [..., out] in this form."""
        gradients = gradients.reshape(-1, gradients.shape[-1]).float()
        largest = gradients.abs().amax(-1)
        exponents = torch.frexp(largest).exponent.clamp_(min=MIN_SCALE_EXPONENT)
        scales = torch.ldexp(torch.ones_like(largest), exponents).where(largest.isfinite(), torch.nan)
        return cls((gradients / scales[:, None]).half(), scales)

    @classmethod
    def join(cls, parts: list[GradientRows], width: int, device: torch.device) -> GradientRows:
        """Return the rows of all parts, one behind the other."""
        none = cls(torch.empty(0, width, dtype=torch.float16, device=device), torch.empty(0, device=device))
        return cls(*(torch.cat(sides) for sides in zip(none, *parts, strict=True)))

    def full(self) -> Tensor:
        """Return the gradients, float32 [tokens, out]."""
        return self.entries.float() * self.scales[:, None]


def reduce_rows(rows: GradientRows) -> GradientRows | Tensor:
    """Return G [out, out] float32 of gradients, or themselves where there are fewer tokens than outputs."""
    tokens, width = rows.entries.shape
    if tokens < width:
        return rows
    total = torch.zeros(width, width, device=rows.entries.device)
    for start in range(0, tokens, CHUNK):
        part = GradientRows(*(side[start : start + CHUNK] for side in rows)).full().T.contiguous()
        for first in range(0, width, -(-width // PANELS)):
            panel = slice(first, first + -(-width // PANELS))
            total[panel, first:] += products.multiply(part[panel], part[first:])
    total.triu_()  # below it only parts of panels were summed up
    return total.add_(total.triu(1).T)


@dataclass(frozen=True)
class OutputGradients:
    """The loss's gradients at the outputs of a linear: G, or the gradients themselves, up to a factor."""

    count: int  # tokens that the linear was given
    gradients: GradientRows | Tensor  # G [out, out] float32; GradientRows where count < out

    @property
    def is_zero(self) -> bool:
        """Whether no gradient reaches the linear."""
        rows = self.gradients.entries if isinstance(self.gradients, GradientRows) else self.gradients
        return not bool(rows.any())

    @property
    def width(self) -> int:
        """The outputs of the linear."""
        return (self.gradients.entries if isinstance(self.gradients, GradientRows) else self.gradients).shape[1]

    def in_basis(self, change_rows: Callable[[Tensor], Tensor] = lambda rows: rows) -> OutputMoment:
        """Return G in another basis of the outputs.

        change_rows: maps gradients float32 [n, out] to those in that basis [n, out or more], each row by itself and
        linearly: g in the basis of outputs y = B s of stored rows s becomes B^T g.
        """
        if isinstance(self.gradients, GradientRows):
            rows = self.gradients.full()
            factor = change_rows(rows if len(rows) else rows.new_zeros(1, self.width))
            mean = factor.square().sum(0).double().mean().item()
            return OutputMoment(self.count, factor.mul_(mean**-0.5) if mean > 0 else factor, is_factor=True)
        moment = change_rows(change_rows(self.gradients.clone()).T.contiguous())
        mean = moment.diagonal().double().mean().item()
        return OutputMoment(self.count, moment.mul_(1 / mean) if mean > 0 else moment, is_factor=False)

    def metric(
        self, rows: slice, change_rows: Callable[[Tensor], Tensor] = lambda rows: rows, damp: float = REGULARIZATION
    ) -> Tensor:
        """Return `in_basis(change_rows).block(rows, damp)`."""
        return self.in_basis(change_rows).block(rows, damp)


@dataclass(frozen=True)
class OutputMoment:
    """G of a linear in a basis of its outputs, of mean diagonal 1; zero where no gradient reaches the linear."""

    count: int  # tokens that the linear was given
    values: Tensor  # float32: G [out, out], or with `is_factor` F [tokens, out] with F^T F = G
    is_factor: bool

    def diagonal(self) -> Tensor:
        """Return the diagonal of G, float32 [out], of mean 1; ones where no gradient reaches the linear."""
        diagonal = self.values.square().sum(0) if self.is_factor else self.values.diagonal().clone()
        return diagonal if diagonal.any() else torch.ones_like(diagonal)

    def damp(self, damp: float = REGULARIZATION) -> float:
        """Return the share of the identity that is added for `damp`: more where few tokens were seen."""
        return damp * max(1.0, self.values.shape[1] / (FEW * max(1, self.count)))

    def block(self, rows: slice, damp: float = REGULARIZATION) -> Tensor:
        """Return G[rows, rows] float32, symmetric, with so much of the identity added.

        The identity itself is returned where no gradient reaches the linear.
        """
        own = self.values[:, rows]
        block = own.T @ own if self.is_factor else own[rows].clone()
        block = (block + block.T).mul_(0.5)
        if not self.values.any():
            return torch.eye(*block.shape, device=block.device)
        block.diagonal().add_(self.damp(damp))
        return block


class BlockOutputs:
    """The gradients at the outputs of a block's linears (`BlockGradients` of backward_pass.py)."""

    def __init__(self, block: nn.Module, linears: Mapping[str, nn.Linear], advice: str) -> None:
        """Take the gradients at `linears` of a loaded block; advice: on what to do if they are not finite."""
        self.block, self.linears, self.advice = block, linears, advice
        self.parts: dict[str, list[GradientRows]] = {name: [] for name in linears}

    @torch.enable_grad()
    def pull_back(self, call: BlockArgs, hidden: Tensor, behind: Tensor) -> Tensor:
        """Keep the gradients of one sample."""
        hidden = hidden.detach().clone().requires_grad_()
        watched = [linear.register_forward_hook(partial(self._watch, name)) for name, linear in self.linears.items()]
        with blockwise.attached(watched), products.Backward():
            states, _ = blockwise.call_block(self.block, call, hidden.clone())  # which it may change in place
        states.backward(behind)
        return cast(Tensor, hidden.grad)

    def _watch(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        """Have the gradient at an output kept when it comes."""
        if not output.numel():  # an expert that no token went to
            return None
        replaced = None
        if not output.requires_grad:  # it does not depend on the hidden states
            replaced = output.requires_grad_().clone()  # which the block may change in place
        output.register_hook(lambda gradient: self.parts[name].append(GradientRows.of(gradient)))
        return replaced

    def finish(self) -> dict[str, GradientRows]:
        """Return linear -> the gradients of all tokens that reached it, in the order of the samples."""
        joined = {}
        for name, linear in self.linears.items():
            joined[name] = GradientRows.join(self.parts.pop(name), linear.out_features, linear.weight.device)
            if not (joined[name].scales <= MAX_SCALE).all():
                said = f"the gradient at the outputs of {name} is not finite, or too large"
                raise NumericalError(f"{said}; {self.advice}")
        return joined
