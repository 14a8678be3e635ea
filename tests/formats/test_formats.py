"""The contract of every format, and the `int` format against a reader that takes one bit at a time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats, plugins
from compress.errors import CheckpointError
from compress.formats import dense, planar
from compress.formats import int as int_format
from compress.formats.stored import params_from_dict
from compress.types import Stored
from helpers import problems
from helpers.stored import samples

FORMATS = plugins.names("formats")
BITS = range(2, 9)
SHAPES = [(1, 1), (3, 40), (17, 100), (16, 128), (20, 300)]
GROUPS = [-1, 16, 32, 64, 100, 128]
PLANES = {2: [2], 3: [3], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}  # on disk, so never to change


def specified(tensors: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}


@pytest.mark.parametrize("shape", [(16, 128), (7, 30), (1, 1)])
@pytest.mark.parametrize("name", FORMATS)
def test_specs_tell_exactly_what_is_stored(name: str, shape: tuple[int, int]) -> None:
    for packed in samples(name, shape):
        assert packed.format == name and packed.shape == shape
        assert formats.get(name).specs(packed.params, shape) == specified(packed.tensors)
        assert all(tensor.is_contiguous() for tensor in packed.tensors.values())
        on_disk = sum(len(bytes(tensor.untyped_storage())) for tensor in packed.tensors.values())
        assert formats.nbytes(Stored(name, packed.params), shape) == packed.nbytes == on_disk
        assert packed.bpw == 8 * on_disk / math.prod(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_decode_rounds_once_to_the_wanted_type(name: str, dtype: torch.dtype) -> None:
    for packed in samples(name, (9, 50)):
        kept = {key: tensor.clone() for key, tensor in packed.tensors.items()}
        weight = formats.decode(packed, dtype)
        assert weight.shape == (9, 50) and weight.dtype == dtype
        assert torch.equal(weight, formats.decode(packed, torch.float32).to(dtype))
        weight.fill_(1)  # the caller's own
        assert all(torch.equal(kept[key], tensor) for key, tensor in packed.tensors.items()), "decode wrote its input"


@pytest.mark.parametrize("name", FORMATS)
def test_params_go_through_json(name: str) -> None:
    for packed in samples(name, (16, 128)):
        values = json.loads(json.dumps(dataclasses.asdict(packed.params)))
        assert params_from_dict(name, values) == packed.params
        with pytest.raises(CheckpointError, match="unknown keys .*'colour'"):
            params_from_dict(name, {**values, "colour": 1})
        required = [f.name for f in dataclasses.fields(packed.params) if f.default is dataclasses.MISSING]
        for key in required:
            with pytest.raises(CheckpointError, match=key):
                params_from_dict(name, {k: v for k, v in values.items() if k != key})
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(packed.params, next(iter(values), "bits"), 0)


@pytest.mark.parametrize("name", ["no_such_format", "../types", ""])
def test_unknown_formats_are_checkpoint_errors(name: str) -> None:
    with pytest.raises(CheckpointError, match="format"):
        formats.get(name)


@pytest.mark.parametrize(
    "change",
    [{"bits": 1}, {"bits": 9}, {"group_size": 0}, {"group_size": -2}, {"tile_words": 48}, {"scale_dtype": "float32"}],
    ids=str,
)
def test_int_refuses_impossible_params(change: dict[str, object]) -> None:
    good = {"bits": 4, "group_size": 128, "symmetric": True, "tile_words": 128}
    assert params_from_dict("int", good) == int_format.Params(4, 128, True, 128)
    with pytest.raises(CheckpointError, match=next(iter(change))):
        params_from_dict("int", {**good, **change})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dense_keeps_the_weight(dtype: str) -> None:
    weight = problems.random(5, 7).T  # not contiguous
    tensors = dense.pack(weight, dense.Params(dtype))
    assert specified(tensors) == dense.specs(dense.Params(dtype), (7, 5)) and tensors["values"].is_contiguous()
    assert torch.equal(dense.decode(tensors, dense.Params(dtype), (7, 5), torch.float64), tensors["values"].double())
    assert torch.equal(tensors["values"], weight.to(getattr(torch, dtype)))
    with pytest.raises(CheckpointError, match="float8"):
        params_from_dict("dense", {"dtype": "float8"})


# The `int` format.


def int_params(bits: int, group: int, symmetric: bool, columns: int, scale_dtype: str = "float16") -> int_format.Params:
    return int_format.params_for(bits, group, symmetric, columns, scale_dtype)


def int_parts(shape: tuple[int, int], params: int_format.Params) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random codes, scales of both signs, zero points over the whole range."""
    generator = torch.Generator().manual_seed(params.bits)
    group = shape[1] if params.group_size == -1 else params.group_size
    count = -(-shape[1] // group)
    codes = torch.randint(0, 2**params.bits, shape, generator=generator).to(torch.uint8)
    scales = torch.randn(shape[0], count, generator=generator).to(getattr(torch, params.scale_dtype)).float()
    zeros = torch.randint(0, 2**params.bits, (shape[0], count), generator=generator).to(torch.uint8)
    return codes, scales, None if params.symmetric else zeros


def read_code(words: dict[int, Any], params: int_format.Params, row: int, column: int) -> int:
    """One code from the stored words, bit by bit, as packing.py and int.py define the layout."""
    code = 0
    for width, plane_words in words.items():  # high bits first
        fields = 16 if width == 3 else 16 // width
        stored = len(plane_words[row][0] if width == 3 else plane_words[row]) * fields
        whole = stored // params.tile_columns * params.tile_columns  # behind it a narrow tail
        first, tile_words = (0, params.tile_words) if column < whole else (whole, 32 // fields)
        tile, within = divmod(column - first, tile_words * fields)
        field, j = divmod(within, tile_words)
        word = first // fields + tile * tile_words + j
        for bit in reversed(range(width)):
            if width != 3:
                value, position = plane_words[row][word], field * width + bit
            elif field < 15:
                value, position = plane_words[row][field // 5][word], 3 * (field % 5) + bit
            else:
                value, position = plane_words[row][bit][word], 15
            code = code << 1 | (value >> position & 1)
    return code


def read_weight(tensors: dict[str, Tensor], params: int_format.Params, shape: tuple[int, int]) -> Tensor:
    """scale * (code - zero) in Python numbers, each element on its own."""
    words = {w: tensors[f"words{w}"].tolist() for w in PLANES[params.bits]}
    scales = tensors["scales"].tolist()
    streams = None if params.symmetric else [int.from_bytes(row, "little") for row in tensors["zeros"].tolist()]
    weight = torch.empty(shape, dtype=torch.float64)
    for i, j in itertools.product(*map(range, shape)):
        g = 0 if params.group_size == -1 else j // params.group_size
        mask = 2**params.bits - 1
        zero = 2 ** (params.bits - 1) if streams is None else streams[g] >> i * params.bits & mask
        weight[i, j] = scales[g][i] * (read_code(words, params, i, j) - zero)
    return weight


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_int_is_exact(bits: int, shape: tuple[int, int], symmetric: bool) -> None:
    for group in GROUPS:
        params = int_params(bits, group, symmetric, shape[1])
        codes, scales, zeros = int_parts(shape, params)
        tensors = int_format.pack(codes, scales, zeros, params)
        assert specified(tensors) == int_format.specs(params, shape)
        read_codes, read_scales, read_zeros = int_format.unpack(tensors, params, shape)
        assert torch.equal(read_codes, codes) and torch.equal(read_scales.float(), scales)
        if zeros is None or read_zeros is None:
            assert zeros is read_zeros
        else:
            assert torch.equal(read_zeros, zeros)
        # An 8-bit code times an 11-bit scale fits float32: no rounding at all.
        owner = torch.arange(shape[1]) // (shape[1] if group == -1 else group)
        zero = torch.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros
        expected = scales.double()[:, owner] * (codes.double() - zero.double()[:, owner])
        assert torch.equal(int_format.decode(tensors, params, shape, torch.float64), expected)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", BITS)
def test_int_bits_on_disk(bits: int, symmetric: bool) -> None:
    for shape, group in [((3, 40), 16), ((18, 300), 100), ((2, 20), -1)]:
        for scale_dtype in ("float16", "bfloat16"):
            params = int_params(bits, group, symmetric, shape[1], scale_dtype)
            tensors = int_format.pack(*int_parts(shape, params), params)
            assert torch.equal(
                int_format.decode(tensors, params, shape, torch.float64), read_weight(tensors, params, shape)
            )


@pytest.mark.parametrize("tile", int_format.TILE_WORDS)
@pytest.mark.parametrize("bits", BITS)
def test_int_reads_any_tile(bits: int, tile: int) -> None:
    params = int_format.Params(bits, 32, False, tile)
    codes, scales, zeros = int_parts((5, 72), params)
    tensors = int_format.pack(codes, scales, zeros, params)
    assert specified(tensors) == int_format.specs(params, (5, 72))
    assert torch.equal(int_format.unpack(tensors, params, (5, 72))[0], codes)


@pytest.mark.parametrize("group", [32, 100, -1])
def test_int_decodes_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    params = int_params(5, group, False, 160)
    tensors = int_format.pack(*int_parts((37, 160), params), params)
    whole = int_format.decode(tensors, params, (37, 160), torch.float32)
    for chunk in (1, 4 * 256):  # 256: padded columns
        monkeypatch.setattr(planar, "DECODE_CHUNK", chunk)
        assert torch.equal(int_format.decode(tensors, params, (37, 160), torch.float32), whole)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", BITS)
def test_int_shards_are_slices(bits: int, symmetric: bool) -> None:
    """Rows can be cut at a multiple of 16, columns at a multiple of the group and the tile: no repacking."""
    params = int_format.Params(bits, 64, symmetric, 16)
    columns = 2 * int_format.padded_shape(params, (1, 1))[1]
    whole = int_format.pack(*int_parts((48, columns), params), params)
    half = columns // 2
    shard = {key: words[16:48, ..., words.shape[-1] // 2 :] for key, words in whole.items() if key.startswith("words")}
    shard["scales"] = whole["scales"][half // 64 :, 16:48]
    if not symmetric:
        shard["zeros"] = whole["zeros"][half // 64 :, 16 * bits // 8 : 48 * bits // 8]
    expected = int_format.decode(whole, params, (48, columns), torch.float32)[16:48, half:]
    assert torch.equal(int_format.decode(shard, params, (32, half), torch.float32), expected)


def test_int_bytes_of_a_real_layer() -> None:
    """4-bit, groups of 128, 4096 x 4096: 4.125 bits a weight, 4.15625 with zero points."""
    shape, codes = (4096, 4096), 4096 * 4096 // 2
    assert formats.nbytes(Stored("int", int_params(4, 128, True, 4096)), shape) == codes + 4096 * 32 * 2
    assert (
        formats.nbytes(Stored("int", int_params(4, 128, False, 4096)), shape) == codes + 4096 * 32 * 2 + 4096 * 32 // 2
    )
    assert formats.nbytes(Stored("int", int_params(3, -1, True, 4096)), shape) == 4096 * 4096 * 3 // 8 + 4096 * 2


@pytest.mark.parametrize(
    ("bits", "group", "columns", "tile"),
    [
        (4, 128, 4096, 128),  # widest of at most 512 columns
        (4, 128, 11008, 64),  # 11008 = 43 * 64 * 4; 128 would pad
        (4, 64, 4096, 64),  # a field within one group
        (4, -1, 4096, 128),
        (2, 32, 8192, 32),
        (2, 128, 100, 16),  # least padding
        (3, 128, 4096, 32),
        (5, 128, 1024, 32),  # the 1-bit plane has 16 fields: 32 * 16
        (8, 100, 64, 32),
        (4, 48, 4096, 16),
    ],
)
def test_tile_words(bits: int, group: int, columns: int, tile: int) -> None:
    assert int_params(bits, group, True, columns).tile_words == tile


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
def test_every_width_of_whole_32_columns_costs_its_bits(bits: int, group: int) -> None:
    for columns in range(32, 2048 + 1, 32):
        params, groups = int_params(bits, group, True, columns), 1 if group == -1 else -(-columns // group)
        nbytes = formats.nbytes(Stored("int", params), (64, columns))
        assert nbytes == 64 * (columns * bits // 8 + 2 * groups)
        assert not params.narrow_tail or params.split(columns)[1] > 0  # tails only where whole tiles would pad


@pytest.mark.parametrize(("columns", "stored"), [(1, 32), (100, 128), (570, 576), (2880, 2880), (11008, 11008)])
def test_other_widths_are_padded_to_32_columns(columns: int, stored: int) -> None:
    for bits in BITS:
        assert int_format.padded_shape(int_params(bits, 128, True, columns), (1, columns)) == (16, stored)


def test_groups_that_a_narrow_tile_would_cross_keep_whole_tiles() -> None:
    assert int_format.padded_shape(int_params(3, 48, True, 576), (16, 576)) == (16, 768)
    with pytest.raises(ValueError, match="not a multiple of 32"):
        int_format.Params(3, 48, True, 16, narrow_tail=True)


def test_weights_that_were_stored_with_padded_tiles_are_read() -> None:
    shape = (5, 576)
    before = int_format.Params(3, 64, True, 16)  # as it is written in older checkpoints
    now = int_params(3, 64, True, 576)
    codes, scales, _ = int_parts(shape, before)
    old, new = (int_format.pack(codes, scales, None, params) for params in (before, now))
    assert old["words3"].shape[-1] == 48 and new["words3"].shape[-1] == 36
    assert params_from_dict("int", {"bits": 3, "group_size": 64, "symmetric": True, "tile_words": 16}) == before
    decoded = [int_format.decode(t, p, shape, torch.float32) for t, p in ((old, before), (new, now))]
    assert torch.equal(*decoded)


def test_int_refuses_scales_that_its_type_cannot_hold() -> None:
    params = int_params(4, -1, True, 16)
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="storage type"):
        int_format.pack(codes, torch.tensor([[0.1]]), None, params)


@pytest.mark.parametrize(
    ("amax", "bits", "expected"),
    [
        ([1.0, 2.0, 0.0], 4, "float16"),
        ([0.0, 0.0], 4, "float16"),
        ([1e-4] * 4, 4, "bfloat16"),  # steps below the normal range of float16
        ([1.0, 1.0, 1.0, 1e-6], 4, "float16"),  # one tiny row does not cost all others their precision
        ([1e-3] * 4, 2, "float16"),
        ([1e-3] * 4, 8, "bfloat16"),
        ([1.0, 1e6], 4, "bfloat16"),  # one row that float16 cannot hold does
        ([3e5], 4, "bfloat16"),  # near the limit: a searched or asymmetric step is up to 4/3 of it
        ([1e5], 2, "bfloat16"),
        ([2e5], 8, "float16"),
    ],
)
def test_scale_dtype(amax: list[float], bits: int, expected: str) -> None:
    assert int_format.scale_dtype(torch.tensor(amax), bits) == expected
