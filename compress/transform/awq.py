"""AWQ: scale channels with large activations up, by a searched factor, then clip weights (arXiv 2306.00978).

The columns of the weights are multiplied by s = mean|x|^rho, and the vector that they read is divided by it. Of
`ratios` exponents rho from 0 (no change) the search keeps the one with which the output of the module that reads the
vector changes least when its weights are rounded to nearest on their grid. The scale is folded into what makes the
vector (compress/transform/folding.py). Afterwards the weights of every group are clamped, to at least half of their
largest, where that lowers the group's share of the output error; only this step changes the function of the block.

Differences from the released code, and why:
- mean|x| is floored at 1e-4 of its average over channels, not at 1e-4, so that the unit of the activations does not
  matter; a channel that is always zero keeps its scale of one.
- v -> o is scaled under grouped-query attention, too: heads that share a head of v share its scale.
- Rounding in the search is that of the method's grid, its clip search included. On tests/models/books-8m (3 bits,
  groups of 128, round to nearest) the KL goes from 0.0204 to 0.0198, standard error 0.0003; searched and clipped for
  plain min-max grids, as released, to 0.0210. On SmolLM2-135M-Instruct the order is the other one: 1.45 with searched
  grids, 0.76 with min-max grids (0.21 and 0.17 at 4 bits). Perhaps a search by plain squared error clips the weights
  that were just scaled up. So `awq4bit` has `clip_search: false`.
- The error of a clamped group is measured on all kept tokens at once, through a triangular factor of their products.
- Queries and keys are not clipped, as in the release. They are recognized by the site of the values, so that a linear
  that makes queries, keys and values at once is clipped.

Not done: linears without an integer grid of their own (vector and trellis codes, incoherent rotations), whose rounding
the search does not know; quantized activations (see outlier_suppression).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.formats import int as int_format
from compress.model.blockwise import BlockInputs
from compress.model.graph import Site
from compress.quant import grid
from compress.quant.settings import check
from compress.transform import search
from compress.transform.folding import by_producer, fold, to_readers
from compress.types import Scheme

SCOPE = "block"
MIN_CHANNEL_SHARE = 1e-4  # share of the average channel
CLIP_SHARES = tuple(1 - 0.05 * i for i in range(1, 11))  # shares of the largest weight of a group
TOKENS_FOR_CLIPPING = 512
CLIPPED_AT_ONCE = 64  # linears whose inputs are kept at the same time


@dataclass(frozen=True)
class Config:
    """Settings of AWQ."""

    ratios: int = 20  # [exponents] of the activation sizes that are tried for the scales, from 0 in steps of 1 / ratios
    clip: bool = True  # clamp the largest weights of each group after scaling, where that lowers the error
    tokens: int = 512  # [tokens] of each sequence, on which the search compares outputs
    sequences: int = 4  # [sequences] on which the search compares outputs

    def __post_init__(self) -> None:
        check(self, "ratios", "tokens", "sequences", least=1)


def apply(
    block: nn.Module, sites: Sequence[Site], batches: BlockInputs, config: Config, schemes: Mapping[str, Scheme]
) -> tuple[str, ...]:
    """Scale, then clip a loaded block in place; return notes for the report."""
    grids = {path: on_grid for path, scheme in schemes.items() if (on_grid := search.scalar_grid(scheme)) is not None}
    scalable = [site for site in sites if any(reader in grids for reader in site.readers)]
    exponents: list[float] = []
    before = after = 0.0
    for site, seen, trial in search.trials(block, scalable, batches, config.tokens, config.sequences):
        best = best_scale(block, site, seen, trial, config.ratios, grids)
        if best is not None and best.exponent > 0 and fold(block, site, best.scale):
            exponents.append(best.exponent)
            before, after = before + best.before, after + best.after
    said = f"{len(exponents)} of {len(sites)} sites are scaled"
    if exponents:
        mean = sum(exponents) / len(exponents)
        said += f", by exponents of {mean:.2f} on average; the searched error falls to {after / before:.3g}"
    notes = [said]
    if len(scalable) < len(sites):
        notes.append(f"{len(sites) - len(scalable)} sites are read by no linear with an integer grid")
    if config.clip:
        notes.append(clip(block, batches, config, {p: g for p, g in grids.items() if p not in never_clipped(sites)}))
    return tuple(notes)


@dataclass(frozen=True)
class BestScale:
    """The best scale of a site, and what it gains."""

    exponent: float
    scale: Tensor  # of the producer's channels, float64
    before: float  # squared error of the module's output without a scale
    after: float


def best_scale(
    block: nn.Module,
    site: Site,
    seen: search.Range,
    trial: search.Trial,
    ratios: int,
    grids: Mapping[str, grid.GridConfig],
) -> BestScale | None:
    """Return the exponent with the least error, the smallest of several; None if there is nothing to measure it on."""
    if not seen.usable or not trial.kept:
        return None
    reference = trial.outputs()
    mean = by_producer(site, seen.mean).mean(0)
    weights = {r: block.get_submodule(r).get_parameter("weight").detach().float() for r in site.readers if r in grids}
    best: BestScale | None = None
    for step in range(ratios):
        scale = scales(mean, step / ratios)
        wide = to_readers(site, scale).float()
        rounded = {r: search.Substitute(search.fake_weight(w * wide, grids[r]).div_(wide)) for r, w in weights.items()}
        with search.substitute_weights(block, rounded):
            loss = trial.loss(reference)
        if loss < (best.after * search.CLEARLY_BETTER if best else float("inf")):
            best = BestScale(step / ratios, scale, best.before if best else loss, loss)
    return best


def scales(mean: Tensor, exponent: float) -> Tensor:
    """Return mean^exponent, its smallest and largest reciprocal; mean |x| [channels] float64."""
    alive = mean > 0
    if not alive.any():
        return torch.ones_like(mean)
    relative = (mean / mean[alive].mean()).clamp(min=MIN_CHANNEL_SHARE) ** exponent
    middle = (relative[alive].min() * relative[alive].max()).sqrt()
    return torch.where(alive, relative / middle, 1.0)


def never_clipped(sites: Sequence[Site]) -> set[str]:
    """Return the paths of queries and keys, whose products are compared nowhere.

    They stand beside the values, and read what these read.
    """
    values = {site.producer for site in sites if site.head_dim and not site.is_norm}
    reading = {r for site in sites if values & set(site.readers) for r in site.readers}
    beside = {value.rpartition(".")[0] for value in values}
    return {r for r in reading if r not in values and r.rpartition(".")[0] in beside}


def clip(block: nn.Module, batches: BlockInputs, config: Config, grids: Mapping[str, grid.GridConfig]) -> str:
    """Clamp the weights of these linears in place, group by group; returns a note."""
    sequences = min(config.sequences, TOKENS_FOR_CLIPPING)
    tokens = min(config.tokens, TOKENS_FOR_CLIPPING // sequences)
    clamped = total = linears = 0
    for start in range(0, len(grids), CLIPPED_AT_ONCE):
        paths = list(grids)[start : start + CLIPPED_AT_ONCE]
        kept = {path: search.Trial(block.get_submodule(path), tokens, sequences) for path in paths}
        search.observe(block, batches, list(kept.values()))
        for path, trial in kept.items():
            inputs = trial.rows_of_input()
            if inputs.shape[0] and torch.isfinite(inputs).all():
                weight = block.get_submodule(path).get_parameter("weight").detach()
                clamped += clamp(weight, inputs, grids[path])
                total += weight.numel()
                linears += 1
    share = 100 * clamped / total if total else 0.0
    return f"{share:.2f}% of the weights of {linears} linears are clamped, which changes the model that is quantized"


@torch.no_grad()
def clamp(weight: Tensor, inputs: Tensor, config: grid.GridConfig) -> int:
    """Clamp weight [out, in] in place for inputs [tokens, in] float32; returns how many weights have changed."""
    params = grid.params(config, (weight.shape[0], weight.shape[1]))
    group = params.group(weight.shape[1])
    dtype = getattr(torch, int_format.scale_dtype(weight.abs().amax(1).float(), config.bits))
    changed = 0
    for columns, x in zip(weight.split(group, dim=1), inputs.split(group, dim=1), strict=True):
        factor = torch.linalg.qr(x, mode="r").R if x.shape[0] > x.shape[1] else x  # same x^T x, fewer rows
        exact = columns.float().T.contiguous()  # [columns, rows]
        largest = exact.abs().amax(0)
        best, loss = largest, _error(exact, exact, factor, config, dtype)
        for ratio in CLIP_SHARES:
            limit = largest * ratio
            tried = _error(exact, exact.clamp(-limit, limit), factor, config, dtype)
            better = tried < loss * search.CLEARLY_BETTER
            best, loss = torch.where(better, limit, best), torch.where(better, tried, loss)
        changed += int((exact.abs() > best).sum())
        columns.copy_(exact.clamp_(-best, best).T)
    return changed


def _error(exact: Tensor, clamped: Tensor, factor: Tensor, config: grid.GridConfig, dtype: torch.dtype) -> Tensor:
    """Return the squared output error [rows] of a group rounded after clamping; exact and clamped [columns, rows]."""
    scale, zero = grid.fit(clamped, None, config, dtype)
    codes = grid.codes(clamped, scale, zero, config.bits)
    return (factor @ codes.sub_(zero).mul_(scale).sub_(exact)).square_().sum(0)
