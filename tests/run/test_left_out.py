"""What lies beside a model and is no part of it: neither in what is made of it, nor at the hub."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from compress.run import source
from compress.storage import manifest
from helpers.pico import save_pico
from helpers.runs import RTN, cli, command, one_line

SECRETS = ("id_rsa", "private_eval.jsonl", "secrets.env", "token.txt")
COPIED = {"LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with secrets beside it, and with links to a file that is not its own."""
    directory = save_pico("llama", tmp_path / "model")
    (tmp_path / "elsewhere").write_text("secret")
    for name in SECRETS:
        (directory / name).write_text("secret")
    (directory / "LICENSE").write_text("free")
    (directory / "vocab.txt").symlink_to("../elsewhere")
    (directory / "NOTICE").symlink_to(tmp_path / "elsewhere")
    return directory


def hold_no_secret(directory: Path) -> bool:
    return all(b"secret" not in path.read_bytes() for path in directory.iterdir())


def test_secrets_stay_where_they_are(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = cli(*command(model, RTN, out))
    assert made.code == 0, made.err
    links = "links out of the folder; put the files there to have them copied"
    assert f"left out of model: {', '.join(SECRETS)} (no part of a model)\n" in made.err
    assert f"left out of model: NOTICE, vocab.txt ({links})\n" in made.err
    assert hold_no_secret(out)
    assert {path.name for path in out.iterdir()} >= COPIED
    assert cli("push", str(out), "me/x", "--dry-run").code == 0
    for name in SECRETS:
        (out / name).write_text("secret")
    exported = cli("export", str(out), "--to", "dense", "--out", str(tmp_path / "dense"))
    assert exported.code == 0 and f"left out of out: {', '.join(SECRETS)} (no part of" in exported.err
    assert hold_no_secret(tmp_path / "dense") and {path.name for path in (tmp_path / "dense").iterdir()} >= COPIED


def test_what_an_older_version_has_copied_is_not_uploaded_unasked(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli(*command(model, RTN, out)).code == 0
    (out / "id_rsa").write_text("secret")
    manifest = json.loads((out / "compress_manifest.json").read_text())
    manifest["files"]["id_rsa"] = known_hash(out / "id_rsa")
    manifest["files"]["LICENSE"] = known_hash(model / "LICENSE")
    (out / "compress_manifest.json").write_text(json.dumps(manifest))
    refused = cli("push", str(out), "me/x", "--dry-run")
    assert refused.code == 1 and "lists what is no part of a model: id_rsa; " in one_line(refused)
    named = cli("push", str(out), "me/x", "--dry-run", "--include", "id_rsa")
    assert named.code == 0 and "id_rsa" in named.out
    assert "has no nothing that" in one_line(cli("push", str(out), "me/x", "--dry-run", "--include", "nothing"))
    shutil.copy(out / "LICENSE", tmp_path / "license")
    (out / "LICENSE").unlink()
    (out / "LICENSE").symlink_to(tmp_path / "license")
    linked = cli("push", str(out), "me/x", "--dry-run", "--include", "id_rsa")
    assert linked.code == 1 and "LICENSE is a link to elsewhere" in one_line(linked)


def known_hash(path: Path) -> str:
    from compress.storage.checkpoint import sha256

    return sha256(path)


def test_a_directory_of_links_that_the_run_has_made(model: Path, tmp_path: Path) -> None:
    """With an adapter: what its links lead to is judged where the user has it."""
    from compress.importers import lora

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "check", lambda adapter: None)
        made = source.resolve(str(model), adapter)
    assert made != model
    inside = {path.name for path in source.model_files(made) if manifest.is_inside(path)}
    assert inside == {path.name for path in model.iterdir() if not path.is_symlink()}


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "notes"])
def test_a_pipe_beside_a_model_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    for words in (command(model, RTN, tmp_path / "out"), ["eval", str(model), "--text", str(model / "LICENSE")]):
        result = cli(*words)
        assert result.code == 1 and f"{name} is no file but a pipe, a socket or a device; remove it" in one_line(result)


def test_what_goes_along_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["LICENSE", "NOTICE", "MODEL_LICENSE", "USE_POLICY.md", "x.tiktoken", "vocab.bpe", "spiece.model"]
    needed += ["model.safetensors", "config.json"]
    fetched: list[str] = []

    def snapshot_download(model: str, allow_patterns: list[str]) -> str:
        others = ["id_rsa", "modeling_own.py", "pytorch_model.bin", "train.log"]
        fetched.extend(filter_repo_objects([*needed, *others], allow_patterns=allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert source.resolve("owner/name") == tmp_path
    assert fetched == needed
