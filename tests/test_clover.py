"""CLOVER: the function stays, channels are ordered and cut by their joint norm; what is cut is not stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import problems
from compress import formats, pipeline, plugins, structure
from compress.checkpoint import open_checkpoint
from compress.errors import UnsupportedModelError
from compress.formats import cut as cut_format
from compress.model import Skeleton
from compress.quant import cut
from compress.recipe import load
from compress.transform import clover
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
    for block, known in zip(model.get_submodule(PREFIX.get(name, "model.layers")), graph.blocks, strict=True):  # type: ignore[arg-type]
        assert known.attention is not None
        found.append((block, known.attention))
    return model, found


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen2", "opt", "phi3", "gemma2", "mixtral"])
def test_at_full_rank_the_logits_are_the_same(name: str, pico_dir: Callable[..., Path]) -> None:
    model, found = parts(name, pico_dir(name))
    before, kept = logits(model), {key: value.clone() for key, value in model.state_dict().items()}
    for block, attention in found:
        assert clover.decompose(block, attention) == (0, 0.0)
    assert (logits(model) - before).abs().max() < 1e-5 * before.abs().max()
    after = model.state_dict()
    for block, attention in found:
        changed = [key for key in block.state_dict() if attention.values in key or attention.output in key]
        assert changed
    assert sum(not torch.equal(after[key], kept[key]) for key in kept) >= 2 * len(found)


def test_channels_are_those_of_the_product() -> None:
    values, outputs = problems.random(6, 20).double(), problems.random(3, 10, 6, seed=1).double()
    pair = clover.decomposed(values, outputs)
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
    rows = torch.cat([clover._rows(attention, head) for head in range(attention.key_value_heads)])
    original = block.get_submodule(attention.values).get_parameter("weight").detach().clone()
    count, lost = clover.decompose(block, attention, 0.25)
    assert count == round(0.25 * attention.key_value_heads * attention.head_dim) and 0 < lost < 0.25
    weight = block.get_submodule(attention.values).get_parameter("weight").detach()
    columns = block.get_submodule(attention.output).get_parameter("weight").detach()
    assert int((weight[rows] == 0).all(1).sum()) == count
    assert int((columns == 0).all(0).sum()) == count * attention.heads // attention.key_value_heads
    others = torch.ones(len(weight), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(weight[others], original[others])  # queries and keys in the same linear
    again, nothing = clover.decompose(block, attention, 0.25)
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
    count, lost = clover.decompose(block, attention, 0.5)
    error = (products() - before).square().sum()
    torch.testing.assert_close(error, sizes[:count].square().sum(), rtol=1e-4, atol=0)
    assert lost == pytest.approx((error / before.square().sum()).item(), rel=1e-4)


def test_attention_that_cannot_be_followed_is_one_clear_line() -> None:
    with pytest.raises(UnsupportedModelError, match="use a recipe without clover"):
        clover.apply(nn.Module(), structure.Sites([], None), lambda: [], clover.Config(), {})


# ---------------------------------------------------------------- what is cut


@pytest.mark.parametrize(("rows", "columns"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.25), (0.3, 0.7), (0.01, 0.01)])
def test_the_largest_rows_and_columns_are_kept(rows: float, columns: float) -> None:
    weight = problems.random(20, 32)
    packed = cut.quantize(weight, None, cut.Config(rows, columns, "float32")).weight
    found = formats.decode(packed, torch.float32)
    kept = [max(1, round(20 * rows)), max(1, round(32 * columns))]
    masks = [(found != 0).any(1), (found != 0).any(0)]
    assert [int(mask.sum()) for mask in masks] == kept == [packed.params.rows, packed.params.columns]
    assert torch.equal(found, weight * masks[0][:, None] * masks[1])
    sizes = weight.norm(dim=1)
    assert kept[0] == 20 or sizes[masks[0]].min() >= sizes[~masks[0]].max()
    assert packed.nbytes == 4 * (kept[0] * kept[1] + sum(k for k, n in zip(kept, (20, 32), strict=True) if k < n))
    assert found.data_ptr() != packed.tensors["weight"].data_ptr()


def test_zeros_are_what_is_left_out() -> None:
    weight = problems.random(20, 32)
    weight[3:13] = 0
    result = cut.quantize(weight, None, cut.Config(0.5, 1.0, "float32"))
    assert torch.equal(formats.decode(result.weight, torch.float32), weight) and not result.notes
    assert "of the squared norm is left out" in cut.quantize(weight, None, cut.Config(0.25)).notes[0]
    with pytest.raises(ValueError, match="rows 0 and columns"):
        cut.Config(0)
    with pytest.raises(ValueError, match="of a weight that is 3 x 4"):
        cut_format.specs(cut_format.Params(4, 4), (3, 4))


def test_the_recipe_from_end_to_end(tmp_path: Path) -> None:
    assert "clover" in plugins.names("transform")
    model = save_pico("llama", tmp_path / "model")
    out = tmp_path / "out"
    pipeline.quantize(job(model, Setup("clover50", ("quantize.dtype=float32",)), out))
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
