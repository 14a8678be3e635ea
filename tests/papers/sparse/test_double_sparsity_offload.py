"""Keys and values outside the fast memory: what is read is what double_sparsity reads, and what stays resident."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from compress.errors import CompressError
from compress.kv import generation
from compress.kv.cache import make_cache
from compress.kv.settings import cache_settings
from compress.kv.sparse.reader import Tally, group_queries
from compress.papers.sparse.double_sparsity_offload import Config, OffloadedLayer, SlowBuffer
from helpers.reading_cases import SIZES, WIDTH, attended, cache, chunks, step

READ = {"keep": 0.2, "channels": 8, "dense_layers": 0}
OFFLOAD = {"method": "double_sparsity_offload", **READ}


def outputs(read: dict[str, Any], codec: str, foresee: Any = None) -> Tensor:
    """All outputs of a layer; foresee(q) is the query by which tokens are brought ahead."""
    layer: Any = cache(read, codec).layers[0]
    found = []
    for q, k, v in chunks(SIZES):
        if foresee is not None and layer.stores:
            layer.fetch_ahead(group_queries(foresee(q), 2, WIDTH**-0.5))
        found.append(step(layer, q, k, v))
    return torch.cat(found, 1)


@pytest.mark.parametrize("codec", ["identity", "kivi", "lloyd"])
def test_it_gives_what_double_sparsity_gives(codec: str) -> None:
    """Without prefetch, and with tokens that were brought by the true query."""
    plain = outputs({"method": "double_sparsity", **READ}, codec)
    assert torch.equal(plain, outputs({**OFFLOAD, "prefetch": False}, codec))
    assert torch.equal(plain, outputs(OFFLOAD, codec, lambda q: q))
    assert not torch.equal(plain, outputs(OFFLOAD, codec, lambda q: -q))


def test_what_was_brought_is_read() -> None:
    """By another query; and how many of the tokens of its own choice a query found is counted."""
    layer: Any = cache(OFFLOAD, "identity").layers[0]
    data = chunks([150, 1], 1)
    step(layer, *data[0])
    layer.commit()
    q, k, v = data[1]
    coded = layer.candidates()
    layer.reader.tally = Tally()
    layer.fetch_ahead(group_queries(-q, 2, WIDTH**-0.5))
    chosen = layer.places.clone()
    keys, values = (torch.cat((store.read(), x), 2) for store, x in zip(layer.stores.values(), (k, v), strict=True))
    found = step(layer, q, k, v)
    read = torch.ones(2, 151, dtype=torch.bool)
    read[:, 3 : 3 + coded] = torch.zeros(2, coded, dtype=torch.bool).scatter(1, chosen[0], True)
    torch.testing.assert_close(found[0, 0].double(), attended(q[0, :, 0], keys[0], values[0], read), atol=2e-5, rtol=0)
    count = chosen.shape[-1]
    assert layer.reader.wanted == 2 * count and layer.reader.foreseen < count


def test_coded_tokens_lie_in_a_mapped_file_and_the_rest_is_resident() -> None:
    made = cache({**OFFLOAD, "dense_layers": 1}, "identity", layers=2)
    first, layer = made.layers
    assert isinstance(first, OffloadedLayer) and isinstance(layer, OffloadedLayer)
    for q, k, v in chunks([150, 1], 1):
        for each in made.layers:
            each.fetch_ahead(group_queries(q, 2, WIDTH**-0.5))  # type: ignore[attr-defined]
            step(each, q, k, v)
    layer.commit()
    coded, row = layer.stores["keys"].coded, WIDTH * 4
    labels = layer.reader.nbytes().extras  # type: ignore[union-attr]
    assert isinstance(layer.stores["keys"].fields["exact"], SlowBuffer)
    assert layer.offloaded_nbytes() == 2 * 2 * coded * row and first.offloaded_nbytes() == 0
    exact = 2 * 2 * (151 - coded) * row  # sinks and tail
    fetched = 2 * 2 * -(-96 // 5) * row  # of 96 candidates a fifth, when the last token came
    assert layer.resident_nbytes() == exact + labels + fetched
    assert first.resident_nbytes() == first.nbytes().total


def test_rows_of_a_batch_are_taken_and_stay_in_slow_memory() -> None:
    layer: Any = cache(OFFLOAD, "identity").layers[0]
    for q, k, v in chunks([150, 1]):
        step(layer, q, k, v)
    before = layer.stores["keys"].read()
    layer.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.stores["keys"].read(), before[[1, 1]])
    layer.crop(-30)
    assert torch.equal(layer.stores["keys"].read(), before[[1, 1], :, :-30])


def model(silent: bool, family: str = "llama") -> Any:
    """A tiny model; silent: its blocks add nothing, so that all layers have the same input."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    made: Any = LlamaForCausalLM(config) if family == "llama" else Olmo2ForCausalLM(Olmo2Config(**config.to_dict()))
    for block in made.model.layers if silent else ():
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    return made.eval()


def overlap(silent: bool, method: str = "double_sparsity_offload", family: str = "llama") -> tuple[float, Tensor]:
    made, tokens = model(silent, family), torch.randint(1, 64, (1, 200), generator=torch.Generator().manual_seed(1))
    section = {"method": "identity", "sink": 2, "residual_length": 8, "flush": 1}
    read = {"method": method, "keep": 0.25, "channels": 8, "dense_layers": 1}
    settings = cache_settings({**section, "read": read})
    static = {f"layers.{i}.read.channels": torch.arange(8, dtype=torch.int16).repeat(2, 1) for i in range(3)}
    generation.attach(made, settings, static)
    made_cache = make_cache(made.config, settings, static, "fused")
    logits = []
    with torch.inference_mode():
        made(input_ids=tokens[:, :190], past_key_values=made_cache)
        for layer in made_cache.layers:
            layer.reader.tally = Tally()  # type: ignore[attr-defined]
        for n in range(190, 200):
            logits.append(made(input_ids=tokens[:, n : n + 1], past_key_values=made_cache).logits)
    readers: Any = [layer.reader for layer in made_cache.layers]
    wanted = sum(getattr(reader, "wanted", 0) for reader in readers)
    return sum(getattr(reader, "foreseen", 0) for reader in readers) / max(wanted, 1), torch.cat(logits, 1)


def test_a_model_brings_tokens_by_the_input_of_the_layer_in_front() -> None:
    share, logits = overlap(True)
    assert share == 1 and torch.equal(logits, overlap(True, "double_sparsity")[1])
    assert 0 < overlap(False)[0] < 1


def test_queries_with_one_norm_for_all_heads_are_foreseen() -> None:
    share, logits = overlap(True, family="olmo2")
    assert share == 1 and torch.equal(logits, overlap(True, "double_sparsity", "olmo2")[1])


def test_labels_are_not_read_out_of_slow_memory() -> None:
    with pytest.raises(ValueError, match="labels must be store"):
        Config(labels="codes")


def test_models_without_a_projection_of_queries_are_refused() -> None:
    made = model(False)
    layer: Any = cache(OFFLOAD, "identity").layers[0]
    layer.seen = 1
    for block in made.model.layers:
        del block.self_attn.q_proj
    with pytest.raises(CompressError, match="no q_proj"):
        layer.enter(made, {})
