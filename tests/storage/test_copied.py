"""Checkpoints that are copied into place: whole, or known to be unfinished."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from compress import api
from compress.errors import OutputError
from compress.run import pipeline
from compress.storage import files, paths, workdir
from helpers.runs import RTN, cli, contents, job


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", paths.MANIFEST, "a.safetensors", "z.safetensors"):
        (folder / name).write_text(name)
    return folder


def test_the_manifest_comes_last(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, real = list[str](), workdir.copy_whole

    def copy(source: Path, target: Path) -> None:
        order.append(source.name)
        assert (target.parent / paths.UNFINISHED).exists()
        real(source, target)

    monkeypatch.setattr(workdir, "copy_whole", copy)
    workdir.put_copies(model, tmp_path / "deep" / "out")
    assert order == ["a.safetensors", "z.safetensors", "config.json", paths.MANIFEST]
    assert contents(tmp_path / "deep" / "out") == contents(model)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("count", range(4))
def test_a_copy_that_is_cut_off_is_no_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, is_old: bool
) -> None:
    out, real, done = tmp_path / "out", workdir.copy_whole, list[str]()
    if is_old:
        workdir.put_copies(model, out)
        (out / "former.safetensors").write_text("of the former one")

    def copy(source: Path, target: Path) -> None:
        if len(done) == count:
            target.write_text("cut")
            raise OSError("the power went")
        done.append(source.name)
        real(source, target)

    monkeypatch.setattr(workdir, "copy_whole", copy)
    with pytest.raises(OSError, match="power"):
        workdir.put_copies(model, out)
    assert (out / paths.MANIFEST).exists() == (count == 3)  # cut off itself
    paths.check_out(out, overwrite=False)  # another run may go on with it
    monkeypatch.setattr(workdir, "copy_whole", real)
    workdir.put_copies(model, out)
    assert {p.name for p in out.iterdir()} == {p.name for p in model.iterdir()}
    with pytest.raises(OutputError, match="exists already"):
        paths.check_out(out, overwrite=False)


def test_a_copy_of_another_size_is_an_error(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.shutil, "copyfileobj", lambda *_: None)
    with pytest.raises(OutputError, match="has 0 bytes, not 13"):
        workdir.put_copies(model, tmp_path / "out")


def test_nothing_is_renamed_to_an_output_with_a_folder_for_work(
    pico_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, work = pico_dir("llama"), tmp_path / "store" / "out", tmp_path / "local"
    work.mkdir()
    real = {name: getattr(os, name) for name in ("rename", "replace")}

    def refusing(name: str) -> Any:
        def rename(old: Any, new: Any, **options: Any) -> None:
            assert out.parent not in Path(new).parents, "an object store cannot rename"
            real[name](old, new, **options)

        return rename

    for name in real:
        monkeypatch.setattr(os, name, refusing(name))
    result = cli("quantize", str(source), *RTN.options(), "--out", str(out), "--work", str(work))
    assert result.code == 0, result.err
    monkeypatch.undo()
    assert os.listdir(work) == [] and paths.UNFINISHED not in os.listdir(out)
    api.quantize(job(source, RTN, tmp_path / "plain"))
    assert contents(out) == contents(tmp_path / "plain")
    assert cli("verify", str(out)).code == 0


def test_both_disks_are_asked_for_room(pico_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a former checkpoint takes there is room for the copies, which replace it."""
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(pipeline, "check_space", lambda folder, nbytes: asked.append((folder, nbytes)))
    (work := tmp_path / "local").mkdir()
    given = dataclasses.replace(job(pico_dir("llama"), RTN, tmp_path / "store" / "out"), work=work)
    nbytes = api.quantize(given)["nbytes"]["total"]
    former = sum(path.stat().st_size for path in given.out.iterdir())
    api.quantize(dataclasses.replace(given, overwrite=True))
    assert [folder for folder, _ in asked] == 2 * [work / "out.partial", given.out]
    assert asked[1][1] >= nbytes
    assert asked[1][1] - asked[3][1] == former
