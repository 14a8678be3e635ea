"""Codes of codebooks that are trained: the nearest entries against a search that decodes, moves that lower an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats, plugins
from compress.formats import codebook
from compress.tune.codes import pv, vectors
from compress.tune.codes.vectors import CodebookVectors
from compress.tune.trained import Rates
from compress.types import PackedWeight
from helpers.stored import samples

SHAPE = (16, 128)
RATES = Rates(steps=20, rate=0.01, codes_rate=0.5, start="codes")


def weights() -> list[PackedWeight]:
    return [packed for packed in samples("codebook", SHAPE) if vectors.serves(packed)]


def target(packed: PackedWeight, seed: int = 0) -> Tensor:
    weight = formats.decode(packed, torch.float32)
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return weight + 0.3 * weight.std() * noise


def made(way: str, packed: PackedWeight, rates: Rates = RATES) -> Any:
    return plugins.load("codes", way).Codes(packed, target(packed), rates)


def test_there_are_weights_of_every_layout() -> None:
    found = [packed.params for packed in weights()]
    assert {p.axis for p in found} == {"in", "out"} and {len(p.bits) for p in found} == {1, 2, 3}
    assert any(p.permuted for p in found) and any(p.outliers for p in found) and any(p.scale_columns for p in found)
    factored = [packed for packed in samples("codebook", SHAPE) if packed.params.svd_rank]
    assert factored and not any(map(vectors.serves, factored))


def with_code(weight: CodebookVectors, stage: int, place: tuple[int, int], code: int) -> Tensor:
    """The matrix with one code replaced, decoded in the ordinary way, float64."""
    held = CodebookVectors(weight.packed)
    codes = [each.clone() for each in held.codes]
    codes[stage][place] = code
    held.set_codes(codes)
    return formats.decode_stored(held.packed, torch.float64)


def test_best_entries_are_those_of_a_search_that_decodes() -> None:
    for packed in weights():
        weight, wanted = CodebookVectors(packed), target(packed, 1)
        columns = weight.codes[0].shape[1]
        places = [(0, 0), (weight.codes[0].shape[0] - 1, columns - 1), (1, columns // 2)]
        chosen = torch.tensor([row * columns + column for row, column in places])
        for stage, bits in enumerate(packed.params.bits):
            found, gains = weight.best_entries(wanted, chosen, stage)
            before = (formats.decode_stored(packed, torch.float64) - wanted.double()).square().sum()
            for number, place in enumerate(places):
                errors = [
                    (with_code(weight, stage, place, code) - wanted.double()).square().sum() for code in range(2**bits)
                ]
                scale = wanted.double().square().mean()
                assert float(errors[found[number]] - min(errors)) <= 1e-5 * scale
                assert float(before - errors[found[number]]) == pytest.approx(
                    gains[number].item(), abs=1e-5 * float(scale)
                )


def test_codes_that_are_set_are_packed() -> None:
    for packed in weights():
        weight = CodebookVectors(packed)
        generator = torch.Generator().manual_seed(3)
        codes = [
            torch.randint(0, 2**bits, each.shape, generator=generator)
            for each, bits in zip(weight.codes, packed.params.bits, strict=True)
        ]
        weight.set_codes(codes)
        formats.check(weight.packed, "w")
        read = codebook.unpack_codes(weight.packed.tensors, packed.params, packed.shape)
        assert all(torch.equal(a, b.long()) for a, b in zip(codes, read, strict=True))
        assert 0 < weight.changed_share() <= 1
        weight.restore()
        assert weight.changed_share() == 0
        assert all(torch.equal(weight.packed.tensors[name], tensor) for name, tensor in packed.tensors.items())


def test_gradients_go_straight_through_the_codes() -> None:
    for packed in weights():
        codes = made("pv", packed)
        mixing = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
        (codes.weight() * mixing).sum().backward()
        assert torch.allclose(codes.target.dense.moved.grad, codes.target.dense.unit * mixing)


def other_codes(packed: PackedWeight) -> PackedWeight:
    """The weight with one code in eight drawn anew."""
    weight, generator = CodebookVectors(packed), torch.Generator().manual_seed(5)
    codes = []
    for each, bits in zip(weight.codes, packed.params.bits, strict=True):
        drawn = torch.randint(0, 2**bits, each.shape, generator=generator)
        codes.append(torch.where(torch.rand(each.shape, generator=generator) < 1 / 8, drawn, each))
    weight.set_codes(codes)
    return weight.packed


@pytest.mark.parametrize(
    ("way", "left"), [("pv", 0.3), pytest.param("proximal", 0.5, marks=pytest.mark.slow)]
)  # far entries stay
def test_codes_that_were_moved_away_come_back(way: str, left: float) -> None:
    """Least squares to what was stored before, by steepest descent; nothing but codes is trained."""
    for packed in weights():
        wanted = formats.decode_stored(packed, torch.float32)
        codes = plugins.load("codes", way).Codes(other_codes(packed), wanted, Rates(400, 0.01, 4.0, "codes"))
        first = float((codes.weight().detach() - wanted).square().sum())
        for step in range(400):
            (0.5 * (codes.weight() - wanted).square().sum()).backward()
            if way == "pv":
                codes.target.dense.moved.data.sub_(
                    codes.target.dense.moved.grad, alpha=0.004 / codes.target.dense.unit**2
                )
                codes.target.dense.moved.grad = None
            codes.behind(step)
        last = float((codes.weight().detach() - wanted).square().sum())
        assert last < left * first and 0 < codes.changed_share() < 0.25
        stored = formats.decode(codes.pack(), torch.float32)
        assert torch.allclose(stored, codes.weight(), rtol=1e-5, atol=1e-7)


def test_few_codes_move_at_a_time() -> None:
    packed = weights()[0]
    codes = made("pv", packed)
    codes.target.dense.moved.data.normal_(std=5.0, generator=torch.Generator().manual_seed(7))
    count = codes.units.codes[0].numel()
    codes.behind(pv.EVERY - 2)
    assert codes.changed_share() == 0
    codes.behind(pv.EVERY - 1)
    moved = sum(int((a != b).sum()) for a, b in zip(codes.units.codes, codes.units.first, strict=True))
    assert 0 < moved <= max(1, int(CodebookVectors.share * count))
