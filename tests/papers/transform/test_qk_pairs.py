"""Channels of queries and keys: where scores come from is seen, and the least channels of CLOVER become zero."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.model import graph as structure
from compress.model.blockwise import BlockArgs
from compress.model.skeleton import Skeleton
from compress.papers.transform import clover, qk_pairs
from compress.storage.checkpoint import open_checkpoint
from helpers import problems
from helpers.pico import PICO

TOKENS = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(2))


PREFIX = {"gpt_neox": "gpt_neox.layers", "opt": "model.decoder.layers"}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def parts(name: str, directory: Path) -> tuple[nn.Module, list[tuple[nn.Module, structure.Attention]]]:
    """A model, its blocks and their attention."""
    model = PICO[name]()
    graph = structure.trace(Skeleton(open_checkpoint(directory)))
    found = []
    for block, known in zip(model.get_submodule(PREFIX.get(name, "model.layers")), graph.blocks, strict=True):
        assert known.attention is not None
        found.append((block, known.attention))
    return model, found


def called(model: nn.Module, name: str) -> tuple[nn.Module, Tensor, BlockArgs]:
    """The first block, and what it receives."""
    block, caught = model.get_submodule(PREFIX.get(name, "model.layers"))[0], []  # type: ignore[index]
    watch = block.register_forward_pre_hook(lambda _, args, kwargs: caught.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    watch.remove()
    args, kwargs = caught[0]
    return block, args[0], BlockArgs(args[1:], kwargs)


@pytest.mark.parametrize(
    ("name", "queries", "keys", "free"),
    [
        ("llama", "self_attn.q_proj", "self_attn.k_proj", 0),
        ("phi3", "self_attn.qkv_proj", "self_attn.qkv_proj", 0),
        ("gpt_neox", "attention.query_key_value", "attention.query_key_value", 12),  # 4 of 16 channels are turned
        ("opt", "self_attn.q_proj", "self_attn.k_proj", 16),
    ],
)
def test_where_scores_come_from(name: str, queries: str, keys: str, free: int) -> None:
    found = qk_pairs.find(*called(PICO[name](), name))
    assert found is not None and (found.queries.name, found.keys.name) == (queries, keys)
    assert len(found.free) == free and len(found.pairs) == (16 - free) // 2
    half = len(found.pairs)
    assert found.pairs.tolist() == [[i, i + half] for i in range(half)]
    rows = {"phi3": 64, "gpt_neox": 16}.get(name, 0)  # of the first key
    assert found.keys.rows[0].tolist() == list(range(rows, rows + 16))
    assert len(found.queries.rows) == 4 and found.queries.rows[0].tolist() == list(range(16))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_norms_of_queries_and_keys_are_seen(name: str) -> None:
    model = PICO[name]()
    block, hidden, call = called(model, name)
    assert qk_pairs.find(block, hidden, call) is None
    attention = structure.Attention("self_attn.v_proj", "self_attn.o_proj", 0, 16, 1, 2, 4, 16)
    with pytest.raises(UnsupportedModelError, match="leave out prune_keys"):
        sites = structure.Sites([], attention)
        clover.apply(block, sites, lambda: [(hidden, call)], clover.Config(prune_keys=0.5), {})


def test_pairs_of_neighbours_are_seen() -> None:
    given = [problems.random(3, 1, 8, seed=seed) for seed in range(4)]
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.3, 0.01])
    turn = torch.polar(torch.ones_like(angles), angles)  # token, pair

    def arrived(x: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x[..., 2:].unflatten(-1, (3, 2)).contiguous()) * turn)
        return torch.cat((x[..., :2].expand(-1, 5, -1), turned.flatten(-2)), -1)

    found = qk_pairs._split([(x, arrived(x)) for x in given])
    assert found is not None
    assert found[0].tolist() == [0, 1] and found[1].tolist() == [[2, 3], [4, 5], [6, 7]]
    assert qk_pairs._split([(x, arrived(x) * x.sign()) for x in given]) is None


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen2", "opt", "phi3", "gemma2", "mixtral"])
def test_at_full_rank_scores_are_the_same(name: str) -> None:
    model = PICO[name]()
    before = logits(model)
    block, hidden, call = called(model, name)
    found = qk_pairs.find(block, hidden, call)
    assert found is not None
    original = rows_of(block, found.keys)
    assert clover.decompose_keys(block, found)[:2] == (0, 0.0)
    assert (logits(model) - before).abs().max() < 1e-5 * before.abs().max()
    keys, queries = rows_of(block, found.keys), rows_of(block, found.queries)  # head, channel, input
    assert not torch.allclose(keys, original, atol=1e-3)
    repeats = len(queries) // len(keys)
    sizes = [part.unflatten(0, (len(keys), -1)).square().sum((1, 3)) for part in (queries, keys)]  # head, channel
    if len(found.free):
        torch.testing.assert_close(sizes[0][:, found.free], sizes[1][:, found.free], rtol=1e-4, atol=0)
    first, second = (keys[:, found.pairs[:, side]] for side in (0, 1))
    assert (first * second).sum(-1).abs().max() < 1e-4 if len(found.pairs) else repeats
    assert (first.norm(dim=-1) >= second.norm(dim=-1)).all()


def rows_of(block: nn.Module, heads: qk_pairs.Heads) -> Tensor:
    linear = block.get_submodule(heads.name)
    part = linear.get_parameter("weight").detach()[heads.rows]
    bias = getattr(linear, "bias", None)
    return part if bias is None else torch.cat((part, bias.detach()[heads.rows][..., None]), -1)


def naive_sizes(queries: Tensor, keys: Tensor, found: qk_pairs.ScoreChannels) -> list[tuple[int, list[int], float]]:
    """Head, channels, mean squared score of unit-normal inputs per channel, for what goes together in `queries`
    [heads, head_dim, n] and `keys`, by the full matrix of each angle."""
    units = []
    group = len(queries) // len(keys)
    for head, key in enumerate(keys.double()):
        mine = queries[head * group : (head + 1) * group].double()
        for channel in found.free.tolist():
            matrices = [q[channel][:, None] * key[channel] for q in mine]
            units.append((head, [channel], sum(m.square().sum().item() for m in matrices)))
        for a, b in found.pairs.tolist():
            squares = []
            for angle in torch.arange(16) * torch.pi / 8:
                c, s = angle.cos().item(), angle.sin().item()
                turned = torch.stack((c * key[a] - s * key[b], s * key[a] + c * key[b]))
                squares.append(sum((q[[a, b]].T @ turned).square().sum().item() for q in mine))
            units.append((head, [a, b], sum(squares) / len(squares) / 2))
    return units


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_the_least_query_key_channels_become_zero(name: str) -> None:
    block, hidden, call = called(PICO[name](), name)
    found = qk_pairs.find(block, hidden, call)
    assert found is not None
    clover.decompose_keys(block, found)
    keys, queries = rows_of(block, found.keys), rows_of(block, found.queries)
    units = naive_sizes(queries, keys, found)
    count, lost, groups = clover.decompose_keys(block, found, 0.3)
    wanted = round(0.3 * found.keys.rows.numel())
    assert wanted <= count <= wanted + 1
    gone = (rows_of(block, found.keys) == 0).all(-1)
    assert int(gone.sum()) == count
    expected, total = torch.zeros_like(gone), 0.0
    for head, channels, square in sorted(units, key=lambda unit: unit[2]):
        if expected.sum() < wanted:
            expected[head, channels] = True
            total += square * len(channels)
    assert torch.equal(gone, expected)
    assert lost == pytest.approx(total / sum(square * len(channels) for _, channels, square in units), rel=1e-3)
    repeats = len(queries) // len(keys)
    assert torch.equal((rows_of(block, found.queries) == 0).all(-1), gone.repeat_interleave(repeats, 0))
    assert sum(group.rows.numel() for group in groups) == gone.numel() - count
