"""Draft heads are kept, quantized behind the quantized model, and draft as well as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from compress import api, formats
from compress.export import convert
from compress.export.source import open_source
from compress.model import draft_heads
from compress.model.skeleton import DRAFT_HEADS, Skeleton
from compress.run import plan_serving, prepare
from compress.run.capacity import ServingMemory
from compress.run.job import Job
from compress.runtime import draft_heads as names
from compress.runtime import hf
from compress.runtime.linear import PackedLinear
from compress.serving.config import PackedModules
from compress.storage.checkpoint import open_checkpoint
from helpers import drafting
from helpers.drafting import GLM, accepted_length, added, published, save_drafting, trained
from helpers.pico import of_type, save
from helpers.runs import GPTQ, KEEP_TABLES, RTN, Setup, stored_tensors

HEAD = "model.layers.2."
KEEP = "draft_heads={keep: true}"
ATTENTION = {f"{HEAD}self_attn.{name}_proj" for name in "qkvo"}
SHARED = {f"{HEAD}mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS = {f"{HEAD}mlp.experts.{n}.{name}_proj" for n in range(4) for name in ("gate", "up", "down")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafting(tmp_path_factory.mktemp("drafting") / "model")


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    file = model.with_name("text.txt")
    file.write_text("\n".join(drafting.lines(200, 3, 200)))
    return file


@pytest.fixture(scope="module")
def run(model: Path, text: Path) -> Callable[..., dict[str, Any]]:
    """run(name, *overrides) -> the report of a checkpoint of that name beside the model."""

    def quantized(name: str, setup: Setup = GPTQ, *overrides: str) -> dict[str, Any]:
        return api.quantize(Job(str(model), setup.set(*overrides).load(), model.with_name(name), calib=str(text)))

    return quantized


@pytest.fixture(scope="module")
def report(run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run("packed", GPTQ, "calibration.num_samples=32", "calibration.seq_len=64")


def opened(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, MtpModel.from_pretrained(model)


def test_a_head_is_kept_whole(model: Path, report: dict[str, Any]) -> None:
    """Its linears are packed under their own names; all else of it has the bytes that it had; every byte is counted."""
    before, after = load_file(model / "model.safetensors"), stored_tensors(model.with_name("packed"))
    packed = ATTENTION | SHARED | EXPERTS
    for name in (name for name in before if name.startswith(HEAD)):
        module = name.removesuffix(".weight")
        assert (module in packed) != (name in after and torch.equal(after[name], before[name])), name
        assert module not in packed or f"{module}.words8" in after
    rows = {row["name"]: row for row in report["layers"] if row["name"].startswith(HEAD)}
    assert rows.keys() == packed and all(row["params"]["bits"] == 8 for row in rows.values())
    plain = sum(t.nbytes for name, t in after.items() if name.startswith(HEAD) and name in before)
    assert report["nbytes"][DRAFT_HEADS] == plain and "unused" not in report
    assert report["nbytes"]["total"] == sum(tensor.nbytes for tensor in after.values())
    assert report["whole"]["parameters"] == sum(t.numel() for t in before.values()) - 2 * 264 * 64  # copies once
    assert report["kept"][f"{HEAD}eh_proj"] == "it joins an embedding and a hidden state"
    assert report["kept"][f"{HEAD}shared_head.head"] == "a copy of lm_head.weight"


def test_inputs_are_measured_behind_the_quantized_model(report: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in report["layers"] if row["name"].startswith(HEAD)}
    assert {rows[name]["tokens"] for name in ATTENTION | SHARED} == {32 * 63}
    assert {rows[name]["tokens"] for name in EXPERTS} == {0}
    assert all(rows[name]["output_error"] < 1e-3 for name in ATTENTION | SHARED)


def test_as_many_drafts_are_accepted(model: Path, report: dict[str, Any]) -> None:
    """Within 2% of the original's on 4,096 tokens; a head that is wired wrongly has next to none accepted."""
    target, heads = opened(model.with_name("packed"))
    assert isinstance(heads.layers[0].mtp_block.self_attn.q_proj, PackedLinear)
    for drafted in (2, 3):
        before = accepted_length(*trained(), drafted)
        assert before > 2.5
        assert abs(accepted_length(target, heads, drafted) / before - 1) < 0.02
    ids = drafting.texts(1, 5, 20)
    plain, drafts = (
        target.generate(ids, max_new_tokens=20, do_sample=False, use_mtp=is_used) for is_used in (False, True)
    )
    assert torch.equal(plain, drafts)
    with torch.no_grad():
        heads.layers[0].eh_proj.weight.copy_(heads.layers[0].eh_proj.weight.flip(1))
    assert accepted_length(target, heads, 2) < 1.5


def test_a_packed_head_computes_as_the_original(model: Path, report: dict[str, Any]) -> None:
    target, heads = trained()
    checkpoint = open_checkpoint(model.with_name("packed"))
    tensors = {name: stored.read() for name, stored in checkpoint.tensors.items() if name.startswith(HEAD)}
    config = hf.CompressConfig.read(checkpoint.config["quantization_config"])
    ours = names.open_heads(target, tensors, config, hf.place_packed)
    tokens = drafting.texts(4, 6, 40)
    with torch.no_grad():
        hidden = target.model(tokens).last_hidden_state
        a, b = (next(drafting.run(each, hidden, tokens)) for each in (heads, ours))
    assert (a - b).norm() < 0.02 * a.norm()


def test_what_recipes_say(model: Path, run: Callable[..., dict[str, Any]]) -> None:
    before = load_file(model / "model.safetensors")
    kept = run("kept", RTN, KEEP)
    after = stored_tensors(model.with_name("kept"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name.startswith(HEAD))
    assert not any(row["name"].startswith(HEAD) for row in kept["layers"])
    target, heads = opened(model.with_name("kept"))
    assert accepted_length(target, heads, 2) > 2.4

    def planned(setup: Setup, *overrides: str) -> tuple[set[str], str]:
        job = Job(str(model), setup.set(*overrides).load(), model.with_name("x"), calib="self")
        made = prepare.prepare(job)
        return {layer.scheme.method for layer in made.plan.draft_layers}, next(
            x for x in made.messages if "draft head" in x
        )

    assert planned(RTN)[0] == {"rtn"}  # no text is read for the head alone
    assert planned(RTN, "draft_heads={bits: 4}")[0] == {"gptq"}
    assert planned(GPTQ, f"ignore=['{HEAD}*']")[0] == set()
    methods, line = planned(GPTQ, "transform=[{method: rotate}]")
    assert methods == set() and "another basis" in line


def test_exports_say_what_is_plain(model: Path, report: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "held"
    result = convert.export(model.with_name("packed"), "compressed-tensors", folder)
    written, config = stored_tensors(folder), json.loads((folder / "config.json").read_text())["quantization_config"]
    assert f"{HEAD}self_attn.q_proj.weight_packed" in written and f"{HEAD}eh_proj" in config["ignore"]
    assert f"{HEAD}*" not in config["ignore"] and not any("words8" in name for name in written)
    plain = tmp_path / "plain"
    result = convert.export(model.with_name("packed"), "gptq", plain)
    assert any("19 linears of draft heads are written as plain float32" in line for line in result.notes)
    assert stored_tensors(plain)[f"{HEAD}self_attn.q_proj.weight"].shape == (128, 64)
    result = convert.export(model.with_name("packed"), "mlx", tmp_path / "none")
    assert any("draft heads are left out" in line for line in result.notes)
    assert not any(name.startswith(HEAD) for name in stored_tensors(tmp_path / "none"))


def test_types_of_engines_hold_heads(model: Path, run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """FP8 heads beside NVFP4 linears: our numbers are written, and what is plain of a head is ignored by name."""
    heads = "draft_heads={method: grid_rtn, type: fp8-channel, activations: {bits: 8, dtype: fp8}}"
    run("mixed", Setup("nvfp4", KEEP_TABLES), "calibration.num_samples=8", "calibration.seq_len=32", heads)
    drafts = [weight for weight in open_source(model.with_name("mixed")).packed if weight.is_draft]
    assert {weight.name for weight in drafts} == ATTENTION | SHARED | EXPERTS
    plain = {f"{HEAD}{name}" for name in ("eh_proj", "embed_tokens", "mlp.gate", "shared_head.head")}
    for target in ("modelopt", "compressed-tensors"):
        convert.export(model.with_name("mixed"), target, tmp_path / target)
        written = stored_tensors(tmp_path / target)
        for weight in drafts:
            codes, scales = written[f"{weight.name}.weight"], written[f"{weight.name}.weight_scale"]
            ours = formats.decode(weight.read(), torch.float32)
            assert torch.equal(codes.float() * scales.reshape(-1, 1), ours), (target, weight.name)
        config = json.loads((tmp_path / target / "config.json").read_text())["quantization_config"]
        assert {name for name in config["ignore"] if name.startswith(HEAD)} == plain
        if target == "modelopt":
            algorithms = {config["quantized_layers"][weight.name]["quant_algo"] for weight in drafts}
            assert algorithms == {"FP8_PER_CHANNEL_PER_TOKEN"}


TABLES = ("embed_tokens", "lm_head")
CUT = (*TABLES, *(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_device_holds_heads_once(devices: int, model: Path, report: dict[str, Any]) -> None:
    """Linears of heads are cut like those of blocks; copies of tables are none of an engine's weights."""
    told = {
        of: plan_serving.of_job(
            Job(str(model.with_name(of)), GPTQ.load(), model.with_name("x"), calib="self"),
            ServingMemory(1 << 30, devices),
        )["choices"]
        for of in ("model", "packed")
    }
    original, planned, packed = told["model"][0], told["model"][1], told["packed"][-1]
    nbytes = whole = 0
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.startswith(HEAD) and tensor.shape[0] == 264:
            continue
        is_cut = devices > 1 and name.split(".")[-2] in CUT
        nbytes += 2 * tensor.numel() // (devices if is_cut else 1)
        whole += 0 if is_cut or devices == 1 else 2 * tensor.numel()
    assert (original["weights_nbytes"], sum(original["whole"].values())) == (nbytes, whole)
    assert planned["weights_nbytes"] == packed["weights_nbytes"]
    assert sum(planned["whole"].values()) == sum(packed["whole"].values()) == 2 * whole  # in float32, nothing packed
    assert devices > 1 or planned["weights_nbytes"] == report["nbytes"]["total"] - 2 * 264 * 64 * 4
    assert devices > 1 or told["packed"][0]["weights_nbytes"] == nbytes


def test_engines_find_heads_by_their_names(model: Path, report: dict[str, Any]) -> None:
    config = open_checkpoint(model.with_name("packed")).config["quantization_config"]
    listed = PackedModules(config)
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    found = listed.linears(f"{HEAD}self_attn.qkv_proj", fused)
    assert found is not None and all(found.values()) and found.keys() == ATTENTION - {f"{HEAD}self_attn.o_proj"}
    assert listed.linears(f"{HEAD}eh_proj", fused) is None
    assert listed.experts(f"{HEAD}mlp.experts", ("gate_proj", "up_proj", "down_proj")) == f"{HEAD}mlp.experts"


DEEPSEEK = {
    **{"num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32},
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1},
    **{"num_nextn_predict_layers": 1},
}
QWEN = {
    **{
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 4,
    },
    **{"num_experts_per_tok": 2, "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"layer_types": ["linear_attention", "full_attention"]},
}


def below(head: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors as Qwen3-Next names them."""
    outside = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    }
    renamed = {}
    for name, tensor in head.items():
        module = name.removesuffix(".weight")
        renamed[f"mtp.{outside[module]}.weight" if module in outside else f"mtp.layers.0.{name}"] = tensor
    return renamed


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_heads_of_families_can_be_run(kind: str, tmp_path: Path) -> None:
    """All their linears but routed experts are found, and are modules whose inputs can be measured."""
    model: Any = of_type(kind, DEEPSEEK if kind == "deepseek_v3" else QWEN)
    folder = save(model, tmp_path / "model")
    names.describe(model.config, ["mtp.layers.0.mlp.experts.0.up_proj.weight"])
    own: Any = MtpModel(model, 1)
    for parameter in own.parameters():  # its class leaves some as they lie in memory
        torch.nn.init.normal_(parameter, std=0.02)
    head = published(own, "" if kind == "qwen3_next" else HEAD)
    added(folder, below(head) if kind == "qwen3_next" else head)
    skeleton = Skeleton(open_checkpoint(folder))
    skeleton.check_tensors()
    assert draft_heads.can_open(skeleton) is None
    specs = draft_heads.specs(draft_heads.matrices(skeleton)[0], skeleton.dtype)
    wanted = [spec.name for spec in specs if not spec.is_expert]
    assert any("self_attn" in name for name in wanted) and any("shared_expert" in name for name in wanted)
    skeleton.load_rest(torch.device("cpu"))
    heads = draft_heads.load(skeleton, torch.device("cpu"))
    assert draft_heads.linears(heads, wanted, skeleton).keys() == set(wanted)
    hidden, tokens = torch.randn(2, 9, 64), torch.arange(18).reshape(2, 9)
    (behind,) = draft_heads.run(heads, hidden, tokens)
    assert behind.shape == (2, 8, 64) and behind.isfinite().all()


def test_names_of_heads() -> None:
    config = of_type("glm4_moe", GLM).config
    for name in (
        f"{HEAD}eh_proj.weight",
        "mtp.fc.weight",
        "mtp.0.attn.wq_a.weight",
        "model.mtp.layers.1.mlp.up_proj.weight",
    ):
        assert names.is_of_head(name, config)
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight", "vision.layers.7.mlp.up_proj.weight"):
        assert not names.is_of_head(name, config)
    assert names.place("model.layers.3.self_attn.q_proj", 2) == (1, "self_attn.q_proj")
    assert names.place("mtp.layers.0.self_attn.q_proj", 2) == (0, "self_attn.q_proj")
    assert names.place("mtp.1.attn.wq_a", 2) == (1, "attn.wq_a")
