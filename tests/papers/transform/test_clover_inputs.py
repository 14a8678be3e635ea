"""CLOVER by inputs: inside a head the cut is the optimum of a weighted low-rank product; and an encoder of Whisper."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_qk_pairs import called, parts
from torch import Tensor

from compress.model.blockwise import BlockArgs, BlockInputs, call_block
from compress.model.graph import Attention
from compress.numerics.linalg import truncate_rank
from compress.papers.transform import clover, qk_pairs
from helpers import problems, two_stacks


def repeat(hidden: Tensor, call: BlockArgs) -> BlockInputs:
    """Return what gives one batch at every call."""
    return lambda: iter([(hidden, call)])


def test_by_inputs_a_head_is_cut_as_well_as_any_product_of_that_rank() -> None:
    """Values and outputs have the same product, and what is lost is the optimum of a weighted low-rank product."""
    values, outputs = problems.random(6, 20).double(), problems.random(1, 10, 6, seed=1).double()
    mixed = problems.random(50, 6, seed=2).double() * torch.tensor([3.0, 1.0, 0.1, 2.0, 0.5, 1.0], dtype=torch.float64)
    moments = mixed.T @ mixed / 50
    pair = clover.decompose_product(values, outputs, moments)
    torch.testing.assert_close(pair.outputs[0] @ pair.values, outputs[0] @ values)
    turned = torch.linalg.lstsq(values.T, pair.values.T).solution.T  # the new channels in the old ones
    for rank in range(1, 6):
        cut = pair.outputs[0].clone()
        cut[:, rank:] = 0
        error = outputs[0] - cut @ turned
        loss = (error @ moments * error).sum().item()
        best = truncate_rank(outputs[0].float(), moments.float(), rank).losses[rank].item()
        assert loss == pytest.approx(best, rel=1e-3)
        assert loss == pytest.approx(pair.sizes[rank:].square().sum().item(), rel=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_by_inputs_the_block_changes_less(name: str, pico_dir: Callable[..., Path]) -> None:
    """Half of the value channels: the error of the block is smaller than by norms, and batches do not matter."""
    model, found = parts(name, pico_dir(name))
    _, attention = found[0]
    block, hidden, call = called(model, name)
    hidden = hidden * torch.linspace(0.1, 3, hidden.shape[-1])
    original, before = copy.deepcopy(block), call_block(block, call, hidden)[0]
    errors = []
    for batches in (None, repeat(hidden, call)):
        block.load_state_dict(original.state_dict())
        clover.decompose(block, attention, 0.5, batches)
        errors.append((call_block(block, call, hidden)[0] - before).norm().item())
    assert 0 < errors[1] < errors[0]


def test_an_encoder_of_whisper_loses_half_of_its_channels_where_heads_have_half_the_rank() -> None:
    """Without positions in the scores every channel is free, and 46% go with no training and next to no change."""
    encoder: Any = two_stacks.build("whisper").get_encoder()
    hidden = torch.randn(2, 50, encoder.config.d_model, generator=torch.Generator().manual_seed(4))
    call = BlockArgs((), {"attention_mask": None})
    heads, size = encoder.config.encoder_attention_heads, encoder.layers[0].self_attn.head_dim
    for block in encoder.layers:
        for name in ("v_proj", "q_proj"):  # each head reads half as many directions as it has channels
            linear = getattr(block.self_attn, name)
            for rows in (linear.weight.data.view(heads, size, -1), linear.bias.data.view(heads, size, 1)):
                rows[:, size // 2 :] = rows[:, : size // 2]
        before = call_block(block, call, hidden)[0]
        attention = Attention("self_attn.v_proj", "self_attn.out_proj", 0, size, 1, heads, heads, size)
        channels = qk_pairs.find(block, hidden, call)
        assert channels is not None and len(channels.free) == size and not len(channels.pairs)
        values = clover.decompose(block, attention, 0.46, repeat(hidden, call))
        keys = clover.decompose_keys(block, channels, 0.46, repeat(hidden, call))
        assert values.zeroed == round(0.46 * heads * size) <= keys.zeroed and max(values.lost, keys.lost) < 1e-6
        assert _error(call_block(block, call, hidden)[0], before) < 1e-4
        clover.decompose(block, attention, 0.75)
        assert _error(call_block(block, call, hidden)[0], before) > 1e-2


def _error(states: Tensor, expected: Tensor) -> float:
    return ((states - expected).norm() / expected.norm()).item()
