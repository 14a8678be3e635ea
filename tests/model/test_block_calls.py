"""What goes from block to block beside hidden states: by sample, by side, and what is found of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.errors import UnsupportedModelError
from compress.model import block_calls, blockwise
from compress.model.block_calls import BlockArgs, leaves, replace_in_tree
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import of_type

CPU = torch.device("cpu")
TOKENS = torch.arange(5 * 24).reshape(5, 24) % 200 + 3
MODELS = {
    "gemma3n_text": {  # four-dimensional states, inputs of each layer, keys and values of earlier layers
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "num_key_value_heads": 2, "head_dim": 16},
        **{"intermediate_size": 96, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 264},
        **{"laurel_rank": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16},
        **{"activation_sparsity_pattern": [0.0] * 4},
    },
    "bamba": {  # two outputs
        **{"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
        **{"intermediate_size": 96, "num_key_value_heads": 2, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    },
    "llama": {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96},
}


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("model_type", MODELS)
def test_blocks_one_by_one_give_what_the_model_gives(model_type: str, batch: int, tmp_path: Path) -> None:
    """In batches of any size, also where a block reads what belongs to the sample, or what another block left."""
    model = of_type(model_type, MODELS[model_type])
    model.save_pretrained(tmp_path)
    skeleton = Skeleton(open_checkpoint(tmp_path))
    stream = blockwise.HiddenStates(len(TOKENS), tmp_path / "stream")
    calls = blockwise.record_inputs(skeleton, TOKENS, batch, stream, CPU)
    seen: list[torch.Tensor] = []
    last = model.get_submodule(skeleton.blocks_name)[-1]
    last.register_forward_hook(lambda _, inputs, output: seen.append(blockwise.states_of(output)))
    with torch.no_grad():
        model(TOKENS)
    for index in range(len(skeleton.blocks)):
        blockwise.propagate(skeleton, index, calls, stream, batch, CPU, (0, 0))
    torch.testing.assert_close(
        stream.read(0, len(TOKENS)), seen[0].movedim(calls.layout.batch_dim, 0), rtol=1e-4, atol=1e-4
    )
    stream.close()
    assert not list(tmp_path.glob("stream*"))


def test_a_single_block_does_without_what_others_leave_or_says_so(tmp_path: Path) -> None:
    of_type("gemma3n_text", MODELS["gemma3n_text"]).save_pretrained(tmp_path)
    skeleton = Skeleton(open_checkpoint(tmp_path))
    calls = blockwise.record_inputs(skeleton, TOKENS, 5, blockwise.HiddenStates(5, None), CPU)
    with pytest.raises(UnsupportedModelError, match="differ between samples or come from other blocks"):
        _ = calls[0]
    with pytest.raises(UnsupportedModelError, match="come from other blocks"):
        _ = blockwise.AloneDict()["sliding_attention"]


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"a": (1, [2, {"b": 3}]), "c": {}}
    assert dict(leaves(tree)) == {("a", 0): 1, ("a", 1, 0): 2, ("a", 1, 1, "b"): 3, ("c",): {}}
    assert replace_in_tree(tree, {("a", 1, 1, "b"): 4}) == {"a": (1, [2, {"b": 4}]), "c": {}}
    call = BlockArgs((1, None), {"mask": 2})
    assert call.changed({("args", 1): 5, ("kwargs", "mask"): 6}) == BlockArgs((1, 5), {"mask": 6})


class Three(nn.Module):
    """A model whose blocks give a tensor, or as many outputs as it is told to take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.blocks = width, nn.ModuleList(nn.Identity() for _ in range(3))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        hidden, chosen = torch.stack([input_ids, input_ids], -1).float(), None
        for block in self.blocks:
            if self.width == 2:
                hidden, chosen = block(hidden, chosen=chosen)
            elif self.width == 1:
                hidden = block(hidden)[0]
            else:
                hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("width", [0, 1, 2])
def test_the_number_of_outputs_is_found(width: int) -> None:
    model = Three(width)
    recorded = block_calls.record(model, model.blocks, TOKENS[:2])
    assert recorded.hidden[0].shape == (2, 24, 2) and len(recorded.calls) == 3
    found = block_calls.layout(model, model.blocks, TOKENS[:2])
    place = ("kwargs", "chosen")
    assert found.batch_dim == 0 and found.passed == ({(1, place): 1, (2, place): 1} if width == 2 else {})


def test_a_block_whose_own_code_fails_is_refused_in_one_line() -> None:
    """As some blocks of transformers do in 16 bits."""

    class Mixed(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden @ torch.eye(4)

    call = BlockArgs((), {})
    with pytest.raises(
        UnsupportedModelError, match=r"Mixed \(blocks\.3\) fails on hidden states \[1, 2, 4\] of bfloat16"
    ):
        blockwise.run_block(Mixed(), call, torch.ones(1, 2, 4, dtype=torch.bfloat16), "blocks.3")


def test_a_block_that_gives_a_list_is_read_like_one_that_gives_a_tuple() -> None:
    hidden = torch.ones(1, 2, 4)
    states, beside = blockwise.call_block(lambda x: [x + 1, "rest"], BlockArgs((), {}), hidden)
    assert torch.equal(states, hidden + 1) and beside == ("rest",)


def test_what_all_samples_share_at_first_is_kept_of_both_sides() -> None:
    """A block leaves one value for two samples, and another for the third, on either side of the stream."""
    crossing = block_calls.Crossing(5, [], [])
    layout = block_calls.Layout(0, {}, {}, {(1, ("kwargs", "bias")): 1}, {}, crossing)
    calls = blockwise.ModelArgs(6, layout, blockwise.HiddenStates(3, None, 2), CPU)
    for sample, side in itertools.product(range(3), range(2)):
        left = torch.full((1, 2), float(10 * side + (sample == 2)))
        calls.keep(0, sample, BlockArgs((), {}), (left,), side)
    read = [[calls._tree((0, 1), 1, sample, 1, side)[0, 0].item() for sample in range(3)] for side in range(2)]
    assert read == [[0, 0, 1], [10, 10, 11]]
