"""How codes are stored and decoded; one file a format, looked up by its file name.

A format file has
- `Params`: a frozen dataclass, the static integers and names that config.json stores;
- `specs(params, shape) -> {tensor name: (shape, dtype)}`: what is stored for a weight [out_features, in_features];
- `decode(tensors, params, shape, dtype) -> Tensor [out_features, in_features]`;
- `pack(...)`: the encoder, called by the methods that write the format, beside its decoder.

Operations around the stored matrix (compress/formats/transforms.py) and a low-rank part beside it (formats/lowrank.py)
are no business of a format: the functions here add them.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from compress import plugins
from compress.errors import CheckpointError
from compress.formats import lowrank as lowrank_format
from compress.formats import transforms as operations
from compress.types import IN_SCALE, NO_OPS, Activations, LowRank, Ops, PackedWeight

Shape = tuple[int, int]


class Format(Protocol):
    """The contract of a format file."""

    Params: type

    def specs(self, params: Any, shape: Shape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def decode(self, tensors: Mapping[str, Tensor], params: Any, shape: Shape, dtype: torch.dtype) -> Tensor: ...


def get(name: str) -> Format:
    """The format's module; an unknown name is one clear line (a newer checkpoint, usually)."""
    name = plugins.current("formats", name)
    if not name.isidentifier():
        raise CheckpointError(f"format {name!r} is not a valid name")
    try:
        return cast(Format, importlib.import_module(f"compress.formats.{name}"))
    except ModuleNotFoundError as error:
        if error.name != f"compress.formats.{name}":
            raise
        raise CheckpointError(f"format {name!r} is unknown to this version of compress; upgrade compress") from error


def params_from_dict(name: str, values: Mapping[str, Any]) -> Any:
    """`Params` of a format from what config.json stores; unknown or missing keys are errors."""
    cls = get(name).Params
    known = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := set(values) - set(known):
        raise CheckpointError(f"format {name!r}: unknown parameters {sorted(unknown)}; known: {sorted(known)}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"format {name!r}: {error}") from error


def specs(
    name: str,
    params: Any,
    shape: Shape,
    ops: Ops = NO_OPS,
    activations: Activations | None = None,
    lowrank: LowRank | None = None,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """All tensors stored for a weight of this shape: the format's, the operations' around it, the activations' scale,
    those of the low-rank part.

    Raises ValueError for a shape that an operation or the low-rank part cannot have.
    """
    static = activations is not None and activations.scale == "tensor"
    scale: dict[str, tuple[tuple[int, ...], torch.dtype]] = {IN_SCALE: ((1,), torch.float32)} if static else {}
    beside = lowrank_format.part_specs(lowrank, shape) if lowrank is not None else {}
    return {**get(name).specs(params, shape), **operations.specs(ops, shape), **scale, **beside}


def nbytes(
    name: str,
    params: Any,
    shape: Shape,
    ops: Ops = NO_OPS,
    activations: Activations | None = None,
    lowrank: LowRank | None = None,
) -> int:
    """Stored bytes of a weight of this shape, exact; ValueError as `specs`."""
    stored = specs(name, params, shape, ops, activations, lowrank)
    return sum(math.prod(size) * dtype.itemsize for size, dtype in stored.values())


def decode(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out_features, in_features], the operations around the stored matrix multiplied in, and
    the low-rank part beside it.
    """
    if not weight.ops and weight.lowrank is None:
        return decode_stored(weight, dtype)
    matrix = decode_stored(weight, torch.float32)
    if weight.lowrank is not None:
        a, b = lowrank_format.part_factors(weight.tensors, weight.lowrank, weight.shape, torch.float32)
        matrix = torch.addmm(matrix, b.T, a)
    return operations.effective(matrix, weight.ops, weight.tensors).to(dtype) if weight.ops else matrix.to(dtype)


def decode_stored(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix in the weight's format itself [out_features, in_features], with nothing around or beside it."""
    return get(weight.format).decode(weight.tensors, weight.params, weight.shape, dtype)
