"""Decide which plain integers a target can hold, and lay out their codes: packed in words, or as signed integers.

Formats with a fixed zero hold signed integers. Symmetric codes of b bits less their middle are signed integers of b
bits. Asymmetric ones less their zero points take one bit more. Both are exact, so that a target without zero points
still holds every weight of up to 7 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from compress.export.convert import Export, dtype_name
from compress.export.weights import HEAD, ExportWeight, IntWeight
from compress.numerics.packing import pack_stream


def refusal(weight: ExportWeight, bits: Collection[int], heads: bool = False) -> str | None:
    """Return why a weight is no plain integers of these bits in whole groups, as an `nn.Linear` of its own.

    heads: the target holds an output head whose table is not that of the embeddings, too.
    """
    if weight.roles and not (heads and weight.roles == (HEAD,)):
        return "tables are plain numbers there"
    if (reason := weight.not_integers()) is not None:
        return reason
    if weight.stored.params.bits not in bits:
        known = ", ".join(map(str, sorted(bits)))
        return f"it has {weight.stored.params.bits} bits; set bits to one of {known}"
    size, columns = weight.stored.params.group(weight.shape[1]), weight.shape[1]
    if columns % size:
        return f"its {columns} inputs are no whole groups of {size}; set group_size to a divisor of {columns}, or -1"
    if weight.is_turned:
        return "the class of the model holds it as [inputs, outputs], which is no linear there; keep it"
    if weight.is_fused:
        return "published checkpoints of this architecture hold all experts of a block in one tensor; keep experts"
    return None


def without_activations(weight: ExportWeight) -> str | None:
    """Return the reason against a weight whose inputs are quantized at run time."""
    if weight.stored.activations is None:
        return None
    return "its inputs are quantized at run time, which cannot be said there; set activations: null"


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [rows, n] as int32 [rows, ceil(n * bits / 32)]: a stream of bits, the lowest first."""
    packed = pack_stream(torch.nn.functional.pad(codes, (0, -codes.shape[1] % 32)), bits)
    return packed[:, : 4 * -(-codes.shape[1] * bits // 32)].contiguous().view(torch.int32)


def settle_type(export: Export, types: Iterable[str]) -> None:
    """Let the type of the model be that of all scales, into which readers turn everything, and say so.

    The user's choice stays, and so does the type of the model where scales have several types or it is float32.
    """
    scale_types = set(types)
    if (
        export.is_chosen
        or len(scale_types) != 1
        or export.dtype == torch.float32
        or scale_types == {dtype_name(export.dtype)}
    ):
        return
    export.notes.append(
        f"the model becomes {min(scale_types)}, the type of its scales: in {dtype_name(export.dtype)} readers would "
        "round them"
    )
    export.dtype = getattr(torch, min(scale_types))


def signed_bits(weight: ExportWeight) -> int:
    """Return the bits of the signed integers that a weight of plain integers is."""
    return int(weight.stored.params.bits) + (not weight.stored.params.symmetric)


def signed_codes(weight: IntWeight, rows: Tensor | slice = slice(None)) -> Tensor:
    """Return codes less zero points, int8 [rows, in]; they fit (`signed_bits` is at most 8)."""
    codes = weight.codes[rows]
    if weight.zeros is None:
        return (codes - (1 << (weight.bits - 1))).view(torch.int8)  # wraps around as two's complement does
    zeros = weight.zeros[rows].repeat_interleave(weight.group_size, 1)[:, : weight.shape[1]]
    return (codes - zeros).view(torch.int8)


def repeated_scales(weight: IntWeight, group: int, dtype: torch.dtype) -> Tensor:
    """Return a scale for each `group` columns, which divide the weight's own groups: [out, in / group] in `dtype`.

    Raises ExportError where a scale is no number of that type.
    """
    return weight.scales_in(dtype).repeat_interleave(weight.group_size // group, 1)[:, : weight.shape[1] // group]
