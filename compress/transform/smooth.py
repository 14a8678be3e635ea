"""SmoothQuant: move outlier channels of the activations into the weights (arXiv 2211.10438).

Channel j of a vector is divided by s_j = max|x_j|^alpha / max|w_j|^(1 - alpha), and the columns j of the linears that
read it are multiplied by it; w_j are those columns, in all readers that are quantized. alpha shares the difficulty out:
0.5 is the paper's, families with strong outliers want up to 0.9. The scale is folded into what makes the vector
(compress/transform/folding.py), so that nothing is left to do at run time.

Differences from the released code: what is read by the product of a linear (v -> o, up -> down) is smoothed as well,
unless `sites: norms`; heads that share a head of v share its scale, from the largest of their maxima. A channel that is
never anything but zero, or that only zero weights read, keeps its scale of one.

Not done: a search (that is awq and outlier_suppression); a shift; anything for linears that are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from compress.model.blockwise import BlockInputs
from compress.model.graph import Site
from compress.quant.settings import check
from compress.transform.folding import by_producer, fold
from compress.transform.search import Range, observe
from compress.types import Scheme

SCOPE = "block"
MIN_SCALE, MAX_SCALE = 1e-5, 1e5


@dataclass(frozen=True)
class Config:
    """Settings of SmoothQuant."""

    alpha: float = 0.5  # share of the outliers that moves from the activations into the weights: 0 none, 1 all of it
    sites: Literal["all", "norms"] = "all"  # what is smoothed: all inputs, or only those that a norm makes (norms), as
    # in the paper

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is not between 0 and 1")
        check(self, sites=("all", "norms"))


def apply(
    block: nn.Module, sites: Sequence[Site], batches: BlockInputs, config: Config, schemes: Mapping[str, Scheme]
) -> tuple[str, ...]:
    """Smooth the sites of a loaded block in place; returns notes for the report."""
    smoothed = [site for site in sites if site.is_norm or config.sites == "all"]
    smoothed = [site for site in smoothed if any(reader in schemes for reader in site.readers)]
    ranges = [Range(block, site) for site in smoothed]
    observe(block, batches, ranges)
    largest, failed = 0.0, 0
    for site, seen in zip(smoothed, ranges, strict=True):
        scale = scales(block, site, seen.largest, config.alpha, schemes) if seen.usable else None
        if scale is not None and fold(block, site, scale):
            largest = max(largest, scale.max().item())
        else:
            failed += 1
    notes = [f"{len(smoothed) - failed} of {len(sites)} sites are smoothed; the largest scale is {largest:.3g}"]
    if failed:
        notes.append(f"{failed} sites stay as they are: no token came, or the numbers would not be finite")
    return tuple(notes)


def scales(block: nn.Module, site: Site, largest: Tensor, alpha: float, schemes: Mapping[str, Scheme]) -> Tensor:
    """Return the scales of the producer's channels, float64; largest: max |x| of the readers' channels."""
    readers = [block.get_submodule(r).get_parameter("weight").detach() for r in site.readers if r in schemes]
    weights = torch.stack([weight.abs().amax(0).double() for weight in readers]).amax(0)
    inputs, weights = by_producer(site, largest.double()).amax(0), by_producer(site, weights).amax(0)
    scale = (inputs**alpha / weights ** (1 - alpha)).clamp(MIN_SCALE, MAX_SCALE)
    return torch.where((inputs > 0) & (weights > 0), scale, 1.0)
