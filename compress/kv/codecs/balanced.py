"""Every token of a head coded alone, in channels whose size is what an error of theirs costs; calibrated (WUSH).

Codes of equal bits make an error in every channel of about the same size, that of the token. A linear map A before
them, undone after them, decides where that error goes. Let C be the covariance of keys (after the rotary embedding) or
values, and S the second moment of the gradients g of the loss by them, so that an error e costs e^T S e / 2, the
Fisher information. With a Hadamard rotation behind A all channels have the variance tr(A C A^T) / d, and the expected
cost is proportional to tr(A C A^T) tr(A^-T S A^-1). The least one is (tr (C^1/2 S C^1/2)^1/2)^2, where

    A^T A = C^-1/2 (C^1/2 S C^1/2)^1/2 C^-1/2,  the geometric mean of S and C^-1

(WUSH, arXiv 2512.00956, for weights and inputs of linears). Tokens are not alike: that at the start of a text has
small values, which all queries read. So in C a token counts by what an error costs at it, |A^-T g|^2, and in S by the
error that it has, |A (x - mean)|^2; this and A are computed in turns. The mean that is taken off is weighted like C:
that of all tokens alike would be far from the values of the first one, and is worse than none.

Nothing of this costs anything where codes are read: the query is mapped by A^-T, the sum of values by A^-1.
Keys and values of all layers have `bits`, or, if that is no whole number, 2, 3, 4, 5, 6 or 8 each, given where the sum
of expected costs falls most, `bits` on average over all layers of such settings. Codes are those of
compress/kv/codecs/per_token.py, with one group to a head. Static, float16: h width^2 numbers for keys and as many for
values of a layer.

On 2,048 tokens of SmolLM2-135M, every token coded, 4 bits lose 0.0157 nats of KL where a Hadamard rotation alone loses
0.0419; bits by layer bring that to 0.0149, within its error. On 3,072 tokens, with 4-bit values alone, a map without
weights of tokens is worse than none: 0.0278 against 0.0057; with them it is 0.0050.

Differences from the paper: keys and values in place of weights and inputs, gradients in place of inputs' second
moment, weights of tokens, bits by layer.
What it does not do: follow text that is unlike the calibration text, but for scales; a layer without calibrated tensors
(sliding windows) is rotated only, where an engine codes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.codec import Codec, Spec
from compress.kv.codecs.components import GAUSSIAN_ERRORS, roots
from compress.kv.codecs.lloyd import levels
from compress.kv.codecs.per_token import Levels, PerToken, page_codes, rotation
from compress.kv.pages import PagedCodes, Turn
from compress.numerics import checks

NEEDS = frozenset({"keys", "values", "gradients_rotated"})
WORK = 48  # bytes that calibrating takes for each number of its largest sample
FIT_STEPS = 6  # map and weights of tokens in turns
DAMP = 1e-3  # both moments get this share of their mean diagonal
WIDTHS = (2, 3, 4, 5, 6, 8)  # bits that a layer may have


@dataclass(frozen=True)
class Config:
    bits: float = 4.0  # [bits] of one code, 2 to 8; no whole number: on average over the layers of such settings
    levels: Levels = "uniform"  # integers between the least and the largest number, or levels for a Gaussian

    def __post_init__(self) -> None:
        if not WIDTHS[0] <= self.bits <= WIDTHS[-1]:
            raise ValueError(f"bits {self.bits:g} is not between {WIDTHS[0]} and {WIDTHS[-1]}")

    @property
    def whole(self) -> int:
        """Bits of every layer, or the least that one has on average."""
        return int(self.bits)


def check_heads(config: Config, spec: Spec) -> None:
    """Raise RecipeError for a head whose codes would be no whole bytes at some of the bits that it may get."""
    for bits in (config.whole,) if config.bits == config.whole else WIDTHS:
        page_codes(spec, bits, None, config.levels)


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples and gradients [tokens, h, width]; sums over tokens are in float64."""
    x, slopes = (samples[name].transpose(0, 1).double() for name in (spec.kind, "gradients_rotated"))
    costs, errors = x.new_ones(x.shape[:2]), x.new_ones(x.shape[:2])
    for _ in range(FIT_STEPS):
        mean = (costs[..., None] * x).sum(1, keepdim=True) / costs.sum(1)[:, None, None]
        moment = _moment(x - mean, costs)
        root, inverse = roots(moment)
        shape = roots(inverse @ roots(root @ _moment(slopes, errors) @ root)[0] @ inverse)
        errors, costs = ((x - mean) @ shape[0]).square().sum(-1), (slopes @ shape[1]).square().sum(-1)
    size = (errors.mean() / (x - mean).square().sum(-1).mean()).sqrt()
    return {
        "forward": (shape[0] / size @ rotation(spec.width).to(x)).half(),
        "mean": mean[:, 0].half(),
        "cost": (errors * costs).mean(1).sum(0, keepdim=True).float(),
        "bits": torch.tensor([config.whole], dtype=torch.uint8, device=x.device),
    }


def _moment(x: Tensor, weights: Tensor) -> Tensor:
    """Return the second moments [h, width, width] of x [h, tokens, width], damped; weights [h, tokens]."""
    moment = (x * (weights / weights.mean(1, keepdim=True).clamp(min=1e-30))[..., None]).mT @ x / x.shape[1]
    damp = DAMP * moment.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-24)
    return moment + damp[:, None, None] * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)


def balance(learned: Sequence[tuple[Config, Spec, dict[str, Tensor]]]) -> None:
    """Give bits to the keys and values of layers with the same settings, by the fall of the expected cost."""
    for config in dict.fromkeys(config for config, _, _ in learned if config.bits != config.whole):
        own = [(spec, static) for each, spec, static in learned if each == config]
        sizes = [spec.heads * spec.width for spec, _ in own]
        widths = allocate([float(static["cost"]) for _, static in own], sizes, config)
        for (_, static), bits in zip(own, widths, strict=True):
            static["bits"] = torch.tensor([bits], dtype=torch.uint8)


def allocate(costs: Sequence[float], sizes: Sequence[int], config: Config) -> list[int]:
    """Return the bits of each: `sizes` numbers a token, whose errors of size 1 cost `costs`."""
    budget = config.bits * sum(sizes) + 1e-6
    places = [0] * len(costs)
    budget -= WIDTHS[0] * sum(sizes)
    errors = [1 / (2**bits - 1) ** 2 for bits in WIDTHS]
    if config.levels == "lloyd":
        errors = [*(GAUSSIAN_ERRORS[bits] for bits in WIDTHS[:-1]), GAUSSIAN_ERRORS[7] / 4]

    def step(index: int) -> tuple[float, int]:
        at = places[index]
        gain = costs[index] * (errors[at] - errors[at + 1])
        return -gain / (sizes[index] * (WIDTHS[at + 1] - WIDTHS[at])), index

    heap = [step(index) for index in range(len(costs))]
    heapq.heapify(heap)
    while heap:
        _, index = heapq.heappop(heap)
        price = sizes[index] * (WIDTHS[places[index] + 1] - WIDTHS[places[index]])
        if price <= budget:
            budget -= price
            places[index] += 1
            if places[index] + 1 < len(WIDTHS):
                heapq.heappush(heap, step(index))
    return [WIDTHS[place] for place in places]


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives, for keys and for values."""
    return {
        "forward": ((spec.heads, spec.width, spec.width), torch.float16),
        "mean": ((spec.heads, spec.width), torch.float16),
        "cost": ((1,), torch.float32),
        "bits": ((1,), torch.uint8),
    }


def check(static: Mapping[str, Tensor], config: Config, spec: Spec) -> None:
    """Check that a layer's bits are possible and that the map can be undone; ValueError."""
    checks.within("bits", static["bits"].int(), WIDTHS[0], WIDTHS[-1])
    if bool(torch.linalg.inv_ex(static["forward"].double())[1].any()):
        raise ValueError("forward holds a singular matrix")


def page_coding(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> PagedCodes:
    """Return how pages hold the keys or the values of a layer; without calibrated tensors, rotated only."""
    bits = int(static["bits"]) if static else config.whole
    forward = static["forward"].float() if static else rotation(spec.width)
    turn = Turn(forward, torch.linalg.inv(forward.double()).float(), static["mean"].float() if static else None)
    codes = page_codes(spec, bits, None, config.levels)
    return PagedCodes(codes, turn, levels(bits) if codes.levels else None)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return PerToken(spec, page_coding(config, spec, static))
