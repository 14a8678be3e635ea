"""`verify` and `inspect`: manifests that list too little, changed files, checkpoints that were saved again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import compress
from compress import api
from compress.errors import CheckpointError, CompressError
from compress.run import report, verify
from compress.runtime import kv_config
from compress.storage.checkpoint import CONFIG, INDEX, MANIFEST
from compress.storage.manifest import PAGE, RECIPE
from helpers.pico import save_pico
from helpers.runs import RTN, Setup, job

CACHE = Setup("w4kv2", ("group_size=32", "calibration.num_samples=8", "calibration.seq_len=32"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed checkpoint with calibrated tensors of a cache."""
    directory = tmp_path_factory.mktemp("verify")
    api.quantize(job(save_pico("llama", directory / "source"), CACHE, directory / "out"))
    assert (directory / "out" / kv_config.FILE).is_file()
    return directory / "out"


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def refusal(directory: Path, check: Callable[[Path], Any] = verify.verify) -> str:
    with pytest.raises(CompressError) as caught:
        check(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def flip(path: Path) -> None:
    """Change one bit of the last byte that is no white space."""
    raw = bytearray(path.read_bytes())
    raw[len(raw.rstrip()) - 1] ^= 1
    path.write_bytes(raw)


NEEDED = [
    *("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", INDEX, CONFIG, RECIPE, kv_config.FILE),
    *("tokenizer.json", "tokenizer_config.json", "generation_config.json", "report.json"),
]


@pytest.mark.parametrize("name", NEEDED)
def test_a_manifest_that_lists_too_little(name: str, copy: Path) -> None:
    edit(copy / MANIFEST, lambda values: values["files"].pop(name))
    assert f"{copy / name} is not listed in {MANIFEST}" in refusal(copy)


def test_files_beside_those_of_the_manifest(copy: Path) -> None:
    (copy / "notes.md").write_text("mine")
    assert verify.verify(copy)["unlisted"] == ["notes.md"]
    shutil.copy(copy / kv_config.FILE, copy / "more.safetensors")
    assert f"{copy / 'more.safetensors'} is not listed in {MANIFEST}; remove it" in refusal(copy)


def test_every_changed_byte_is_found(copy: Path) -> None:
    for path in sorted(path for path in copy.iterdir() if path.name != PAGE):
        whole = path.read_bytes()
        flip(path)
        text = refusal(copy)
        assert path.name == MANIFEST or path.name in text, text
        if path.suffix != ".json" and path.name != MANIFEST:
            assert "is not the file that was written" in text
        path.write_bytes(whole)
    assert verify.verify(copy)["manifest"] == verify.CHECKED


def test_a_manifest_of_an_older_version(copy: Path) -> None:
    edit(copy / MANIFEST, lambda values: values.pop("sizes"))
    assert verify.verify(copy)["files"] == len(list(copy.iterdir())) - 2  # the manifest and the page are not listed


@pytest.mark.parametrize("sizes", [[], {"config.json": "1"}, {"config.json": 1.5}])
def test_sizes_that_are_none(sizes: object, copy: Path) -> None:
    edit(copy / MANIFEST, lambda values: values.update(sizes=sizes))
    assert "has sizes that are no numbers" in refusal(copy)


# ---------------------------------------------------------------- saved again


SAVES: list[dict[str, Any]] = [{}, {"max_shard_size": "60KB"}]
SAVED = pytest.mark.parametrize("options", SAVES, ids=["one file", "shards"])


@SAVED
@pytest.mark.parametrize("is_same", [True, False], ids=["in place", "elsewhere"])
def test_saved_again(options: dict[str, Any], is_same: bool, copy: Path, tmp_path: Path) -> None:
    """The manifest and the report are missing, or of an earlier save; verify and inspect do what is left."""
    expected = verify.verify(copy)
    before = report.load(copy)
    directory = copy if is_same else tmp_path / "saved"
    compress.load(copy).save_pretrained(directory, **options)
    found = verify.verify(directory)
    assert found["manifest"] == (verify.EARLIER_SAVE if is_same else verify.NO_MANIFEST) and found["files"] == 0
    assert {key: found[key] for key in ("tensors", "nbytes", "blocks")} == {
        key: expected[key] for key in ("tensors", "nbytes", "blocks")
    }
    shown = report.load(directory)
    assert ("of an earlier save" if is_same else "there is no report.json") in shown["incomplete"]
    assert shown["nbytes"] == before["nbytes"] and shown["bpw"] == before["bpw"]
    assert {row["name"]: row["bpw"] for row in shown["layers"]} == {row["name"]: row["bpw"] for row in before["layers"]}
    assert [{**row, "method": ""} for row in before["plan"]] == json.loads(json.dumps(shown["plan"]))
    compress.load(directory)  # the manifest of the earlier save is in nobody's way
    with pytest.raises(CheckpointError, match="no hashes to compare with"):
        compress.load(directory, verify=True)


def test_shards_of_the_same_names(copy: Path) -> None:
    """As many shards as there were before: the manifest lists their names, and is of an earlier save all the same."""
    model = compress.load(copy)
    for kilobytes in range(30, 400, 2):
        model.save_pretrained(copy, max_shard_size=f"{kilobytes}KB")
        if (copy / "model-00003-of-00003.safetensors").exists():
            break
    assert (copy / "model-00001-of-00003.safetensors").exists()
    assert verify.verify(copy)["manifest"] == verify.EARLIER_SAVE
    compress.load(copy)


def test_what_is_checked_without_hashes(copy: Path) -> None:
    compress.load(copy).save_pretrained(copy)
    (copy / MANIFEST).unlink()
    whole = (copy / "model.safetensors").read_bytes()
    tensors = load_file(copy / "model.safetensors")

    def changed(name: str, tensor: torch.Tensor | None) -> str:
        kept = {key: value for key, value in {**tensors, name: tensor}.items() if value is not None}
        save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
        return refusal(copy)

    head = tensors["lm_head.weight"].clone()
    head[3, 5] = torch.inf
    assert "lm_head.weight has NaN or infinite values" in changed("lm_head.weight", head)
    key = next(name for name, tensor in tensors.items() if not tensor.is_floating_point())
    assert f"has no tensor for {key}" in changed(key, None)
    assert f"{key} is stored as torch.int64" in changed(key, tensors[key].long())
    assert f"{key} has shape" in changed(key, tensors[key][:-1].contiguous())
    (copy / "model.safetensors").write_bytes(whole)
    flip(copy / kv_config.FILE)
    assert f"{kv_config.FILE} is not the file that was written with this checkpoint" in refusal(copy)


def test_experts_saved_again(tmp_path: Path) -> None:
    api.quantize(job(save_pico("mixtral", tmp_path / "source"), RTN, tmp_path / "out"))
    before = report.load(tmp_path / "out")
    compress.load(tmp_path / "out").save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    shown = report.load(tmp_path / "saved")
    assert shown["bpw"] == before["bpw"] and {**shown["nbytes"]} == before["nbytes"]
    assert verify.verify(tmp_path / "saved")["tensors"] == verify.verify(tmp_path / "out")["tensors"]


def test_a_plain_checkpoint(tmp_path: Path) -> None:
    source = save_pico("llama", tmp_path / "source")
    assert verify.verify(source)["manifest"] == verify.NO_MANIFEST
    assert "has no packed linears; give a directory that `compress quantize` wrote" in refusal(source, report.load)
