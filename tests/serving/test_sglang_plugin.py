"""The plugin for SGLang on stand-ins of its classes: layers give what the packed modules of transformers give."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compared import SMALL
from torch import Tensor, nn

import sglang_stand_in as stand_in
from compress import api, serving
from compress.errors import CheckpointError, UnsupportedModelError
from compress.model.load import load_model
from compress.runtime import weight_cache
from compress.serving import parts
from compress.storage.checkpoint import read_json
from helpers import pico, runs
from helpers.runs import stored_tensors

STACKED = [("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v")]
STACKED += [("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1)]
SHARDS = {"gate_proj": ("w13_", "w1"), "up_proj": ("w13_", "w3"), "down_proj": ("w2_", "w2")}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What SGLang lists, with the plugin registered."""
    forget()
    found = stand_in.install(monkeypatch)
    limit = weight_cache.CACHE.limit
    from compress.serving import sglang

    sglang.register()
    sglang.register()  # again does no harm
    yield found
    weight_cache.CACHE.limit = limit
    forget()


def forget() -> None:
    """Let the plugin be imported anew: it holds classes of the stand-ins."""
    for name in [name for name in sys.modules if name.startswith("compress.serving.sglang")]:
        del sys.modules[name]
        delattr(serving, name.rpartition(".")[2])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("llama"), "llama")


def packed(folder: Path, name: str) -> Path:
    model = pico.save_pico(name, folder / "model")
    api.quantize(runs.job(model, runs.Setup("int4", SMALL), folder / "packed"))
    return folder / "packed"


class Model(nn.Module):
    """One block of a decoder, its embeddings and its head, as SGLang's models have them."""

    def __init__(self, config: Any, directory: Path, group: Any = None) -> None:
        super().__init__()
        values = read_json(directory / "config.json")
        hidden, inner, head = values["hidden_size"], values["intermediate_size"], values["head_dim"]
        heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
        self.config = SimpleNamespace(tie_word_embeddings=values["tie_word_embeddings"])
        block = "model.layers.0"
        attention, mlp = nn.Module(), nn.Module()
        attention.qkv_proj = stand_in.QKVParallelLinear(
            hidden, head, heads, kv_heads, config, f"{block}.self_attn.qkv_proj", group
        )
        attention.o_proj = stand_in.LinearBase(
            heads * head, [hidden], config, f"{block}.self_attn.o_proj", group, rows=True
        )
        mlp.gate_up_proj = stand_in.LinearBase(hidden, [inner] * 2, config, f"{block}.mlp.gate_up_proj", group)
        mlp.down_proj = stand_in.LinearBase(inner, [hidden], config, f"{block}.mlp.down_proj", group, rows=True)
        layer, self.model = nn.Module(), nn.Module()
        layer.self_attn, layer.mlp = attention, mlp
        self.model.layers = nn.ModuleList([layer, stand_in.PPMissingLayer()])
        self.model.embed_tokens = stand_in.VocabParallelEmbedding(values["vocab_size"], hidden)
        self.lm_head = stand_in.ParallelLMHead(values["vocab_size"], hidden)

    def load_weights(self, weights: Any) -> None:
        """As most of SGLang's models do it: tensors for which no layer asks are passed over."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            for fused, last, shard in STACKED:
                if f".{last}." in name and name.replace(last, fused) in parameters:
                    param = parameters[name.replace(last, fused)]
                    param.weight_loader(param, tensor, shard)
                    break
            else:
                if name in parameters:
                    parameters[name].weight_loader(parameters[name], tensor)


def built(tables: dict[str, Any], directory: Path, model_class: Any = Model, *arguments: Any) -> Any:
    """A model whose weights are loaded, as SGLang does it."""
    values = {**read_json(directory / "config.json")["quantization_config"], "packed_modules_mapping": {}}
    config = tables["methods"]["compress"].from_config({**values, "hf_config": None})
    model = model_class(config, directory, *arguments)
    ((target, hook, _),) = stand_in.HookRegistry.hooks
    assert target == "sglang.srt.model_loader.loader._initialize_model"
    hook(model, None, None, config)
    model.load_weights(sorted(stored_tensors(directory).items()))
    for layer in model.modules():
        if hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)
    return model


def run(layer: Any, x: Tensor) -> Tensor:
    return layer.quant_method.apply(layer, x)


def test_the_method_is_registered_once_for_gpus_and_cpus(tables: dict[str, Any]) -> None:
    assert tables["methods"].keys() == tables["cpu"].keys() == {"compress"} and tables["choices"] == ["compress"]
    assert len(stand_in.HookRegistry.hooks) == 1


@pytest.mark.parametrize("ranks", [1, 2])
@torch.no_grad()
def test_layers_give_what_transformers_gives(tables: dict[str, Any], llama: Path, ranks: int) -> None:
    known = load_model(llama, dtype=torch.float32).eval()
    theirs = known.model.layers[0]
    groups = [None] if ranks == 1 else [stand_in.Group(rank, ranks) for rank in range(ranks)]
    models = [built(tables, llama, Model, group) for group in groups]
    blocks = [model.model.layers[0] for model in models]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    wide = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    expected = [getattr(theirs.self_attn, f"{letter}_proj")(x) for letter in "qkv"]
    sizes = [each.shape[1] // ranks for each in expected]
    found = [torch.split(run(block.self_attn.qkv_proj, x), sizes, -1) for block in blocks]
    for number, each in enumerate(expected):
        assert torch.allclose(torch.cat([part[number] for part in found], -1), each, atol=1e-5)
    pairs = [run(block.mlp.gate_up_proj, x).chunk(2, -1) for block in blocks]
    assert torch.allclose(torch.cat([pair[0] for pair in pairs], -1), theirs.mlp.gate_proj(x), atol=1e-5)
    assert torch.allclose(torch.cat([pair[1] for pair in pairs], -1), theirs.mlp.up_proj(x), atol=1e-5)
    halves = zip(blocks, wide.chunk(ranks, -1), strict=True)
    total = sum(run(block.mlp.down_proj, half) for block, half in halves)
    assert torch.allclose(total, theirs.mlp.down_proj(wide), atol=1e-5)
    model, ids = models[0], torch.tensor([3, 250])
    table = model.model.embed_tokens
    assert torch.equal(table.quant_method.embedding(table, ids), known.model.embed_tokens(ids))
    assert torch.allclose(run(model.lm_head, x)[:, : known.config.vocab_size], known.lm_head(x), atol=1e-5)


@torch.no_grad()
def test_a_tied_head_multiplies_with_the_embedding(tables: dict[str, Any], tmp_path: Path) -> None:
    directory = packed(tmp_path, "llama_tied")
    known, model = load_model(directory, dtype=torch.float32).eval(), built(tables, directory)
    x = torch.randn(5, 64)
    assert torch.allclose(run(model.lm_head, x)[:, : known.config.vocab_size], known.lm_head(x), atol=1e-5)
    assert model.lm_head.table is model.model.embed_tokens.table


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The linears that may keep a decoded weight."""
    found: list[Any] = []
    warm = parts.warm
    monkeypatch.setattr(parts, "warm", lambda linears, dtype: (found.extend(linears), warm(linears, dtype)))
    return found


def test_nothing_is_kept_decoded_for_an_embedding_that_is_no_head(
    tables: dict[str, Any], llama: Path, warmed: list[Any]
) -> None:
    model = built(tables, llama)
    assert model.lm_head.table.head in warmed and model.model.embed_tokens.table.head not in warmed


@torch.no_grad()
def test_one_layer_that_is_embedding_and_head(tables: dict[str, Any], tmp_path: Path, warmed: list[Any]) -> None:
    class Shared(Model):
        def __init__(self, config: Any, directory: Path) -> None:
            super().__init__(config, directory)
            self.lm_head = self.model.embed_tokens

    directory = packed(tmp_path, "llama_tied")
    known, model = load_model(directory, dtype=torch.float32).eval(), built(tables, directory, Shared)
    x = torch.randn(5, 64)
    assert torch.allclose(run(model.lm_head, x)[:, : known.config.vocab_size], known.lm_head(x), atol=1e-5)
    assert model.lm_head.table.head in warmed


@pytest.mark.parametrize("columns", [32, 64])
def test_a_tied_head_takes_the_embedding_of_its_shape(tables: dict[str, Any], columns: int, tmp_path: Path) -> None:
    """Of two packed embeddings. Where both have it, nobody knows which one is meant."""
    directory = packed(tmp_path, "llama_tied")
    values = read_json(directory / "config.json")
    config = tables["methods"]["compress"].from_config(values["quantization_config"])
    config.listed.stored = {"other": config.listed.stored["model.embed_tokens"], **config.listed.stored}
    model = Model(config, directory)
    decoder = model.model
    del model.model
    model.other = stand_in.VocabParallelEmbedding(model.lm_head.org_vocab_size, columns)
    model.model = decoder
    ((_, complete, _),) = stand_in.HookRegistry.hooks
    if columns == model.lm_head.embedding_dim:
        with pytest.raises(UnsupportedModelError, match="lm_head is tied to one of other, model.embed_tokens, and"):
            complete(model, None, None, config)
    else:
        complete(model, None, None, config)
        assert model.lm_head.table is model.model.embed_tokens.table


def test_a_missing_tensor_is_named(tables: dict[str, Any], llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "model.layers.0.self_attn.k_proj.scales"
    kept = {name: tensor for name, tensor in stored_tensors(llama).items() if name != lost}
    monkeypatch.setattr("test_sglang_plugin.stored_tensors", lambda directory: kept)
    with pytest.raises(CheckpointError, match=f"{lost} is not in the checkpoint"):
        built(tables, llama)


def test_what_no_layer_holds_is_refused(tables: dict[str, Any], llama: Path) -> None:
    class Other(Model):
        def __init__(self, config: Any, directory: Path) -> None:
            super().__init__(config, directory)
            del self.model.layers[0].mlp.down_proj

    with pytest.raises(UnsupportedModelError, match=r"layers.0.mlp.down_proj is packed, and no layer .* for Other"):
        built(tables, llama, Other)


class Sparse(Model):
    """A block of which only the experts are looked at, at a place that is not that of transformers."""

    place = "mlp"
    projections = SHARDS

    def __init__(self, config: Any, directory: Path) -> None:
        super().__init__(config, directory)
        values = read_json(directory / "config.json")
        count, inner = values["num_local_experts"], values["moe_intermediate_size"]
        mlp = nn.Module()
        mlp.experts = stand_in.FusedMoE(
            count, values["hidden_size"], inner, config, f"model.layers.0.{self.place}.experts"
        )
        self.model.layers[0].mlp = nn.Module()
        setattr(self.model.layers[0], self.place, mlp)

    def load_weights(self, weights: Any) -> None:
        parameters, rest = dict(self.named_parameters()), []
        for name, tensor in weights:
            stem, found, inner = name.partition(f".{self.place}.experts.")
            if not found:
                rest.append((name, tensor))
                continue
            number, projection, last = inner.split(".")
            prefix, shard = self.projections[projection]
            param = parameters.get(f"{stem}.{self.place}.experts.{prefix}{last}")
            if param is not None:
                param.weight_loader(param, tensor, name, shard_id=shard, expert_id=int(number))
        super().load_weights(rest)


class Moved(Sparse):
    place = "block_sparse_moe"
    projections = {"w1": ("w13_", "w1"), "w3": ("w13_", "w3"), "w2": ("w2_", "w2")}


@pytest.mark.parametrize("model_class", [Sparse, Moved])
@torch.no_grad()
def test_experts_give_what_transformers_gives(tables: dict[str, Any], model_class: Any, tmp_path: Path) -> None:
    directory = packed(tmp_path, "qwen3_moe")
    known, model = load_model(directory, dtype=torch.float32).eval(), built(tables, directory, model_class)
    x, ids = torch.randn(5, 64), torch.tensor([[0, 1], [2, 3], [1, 1], [3, 0], [2, 0]])
    weights = torch.rand(5, 2)
    layer = getattr(model.model.layers[0], model_class.place).experts
    expected = known.model.layers[0].mlp.experts(x, ids, weights)
    routing = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    found = layer.quant_method.apply(layer, SimpleNamespace(hidden_states=x, topk_output=routing))
    assert torch.allclose(found.hidden_states, expected, atol=1e-5)
    run = torch.compile(
        lambda x, ids: layer.quant_method.run(layer, x, (weights, ids), 4), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(run(x, ids), found.hidden_states)
    routing.topk_ids = ids.masked_fill(ids == 1, -1)  # dropped
    other = layer.quant_method.apply(layer, SimpleNamespace(hidden_states=x, topk_output=routing)).hidden_states
    assert torch.equal(other[2], torch.zeros(64)) and torch.equal(other[3], found.hidden_states[3])


def test_experts_that_are_divided_among_ranks_are_refused(tables: dict[str, Any], tmp_path: Path) -> None:
    layer = built(tables, packed(tmp_path, "qwen3_moe"), Sparse).model.layers[0].mlp.experts
    layer.num_local_experts = 2
    with pytest.raises(UnsupportedModelError, match="experts are not divided among ranks; serve with --ep-size 1"):
        layer.quant_method.create_weights(layer, 4, 64, 48, torch.float32)


def test_experts_that_do_more_are_refused(tables: dict[str, Any], tmp_path: Path) -> None:
    directory = packed(tmp_path, "qwen3_moe")
    layer = built(tables, directory, Sparse).model.layers[0].mlp.experts
    layer.moe_runner_config.routed_scaling_factor = 2.5
    with pytest.raises(UnsupportedModelError, match="experts with routed_scaling_factor are not served by SGLang"):
        layer.quant_method.create_weights(layer, 4, 64, 48, torch.float32)
