"""Norms of BERT whose output is the residual stream: found, shifted exactly, and only where rounding gains by it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, RobertaPreLayerNormConfig, RobertaPreLayerNormModel

from compress.model.blockwise import BlockArgs, BlockInputs
from compress.model.graph import Site
from compress.papers.transform import outlier_suppression, stream_shift
from compress.papers.transform.outlier_suppression import Config
from compress.quant import rtn
from compress.types import Activations, Scheme
from helpers.blocks import difference, outputs, rounded_outputs
from helpers.problems import random

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
VALUES = Site("attention.self.value", False, ("attention.output.dense",), "attention.output.dense", 1, 16)
QKV = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
PRE = [
    Site("attention.LayerNorm", True, QKV, "attention"),
    VALUES,
    Site("intermediate.LayerNorm", True, ("intermediate.dense",), "intermediate.dense"),
]


def encoder_block(post_norm: bool) -> tuple[nn.Module, BlockInputs]:
    """Return the first block of a random encoder, with biases and gains that are not zero and one, and its batches."""
    torch.manual_seed(0)
    kinds = (BertConfig, BertModel) if post_norm else (RobertaPreLayerNormConfig, RobertaPreLayerNormModel)
    model = kinds[1](kinds[0](**SIZES)).eval()
    block, taken = model.encoder.layer[0], list[tuple[Tensor, BlockArgs]]()
    for name, parameter in block.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * random(*parameter.shape, seed=len(name))
        elif "attention" not in name:
            parameter.data *= 8  # what the linears add is not small beside the stream
    handle = block.register_forward_pre_hook(
        lambda _, args, kwargs: taken.append((args[0].clone(), BlockArgs(args[1:], kwargs))), with_kwargs=True
    )
    tokens = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in tokens.split(2):
            model(part)
    handle.remove()
    return block, lambda: iter(taken)


def schemes(block: nn.Module, bits: int = 6) -> dict[str, Scheme]:
    linears = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    return dict.fromkeys(linears, Scheme("rtn", rtn.Config(bits, -1), activations=Activations(bits)))


def off_middle(block: nn.Module, norm: str) -> None:
    """Move ten channels of a norm far off their middle."""
    block.get_submodule(norm).get_parameter("bias").data[:10] += 30 * random(10).sign()


def test_the_norm_behind_attention_is_found_with_its_reader_and_writer() -> None:
    block, batches = encoder_block(post_norm=True)
    before = {name: p.clone() for name, p in block.named_parameters()}
    (found,) = stream_shift.find_stream_sites(block, [VALUES], batches)
    assert found.site[:3] == ("attention.output.LayerNorm", True, ("intermediate.dense",))
    assert found.writer == "output.dense"
    assert all(torch.equal(p, before[name]) for name, p in block.named_parameters())


def test_norms_in_front_of_linears_are_sites_of_their_own() -> None:
    """Their output goes nowhere else: what is found there is known before, or has no writer."""
    block, batches = encoder_block(post_norm=False)
    assert stream_shift.find_stream_sites(block, PRE, batches) == []
    assert stream_shift.find_stream_sites(block, [], batches) == []


def test_a_shift_of_the_stream_is_exact() -> None:
    block, batches = encoder_block(post_norm=True)
    exact = outputs(block, batches)
    (found,) = stream_shift.find_stream_sites(block, [VALUES], batches)
    assert stream_shift.fold_shift(block, found, 3 * random(64).double())
    assert difference(outputs(block, batches), exact) < 1e-11
    assert not stream_shift.fold_shift(block, found, torch.full((64,), 1e300, dtype=torch.float64))
    assert difference(outputs(block, batches), exact) < 1e-11


@pytest.mark.parametrize("post_norm", [True, False])
def test_the_function_stays_and_rounding_costs_less(post_norm: bool) -> None:
    block, batches = encoder_block(post_norm)
    sites = [VALUES] if post_norm else PRE
    off_middle(block, "attention.output.LayerNorm" if post_norm else "intermediate.LayerNorm")
    exact, rounded = outputs(block, batches), schemes(block)
    before = difference(rounded_outputs(block, batches, rounded), exact)
    notes = outlier_suppression.apply(block, sites, batches, Config(thresholds=6), rounded)
    assert difference(outputs(block, batches), exact) < 1e-9
    assert difference(rounded_outputs(block, batches, rounded), exact) < 0.7 * before
    told = "shifted without a scale, since they give the residual stream: attention.output.LayerNorm"
    assert (told in notes) == post_norm
    assert ("1 of them shifted" in notes[0] or "2 of them shifted" in notes[0]) != post_norm


def test_nothing_is_shifted_where_the_recipe_says_so() -> None:
    block, batches = encoder_block(post_norm=True)
    off_middle(block, "attention.output.LayerNorm")
    notes = outlier_suppression.apply(block, [VALUES], batches, Config(thresholds=2, shift=False), schemes(block))
    assert not any("residual stream" in note for note in notes)


def test_results_do_not_depend_on_batches() -> None:
    biases = []
    for split in (False, True):
        block, batches = encoder_block(post_norm=True)
        off_middle(block, "attention.output.LayerNorm")
        if split:
            parts = [(hidden[i : i + 1], call) for hidden, call in batches() for i in range(len(hidden))]
            batches = partial(iter, parts)
        outlier_suppression.apply(block, [VALUES], batches, Config(thresholds=2), schemes(block))
        biases.append(block.get_submodule("attention.output.LayerNorm").get_parameter("bias").clone())
    torch.testing.assert_close(*biases)
