"""Share what trained vector codes have in common: codes of the format `codebook` that are replaced by better entries.

What a stored weight is, is affine in the entry that its code names: weight = gain * entry + offset, where gain and
offset hold all scales, norms, other stages and outliers. So any vector can be encoded anew by itself, in the metric of
the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compress import formats
from compress.formats import codebook as codebook_format
from compress.numerics.packing import pack_planes
from compress.tune.codes.units import Units
from compress.types import PackedWeight

CANDIDATES = 1 << 24  # numbers of candidates' errors that are made at a time


def serves(packed: PackedWeight) -> bool:
    """Return whether codes of a weight can be replaced: entries must be stored, not made of factors."""
    return packed.format == "codebook" and not packed.params.svd_rank


class Vectors(Units):
    """One weight of the format `codebook`; `codes` has those of each stage, int64 [code rows, code columns]."""

    share = 0.01
    keeps_copy = True

    def __init__(self, packed: PackedWeight) -> None:
        codes = codebook_format.unpack_codes(packed.tensors, packed.params, packed.shape)
        super().__init__(packed, [each.long() for each in codes])
        order = packed.tensors.get("order")
        self.order = None if order is None else order.long()

    def set_codes(self, codes: list[Tensor]) -> None:
        """Take these codes, and pack them."""
        self.codes = [each.clone() for each in codes]
        params, tensors = self.packed.params, dict(self.packed.tensors)
        rows, columns = codebook_format.padded_shape(params, self.packed.shape)
        for stage, each in enumerate(codes):
            padded = torch.nn.functional.pad(each, (0, columns - each.shape[1], 0, rows - each.shape[0]))
            for name, words in pack_planes(padded, params.bits[stage], params.tile_words).items():
                tensors[codebook_format.stage_prefix(stage) + name] = words.contiguous()
        self.packed = PackedWeight(self.packed.stored, tensors, self.packed.shape)

    def units(self, matrix: Tensor) -> Tensor:
        """Return the vectors [vectors, d] of a matrix [out, in], zeros behind its end."""
        return self.vectors(matrix).flatten(0, 1)

    @torch.no_grad()
    def encode(self, wanted: Tensor, chosen: Tensor) -> None:
        """Encode some vectors anew: the codes of the stages one after the other, what lowers the error most first."""
        for _ in self.codes:  # as often as there are stages
            self._encode_stage(wanted, chosen)

    def _encode_stage(self, wanted: Tensor, chosen: Tensor) -> None:
        """Give some vectors the entry, of one stage, that brings them nearest to a matrix."""
        found = [self.best_entries(wanted, chosen, stage) for stage in range(len(self.codes))]
        stages = torch.stack([gains for _, gains in found]).argmax(0)
        codes = [each.clone() for each in self.codes]
        for stage, (entries, gains) in enumerate(found):
            moved = (stages == stage) & (gains > 0)
            codes[stage].view(-1)[chosen[moved]] = entries[moved]
        self.set_codes(codes)

    def vectors(self, matrix: Tensor) -> Tensor:
        """Return the vectors [code rows, code columns, d] of a matrix [out, in], zeros behind its end."""
        params = self.packed.params
        if self.order is not None:
            matrix = matrix[:, self.order]
        pad = (0, -matrix.shape[1] % params.width, 0, -matrix.shape[0] % params.height)
        padded = torch.nn.functional.pad(matrix, pad)
        if params.axis == "in":
            return padded.unflatten(1, (-1, params.vector_dim))
        return padded.unflatten(0, (-1, params.vector_dim)).transpose(1, 2)

    @torch.no_grad()
    def best_entries(self, wanted: Tensor, chosen: Tensor, stage: int) -> tuple[Tensor, Tensor]:
        """Find the entries of a stage that bring some vectors nearest to those of a matrix, the other stages as is.

        wanted [out, in]; chosen [n]: numbers of vectors, row by row. Return the entries [n], and by how much each
        lowers the squared error [n].
        """
        missing = self.vectors(wanted - self.matrix()).flatten(0, 1)[chosen]
        found, gains = torch.empty(len(chosen), dtype=torch.long), torch.empty(len(chosen))
        for part, steps in self.steps_to(chosen, stage):
            errors = (steps - missing[part, None]).square().sum(-1)
            found[part] = errors.argmin(1)
            gains[part] = missing[part].square().sum(-1) - errors.amin(1)
        return found, gains

    @torch.no_grad()
    def steps_to(self, chosen: Tensor, stage: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what some vectors would move by with each entry of a stage in the place of theirs, some at a time.

        chosen [n]: numbers of vectors, row by row. Yield numbers within `chosen` [m], and the steps [m, entries, d].
        """
        tensors, params = self.tensors(), self.packed.params
        gain = self.vectors(self._with_entries(tensors, stage, 1.0) - self._with_entries(tensors, stage, 0.0))
        gain = gain.flatten(0, 1)[chosen]
        tables = codebook_format.entries(tensors, params, stage).flatten(0, 1)  # [groups, entries, d]
        owner = self._codebooks(chosen.device).flatten()[chosen]
        now = self.codes[stage].flatten()[chosen]
        for part in torch.arange(len(chosen)).split(max(1, CANDIDATES // tables[0].numel())):
            table = tables[owner[part]]
            yield part, gain[part, None] * (table - table[torch.arange(len(part)), now[part]][:, None])

    def _codebooks(self, device: torch.device) -> Tensor:
        """Return the number of the codebook of each vector, [code rows, code columns]."""
        params, (rows, columns) = self.packed.params, self.codes[0].shape
        across = codebook_format.group_of_codes(columns, params.width, params.group_columns, device)
        down = codebook_format.group_of_codes(rows, params.height, params.group_rows, device)
        return across * codebook_format.groups(params, self.packed.shape)[1] + down.unsqueeze(1)

    def _with_entries(self, tensors: dict[str, Tensor], stage: int, value: float) -> Tensor:
        """Return the matrix [out, in] with all entries of a stage replaced by a value."""
        name = f"{codebook_format.stage_prefix(stage)}codebook"
        changed = {name: torch.full_like(tensors[name], value, dtype=torch.float32)}
        if f"{name}_scales" in tensors:
            changed[f"{name}_scales"] = torch.ones_like(tensors[f"{name}_scales"])
        packed = PackedWeight(self.packed.stored, {**tensors, **changed}, self.packed.shape)
        return formats.decode_stored(packed, torch.float32)
