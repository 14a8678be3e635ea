"""What a cache cannot do is one clear line from from_pretrained and the command line; files in the hub's cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compress import api, recipe
from compress.errors import CheckpointError, CompressError, RecipeError
from compress.kv import generation
from compress.kv.cache import make_cache
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import cache_settings
from compress.run.job import Job
from compress.runtime import kv_config
from helpers.pico import VOCAB_SIZE, save_pico
from helpers.runs import TEXT, cli, one_line

CALIBRATED = "{method: kvquant, residual_length: 32}"
NAME, COMMIT = "someone/pico", "0123456789abcdef0123456789abcdef01234567"


def run(model: Path, out: Path, cache: str) -> Path:
    path = out.with_suffix(".yaml")
    path.write_text(f"calibration: {{num_samples: 4, seq_len: 32}}\nkv_cache: {cache}\n")
    loaded = recipe.load(str(path))
    api.quantize(Job(str(model), loaded, out, calib=str(TEXT), pack=loaded.packs))
    return out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    return run(save_pico("llama", folder / "model"), folder / "calibrated", CALIBRATED)


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def load(directory: Path | str, **settings: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, **settings)


def generated(model: PreTrainedModel, tokens: int = 90, **settings: Any) -> Any:
    ids = torch.arange(tokens)[None] % 250
    arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**arguments, **settings})


def refused(directory: Path, *words: str) -> str:
    """The line of `compress generate`."""
    result = cli("generate", str(directory), "--device", "cpu", "--max-new-tokens", "3", *(words or ("--prompt", "a")))
    assert result.code == 1, result
    return one_line(result)


def of_another_model(path: Path) -> None:
    static = {f"layers.{i}.keys.levels": torch.zeros(8, dtype=torch.float16) for i in range(2)}
    kv_config.write(path.parent, cache_settings({"method": "kvquant"}), 2, static)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("harm", [of_another_model, cut, flip, Path.unlink])
def test_a_file_of_something_else(copy: Path, harm: Callable[[Path], None]) -> None:
    harm(copy / kv_config.FILE)
    line = refused(copy)
    assert f"{copy / kv_config.FILE} is " in line and "write the checkpoint again" in line
    assert ("missing" if harm is Path.unlink else "not the file that was written with this checkpoint") in line
    with pytest.raises(CheckpointError) as error:
        load(copy)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "kv_cache has version 2, this compress reads 1; upgrade compress"),
        ({"version": None}, "kv_cache has version None"),
        ({"keys": {"method": "kvquant", "bits": 4}}, r"layers.0.keys.levels is float16 \[8\], expected float16 \[16\]"),
    ],
)
def test_a_section_of_another_version(copy: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["kv_cache"] |= change
    (copy / "config.json").write_text(json.dumps(config))
    line = refused(copy)
    with pytest.raises(CompressError, match=message):
        raise CompressError(line)
    with pytest.raises(CompressError, match=message):
        generated(load(copy))


def test_a_context_past_the_model(written: Path) -> None:
    line = refused(written, "--prompt", "word " * 60)
    assert "256 positions" in line and "ask for fewer" in line
    model = load(written)
    with pytest.raises(CompressError, match="a context of 259 tokens, but the model has 256 positions; ask for fewer"):
        generated(model, 250, max_new_tokens=10)
    model.config.rope_parameters["factor"] = 2.0  # of scaled embeddings
    assert generated(model, 250, max_new_tokens=10).past_key_values.get_seq_length() == 259


def test_layers_of_another_type(tmp_path: Path) -> None:
    """Refused before and after the run unless the recipe says that they stay as they are."""
    model = save_pico("gemma2", tmp_path / "model")
    fine = "method: kivi, bits: 4, group_size: 16, residual_length: 32"
    (tmp_path / "r.yaml").write_text(f"kv_cache: {{{fine}, other_layers: error}}\n")
    words = ("--recipe", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "out"))
    line = one_line(cli("quantize", str(model), *words))
    message = "layer 0 is sliding_attention, which is not coded; set kv_cache.other_layers: exact"
    assert message in line and not (tmp_path / "out").exists()
    out = run(model, tmp_path / "out", f"{{{fine}}}")
    cache = generated(load(out)).past_key_values
    assert isinstance(cache, KVCache) and cache.nbytes().exact > 0 and cache.nbytes().codes > 0
    assert [isinstance(layer, CodedLayer) for layer in cache.layers] == [False, True]
    calibrated = load(run(model, tmp_path / "calibrated", f"{CALIBRATED[:-1]}, other_layers: exact}}"))
    assert {name.split(".")[1] for name in calibrated.kv_cache.static} == {"1"}  # only what is coded
    assert generated(calibrated).past_key_values.nbytes().codes > 0
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["kv_cache"]["other_layers"] = "error"
    (out / "config.json").write_text(json.dumps(config))
    assert message in refused(out)
    with pytest.raises(RecipeError, match=message):
        load(out)
    only = save_pico("mistral", tmp_path / "only")
    line = one_line(
        cli("quantize", str(only), *words[:-1], str(tmp_path / "no"), "--set", "kv_cache.other_layers=exact")
    )
    assert "no layer of this model has the full attention that is coded (they are sliding_attention)" in line


@pytest.mark.parametrize("path", ["decode", "fused"])
def test_layers_without_keys(path: Any) -> None:
    config = CONFIG_MAPPING["lfm2"](
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        layer_types=["conv", "full_attention"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(RecipeError, match="layer 0 is conv, which is not coded; set kv_cache.other_layers: exact"):
        make_cache(config, {"method": "kivi", "other_layers": "error"})
    exact = generated(model, num_beams=3, past_key_values=DynamicCache(config=config)).sequences
    policy = {"residual_length": 16, "flush": 16, "other_layers": "exact"}
    for coded in ({"method": "identity"}, {"method": "kivi", "bits": 8, "group_size": 16}):
        generation.attach(model, {**coded, **policy}, path=path)
        found = generated(model, num_beams=3)
        assert torch.equal(found.sequences, exact)
        first, second = found.past_key_values.layers
        assert isinstance(first, LinearAttentionLayer) and isinstance(second, CodedLayer) and second.nbytes().codes > 0


def hub(written: Path, cache: Path, folder: str = "") -> Path:
    """The checkpoint as huggingface_hub keeps it: files of a commit are links to blobs. -> the commit's folder."""
    repository = cache / ("models--" + NAME.replace("/", "--"))
    snapshot = repository / "snapshots" / COMMIT / folder
    for path in (repository / "blobs", repository / "refs", snapshot):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(p for p in written.iterdir() if p.is_file())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    return snapshot


@pytest.mark.parametrize("folder", ["", "four_bits"])
@pytest.mark.parametrize("is_default", [True, False])
def test_a_checkpoint_of_the_hub(
    written: Path, tmp_path: Path, folder: str, is_default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub(written, tmp_path / "hub", folder)
    where: dict[str, Any] = {"subfolder": folder} if folder else {}
    if is_default:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    else:
        where["cache_dir"] = str(tmp_path / "hub")
    model = load(NAME, **where)
    assert model.kv_cache.static.keys() == load(written).kv_cache.static.keys()
    assert torch.equal(generated(model).sequences, generated(load(written)).sequences)

    blob = (snapshot / kv_config.FILE).resolve()
    (snapshot / kv_config.FILE).unlink()  # from_pretrained has fetched the weights only
    with pytest.raises(CheckpointError, match=f"{kv_config.FILE} is missing, which kv_cache needs; download"):
        load(NAME, **where)
    asked = []

    def fetched(name: str, file: str, **how: Any) -> str:
        asked.append((name, file, how["cache_dir"], how["revision"], how["subfolder"]))
        (snapshot / file).symlink_to(blob)
        return str(snapshot / file)

    monkeypatch.setattr(kv_config, "cached_file", fetched)
    assert load(NAME, **where).kv_cache.static.keys() == model.kv_cache.static.keys()
    assert asked == [(NAME, kv_config.FILE, str(tmp_path / "hub"), COMMIT, folder)]


def test_what_is_saved_is_what_the_configuration_says(written: Path, tmp_path: Path) -> None:
    """Whatever became of the cache that generate uses."""
    expected = generated(load(written)).sequences
    for change in (generation.detach, lambda model: generation.attach(model, {"method": "fp8"})):
        model = load(written)
        change(model)
        model.save_pretrained(tmp_path / "saved")
        again = load(tmp_path / "saved")
        assert torch.equal(generated(again).sequences, expected)
        shutil.rmtree(tmp_path / "saved")
