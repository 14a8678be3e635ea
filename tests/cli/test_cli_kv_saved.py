"""`compress kv save`, `load` and `show`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CompressError, UnsupportedModelError
from compress.evaluate import saved_cache
from compress.kv.settings import cache_settings
from compress.runtime import kv_config
from helpers.pico import save_pico
from helpers.runs import cli, one_line

PROMPT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("kv_saved") / "model")


def test_a_saved_prompt_is_continued_as_the_prompt_itself(model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "prompt.txt", tmp_path / "prompt.kv"
    text.write_text(PROMPT)
    words = ("--prompt-file", str(text), "--out", str(out), "--quality", "lossless")
    made = cli("kv", "save", str(model), *words, "--json")
    assert made.code == 0, made
    said = json.loads(made.out)
    assert (said["tokens"], said["nbytes"], said["quality"]) == (len(PROMPT), out.stat().st_size, "lossless")
    shown = cli("kv", "show", str(out))
    assert shown.code == 0 and f"{len(PROMPT)} tokens" in shown.out and "quality lossless" in shown.out
    for more in ("", "And then"):
        own = cli("generate", str(model), "--prompt", PROMPT + more, "--max-new-tokens", "8")
        from_file = cli("kv", "load", str(model), str(out), "--prompt", more, "--max-new-tokens", "8")
        assert (from_file.code, own.code) == (0, 0), (from_file, own)
        assert from_file.out == own.out


def test_what_cannot_be_saved_is_refused_before_the_model_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((made / "config.json").read_text())
    settings = cache_settings({"method": "kivi", "evict": {"method": "knorm", "keep": 0.5}})
    section = kv_config.plain_section(settings, config["num_hidden_layers"])
    packed = {**config, "quantization_config": {"quant_method": "compress", "kv_cache": section}}
    (made / "config.json").write_text(json.dumps(packed))

    def loaded(*args: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(saved_cache.lm, "load_model", loaded)
    out = tmp_path / "x.kv"
    with pytest.raises(UnsupportedModelError, match="layer 0 of the cache evicts tokens"):
        saved_cache.save(made, PROMPT, out, "standard")
    with pytest.raises(CompressError, match="positions; ask for fewer"):
        saved_cache.save(model, PROMPT * 100, out, "standard")
    with pytest.raises(AssertionError, match="is loaded"):  # all is well
        saved_cache.save(model, PROMPT, out, "standard")
    assert not out.exists()


def test_wrong_input_is_one_line(model: Path, tmp_path: Path) -> None:
    out, pipe = tmp_path / "x.kv", tmp_path / "pipe"
    os.mkfifo(pipe)
    assert cli("kv", "save", str(model), "--out", str(out)).code == 2
    assert cli("kv", "save", str(model), "--out", str(tmp_path), "--prompt", "a").code == 2
    for words in (
        ("save", str(model), "--out", str(out), "--prompt", ""),
        ("save", str(model), "--out", str(out), "--prompt-file", str(tmp_path / "none.txt")),
        ("save", str(tmp_path / "no-model"), "--out", str(out), "--prompt", "a"),
        ("load", str(model), str(tmp_path / "none.kv")),
        ("load", str(model), str(model / "model.safetensors")),
        ("load", str(model), str(pipe)),
        ("show", str(model / "config.json")),
    ):
        result = cli("kv", *words)
        assert result.code == 1 and one_line(result), (words, result)
    assert not out.exists()


def test_only_own_files_are_replaced(model: Path, tmp_path: Path) -> None:
    """Refused before the model is read: the file is as it was, and nothing is beside it."""
    out, text = tmp_path / "x.kv", tmp_path / "prompt.txt"
    text.write_text("abc")
    link, pipe = tmp_path / "link.kv", tmp_path / "pipe.kv"
    link.symlink_to(text)
    os.mkfifo(pipe)
    copied = Path(shutil.copytree(model, tmp_path / "model"))
    words = ("kv", "save", str(copied), "--prompt-file", str(text), "--out")
    refused = {
        **{text: "is read by this command", copied / "config.json": "is read by this command"},
        **{link: "is no regular file", pipe: "is no regular file", Path("/dev/null"): "is no regular file"},
    }
    result = cli(*words, str(tmp_path / "none/x.kv"))
    assert f"{tmp_path / 'none'} is not there; make this folder, or give another --out" in one_line(result)
    for path, why in refused.items():
        for more in ((), ("--overwrite",)):
            result = cli(*words, str(path), *more)
            assert result.code == 1 and f"{path} {why}; give another --out" in one_line(result), result
    for content in (b"notes", b"", (model / "model.safetensors").read_bytes(), b"\x02" + bytes(7) + b"[]"):
        out.write_bytes(content)
        result = cli(*words, str(out))
        assert result.code == 1 and "is not a cache that compress kv save wrote" in one_line(result)
        assert out.read_bytes() == content
    assert cli(*words, str(out), "--overwrite").code == 0
    first = out.read_bytes()
    text.write_text("another text")
    assert cli(*words, str(out)).code == 0 and out.read_bytes() != first
    assert text.read_text() == "another text"
