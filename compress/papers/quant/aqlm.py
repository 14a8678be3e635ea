"""AQLM: sums of entries of several codebooks, searched by the exact loss of the layer's outputs (arXiv 2401.06118).

A vector of d columns of a row is the row's scale times the sum of one entry of each codebook; all vectors of a matrix
share the codebooks (Egiazarian et al. 2024). Codes, and then codebooks and scales, are fitted to tr(R H R^T) in turn,
until a round lowers it by less than 1%:

- Codebooks begin by k-means of what the ones before them leave, with the metric that each block has by itself.
- Blocks of columns are visited in random order, with all others as they are. A beam of BEAM sets of codes is kept while
  the codebooks are visited in random order: for each set all entries are tried by their exact losses. The set that was
  there is among those that are compared, so that no step raises the loss.
- Codebooks are refitted by conjugate gradients on the exact quadratic (compress/quant/refit.py), scales of rows in
  closed form, both rounded to what is stored; a refit that does not lower the loss is taken back.

Training codebooks, scales and norms with fixed codes against the output of the block is `tune: [{method: blockwise}]`
of a recipe, which moves what is stored as float16.

Differences from the paper and its code, and why:
- Adam takes 100 steps for codebooks and scales there; both problems are quadratic and are solved.
- The beam there spans whole rows, of which each holds its own products with H; here it spans the codes of a vector.
- k-means there weighs all columns alike.
- The Hessian is damped, as for the other methods here.

Not in the core: its KL has not been measured yet, so that nothing has it on the frontier.

Not done: scales of groups within a row; several rows in a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from compress.formats import codebook
from compress.quant import codebooks, feedback
from compress.quant.feedback import Objective
from compress.quant.refit import EntryLayout, refit
from compress.quant.settings import check
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "codebook"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
BEAM = 4
LEAST_GAIN = 0.01  # relative, of a round; the last one brings less
SEARCHED_TOGETHER = 128  # columns that hear of each other's changes at once
SCORES = 1 << 20  # losses computed at a time


@dataclass(frozen=True)
class Config(codebooks.SearchConfig):
    """Settings of AQLM. stages * bits / vector_dim is the rate without side information."""

    bits: int = 8  # [bits] of one code: 1 to 12
    stages: int = 2  # codebooks whose entries are summed: 1 to 8
    vector_dim: int = 8  # [columns] of a vector
    sweeps: int = 6  # [rounds] of codes and then codebooks, at most
    codebook_dtype: Literal["float16", "int8"] = "float16"  # of entries; only float16 ones can be trained

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, bits=range(1, 13), stages=range(1, 9), codebook_dtype=("float16", "int8"))
        check(self, "vector_dim", least=1)


def plan_params(config: Config, shape: tuple[int, int]) -> codebook.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes.

    A weight with fewer vectors than twice the entries of a codebook gets shorter codes.
    """
    across = -(-shape[1] // config.vector_dim)
    bits = (min(config.bits, codebooks.most_bits(shape[0] * across)),) * config.stages
    tile = codebook.tile_words(bits, across)
    return codebook.Params(bits, config.vector_dim, tile, codebook_dtype=config.codebook_dtype, norm="rows")


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound for the bytes needed beside weight and Hessian: copies of both, codes, losses, k-means."""
    m, n = shape[0], shape[1] + config.vector_dim
    codes = 8 * 3 * config.stages * m * n // config.vector_dim
    return codebooks.workspace(m * n, 1) + codes + 4 * 2 * n * n + 4 * 6 * SCORES


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]."""
    assert stats is not None
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape)
    hessian, notes = feedback.usable(stats)
    notes += codebooks.notes(params.bits[0], config.bits)
    target, hessian = feedback.pad_columns(weight.T.float().contiguous(), hessian, params.vector_dim)
    damping = config.damp * hessian.diagonal().mean().item()
    search = _CodebookSearch(Objective(target, hessian, damping), config, params, seed)
    search.alternate(config.sweeps)
    return Quantized(search.pack(shape), tuple(notes))


@dataclass(frozen=True)
class AdditiveLayout(EntryLayout):
    """Sums of entries, times scales of rows; index [stages, blocks, rows], of entries of all stages."""

    scales: Tensor  # [rows]

    def values(self, entries: Tensor) -> Tensor:
        """Return the values [in, out] of entries [total, d]."""
        sums = sum(entries[index] for index in self.index)  # blocks, rows, d
        assert isinstance(sums, Tensor)
        return sums.mul_(self.scales[:, None]).transpose(1, 2).flatten(0, 1)

    def adjoint(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Return the transpose of `values`: sums of matrix [in, out] over each entry's members, shaped as `like`."""
        blocks, d = self.index.shape[1], like.shape[1]
        vectors = (matrix * self.scales).view(blocks, d, -1).transpose(1, 2).reshape(-1, d)
        total = torch.zeros_like(like)
        for index in self.index:
            total.index_add_(0, index.flatten(), vectors)
        return total


class _CodebookSearch:
    """Codes [stages, blocks, rows], codebooks and scales of one matrix [in, out], columns padded to whole blocks."""

    def __init__(self, layer: Objective, config: Config, params: codebook.Params, seed: int) -> None:
        self.layer, self.params, self.width = layer, params, params.vector_dim
        self.generator = torch.Generator().manual_seed(seed)
        columns, rows = layer.weight.shape
        blocks, stages, size = columns // self.width, len(params.bits), 2 ** params.bits[0]
        device = layer.weight.device
        norms = layer.weight.square().mean(0).sqrt()
        self.scales = _storable(torch.where(norms > 0, norms, torch.ones_like(norms)))
        self.codes = torch.zeros(stages, blocks, rows, dtype=torch.int64, device=device)
        self.offsets = torch.arange(stages, device=device)[:, None, None] * size
        cells = layer.hessian.view(blocks, self.width, blocks, self.width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        unit = torch.eye(self.width, device=device)
        self.metrics = cells + layer.damping * unit  # block, d, d
        floor = 1e-6 * self.metrics.diagonal(dim1=1, dim2=2).mean() + torch.finfo(torch.float32).tiny
        self.books = self._learn(config.iterations, torch.linalg.cholesky(self.metrics + floor * unit))

    def _learn(self, iterations: int, factors: Tensor) -> codebooks.StoredEntries:
        """Return codebooks [stages, entries, d] learned one after the other; sets the codes."""
        blocks, size = self.codes.shape[1], 2 ** self.params.bits[0]
        left = (self.layer.weight / self.scales).view(blocks, self.width, -1).transpose(1, 2)  # block, row, d
        learned = []
        for stage in range(len(self.codes)):
            vectors = codebooks.GroupedVectors(left[None].contiguous(), factors)
            entries = codebooks.learn(vectors, size, iterations, self.generator)
            stored = self._storable_books(entries).entries
            self.codes[stage] = codebooks.assign(vectors, stored)[0][0]
            left = left - stored[0][self.codes[stage]]
            learned.append(entries[0])
        return self._storable_books(torch.stack(learned))

    def _storable_books(self, entries: Tensor) -> codebooks.StoredEntries:
        """Round codebooks [..., entries, d] to what is stored."""
        if self.params.codebook_dtype == "int8":
            return codebooks.round_entries(entries)
        limit = torch.finfo(torch.float16).max
        stored = entries.clamp(-limit, limit).half()
        return codebooks.StoredEntries(stored.float(), stored, stored.new_ones(stored.shape[:-2]))

    def layout(self) -> AdditiveLayout:
        return AdditiveLayout(self.codes + self.offsets, False, self.scales)

    def values(self) -> Tensor:
        """Return the values [in, out] of the present codes, codebooks and scales."""
        return self.layout().values(self.books.entries.flatten(0, 1))

    def alternate(self, rounds: int) -> None:
        """Search codes and refit in turn, as long as that lowers the loss by LEAST_GAIN."""
        before = self.refit(self.layer.loss(self.values()))
        for _ in range(rounds):
            self.search_codes()
            loss = self.refit(self.layer.loss(self.values()))
            if loss > before * (1 - LEAST_GAIN):
                break
            before = loss

    def refit(self, loss: float) -> float:
        """Refit codebooks, then scales, each kept where the loss is lower than this; return it."""
        books = self.books
        fitted = refit(self.layer, self.layout(), books.entries.flatten(0, 1))
        self.books = self._storable_books(fitted.view_as(books.entries))
        now = self.layer.loss(self.values())
        if now >= loss:
            self.books, now = books, loss
        self._refit_scales()
        return self.layer.loss(self.values())

    def _refit_scales(self) -> None:
        """Give each row the scale that is best for it, where its loss falls with it as it is stored."""
        values = self.values()
        residual = self.layer.weight - values
        slope = (self.layer.pull(residual) * values).sum(0, dtype=torch.float64)
        bend = (self.layer.pull(values) * values).sum(0, dtype=torch.float64)
        share = torch.where(bend > 0, slope / bend.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        wanted = _storable((self.scales * (1 + share)).float())
        moved = wanted.double() / self.scales - 1
        is_better = (moved * (2 * slope - moved * bend) > 0) & (wanted > 0)
        self.scales = torch.where(is_better, wanted, self.scales)

    def search_codes(self) -> None:
        """Visit all blocks in random order and give each row the codes with the least loss."""
        layer, width, values = self.layer, self.width, self.values()
        pull = layer.times_hessian(layer.weight - values)
        size = max(1, SEARCHED_TOGETHER // width)
        chunks = torch.arange(len(self.metrics)).split(size)
        for chunk in torch.randperm(len(chunks), generator=self.generator).tolist():
            blocks = chunks[chunk]
            part = slice(int(blocks[0]) * width, (int(blocks[-1]) + 1) * width)
            before, local = values[part].clone(), pull[part].clone()
            for at in torch.randperm(len(blocks), generator=self.generator).tolist():
                inside = slice(at * width, (at + 1) * width)
                own = slice(part.start + inside.start, part.start + inside.stop)
                block = int(blocks[at])
                wanted = local[inside] + self.metrics[block] @ values[own]
                change = self._search_block(block, wanted.T) - values[own]
                values[own] += change
                local.addmm_(layer.hessian[part, own], change, alpha=-1)
                local[inside].add_(change, alpha=-layer.damping)
            change = values[part] - before
            pull.addmm_(layer.hessian[:, part], change, alpha=-1)
            pull[part].add_(change, alpha=-layer.damping)

    def _search_block(self, block: int, wanted: Tensor) -> Tensor:
        """Set the codes of a block; return its values [d, out]. wanted [out, d]: the metric times the best values."""
        order = torch.randperm(len(self.codes), generator=self.generator).tolist()
        entries, metric = self.books.entries, self.metrics[block]
        sums = []
        step = max(1, SCORES // (BEAM * entries.shape[1]))
        for start in range(0, len(wanted), step):
            rows = slice(start, start + step)
            goal = wanted[rows] / self.scales[rows, None]
            codes, values = search_beam(goal, metric, entries, self.codes[:, block, rows], order)
            self.codes[:, block, rows] = codes
            sums.append(values * self.scales[rows, None])
        return torch.cat(sums).T

    def pack(self, shape: tuple[int, int]) -> PackedWeight:
        """Return the packed weight [out, in]."""
        books, is_int8 = self.books, self.params.codebook_dtype == "int8"
        parts = codebook.Parts(
            [codes.T for codes in self.codes],
            [stored[None, None].clone() for stored in books.stored],  # not a view of all stages
            [scale[None, None].clone() for scale in books.scale] if is_int8 else [],
            norm_scale=self.scales.half(),
        )
        return PackedWeight(Stored(FORMAT, self.params), codebook.pack(parts, self.params, shape), shape)


def search_beam(
    goal: Tensor, metric: Tensor, entries: Tensor, codes: Tensor, order: list[int]
) -> tuple[Tensor, Tensor]:
    """Return better codes [stages, rows] and the sums of their entries [rows, d], as near to the goal as a beam finds.

    The loss of a sum u is u M u^T - 2 u goal^T: goal [rows, d], metric M [d, d], entries [stages, entries, d], present
    codes [stages, rows]. order: in which the stages are visited.
    """
    size = entries.shape[1]
    sets = codes.T[:, None]  # row, set, stage
    sums = torch.stack([entries[stage][sets[..., stage]] for stage in range(len(entries))]).sum(0)  # row, set, d
    for visit, stage in enumerate(order):
        rest = sums - entries[stage][sets[..., stage]]
        pulled = rest @ metric
        fixed = ((pulled - 2 * goal[:, None]) * rest).sum(2)
        own = ((entries[stage] @ metric) * entries[stage]).sum(1)
        losses = (2 * (pulled - goal[:, None])) @ entries[stage].T + own + fixed[..., None]  # row, set, entry
        keep = 1 if visit == len(order) - 1 else min(BEAM, size)
        best = losses.flatten(1).topk(keep, dim=1, largest=False).indices  # row, set
        parent, entry = best // size, best % size
        sets = sets.gather(1, parent[..., None].expand(-1, -1, sets.shape[2])).clone()
        sets[..., stage] = entry
        sums = rest.gather(1, parent[..., None].expand(-1, -1, rest.shape[2])) + entries[stage][entry]
    return sets[:, 0].T, sums[:, 0]


def _storable(scales: Tensor) -> Tensor:
    """Round scales of rows to float16, as float32; 0 becomes 1."""
    rounded = scales.clamp(max=torch.finfo(torch.float16).max).half().float()
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)
