"""PEFT on packed models, as a user writes it: no private call. Skipped where PEFT is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

import compress
from compress import api
from compress.errors import AdapterError, CheckpointError
from compress.kv import saved
from compress.runtime.linear import PackedLinear
from compress.storage import json_text
from helpers.pico import of_type, save, save_pico
from helpers.runs import RTN, environment, job

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of PEFT, which asks transformers by an old name
    pytest.mark.filterwarnings(
        "ignore:The following (rank|alpha)_pattern keys"
    ),  # of fused experts, which are not fused here
]
TOKENS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
NEW_PROCESS = """
import sys
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
given = load_file(sys.argv[1] + "/given.safetensors")
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    logits = model(input_ids=given["tokens"]).logits
torch.testing.assert_close(logits, given["logits"], rtol=1e-4, atol=1e-5)
"""


@pytest.fixture(scope="module", params=["llama", "gpt2", "mixtral"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linears of the blocks, or experts, packed in 8 bits; of the first also the tables."""
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    setup = RTN.set("embeddings={}", "head={}") if name == "llama" else RTN
    if name == "gpt2":  # weights stored as [in, out]
        model = save(of_type(name, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}), folder / "model")
    else:
        model = save_pico(name, folder / "model")
    api.quantize(job(model, setup, folder / "packed"))
    return folder / "packed"


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def adapted(directory: Path, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(directory)
    return peft.get_peft_model(model, peft.LoraConfig(**{**CONFIG, **settings}))


def train(model: Any, steps: int = 8) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained(packed: Path) -> Any:
    model = adapted(packed)
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0]
    return model


def test_all_linears_but_the_head_are_wrapped(packed: Path, trained: Any) -> None:
    wrapped = {name for name, module in trained.get_base_model().named_modules() if hasattr(module, "lora_A")}
    plain = compress.load(packed)
    linears = {name for name, module in plain.named_modules() if isinstance(module, PackedLinear)}
    head = {name for name, module in plain.named_modules() if module is plain.get_output_embeddings()}
    assert linears - head <= wrapped and not wrapped & head
    assert all("lora_" in name for name, parameter in trained.named_parameters() if parameter.requires_grad)


def test_a_new_process_loads_what_was_trained(trained: Any, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    save_file({"tokens": TOKENS, "logits": logits(trained)}, tmp_path / "given.safetensors")
    command = [sys.executable, "-c", NEW_PROCESS, str(tmp_path)]
    result = subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


def test_merged_into_dense_and_saved(packed: Path, trained: Any, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(packed)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    expected, before = logits(model), logits(AutoModelForCausalLM.from_pretrained(packed))
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)  # a router is no packed linear
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    merged = model.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, rtol=1e-3, atol=1e-4
    )
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    listed = config.get("quantization_config", {}).get("modules", {})
    assert set(listed) <= {"model.embed_tokens", "lm_head"}  # which no adapter was merged into
    assert (json_text.NOTICE_KEY in config) == bool(listed)


def test_trained_biases_leave_those_of_the_base(tmp_path: Path) -> None:
    api.quantize(job(save_pico("qwen2", tmp_path / "model"), RTN, tmp_path / "packed"))
    model = adapted(tmp_path / "packed", lora_bias=True, target_modules=["q_proj"])
    for parameter in (
        parameter for name, parameter in model.named_parameters() if name.endswith("lora_B.default.bias")
    ):
        parameter.data += 1
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.merge_adapter()
    model.unmerge_adapter()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_saving_while_merged_leaves_the_model_as_it_is(packed: Path, tmp_path: Path) -> None:
    model = adapted(packed)
    expected = logits(model)  # an adapter begins as nothing
    model.merge_adapter()
    model.get_base_model().save_pretrained(tmp_path / "merged")
    model.unmerge_adapter()
    model.unload().save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config == json.loads((packed / "config.json").read_text())
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), expected)


def test_a_merge_that_fails_changes_nothing(packed: Path) -> None:
    names = ["c_attn", "q_proj"]
    model = adapted(packed, target_modules=names)
    model.add_adapter("broken", peft.LoraConfig(**{**CONFIG, "target_modules": names}))
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    layer.lora_B["broken"].weight.data.fill_(float("nan"))
    base = layer.base_layer
    with pytest.raises(ValueError, match="NaNs"):
        layer.merge(safe_merge=True, adapter_names=["default", "broken"])
    assert layer.base_layer is base and not layer.merged_adapters
    layer.merge(adapter_names=["default"])
    assert layer.merged_adapters == ["default"] and layer.base_layer is not base


def test_kbit_preparation_keeps_the_stored_tensors(packed: Path) -> None:
    """And turns gradient checkpointing on, with the same gradients."""
    model = AutoModelForCausalLM.from_pretrained(packed)
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = {name: value.dtype for name, value in stored.items()}
    model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.is_activation_checkpointing
    assert {name: value.dtype for name, value in model.state_dict().items()} == kinds
    torch.manual_seed(0)
    assert train(peft.get_peft_model(model, peft.LoraConfig(**CONFIG))) == pytest.approx(
        train(adapted(packed)), rel=1e-3
    )


def test_what_needs_the_plain_weight_is_refused(packed: Path) -> None:
    for settings in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(AdapterError, match="which is packed"):
            adapted(packed, **settings)


@pytest.mark.parametrize("initial", ["gaussian", "orthogonal"])
def test_initial_values_that_leave_the_base_alone(packed: Path, initial: str) -> None:
    model = adapted(packed, init_lora_weights=initial)
    assert any(type(module).__name__ == "PackedLoraLinear" for module in model.modules())


def test_names_and_a_second_adapter(packed: Path) -> None:
    names = ["c_attn", "q_proj"]
    model = adapted(packed, target_modules=names)
    model.add_adapter("second", peft.LoraConfig(**{**CONFIG, "target_modules": names, "r": 2}))
    model.set_adapter("second")
    assert {type(m).__name__ for m in model.modules() if hasattr(m, "lora_A")} == {"PackedLoraLinear"}
    assert train(model)[-1] > 0


def test_a_saved_prompt_belongs_to_the_adapter_that_read_it(packed: Path, tmp_path: Path) -> None:
    model = adapted(packed, init_lora_weights=False)
    model.add_adapter("second", peft.LoraConfig(**CONFIG, init_lora_weights=False))
    base, tokens = model.get_base_model(), TOKENS[:1]

    def keep() -> None:
        cache = DynamicCache(config=base.config)
        with torch.no_grad():
            base(input_ids=tokens, past_key_values=cache)
        saved.save_cache(cache, tmp_path / "prompt.kv", base, tokens)

    keep()
    saved.load_cache(base, tmp_path / "prompt.kv", tokens)
    model.set_adapter("second")
    with pytest.raises(CheckpointError, match="another model"):
        saved.load_cache(base, tmp_path / "prompt.kv", tokens)
    with model.disable_adapter(), pytest.raises(CheckpointError, match="another model"):
        saved.load_cache(base, tmp_path / "prompt.kv", tokens)


@pytest.mark.filterwarnings("ignore")  # of other packages
def test_the_trainer_of_transformers(packed: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
    options = {"report_to": "none", "use_cpu": True, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path), max_steps=4, gradient_checkpointing=True, **options)
    trainer = Trainer(adapted(packed), arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    assert all("lora_" in name for name in load_file(tmp_path / "saved/adapter_model.safetensors"))


def test_plain_models_are_as_before() -> None:
    from helpers.pico import PICO

    model = peft.get_peft_model(PICO["llama"](), peft.LoraConfig(**CONFIG))
    assert {type(m) for m in model.modules() if hasattr(m, "lora_A")} == {peft.tuners.lora.Linear}
