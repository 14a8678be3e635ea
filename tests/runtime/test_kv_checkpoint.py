"""Checkpoints with a cache of their own: written, loaded, used by generate; and what is refused, in one line each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compress import api, process_memory, recipe
from compress.errors import CheckpointError, CompressError, RecipeError
from compress.kv import attention, generation, hooks
from compress.kv.cache import make_cache
from compress.kv.codecs import kvquant
from compress.kv.layer import KVCache
from compress.kv.settings import cache_settings
from compress.run import prepare, verify
from compress.run.job import Job
from compress.runtime import kv_config
from helpers.pico import build, save_pico
from helpers.runs import TEXT, contents

KIVI = "{method: kivi, bits: 4, group_size: 16, residual_length: 32, layers: [{match: 0, keys: {bits: 8}}]}"
TABLE = {"method": "kivi", "bits": 4, "group_size": 16, "residual_length": 32, "layers": {"0": {"keys": {"bits": 8}}}}
CALIBRATED = "{method: kvquant, residual_length: 32}"
SMALL = "calibration: {num_samples: 4, seq_len: 32}\n"


def run(model: Path, out: Path, text: str) -> dict[str, Any]:
    path = out.with_suffix(".yaml")
    path.write_text(SMALL + text)
    loaded = recipe.load(str(path))
    return api.quantize(Job(str(model), loaded, out, calib=str(TEXT), pack=loaded.packs))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kv")
    model = save_pico("llama", folder / "model")
    texts = {
        "both": f"quantize: {{method: rtn, bits: 8}}\nkv_cache: {KIVI}",
        "cache": f"kv_cache: {KIVI}",
        "calibrated": f"kv_cache: {CALIBRATED}",
    }
    for name, text in texts.items():
        run(model, folder / name, text)
    return {"model": model, **{name: folder / name for name in texts}}


@pytest.fixture
def copy(written: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written["calibrated"], tmp_path / "copy"))


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory)


def generated(model: PreTrainedModel, **settings: Any) -> Any:
    ids = torch.arange(120)[None] % 250
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**arguments, **settings})


@pytest.mark.parametrize("name", ["both", "cache"])
def test_generate_uses_the_cache_without_being_asked(written: dict[str, Path], name: str) -> None:
    model = load(written[name])
    own = model.config._attn_implementation
    found = generated(model)
    cache = found.past_key_values
    assert isinstance(cache, KVCache) and cache.path == model.kv_cache.path == "fused"
    assert model.config._attn_implementation == own != attention.NAME
    bits = [(layer["keys"].config.bits, layer["values"].config.bits) for layer in cache.codings]
    assert bits == [(8, 4), (4, 4)]
    assert 0 < cache.nbytes().codes < cache.nbytes().tail
    assert torch.equal(generated(model).sequences, found.sequences)  # a fresh cache each time
    explicit = make_cache(model.config, TABLE)
    assert torch.equal(generated(model, past_key_values=explicit).sequences, found.sequences)


def test_what_the_user_says_wins_and_plain_calls_stay(written: dict[str, Path]) -> None:
    model, plain = load(written["cache"]), load(written["model"])
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert isinstance(generated(model, past_key_values=DynamicCache(config=model.config)).past_key_values, DynamicCache)
    assert generated(model, use_cache=False).past_key_values is None
    assert not isinstance(generated(model, cache_implementation="static").past_key_values, KVCache)
    model.generation_config.cache_implementation = "dynamic"  # of the checkpoint, not of the user
    assert isinstance(generated(model).past_key_values, KVCache)
    model.train()
    model(ids, labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad is not None
    generation.detach(model)
    model.eval()
    model.generation_config.cache_implementation = None
    assert isinstance(generated(model).past_key_values, DynamicCache)
    assert not hasattr(model, "kv_cache") and not hasattr(model, hooks._MARK)


def test_batches_with_padding_and_beams(written: dict[str, Path]) -> None:
    model = load(written["cache"])
    ids = torch.randint(0, 250, (2, 70), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 2, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, past_key_values=make_cache(model.config, TABLE), **settings)
    assert torch.equal(model.generate(ids, **settings), expected)


def test_what_is_on_disk(written: dict[str, Path], tmp_path: Path) -> None:
    section = json.loads((written["both"] / "config.json").read_text())["quantization_config"]["kv_cache"]
    assert section["version"] == 1 and "static" not in section
    stored = kv_config.read(section, 2)
    assert stored.by_layer(2) == cache_settings(TABLE).by_layer(2)
    assert section["keys"]["flush"] == 32  # defaults are written out
    for name in ("both", "cache", "calibrated"):
        assert verify.verify(written[name])["blocks"] == 2
    index = json.loads((written["calibrated"] / "model.safetensors.index.json").read_text())
    assert kv_config.FILE not in index["weight_map"].values()
    report = json.loads((written["calibrated"] / "report.json").read_text())
    assert report["kv_cache"]["calibration"]["tokens"] == 4 * 32
    again = tmp_path / "calibrated"
    run(written["model"], again, f"kv_cache: {CALIBRATED}")
    assert contents(again) == contents(written["calibrated"])


def test_calibrated_tensors_travel_with_the_model(written: dict[str, Path], tmp_path: Path) -> None:
    model = load(written["calibrated"])
    found = generated(model)
    assert found.past_key_values.nbytes().static > 0
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(generated(again).sequences, found.sequences)
    assert again.kv_cache.static.keys() == model.kv_cache.static.keys()
    assert type(AutoModel.from_pretrained(written["calibrated"])).__name__ == "LlamaModel"  # has no generate


def test_a_file_that_is_not_what_was_written_is_refused(copy: Path) -> None:
    path = copy / kv_config.FILE
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-7] ^= 1
    for damaged in (bytes(flipped), whole[:-16], whole[:40], b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is not the file that was written with this checkpoint"):
            load(copy)
        with pytest.raises(CheckpointError, match="is not the file that was written"):
            verify.verify(copy)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{kv_config.FILE} is missing"):
        load(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"version": 2}, "kv_cache has version 2, this compress reads 1; upgrade compress"),
        (lambda s: s | {"layers": {"7": {}}}, "there is no layer 7, the model has 2"),
        (lambda s: s | {"keys": {"method": "other"}}, "unknown kv plugin 'other'"),
        (lambda s: s | {"static": {"file": "../x", "sha256": ""}}, "kv_cache.static names no kv_cache.safetensors"),
        (lambda s: [], "kv_cache is not a table"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(copy: Path, change: Callable[[Any], Any], message: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["kv_cache"] = change(config["quantization_config"]["kv_cache"])
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CompressError, match=message):
        load(copy)


def test_tensors_of_a_larger_model_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    section = config["quantization_config"]["kv_cache"]
    tensors = load_file(copy / kv_config.FILE)
    tensors |= {name.replace("layers.0", "layers.5"): tensor for name, tensor in tensors.items()}
    section |= kv_config.write(copy, kv_config.read(section, 2), 2, tensors)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"kv_cache: layers\.5\.keys\.\w+ is not expected"):
        load(copy)


def test_a_context_past_the_model(written: dict[str, Path]) -> None:
    model = load(written["cache"])
    with pytest.raises(CompressError, match="a context of 259 tokens, but the model has 256 positions"):
        generated(model, max_new_tokens=140)
    generated(model, max_new_tokens=137, min_new_tokens=137)


@pytest.mark.parametrize(
    ("name", "cache", "message"),
    [
        (
            "mistral",
            KIVI,
            "no layer of this model has the full attention that is coded .they are sliding_attention.; remove kv_cache",
        ),
        ("llama", "{method: kivi, group_size: 12}", "layer 0, values: group_size 12 does not divide the head's 16"),
        ("llama", "{method: kivi, group_size: 16, skip_layers: [2]}", "there is no layer 2, the model has 2"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_before_the_run(
    pico_dir: Callable[..., Path], tmp_path: Path, name: str, cache: str, message: str
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"quantize: {{method: rtn}}\nkv_cache: {cache}")
    with pytest.raises(RecipeError, match=message):
        prepare.prepare(Job(str(pico_dir(name)), recipe.load(str(path)), tmp_path / "out"))


def test_models_that_look_into_their_keys_read_path_a() -> None:
    config = CONFIG_MAPPING["deepseek_v3"](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    generation.attach(model, {"method": "kivi", "bits": 8, "group_size": 16, "residual_length": 32})
    ids = torch.arange(60)[None]
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, return_dict_in_generate=True)
    assert isinstance(found.past_key_values, KVCache) and model.kv_cache.path == "decode"
    assert model.config._attn_implementation != attention.NAME


def test_models_and_recipes_that_do_not_go_together() -> None:
    model = build("llama")
    with pytest.raises(RecipeError, match="there is no layer 5"):
        generation.attach(model, TABLE | {"skip_layers": [5]})
    assert not hasattr(model, "kv_cache")
    model.config.is_encoder_decoder = True
    with pytest.raises(RecipeError, match="a model with an encoder"):
        generation.attach(model, TABLE)


def test_what_calibration_takes_is_predicted(written: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to as many tokens as it takes, and only where there is any."""
    peaks = {}
    for factor in (1000, 2000):
        monkeypatch.setattr(kvquant, "WORK", factor)
        monkeypatch.setattr(process_memory, "resident", lambda: 1 << 30)
        for cache, samples in ((KIVI, 600), (CALIBRATED, 100), (CALIBRATED, 600), (CALIBRATED, 1200)):
            settings = [f"kv_cache={cache}", "calibration.seq_len=64", f"calibration.num_samples={samples}"]
            out = written["model"].parent / "none"
            job = Job(str(written["model"]), recipe.load("kv8", settings), out, pack=False)
            peaks[cache, samples, factor] = prepare.prepare(job).arrangement.peak_nbytes
    token = 2 * 16  # numbers in the keys, and in the values
    assert peaks[KIVI, 600, 1000] == peaks[KIVI, 600, 2000]
    grown = [peaks[CALIBRATED, n, 2000] - peaks[CALIBRATED, n, 1000] for n in (100, 600, 1200)]
    assert grown[0] == pytest.approx(1000 * 6400 * token, rel=0.1)
    assert grown[1] == grown[2] == pytest.approx(1000 * 16384 * token, rel=0.1)
