"""Replace codes of vectors: units of a weight that are encoded by themselves, and those of the format `codebook`.

A unit is the least part of the stored matrix that its codes give without those of other parts: a vector of a codebook,
eight columns of E8P, the path of a trellis. `Units` cuts a matrix into them, and encodes some of them anew in the
metric of the stored weights. `CodebookVectors` replaces codes of the format `codebook` by better entries.

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
from compress.tune.trained import TrainedWeight, add_surroundings
from compress.types import PackedWeight

FAR = 1e4  # units in those of their scales are cut here: searches take numbers whose squares are finite
TINY = 1e-30  # instead of a scale or a gradient of zero in divisions
CANDIDATES = 1 << 24  # numbers of candidates' errors that are made at a time


def in_scales(values: Tensor, factors: Tensor) -> Tensor:
    """Return units of a matrix in units of their scales, for a search."""
    return (values / torch.where(factors.abs() < TINY, TINY, factors)).clamp_(-FAR, FAR)


class Units(TrainedWeight):
    """One packed weight with its codes, one tensor of integers for each stage or stored plane.

    How PV-Tuning moves them (compress/tune/codes/pv.py) depends on how large units are.
    """

    share = 0.003  # of the units that are encoded anew in a move
    keeps_copy = False  # whether a dense copy of the weight is kept and moved by AdamW
    by_columns = False  # whether gradients are in units of their root mean square over each column

    def __init__(self, packed: PackedWeight, codes: list[Tensor]) -> None:
        super().__init__(packed)
        self.codes = codes
        self.first = [each.clone() for each in codes]
        self.best = self.first

    def units(self, matrix: Tensor) -> Tensor:
        """Return the units [units, numbers of each] of a matrix [out, in], zeros behind its end."""
        raise NotImplementedError

    def encode(self, wanted: Tensor, chosen: Tensor) -> None:
        """Encode some units anew, where that brings them nearer to those of a matrix.

        wanted [out, in] float32; chosen [n] int64: numbers of units.
        """
        raise NotImplementedError

    def set_codes(self, codes: list[Tensor]) -> None:
        """Take these codes, and pack them."""
        raise NotImplementedError

    def keep(self) -> None:
        """Remember the present state as the best."""
        super().keep()
        self.best = [codes.clone() for codes in self.codes]

    def restore(self) -> None:
        """Return to the best state."""
        super().restore()
        self.set_codes(self.best)

    def changed_share(self) -> float:
        """Return the share of codes that moved, of all stages."""
        pairs = list(zip(self.codes, self.first, strict=True))
        return sum(int((now != first).sum()) for now, first in pairs) / sum(now.numel() for now, _ in pairs)

    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self._pack_with({})

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors with what is trained as it is now, float32."""
        return {**self.packed.tensors, **{name: each.value() for name, each in self.trained.items()}}

    def matrix(self) -> Tensor:
        """Return the stored matrix [out, in], float32, without what is around it; gradients reach what is trained."""
        packed = PackedWeight(self.packed.stored, self.tensors(), self.packed.shape)
        return formats.decode_stored(packed, torch.float32)

    def around(self, matrix: Tensor) -> Tensor:
        """Return the dense weight [out, in] of a stored matrix."""
        return add_surroundings(matrix, self.packed, self.tensors())


def serves(packed: PackedWeight) -> bool:
    """Return whether codes of a weight can be replaced: entries must be stored, not made of factors."""
    return packed.format == "codebook" and not packed.params.svd_rank


class CodebookVectors(Units):
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
        by_stage = [self.best_entries(wanted, chosen, stage) for stage in range(len(self.codes))]
        stages = torch.stack([gains for _, gains in by_stage]).argmax(0)
        codes = [each.clone() for each in self.codes]
        for stage, (entries, gains) in enumerate(by_stage):
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
        entries, gains = torch.empty(len(chosen), dtype=torch.long), torch.empty(len(chosen))
        for part, steps in self.steps_to(chosen, stage):
            errors = (steps - missing[part, None]).square().sum(-1)
            entries[part] = errors.argmin(1)
            gains[part] = missing[part].square().sum(-1) - errors.amin(1)
        return entries, gains

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
