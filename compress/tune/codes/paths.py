"""Replace codes of a trellis: a whole closed path, the weights of one column in one tile of rows, is searched anew.

A code decides the windows of those behind it, and the last window of a path goes on in the first, so that no part of a
path can be replaced by itself. The search is the one that chose the path (compress/quant/viterbi.py), for the wanted
weights in units of the scales; a path is taken only where it is nearer. With scales of rows the search weighs all rows
alike, and the comparison does not. Searching a weight anew costs about 1.5 * 2^state_bits transitions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.quant.viterbi import Search
from compress.tune.codes.units import Units, in_scales
from compress.types import PackedWeight

PART = 1 << 10  # paths that are searched at a time


def serves(packed: PackedWeight) -> bool:
    """Return whether codes of a weight can be replaced: those of the format `trellis`."""
    return packed.format == "trellis"


class Paths(Units):
    """One weight of the format `trellis`; `codes` has one tensor: the stored words."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__(packed, [packed.tensors["words"].clone()])
        self.search: Search | None = None

    def set_codes(self, codes: list[Tensor]) -> None:
        """Take these words."""
        self.codes = [each.clone() for each in codes]
        tensors = {**self.packed.tensors, "words": self.codes[0]}
        self.packed = PackedWeight(self.packed.stored, tensors, self.packed.shape)

    def changed(self) -> float:
        """Return the share of codes that moved: of the steps of all paths, those with other new bits."""
        params = self.packed.params
        moved = 0
        for now, first in zip(self._tiles(self.codes[0]), self._tiles(self.first[0]), strict=True):
            different = trellis_format.unpack(now, params) ^ trellis_format.unpack(first, params)
            moved += int((different & ((1 << params.symbol_bits) - 1) != 0).sum())
        return moved * params.symbol_bits / (16 * self.codes[0].numel())

    def _tiles(self, words: Tensor) -> Tensor:
        """Return stored words as [tiles, words of a path, in]."""
        params = self.packed.params
        return words.view(-1, params.tile_rows * params.bits // 16, words.shape[1])

    def units(self, matrix: Tensor) -> Tensor:
        """Return the paths [tiles * in, rows of a tile] of a matrix [out, in], tile by tile, zeros behind its end."""
        tile = self.packed.params.tile_rows
        padded = torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % tile))
        return padded.unflatten(0, (-1, tile)).transpose(1, 2).flatten(0, 1)

    @torch.no_grad()
    def encode(self, wanted: Tensor, chosen: Tensor) -> None:
        """Search some paths anew, for rows behind the last one as if these were to stay as they are."""
        tensors, params = self.tensors(), self.packed.params
        search, columns = self._search(tensors.get("table")), self.packed.shape[1]
        words = self._tiles(self.codes[0].clone())
        factors = self._factors(tensors)
        paths, rows = self.units(wanted), torch.arange(params.tile_rows, device=wanted.device)
        for part in chosen.split(PART):
            tile, column = part // columns, part % columns
            old = trellis_format.unpack(words[tile, :, column].T.contiguous(), params).T  # path, step
            factor = factors[tile]
            before = search.table[old].flatten(1)
            target = in_scales(paths[part], factor)
            is_stored = tile[:, None] * params.tile_rows + rows < wanted.shape[0]
            target = torch.where(is_stored, target, before)
            states = search.encode(target)
            errors = [
                (factor * (values - target)).square().sum(1) for values in (search.table[states].flatten(1), before)
            ]
            nearer = errors[0] < errors[1]
            states = torch.where(nearer[:, None], states, old)
            words[tile, :, column] = trellis_format.pack(states.T, 1.0, params, None, None)["words"].T
        self.set_codes([words.view(self.codes[0].shape)])

    def _search(self, table: Tensor | None) -> Search:
        """Return the search through what states emit now; only a stored table changes."""
        if self.search is None or table is not None:
            params = self.packed.params
            levels = trellis_format.states_table(params, table).to(self.packed.tensors["words"].device)
            self.search = Search(levels, params.state_bits, params.symbol_bits)
        return self.search

    def _factors(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the factor of each row as it is now, [tiles, rows of a tile]."""
        params = self.packed.params
        rows = trellis_format.padded_rows(params, self.packed.shape[0])
        factors = tensors["scale"].expand(rows)
        if params.row_scales:
            factors = factors * tensors["row_scales"]
        return factors.view(-1, params.tile_rows)
