"""What feeds what, found by running a model: against tables by hand, and against what the modules really pass on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from compress.errors import UnsupportedModelError
from compress.model import graph as structure
from compress.model.blockwise import BlockArgs
from compress.model.graph import Attention, Block, Site, norm_kind
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import open_checkpoint
from compress.transform.folding import fold
from helpers import pico
from helpers.blocks import QKV, SITES, Case, difference, outputs
from helpers.pico import PICO, save_pico

GATED = ("mlp.gate_proj", "mlp.up_proj")
EXPERTS = [f"mlp.experts.{i}" for i in range(4)]
ROUTED: tuple[str, ...] = ("mlp.gate", *(f"{e}.{p}" for e in EXPERTS for p in ("gate_proj", "up_proj")))
LLAMA_NORMS: dict[str, tuple[str, ...]] = {"input_layernorm": QKV, "post_attention_layernorm": GATED}
GQA = Attention("self_attn.v_proj", "self_attn.o_proj", 0, 16, 1, 2, 4, 16)

BLOCKS = {
    "llama": Block(LLAMA_NORMS, ("self_attn.o_proj", "mlp.down_proj"), (), GQA),
    "mixtral": Block(
        {"input_layernorm": QKV, "post_attention_layernorm": ROUTED},
        ("self_attn.o_proj", *(f"{e}.down_proj" for e in EXPERTS)),
        (),
        GQA,
    ),
    "opt": Block(
        {"self_attn_layer_norm": QKV, "final_layer_norm": ("fc1",)},
        ("self_attn.out_proj", "fc2"),
        (),
        Attention("self_attn.v_proj", "self_attn.out_proj", 0, 16, 1, 4, 4, 16),
    ),
    "gpt_neox": Block(
        {"input_layernorm": ("attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
        ("attention.dense", "mlp.dense_4h_to_h"),
        (),
        # q, k, v of a head lie one after another
        Attention("attention.query_key_value", "attention.dense", 32, 48, 1, 4, 4, 16),
    ),
    "phi3": Block(
        {"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
        ("self_attn.o_proj", "mlp.down_proj"),
        (),
        Attention("self_attn.qkv_proj", "self_attn.o_proj", 4 * 16 + 2 * 16, 16, 1, 2, 4, 16),
    ),
    "gemma2": Block(
        {"input_layernorm": QKV, "pre_feedforward_layernorm": GATED},
        ("self_attn.o_proj", "mlp.down_proj"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        GQA,
    ),
    "qwen3": Block(LLAMA_NORMS, ("self_attn.o_proj", "mlp.down_proj"), (), GQA),  # norms of heads are none of ours
}
OUTSIDE: dict[str, tuple[dict[str, tuple[str, ...]], tuple[str, ...]]] = {
    "llama": ({"model.norm": ("lm_head",)}, ("model.embed_tokens",)),
    "llama_tied": ({"model.norm": ("lm_head",)}, ("model.embed_tokens",)),
    "opt": (
        {"model.decoder.final_layer_norm": ("lm_head",)},
        ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
    ),
    "gpt_neox": ({"gpt_neox.final_layer_norm": ("lm_head",)}, ("gpt_neox.embed_in",)),
}


@pytest.fixture
def skeleton(pico_dir: Callable[..., Path]) -> Callable[[str], Skeleton]:
    return lambda name: Skeleton(open_checkpoint(pico_dir(name)))


# ---------------------------------------------------------------- the graph


@pytest.mark.parametrize("name", BLOCKS)
def test_the_graph_of_a_block(name: str, skeleton: Callable[[str], Skeleton]) -> None:
    graph = structure.trace(skeleton(name))
    assert graph.blocks == (BLOCKS[name], BLOCKS[name])


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_graph_around_the_blocks(name: str, skeleton: Callable[[str], Skeleton]) -> None:
    norms, writers = OUTSIDE[name]
    assert structure.trace(skeleton(name)).outside == Block(norms, writers, (), None)


@pytest.mark.parametrize("name", PICO)
def test_every_linear_has_one_part(name: str, skeleton: Callable[[str], Skeleton]) -> None:
    """Each reads a norm or writes to the stream; what is written has its width."""
    model = skeleton(name)
    specs, _ = model.linears()
    for index, block in enumerate(structure.trace(model).blocks):
        readers = [reader for group in block.norms.values() for reader in group]
        found = [model.block_prefix(index) + n for n in (*readers, *block.writers) if n != "mlp.gate"]
        assert sorted(found) == sorted(spec.name for spec in specs if spec.block == index)
        assert all(spec.shape[0] == 64 for spec in specs if spec.name.endswith(block.writers))


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "opt"])
def test_the_rows_of_values_are_what_attention_adds_up(name: str, skeleton: Callable[[str], Skeleton]) -> None:
    """A bias on channel j of a head's values is added to that channel of all heads that read it: weights sum to one."""
    attention = structure.trace(skeleton(name)).blocks[0].attention
    assert attention is not None
    case = Case(name) if name in SITES else None
    model = case.model if case is not None else PICO[name]()
    block = model.base_model.decoder.layers[0] if name == "opt" else model.base_model.layers[0]
    tokens = torch.arange(6)[None]
    given: list[Tensor] = []
    block.get_submodule(attention.output).register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].clone()))
    head, channel = attention.key_value_heads - 1, 5
    row = attention.first + head * attention.head_step + channel * attention.step

    def add(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        output[..., row] += 1
        return output

    with torch.no_grad():
        model(tokens)
        block.get_submodule(attention.values).register_forward_hook(add)
        model(tokens)
    repeats = attention.heads // attention.key_value_heads
    expected = torch.zeros(attention.heads, attention.head_dim)
    expected[head * repeats : (head + 1) * repeats, channel] = 1
    assert torch.allclose(given[1] - given[0], expected.flatten().expand_as(given[0]), atol=1e-5)


def test_a_model_that_cannot_be_followed(skeleton: Callable[[str], Skeleton], monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = skeleton("llama"), LlamaModel.forward

    def forward(self: LlamaModel, input_ids: Tensor, **given: Any) -> Any:
        assert input_ids.sum().item() == 0
        return real(self, input_ids, **given)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError) as caught:
        structure.trace(model)
    line = str(caught.value)
    assert line.startswith("LlamaForCausalLM cannot be followed without data (") and "\n" not in line
    assert line.endswith("; use a recipe without transforms") and len(line) < 300
    assert model.config._attn_implementation == before


def test_tracing_leaves_the_model_as_it_was(skeleton: Callable[[str], Skeleton]) -> None:
    model = skeleton("mixtral")
    before = (model.config.to_dict(), [name for name, _ in model.model.named_parameters()])
    attention = model.config._attn_implementation
    structure.trace(model)
    assert (model.config.to_dict(), [name for name, _ in model.model.named_parameters()]) == before
    assert model.config._attn_implementation == attention
    assert all(parameter.is_meta for parameter in model.model.parameters())


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize(
    ("name", "offset", "centred"),
    [("llama", False, False), ("gemma", True, False), ("gemma2", True, False), ("opt", False, True)],
)
def test_the_kind_of_a_norm(name: str, offset: bool, centred: bool, skeleton: Callable[[str], Skeleton]) -> None:
    model = skeleton(name)
    graph = structure.trace(model)
    for prefix, block in ((model.block_prefix(1), graph.blocks[1]), ("", graph.outside)):
        for norm in block.norms:
            assert norm_kind(model.model.get_submodule(prefix + norm), 64) == (offset, centred)


def test_a_norm_of_another_kind_is_refused() -> None:
    class Odd(LlamaRMSNorm):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden).square()

    with pytest.raises(UnsupportedModelError, match="^Odd is no norm that a transform can pass; remove `transform`$"):
        norm_kind(Odd(64), 64)


# ---------------------------------------------------------------- sites


def found_sites(name: str, pico_dir: Callable[..., Path]) -> list[Site]:
    """As the pipeline finds them, in the first block; the model of `Case` is that of `pico_dir`."""
    case = Case(name)
    graph = structure.trace(Skeleton(open_checkpoint(pico_dir(name))))
    return structure.sites(graph.blocks[0], case.block, case.batches(), "block")


@pytest.mark.parametrize("name", SITES)
def test_the_sites_of_a_block(name: str, pico_dir: Callable[..., Path]) -> None:
    """up -> down but not gate -> down, v -> o with repeated heads, experts, the offset of gemma's norms."""
    wanted = [site._replace(scope="") if site.producer == "final_layer_norm" else site for site in SITES[name]]
    found = found_sites(name, pico_dir)  # fc1 of OPT lies in the block itself, not in a module beside others
    assert sorted(found) == sorted(wanted) and len(found) == len(set(found))


@pytest.mark.parametrize("name", ["phi3", "gpt_neox"])
def test_fused_linears_make_no_sites(name: str, skeleton: Callable[[str], Skeleton]) -> None:
    """Neither rows of values among queries and keys, nor up behind a gate of the same linear, nor a GELU."""
    model = skeleton(name)
    graph = structure.trace(model)
    block = model.load_block(0, torch.device("cpu"))
    whole = PICO[name]()
    taken: list[tuple[Tensor, BlockArgs]] = []

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.append((args[0], BlockArgs(args[1:], kwargs)))

    whole.base_model.layers[0].register_forward_pre_hook(take, with_kwargs=True)
    with torch.no_grad():
        whole(torch.arange(8)[None])
    found = structure.sites(graph.blocks[0], block, lambda: taken, "block")
    assert [site.producer for site in found] == list(BLOCKS[name].norms) and all(site.is_norm for site in found)


@pytest.mark.parametrize("name", SITES)
def test_a_scale_at_any_site_changes_nothing(name: str, pico_dir: Callable[..., Path]) -> None:
    for site in found_sites(name, pico_dir):
        case = Case(name)
        batches = case.batches()
        before = outputs(case.block, batches)
        channels = case.block.get_submodule(site.producer).get_parameter("weight").shape[0]
        scale = torch.linspace(0.25, 4, channels, dtype=torch.float64)
        weight = case.block.get_submodule(site.producer).get_parameter("weight").clone()
        assert fold(case.block, site, scale)
        assert not torch.equal(weight, case.block.get_submodule(site.producer).get_parameter("weight"))
        assert difference(outputs(case.block, batches), before) < 1e-10, site


@pytest.mark.parametrize("clipped", [None, 3.0])
def test_values_that_are_changed_in_place_are_no_values(clipped: float | None, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    changes |= {"clip_qkv": clipped}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pico._CONFIGS, "olmoe", ("olmoe", changes))
        source = save_pico("olmoe", tmp_path / "olmoe")
    graph = structure.trace(Skeleton(open_checkpoint(source)))
    assert (graph.blocks[0].attention is None) == (clipped is not None)


def test_a_norm_on_the_residual_stream_is_no_site(tmp_path: Path) -> None:
    """OPT with its norms behind attention: the first one feeds fc1, and the residual stream."""
    source = save_pico("opt", tmp_path / "opt", changes={"do_layer_norm_before": False})
    model = Skeleton(open_checkpoint(source))
    graph = structure.trace(model)
    assert graph.blocks[0].norms["self_attn_layer_norm"] == ("fc1",)
    block = model.load_block(0, torch.device("cpu"))
    assert isinstance(block, OPTDecoderLayer)
    hidden = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    found = structure.sites(graph.blocks[0], block, lambda: [(hidden, BlockArgs((), {}))], "block")
    assert sorted(site.producer for site in found) == ["fc1", "self_attn.v_proj"]
