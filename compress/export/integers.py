"""Say which plain integers a target can hold, and lay their codes out in words as these targets have them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from compress.export.convert import Export, word
from compress.export.weights import HEAD, Weight
from compress.numerics.packing import pack_stream


def refusal(weight: Weight, bits: Collection[int], heads: bool = False) -> str | None:
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


def without_activations(weight: Weight) -> str | None:
    """Return the reason against a weight whose inputs are quantized at run time."""
    if weight.stored.activations is None:
        return None
    return "its inputs are quantized at run time, which cannot be said there; set activations: null"


def words(codes: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [rows, n] as int32 [rows, ceil(n * bits / 32)]: a stream of bits, the lowest first."""
    packed = pack_stream(torch.nn.functional.pad(codes, (0, -codes.shape[1] % 32)), bits)
    return packed[:, : 4 * -(-codes.shape[1] * bits // 32)].contiguous().view(torch.int32)


def settle_type(export: Export, types: Iterable[str]) -> None:
    """Let the type of the model be that of all scales, into which readers turn everything, and say so.

    The user's choice stays, and so does the type of the model where scales have several types or it is float32.
    """
    found = set(types)
    if export.is_chosen or len(found) != 1 or export.dtype == torch.float32 or found == {word(export.dtype)}:
        return
    export.notes.append(
        f"the model becomes {min(found)}, the type of its scales: in {word(export.dtype)} readers would round them"
    )
    export.dtype = getattr(torch, min(found))
