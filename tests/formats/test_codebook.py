"""The `codebook` format against a reader that takes one weight at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.errors import CheckpointError
from compress.formats import codebook
from compress.formats.codebook import Params, Parts
from compress.formats.stored import params_from_dict
from compress.numerics.packing import plane_widths
from compress.types import Stored

Settings = dict[str, object]
CASES: list[tuple[tuple[int, int], Settings]] = [
    ((17, 50), {"bits": (8,), "vector_dim": 4}),
    ((33, 24), {"bits": (8,), "vector_dim": 4, "axis": "out"}),
    ((20, 96), {"bits": (5, 3), "vector_dim": 2, "group_columns": 32, "group_rows": 7}),
    ((50, 33), {"bits": (9, 6, 1), "vector_dim": 6, "axis": "out", "group_columns": 10, "group_rows": 12}),
    ((16, 64), {"bits": (2,), "vector_dim": 1, "codebook_dtype": "float16", "group_rows": 1}),
    ((19, 40), {"bits": (4,), "vector_dim": 4, "scale_columns": 16, "permuted": True}),
    ((30, 41), {"bits": (7,), "vector_dim": 4, "norm": "columns", "bias": True, "permuted": True, "outliers": 3}),
    ((30, 41), {"bits": (12,), "vector_dim": 4, "axis": "out", "norm": "columns", "outliers": 2, "outlier_bits": 8}),
    ((9, 20), {"bits": (10, 10), "vector_dim": 8, "norm": "rows", "bias": True}),
    ((3, 5), {"bits": (16,), "vector_dim": 1, "codebook_dtype": "float16"}),
    ((1, 1), {"bits": (1,), "vector_dim": 4, "scale_columns": 4, "norm": "rows"}),
    ((19, 40), {"bits": (3,), "vector_dim": 1, "group_columns": 16, "group_rows": 2, "svd_rank": 3}),
    ((5, 33), {"bits": (2,), "vector_dim": 1, "scale_columns": 8, "permuted": True, "group_rows": 1, "svd_rank": 1}),
]
IDS = [f"{shape[0]}x{shape[1]}-{'-'.join(map(str, settings.values()))}" for shape, settings in CASES]


def example(shape: tuple[int, int], settings: Settings) -> tuple[Params, Parts]:
    """Random contents for every part of the format."""
    g = torch.Generator().manual_seed(1)
    bits = settings["bits"]
    assert isinstance(bits, tuple)
    width = settings["vector_dim"] if settings.get("axis") != "out" else 1
    assert isinstance(width, int)
    tile = codebook.tile_words(bits, -(-shape[1] // width))
    params = Params(tile_words=tile, **settings)  # type: ignore[arg-type]
    size, groups = codebook.code_shape(params, shape), codebook.groups(params, shape)

    def halves(*wanted: int) -> Tensor:
        return torch.randn(wanted, generator=g).half()

    def integers(top: int, *wanted: int) -> Tensor:
        return torch.randint(0, top, wanted, generator=g)

    rank = params.svd_rank
    small = params.codebook_dtype == "int8" and not rank
    books = [(*groups, 2**b, params.vector_dim) for b in bits]
    blocks = -(-shape[1] // params.scale_columns) if params.scale_columns else 0
    normed = {"none": 0, "columns": shape[1], "rows": shape[0]}[params.norm]
    count = params.outliers
    return params, Parts(
        codes=[integers(2**b, *size) for b in bits],
        codebooks=[(integers(255, *s) - 127).to(torch.int8) if small else halves(*s) for s in books if not rank],
        codebook_scales=[halves(*groups) for _ in bits] if small else [],
        scales=integers(16, shape[0], blocks).to(torch.uint8) if blocks else None,
        scale_grid=halves(blocks, 2) / 8 if blocks else None,
        norm_scale=halves(normed) if normed else None,
        norm_bias=halves(normed) if params.bias else None,
        outliers=integers(2**params.outlier_bits, shape[0], count).to(torch.uint8) if count else None,
        outlier_scale=halves(count) if count else None,
        outlier_index=torch.randperm(shape[1], generator=g)[:count] if count else None,
        order=torch.randperm(shape[1], generator=g) if params.permuted else None,
        codebook_left=(integers(255, *groups, rank) - 127).to(torch.int8) if rank else None,
        codebook_left_scale=halves(rank) if rank else None,
        codebook_right=halves(rank, 2 ** bits[0]) if rank else None,
    )


def read_code(tensors: dict[str, Tensor], params: Params, stage: int, row: int, column: int) -> int:
    """One code from the stored words, bit by bit."""
    code = 0
    for width in plane_widths(params.bits[stage]):  # high bits first
        words = tensors[(f"stage{stage}_" if stage else "") + f"words{width}"][row]
        fields = 16 if width == 3 else 16 // width
        tile, within = divmod(column, params.tile_words * fields)
        field, j = divmod(within, params.tile_words)
        if width == 16:
            field, tile, j = 0, column, 0
        word = tile * params.tile_words + j if width < 16 else column
        for bit in reversed(range(width)):
            if width == 3:
                plane, place = (field // 5, 3 * (field % 5) + bit) if field < 15 else (bit, 15)
                code = code << 1 | (int(words[plane, word]) >> place & 1)
            else:
                code = code << 1 | (int(words[word]) >> (field * width + bit) & 1)
    return code


def read_entry(tensors: dict[str, Tensor], p: Params, stage: int, group: tuple[int, int], code: int) -> Tensor:
    """One entry of a codebook, [d]."""
    prefix = f"stage{stage}_" if stage else ""
    if p.svd_rank:
        entry = torch.zeros(1)
        for i in range(p.svd_rank):
            left = tensors["codebook_left"][group][i].float() * tensors["codebook_left_scale"][i].float()
            entry = entry + left * tensors["codebook_right"][i, code].float()
        return entry
    entry = tensors[f"{prefix}codebook"][group][code].float()
    return entry if p.codebook_dtype != "int8" else entry * tensors[f"{prefix}codebook_scales"][group].float()


def slow(tensors: dict[str, Tensor], p: Params, shape: tuple[int, int]) -> Tensor:
    """The formula of the docstring, weight by weight, each operation rounded to float32."""
    out = torch.empty(shape)
    order = tensors["order"].tolist() if p.permuted else list(range(shape[1]))
    for row, column in itertools.product(range(shape[0]), range(shape[1])):
        inner, r, c = (column % p.vector_dim, row, column // p.vector_dim)
        if p.axis == "out":
            inner, r, c = row % p.vector_dim, row // p.vector_dim, column
        group = (
            0 if p.group_columns == -1 else column // p.group_columns,
            0 if p.group_rows == -1 else row // p.group_rows,
        )
        value = torch.zeros(())
        for stage in range(len(p.bits)):
            value = value + read_entry(tensors, p, stage, group, read_code(tensors, p, stage, r, c))[inner]
        if p.scale_columns:
            block = column // p.scale_columns
            offset, step = tensors["scale_grid"][block].double()
            nibble = int(tensors["scales"][block, row // 2]) >> (4 * (row % 2)) & 15
            value = value * torch.exp2(offset + nibble * step).float()
        if p.norm != "none":
            at = column if p.norm == "columns" else row
            value = value * tensors["norm_scale"][at].float()
            value = value + tensors["norm_bias"][at].float() if p.bias else value
        for k in range(p.outliers):
            if int(tensors["outlier_index"][k]) == order[column]:
                per_byte = 8 // p.outlier_bits
                octet = int(tensors["outliers"][k, row // per_byte])
                integer = octet >> (p.outlier_bits * (row % per_byte)) & (2**p.outlier_bits - 1)
                value = value + (integer - 2 ** (p.outlier_bits - 1)) * tensors["outlier_scale"][k].float()
        out[row, order[column]] = value
    return out


@pytest.mark.parametrize(("shape", "settings"), CASES, ids=IDS)
def test_decode_equals_the_slow_reader(shape: tuple[int, int], settings: Settings) -> None:
    params, parts = example(shape, settings)
    tensors = codebook.pack(parts, params, shape)
    assert torch.equal(codebook.decode(tensors, params, shape, torch.float32), slow(tensors, params, shape))


@pytest.mark.parametrize(("shape", "settings"), CASES, ids=IDS)
def test_specs_and_codes_round_trip(shape: tuple[int, int], settings: Settings) -> None:
    params, parts = example(shape, settings)
    tensors = codebook.pack(parts, params, shape)
    assert codebook.specs(params, shape) == {k: (tuple(t.shape), t.dtype) for k, t in tensors.items()}
    assert formats.nbytes(Stored("codebook", params), shape) == sum(
        t.numel() * t.element_size() for t in tensors.values()
    )
    assert all(t.is_contiguous() for t in tensors.values())
    for found, codes in zip(codebook.unpack_codes(tensors, params, shape), parts.codes, strict=True):
        assert torch.equal(found.long(), codes)
    rows, _ = codebook.padded_shape(params, shape)
    assert rows * params.height % codebook.ROW_MULTIPLE == 0


@pytest.mark.parametrize(("shape", "settings"), CASES, ids=IDS)
def test_decoding_in_chunks_changes_nothing(
    shape: tuple[int, int], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, parts = example(shape, settings)
    tensors = codebook.pack(parts, params, shape)
    whole = codebook.decode(tensors, params, shape, torch.float32)
    monkeypatch.setattr(codebook, "DECODE_CHUNK", 1)
    assert torch.equal(codebook.decode(tensors, params, shape, torch.float32), whole)
    assert torch.equal(codebook.decode(tensors, params, shape, torch.bfloat16), whole.bfloat16())


def test_bytes_of_a_large_layer() -> None:
    """4096 x 4096 at 8 bits for 4 weights, one codebook for 65536 weights: 2 + 0.125 bits, then scales and order."""
    tile = codebook.tile_words((8,), 1024)
    params = Params((8,), 4, tile, group_columns=256, group_rows=256, permuted=True)
    side = 8 * (256 * 2 + 4096 * 2)
    assert tile == 128
    assert (
        8 * formats.nbytes(Stored("codebook", params), (4096, 4096)) == 4096 * 4096 * (2 + 256 * 4 * 8 / 65536) + side
    )


@pytest.mark.parametrize(("rank", "expected"), [(0, 4 + 2), (1, 1), (2, 2), (4, 4)])
def test_bytes_of_factored_codebooks(rank: int, expected: int) -> None:
    """4096 x 4096 at 2 bits, a codebook for 256 weights: bytes of a codebook, and of what all of them share."""
    params = Params((2,), 1, 128, group_columns=256, group_rows=1, svd_rank=rank)
    shared = rank * (2 + 4 * 2)
    assert formats.nbytes(Stored("codebook", params), (4096, 4096)) == 4096 * 4096 // 4 + 65536 * expected + shared


@pytest.mark.parametrize("bits", [(1,), (3,), (8,), (9,), (12,), (16,), (8, 3)])
@pytest.mark.parametrize("columns", [1, 13, 64, 2752])
def test_tiles_pad_least(bits: tuple[int, ...], columns: int) -> None:
    def padded(words: int) -> int:
        params = Params(bits, 1, words)
        return codebook.padded_shape(params, (16, columns))[1]

    tile = codebook.tile_words(bits, columns)
    assert padded(tile) == min(map(padded, codebook.TILE_WORDS)) < columns + 16
    assert all(padded(words) > padded(tile) for words in codebook.TILE_WORDS if words > tile)


@pytest.mark.parametrize(
    "change",
    [
        {"bits": []},
        {"bits": [8, 0]},
        {"bits": [17]},
        {"vector_dim": 0},
        {"tile_words": 48},
        {"axis": "both"},
        {"codebook_dtype": "int4"},
        {"norm": "both"},
        {"outlier_bits": 5},
        {"outliers": -1},
        {"scale_columns": -4},
        {"group_columns": 6},
        {"group_columns": 0},
        {"group_rows": -2},
        {"bias": True},
        {"svd_rank": -1},
        {"svd_rank": 1},
        {"svd_rank": 257, "vector_dim": 1},
        {"svd_rank": 1, "vector_dim": 1, "bits": [2, 2]},
        {"svd_rank": 1, "vector_dim": 1, "codebook_dtype": "float16"},
    ],
    ids=str,
)
def test_impossible_params_are_refused(change: Settings) -> None:
    good = {"bits": [8], "vector_dim": 4, "tile_words": 128}
    assert params_from_dict("codebook", good) == Params((8,), 4, 128)
    with pytest.raises(CheckpointError, match=next(iter(change))):
        params_from_dict("codebook", {**good, **change})


def test_values_that_are_not_in_their_storage_type_are_an_error() -> None:
    params, parts = example((16, 16), {"bits": (4,), "vector_dim": 4, "norm": "rows"})
    assert parts.norm_scale is not None
    with pytest.raises(AssertionError, match="norm_scale"):
        codebook.pack(dataclasses.replace(parts, norm_scale=parts.norm_scale.float()), params, (16, 16))


@pytest.mark.parametrize("name", codebook.FACTORS)
def test_factors_that_are_not_in_their_storage_type_are_an_error(name: str) -> None:
    params, parts = example((16, 16), {"bits": (2,), "vector_dim": 1, "group_rows": 1, "svd_rank": 2})
    wide = dataclasses.replace(parts, **{name: getattr(parts, name).float()})
    with pytest.raises(AssertionError, match=name):
        codebook.pack(wide, params, (16, 16))


def test_rows_can_be_cut() -> None:
    """The rows of words, norms and scales of rows 16.. are those of the lower part of the matrix."""
    shape = (48, 64)
    params, parts = example(shape, {"bits": (8,), "vector_dim": 4, "axis": "out", "scale_columns": 16, "norm": "rows"})
    tensors = codebook.pack(parts, params, shape)
    cut = {"words8": slice(4, None), "norm_scale": slice(16, None), "scales": (slice(None), slice(8, None))}
    lower = {name: tensor[cut[name]] if name in cut else tensor for name, tensor in tensors.items()}
    whole = codebook.decode(tensors, params, shape, torch.float32)
    assert torch.equal(codebook.decode(lower, params, (32, 64), torch.float32), whole[16:])
    assert math.isfinite(whole.sum().item())
