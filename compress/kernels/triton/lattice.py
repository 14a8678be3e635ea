"""Multiply with the `lattice` format on a GPU by the lattice's coordinates, for a few rows of activations.

    x . (G z) = (G^T x) . z

So a first, small kernel multiplies the activations of each group with its matrix, and what is left is a product with
plain small integers and one factor a row. The results of the first kernel are float16 times a power of two for each
row and group, which no size of activations leaves. A weight costs about 5 instructions in groups of 1 and 2 bits and 9
in those of 3, whose sixteenth field is spread over three words.

With a curve on the values this is not so: their matrix products must be made for every weight, more than a few rows of
activations are worth. Such weights are decoded (and rare: the curve is off by default, compress/papers/quant/glvq.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import Shape
from compress.kernels.triton import split_k
from compress.kernels.triton.product import Product, tile_rows
from compress.kernels.triton.split_k import Grid
from compress.papers.formats import lattice as lattice_format
from compress.papers.formats.lattice import Params

BLOCK_ROWS = 64
LONGEST = 128  # columns of a step, of which a group has a whole number
MOST_STEPS = 8
WARPS = 4
OCCUPANCY = 4  # programs that a multiprocessor holds
DECODED = 16  # rows of a program of the decoder


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Product | None:
    """Return the product with groups of few steps: their code is unrolled."""
    return _Lattice(tensors, params, shape) if params.group_size <= MOST_STEPS * _step(params) else None


def configuration(params: Params, rows: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The product's constants but for SPLIT and USE_ASM."""
    return _layout(params, shape) | {"BLOCK_N": BLOCK_ROWS, "BLOCK_M": tile_rows(rows)}


def decode_constants(params: Params, shape: tuple[int, int]) -> dict[str, Any]:
    """The decoder's constants."""
    known = {"DIM": params.dim, "SIDE": max(16, params.dim), "COMPAND": params.compand, "BLOCK_N": DECODED}
    return _layout(params, shape) | known


def transform_constants(params: Params) -> dict[str, Any]:
    """The constants of the transform of the activations."""
    blocks = params.group_size // params.dim
    return {"GROUP": params.group_size, "BLOCKS": 1 << (blocks - 1).bit_length(), "DIM": params.dim}


class _Lattice(Product):
    def most_rows(self, dtype: torch.dtype) -> int:
        """Return 0 for curved weights, which are decoded."""
        return 0 if self.params.compand else self.most

    def multiply(self, x: Tensor, out: Tensor) -> None:
        from compress.kernels.triton import _lattice

        params, tensors, rows = self.params, self.tensors, x.shape[0]
        groups, words = lattice_format.groups(params, self.shape), tensors["words"]
        constants, columns = configuration(params, rows, self.shape), groups * params.group_size
        turned = torch.empty(rows, columns, dtype=torch.float16, device=x.device)
        factors = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
        _lattice.transform[groups, rows](
            x, tensors["lattices"], turned, factors, rows, self.shape[1], columns, **transform_constants(params)
        )
        row_scales = self.stored("row_scales", factors)
        grid = Grid(-(-words.shape[0] // BLOCK_ROWS), groups, BLOCK_ROWS * constants["BLOCK_M"], OCCUPANCY)
        split_k.launch(
            _lattice.multiply, (turned, factors, words, tensors["group_bits"], tensors["scale"], row_scales), out,
            (rows, columns, self.shape[0], words.shape[0]), grid,
            USE_ASM=_lattice.COMPILED, num_warps=WARPS, **constants,
        )  # fmt: skip

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] as in formats/lattice.py, in one pass; sums in another order, rounded once."""
        from compress.kernels.triton import _lattice

        params, tensors, (outputs, inputs) = self.params, self.tensors, self.shape
        curves = tensors["lattices"]
        if params.compand:
            mu, limit = tensors["curves"].float().unbind(1)
            curves = torch.stack([torch.log1p(mu), limit / mu], 1)
        out = torch.empty(self.shape, dtype=dtype, device=curves.device)
        groups = lattice_format.groups(params, self.shape)
        _lattice.decode[groups, -(-outputs // DECODED)](
            tensors["words"], tensors["group_bits"], tensors["lattices"], curves, tensors["scale"],
            self.stored("row_scales", out), out, inputs, outputs, groups, num_warps=WARPS,
            **decode_constants(params, self.shape),
        )  # fmt: skip
        return out


def _layout(params: Params, shape: tuple[int, int]) -> dict[str, Any]:
    size = params.group_size
    return {
        "BITS": params.bits, "GROUP": size, "GROUPS": 1 << (lattice_format.groups(params, shape) - 1).bit_length(),
        "ROW_SCALES": params.row_scales, "BLOCK_K": _step(params),
    }  # fmt: skip


def _step(params: Params) -> int:
    """Columns that a step takes of a group, a power of two."""
    return min(LONGEST, params.group_size & -params.group_size)
