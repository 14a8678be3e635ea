"""Models of text beside images: the whole class is opened, the text quantized, the tower left alone or on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from compress import api
from compress.errors import RecipeError
from compress.model.load import load_model
from compress.model.skeleton import OFF_TEXT_PATH, Skeleton
from compress.run import sizes, verify
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from helpers import pico, wrappers
from helpers.runs import GPTQ, RTN, job, report_of, stored_tensors

TOWERS = {"qwen2_5_vl": "visual.", "gemma3": "vision_tower.", "llava": "vision_tower.", "qwen3_5": "visual."}
TOKENS = torch.arange(40)[None] + 60
IN_TOWER = 'towers=[{match: "*.%s*", bits: 8}]'


def saved(name: str, directory: Path) -> Path:
    return pico.save(wrappers.build(name), directory)


def error(model: PreTrainedModel, original: PreTrainedModel, **inputs: torch.Tensor) -> float:
    """Return how far the logits are, as a share of the original's."""
    with torch.no_grad():
        found, wanted = model(**inputs).logits, original(**inputs).logits
    return float((found - wanted).norm() / wanted.norm())


def packed(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("name", TOWERS)
def test_the_text_is_packed_and_the_class_loads_it(name: str, tmp_path: Path) -> None:
    source, out = saved(name, tmp_path / "model"), tmp_path / "out"
    (source / "preprocessor_config.json").write_text('{"do_resize": false}')
    report = api.quantize(job(source, GPTQ, out))
    assert report["self_check"] == "passed" and OFF_TEXT_PATH in report["nbytes"]
    assert (out / "preprocessor_config.json").read_text() == '{"do_resize": false}'
    original = AutoModelForImageTextToText.from_pretrained(source)
    model = AutoModelForImageTextToText.from_pretrained(out)
    assert type(model) is type(original) is type(load_model(out))
    text = {
        n
        for n, m in original.get_decoder().named_modules()
        if isinstance(m, torch.nn.Linear) and min(m.weight.shape) > 15
    }
    assert len(packed(model)) == len(text)
    tower = {key: tensor for key, tensor in stored_tensors(source).items() if TOWERS[name] in key}
    written = stored_tensors(out)
    assert tower and all(torch.equal(written[key], tensor) for key, tensor in tower.items())
    inputs = wrappers.with_image(name, model)
    assert error(model, original, input_ids=TOKENS) < 0.6 and error(model, original, **inputs) < 0.6
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape == (1, 17)
    assert verify.verify(out)["blocks"] == 2


def test_text_alone_is_opened_by_its_own_class(tmp_path: Path) -> None:
    """AutoModelForCausalLM has a class for the text part, in which the listed modules have shorter names."""
    api.quantize(job(saved("qwen3_5", tmp_path / "model"), RTN, tmp_path / "out"))
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is not type(whole) and len(packed(model)) == len(packed(whole))
    assert error(model, whole, input_ids=TOKENS) < 1e-6


def test_a_tower_is_packed_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sizes, "TOWER_SHARD_NBYTES", 2500)
    source, out = saved("llava", tmp_path / "model"), tmp_path / "out"
    api.quantize(job(source, GPTQ.set(IN_TOWER % "vision_tower."), out))
    model = AutoModelForImageTextToText.from_pretrained(out)
    original = AutoModelForImageTextToText.from_pretrained(source)
    in_tower = [name for name in packed(model) if "vision_tower" in name]
    assert len(list(out.glob("model-beside-*.safetensors"))) > 1
    assert len(in_tower) == 12 and "model.multi_modal_projector.linear_1" not in packed(model)
    inputs = wrappers.with_image("llava", model)
    with torch.no_grad():
        before, after = (m(**inputs).logits for m in (original, model))
    assert 0 < (after - before).norm() < 0.5 * before.norm()
    assert {row["method"] for row in report_of(out)["layers"] if row["name"] in in_tower} == {"rtn"}
    assert verify.verify(out)["manifest"] == "checked"


def test_a_tower_takes_no_method_that_needs_text(tmp_path: Path) -> None:
    source = saved("llava", tmp_path / "model")
    with pytest.raises(RecipeError, match=r"gptq needs calibration text, which never reaches model\.vision_tower"):
        api.quantize(job(source, GPTQ.set('towers=[{match: "*.vision_tower.*", method: gptq}]'), tmp_path / "out"))
    with pytest.raises(RecipeError, match=r"'nothing' matches no linear beside the text model"):
        api.quantize(job(source, GPTQ.set("towers=[{match: nothing}]"), tmp_path / "out"))


def test_towers_are_not_loaded_to_read_text(tmp_path: Path) -> None:
    skeleton = Skeleton(open_checkpoint(saved("llava", tmp_path / "model")))
    assert skeleton.text_path.towers == ("model.vision_tower", "model.multi_modal_projector")
    skeleton.load_rest(torch.device("cpu"))
    loaded = [
        name for name, p in skeleton.model.named_parameters() if skeleton.is_off_text_path(name) and not p.is_meta
    ]
    assert len(loaded) <= 1  # the first, by which the model knows its device
    assert not skeleton.model.get_input_embeddings().weight.is_meta


def test_blocks_that_text_skips_are_packed_without_data(tmp_path: Path) -> None:
    source, out = saved("mllama", tmp_path / "model"), tmp_path / "out"
    report = api.quantize(job(source, GPTQ, out))
    notes = {row["name"]: row["notes"] for row in report["layers"]}
    crossing = {name for name in notes if ".cross_attn." in name}
    assert len(crossing) == 8 and all("no calibration token" in notes[name][0] for name in crossing)
    model = AutoModelForImageTextToText.from_pretrained(out)
    original = AutoModelForImageTextToText.from_pretrained(source)
    assert len(packed(model)) == 28
    assert error(model, original, input_ids=TOKENS) < 0.5
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["MllamaForConditionalGeneration"]


def test_without_a_named_class_the_text_part_is_opened(tmp_path: Path) -> None:
    source = saved("qwen3_5", tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["Qwen3_5ForCausalLM"]
    (source / "config.json").write_text(json.dumps(config))
    assert type(load_model(source)).__name__ == "Qwen3_5ForCausalLM"
    assert AutoConfig.from_pretrained(source).architectures == ["Qwen3_5ForCausalLM"]
