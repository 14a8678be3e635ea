"""KV-AdaQuant, or Quantize What Counts (arXiv 2502.15075): norms of keys and of values decide who gets the bits.

The error of b-bit integers grows with what is coded and falls as 2^-b. The norms of the projections W_K exceed those of
W_V, and so do those of the keys that they make, so that keys should get more bits. With c = |W|^2 of each tensor kind
of each layer, the sum of c 4^-bits is made small by the published greedy: all begin at the fewest of `widths`; again
and again the kind with the largest fall of c 4^-bits for each bit that is added goes to its next width, as long as
`bits` is not exceeded on average. `norm` is the spectral or the Frobenius norm, `of` says whether of the weights, as
published, or of the keys and values that a calibration text gives, for each token.

Codes are those of compress/kv/codecs/kivi.py. The paper's evidence is for groups along channels, of both kinds: that
is `axis: token`. KIVI's keys, whose groups lie along tokens, leave the large channels of keys to scales of their own.

Differences from the published code: no width of 1.58 bits; the norms of a model are computed when the cache is
calibrated, where there are tables of some models' norms; bits are weighed by how many numbers a kind has.
What it does not do: look at what an error costs. The rule by measured errors is `allocate.cache_estimator: rule`
(compress/allocate/cache_units.py). What it brought: docs/results/kv_norms.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.errors import CalibrationError
from compress.kv.codec import Codec, GroupSize, Spec
from compress.kv.codecs import kivi
from compress.numerics import checks

NEEDS = frozenset({"keys", "values", "projections"})
WORK = 4  # bytes that calibrating takes for each number of its largest sample
MAX_BITS = 8


@dataclass(frozen=True)
class Config:
    bits: float = 3.0  # [bits] of one code, on average over keys and values of all layers with such settings
    widths: tuple[int, ...] = (1, 2, 4, 6, 8)  # [bits] that the keys or the values of a layer may have
    norm: Literal["spectral", "frobenius"] = "spectral"  # which norm is c, squared
    of: Literal["weights", "cache"] = "weights"  # whose: of the projections, or of keys and values by token
    group_size: GroupSize = "auto"  # as kivi has it
    axis: Literal["channel", "token"] | None = None  # as kivi has it

    def __post_init__(self) -> None:
        if not self.widths or sorted(set(self.widths)) != list(self.widths):
            raise ValueError("widths are to be different numbers of bits in ascending order")
        if not 1 <= self.widths[0] <= self.widths[-1] <= MAX_BITS:
            raise ValueError(f"widths are not all between 1 and {MAX_BITS}")
        if not self.widths[0] <= self.bits <= self.widths[-1]:
            raise ValueError(f"bits {self.bits:g} is not between {self.widths[0]} and {self.widths[-1]}, the widths")
        kivi.Config(self.widths[0], self.group_size)


def norms(matrix: Tensor) -> tuple[float, float]:
    """Return the Frobenius and the spectral norm of a matrix [rows, columns]."""
    gram = matrix.double()
    gram = gram.mT @ gram if gram.shape[0] >= gram.shape[1] else gram @ gram.mT
    return float(gram.trace()) ** 0.5, max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0) ** 0.5


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norms of the weight that makes keys or values, then of them by token; samples [tokens, h, width]."""
    states, weight = samples[spec.kind].flatten(1), samples["projections"]
    if config.of == "weights" and not weight.numel():
        raise CalibrationError(
            f"{spec.where}: they are not made by one matrix whose norm could be taken; set kv_cache.of to cache"
        )
    by_token = (x / max(len(states), 1) ** 0.5 for x in norms(states))
    of_weight = norms(weight) if weight.numel() else (0.0, 0.0)
    return {
        "norms": torch.tensor([*of_weight, *by_token], dtype=torch.float32),
        "bits": torch.tensor([config.widths[0]], dtype=torch.uint8),
    }


def balance(learned: Sequence[tuple[Config, Spec, dict[str, Tensor]]]) -> None:
    """Give bits to the keys and values of layers with the same settings, by the greedy of the paper."""
    for config in dict.fromkeys(config for config, _, _ in learned):
        own = [(spec, static) for each, spec, static in learned if each == config]
        at = 2 * (config.of == "cache") + (config.norm == "spectral")
        sizes = [spec.heads * spec.width for spec, _ in own]
        costs = [float(static["norms"][at]) ** 2 for _, static in own]
        for (_, static), bits in zip(own, allocate_bits(costs, sizes, config), strict=True):
            static["bits"] = torch.tensor([bits], dtype=torch.uint8)


def allocate_bits(costs: Sequence[float], sizes: Sequence[int], config: Config) -> list[int]:
    """Return the bits of each kind: `sizes` numbers a token, with an error of `costs` 4^-bits."""
    widths, places = config.widths, [0] * len(costs)
    room = (config.bits - widths[0]) * sum(sizes) + 1e-6
    while True:
        raises = [
            (costs[i] * (4.0 ** -widths[at] - 4.0 ** -widths[at + 1]) / (widths[at + 1] - widths[at]), -i)
            for i, at in enumerate(places)
            if at + 1 < len(widths) and (widths[at + 1] - widths[at]) * sizes[i] <= room
        ]
        if not raises:
            return [widths[at] for at in places]
        index = -max(raises)[1]
        room -= (widths[places[index] + 1] - widths[places[index]]) * sizes[index]
        places[index] += 1


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives, for keys and for values."""
    return {"norms": ((4,), torch.float32), "bits": ((1,), torch.uint8)}


def typical(config: Config, spec: Spec) -> dict[str, Tensor]:
    """Return bits of layers of equal norms."""
    count = 2 * spec.layers
    bits = allocate_bits([1.0] * count, [1] * count, config)[2 * spec.layer + (spec.kind == "values")]
    return {"bits": torch.tensor([bits], dtype=torch.uint8)}


def check(static: Mapping[str, Tensor], config: Config, spec: Spec) -> None:
    """Check that a layer's bits are possible; ValueError."""
    checks.within("bits", static["bits"].int(), 1, MAX_BITS)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    bits = int(static["bits"]) if static else config.widths[0]
    return kivi.build(kivi.Config(bits, config.group_size, config.axis), spec, {})
