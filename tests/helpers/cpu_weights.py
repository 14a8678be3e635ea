"""Weights of every layout that the CPU kernels read, for their tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress.formats import codebook, dense, e8p, grid, kquant, sparse, ternary, trellis
from compress.formats import int as int_format
from compress.kernels import dispatch
from compress.kernels.contract import Prepared
from compress.papers.formats import affine, lattice, nf
from compress.runtime import integer
from compress.types import Activations, PackedWeight
from helpers import stored

INT = [  # shape, bits, group, symmetric
    ((64, 512), 4, 128, True),
    ((48, 1000), 2, 64, False),
    ((40, 512), 3, 128, False),
    ((33, 300), 8, -1, True),
    ((16, 640), 5, 32, False),
    ((16, 1024), 6, 128, True),
    ((17, 512), 7, 64, False),
    ((16, 96), 4, 32, True),
    ((16, 2048), 3, -1, True),
    ((1, 50), 2, -1, False),
    ((40, 576), 3, 64, True),  # whole tiles, and tiles of 32 columns behind them
    ((33, 608), 3, 64, False),  # the last span ends within a group
    ((40, 576), 2, 32, False),
    ((20, 896), 5, -1, True),
    ((20, 1130), 6, 128, False),
    ((17, 330), 7, 32, True),
    ((40, 416), 3, -1, False),
    ((40, 480), 4, 96, True),
]
CODEBOOK: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((256, 512), {"bits": (8,), "vector_dim": 4, "group_columns": 256, "group_rows": 64, "permuted": True}),
    ((250, 500), {"bits": (8,), "vector_dim": 4, "tile_words": 32, "group_columns": 256, "group_rows": 128}),
    ((96, 1000), {"bits": (8,), "vector_dim": 4, "tile_words": 64, "axis": "out", "outliers": 7}),
    ((50, 512), {"bits": (8,), "vector_dim": 2, "axis": "out", "outliers": 3, "outlier_bits": 8}),
    ((40, 300), {"bits": (6,), "vector_dim": 2, "tile_words": 16, "group_columns": 128, "group_rows": 16}),
    ((64, 512), {"bits": (3,), "vector_dim": 1, "group_columns": 128, "group_rows": 32, "permuted": True}),
    ((64, 512), {"bits": (4,), "vector_dim": 1, "group_columns": 256}),
    ((64, 250), {"bits": (5,), "vector_dim": 4, "tile_words": 16}),
    ((64, 250), {"bits": (7,), "vector_dim": 2, "tile_words": 16, "permuted": True, "outliers": 2}),
]
TRELLIS: list[tuple[Any, ...]] = [  # shape, bits, state_bits, tile_rows, code, row_scales
    ((256, 512), 2, 16, 128, "mul1", False),
    ((100, 600), 3, 12, 64, "mul1", True),
    ((40, 33), 1, 9, 16, "1mad", False),
    ((96, 1000), 4, 16, 48, "mul1", False),
    ((16, 1030), 8, 16, 16, "mul1", True),
    ((64, 31), 5, 13, 32, "1mad", False),
    ((96, 540), 1.5, 12, 32, "mul1", False),
    ((150, 70), 1.75, 12, 64, "mul1", False),
    ((200, 520), 2.5, 14, 96, "mul1", True),
    ((50, 1060), 3.5, 16, 64, "mul1", False),
]
E8P = [
    ((64, 512), 2, False),
    ((37, 300), 2, True),
    ((40, 192), 3, True),
    ((33, 72), 4, False),
]  # shape, bits, row_scales
KQUANT: list[tuple[Any, ...]] = [  # shape, type, type of steps
    ((40, 512), "q4_k", "float16"),
    ((33, 300), "q2_k", "float16"),
    ((16, 1000), "q3_k", "bfloat16"),
    ((50, 40), "q5_k", "float16"),
    ((5, 256), "q6_k", "bfloat16"),
]
SPARSE: list[tuple[Any, ...]] = [  # shape, keep, of, kept weights, rows and columns of a block
    ((37, 300), 2, 4, "bfloat16"),
    ((5, 200), 2, 4, "float16"),
    ((40, 1152), 2, 4, (4, 32, True)),
    ((33, 300), 2, 4, (3, -1, False)),
    ((17, 1000), 2, 4, (8, 64, False)),
    ((33, 300), 64, 128, "float16"),
    ((24, 1024), 2, 4, (4, 128, True)),  # as bytes
    ((17, 2048), 2, 4, (2, 64, True)),
    ((40, 333), 3, 5, (4, -1, False)),
    ((40, 600), 16, 32, (2, 32, True), 3, 4),
    ((40, 600), 32, 64, "bfloat16", 16, 16),
]
NF: list[tuple[Any, ...]] = [  # shape, bits, block_size, bits of a size
    ((37, 300), 4, 64, 8),
    ((40, 576), 3, 16, 3),
    ((16, 1000), 2, 64, 2),
    ((33, 70), 6, 32, 8),
]
AFFINE: list[tuple[Any, ...]] = [  # shape, bits, group_size, type of scales, whether columns have scales
    ((37, 300), 4, 64, "float16", False),
    ((40, 576), 2, 32, "bfloat16", False),
    ((16, 1000), 3, -1, "float16", True),
    ((33, 72), 5, 16, "float16", True),
]
LATTICE: list[tuple[Any, ...]] = [  # shape, bits, dim, group_size
    ((37, 300), 2, 8, 128),
    ((40, 576), 3, 8, 64),
    ((16, 1000), 4, 16, 32),
    ((33, 128), 2, 32, 128),
]
ANY_CODEBOOK: list[tuple[tuple[int, int], dict[str, Any]]] = [  # what only rows that are decoded near read
    ((37, 144), {"bits": (12,), "vector_dim": 8, "axis": "out", "outliers": 3}),
    ((37, 144), {"bits": (9,), "vector_dim": 3, "axis": "out"}),
    ((40, 100), {"bits": (16,), "vector_dim": 16, "axis": "out"}),
    ((40, 144), {"bits": (5,), "vector_dim": 8, "permuted": True}),
    ((33, 96), {"bits": (5, 3), "vector_dim": 4, "axis": "out", "group_columns": 32, "norm": "columns", "bias": True}),
    ((33, 96), {"bits": (4,), "vector_dim": 2, "codebook_dtype": "float16", "norm": "rows", "outliers": 2}),
]
TERNARY: list[tuple[Any, ...]] = [  # shape, packing, group_size, type of the scales, one for the weight
    ((40, 640), "base3", 64, "float16", False),
    ((33, 300), "base3", 128, "float16", False),
    ((20, 1000), "base3", 48, "bfloat16", False),
    ((50, 333), "base3", -1, "float16", False),
    ((16, 90), "base3", -1, "float32", True),
    ((40, 576), "planar", 64, "float32", False),
    ((33, 1030), "planar", -1, "float16", False),
    ((17, 300), "binary", 16, "float16", False),
    ((48, 512), "binary", -1, "bfloat16", True),
]


def int_weight(shape: tuple[int, int], bits: int, group: int, symmetric: bool, dtype: str = "float16") -> PackedWeight:
    return stored.random_weight("int", int_format.params_for(bits, group, symmetric, shape[1], dtype), shape)


def codebook_weight(shape: tuple[int, int], settings: dict[str, Any]) -> PackedWeight:
    per_row = -(-shape[1] // (settings["vector_dim"] if settings.get("axis", "in") == "in" else 1))
    tile = codebook.tile_words(settings["bits"], per_row)
    return stored.random_weight("codebook", codebook.Params(**{"tile_words": tile, **settings}), shape)


def trellis_weight(shape: tuple[int, int], *params: Any) -> PackedWeight:
    return stored.random_weight("trellis", trellis.Params(*params), shape)


def e8p_weight(shape: tuple[int, int], bits: int, row_scales: bool) -> PackedWeight:
    return stored.random_weight("e8p", e8p.Params(bits, row_scales), shape)


def kquant_weight(shape: tuple[int, int], *params: Any) -> PackedWeight:
    return stored.random_weight("kquant", kquant.Params(*params), shape)


def nf_weight(shape: tuple[int, int], bits: int, block_size: int, scale_bits: int) -> PackedWeight:
    params = nf.Params(bits, block_size, nf.tile_words(bits, shape[1]), scale_bits)
    return stored.random_weight("nf", params, shape)


def affine_weight(shape: tuple[int, int], bits: int, *settings: Any) -> PackedWeight:
    group_size, dtype, column_scales = settings
    params = affine.Params(bits, group_size, affine.tile_words(bits, shape[1]), dtype, column_scales)
    return stored.random_weight("affine", params, shape)


GRID = [  # shape, fields of Params: blocks of all sizes and types of scales, rows of whole vectors and others
    ((64, 512), ("e2m1", 16, "e4m3", 1, True)),
    ((40, 300), ("e2m1", 16, "e4m3", 1, True)),
    ((37, 333), ("e2m1", 32, "e8m0")),
    ((40, 320), ("e4m3", 32, "e8m0")),
    ((40, 300), ("e4m3", -1, "float32", -1)),
    ((37, 301), ("e4m3", -1, "float32")),
    ((200, 300), ("e4m3", 128, "float32", 128)),
    ((40, 640), ("nf4", 64, "nested")),
    ((37, 333), ("fp4", 48, "bfloat16")),
    ((40, 300), ("dynamic8", 256, "float16", 1, True)),
    ((37, 320), ("e2m1", 32, "e8m0")),  # summed as integers, and others in registers
    ((37, 512), ("e4m3", 128, "float32", 128)),
    ((37, 320), ("e4m3", -1, "float32", -1, True)),
    ((37, 320), ("iq4_nl", 32, "float16")),
]


def grid_weight(shape: tuple[int, int], fields: tuple[Any, ...]) -> PackedWeight:
    return stored.random_weight("grid", grid.Params(*fields), shape)


def lattice_weight(shape: tuple[int, int], bits: int, dim: int, group_size: int) -> PackedWeight:
    """Lattices of either sign; where there are two groups or more, of three widths."""
    weight = stored.random_weight("lattice", lattice.Params(bits, dim, group_size, False, True), shape)
    weight.tensors["lattices"].mul_(100).sub_(0.6)
    if len(weight.tensors["group_bits"]) > 1:
        weight.tensors["group_bits"][:2] += torch.tensor([1, -1]).byte()
    return weight


def ternary_weight(shape: tuple[int, int], *params: Any) -> PackedWeight:
    return stored.random_weight("ternary", ternary.Params(*params), shape)


def sparse_weight(shape: tuple[int, int], keep: int, of: int, kept: Any, *block: int) -> PackedWeight:
    """kept: type of kept weights, or bits, group_size and symmetric of their codes; block: rows and columns."""
    columns = -(-shape[1] // of) * keep
    inner = dense.Params(kept) if isinstance(kept, str) else int_format.params_for(*kept, columns)
    return stored.random_weight("sparse", sparse.params_for(keep, of, inner, *block), shape)


WEIGHTS = [
    *(pytest.param(int_weight, case, id=f"int{case[1]}-{case[0]}-{case[2]}") for case in INT),
    pytest.param(int_weight, (*INT[0], "bfloat16"), id="int4-bfloat16"),
    *(pytest.param(codebook_weight, case, id=f"codebook-{i}") for i, case in enumerate(CODEBOOK)),
    *(
        pytest.param(
            trellis_weight,
            case,
            id=f"trellis{case[1]}-{case[0]}",
        )
        for case in TRELLIS
    ),
    *(pytest.param(e8p_weight, case, id=f"e8p{case[1]}-{case[0]}") for case in E8P),
    *(pytest.param(kquant_weight, case, id=f"{case[1]}-{case[0]}") for case in KQUANT),
    *(pytest.param(codebook_weight, case, id=f"any-codebook-{i}") for i, case in enumerate(ANY_CODEBOOK)),
    *(pytest.param(sparse_weight, case, id=f"sparse{case[2]}-{i}") for i, case in enumerate(SPARSE)),
    *(pytest.param(nf_weight, case, id=f"nf{case[1]}-{case[0]}") for case in NF),
    *(pytest.param(affine_weight, case, id=f"affine{case[1]}-{case[0]}") for case in AFFINE),
    *(pytest.param(lattice_weight, case, id=f"lattice{case[1]}-{case[0]}") for case in LATTICE),
    *(pytest.param(grid_weight, case, id=f"grid-{i}") for i, case in enumerate(GRID)),
    *(pytest.param(ternary_weight, case, id=f"{case[1]}-{case[0]}-{case[2]}") for case in TERNARY),
]


def kernel_of(weight: PackedWeight) -> Prepared:
    """The kernel of a weight, as long as its tensors stay where they are."""
    x = torch.empty(1, weight.shape[1])
    kernel = dispatch.prepare(x, weight.tensors, weight.format, weight.params, weight.shape)
    assert kernel is not None
    return kernel


def is_real(
    format: str, params: Any, shape: tuple[int, int], activations: Activations, device: torch.device | str
) -> bool:
    """Whether products without gradients are computed from the codes, rather than from dequantized numbers."""
    return not integer.obstacle(integer.IntegerProduct(format, params, shape, activations), torch.device(device))
