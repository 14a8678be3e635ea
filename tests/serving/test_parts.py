"""What ranks compute of a linear or a table adds up to the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress import formats
from compress.errors import CheckpointError
from compress.formats import int as int_format
from compress.formats import trellis
from compress.runtime import linear as runtime_linear
from compress.runtime import weight_cache
from compress.serving import parts
from compress.serving.parts import FusedShards, LinearShard, Region, Totals
from compress.serving.tables import TableShard
from compress.types import PackedWeight, Stored, WeightTransforms
from helpers import pico
from helpers.stored import random_parts

SHAPE = (48, 64)


@pytest.fixture(autouse=True)
def cache_as_before() -> Iterator[None]:
    limit = weight_cache.CACHE.limit
    yield
    weight_cache.set_cache_limit(limit)


def packed(shape: tuple[int, int] = SHAPE) -> PackedWeight:
    generator = torch.Generator().manual_seed(shape[0])
    return pico.round_to_nearest(torch.randn(shape, generator=generator), 4, 32)


def part_of(weight: PackedWeight, region: Region) -> LinearShard:
    part = LinearShard("block.linear", weight.stored, region, torch.float32)
    for key, tensor in weight.tensors.items():
        part.load(key, tensor, "cpu")
    part.check()
    return part


def inputs(columns: int) -> Tensor:
    return torch.randn(3, columns, generator=torch.Generator().manual_seed(1))


def test_ranks_that_share_outputs() -> None:
    weight, x = packed(), inputs(64)
    whole = x @ formats.decode(weight, torch.float32).T
    ranks = [part_of(weight, Region.of_rows(SHAPE, rows)) for rows in (range(16), range(16, 48))]
    assert torch.allclose(torch.cat([rank(x) for rank in ranks], -1), whole, atol=1e-5)
    assert sum(t.nbytes for rank in ranks for t in rank.parameters()) == weight.nbytes


@pytest.mark.parametrize("ops", [WeightTransforms(), WeightTransforms(("signs", "hadamard"), ("hadamard", "signs"))])
def test_ranks_that_share_inputs(ops: WeightTransforms) -> None:
    """With a rotation a rank keeps the whole weight; the sum of what they give is right all the same."""
    stored = Stored("int", int_format.params_for(4, 32, True, 64), ops)
    weight = PackedWeight(stored, random_parts(stored, SHAPE), SHAPE)
    x = inputs(64)
    ranks = [part_of(weight, Region(SHAPE, (range(48),), columns)) for columns in (range(32), range(32, 64))]
    total = ranks[0](x[:, :32]) + ranks[1](x[:, 32:])
    assert torch.allclose(total, x @ formats.decode(weight, torch.float32).T, atol=1e-4)
    assert [rank.whole_because for rank in ranks] == ["hadamard mixes all channels" if ops else None] * 2


@pytest.mark.parametrize("ops", [WeightTransforms(), WeightTransforms(("hadamard",))])
def test_parts_of_a_fused_layer(ops: WeightTransforms, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call where nothing lies around the weights, singly where something does: the same bits."""
    stored = Stored("int", int_format.params_for(4, 32, True, 256), ops)
    weights = [PackedWeight(stored, random_parts(stored, (rows, 256)), (rows, 256)) for rows in (96, 160)]
    own = FusedShards(part_of(weight, Region.of_rows(weight.shape, range(weight.shape[0]))) for weight in weights)
    x = inputs(256).bfloat16()
    expected = own(x)
    own.finish()
    calls = []
    product = runtime_linear.FusedLinears.product
    monkeypatch.setattr(runtime_linear.FusedLinears, "product", lambda *args: calls.append(args) or product(*args))
    assert torch.equal(own(x), expected) and len(calls) == (0 if ops else 1)
    assert torch.allclose(own(x.float()), expected.float(), atol=0.1)


@pytest.mark.parametrize("rotated", [False, True])
def test_linears_that_are_stored_below_each_other(rotated: bool) -> None:
    """Rank 1 of two has the second half of q (32 rows), of k (8) and of v (8)."""
    shards = [Region.of_rows((size, 64), range(size // 2, size)) for size in (32, 8, 8)]
    region = parts.join_regions(shards)
    assert region == Region.of_rows(SHAPE, range(16, 32), range(36, 40), range(44, 48))
    ops = WeightTransforms(output=("hadamard",)) if rotated else WeightTransforms()
    stored = Stored("int", int_format.params_for(4, 32, True, 64), ops)
    weight = PackedWeight(stored, random_parts(stored, SHAPE), SHAPE)
    x = inputs(64)
    wanted = (x @ formats.decode(weight, torch.float32).T)[:, [*range(16, 32), *range(36, 40), *range(44, 48)]]
    assert torch.allclose(part_of(weight, region)(x), wanted, atol=1e-4)
    assert parts.join_regions([Region.of_rows((size, 64), range(size)) for size in (32, 8, 8)]).is_whole


def test_a_linear_that_is_not_packed_beside_packed_ones() -> None:
    weight, x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), inputs(64)
    part = LinearShard("block.linear", None, Region(SHAPE, (range(16, 48),), range(64)), torch.float32)
    part.load("weight", weight.double(), "cpu")
    assert torch.equal(part(x), x @ weight[16:].T)
    with pytest.raises(CheckpointError, match=r"block.linear.weight is \[2, 2\], expected \[48, 64\]"):
        part.load("weight", torch.zeros(2, 2), "cpu")


def test_what_is_missing_or_wrong_is_named() -> None:
    weight = packed()
    part = LinearShard("block.linear", weight.stored, Region.of_rows(SHAPE, range(48)), torch.float32)
    part.load("words4", weight.tensors["words4"], "cpu")
    with pytest.raises(CheckpointError, match="block.linear.scales is not in the checkpoint"):
        part.check()
    with pytest.raises(CheckpointError, match="block.linear.zeros is no tensor of this linear; it has words4, scales"):
        part.load("zeros", weight.tensors["scales"], "cpu")
    with pytest.raises(CheckpointError, match="block.linear.scales is float16"):
        part.load("scales", weight.tensors["scales"][:1], "cpu")


def test_placeholders_route_tensors() -> None:
    layer, seen = nn.Module(), []
    weight = packed()
    part = LinearShard("block.linear", weight.stored, Region.of_rows(SHAPE, range(48)), torch.float32)

    def load(param: Any, tensor: Tensor, shard: int) -> None:
        seen.append((param.stored_as, shard))
        part.load(param.stored_as, tensor, param.device)

    parts.add_placeholders(layer, [part.specs], load, "w2_")
    for name, parameter in layer.named_parameters():
        assert parameter.numel() == 0
        parameter.weight_loader(parameter, weight.tensors[name.removeprefix("w2_")], 7)  # type: ignore[attr-defined]
    part.check()
    assert seen == [("words4", 7), ("scales", 7)]
    parts.remove_placeholders(layer)
    assert list(layer.parameters()) == []


def test_totals_are_said_with_the_last_layer_and_the_cache_grows_no_more() -> None:
    totals, weight = Totals(), packed()
    part = part_of(weight, Region.of_rows(SHAPE, range(48)))
    totals.waiting = 2
    weight_cache.set_cache_limit(0)
    parts.warm(parts.linears_of([part]), torch.float32)  # no kernel multiplies float32: it is decoded now
    assert weight_cache.CACHE.nbytes == 48 * 64 * 4
    assert totals.finish([part]) == []
    said = totals.finish([])
    assert said[0].startswith("1 packed weights, 0.0 MiB") and "kept decoded" in said[-1]
    assert weight_cache.CACHE.limit == weight_cache.CACHE.nbytes
    totals.add(3 << 20, "hadamard mixes all channels")
    assert "3.0 MiB of them are whole on every rank: hadamard mixes all channels" in totals.lines()


def table_of(candidates: dict[str, Stored], tensors: dict[str, Tensor], rows: range) -> TableShard:
    table = TableShard("the token embeddings", candidates, SHAPE, rows, torch.float32)
    for key, tensor in {**tensors, "like": torch.empty(0)}.items():
        table.load(key, tensor, "cpu")
    table.finish()
    return table


def test_ranks_share_a_table() -> None:
    weight, x = packed(), inputs(64)
    decoded = formats.decode(weight, torch.float32)
    tables = [table_of({"embed": weight.stored}, weight.tensors, rows) for rows in (range(20), range(20, 48))]
    assert torch.equal(tables[1].look_up(torch.tensor([[0, 27]])), decoded[[20, 47]][None])
    logits = [table.project(x, 28) for table in tables]
    assert torch.allclose(logits[1], x @ decoded[20:].T, atol=1e-5)
    assert logits[0].shape == (3, 28) and not logits[0][:, 20:].any()


def test_a_head_that_cannot_be_cut_is_whole_on_every_rank() -> None:
    stored, x = Stored("trellis", trellis.Params(2, 8, 16)), inputs(64)
    tensors = random_parts(stored, SHAPE)
    decoded = formats.decode(PackedWeight(stored, tensors, SHAPE), torch.float32)
    table = table_of({"lm_head": stored}, tensors, range(20, 48))
    assert table.whole_because == "rows 20 to 48 are not whole tiles of 16 rows" and table.embedding is None
    assert torch.allclose(table.project(x, 32)[:, :28], x @ decoded[20:].T, atol=1e-5)


def test_a_table_shows_what_it_is_by_what_comes() -> None:
    """Of an embedding without a name either table of the checkpoint may come, or one that is not packed."""
    embed, head = packed(), pico.round_to_nearest(torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)), 8, -1)
    other = Stored("int", head.params, WeightTransforms(("head_mix/7",)))  # of some other module: impossible here
    candidates = {"projector": other, "lm_head": head.stored, "embed": embed.stored}
    table = table_of(candidates, embed.tensors, range(48))
    assert torch.equal(table.look_up(torch.arange(48)), formats.decode(embed, torch.float32))
    plain = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))
    found = table_of(candidates, {"weight": plain}, range(16, 48))
    assert found.plain is not None and found.head is None and torch.equal(found.plain, plain[16:])


def test_what_a_table_lacks_is_named() -> None:
    weight = packed()
    with pytest.raises(CheckpointError, match="model.embed.scales is missing"):
        table_of({"model.embed": weight.stored}, {"words4": weight.tensors["words4"]}, range(48))
    with pytest.raises(CheckpointError, match="the token embeddings.weight is not in the checkpoint"):
        table_of({}, {}, range(48))
