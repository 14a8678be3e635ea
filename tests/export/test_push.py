"""Pushing to the hub, against a stand-in: what goes, what stays, and what is refused before anything is sent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from compress import api
from compress.errors import CheckpointError, OutputError
from compress.export import push
from helpers import hub
from helpers.pico import save_pico
from helpers.runs import RTN, cli, job, one_line

REPO = "me/model"
LEFT = ["notes.log", "report.html"]  # what stays here


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    api.quantize(job(save_pico("llama", folder / "model"), RTN, folder / "packed"))
    return folder / "packed"


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "packed"))


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the stand-in is on this machine


@pytest.mark.filterwarnings("ignore")  # of the HTTP library
def test_all_files_of_the_manifest_arrive_in_one_commit(checkpoint: Path) -> None:
    (checkpoint / "notes.log").write_text("mine")
    upload = push.check(checkpoint)
    assert upload.left == LEFT
    with hub.served() as (address, received):
        url = push.push(checkpoint, push.PushTarget(REPO, "tested", private=True), upload, endpoint=address)
    assert url.startswith(address) and received.commits == 1
    assert received.repo["name"] == "model" and received.repo["organization"] == "me"
    assert received.repo.get("private", received.repo.get("visibility")) in (True, "private")
    assert received.branches == ["tested"] and received.revision == "tested"
    sent = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name not in LEFT}
    assert received.files == sent
    assert upload.files == {name: len(content) for name, content in sent.items()}


@pytest.mark.filterwarnings("ignore")
def test_old_weights_in_the_repository_go_in_the_same_commit(checkpoint: Path) -> None:
    """transformers reads model.safetensors before any shards."""
    upload = push.check(checkpoint)
    shard = next(name for name in upload.files if name.endswith(".safetensors"))
    old = ["a [1].safetensors", "old-00001-of-00002.safetensors", "old.safetensors.index.json"]
    with hub.served() as (address, received):
        received.there = [*old, shard, "README.md", "notes.txt", "other/model.safetensors", "model.gguf"]
        push.push(checkpoint, push.PushTarget(REPO), upload, endpoint=address)
    assert sorted(received.deleted) == old and received.commits == 1


@pytest.mark.filterwarnings("ignore")
def test_a_refusal_and_a_hub_that_is_not_there_are_one_line(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload, target = push.check(checkpoint), push.PushTarget(REPO)
    with hub.served(refuses=True) as (address, received):
        with pytest.raises(OutputError, match="refuses me/model .*403.*rights of your token"):
            push.push(checkpoint, target, upload, endpoint=address)
        assert not received.files
    with pytest.raises(OutputError, match="could not be reached"):
        push.push(checkpoint, target, upload, endpoint=address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OutputError, match="HF_HUB_OFFLINE is set"):
        push.push(checkpoint, target, upload)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(OutputError, match="hf auth login"):
        push.push(checkpoint, target, upload)


def damaged(directory: Path) -> None:
    shard = next(directory.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)


WRONG = {
    "is not the file that was written": damaged,
    "recipe.yaml is missing": lambda directory: (directory / "recipe.yaml").unlink(),
    "has no compress_manifest.json: it is unfinished": lambda directory: (
        directory / "compress_manifest.json"
    ).unlink(),
    "chat_template.jinja is not listed": lambda directory: (directory / "chat_template.jinja").write_text("{{ 1 }}"),
    "more.safetensors is not listed": lambda directory: (directory / "more.safetensors").write_bytes(b"0" * 16),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_not_as_it_was_written_is_refused(said: str, checkpoint: Path) -> None:
    WRONG[said](checkpoint)
    with pytest.raises(CheckpointError, match=said):
        push.check(checkpoint)


def test_the_dry_run_lists_what_would_go(checkpoint: Path) -> None:
    (checkpoint / "notes.log").write_text("mine")
    result = cli("push", str(checkpoint), REPO, "--dry-run")
    assert result.code == 0, result.err
    total = sum(path.stat().st_size for path in checkpoint.iterdir() if path.name not in LEFT)
    for path in checkpoint.iterdir():
        row = next(line for line in result.out.splitlines() if line.endswith(f"  {path.name}"))
        assert row.split()[0] == ("stays" if path.name in LEFT else f"{path.stat().st_size:,}")
    assert f"deleted from {REPO}: *.safetensors" in result.out
    assert f"would upload to {REPO}" in result.out.splitlines()[-1]
    found = json.loads(cli("push", str(checkpoint), REPO, "--dry-run", "--json").out)
    assert sum(found["files"].values()) == total and found["left"] == LEFT and found["commit"] is None


def test_a_wrong_name_or_directory_is_one_line(tmp_path: Path) -> None:
    assert "owner/name" in cli("push", str(tmp_path), "model", "--dry-run").err
    result = cli("push", str(tmp_path), REPO, "--dry-run")
    assert result.code == 1 and "no config.json" in one_line(result)
