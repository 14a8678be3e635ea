"""A packed embedding does what the embedding does that it stands for, on the decoded table."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from compress.errors import CheckpointError, TokenIdError
from compress.formats import stored
from compress.runtime import embedding, hf
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.linear import PackedLinear
from pico import PICO, round_to_nearest

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
    assert embedding.is_supported(original) and math.isclose(float(original.embed_scale), 8.0)
    original.scalar_embed_scale = 7.77
    original.embed_scale = torch.tensor(7.77)
    layer, table = packed_as(original)
    restored = layer.to_embedding(dtype)
    assert type(restored) is type(original) and torch.equal(restored.weight, table.to(dtype))
    assert torch.equal(layer.to(dtype)(IDS), restored(IDS))


def test_an_embedding_that_does_more_is_not_supported() -> None:
    class Shifted(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + 1

    assert not embedding.is_supported(Shifted(264, 64))
    assert not embedding.is_supported(nn.Embedding(264, 64, max_norm=1.0))
    assert not embedding.is_supported(nn.Linear(64, 264))


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
