"""Parts of packed weights decode to the same parts of the decoded weight, to the bit, in every format."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from compress import formats, plugins
from compress.formats import int as int_format
from compress.formats import lowrank as lowrank_format
from compress.formats import transforms
from compress.types import IN_SCALE, Activations, LowRank, PackedWeight, Stored, WeightTransforms
from helpers.cpu_weights import CODEBOOK, E8P, INT, TRELLIS, codebook_weight, e8p_weight, int_weight, trellis_weight
from helpers.stored import random_parts, random_weight, samples

Part = tuple[range, range]


def parts(shape: tuple[int, int]) -> list[Part]:
    """Halves and quarters of the rows and columns, odd ends, all but the first, and a corner."""
    rows, columns = range(shape[0]), range(shape[1])
    some = [rows[: shape[0] // 2], rows[shape[0] // 2 :], rows[: shape[0] // 3], rows[128:], rows[16:33], rows[1:]]
    others = [
        columns[: shape[1] // 2],
        columns[shape[1] // 2 :],
        columns[: shape[1] // 3],
        columns[32:],
        columns[32:96],
    ]
    corner = (rows[128:], columns[32:])
    pairs = [*((part, columns) for part in some), *((rows, part) for part in others), corner]
    return [(a, b) for a, b in pairs if len(a) and len(b)]


def possible(weight: PackedWeight) -> list[Part]:
    """The parts that can be cut, each compared with the decoded weight."""
    whole, done = formats.decode(weight, torch.float32), []
    kept = {key: tensor.clone() for key, tensor in weight.tensors.items()}
    for rows, columns in parts(weight.shape):
        try:
            part = formats.cut(weight, rows, columns)
        except ValueError as error:
            assert str(error)
            continue
        formats.check(part, "part")
        assert all(tensor.is_contiguous() for tensor in part.tensors.values())
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in part.tensors.values())
        wanted = whole[rows.start : rows.stop, columns.start : columns.stop]
        decoded = formats.decode(part, torch.float32)
        if weight.format == "lowrank":  # a product, which a matrix library may sum in another order
            assert torch.allclose(decoded, wanted, rtol=0, atol=1e-5), (rows, columns)
        else:
            assert torch.equal(decoded, wanted), (weight.stored, rows, columns)
        done.append((rows, columns))
    assert all(torch.equal(kept[key], tensor) for key, tensor in weight.tensors.items()), "the whole has changed"
    return done


INTEGERS = {"bits": 4, "group_size": 16, "symmetric": True, "tile_words": 16}
PART = {"format": "int", "params": INTEGERS}
SETTINGS: list[tuple[str, tuple[int, int], dict[str, Any]]] = [  # of layouts that no kernel reads
    ("dense", (40, 96), {}),
    ("zero", (40, 96), {}),
    ("structured", (40, 96), {"rows": 30, "columns": 96}),
    ("structured", (40, 96), {"rows": 40, "columns": 70, "dtype": "float16"}),
    ("structured", (40, 96), {"rows": 30, "columns": 70, "dtype": "float32"}),
    ("sparse", (40, 96), {"keep": 2, "of": 4, "inner": "int", "bits": 4, "group_size": 16}),
    ("sparse", (160, 100), {"keep": 2, "of": 4, "inner": "dense"}),
    ("sparse", (40, 96), {"keep": 3, "of": 8, "inner": "int", "bits": 3}),
    ("sparse", (40, 96), {"keep": 4, "of": 16, "inner": "dense", "block_rows": 8, "block_columns": 4}),
    ("kquant", (160, 512), {"type": "q4_k"}),
    ("kquant", (40, 600), {"type": "q3_k"}),
    ("salient", (40, 96), {"salient": 19}),
    ("salient", (33, 50), {"salient": 0}),
    ("nf", (40, 96), {"bits": 4, "block_size": 16, "tile_words": 16}),
    ("nf", (33, 100), {"bits": 3, "block_size": 16, "tile_words": 4, "scale_bits": 3, "scale_block": 4}),
    ("affine", (40, 96), {"bits": 4, "group_size": 16, "tile_words": 4}),
    ("affine", (33, 100), {"bits": 3, "group_size": -1, "tile_words": 4, "column_scales": True}),
    ("sparse_outliers", (40, 96), {"bits": 3, "group_size": 16, "tile_words": 4, "outliers": 40}),
    ("sparse_outliers", (50, 64), {"bits": 2, "group_size": 8, "tile_words": 4, "code_bits": 4, "block_rows": 8}),
    ("grid", (40, 96), {"values": "e2m1", "block_columns": 16, "scale_type": "e4m3", "tensor_scale": True}),
    ("grid", (40, 97), {"values": "nf4", "block_columns": 32, "scale_type": "float32"}),
    ("grid", (40, 96), {"values": "e4m3", "block_columns": -1, "scale_type": "float32"}),
    ("grid", (40, 128), {"values": "e4m3", "block_columns": 32, "block_rows": 20, "scale_type": "float32"}),
    ("ternary", (40, 96), {"packing": "base3", "group_size": 32}),
    ("ternary", (40, 97), {"packing": "planar", "group_size": -1, "scale_dtype": "float32"}),
    ("ternary", (160, 96), {"packing": "binary", "group_size": -1, "tensor_scale": True}),
    ("lowrank", (40, 96), {"rank": 8}),
    ("lowrank", (40, 96), {"rank": 8, "bits": 8, "group_size": 16}),
    ("lowrank", (40, 96), {"rank": 8, "bits": 4, "group_size": -1}),
    ("pvq", (40, 96), {"vector_dim": 16, "pulses": 13, "gain_bits": 3}),
    ("pvq", (17, 100), {"vector_dim": 8, "pulses": 5, "gain_bits": 2, "scale_dtype": "bfloat16"}),
    ("lattice", (40, 128), {"bits": 3, "dim": 8, "group_size": 32, "compand": True, "row_scales": True}),
    ("columns", (40, 96), {}),
    ("columns", (100, 96), {"bits": 4, "group_size": 32, "symmetric": False}),
    ("columns", (200, 80), {"bits": 2, "group_size": -1}),
    ("lattice", (40, 96), {"bits": 2, "dim": 16, "group_size": 16, "compand": False, "row_scales": False}),
    ("trellis", (160, 96), {"bits": 2, "state_bits": 8, "tile_rows": 32, "code": "hyb"}),
    ("trellis", (192, 96), {"bits": 1.75, "state_bits": 12, "tile_rows": 64, "row_scales": True}),
    ("trellis", (160, 96), {"bits": 1.5, "state_bits": 12, "tile_rows": 32, "row_scales": True}),
    ("trellis", (160, 96), {"bits": 3, "state_bits": 12, "tile_rows": 16, "code": "3inst", "row_scales": True}),
    ("sliced", (40, 96), {**INTEGERS, "bits": 8, "planes_of": (2, 2, 4), "kept": 8}),
    ("sliced", (33, 100), {**INTEGERS, "symmetric": False, "planes_of": (2, 2), "kept": 2}),
    ("nested", (40, 96), {"parts": [PART, PART], "levels": (4, 8)}),
]
BOOKS: list[dict[str, Any]] = [  # beside those that kernels read
    {"bits": (4,), "vector_dim": 2, "group_columns": 32, "scale_columns": 16, "codebook_dtype": "float16"},
    {"bits": (3,), "vector_dim": 1, "group_columns": 32, "group_rows": 16, "svd_rank": 2},
    {"bits": (5, 3), "vector_dim": 4, "axis": "out", "norm": "columns", "bias": True, "outliers": 3},
    {"bits": (5, 3), "vector_dim": 4, "norm": "rows", "outliers": 1, "outlier_bits": 8},
]
WEIGHTS = [
    *(int_weight(*case) for case in INT),
    *(codebook_weight(*case) for case in CODEBOOK),
    *(codebook_weight((160, 96), case) for case in BOOKS),
    *(trellis_weight(*case) for case in TRELLIS),
    *(e8p_weight(*case) for case in E8P),
    *samples("exponents", (40, 96)),
    *(random_weight(name, formats.get(name).Params(**settings), shape) for name, shape, settings in SETTINGS),
]


@pytest.mark.parametrize("name", plugins.names("formats"))
def test_every_format_is_cut_along_both_sides(name: str) -> None:
    weights = [weight for weight in WEIGHTS if weight.format == name]
    done = [(weight.shape, part) for weight in weights for part in possible(weight)]
    assert len(done) >= 3 * len(weights)
    assert any(len(rows) < shape[0] for shape, (rows, _) in done)
    assert any(len(columns) < shape[1] for shape, (_, columns) in done)


def test_int_is_cut_within_tiles_and_groups() -> None:
    """Half of 11 tiles of 512 columns, and a quarter of groups of 128."""
    weight = int_weight((16, 5632), 4, 128, True)
    assert formats.cut(weight, range(16), range(2816, 5632)).params.group_size == 128
    asymmetric = int_weight((48, 256), 3, 128, False)
    assert formats.cut(asymmetric, range(5, 48), range(32, 64)).params.group_size == 32
    with pytest.raises(ValueError, match="column 40 lies within a group of 128"):
        formats.cut(asymmetric, range(48), range(40, 80))


def test_what_weights_share_is_not_cut_apart() -> None:
    for weight, rows, columns, reason in (
        (trellis_weight((256, 512), 2, 16, 128, "mul1", False), range(64, 128), range(512), "whole tiles of 128 rows"),
        (codebook_weight(*CODEBOOK[0]), range(256), range(256, 512), "an order of their own"),
        (codebook_weight(*CODEBOOK[4]), range(8, 24), range(300), "row 8 lies within"),
        (e8p_weight(*E8P[0]), range(64), range(4, 68), "within a code of 8 columns"),
    ):
        with pytest.raises(ValueError, match=reason):
            formats.cut(weight, rows, columns)


def around(stored: Stored, shape: tuple[int, int]) -> PackedWeight:
    return PackedWeight(stored, random_parts(stored, shape), shape)


def test_transforms_are_cut_where_they_are_diagonal() -> None:
    shape, params = (64, 96), int_format.params_for(4, 32, True, 96)
    ops = WeightTransforms(input=("channel_scale", "signs", "channel_scale8"), output=("signs", "channel_scale16"))
    weight = around(Stored("int", params, ops), shape)
    part = formats.cut(weight, range(5, 64), range(32, 96))
    assert torch.equal(formats.decode(part, torch.float32), formats.decode(weight, torch.float32)[5:, 32:])

    turned = around(Stored("int", params, WeightTransforms(input=("signs", "hadamard"))), shape)
    part = formats.cut(turned, range(32, 64), range(96))  # every output reads all inputs, as before
    wanted = formats.decode(turned, torch.float32)[32:]
    assert torch.allclose(formats.decode(part, torch.float32), wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    with pytest.raises(ValueError, match="hadamard mixes all channels"):
        formats.cut(turned, range(64), range(32))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("group", [-1, 16])
def test_low_rank_parts_are_cut_too(bits: int, group: int) -> None:
    shape = (64, 96)
    stored = Stored("int", int_format.params_for(4, 32, True, 96), lowrank=LowRank(4, bits, group))
    weight = around(stored, shape)
    whole = formats.decode(weight, torch.float32)
    for rows, columns in ((range(16, 64), range(96)), (range(64), range(32, 96)), (range(32), range(32))):
        part = formats.cut(weight, rows, columns)
        wanted = whole[rows.start : rows.stop, columns.start : columns.stop]
        assert torch.allclose(formats.decode(part, torch.float32), wanted, rtol=0, atol=1e-6)
        a, b = lowrank_format.part_factors(part.tensors, stored.lowrank, part.shape, torch.float32)
        wanted_a, wanted_b = lowrank_format.part_factors(weight.tensors, stored.lowrank, shape, torch.float32)
        assert torch.equal(a, wanted_a[:, columns.start : columns.stop])
        assert torch.equal(b, wanted_b[:, rows.start : rows.stop])
    with pytest.raises(ValueError, match="rank 4 is above 3"):
        formats.cut(weight, range(3), range(96))


def test_inputs_that_share_a_scale_are_not_cut_apart() -> None:
    shape = (64, 96)
    stored = Stored("int", int_format.params_for(8, -1, True, 96), activations=Activations(8))
    weight = around(stored, shape)
    assert formats.cut(weight, range(16), range(96)).stored.activations == Activations(8)
    with pytest.raises(ValueError, match="scale of a whole token"):
        formats.cut(weight, range(64), range(32))
    static = around(dataclasses.replace(stored, activations=Activations(8, "tensor")), shape)
    part = formats.cut(static, range(64), range(32))
    assert torch.equal(part.tensors[IN_SCALE], static.tensors[IN_SCALE])


def test_the_whole_is_the_weight_itself() -> None:
    weight = int_weight(*INT[0])
    assert formats.cut(weight, range(64), range(512)) is weight


def test_every_stored_transform_is_diagonal_or_is_not_cut() -> None:
    for name, transform in transforms.TRANSFORMS.items():
        spec = transform.spec(64)
        value = None if spec is None else torch.zeros(spec[0], dtype=spec[1])
        if name in transforms.DIAGONAL:
            assert len(transforms.cut(name, value, range(8, 24))) == (2 if name == "signs" else 16)
        else:
            with pytest.raises(ValueError, match=f"{name} mixes"):
                transforms.cut(name, value, range(8, 24))
