"""What docs/formats.md says that formats can hold is what their parameters take, and nothing more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from compress import formats, plugins

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
INT = {"bits": 4, "group_size": 128, "symmetric": True, "tile_words": 32}
AFFINE = {"bits": 4, "group_size": 64, "tile_words": 32}
SPARSE = {"bits": 3, "group_size": 16, "tile_words": 32}
NF = {"bits": 4, "block_size": 64, "tile_words": 32}
CODEBOOK = {"bits": (8,), "vector_dim": 4, "tile_words": 32}
LATTICE = {"bits": 2, "dim": 8, "group_size": 128, "compand": False, "row_scales": False}
GRID = {"values": "e2m1", "block_columns": 16, "scale_type": "e4m3"}
PVQ = {"vector_dim": 16, "pulses": 8, "gain_bits": 4}
TRELLIS = {"bits": 2, "state_bits": 12, "tile_rows": 256}
TERNARY = {"packing": "base3", "group_size": 64}
KEPT = {"keep": 4, "of": 8, "inner": "int"}
SIDES = {"rows": 4, "columns": 4}
PLANES = {**INT, "bits": 8, "planes_of": (2, 2, 4), "kept": 8}
PARTS = ({"format": "int", "params": INT},) * 2

# format, other parameters, key, what it takes, what it refuses
LIMITS: list[tuple[str, dict[str, Any], str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("int", INT, "bits", tuple(range(2, 9)), (1, 9)),
    ("int", INT, "group_size", (-1, 1, 32, 100), (0, -2)),
    ("int", INT, "scale_dtype", ("float16", "bfloat16"), ("float32",)),
    ("kquant", {}, "step_dtype", ("float16", "bfloat16"), ("float32",)),
    ("nf", NF, "bits", tuple(range(2, 9)), (1, 9)),
    ("nf", NF, "scale_bits", tuple(range(2, 9)), (1, 9)),
    ("nf", NF, "block_size", (1, 64, 100), (0,)),
    ("nf", NF, "scale_dtype", ("float32", "float16", "bfloat16"), ("float64",)),
    ("affine", AFFINE, "bits", tuple(range(2, 9)), (1, 9)),
    ("affine", AFFINE, "group_size", (-1, 1, 64, 100), (0, -2)),
    ("affine", AFFINE, "scale_dtype", ("float16", "bfloat16"), ("float32",)),
    ("affine", AFFINE, "column_scales", (False, True), ()),
    ("sparse_outliers", SPARSE, "bits", tuple(range(2, 9)), (1, 9)),
    ("sparse_outliers", SPARSE, "code_bits", tuple(range(1, 9)), (0, 9)),
    ("sparse_outliers", SPARSE, "group_size", (1, 16, 100), (0, -1)),
    ("sparse_outliers", SPARSE, "block_rows", (8, 16, 64), (0, 12)),
    ("sparse_outliers", SPARSE, "outliers", (0, 5), (-1,)),
    ("codebook", CODEBOOK, "bits", ((1,), (16,), (8, 8, 8)), ((), (0,), (17,))),
    ("codebook", CODEBOOK, "vector_dim", (1, 4, 8), (0,)),
    ("codebook", CODEBOOK, "outlier_bits", (4, 8), (2, 16)),
    ("codebook", CODEBOOK, "codebook_dtype", ("int8", "float16"), ("bfloat16",)),
    ("e8p", {"row_scales": False}, "bits", (2, 3, 4), (1, 5)),
    ("lattice", LATTICE, "bits", (2, 3, 4), (1, 5)),
    ("lattice", LATTICE, "dim", (8, 16, 32), (4, 64)),
    ("lattice", LATTICE, "group_size", (16, 128), (8, 24)),
    ("pvq", PVQ, "vector_dim", (8, 16, 32, 64, 128), (4, 256)),
    ("pvq", PVQ, "pulses", (1, 1023), (0, 1024)),
    ("pvq", PVQ, "gain_bits", (1, 8), (0, 9)),
    ("trellis", TRELLIS, "bits", (*range(1, 7), 1.25, 1.5, 1.75, 2.5, 3.75), (0, 9, 0.75, 2.3, 4.25)),
    ("trellis", {**TRELLIS, "bits": 2.5}, "tile_rows", (32, 256), (16, 48, 288)),
    ("trellis", {**TRELLIS, "bits": 2.5}, "code", ("mul1",), ("1mad", "3inst", "mcg", "hyb")),
    ("trellis", TRELLIS, "state_bits", (4, 16), (3, 17)),
    ("trellis", TRELLIS, "tile_rows", (16, 256), (8, 272)),
    ("grid", GRID, "values", ("e2m1", "e4m3", "nf4", "fp4", "dynamic8", "iq4_nl"), ("int4",)),
    ("grid", GRID, "scale_type", ("e8m0", "e4m3", "nested", "float16", "bfloat16", "float32"), ("int8",)),
    ("grid", GRID, "block_columns", (1, 16, -1), (0,)),
    ("grid", GRID, "block_rows", (1, 128, -1), (0,)),
    ("exponents", {}, "coding", ("huffman", "ranked"), ("rans",)),
    ("exponents", {}, "base", (0, 240), (-1, 241)),
    ("exponents", {}, "stream", (0, 9), (-1,)),
    ("exponents", {}, "escapes", (0, 9), (-1,)),
    ("ternary", TERNARY, "packing", ("base3", "planar", "binary"), ("base4",)),
    ("ternary", TERNARY, "group_size", (-1, 1, 64, 100), (0, -2)),
    ("ternary", TERNARY, "scale_dtype", ("float16", "bfloat16", "float32"), ("float64",)),
    ("ternary", TERNARY, "tensor_scale", (False,), (True,)),
    ("sparse", KEPT, "keep", (1, 4, 7), (0, 8)),
    ("sparse", KEPT, "of", (5, 128), (1,)),
    ("sparse", KEPT, "inner", ("int", "dense"), ("grid",)),
    ("sparse", KEPT, "bits", tuple(range(2, 9)), (1, 9)),
    ("sparse", KEPT, "block_rows", (1, 16), (0,)),
    ("sparse", KEPT, "block_columns", (1, 2, 4), (0, 3, 8)),
    ("structured", SIDES, "dtype", ("bfloat16", "float16", "float32"), ("int8",)),
    ("salient", {}, "salient", (0, 100), (-1,)),
    ("zero", {}, "", (), ()),  # nothing to set
    ("sliced", PLANES, "kept", (2, 4, 8), (0, 6)),
    ("sliced", PLANES, "planes_of", ((2, 2, 4), (2, 1, 1, 4)), ((8, 8), (2, 6))),
    ("nested", {"parts": PARTS}, "levels", ((4, 8), (1, 2)), ((8, 4), (4,), (4, 4, 8), (0, 4))),
    ("columns", {}, "bits", (2, 4, 8, 16), (3, 5, 32)),
    ("columns", {"bits": 4}, "group_size", (-1, 1, 100), (0, -2)),
    ("columns", {}, "dtype", ("bfloat16", "float16", "float32"), ("int8",)),
    ("columns", {"bits": 8}, "dtype", ("bfloat16", "float16"), ("float32",)),
    ("dense", {}, "dtype", ("bfloat16", "float16", "float32"), ("int8",)),
    ("lowrank", {"rank": 4}, "bits", (16, 8, 4), (2, 32)),
    ("lowrank", {"rank": 4}, "dtype", ("float16", "bfloat16"), ("float32",)),
]


@pytest.mark.parametrize(("name", "others", "key", "taken", "refused"), LIMITS)
def test_limits(name: str, others: dict[str, Any], key: str, taken: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    base = {"type": "q4_k", **others} if name == "kquant" else others
    params = formats.get(name).Params
    for value in taken:
        assert getattr(params(**{**base, key: value}), key) == value
    for value in refused:
        with pytest.raises(ValueError, match=str(key) if key != "type" else ""):
            params(**{**base, key: value})


def rows() -> dict[str, str]:
    """Format -> its row of the first table."""
    table = PAGE.read_text(encoding="utf-8").partition("| parameter |")[0]
    return dict(re.findall(r"^\| `(\w+)` (\|.*)$", table, re.MULTILINE))


def test_every_format_has_a_row() -> None:
    assert rows().keys() == set(plugins.names("formats"))
    assert rows().keys() == {name for name, *_ in LIMITS}


def test_types_of_kquants() -> None:
    layouts = plugins.load("formats", "kquant").LAYOUTS
    assert all(f"`{name}`" in rows()["kquant"] for name in layouts)
    assert {layout.group_size for layout in layouts.values()} == {16, 32}
    assert {layout.bits for layout in layouts.values()} == set(range(2, 7))


def test_formats_that_give_single_rows() -> None:
    assert [name for name in plugins.names("formats") if hasattr(formats.get(name), "decode_rows")] == [
        "dense",
        "exponents",
        "grid",
        "int",
        "kquant",
        "nested",
        "sliced",
        "ternary",
    ]
