"""Describe packed weights to the targets of an export, and hand over the integers of those that are plain integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress import formats
from compress.errors import ExportError
from compress.formats import int as int_format
from compress.formats import levels, transforms
from compress.storage.checkpoint import Readable
from compress.types import Activations, PackedWeight, Stored

EMBEDDINGS, HEAD = "embeddings", "head"  # roles of a table


@dataclass(frozen=True)
class ExportWeight:
    """What is known of a weight before it is read, or before it is quantized."""

    name: str  # of its module, as published checkpoints of the architecture call it
    shape: tuple[int, int]  # (out_features, in_features); of a table (tokens, hidden)
    stored: Stored
    roles: tuple[str, ...] = ()  # () for a linear; EMBEDDINGS, HEAD or both for a table
    is_turned: bool = False  # the model's own class, and its published checkpoints, hold the weight as [in, out]
    is_expert: bool = False
    is_fused: bool = False  # of an expert that published checkpoints hold in a tensor with the others of its block

    def not_integers(self) -> str | None:
        """Return why the weight is no plain integers with scales, and what a recipe would have to say; None if it is.

        Quantized activations are no reason: `IntWeight.activations` has them.
        """
        stored = self.stored
        if stored.format == "dense" and self.is_expert:
            return "the recipe keeps it, as plain numbers among packed weights; quantize this expert, too (gptq, rtn)"
        if stored.format != "int":
            known = levels.levels(stored)
            if known and levels.at_level(stored, known[0]).format == "int":
                listed = ", ".join(map(str, known))
                return f"it has the levels {listed}, of which {known[0]} is plain integers; add --level {known[0]}"
            return (
                f"it is stored in the format {stored.format!r}; choose a method that writes plain integers (gptq, rtn)"
            )
        return self.not_alone()

    def not_alone(self) -> str | None:
        """Return what lies around or beside the stored matrix, and what a recipe would have to say; None: nothing."""
        stored = self.stored
        if stored.ops:
            listed = " ".join((*stored.ops.input, *stored.ops.output))
            return (
                f"operations lie around it at run time ({listed}); set incoherence: false, and leave out transforms "
                "that are not folded into the weights (rotate, for one)"
            )
        if stored.lowrank is not None:
            return "a low-rank part lies beside it; set lowrank: null"
        if stored.sparsity is not None:
            return "it leaves inputs unread at run time; set sparsity: null"
        return None


@dataclass(frozen=True)
class IntWeight:
    """A weight of plain integers: w[i, j] = scales[i, g] * (codes[i, j] - zeros[i, g]), g = j // group_size.

    The columns are those of the plain weight, in order. Every scale is that of its storage, and may be negative.
    """

    name: str
    codes: Tensor  # uint8 [out, in]
    bits: int  # [bits] of a code: 2 to 8
    group_size: int  # [columns] that share a scale: `in` where a row has one; the last group may be shorter
    scales: Tensor  # float16 or bfloat16 [out, groups]
    zeros: Tensor | None  # uint8 [out, groups]; None: all are 2 ** (bits - 1)
    activations: Activations | None  # how the inputs are quantized at run time, if they are

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    def scales_in(self, dtype: torch.dtype) -> Tensor:
        """Return the scales [out, groups] in another type; ExportError where that would round them."""
        scales = self.scales.to(dtype)
        if not torch.equal(scales.float(), self.scales.float()):
            raise ExportError(
                f"{self.name} has scales that {str(dtype).removeprefix('torch.')}, the only type there, does not hold; "
                "export to compressed-tensors, which has them as they are, or to dense"
            )
        return scales

    def full_zeros(self) -> Tensor:
        """Return the zero points, uint8 [out, groups], those that are implied too."""
        return (
            torch.full_like(self.scales, 1 << (self.bits - 1), dtype=torch.uint8) if self.zeros is None else self.zeros
        )


@dataclass(frozen=True)
class StoredWeight(ExportWeight):
    """A packed weight of a checkpoint; nothing is read before it is asked for."""

    module: str = ""  # path in the model of transformers, with experts one by one
    tensors: Mapping[str, Readable] | None = None  # what is stored, by the names of the format
    tied: str = ""  # the name of the head's module where this is the table of both
    is_draft: bool = False  # a linear of a draft head, which the class of the model does not hold

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return sum(tensor.nbytes for tensor in (self.tensors or {}).values())

    def read(self) -> PackedWeight:
        """Return the packed weight, checked; CheckpointError for tensors that are damaged."""
        tensors = {key: tensor.read() for key, tensor in (self.tensors or {}).items()}
        weight = PackedWeight(self.stored, tensors, self.shape)
        formats.check(weight, self.module)
        return weight

    def integers(self) -> IntWeight:
        """Return codes, scales and zeros; ExportError if the weight is no plain integers."""
        if (reason := self.not_integers()) is not None:
            raise ExportError(f"{self.name} is no plain integers: {reason}")
        weight = self.read()
        codes, scales, zeros = int_format.unpack(weight.tensors, weight.params, weight.shape)
        group = weight.params.group(weight.shape[1])
        # pages of the padding go with the tensors that have it
        codes, scales = codes.contiguous(), scales.contiguous()
        zeros = None if zeros is None else zeros.contiguous()
        return IntWeight(self.name, codes, weight.params.bits, group, scales, zeros, self.stored.activations)

    def dense(self, dtype: torch.dtype, role: str = "") -> Tensor:
        """Return the weight [out, in] in `dtype`, with all that lies around and beside it multiplied in.

        role: EMBEDDINGS for the rows that are looked up, which a tied table may have other than those of its head.
        """
        weight = self.read()
        if role == EMBEDDINGS and self.stored.ops:
            ops = transforms.of_rows(self.stored.ops)
            weight = PackedWeight(Stored(self.stored.format, self.stored.params, ops), weight.tensors, weight.shape)
        return formats.decode(weight, dtype)

    @property
    def is_one_table(self) -> bool:
        """Whether the rows that are looked up are those of the head."""
        return transforms.of_rows(self.stored.ops) == self.stored.ops
