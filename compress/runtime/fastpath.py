"""Matrix products that read packed weights through PyTorch's own CPU operators, where those are faster than decoding.

Two operators, both for bfloat16 activations; their limits (torch 2.13) are this file's conditions:
- `_weight_int4pack_mm_for_cpu`: w = (q - 8) * scale + zero, q in 0..15, groups of 32, 64, 128 or 256 columns that
  divide the row, rows a multiple of 16, scale and zero in bfloat16. Other types run a reference loop, 80 times slower.
- `_weight_int8pack_mm`: int8 codes, one scale for a row. In bfloat16 it reads out of bounds unless columns are a
  multiple of 32.
Neither has a derivative. Without AVX2 they are reference loops too, so that other processors take no fast path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.formats import int as int_format

# Rows of activations up to which the operators beat decoding the weight and calling F.linear. Measured at 2048 x 2048
# and 4096 x 4096 on one AVX-512 thread: 15-40 times faster at 1 row, 4-11 at 8, 1.4-1.9 at 32, slower from about 64.
# (Against a weight that is kept decoded, at four times the memory, they win up to 4 rows.)
MAX_ROWS = 32

INT4_GROUPS = (32, 64, 128, 256)
PREPARE_ROWS = 1024  # weight rows repacked at a time, to bound the int32 temporary; whole blocks of 64

Operand = tuple[Tensor, ...]


@dataclass(frozen=True)
class Kernel:
    """`prepare` turns stored tensors into the operand; `matmul(x [rows, in], operand, params)` gives [rows, out]."""

    name: str
    prepare: Callable[[Mapping[str, Tensor], Any, tuple[int, int]], Operand]
    matmul: Callable[[Tensor, Operand, Any], Tensor]


def find(format: str, params: Any, shape: tuple[int, int], x: Tensor) -> Kernel | None:
    """The kernel for this weight and the type and device of x; the caller still asks `suits` about the rows."""
    if format != "int" or x.dtype != torch.bfloat16 or x.device.type != "cpu" or not _VECTORIZED:
        return None
    if params.bits == 4 and _HAS_INT4:
        fits = params.group_size in INT4_GROUPS and shape[1] % params.group_size == 0 and shape[0] % 16 == 0
        return INT4 if fits else None
    if params.bits == 8 and _HAS_INT8:
        fits = params.group_size == -1 and params.symmetric and shape[1] % 32 == 0
        return INT8 if fits else None
    return None


def suits(x: Tensor, in_features: int) -> bool:
    """Whether these activations may take the kernel: few rows, and no gradient to pass back."""
    if x.shape[-1] != in_features or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return x.numel() // in_features <= MAX_ROWS


def _prepare_int4(tensors: Mapping[str, Tensor], params: Any, shape: tuple[int, int]) -> Operand:
    """-> packed uint8 [out, in / 2], scales and zeros bfloat16 [groups, out, 2]."""
    codes, scales, zeros = int_format.unpack(tensors, params, shape)
    packed = torch.cat(
        [torch._convert_weight_to_int4pack_for_cpu(rows.to(torch.int32), 1) for rows in codes.split(PREPARE_ROWS)]
    )
    scale = scales.T.to(torch.bfloat16)  # [groups, out]
    if zeros is None:
        zero = torch.zeros_like(scale)
    else:  # (q - z) * s = (q - 8) * s + (8 - z) * s, with the scale that the operator uses
        zero = ((8 - zeros.T.float()) * scale.float()).to(torch.bfloat16)
    return packed, torch.stack((scale, zero), dim=-1).contiguous()


def _matmul_int4(x: Tensor, operand: Operand, params: Any) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), operand[0], params.group_size, operand[1])


def _prepare_int8(tensors: Mapping[str, Tensor], params: Any, shape: tuple[int, int]) -> Operand:
    """-> codes int8 [out, in], scales bfloat16 [out]."""
    codes, scales, _ = int_format.unpack(tensors, params, shape)
    signed = (codes ^ 128).view(torch.int8)  # code - 128 in two's complement
    return signed.contiguous(), scales[:, 0].to(torch.bfloat16)


def _matmul_int8(x: Tensor, operand: Operand, params: Any) -> Tensor:
    return torch._weight_int8pack_mm(x.contiguous(), *operand)


INT4 = Kernel("int4", _prepare_int4, _matmul_int4)
INT8 = Kernel("int8", _prepare_int8, _matmul_int8)

_VECTORIZED = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
_HAS_INT4 = hasattr(torch, "_convert_weight_to_int4pack_for_cpu") and hasattr(torch, "_weight_int4pack_mm_for_cpu")
_HAS_INT8 = hasattr(torch, "_weight_int8pack_mm")
