"""The ternary format: bytes and decoding against loops in Python."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import ternary
from compress.types import PackedWeight, Stored

CASES: list[dict[str, Any]] = [
    {"packing": "base3", "group_size": 64},
    {"packing": "base3", "group_size": 7, "scale_dtype": "bfloat16"},
    {"packing": "base3", "group_size": -1, "tensor_scale": True, "scale_dtype": "float32"},
    {"packing": "planar", "group_size": 32, "scale_dtype": "float32"},
    {"packing": "planar", "group_size": -1},
    {"packing": "binary", "group_size": 16},
]
SHAPES = [(9, 64), (33, 51), (16, 20)]


def make(settings: dict[str, Any], shape: tuple[int, int]) -> tuple[PackedWeight, Tensor, Tensor]:
    """A packed weight, its trits and its scales."""
    params = ternary.Params(**settings)
    generator = torch.Generator().manual_seed(0)
    trits = torch.randint(-1, 2, shape, generator=generator).to(torch.int8)
    if params.packing == "binary":
        trits = torch.where(trits > 0, 1, -1).to(torch.int8)
    size = (1, 1) if params.tensor_scale else (shape[0], params.groups(shape[1]))
    scales = (0.01 + torch.rand(size, generator=generator)).to(getattr(torch, params.scale_dtype))
    return PackedWeight(Stored("ternary", params), ternary.pack(trits, scales, params), shape), trits, scales


def slow_digits(octet: int, packing: str) -> list[int]:
    """The trits of a byte, as the docstring of the format says, in exact fractions."""
    if packing == "planar":
        return [(octet // 4**k) % 4 - 1 for k in range(4)]
    if packing == "binary":
        return [2 * (octet // 2**k % 2) - 1 for k in range(8)]
    digits, rest = [], Fraction(octet - 256 if octet > 127 else octet, 256)  # of [-1/2, 1/2)
    for _ in range(5):
        digits.append(1 if rest > Fraction(1, 6) else -1 if rest < -Fraction(1, 6) else 0)
        rest = 3 * rest - digits[-1]
    return digits


@pytest.mark.parametrize("settings", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_is_as_described(settings: dict[str, Any], shape: tuple[int, int]) -> None:
    weight, trits, scales = make(settings, shape)
    formats.check(weight, "weight")
    params, (rows, columns) = weight.params, shape
    group, decoded = params.group(columns), formats.decode(weight, torch.float64)
    for i, j in product(range(rows), range(columns)):
        unit, inside = divmod(j, params.unit)
        octet = int(weight.tensors["codes"][i // 16, unit, 4 * (i % 16) + inside % 4])
        trit = slow_digits(octet, params.packing)[inside // 4]
        assert trit == int(trits[i, j])
        scale = weight.tensors["scales"][0, 0] if params.tensor_scale else weight.tensors["scales"][j // group, i]
        assert float(decoded[i, j]) == trit * float(scale)
    again, their = ternary.unpack(weight.tensors, params, shape)
    assert torch.equal(again, trits) and torch.equal(their, scales)


def test_five_digits_have_a_byte_each() -> None:
    digits = torch.tensor(list(product((-1, 0, 1), repeat=5)), dtype=torch.int8)
    octets = ternary._to_bytes(digits, "base3")
    assert len(octets.unique()) == 243 == len(digits)
    assert [slow_digits(int(octet), "base3") for octet in octets] == digits.tolist()
    assert (octets.view(torch.int8) + octets.flip(0).view(torch.int8) == 0).all()  # balanced: signs change all digits


def test_bits() -> None:
    shape = (4096, 4000)
    for packing, bits in (("base3", 1.6), ("planar", 2), ("binary", 1)):
        stored = Stored("ternary", ternary.Params(packing, -1, tensor_scale=True))
        assert formats.nbytes(stored, shape) == 4096 * 4000 * bits / 8 + 2


@pytest.mark.parametrize("settings", CASES)
def test_decoding_in_parts_changes_nothing(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _, _ = make(settings, (75, 51))
    whole = formats.decode(weight, torch.float32)
    monkeypatch.setattr(ternary, "DECODE_CHUNK", 16 * 51 * 2)
    assert torch.equal(formats.decode(weight, torch.float32), whole)
    rows = torch.tensor([70, 0, 70, 17])
    assert formats.has_rows(weight.stored) != weight.params.tensor_scale
    if formats.has_rows(weight.stored):
        assert torch.equal(formats.decode_rows(weight, rows, torch.float32), whole[rows])


def test_bytes_that_are_never_written_are_refused() -> None:
    for packing, spare in (("base3", 13), ("planar", 256 - 81), ("binary", 0)):
        params = ternary.Params(packing, -1)
        weight = PackedWeight(
            Stored("ternary", params), make({"packing": packing, "group_size": -1}, (16, 16))[0].tensors, (16, 16)
        )
        refused = 0
        for octet in range(256):
            weight.tensors["codes"][0, 0, 5] = octet
            try:
                formats.check(weight, "weight")
            except formats.CheckpointError as error:
                refused += 1
                assert str(error).startswith(f"weight.codes holds {octet}, which is no byte of packing {packing}")
        assert refused == spare
