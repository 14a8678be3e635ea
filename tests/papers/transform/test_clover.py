"""CLOVER: the function stays, channels are ordered and cut by their joint norm; what is cut is not stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_qk_pairs import called, logits, parts, rows_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress import api, plugins
from compress.errors import RecipeError, UnsupportedModelError
from compress.model import graph as structure
from compress.papers.transform import clover, qk_pairs
from compress.recipe import load
from compress.transform.bases import value_rows
from helpers import problems
from helpers.pico import PICO, save_pico
from helpers.runs import Setup, job, report_of


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


def test_what_is_left_is_trained(pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clover, "TRAIN_RATE", 0.03)  # few steps
    model, found = parts("llama", pico_dir("llama"))
    block, hidden, call = called(model, "llama")
    attention = found[0][1]
    sites = structure.Sites([], attention)
    wanted = block(hidden, *call.args, **call.kwargs)

    def error(steps: int) -> tuple[float, list[str], dict[str, Tensor]]:
        other = copy.deepcopy(block)
        config = clover.Config(0.5, 0.5, "weights", steps)
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


@pytest.mark.parametrize("settings", [{"prune": 1.0}, {"prune_keys": -0.1}, {"train": -1}])
def test_settings_that_cannot_be(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        clover.Config(**settings)  # type: ignore[arg-type]


def test_recipes_that_name_the_rate_of_training_work_at_its_value() -> None:
    assert load("clover50", ["transform=[{method: clover, train_rate: 0.01}]"]).transform[0].config == clover.Config()
    with pytest.raises(RecipeError, match=r"train_rate was taken away and is always 0\.01; remove the key"):
        load("clover50", ["transform=[{method: clover, train_rate: 0.1}]"])


def test_the_recipe_from_end_to_end(tmp_path: Path) -> None:
    assert "clover" in plugins.names("transform")
    model = save_pico("llama", tmp_path / "model")
    out = tmp_path / "out"
    weights = "transform=[{method: clover, prune: 0.5, measure: weights}]"
    api.quantize(job(model, Setup("clover50", ("quantize.dtype=float32", "calibration.num_samples=2", weights)), out))
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
