"""A packed embedding does what the embedding does that it stands for, on the decoded table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compress.errors import CheckpointError, TokenIdError
from compress.formats import stored
from compress.runtime import embedding, hf
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.linear import PackedLinear
from helpers.pico import PICO, build, round_to_nearest

IDS = torch.tensor([[5, 0, 263, 5]])


def packed_as(module: nn.Embedding) -> tuple[PackedEmbedding, torch.Tensor]:
    """A packed embedding in the place of one, and its decoded table in float32."""
    packed = round_to_nearest(module.weight, 6, 32)
    layer = PackedEmbedding(packed.stored, module)
    for key, tensor in packed.tensors.items():
        setattr(layer, key, nn.Parameter(tensor, requires_grad=False))
    return layer, layer.dequantize(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_type_that_the_module_was_given(dtype: torch.dtype) -> None:
    layer, table = packed_as(nn.Embedding(264, 64, padding_idx=0))
    rows = layer.to(dtype)(IDS)
    assert rows.dtype == dtype and torch.equal(rows, table.to(dtype)[IDS])
    assert layer.scales.dtype == torch.float16 and layer.padding_idx == 0
    assert next(p.dtype for p in layer.parameters() if p.is_floating_point()) == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_multiplied_as_the_original_does(dtype: torch.dtype) -> None:
    """By a buffer, which is rounded to the type of the rows."""
    original = PICO["gemma2"]().get_input_embeddings()
    assert math.isclose(float(original.embed_scale), 8.0)
    original.scalar_embed_scale = 7.77
    original.embed_scale = torch.tensor(7.77)
    layer, table = packed_as(original)
    restored = layer.to_embedding(dtype)
    assert type(restored) is type(original) and torch.equal(restored.weight, table.to(dtype))
    assert torch.equal(layer.to(dtype)(IDS), restored(IDS))


class Altered(nn.Embedding):
    """An embedding that does something to its rows: number -> what."""

    def __init__(self, what: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(264, 64)
        self.what = what

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.what(super().forward(input), input)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "what",
    [
        lambda rows, ids: rows * 25.298221281347036,
        lambda rows, ids: rows + 0.3,
        lambda rows, ids: 0.1 * rows - 3,
        lambda rows, ids: rows / 4,
    ],
)
def test_constants_are_found_by_what_an_embedding_does(what: Any, dtype: torch.dtype) -> None:
    layer, table = packed_as(Altered(what))
    restored = layer.to_embedding(dtype)
    assert torch.equal(layer.to(dtype)(IDS), what(table.to(dtype)[IDS], IDS))
    assert torch.equal(layer(IDS), restored(IDS))


def test_an_embedding_that_does_more_is_not_supported() -> None:
    more: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda rows, ids: rows * rows,
        lambda rows, ids: rows.relu(),
        lambda rows, ids: rows + ids[..., None],
        lambda rows, ids: rows + torch.arange(ids.shape[-1])[:, None],
        lambda rows, ids: rows * torch.linspace(1, 2, rows.shape[-1]),
        lambda rows, ids: rows.double(),
        lambda rows, ids: rows[..., :32],
    ]
    for what in more:
        assert embedding.constants(Altered(what)) is None
    assert embedding.constants(nn.Embedding(264, 64, max_norm=1.0)) is None
    assert embedding.constants(nn.Linear(64, 264)) is None
    with pytest.raises(CheckpointError, match="Altered of this version of transformers does more than look rows up"):
        packed_as(Altered(more[0]))


def test_a_scale_that_is_not_loaded_yet_comes_from_the_model() -> None:
    """A buffer of a model that is built without weights has no value, and in bfloat16 a rounded one."""
    changes = {"hidden_size": 40, "num_attention_heads": 2, "num_key_value_heads": 2}
    for device, dtype in (("meta", torch.float32), ("meta", torch.bfloat16), ("cpu", torch.bfloat16)):
        model = build("gemma2", changes).to(dtype).to(device)
        state = torch.get_rng_state()
        found = embedding.constants(model.get_input_embeddings(), model)
        assert found is not None and torch.equal(state, torch.get_rng_state())
        for each in (torch.float32, torch.bfloat16):
            assert found.by_type[each] == (torch.tensor(40**0.5).to(each).item(), 0)
    assert embedding.constants(model.to("meta").get_input_embeddings()) is None


def test_its_weight_is_refused_in_words() -> None:
    layer, _ = packed_as(nn.Embedding(264, 64))
    assert not hasattr(layer, "weight")
    with pytest.raises(AttributeError, match="stays packed and cannot be resized or trained"):
        _ = layer.weight


@pytest.mark.parametrize("is_of_class", [True, False])
def test_a_tied_model_is_tied_in_what_is_stored(is_of_class: bool) -> None:
    """After `swap`, transformers ties the words and scales of head and embeddings; `restore` undoes it."""
    model = PICO["llama_tied"]()
    if not is_of_class:  # some models say it of themselves
        model._tied_weights_keys = dict(model._tied_weights_keys)
    table = {"model.embed_tokens": stored.to_dict(round_to_nearest(torch.randn(264, 64), 8, 32).stored)}
    hf.swap(model, hf.CompressConfig(default=table["model.embed_tokens"], modules={"model.embed_tokens": {}}))
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, PackedLinear) and isinstance(embeddings, PackedEmbedding)
    assert all(getattr(head, key) is getattr(embeddings, key) for key in embeddings.specs)
    head.words8 = nn.Parameter(torch.zeros_like(head.words8), requires_grad=False)
    model.tie_weights()
    assert head.words8 is embeddings.words8
    assert model.all_tied_weights_keys["lm_head.words8"] == "model.embed_tokens.words8"
    embedding.restore(model, torch.float32)
    assert type(model.get_input_embeddings()) is nn.Embedding
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert ("_tied_weights_keys" in vars(model)) == (not is_of_class)
    assert model._tied_weights_keys == type(model)._tied_weights_keys


def test_a_head_alone_cannot_be_packed_where_it_is_tied() -> None:
    model = PICO["llama_tied"]()
    entry = stored.to_dict(round_to_nearest(torch.randn(264, 64), 8, 32).stored)
    with pytest.raises(CheckpointError, match="lm_head is listed as packed, but its weight is tied"):
        hf.swap(model, hf.CompressConfig(default=entry, modules={"lm_head": {}}))
    assert type(model.get_output_embeddings()) is nn.Linear


def test_ids_of_other_types_and_a_compiled_lookup() -> None:
    layer, table = packed_as(nn.Embedding(264, 64))
    assert torch.equal(layer(IDS.int()), table[IDS])
    for dynamic in (False, True):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for ids in (IDS, IDS.int(), IDS[0, :3]):
            assert torch.equal(compiled(ids), table[ids])


@pytest.mark.parametrize("token", [-1, 264])
def test_a_token_id_that_the_table_does_not_have_is_refused(token: int) -> None:
    layer, _ = packed_as(nn.Embedding(264, 64))  # stored with 272 rows
    with pytest.raises(TokenIdError, match=f"token id {token} is not in the table of 264 rows"):
        layer(torch.tensor([[1, token]]))
