"""A directory that is a level of a checkpoint by links to its files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import api
from compress.errors import CheckpointError, OutputError
from compress.export import level, linked_level
from compress.model.load import load_model
from compress.run import verify
from compress.runtime.levels import at_level
from helpers.runs import GPTQ, cli, job


@pytest.fixture
def nested(pico_dir: Callable[..., Path], tmp_path: Path) -> Path:
    api.quantize(job(pico_dir("llama"), GPTQ.set("method=rtn", "bits=8", "nested=true"), tmp_path / "nested"))
    return tmp_path / "nested"


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@torch.no_grad()
def test_it_is_the_level_and_takes_no_space(nested: Path, tmp_path: Path) -> None:
    view, before = tmp_path / "view", files_of(nested)
    nbytes = linked_level.link(nested, 4, view)
    own = [path for path in view.iterdir() if not os.path.samestat(path.stat(), (nested / path.name).stat())]
    assert {path.name for path in own} == {"config.json", "compress_manifest.json"}
    assert nbytes == sum(path.stat().st_size for path in own)
    assert {path.name for path in nested.iterdir()} - {path.name for path in view.iterdir()} == {
        "report.json",
        "report.html",
    }
    verify.verify(view)
    ids = torch.arange(20)[None]
    whole, low = load_model(nested, dtype=torch.float32), load_model(view, dtype=torch.float32)
    with at_level(whole, 4):
        assert torch.equal(low(ids).logits, whole(ids).logits)
    assert files_of(nested) == before


def test_it_is_replaced_when_asked(nested: Path, tmp_path: Path) -> None:
    view = tmp_path / "view"
    linked_level.link(nested, 8, view)
    before = files_of(nested)
    with pytest.raises(OutputError, match="exists already; give another --out, or --overwrite"):
        linked_level.link(nested, 4, view)
    linked_level.link(nested, 4, view, overwrite=True)
    assert json.loads((view / "config.json").read_text())["quantization_config"]["level"] == 4
    assert files_of(nested) == before


def test_a_checkpoint_without_manifest_and_what_lies_beside_it(nested: Path, tmp_path: Path) -> None:
    (nested / "compress_manifest.json").unlink()
    (nested / "key.pem").write_text("secret")
    (tmp_path / "elsewhere").write_text("secret")
    (nested / "tokenizer.model").symlink_to(tmp_path / "elsewhere")
    linked_level.link(nested, 4, tmp_path / "view")
    assert not {"key.pem", "tokenizer.model"} & {path.name for path in (tmp_path / "view").iterdir()}
    verify.verify(tmp_path / "view")


@pytest.mark.parametrize(
    ("stored", "kept"),
    [("ngram+level=4,skip=even", "ngram"), ("ngram+skip=even", "ngram+skip=even"), ("level=4", None)],
)
def test_stored_drafts_by_levels_that_are_gone_go(nested: Path, tmp_path: Path, stored: str, kept: str | None) -> None:
    config = json.loads((nested / "config.json").read_text())
    (nested / "config.json").write_text(json.dumps({**config, "speculate": stored}))
    linked_level.link(nested, 4, tmp_path / "linked")
    level.export(nested, 4, tmp_path / "copied")
    for name in ("linked", "copied"):
        assert json.loads((tmp_path / name / "config.json").read_text()).get("speculate") == kept


def test_what_cannot_be_is_said(nested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = tmp_path / "view"
    with pytest.raises(CheckpointError, match="has the levels 4, 8, not 3; name one of them"):
        linked_level.link(nested, 3, view)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OutputError, match="cannot be linked .*; give an --out on the same disk, or leave --link out"):
        linked_level.link(nested, 4, view)
    assert not view.exists() and not list(tmp_path.glob("*.exporting"))


def test_the_command(nested: Path, tmp_path: Path) -> None:
    view = tmp_path / "view"
    done = cli("export", str(nested), "--level", "4", "--link", "--out", str(view), "--json")
    assert done.code == 0 and json.loads(done.out)["level"] == 4 and (view / "config.json").is_file()
    assert cli("verify", str(view)).code == 0
    for words in (["--to", "gguf", "--level", "4"], ["--to", "gguf"]):
        refused = cli("export", str(nested), "--link", "--out", str(view), *words)
        assert refused.code == 2 and "--link" in refused.err
