"""Loading compares files with the manifest: sizes always, hashes of small checkpoints or on request."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import compress
from compress import api
from compress.errors import CheckpointError
from compress.runtime import kv_config
from compress.storage import manifest
from compress.storage.checkpoint import CONFIG, INDEX, MANIFEST
from helpers.pico import save_pico
from helpers.runs import RTN, Setup, job

SHARD = "model-00002-of-00003.safetensors"
Load = Callable[[Path], Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loading")
    api.quantize(job(save_pico("llama", directory / "source"), RTN, directory / "out"))
    return directory / "out"


@pytest.fixture
def copy(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(manifest.ASKED, raising=False)
    return Path(shutil.copytree(written, tmp_path / "copy"))


def change(path: Path) -> None:
    """Change the last byte: of a shard, a bit of a weight."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def by_transformers(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


def verified(directory: Path) -> Any:
    return compress.load(directory, verify=True)


def refusal(directory: Path, load: Load) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_changed_weight_of_a_small_checkpoint(copy: Path) -> None:
    change(copy / SHARD)
    for load in (by_transformers, compress.load, verified):
        text = refusal(copy, load)
        assert f"{copy / SHARD} is not the file that was written; download or write the checkpoint again" in text
    (copy / MANIFEST).unlink()
    by_transformers(copy)  # nothing says that this is not what was written


def test_hashes_of_a_large_checkpoint_are_compared_on_request(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "HASHED_NBYTES", 1)
    for load in (by_transformers, compress.load, verified):
        load(copy)
    change(copy / SHARD)
    by_transformers(copy)
    compress.load(copy)
    assert f"{SHARD} is not the file that was written" in refusal(copy, verified)
    for value, fails in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(manifest.ASKED, value)
        for load in (by_transformers, compress.load):
            if fails:
                assert f"{SHARD} is not the file that was written" in refusal(copy, load)
            else:
                load(copy)


@pytest.mark.parametrize("name", [CONFIG, INDEX, "tokenizer.json", "recipe.yaml", "report.json"])
def test_other_files_are_compared_on_request(name: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / name).write_bytes((copy / name).read_bytes() + b"\n")
    by_transformers(copy)
    assert f"{copy / name} is not the file that was written" in refusal(copy, verified)
    monkeypatch.setenv(manifest.ASKED, "1")
    assert f"{copy / name} is not the file that was written" in refusal(copy, by_transformers)


def test_sizes_of_a_large_checkpoint(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "HASHED_NBYTES", 1)
    whole = (copy / SHARD).read_bytes()
    for raw in (whole[:-1], whole + b"\0"):
        (copy / SHARD).write_bytes(raw)
        for load in (by_transformers, verified):
            assert SHARD in refusal(copy, load)
        assert f"{len(raw)} bytes of {len(whole)}" in refusal(copy, by_transformers)


def test_a_manifest_that_does_not_list_a_shard(copy: Path) -> None:
    path = copy / MANIFEST
    path.write_text(path.read_text().replace(SHARD, "other.safetensors"))
    by_transformers(copy)
    assert f"{copy / SHARD} is not listed in {MANIFEST}" in refusal(copy, verified)


def test_no_manifest(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / MANIFEST).unlink()
    by_transformers(copy)
    assert f"{copy} has no {MANIFEST}, so there are no hashes" in refusal(copy, verified)
    asked = []

    def fetched(name: str, file: str, **how: Any) -> None:
        asked.append((name, file))

    monkeypatch.setattr(kv_config, "cached_file", fetched)
    monkeypatch.setenv(manifest.ASKED, "1")
    assert f"{copy} has no {MANIFEST}, so there are no hashes" in refusal(copy, by_transformers)
    assert asked == [(str(copy), MANIFEST)]  # of a checkpoint on the hub, only weights have been fetched by then


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": {}}', '{"files": {"../x": "0"}}'])
def test_a_damaged_manifest(text: str, copy: Path) -> None:
    (copy / MANIFEST).write_text(text)
    assert str(copy / MANIFEST) in refusal(copy, by_transformers)


def test_a_value_without_meaning(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(manifest.ASKED, "yes")
    assert f"{manifest.ASKED} is 'yes'; set it to 1" in refusal(copy, by_transformers)


def test_a_transformed_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a plain one, of which transformers does not ask us; `compress.load` does."""
    asked = job(save_pico("llama", tmp_path / "source"), Setup("w4a8"), tmp_path / "out")
    api.quantize(type(asked)(**{**vars(asked), "pack": False}))
    shard = next((tmp_path / "out").glob("model-00002-*.safetensors"))
    compress.load(tmp_path / "out", verify=True)
    change(shard)
    assert f"{shard} is not the file that was written" in refusal(tmp_path / "out", compress.load)
    monkeypatch.setenv(manifest.ASKED, "1")
    compress.load(tmp_path / "source")  # which never had a manifest
