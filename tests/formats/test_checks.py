"""What a file can hold for a weight of any format: refused in one line that names the tensor, or decoded."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compress import formats, plugins
from compress.errors import CheckpointError
from compress.formats import codebook, sparse
from compress.papers.formats import lattice, salient, structured
from compress.types import Activations, LowRank, PackedWeight, Stored, WeightTransforms
from helpers import stored

FORMATS = plugins.names("formats")
SHAPE = (9, 50)
WHERE = "model.layers.3.mlp.up_proj"
# Formats without `check` whose tensors hold integers, because no pattern of their bits says more than there is: codes
# name one of 2^bits levels, points or states, zero points one of 2^bits codes.
ANY_BITS = {"affine", "columns", "e8p", "int", "kquant", "lowrank", "nf", "pvq", "sliced", "trellis"}

# Lossless formats: NaN and infinities are numbers like others there, and what codes are damaged is seen when they are
# decoded: looking for it in `check` would take as long.
LOSSLESS = {"exponents"}


def around(weight: PackedWeight) -> PackedWeight:
    """The weight with everything beside it that can be stored: transforms, a low-rank part, a scale of the inputs."""
    full = Stored(
        weight.format,
        weight.params,
        WeightTransforms(("signs", "hadamard"), ("signs",)),
        Activations(8, "tensor"),
        LowRank(2, bits=4, group_size=16),
    )
    drawn = stored.random_parts(full, weight.shape)
    return PackedWeight(full, {**drawn, **weight.tensors}, weight.shape)


def weights(name: str) -> Iterator[PackedWeight]:
    for weight in stored.samples(name, SHAPE):
        yield weight
        yield around(weight)


def refusal(weight: PackedWeight, name: str, changed: Tensor | None) -> str:
    """The error for a weight with another tensor in the place of this one, or none."""
    tensors = {key: tensor for key, tensor in weight.tensors.items() if key != name}
    if changed is not None:
        tensors[name] = changed
    with pytest.raises(CheckpointError) as caught:
        formats.check(dataclasses.replace(weight, tensors=tensors), WHERE)
    message = str(caught.value)
    assert message.startswith(f"{WHERE}.{name} ") and "\n" not in message
    assert message.endswith("; download or write the checkpoint again")
    return message


def misshapen(tensor: Tensor) -> Iterator[Tensor]:
    """Each dimension one longer and one shorter, a dimension more, and one less."""
    for axis, size in enumerate(tensor.shape):
        yield tensor.narrow(axis, 0, size - 1)
        yield torch.cat((tensor, tensor.narrow(axis, 0, 1)), axis)
    yield tensor[None]
    yield tensor[0]


@pytest.mark.parametrize("name", FORMATS)
def test_names_types_and_shapes(name: str) -> None:
    for weight in weights(name):
        formats.check(weight, WHERE)
        for key, tensor in weight.tensors.items():
            assert "is missing" in refusal(weight, key, None)
            for dtype in (torch.float64, torch.int64, torch.bool):
                assert f"is {str(dtype)[6:]} " in refusal(weight, key, tensor.to(dtype))
            for changed in misshapen(tensor):
                assert "expected" in refusal(weight, key, changed)
            if tensor.dtype.itemsize == 2:  # of the same size on disk
                other = torch.bfloat16 if tensor.dtype == torch.float16 else torch.float16
                refusal(weight, key, tensor.view(other))
        assert "is not expected" in refusal(weight, "spare", torch.zeros(1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_that_are_not_finite(name: str, bad: float) -> None:
    for weight in weights(name):
        for key, tensor in weight.tensors.items():
            if tensor.is_floating_point():
                changed = tensor.clone()
                changed.view(-1)[-1] = bad
                if changed.float().isfinite().all():
                    continue  # a type without infinities
                assert "not finite" in refusal(weight, key, changed)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_a_static_scale_is_above_zero(bad: float) -> None:
    weight = around(stored.samples("int", SHAPE)[0])
    assert f"holds {bad:g}, which is not above 0" in refusal(weight, "in_scale", torch.tensor([bad]))


@pytest.mark.parametrize("name", FORMATS)
def test_any_integers_are_refused_or_decoded(name: str) -> None:
    """Nothing else happens, whatever bits a file holds; a format with `check` refuses some, one without none."""
    refused = 0
    for weight in weights(name):
        for key, tensor in weight.tensors.items():
            if tensor.is_floating_point():
                continue
            info, generator = torch.iinfo(tensor.dtype), torch.Generator().manual_seed(0)
            random = torch.randint(info.min, info.max + 1, tensor.shape, generator=generator).to(tensor.dtype)
            for changed in (random, torch.full_like(tensor, info.max), torch.full_like(tensor, info.min)):
                harmed = dataclasses.replace(weight, tensors={**weight.tensors, key: changed})
                try:
                    formats.check(harmed, WHERE)
                except CheckpointError:
                    refused += 1
                    refusal(weight, key, changed)
                else:
                    assert is_decoded(harmed, name in LOSSLESS), key
    assert (refused > 0) == hasattr(formats.get(name), "check")


def is_decoded(weight: PackedWeight, is_lossless: bool) -> bool:
    """Whether a weight whose tensors were not refused decodes, to finite numbers but for lossless formats."""
    try:
        decoded = formats.decode(weight, torch.float32)
    except CheckpointError as error:
        return is_lossless and "damaged" in str(error)
    return is_lossless or bool(decoded.isfinite().all())


def test_formats_that_check_nothing_are_known() -> None:
    """A new format with integers says in `check` what they select, or is listed above with those that need none."""
    with_integers = {
        name
        for name in FORMATS
        for weight in stored.samples(name, SHAPE)
        if any(not tensor.is_floating_point() for tensor in weight.tensors.values())
    }
    assert {name for name in with_integers if not hasattr(formats.get(name), "check")} == ANY_BITS


CODEBOOK = codebook.Params((4,), 2, 16, permuted=True, outliers=4)
LATTICE = lattice.Params(3, 8, 16, False, False)
STRUCTURED = structured.Params(6, 7)


@pytest.mark.parametrize(
    ("format", "params", "name", "values", "message"),
    [
        ("codebook", CODEBOOK, "order", {0: 32}, "holds 32, which is not between 0 and 31"),
        ("codebook", CODEBOOK, "order", {5: -1}, "holds -1, "),
        ("codebook", CODEBOOK, "order", {0: 9, 1: 9}, "holds 9 twice"),
        ("codebook", CODEBOOK, "outlier_index", {3: 32}, "holds 32, "),
        ("codebook", CODEBOOK, "outlier_index", {0: -(2**31)}, "holds -2147483648, "),
        ("codebook", CODEBOOK, "outlier_index", {0: 4, 1: 4}, "holds 4 twice"),
        ("lattice", LATTICE, "group_bits", {0: 5}, "holds 5, which is not between 2 and 4"),
        ("lattice", LATTICE, "group_bits", {0: 0}, "holds 0, "),
        ("lattice", LATTICE, "group_bits", {0: 4, 1: 3}, "sum to 7, expected 3 for each of 2 groups"),
        ("salient", salient.Params(10), "mask", {0: 255, 1: 255}, "selects "),
        ("sparse", sparse.Params(2, 4, "dense"), "mask", {3: 7}, "has pattern 7, expected 0 to 5"),
        ("sparse", sparse.Params(4, 8, "int"), "mask", {3: 7}, "keeps 3 of 8 columns, expected 4"),
        ("sparse", sparse.Params(3, 5, "int"), "mask", {7: 255}, "has bits behind the 32 columns"),
        ("structured", STRUCTURED, "rows", {5: 8}, "holds 8, which is not between 0 and 7"),
        ("structured", STRUCTURED, "columns", {0: -1}, "holds -1, "),
        ("structured", STRUCTURED, "columns", {0: 1, 1: 1}, "holds 1 twice"),
        ("structured", STRUCTURED, "rows", {0: 1, 1: 0}, "not in ascending order"),
    ],
)
def test_what_selects_is_within_what_there_is(
    format: str, params: object, name: str, values: dict[int, int], message: str
) -> None:
    weight = stored.random_weight(format, params, (8, 32))
    formats.check(weight, WHERE)
    changed = weight.tensors[name].clone()
    for index, value in values.items():
        changed[index] = value
    assert message in refusal(weight, name, changed)


def test_a_rank_above_the_shape() -> None:
    weight = PackedWeight(Stored("int", stored.samples("int", SHAPE)[0].params, lowrank=LowRank(10)), {}, SHAPE)
    with pytest.raises(CheckpointError, match=f"^{WHERE}: rank 10 is above 9, .*; download"):
        formats.check(weight, WHERE)


def test_values_on_meta_wait() -> None:
    weight = stored.random_weight("codebook", CODEBOOK, (8, 32))
    absent = {name: tensor.to("meta") for name, tensor in weight.tensors.items()}
    formats.check(dataclasses.replace(weight, tensors=absent), WHERE)
    assert "is missing" in refusal(dataclasses.replace(weight, tensors=absent), "order", None)


def test_checking_costs_less_than_a_copy_of_the_largest_tensors() -> None:
    """Indices are sorted and floating numbers scanned once: no code is unpacked."""
    params = codebook.Params((8,), 4, 128, permuted=True, outliers=16)
    weight = stored.random_weight("codebook", params, (1024, 4096))
    spent = []
    for _ in range(5):
        start = time.process_time()
        formats.check(weight, WHERE)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.02
