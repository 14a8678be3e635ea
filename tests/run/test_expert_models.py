"""Experts in every layout from a checkpoint to a packed one: all linears packed, loaded by transformers, generating."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api
from compress.calib import expert_routing
from compress.errors import UnsupportedModelError
from compress.model import graph
from compress.model.skeleton import Skeleton
from compress.runtime.experts import Experts
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import of_type, save
from helpers.runs import GPTQ, RTN, Setup, cli, command, contents, interrupt, job, report_of, stored_tensors

HEADS = {"num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**HEADS, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        **HEADS,
        **{"intermediate_size": 96, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1},
    },
    "longcat_flash": {
        **{"ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "n_routed_experts": 4, "zero_expert_num": 2},
        **{"moe_topk": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16},
        **{"qk_nope_head_dim": 16, "v_head_dim": 16, "num_layers": 2, "num_key_value_heads": 4},
    },
    "nemotron_h": {
        **{**HEADS, "layers_block_type": ["moe", "full_attention", "mlp"], "num_hidden_layers": None},
        **{"intermediate_size": 96, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    },
    "jetmoe": {"kv_channels": 16, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
}
IDS = torch.arange(40)[None] * 7 % 250


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save(of_type(name, MODELS[name]), tmp_path_factory.mktemp(name))
        return made[name]

    return make


def load(directory: Path) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    model, info = loaded
    assert not any(info.values()), info
    model.set_experts_implementation("eager")
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    found: Tensor = model(ids).logits
    return found


def packed_weights(model: PreTrainedModel) -> int:
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(module.in_features * module.out_features for module in packed)


def wide_weights(model: PreTrainedModel) -> int:
    """The numbers in matrices and in parameters over experts, without embeddings, head and routers."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    skipped = {id(p) for part in ends for p in part.parameters()}
    wide = [p for p in model.parameters() if p.dim() in (2, 3) and min(p.shape[-2:]) >= 16 and id(p) not in skipped]
    return sum(p.numel() for p in wide)


@pytest.mark.parametrize("name", MODELS)
def test_all_experts_are_packed_and_compute_what_is_stored(
    name: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    api.quantize(job(models(name), RTN, tmp_path / "out"))
    original, packed = load(models(name)), load(tmp_path / "out")
    unused = 0
    for key, parameter in original.named_parameters():
        if name == "longcat_flash" and key.endswith("gate_up_proj"):  # of the experts that do nothing
            unused += parameter[4:].numel()
    assert packed_weights(packed) == wide_weights(original) - unused
    expected = logits(original)
    error = (logits(packed) - expected).norm() / expected.norm()
    assert error < 0.05
    fused = load(tmp_path / "out").dequantize()
    assert not any(isinstance(module, Experts | PackedLinear) for module in fused.modules())
    torch.testing.assert_close(logits(fused), logits(packed), rtol=1e-3, atol=1e-3)
    both = torch.cat([IDS, IDS.flip(1)])
    torch.testing.assert_close(logits(packed, both)[:1], logits(packed), rtol=1e-4, atol=1e-4)
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(packed.generate(IDS, **how), fused.generate(IDS, **how))


def test_biases_of_experts_are_stored_with_each_of_them(models: Callable[[str], Path], tmp_path: Path) -> None:
    report = api.quantize(job(models("gpt_oss"), RTN, tmp_path / "out"))
    tensors, source = stored_tensors(tmp_path / "out"), stored_tensors(models("gpt_oss"))
    assert not any(name.endswith("experts.gate_up_proj_bias") for name in tensors)
    fused = source["model.layers.1.mlp.experts.gate_up_proj_bias"]
    for i in range(4):
        assert torch.equal(tensors[f"model.layers.1.mlp.experts.{i}.gate_proj.bias"], fused[i, 0::2])
        assert torch.equal(tensors[f"model.layers.1.mlp.experts.{i}.up_proj.bias"], fused[i, 1::2])
    assert report["nbytes"]["total"] == sum(tensor.nbytes for tensor in tensors.values())


def test_a_resumed_run_writes_the_same_biases(models: Callable[[str], Path], tmp_path: Path) -> None:
    model = models("gpt_oss")
    api.quantize(job(model, GPTQ, tmp_path / "whole"))
    words = command(model, GPTQ, tmp_path / "out")
    assert cli(*words, prepare=interrupt("compress.quant.gptq", "quantize_rows", 20)).code == -signal.SIGKILL
    assert cli(*words).code == 0
    assert report_of(tmp_path / "out")["resumed_blocks"] == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_each_expert_is_quantized_with_its_own_tokens(models: Callable[[str], Path], tmp_path: Path) -> None:
    for name, top_k in (("gpt_oss", 2), ("llama4_text", 1)):
        setup = GPTQ.set("calibration.importance=attention")
        rows = api.quantize(job(models(name), setup, tmp_path / name))["layers"]
        modules = {row["name"].rsplit(".", 2)[0] for row in rows if row["name"].endswith("experts.0.gate_proj")}
        assert modules
        for module in modules:
            tokens = [row["tokens"] for row in rows if row["name"].startswith(module) and "gate_proj" in row["name"]]
            assert len(tokens) == 4 and sum(tokens) == top_k * 8 * 32


def test_tokens_in_an_order_of_their_own_cannot_be_weighed(models: Callable[[str], Path], tmp_path: Path) -> None:
    setup = GPTQ.set("calibration.importance=attention")
    with pytest.raises(UnsupportedModelError, match="experts are given rows in an order of their own"):
        api.quantize(job(models("jetmoe"), setup, tmp_path / "out"))


def test_experts_without_a_routing_are_not_pruned(models: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is not told which experts a token goes to"):
        api.quantize(job(models("llama4_text"), GPTQ.set("experts.prune=true"), tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["longcat_flash", "nemotron_h", "gpt_oss"])
def test_experts_are_pruned_in_other_layouts(name: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    report = api.quantize(job(models(name), GPTQ.set("experts.prune=true"), tmp_path / "out"))
    assert report["experts"] and all(len(row["counts"]) == 4 for row in report["experts"].values())
    assert all(None not in row["bits"] for row in report["experts"].values())
    assert torch.isfinite(logits(load(tmp_path / "out"))).all()


def test_a_change_of_an_expert_with_biases_is_measured_by_itself(models: Callable[[str], Path]) -> None:
    skeleton = Skeleton(open_checkpoint(models("gpt_oss")))
    block = skeleton.load_block(0, torch.device("cpu"))
    experts = block.get_submodule("mlp.experts")
    assert isinstance(experts, Experts)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weights = {name: experts.get_parameter(f"2.{name}.weight") for name in experts.layout.projections}
    torch.testing.assert_close(expert_routing._output(experts, 2, x, weights), experts.compute(2, x))


@pytest.mark.parametrize("name", ["longcat_flash", "llama4_text"])
def test_experts_that_are_more_than_linears_are_not_transformed(name: str, models: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="experts that are more, or given something else, than linears"):
        graph.trace(Skeleton(open_checkpoint(models(name))))


def test_a_rotated_model_keeps_its_function(tmp_path: Path) -> None:
    """The biases of what writes to the residual stream are rotated with its weights."""
    setup = Setup("int8", ("transform=[{method: rotate}]",))
    all_experts = {**MODELS["gpt_oss"], "num_experts_per_tok": 4}  # so that rounding sends no token to another one
    model = save(of_type("gpt_oss", all_experts), tmp_path / "model")
    api.quantize(job(model, setup, tmp_path / "out"))
    expected = logits(load(model))
    assert (logits(load(tmp_path / "out")) - expected).norm() < 0.05 * expected.norm()
