"""How codes are stored and decoded; one file a format, looked up by its file name.

A format file has
- `Params`: a frozen dataclass, the static integers and names that config.json stores;
- `specs(params, shape) -> {tensor name: (shape, dtype)}`: what is stored for a weight [out_features, in_features];
- `decode(tensors, params, shape, dtype) -> Tensor [out_features, in_features]`;
- `pack(...)`: the encoder, called by the methods that write the format, beside its decoder.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.types import PackedWeight

Shape = tuple[int, int]


class Format(Protocol):
    """The contract of a format file."""

    Params: type

    def specs(self, params: Any, shape: Shape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def decode(self, tensors: Mapping[str, Tensor], params: Any, shape: Shape, dtype: torch.dtype) -> Tensor: ...


def get(name: str) -> Format:
    """The format's module; an unknown name is one clear line (a newer checkpoint, usually)."""
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


def nbytes(name: str, params: Any, shape: Shape) -> int:
    """Stored bytes of a weight of this shape, exact."""
    return sum(math.prod(s) * dtype.itemsize for s, dtype in get(name).specs(params, shape).values())


def decode(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out_features, in_features]."""
    return get(weight.format).decode(weight.tensors, weight.params, weight.shape, dtype)
