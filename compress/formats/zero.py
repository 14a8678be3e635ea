"""Store nothing of a weight that is dropped: it decodes to zeros, and takes 0 bytes.

A linear stored so has no tensor, but a bias if it had one, and its product is never computed. What ends with such a
linear, attention or an MLP, is not run at all (compress/runtime/step/skipping.py). A low-rank part beside it is all
there is of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats import Shape, Spec


@dataclass(frozen=True)
class Params:
    """There is nothing to say of zeros."""


def specs(params: Params, shape: Shape) -> dict[str, Spec]:
    return {}


def pack(weight: Tensor, params: Params) -> dict[str, Tensor]:
    """weight [out_features, in_features] -> no tensor."""
    return {}


def decode(tensors: Mapping[str, Tensor], params: Params, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU: there is no tensor that could say where the weight is."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return nothing of nothing; compress/formats/__init__.py has the contract."""
    return params, {}
