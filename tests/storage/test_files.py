"""Files in folders that others have made: nothing is written through a link, and nothing but files is read."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_layering import MODULES, parse

from compress.errors import OutputError
from compress.export import place
from compress.storage import files, workdir
from compress.storage.checkpoint import sha256, write_shard, write_text
from compress.storage.workdir import Output
from compress.study.folder import StudyFolder

OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"}
OPENING |= {"copyfile", "copy2", "copytree", "save_file", "safe_open", "save_pretrained", "GGUFWriter", "tofile"}
OPENING |= {"memmap", "ParquetFile", "from_file", "mknod", "mkfifo", "NamedTemporaryFile"}
# Module -> what it may open by itself, and why.
ALLOWED = {
    "compress.storage.files": "the helper",
    "compress.plugins": "sources of this package",
    "compress.recipe.sources": "recipes of this package",
    "compress.export.targets.gguf.settings": "a table of this package",
    "compress.importers.mlx": "a table of this package",
    "compress.cli.write": "a table of this package",
    "compress.run.importance_matrix": "a new file, in a temporary folder that this process has made",
    "compress.export.targets.mlx": "a table of this package",
    "compress.calib.chats": "what Linux says of this process",
    "compress.cli.streams": "the null device",
    "compress.process_memory": "what Linux says of this process",
    "compress.kernels.llvm": "a folder of this user's alone, whose owner is checked; new files only",
    "compress.model.gguf_names": "a tokenizer, into a temporary folder that this process has made",
    "compress.run.source": "links, into a temporary folder that this process has made",
    "compress.export.targets.gguf": "a new file in the folder of an export",
    "compress.export.peft": "reads weights with safetensors, once they are known to be a file",
    "compress.runtime.kv_config": "transformers saves a model where its user wants it",
    "compress.study.checkpoints": "copies a text within the folder of a study",
    "compress.cli.use": "a text that the user names, which may come from a pipe",
    "compress.calib.documents": "reads a parquet file, once it is known to be a file",
    "compress.ranks.children": "the working directory, to go back there",
}


def opened(tree: ast.Module) -> Iterator[str]:
    """Yield each call that opens, copies or makes a file without the helper."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute):
            holder, name = ast.unparse(node.func.value), node.func.attr
            values = [*node.args, *(word.value for word in node.keywords)]
            is_file = name != "open" or holder == "os" or not values or any(isinstance(v, ast.Constant) for v in values)
            if name in OPENING and is_file and holder != "files":
                yield f"line {node.lineno}: {ast.unparse(node.func)}"
        elif isinstance(node.func, ast.Name) and node.func.id in OPENING - {"read_text", "write_text"}:
            yield f"line {node.lineno}: {node.func.id}"


def test_files_are_opened_by_the_helper() -> None:
    found = {name: list(opened(parse(name))) for name in MODULES}
    assert {name: calls for name, calls in found.items() if calls and name not in ALLOWED} == {}
    assert {name for name in ALLOWED if not found[name]} == set()


@pytest.mark.parametrize(
    "source",
    ["open(x)", "p.open('wb')", "p.open(encoding='utf-8')", "p.open()", "os.open(p, f)", "p.write_text(t)"]
    + ["shutil.copyfile(a, b)", "save_file(t, p)", "p.read_bytes()", "(a / b).touch()"],
)
def test_check_of_opening(source: str) -> None:
    assert len(list(opened(ast.parse(source)))) == 1
    for fine in ("files.read_text(p)", "write_text(p, t)", "study.open(identity)", "open_regular(p)"):
        assert list(opened(ast.parse(fine))) == []


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the user that a link in a hostile folder leads to; nothing may change it."""
    path = tmp_path / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


def put(folder: Path) -> None:
    model = folder.with_name("model")
    model.mkdir()
    (model / "config.json").write_text("new")
    workdir.put_copies(model, folder)


WRITERS: dict[str, Callable[[Path], object]] = {
    "x.part": lambda folder: write_text(folder / "x", "new"),
    "x": lambda folder: write_text(folder / "x", "new"),
    "y.part": lambda folder: write_shard(folder / "y", {}),
    "log": lambda folder: files.open_new(folder / "log").close(),
    "compress_unfinished": put,
    "config.json": put,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("is_hard", [False, True])
def test_nothing_is_written_through_a_link(name: str, is_hard: bool, victim: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if is_hard:
        (folder / name).hardlink_to(victim)
    else:
        (folder / name).symlink_to(victim)
    WRITERS[name](folder)
    assert not any(path.is_symlink() or os.path.samefile(path, victim) for path in folder.iterdir())


def hold(folder: Path) -> None:
    with StudyFolder(folder).hold_lock():
        pass


TAKERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "output": ("out.partial/lock", lambda folder: Output(folder / "out").__enter__()),
    "blocks": ("out.partial/blocks/", lambda folder: Output(folder / "out").__enter__()),
    "model": ("out.partial/model/", lambda folder: Output(folder / "out").__enter__()),
    "export": ("out.exporting/lock", lambda folder: place.ExportPlace(folder / "out", "", False).__enter__()),
    "study": ("study/lock", lambda folder: hold(folder / "study")),
    "cells": ("study/cells/", lambda folder: StudyFolder(folder / "study").open({})),
}


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("is_pipe", [False, True])
def test_folders_and_locks_that_are_links_are_refused(name: str, is_pipe: bool, victim: Path, tmp_path: Path) -> None:
    path, take = TAKERS[name]
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "folder" / path).parent.mkdir(parents=True)
    if path.endswith("/"):
        (tmp_path / "folder" / path.rstrip("/")).symlink_to(outside)
    elif is_pipe:
        os.mkfifo(tmp_path / "folder" / path)
    else:
        (tmp_path / "folder" / path).symlink_to(victim)
    with pytest.raises(OutputError, match="in its place|in the way|not ours"):
        take(tmp_path / "folder")
    assert list(outside.iterdir()) == []


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe that nobody writes to would block for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link", "."):
        for read in (files.open_regular, files.read_text, sha256, lambda path: files.copy(path, tmp_path / "copy")):
            with pytest.raises(OSError, match="no regular file"):
                read(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and not (tmp_path / "copy").exists()
    (tmp_path / "text").write_bytes("\ufeffä\r\nb\rc".encode())
    assert files.read_text(tmp_path / "text", "utf-8-sig") == "ä\nb\nc" == (tmp_path / "text").read_text("utf-8-sig")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("is_link", [False, True])
def test_work_of_another_user_is_not_gone_on_with(is_link: bool, tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
    os.chown(folder, 12345, -1, follow_symlinks=False)
    with pytest.raises(OutputError, match=r"out.partial belongs to another user; remove it, or give another --out"):
        Output(tmp_path / "out").__enter__()
    assert list(folder.iterdir()) == []


def test_a_store_that_gives_all_files_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not files.is_of_another_user(tmp_path) and list(tmp_path.iterdir()) == []
