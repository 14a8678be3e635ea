"""Store a weight as a sum of parts, each in a format of its own, so that the first parts alone are a cheaper weight.

    W = part_1 + part_2 + ...

A part is quantized to what the parts before it leave of the weight, with scales of its own: residual planes, as in
vector quantization by stages (arXiv 2401.06118 lists the family) and RRQ's sums of 2-bit integers. Level l is the sum
of the parts whose `levels` are at most l; the first part alone is to the bit what its format stores for a weight of its
own, under the same names, so that the lowest level of 4 + 4 bits is a plain `int` of 4 bits. Codes of several widths
below one common scale are the format `sliced`.

Stored tensors: those of the first part under its names, those of part k > 1 with `_k` behind: `words4`, `scales`,
`words4_2`, `scales_2`. Rows and columns can be cut where every part can be.

Not supported: parts whose parameters only say what is usual (`ESTIMATED`), sums within sums, and parts in slices, whose
planes have such names, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress import formats
from compress.formats import Shape, Spec
from compress.formats.stored import from_table, params_from_dict
from compress.types import PackedWeight, Stored


@dataclass(frozen=True)
class Part:
    format: str  # of the part
    params: Any  # `Params` of that format

    def __str__(self) -> str:
        return f"{self.format} of {self.params.bits} bits" if hasattr(self.params, "bits") else self.format


@dataclass(frozen=True)
class Params:
    parts: tuple[Any, ...]  # `Part`s of the sum; a table of JSON holds format and params of each
    levels: tuple[int, ...]  # [bits] that the sum is named by as each part joins it, rising

    def __post_init__(self) -> None:
        parts = tuple(part if isinstance(part, Part) else _read(part) for part in self.parts)
        object.__setattr__(self, "parts", parts)  # tables after a round trip through JSON, as are lists
        object.__setattr__(self, "levels", tuple(self.levels))
        if len(parts) < 2:
            raise ValueError(f"parts {[part.format for part in parts]} are fewer than two")
        for part in parts:
            if part.format in ("nested", "sliced") or getattr(formats.get(part.format), "ESTIMATED", False):
                raise ValueError(f"parts hold format {part.format}, of which no sum is stored")
        if len(self.levels) != len(parts) or sorted({*self.levels}) != [*self.levels] or self.levels[0] < 1:
            raise ValueError(f"levels {list(self.levels)} are not {len(parts)} rising numbers of bits")


def _read(table: Any) -> Part:
    """Return the part that a table of JSON holds; CheckpointError if it cannot be."""
    part = from_table(Part, table, "format 'nested': a part")
    return Part(part.format, params_from_dict(part.format, part.params))


def params_for(parts: Sequence[Stored], levels: Sequence[int]) -> Params:
    """Return the parameters of a sum of weights that are stored so, with nothing around or beside any of them."""
    return Params(tuple(Part(part.format, part.params) for part in parts), tuple(levels))


def pack(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the stored tensors of a sum from those of its parts, which are shared."""
    return {_name(name, k): tensor for k, part in enumerate(parts) for name, tensor in part.items()}


def join(parts: Sequence[PackedWeight], levels: Sequence[int]) -> PackedWeight:
    """Return the sum of packed weights [out, in] of one shape; nothing may lie around or beside any of them."""
    params = params_for([part.stored for part in parts], levels)
    return PackedWeight(Stored("nested", params), pack([part.tensors for part in parts]), parts[0].shape)


def split(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> list[PackedWeight]:
    """Inverse of `join`: the parts, which share the stored tensors."""
    return [
        PackedWeight(Stored(part.format, part.params), {name: tensors[_name(name, k)] for name in names}, shape)
        for k, (part, names) in enumerate(_names(params, shape))
    ]


def specs(params: Params, shape: Shape) -> dict[str, Spec]:
    return {_name(name, k): spec for k, (_, names) in enumerate(_names(params, shape)) for name, spec in names.items()}


def decode(tensors: Mapping[str, Tensor], params: Params, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in]; parts are added in float32, in their order, and rounded once."""
    first, *rest = split(tensors, params, shape)
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
    first, *rest = split(tensors, params, shape)
    total = formats.decode_rows(first, rows, torch.float32)
    for part in rest:
        total += formats.decode_rows(part, rows, torch.float32)
    return total.to(dtype)


def join_rows(parts: Sequence[Mapping[str, Tensor]], params: Params) -> dict[str, Tensor]:
    """Return the tensors of a weight from those of its rows, in order, as the formats of its parts join them."""
    joined = []
    for k, part in enumerate(params.parts):
        own = [name for name in parts[0] if _number(name) == k]
        plain = [{name.removesuffix(f"_{k + 1}") if k else name: rows[name] for name in own} for rows in parts]
        format: Any = formats.get(part.format)
        joined.append(format.join_rows(plain, part.params))
    return pack(joined)


def check(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
    """Check the values of each part; ValueError, which begins with the tensor's name."""
    for k, part in enumerate(split(tensors, params, shape)):
        check_part = getattr(formats.get(part.format), "check", None)
        try:
            if check_part is not None:
                check_part(part.tensors, part.params, shape)
        except ValueError as error:
            name, _, problem = str(error).partition(" ")
            raise ValueError(f"{_name(name, k)} {problem}") from error


def fixed_tensors(params: Params) -> tuple[str, ...]:
    """Return the names of stored tensors that training leaves as they are."""
    stored = (Stored(part.format, part.params) for part in params.parts)
    return tuple(_name(name, k) for k, part in enumerate(stored) for name in formats.fixed_tensors(part))


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    parts = [formats.cut(part, rows, columns) for part in split(tensors, params, shape)]
    return params_for([part.stored for part in parts], params.levels), pack([part.tensors for part in parts])


def levels(params: Params) -> tuple[int, ...]:
    """Return the levels, rising, the whole weight's last."""
    return params.levels


def at_level(params: Params, level: int) -> tuple[str, Any]:
    """Return format and parameters of one of `levels`: of the first part alone, or of a shorter sum."""
    count = params.levels.index(level) + 1
    if count == 1:
        return params.parts[0].format, params.parts[0].params
    return "nested", Params(params.parts[:count], params.levels[:count])


def _names(params: Params, shape: Shape) -> Iterator[tuple[Part, dict[str, Spec]]]:
    """Yield each part and what is stored for it, under the names of its own format."""
    for part in params.parts:
        yield part, formats.get(part.format).specs(part.params, shape)


def _number(name: str) -> int:
    """Return the number of the part, from 0 on, that a stored tensor belongs to."""
    suffix = re.search(r"_(\d+)$", name)
    return int(suffix[1]) - 1 if suffix else 0


def _name(name: str, k: int) -> str:
    """Return the name of a tensor of the part number k, from 0 on."""
    return f"{name}_{k + 1}" if k else name
