"""Outlier Suppression+: shift channels to their middle and scale outliers down, by a search (arXiv 2304.09145).

A channel becomes x' = (x - z) / s with z = (max x + min x) / 2 and s = max(1, max|x - z| / t): only channels that reach
beyond the threshold t are scaled. The threshold is the one with which the output of the module that reads the vector
changes least when its inputs and weights are rounded as they will be. Shift and scale are folded into what makes the
vector and what reads it (compress/transform/folding.py).

Differences from the paper and its code, and why:
- Thresholds fall geometrically from the largest magnitude to that of the median channel, `thresholds` of them. The
  released grid is linear and ends at 1, which depends on the unit of the activations and takes a hundred or more.
- Neither shift nor scale is kept where rounding alone does as well: no change is always one of the choices.
- Only norms shift: between a linear and its reader there may be a gate or an attention sink, which a shift does not
  pass unchanged. The norm and all of its readers must have biases; elsewhere only the scale is searched.
- Where a norm gives the residual stream itself, as in BERT, undoing a scale takes a factor in the shortcut, which plain
  model code does not have: such a norm is shifted, not scaled (compress/papers/transform/stream_shift.py), and one at
  the end of a block stays as it is.
- What linears make (v -> o, up -> down) is scaled with the others; heads that share a head of v share its scale.

Not done: biases are not created (norms without one, as most recent models have, are only scaled); linears whose weights
do not go to an integer grid as they are count as not rounded in the search.

Not in the core because rotations do better in less time: 8-bit weights and inputs of the bundled model have KL 0.00031
with this transform in 60 CPU seconds, 0.00008 with `rotate` in 7 (docs/results/transforms.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.model.blockwise import BlockInputs
from compress.model.graph import Site
from compress.papers.transform import stream_shift
from compress.quant.settings import check
from compress.transform import search
from compress.transform.folding import by_producer, can_shift, fold, to_readers
from compress.types import Activations, Scheme

SCOPE = "block"


@dataclass(frozen=True)
class Config:
    """Settings of Outlier Suppression+."""

    thresholds: int = 20  # [thresholds] tried at each site; 10 to 40 do alike on planted outliers
    shift: bool = True  # move channels to the middle of their range, where biases allow it
    tokens: int = 512  # [tokens] of each sequence, on which the search compares outputs
    sequences: int = 4  # [sequences] on which the search compares outputs

    def __post_init__(self) -> None:
        check(self, "thresholds", "tokens", "sequences", least=1)


class Change(NamedTuple):
    """What happens to the channels of a producer, [channels] float64."""

    scale: Tensor
    shift: Tensor | None = None


class BestChange(NamedTuple):
    """The best change of a site, and what it gains."""

    change: Change | None  # None: the site stays as it is
    before: float  # squared error of the module's output without a change
    after: float


def apply(
    block: nn.Module, sites: Sequence[Site], batches: BlockInputs, config: Config, schemes: Mapping[str, Scheme]
) -> tuple[str, ...]:
    """Shift and scale the sites of a loaded block in place; returns notes for the report."""
    searched = [site for site in sites if any(is_rounded(schemes.get(reader)) for reader in site.readers)]
    changed = shifted = 0
    before = after = largest = 0.0
    for site, seen, trial in search.trials(block, searched, batches, config.tokens, config.sequences):
        best = best_change(block, site, seen, trial, config, schemes)
        if best is not None and best.change is not None and fold(block, site, *best.change):
            changed, shifted = changed + 1, shifted + (best.change.shift is not None)
            before, after = before + best.before, after + best.after
            largest = max(largest, best.change.scale.max().item())
    said = f"{changed} of {len(sites)} sites are scaled, by up to {largest:.3g}, {shifted} of them shifted"
    notes = [f"{said}; the searched error falls to {after / before:.3g}" if changed else said]
    if moved := shift_stream(block, sites, batches, config, schemes) if config.shift else []:
        notes.append(f"shifted without a scale, since they give the residual stream: {', '.join(moved)}")
    if len(searched) < len(sites):
        notes.append(f"{len(sites) - len(searched)} sites are read by no linear whose rounding the search knows")
    return tuple(notes)


def shift_stream(
    block: nn.Module, sites: Sequence[Site], batches: BlockInputs, config: Config, schemes: Mapping[str, Scheme]
) -> list[str]:
    """Shift the norms that give the residual stream itself where that lowers the error; return their names."""
    streams = {stream.site: stream for stream in stream_shift.find_stream_sites(block, sites, batches)}
    searched = [site for site in streams if any(is_rounded(schemes.get(reader)) for reader in site.readers)]
    shifted = []
    for site, seen, trial in search.trials(block, searched, batches, config.tokens, config.sequences):
        if not seen.usable or not trial.kept:
            continue
        low, high = seen.low.double(), seen.high.double()
        changes = [Change(torch.ones_like(low)), Change(torch.ones_like(low), (low + high) / 2)]
        change = least_change(block, site, changes, (low, high), trial, schemes).change
        if change is not None and change.shift is not None:
            shifted += [site.producer] * stream_shift.fold_shift(block, streams[site], change.shift)
    return shifted


def is_rounded(scheme: Scheme | None) -> bool:
    """Return whether a trial can round something of the linear: its weights, its inputs."""
    return search.scalar_grid(scheme) is not None or _activations(scheme) is not None


def best_change(
    block: nn.Module, site: Site, seen: search.Range, trial: search.Trial, config: Config, schemes: Mapping[str, Scheme]
) -> BestChange | None:
    """Return the change with the least error, the mildest of several; None if there is nothing to measure it on."""
    if not seen.usable or not trial.kept:
        return None
    low, high = (by_producer(site, values.double()) for values in (seen.low, seen.high))
    low, high = low.amin(0), high.amax(0)
    changes: list[Change] = [Change(scale) for scale in scales(torch.maximum(high, -low), config.thresholds)]
    if config.shift and site.is_norm and can_shift(block, site):
        middle = (low + high) / 2
        shifted = scales((high - low) / 2, config.thresholds)
        changes = [changes[0], *(Change(scale, middle) for scale in shifted)]
    return least_change(block, site, changes, (low, high), trial, schemes)


def least_change(
    block: nn.Module,
    site: Site,
    changes: Sequence[Change],
    bounds: tuple[Tensor, Tensor],
    trial: search.Trial,
    schemes: Mapping[str, Scheme],
) -> BestChange:
    """Return the change with the least error; changes: none, and others; bounds: as in `substitutes`."""
    reference = trial.outputs()
    best, least, before = None, float("inf"), float("inf")
    for index, change in enumerate(changes):
        with search.substitute_weights(block, substitutes(block, site, change, bounds, schemes)):
            loss = trial.loss(reference)
        if index == 0:  # no change
            least = before = loss
        elif loss < least * search.CLEARLY_BETTER:
            best, least = change, loss
    return BestChange(best, before, least)


def scales(largest: Tensor, thresholds: int) -> list[Tensor]:
    """Return scales for falling thresholds, the first of which scales nothing; largest: max |x| [channels] float64."""
    ones = torch.ones_like(largest)
    alive = largest[largest > 0]
    if alive.numel() == 0:
        return [ones]
    top, median = alive.max(), alive.median()
    steps = [(median / top) ** (k / thresholds) for k in range(1, thresholds + 1)]
    return [ones, *((largest / (top * step)).clamp(min=1) for step in steps)] if median < top else [ones]


def substitutes(
    block: nn.Module, site: Site, change: Change, bounds: tuple[Tensor, Tensor], schemes: Mapping[str, Scheme]
) -> dict[str, search.Substitute]:
    """Return the readers as they would be rounded after a change; bounds: min and max x of the producer's channels."""
    shift = torch.zeros_like(change.scale) if change.shift is None else change.shift
    low, high = ((bound - shift) / change.scale for bound in bounds)
    bound = torch.maximum(high, -low).max().item()
    scale, shift = to_readers(site, change.scale).float(), to_readers(site, shift).float()
    readers = {}
    for reader in site.readers:
        if reader not in schemes:
            continue
        module = block.get_submodule(reader)
        weight = module.get_parameter("weight").detach().float()
        bias = None if change.shift is None else module.get_parameter("bias").detach().float() + weight @ shift
        config = search.scalar_grid(schemes[reader])
        scaled = weight * scale
        rounded = scaled if config is None else search.fake_weight(scaled, config)
        inputs = partial(_inputs, scale=scale, shift=shift, activations=_activations(schemes[reader]), bound=bound)
        readers[reader] = search.Substitute(rounded, bias, inputs)
    return readers


def _inputs(x: Tensor, scale: Tensor, shift: Tensor, activations: Activations | None, bound: float) -> Tensor:
    """Return the changed inputs [..., channels] of a reader, rounded as at run time."""
    changed = ((x.float() - shift) / scale).to(x.dtype)
    return changed if activations is None else search.fake_activations(changed, activations, bound)


def _activations(scheme: Scheme | None) -> Activations | None:
    """Return how the inputs of a linear are rounded; None if they are not, or in another basis."""
    return None if scheme is None or scheme.incoherence else scheme.activations
