"""Turn the channels of each head to their principal components, where that takes fewer bits than the basis itself.

Keys and values of a text lie near a part of the channels' space. After a rotation to principal components the channels
differ more in size, and entropy coding gives small ones few bits (KVTC, arXiv 2511.01815, does so over all heads with a
basis that was calibrated for a model; here each file has its own, so that nothing is calibrated). A basis is int8
[h, width, width], 127 for 1: the matrix that it stands for is nearly orthogonal, and coding uses its inverse, so that
its rounding changes no value. It costs 8 h width^2 bits, 0.125 bits a number for heads of 64 and 4,096 tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

UNIT = 127.0
DENSITY = 2 * math.pi * math.e  # a normal variable of variance v takes log2(DENSITY v / step^2) / 2 bits
MOST_SHARE = 0.95  # of the value before, as in columns.py


def bits(x: Tensor, step: float) -> float:
    """Return about how many bits x [B, h, tokens, width] takes, rounded to multiples of step and coded by columns."""
    rows = x.movedim(2, 0).flatten(1).double()
    rows = rows - rows.mean(0)
    energy = rows.square().sum(0)
    share = ((rows[1:] * rows[:-1]).sum(0) / energy.clamp(min=1e-30)).clamp(0, MOST_SHARE)
    variance = energy * (1 - share.square()) / max(1, len(rows))
    return float((1 + DENSITY * variance / step**2).log2().sum()) / 2 * len(rows)


def fitted(x: Tensor, step: float) -> Tensor | None:
    """Return the basis int8 [h, width, width] of x [B, h, tokens, width] float32; None where it costs more bits."""
    heads, width = x.shape[1], x.shape[3]
    flat = x.transpose(0, 1).reshape(heads, -1, width).double()
    flat = flat - flat.mean(1, keepdim=True)
    vectors = torch.linalg.eigh(flat.transpose(1, 2) @ flat)[1]
    basis = (vectors * UNIT).round().to(torch.int8)
    if bool((torch.linalg.cond(basis.double()) > 2).any()):  # so coarse that errors would grow
        return None
    return basis if bits(into(x, basis), step) + 8 * basis.numel() < bits(x, step) else None


def into(x: Tensor, basis: Tensor) -> Tensor:
    """Return x [B, h, tokens, width] float32 in the components of a basis."""
    inverse = torch.linalg.inv(basis.double() / UNIT).float()
    return x @ inverse.transpose(1, 2)


def out_of(y: Tensor, basis: Tensor) -> Tensor:
    """Undo `into`."""
    return y @ (basis.float() / UNIT).transpose(1, 2)
