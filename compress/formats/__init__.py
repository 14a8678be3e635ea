"""Store and decode codes: one file a format, looked up by its file name.

A format file has
- `Params`: a frozen dataclass, the static integers and names that config.json stores;
- `specs(params, shape) -> {tensor name: (shape, dtype)}`: what is stored for a weight [out_features, in_features];
- `decode(tensors, params, shape, dtype) -> Tensor [out_features, in_features]`;
- `pack(...)`: the encoder, called by the methods that write the format, beside its decoder;
- `check(tensors, params, shape)`, only where a stored integer selects something and can say more than there is, such as
  an order of columns or a number of bits: ValueError, which begins with the tensor's name. Where every pattern of bits
  decodes to a weight, there is nothing to check;
- `decode_rows(tensors, params, shape, rows, dtype) -> Tensor [n, in_features]` and `join_rows(parts) -> tensors`, only
  where rows lie apart: a table of embeddings needs them.

Transforms around the stored matrix (compress/formats/transforms.py) and a low-rank part beside it (formats/lowrank.py)
are no business of a format: the functions here add them to what `Stored` (compress/types.py) says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from compress import plugins
from compress.errors import CheckpointError, RecipeError, shown
from compress.formats import lowrank, transforms
from compress.numerics import checks
from compress.types import IN_SCALE, PackedWeight, Stored

Shape = tuple[int, int]
Spec = tuple[tuple[int, ...], torch.dtype]  # of a stored tensor


class Format(Protocol):
    """The contract of a format file."""

    Params: type

    def specs(self, params: Any, shape: Shape) -> dict[str, Spec]: ...

    def decode(self, tensors: Mapping[str, Tensor], params: Any, shape: Shape, dtype: torch.dtype) -> Tensor: ...


def get(name: str) -> Format:
    """Return the format's module; CheckpointError for an unknown name, usually of a newer checkpoint."""
    try:
        return cast(Format, plugins.load("formats", plugins.current("formats", name)))
    except RecipeError as error:
        raise CheckpointError(
            f"format {shown(name)} is unknown to this version of compress; upgrade compress"
        ) from error


def specs(stored: Stored, shape: Shape) -> dict[str, Spec]:
    """Return all tensors stored for a weight [out, in]: of the format, transforms, activations, low rank.

    Raises ValueError for a shape that a transform or the low-rank part cannot have.
    """
    return {
        **get(stored.format).specs(stored.params, shape),
        **transforms.specs(stored.ops, shape),
        **({IN_SCALE: ((1,), torch.float32)} if stored.has_in_scale else {}),
        **(lowrank.part_specs(stored.lowrank, shape) if stored.lowrank is not None else {}),
    }


def check(weight: PackedWeight, where: str) -> None:
    """Check the tensors of a weight that come from a file; nothing may compute with them before.

    Names, shapes and types must be those of `specs`, floating numbers finite, a static scale of activations above 0,
    and what selects something within what there is (`check` of the format). Values on meta are not looked at. Raises
    CheckpointError, which begins with `where`, the weight's name.
    """
    try:
        expected = specs(weight.stored, weight.shape)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}; download or write the checkpoint again") from error
    try:
        checks.specified(weight.tensors, expected)
        if any(tensor.is_meta for tensor in weight.tensors.values()):
            return
        for name, tensor in weight.tensors.items():
            if tensor.is_floating_point():
                checks.finite(name, tensor)
        if weight.stored.has_in_scale:
            checks.positive(IN_SCALE, weight.tensors[IN_SCALE])
        check_values = getattr(get(weight.format), "check", None)
        if check_values is not None:
            check_values(weight.tensors, weight.params, weight.shape)
    except ValueError as error:
        raise CheckpointError(f"{where}.{error}; download or write the checkpoint again") from error


def nbytes(stored: Stored, shape: Shape) -> int:
    """Return the stored bytes of a weight [out, in], exact; ValueError as `specs`."""
    return sum(math.prod(size) * dtype.itemsize for size, dtype in specs(stored, shape).values())


def decode(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in], with its low-rank part and the transforms around both multiplied in.

    It shares no memory with the stored tensors.
    """
    stored = weight.stored
    if not stored.ops and stored.lowrank is None:
        return decode_stored(weight, dtype)
    matrix = decode_stored(weight, torch.float32)
    if stored.lowrank is not None:
        a, b = lowrank.part_factors(weight.tensors, stored.lowrank, weight.shape, torch.float32)
        matrix = torch.addmm(matrix, b.T, a)
    return (transforms.effective(matrix, stored.ops, weight.tensors) if stored.ops else matrix).to(dtype)


def has_rows(stored: Stored) -> bool:
    """Return whether single rows of a weight can be decoded.

    Its format must be able to, and nothing may be beside the matrix, nor around it that rows have in common.
    """
    lies_alone = not stored.ops.output and stored.activations is None and stored.lowrank is None
    return lies_alone and hasattr(get(stored.format), "decode_rows")


def decode_rows(weight: PackedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [n] int64 of the stored matrix, [n, in], without the transforms around it; `has_rows` must hold."""
    format: Any = get(weight.format)
    return cast(Tensor, format.decode_rows(weight.tensors, weight.params, weight.shape, rows, dtype))


def join_rows(parts: Sequence[PackedWeight]) -> dict[str, Tensor]:
    """Return the tensors of a weight from those of its rows, in order.

    Of several parts `has_rows` must hold, and nothing may be around the matrix.
    """
    format: Any = get(parts[0].format)
    return parts[0].tensors if len(parts) == 1 else format.join_rows([part.tensors for part in parts])


def decode_stored(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the matrix in the format itself [out, in], with nothing around or beside it."""
    return get(weight.format).decode(weight.tensors, weight.params, weight.shape, dtype)
