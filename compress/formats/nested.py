"""Store a weight as a sum of parts, each in a format of its own, so that the first parts alone are a cheaper weight.

    W = part_1 + part_2 + ...

A part is quantized to what the parts before it leave of the weight, with scales of its own: residual planes, as in
vector quantization by stages (arXiv 2401.06118 lists the family) and RRQ's sums of 2-bit integers. Level l is the sum
of the parts whose `levels` are at most l; the first part alone is to the bit what its format stores for a weight of its
own, under the same names, so that the lowest level of 4 + 4 bits is a plain `int` of 4 bits. Codes of several widths
below one common scale are the format `sliced`.

A last part of format `dense` is no summand but the whole weight itself, as it was before anything was rounded, so that
a target of 16 bits keeps its exact numbers beside a draft of 4 (ML-SpecQD, arXiv 2503.13565, holds two models). What
remains of 16 bits behind a part of 4 would take 16 bits again, and a sum of them is not exact.

Stored tensors: those of the first part under its names, those of part k > 1 with `_k` behind: `words4`, `scales`,
`words4_2`, `scales_2`. A whole weight beside the sum is `values`. Rows and columns can be cut where every part can be.

Not supported: parts whose parameters only say what is usual (`ESTIMATED`), sums within sums, and parts in slices, whose
planes have such names, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress import formats
from compress.formats import Shape, Spec
from compress.formats.stored import from_table, params_from_dict
from compress.types import PackedWeight, Stored

ANY_SHAPE = (1, 1)  # names of stored tensors do not depend on it


@dataclass(frozen=True)
class StoredPart:
    format: str  # of the part
    params: Any  # `Params` of that format

    @property
    def is_original(self) -> bool:
        """Whether it is the whole weight, and no summand."""
        return self.format == "dense"

    def __str__(self) -> str:
        if self.is_original:
            return f"the original in {self.params.dtype}"
        return f"{self.format} of {self.params.bits} bits" if hasattr(self.params, "bits") else self.format


@dataclass(frozen=True)
class Params:
    parts: tuple[Any, ...]  # `StoredPart`s of the sum; a table of JSON holds format and params of each
    levels: tuple[int, ...]  # [bits] that the sum is named by as each part joins it, rising

    def __post_init__(self) -> None:
        parts = tuple(part if isinstance(part, StoredPart) else _read(part) for part in self.parts)
        object.__setattr__(self, "parts", parts)  # tables after a round trip through JSON, as are lists
        object.__setattr__(self, "levels", tuple(self.levels))
        if len(parts) < 2:
            raise ValueError(f"parts {[part.format for part in parts]} are fewer than two")
        for part in parts:
            if part.format in ("nested", "sliced") or getattr(formats.get(part.format), "ESTIMATED", False):
                raise ValueError(f"parts hold format {part.format}, of which no sum is stored")
        if len(self.levels) != len(parts) or sorted({*self.levels}) != [*self.levels] or self.levels[0] < 1:
            raise ValueError(f"levels {list(self.levels)} are not {len(parts)} rising numbers of bits")
        if any(part.is_original for part in parts[:-1]):
            raise ValueError("a whole weight, of format dense, is not the last part")

    @property
    def has_original(self) -> bool:
        """Whether the last level is a part of its own that stands for the whole weight, and no sum."""
        return bool(self.parts[-1].is_original)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What stands behind the names of each part's tensors."""
        return tuple("" if k == 0 or part.is_original else f"_{k + 1}" for k, part in enumerate(self.parts))


def _read(table: Any) -> StoredPart:
    """Return the part that a table of JSON holds; CheckpointError if it cannot be."""
    part = from_table(StoredPart, table, "format 'nested': a part")
    return StoredPart(part.format, params_from_dict(part.format, part.params))


def params_for(parts: Sequence[Stored], levels: Sequence[int]) -> Params:
    """Return the parameters of a sum of weights that are stored so, with nothing around or beside any of them."""
    return Params(tuple(StoredPart(part.format, part.params) for part in parts), tuple(levels))


def pack(parts: Sequence[Mapping[str, Tensor]], params: Params) -> dict[str, Tensor]:
    """Return the stored tensors of a sum from those of its parts, which are shared."""
    each = zip(parts, params.suffixes, strict=True)
    return {name + suffix: tensor for part, suffix in each for name, tensor in part.items()}


def join(parts: Sequence[PackedWeight], levels: Sequence[int]) -> PackedWeight:
    """Return the sum of packed weights [out, in] of one shape; nothing may lie around or beside any of them."""
    params = params_for([part.stored for part in parts], levels)
    return PackedWeight(Stored("nested", params), pack([part.tensors for part in parts], params), parts[0].shape)


def split(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> list[PackedWeight]:
    """Inverse of `join`: the parts, which share the stored tensors."""
    return [
        PackedWeight(Stored(part.format, part.params), {name: tensors[name + suffix] for name in names}, shape)
        for part, suffix, names in _names(params, shape)
    ]


def summands(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> list[PackedWeight]:
    """Return the parts that make the whole weight: all that are added, or the original alone."""
    parts = split(tensors, params, shape)
    return parts[-1:] if params.has_original else parts


def specs(params: Params, shape: Shape) -> dict[str, Spec]:
    return {name + suffix: spec for _, suffix, names in _names(params, shape) for name, spec in names.items()}


def decode(tensors: Mapping[str, Tensor], params: Params, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in]; parts are added in float32, in their order, and rounded once."""
    first, *rest = summands(tensors, params, shape)
    total = formats.decode_stored(first, torch.float32)
    for part in rest:
        total += formats.decode_stored(part, torch.float32)
    return total.to(dtype)


def has_rows(params: Params) -> bool:
    """Return whether single rows of every part can be decoded."""
    return all(formats.has_rows(Stored(part.format, part.params)) for part in params.parts)


def decode_rows(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return rows [n] int64 of the dequantized weight, [n, in], as `decode` gives them; no other row is decoded."""
    first, *rest = summands(tensors, params, shape)
    total = formats.decode_rows(first, rows, torch.float32)
    for part in rest:
        total += formats.decode_rows(part, rows, torch.float32)
    return total.to(dtype)


def join_rows(parts: Sequence[Mapping[str, Tensor]], params: Params) -> dict[str, Tensor]:
    """Return the tensors of a weight from those of its rows, in order, as the formats of its parts join them."""
    joined = []
    for part, suffix, names in _names(params, ANY_SHAPE):
        plain = [{name: rows[name + suffix] for name in names} for rows in parts]
        format: Any = formats.get(part.format)
        joined.append(format.join_rows(plain, part.params))
    return pack(joined, params)


def check(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
    """Check the values of each part; ValueError, which begins with the tensor's name."""
    for part, suffix in zip(split(tensors, params, shape), params.suffixes, strict=True):
        check_part = getattr(formats.get(part.format), "check", None)
        try:
            if check_part is not None:
                check_part(part.tensors, part.params, shape)
        except ValueError as error:
            name, _, problem = str(error).partition(" ")
            raise ValueError(f"{name}{suffix} {problem}") from error


def fixed_tensors(params: Params) -> tuple[str, ...]:
    """Return the names of stored tensors that training leaves as they are."""
    stored = [Stored(part.format, part.params) for part in params.parts]
    each = zip(stored, params.suffixes, strict=True)
    return tuple(name + suffix for part, suffix in each for name in formats.fixed_tensors(part))


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    parts = [formats.cut(part, rows, columns) for part in split(tensors, params, shape)]
    chosen = params_for([part.stored for part in parts], params.levels)
    return chosen, pack([part.tensors for part in parts], chosen)


def levels(params: Params) -> tuple[int, ...]:
    """Return the levels, rising, the whole weight's last."""
    return params.levels


def at_level(params: Params, level: int) -> tuple[str, Any]:
    """Return format and parameters of one of `levels`: of one part alone, or of a shorter sum."""
    count = params.levels.index(level) + 1
    is_whole = params.has_original and count == len(params.parts)
    if count == 1 or is_whole:
        part = params.parts[count - 1]
        return part.format, part.params
    return "nested", Params(params.parts[:count], params.levels[:count])


def whole(params: Params) -> tuple[str, Any] | None:
    """Return format and parameters of the last level where that is a part alone; None: all that is stored is read."""
    return at_level(params, params.levels[-1]) if params.has_original else None


def _names(params: Params, shape: Shape) -> Iterator[tuple[StoredPart, str, dict[str, Spec]]]:
    """Yield each part, what stands behind the names of its tensors, and these under the names of its own format."""
    for part, suffix in zip(params.parts, params.suffixes, strict=True):
        yield part, suffix, formats.get(part.format).specs(part.params, shape)
