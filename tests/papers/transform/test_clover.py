"""CLOVER: the function stays, channels are ordered and cut by their joint norm; what is cut is not stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import problems
from compress import api, plugins
from compress.errors import UnsupportedModelError
from compress.model import graph as structure
from compress.model.blockwise import BlockArgs
from compress.model.skeleton import Skeleton
from compress.papers.transform import clover, qk_pairs
from compress.recipe import load
from compress.storage.checkpoint import open_checkpoint
from compress.transform.bases import value_rows
from pico import PICO, save_pico
from runs import Setup, job, report_of

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


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen2", "opt", "phi3", "gemma2", "mixtral"])
def test_at_full_rank_the_logits_are_the_same(name: str, pico_dir: Callable[..., Path]) -> None:
    model, found = parts(name, pico_dir(name))
    before, kept = logits(model), {key: value.clone() for key, value in model.state_dict().items()}
    for block, attention in found:
        assert clover.decompose(block, attention)[:2] == (0, 0.0)
    assert (logits(model) - before).abs().max() < 1e-5 * before.abs().max()
    after = model.state_dict()
    for block, attention in found:
        changed = [key for key in block.state_dict() if attention.values in key or attention.output in key]
        assert changed
    assert sum(not torch.equal(after[key], kept[key]) for key in kept) >= 2 * len(found)


def test_channels_are_those_of_the_product() -> None:
    values, outputs = problems.random(6, 20).double(), problems.random(3, 10, 6, seed=1).double()
    pair = clover.decompose_product(values, outputs)
    product = outputs.reshape(30, 6) @ values
    torch.testing.assert_close(pair.outputs.reshape(30, 6) @ pair.values, product)
    expected = torch.linalg.svdvals(product)[:6]
    torch.testing.assert_close(pair.sizes, expected)
    torch.testing.assert_close(pair.values.norm(dim=1), expected.sqrt())
    torch.testing.assert_close(pair.outputs.reshape(30, 6).norm(dim=0), expected.sqrt())


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_the_least_channels_of_a_block_become_zero(name: str, pico_dir: Callable[..., Path]) -> None:
    _, found = parts(name, pico_dir(name))
    block, attention = found[0]
    rows = value_rows(attention).flatten()
    original = block.get_submodule(attention.values).get_parameter("weight").detach().clone()
    count, lost, _ = clover.decompose(block, attention, 0.25)
    assert count == round(0.25 * attention.key_value_heads * attention.head_dim) and 0 < lost < 0.25
    weight = block.get_submodule(attention.values).get_parameter("weight").detach()
    columns = block.get_submodule(attention.output).get_parameter("weight").detach()
    assert int((weight[rows] == 0).all(1).sum()) == count
    assert int((columns == 0).all(0).sum()) == count * attention.heads // attention.key_value_heads
    others = torch.ones(len(weight), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(weight[others], original[others])  # queries and keys in the same linear
    again, nothing, _ = clover.decompose(block, attention, 0.25)
    assert again == count and nothing < 1e-9


def test_pruning_is_the_best_for_the_product(pico_dir: Callable[..., Path]) -> None:
    """What is lost of all O V is the sum of the squares of the smallest singular values."""
    _, found = parts("llama", pico_dir("llama"))
    block, attention = found[0]
    values, output = (block.get_submodule(n).get_parameter("weight") for n in (attention.values, attention.output))

    def products() -> Tensor:
        v = values.detach().double().view(2, 1, 16, 64)
        o = output.detach().double().view(64, 2, 2, 16).permute(1, 2, 0, 3)
        return (o @ v).flatten(1, 2)

    before = products()
    sizes = torch.linalg.svdvals(before)[:, :16].flatten().sort().values
    count, lost, _ = clover.decompose(block, attention, 0.5)
    error = (products() - before).square().sum()
    torch.testing.assert_close(error, sizes[:count].square().sum(), rtol=1e-4, atol=0)
    assert lost == pytest.approx((error / before.square().sum()).item(), rel=1e-4)


def test_attention_that_cannot_be_followed_is_one_clear_line() -> None:
    with pytest.raises(UnsupportedModelError, match="use a recipe without clover"):
        clover.apply(nn.Module(), structure.Sites([], None), lambda: [], clover.Config(), {})


# ---------------------------------------------------------------- queries and keys


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


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "opt"])
def test_channels_that_matter_least_on_the_inputs(name: str) -> None:
    """Against mean squares of what the linears of the decomposed block give, taken by hand."""
    block, hidden, call = called(PICO[name](), name)
    found = qk_pairs.find(block, hidden, call)
    assert found is not None
    clover.decompose_keys(block, found)
    given: dict[str, Tensor] = {}
    hooks = [
        block.get_submodule(heads.name).register_forward_hook(
            lambda _, inputs, output, name=heads.name: given.update({name: output.detach().double()})
        )
        for heads in (found.queries, found.keys)
    ]
    block(hidden, *call.args, **call.kwargs)
    for hook in hooks:
        hook.remove()
    sizes = [given[heads.name].square().sum((0, 1))[heads.rows] for heads in (found.queries, found.keys)]
    sizes[0] = sizes[0].unflatten(0, (len(sizes[1]), -1)).sum(1)  # head of the keys, channel
    units = [(head, [channel]) for head in range(len(sizes[1])) for channel in found.free.tolist()]
    units += [(head, pair) for head in range(len(sizes[1])) for pair in found.pairs.tolist()]
    size = {i: sizes[0][h, c].sum() * sizes[1][h, c].sum() / len(c) ** 2 for i, (h, c) in enumerate(units)}
    wanted, expected = round(0.4 * sizes[1].numel()), torch.zeros(sizes[1].shape, dtype=torch.bool)
    for index in sorted(size, key=lambda i: size[i].item()):
        if expected.sum() < wanted:
            expected[units[index][0], units[index][1]] = True
    halves = [(hidden[:1], call), (hidden[1:], call)]
    count, lost, _ = clover.decompose_keys(block, found, 0.4, lambda: halves)
    gone = (rows_of(block, found.keys) == 0).all(-1)
    assert torch.equal(gone, expected) and count == int(gone.sum()) and 0 < lost < 0.4


def test_what_is_left_is_trained(pico_dir: Callable[..., Path]) -> None:
    model, found = parts("llama", pico_dir("llama"))
    block, hidden, call = called(model, "llama")
    attention = found[0][1]
    sites = structure.Sites([], attention)
    wanted = block(hidden, *call.args, **call.kwargs)

    def error(steps: int) -> tuple[float, list[str], dict[str, Tensor]]:
        other = copy.deepcopy(block)
        config = clover.Config(0.5, 0.5, "weights", steps, 0.03)
        notes = clover.apply(other, sites, lambda: [(hidden, call)], config, {})
        return (
            (other(hidden, *call.args, **call.kwargs) - wanted).square().sum().item(),
            list(notes),
            other.state_dict(),
        )

    before, notes, plain = error(0)
    assert notes[0].startswith("16 of 32 value channels are zero") and notes[1].startswith(
        "16 of 32 query-key channels"
    )
    after, more, state = error(30)
    assert after < 0.9 * before and more[:2] == notes and "factors trained for 30 steps" in more[2]
    changed = {key for key, tensor in state.items() if not torch.equal(tensor, plain[key])}
    assert changed == {"self_attn.v_proj.weight", "self_attn.k_proj.weight"}
    zero = {key: (state[key] == 0).all(1) for key in changed}
    assert all(torch.equal(rows, (plain[key] == 0).all(1)) for key, rows in zero.items())
    keys = state["self_attn.k_proj.weight"].unflatten(0, (2, 2, 8)) / plain["self_attn.k_proj.weight"].unflatten(
        0, (2, 2, 8)
    )
    torch.testing.assert_close(keys[:, 0].nan_to_num().amax(-1), keys[:, 1].nan_to_num().amax(-1))  # of a pair


def test_training_that_does_not_help_is_left_out() -> None:
    block, hidden, call = called(PICO["llama"](), "llama")
    before = {"self_attn.v_proj.weight": block.get_parameter("self_attn.v_proj.weight").detach().clone()}
    group = clover.ScaledRows("self_attn.v_proj", torch.arange(32)[:, None])
    note = clover.train(
        block, before, [group], lambda: [(hidden, call)], 2, 1.0
    )  # nothing is wrong that could be mended
    assert note.endswith("no better, so they are left out")
    assert torch.equal(block.get_parameter("self_attn.v_proj.weight"), before["self_attn.v_proj.weight"])


@pytest.mark.parametrize("settings", [{"prune": 1.0}, {"prune_keys": -0.1}, {"train": -1}, {"train_rate": 0.0}])
def test_settings_that_cannot_be(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings)).partition("_r")[0]):
        clover.Config(**settings)  # type: ignore[arg-type]


def test_the_recipe_from_end_to_end(tmp_path: Path) -> None:
    assert "clover" in plugins.names("transform")
    model = save_pico("llama", tmp_path / "model")
    out = tmp_path / "out"
    api.quantize(job(model, Setup("clover50", ("quantize.dtype=float32",)), out))
    report = report_of(out)
    assert {row["name"].rsplit(".", 1)[1] for row in report["layers"]} == {"v_proj", "o_proj"}
    assert all(row["weight_error"] == 0 for row in report["layers"]), "only zeros are cut"
    assert 16 < report["bpw"] < 17  # of 32 bits: half, and the numbers of what is kept
    found = AutoModelForCausalLM.from_pretrained(out)
    plain, known = parts("llama", model)
    for block, attention in known:
        clover.decompose(block, attention, 0.5)
    torch.testing.assert_close(logits(found), logits(plain), rtol=1e-4, atol=1e-4)
    assert load("clover50").rules


def test_queries_and_keys_are_cut_in_a_run(tmp_path: Path) -> None:
    model, out = save_pico("llama", tmp_path / "model"), tmp_path / "out"
    rules = "rules=[{match: ['*.q_proj', '*.k_proj'], rows: 0.75}, {match: '*', keep: true}]"
    settings = ("quantize.dtype=float32", "transform.0.prune=0", "transform.0.prune_keys=0.25", rules)
    api.quantize(job(model, Setup("clover50", settings), out))
    report = report_of(out)
    assert {row["name"].rsplit(".", 1)[1] for row in report["layers"]} == {"q_proj", "k_proj"}
    assert all(row["weight_error"] == 0 for row in report["layers"]), "only zeros are cut"
    assert "8 of 32 query-key channels are zero" in str(report["notes"])
    before, after = (logits(AutoModelForCausalLM.from_pretrained(path)) for path in (model, out))
    assert 0 < (after - before).norm() < before.norm()
