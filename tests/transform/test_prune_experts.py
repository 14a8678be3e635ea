"""Models with fewer experts: which go, what is written, what is refused, and that a pass is not repeated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api, recipe
from compress.errors import CompressError
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.run import verify
from compress.run.job import Job
from compress.storage.checkpoint import open_checkpoint
from compress.transform import prune_experts
from compress.transform.prune_experts import Config
from helpers.pico import of_type, save
from helpers.runs import KEEP_TABLES, SMALL, TEXT, report_of

HEADS = {"num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**HEADS, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **{"num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8},
        **{"shared_expert_intermediate_size": 48, "num_experts_per_tok": 3, "decoder_sparse_step": 1},
    },
    "deepseek_v3": {
        **{"intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 32},
        **{"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
        **{"num_key_value_heads": 4, "num_hidden_layers": 3},
    },
    "gpt_oss": {**HEADS, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2},
    "dbrx": {
        **{"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": None, "rope_theta": 10000.0},
    },
    "llama4_text": {
        **{**HEADS, "intermediate_size": 96, "intermediate_size_mlp": 96},
        **{"num_local_experts": 4, "num_experts_per_tok": 1},
    },
}
PRUNED = ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss")
TOKENS = torch.randint(250, (6, 32), generator=torch.Generator().manual_seed(5))
KEYS = {"mixtral": "num_local_experts", "qwen2_moe": "num_experts", "gpt_oss": "num_local_experts"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            model = of_type(name, MODELS[name])
            for key, buffer in model.named_buffers():
                if "correction" in key:
                    buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(7)) * 0.1)
            made[name] = save(model, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def prune(model: Path, folder: Path, tokens: Tensor | None = TOKENS, batch: int = 4, **settings: Any) -> Any:
    """The model's skeleton with fewer experts, and the notes."""
    skeleton = Skeleton(open_checkpoint(model))
    edits = prune_experts.apply(skeleton, Config(**settings), 0)
    bench = EditContext(torch.device("cpu"), tokens, None, batch, folder, None, lambda text: None)  # type: ignore[arg-type]
    return skeleton, edits.choose(bench)


@torch.no_grad()
def reference(model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
    """REAP's scores of each module of experts, by the definition: one token and one expert at a time, float64."""
    model.double().set_experts_implementation("eager")
    scores: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, Tensor, Tensor], output: Any) -> None:
            hidden, index, weights = args
            total, count = (torch.zeros(module.num_experts, dtype=torch.float64) for _ in range(2))
            for token, (chosen, gates) in enumerate(zip(index.tolist(), weights, strict=True)):
                for number, gate in zip(chosen, gates, strict=True):
                    alone = torch.tensor([[number]]), torch.ones(1, 1, dtype=torch.float64)
                    total[number] += gate * module.forward(hidden[token][None], *alone).norm()
                    count[number] += 1
            scores[name] = total / count.clamp(min=1)

        return hook

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_hook(watch(name))
    model(input_ids=tokens)
    return scores


@pytest.mark.parametrize("name", PRUNED)
def test_the_least_experts_go_and_all_else_stays(
    name: str, models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    choose = prune_experts.FewerExperts.choose

    def spy(self: prune_experts.FewerExperts, bench: EditContext) -> list[str]:
        assert bench.tokens is not None
        seen.append(bench.tokens)
        return choose(self, bench)

    monkeypatch.setattr(prune_experts.FewerExperts, "choose", spy)
    path = tmp_path / "r.yaml"
    path.write_text(
        "calibration: {num_samples: 4, seq_len: 16}\ntransform: [{method: prune_experts, remove: 0.5, samples: 3}]\n"
    )
    api.quantize(Job(str(models(name)), recipe.load(str(path)), tmp_path / "out", calib=str(TEXT), pack=False))
    before = AutoModelForCausalLM.from_pretrained(models(name), dtype=torch.float32)
    after, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(after) is type(before) and getattr(after.config, KEYS.get(name, "n_routed_experts")) == 4
    state, pruned = before.state_dict(), after.state_dict()
    kept = {}
    for module, scores in reference(before, seen[0][:3]).items():
        groups = 2 if name == "deepseek_v3" else 1
        order = scores.view(groups, -1).argsort(1)[:, 4 // groups :] + torch.arange(groups)[:, None] * (8 // groups)
        kept[module.rpartition(".")[0]] = order.flatten().sort().values
    for key, tensor in state.items():
        index = next((each for owner, each in kept.items() if key.startswith(f"{owner}.")), None)
        is_cut = index is not None and tensor.shape[0] == 8
        expected = tensor.float()[index] if is_cut else tensor.float()
        assert torch.equal(pruned[key].float(), expected), key
        assert is_cut or "mlp.experts." not in key
    verify.verify(tmp_path / "out")
    assert any("fewer than 128 tokens" in note for note in report_of(tmp_path / "out")["notes"]["transform"])


def test_batches_and_an_interruption_change_nothing(models: Callable[[str], Path], tmp_path: Path) -> None:
    notes = []
    for batch in (1, 6):
        folder = tmp_path / str(batch)
        folder.mkdir()
        notes.append(prune(models("mixtral"), folder, batch=batch)[1])
    assert notes[0] == notes[1] == prune(models("mixtral"), tmp_path / "1", tokens=None)[1]
    with pytest.raises(CompressError, match="there is none; give --calib"):
        prune(models("mixtral"), tmp_path, tokens=None)


def test_scores_differ_and_chance_is_the_seeds(models: Callable[[str], Path], tmp_path: Path) -> None:
    notes = {by: prune(models("qwen2_moe"), tmp_path, by=by)[1] for by in ("reap", "frequency", "router_mean")}
    notes["random"] = prune(models("qwen2_moe"), tmp_path, tokens=None, by="random")[1]
    assert len({each[1] for each in notes.values()}) == 4
    assert notes["random"] == prune(models("qwen2_moe"), tmp_path, tokens=None, by="random")[1]


@pytest.mark.slow
def test_the_recipe_packs_what_is_left(models: Callable[[str], Path], tmp_path: Path) -> None:
    changes = (*KEEP_TABLES, *SMALL, "calibration.seq_len=16", "group_size=32", "two_sided=false")
    for out, pack in (("packed", True), ("plain", False)):
        loaded = recipe.load("moe-reap25", changes)
        api.quantize(Job(str(models("gpt_oss")), loaded, tmp_path / out, calib=str(TEXT), pack=pack))
    plain, packed = (AutoModelForCausalLM.from_pretrained(tmp_path / out) for out in ("plain", "packed"))
    assert plain.config.num_local_experts == packed.config.num_local_experts == 6
    decoded = packed.dequantize().state_dict()
    for key, tensor in plain.state_dict().items():
        assert (decoded[key] - tensor).norm() <= 0.2 * tensor.norm(), key


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("llama4_text", {}, "not told the routing"),
        ("mixtral", {"remove": 7}, "leaves 1 experts, and a token takes 2"),
        ("mixtral", {"remove": 0.1}, "is none; the least is one of them"),
        ("deepseek_v3", {"remove": 3}, "remove a multiple of 2"),
        ("deepseek_v3", {"remove": 6}, "1 experts in each of 2 groups"),
        ("dbrx", {}, "gives no number of experts"),
    ],
)
def test_refused(name: str, settings: dict[str, Any], said: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CompressError, match=said):
        prune(models(name), tmp_path, **settings)


def test_draft_heads_with_experts_are_refused(models: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(models("deepseek_v3"), tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    tensors |= {name.replace("layers.2.", "layers.3."): x.clone() for name, x in tensors.items() if "layers.2." in name}
    save_file(tensors, tmp_path / "m/model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(CompressError, match="draft heads have experts of their own"):
        prune(tmp_path / "m", tmp_path)


def test_a_dense_model_is_refused(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="has no experts"):
        prune(pico_dir("llama"), tmp_path)
