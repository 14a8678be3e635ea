"""A draft model holds the tensors of its target where these are the same numbers. No engine is needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from compress import formats
from compress.formats import e8p, levels
from compress.runtime import weight_cache
from compress.serving import sharing
from compress.serving.parts import LinearShard, Region, Totals
from compress.serving.tables import TableShard
from compress.types import PackedWeight, Stored, WeightTransforms
from helpers.nested_models import rounded_in_parts
from helpers.stored import random_parts

SHAPE = (48, 64)
WHOLE = Region.of_rows(SHAPE, range(48))
ROTATED = WeightTransforms(("signs", "hadamard"), ("hadamard", "signs"))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No model is here yet, and the cache of decoded weights stays as it is."""
    gc.collect()
    sharing._FIRST.clear()
    limit = weight_cache.CACHE.limit
    yield
    weight_cache.set_cache_limit(limit)


def nested_weight(ops: WeightTransforms | None = None) -> PackedWeight:
    """4 + 4 bits, with random signs where there are any."""
    weight = rounded_in_parts(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))
    stored = Stored(weight.format, weight.params, ops or WeightTransforms())
    return PackedWeight(stored, {**random_parts(stored, SHAPE), **weight.tensors}, SHAPE)


def shard_of(weight: PackedWeight, region: Region = WHOLE, level: int | None = None, name: str = "a.b") -> LinearShard:
    """A shard to which all stored tensors came, as an engine's loader brings them."""
    shard = LinearShard(name, weight.stored, region, torch.float32, level)
    for key, tensor in weight.tensors.items():
        shard.load(key, tensor, "cpu")
    shard.check()
    return shard


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.named_parameters()}


def nbytes_of(*modules: nn.Module) -> int:
    """Bytes of all tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.nbytes for module in modules for t in module.parameters()}
    return sum(storages.values())


def test_equal_weights_are_held_once() -> None:
    weight = nested_weight()
    target, draft = shard_of(weight), shard_of(weight)
    assert addresses(draft) == addresses(target)
    assert (target.shared_nbytes, draft.shared_nbytes) == (0, weight.nbytes)
    assert nbytes_of(target, draft) == weight.nbytes


@pytest.mark.parametrize("ops", [WeightTransforms(), ROTATED], ids=["plain", "rotated"])
def test_a_level_is_a_part_of_its_target(ops: WeightTransforms) -> None:
    weight = nested_weight(ops)
    target, draft = shard_of(weight), shard_of(weight, level=4)
    assert nbytes_of(target, draft) == nbytes_of(target) == weight.nbytes
    lower = levels.view(weight, 4)
    assert lower.stored.format == "int" and draft.shared_nbytes == lower.nbytes < weight.nbytes
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(draft(x), x @ formats.decode(lower, torch.float32).T, rtol=1e-4, atol=1e-3)
    assert torch.allclose(target(x), x @ formats.decode(weight, torch.float32).T, rtol=1e-4, atol=1e-3)


def test_a_level_of_lattice_points() -> None:
    stored = Stored("e8p", e8p.Params(4, True))
    weight = PackedWeight(stored, random_parts(stored, SHAPE), SHAPE)
    target, draft = shard_of(weight), shard_of(weight, level=2)
    assert nbytes_of(target, draft) == weight.nbytes
    assert set(addresses(draft).items()) < set(addresses(target).items())


def test_ranks_share_their_own_parts() -> None:
    """Each cut is a copy of some rows; the draft's are the target's of the same rank, and no other's."""
    weight = nested_weight()
    regions = [Region.of_rows(SHAPE, rows) for rows in (range(16), range(16, 48))]
    targets = [shard_of(weight, region) for region in regions]
    drafts = [shard_of(weight, region, 4) for region in regions]
    assert nbytes_of(*targets, *drafts) == weight.nbytes
    for target, draft in zip(targets, drafts, strict=True):
        assert set(addresses(draft).items()) < set(addresses(target).items())


def test_a_level_alone_takes_its_own_tensors_only() -> None:
    weight = nested_weight()
    draft = shard_of(weight, level=4)
    assert nbytes_of(draft) == levels.view(weight, 4).nbytes and draft.shared_nbytes == 0
    missing = LinearShard("a.b", weight.stored, WHOLE, torch.float32, 4)
    for key in levels.view(weight, 4).tensors:
        missing.load(key, weight.tensors[key], "cpu")
    missing.check()  # what belongs to higher levels alone may be missing


@pytest.mark.parametrize("change", ["bits", "name", "region", "type"])
def test_what_differs_is_not_shared(change: str) -> None:
    weight = nested_weight()
    target = shard_of(weight)
    other = {key: tensor.clone() for key, tensor in weight.tensors.items()}
    if change == "bits":
        for tensor in other.values():
            tensor.view(-1).view(torch.uint8)[-1] ^= 1
    if change == "type":
        other = {key: tensor.clone() for key, tensor in nested_weight(ROTATED).tensors.items()}
    stored = nested_weight(ROTATED).stored if change == "type" else weight.stored
    region = Region.of_rows(SHAPE, range(1, 48)) if change == "region" else WHOLE
    draft = shard_of(PackedWeight(stored, other, SHAPE), region, name="c" if change == "name" else "a.b")
    shared = set(addresses(draft).values()) & set(addresses(target).values())
    assert bool(shared) == (change == "type")  # the matrix is the same, the signs around it are not there


def test_a_target_that_has_gone_is_not_held() -> None:
    weight = nested_weight()
    target = shard_of(weight)
    del target
    gc.collect()
    draft = shard_of(weight, level=4)
    assert draft.shared_nbytes == 0 and len(sharing._FIRST) == 1


def table_of(tensors: dict[str, Tensor], candidates: dict[str, Stored], level: int | None = None) -> TableShard:
    table = TableShard("embed", candidates, SHAPE, range(8, 48), torch.float32, level)
    for key, tensor in tensors.items():
        table.load(key, tensor, "cpu")
    table.finish()
    return table


def test_tables_are_shared() -> None:
    weight = nested_weight()
    target, draft = (table_of(weight.tensors, {"embed": weight.stored}, level) for level in (None, 4))
    assert draft.shared_nbytes == nbytes_of(draft) and nbytes_of(target, draft) == nbytes_of(target)
    lower = formats.decode(levels.view(weight, 4), torch.float32)
    assert torch.allclose(draft.look_up(torch.arange(40)), lower[8:])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(draft.project(x, 40), x @ lower[8:].T, atol=1e-3)


def test_plain_tables_are_shared() -> None:
    rows = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    target, draft = (table_of({"weight": rows}, {}) for _ in range(2))
    assert addresses(draft) == addresses(target) and draft.shared_nbytes == 40 * 64 * 4


def test_a_line_says_how_much() -> None:
    weight, totals = nested_weight(), Totals()
    shards = [shard_of(weight), shard_of(weight, level=4)]
    totals.waiting = 1
    lines = totals.finish(shards[1:])
    assert lines[1] == "0.0 MiB of them are tensors of the model that was loaded before"
    assert totals.shared == totals.nbytes == levels.view(weight, 4).nbytes
