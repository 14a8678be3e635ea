"""The output directory, by itself: whatever fails at whatever moment, nothing is mixed, lost or left behind."""

from __future__ import annotations

import errno
import fcntl
import importlib
import inspect
import os
import shutil
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from compress.errors import OutputError
from compress.storage import checkpoint
from compress.storage.checkpoint import write_text
from compress.storage.files import sync_directory
from compress.storage.workdir import Output, writing
from helpers.runs import cli, interrupt

STEPS = ["os.mkdir", "os.rename", "os.replace", "os.rmdir", "os.unlink", "shutil.rmtree"]  # all that change directories


def work(out: Path, recipe: str, restart: bool = False, overwrite: bool = True) -> int:
    """A run of two blocks, as the pipeline does it; returns how many were done before."""
    with Output(out, overwrite, restart) as output, writing(output.work):
        output.begin({"recipe": recipe}, {})
        records = output.finished_blocks()
        for index, record in enumerate(records):
            text = (output.model / f"{index}.safetensors").read_text()
            assert record == {"recipe": recipe} and text == recipe, f"{record}, {text} taken over by {recipe}"
        for index in range(len(records), 2):
            write_text(output.model / f"{index}.safetensors", recipe)
            output.finish_block(index, {"recipe": recipe})
        write_text(output.model / "compress_manifest.json", recipe)
        output.publish()
    return len(records)


def stop(out: Path, recipe: str, blocks: int) -> None:
    """An unfinished run; it writes what `work` writes."""
    with Output(out, overwrite=True) as output:
        output.begin({"recipe": recipe}, {})
        for index in range(blocks):
            write_text(output.model / f"{index}.safetensors", recipe)
            output.finish_block(index, {"recipe": recipe})


def files(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def whole(recipe: str) -> dict[str, str]:
    """The files that `work` publishes."""
    return {name: recipe for name in ("0.safetensors", "1.safetensors", checkpoint.MANIFEST)}


def killed(step: str, call: int, out: Path) -> bool:
    """Start run "third" in another process, which is killed before this call; False: it came to its end."""
    imports = "from pathlib import Path\nfrom compress.storage.checkpoint import write_text\n"
    imports += "from compress.storage.workdir import *\n"
    module, name = step.split(".")
    start = f"\nwork(Path({str(out)!r}), 'third', restart=True)\nos._exit(0)"
    result = cli(prepare=imports + inspect.getsource(work) + interrupt(module, name, call) + start)
    assert result.code in (0, -signal.SIGKILL), result
    return result.code != 0


def failed(step: str, call: int, out: Path) -> bool:
    """Run "third", in which this call gives an error of the disk; False: there was no such call."""
    module, name = step.split(".")
    place, calls = importlib.import_module(module), 0
    real: Callable[..., object] = getattr(place, name)

    def hit(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, "full")
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, hit)
        try:
            work(out, "third", restart=True)
        except OutputError as error:
            assert str(error).endswith("the disk is full; free some space and run the same command to go on")
    return calls >= call


@pytest.mark.parametrize(("first", "second"), [(False, False), (True, True)], ids=["new", "replaced and restarted"])
@pytest.mark.parametrize("how", [killed, pytest.param(failed, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", STEPS)
def test_stopped_at_every_step(
    step: str, how: Callable[[str, int, Path], bool], first: bool, second: bool, tmp_path: Path
) -> None:
    """first: there is an output already; second: and an unfinished run of another recipe."""
    for call in count(1):
        out = tmp_path / f"{call}" / "out"
        out.parent.mkdir()
        if first:
            work(out, "first")
        if second:
            stop(out, "second", 2)
        if not how(step, call, out):
            assert files(out) == whole("third") and os.listdir(out.parent) == ["out"]
            break
        if first and not out.exists():  # between the two renames: any run puts it back
            assert how is killed
            with pytest.raises(OutputError, match="exists already"):
                work(out, "fourth", overwrite=False)
            assert files(out) == whole("first")
        assert not out.exists() or files(out) in (whole("first"), whole("third")), call
        try:
            work(out, "third")
            assert files(out) == whole("third"), call
        except OutputError as error:
            assert second and "another recipe" in str(error), call  # was not yet forgotten: goes on
            work(out, "second")
            assert files(out) == whole("second"), call
        assert os.listdir(out.parent) == ["out"], call
    assert call > 1 or (step, first) == ("os.rename", False)


def test_stopped_between_the_renames(tmp_path: Path) -> None:
    """The old output stands by; the same run puts it back, goes on after its last block and replaces it."""
    out = tmp_path / "out"
    work(out, "first")
    assert killed("os.rename", 2, out)
    assert not out.exists() and files(tmp_path / "out.partial" / "old") == whole("first")
    assert work(out, "third") == 2
    assert files(out) == whole("third") and os.listdir(tmp_path) == ["out"]


def test_the_new_output_cannot_be_put_in_place(tmp_path: Path) -> None:
    """The old one is back at once, and the work is kept."""
    out = tmp_path / "out"
    work(out, "first")
    assert failed("os.rename", 2, out)
    assert files(out) == whole("first") and not (tmp_path / "out.partial" / "old").exists()
    assert work(out, "third") == 2


def test_a_refused_command_clears_what_a_published_run_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    work(out, "first")
    assert killed("shutil.rmtree", 1, out) and (tmp_path / "out.partial" / "old").exists()
    with pytest.raises(OutputError, match="exists already"):
        work(out, "third", overwrite=False)
    assert files(out) == whole("third") and os.listdir(tmp_path) == ["out"]


# ---------------------------------------------------------------- what is not ours


def test_an_output_that_appears_during_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop(out, "first", 2)
    with pytest.raises(OutputError, match="out exists already; give another --out"), Output(out) as output:
        out.mkdir()
        (out / "photo").write_text("precious")
        output.publish()
    assert files(out) == {"photo": "precious"}
    out.rename(tmp_path / "photos")
    assert work(out, "first", overwrite=False) == 2
    assert files(out) == whole("first") and sorted(os.listdir(tmp_path)) == ["out", "photos"]


@pytest.mark.parametrize("old", ["photos", "file", "link to photos", "link to nothing"])
def test_what_is_no_checkpoint_is_not_replaced(old: str, tmp_path: Path) -> None:
    out, photos = tmp_path / "out", tmp_path / "photos"
    for directory in [photos, out] if old == "photos" else [photos]:
        directory.mkdir()
        (directory / "photo").write_text("precious")
    if old == "file":
        out.write_text("precious")
    elif old.startswith("link"):
        out.symlink_to(photos if old == "link to photos" else tmp_path / "nothing")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match="out is not a checkpoint that compress wrote; delete it yourself or give"):
        work(out, "first")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("link", [False, True])
def test_an_empty_directory_and_a_link_to_a_checkpoint_are_replaced(link: bool, tmp_path: Path) -> None:
    """The link, not what it leads to."""
    out, other = tmp_path / "out", tmp_path / "other"
    work(other, "first")
    out.symlink_to(other) if link else out.mkdir()
    work(out, "second")
    assert files(out) == whole("second") and not out.is_symlink() and files(other) == whole("first")
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


@pytest.mark.parametrize("names", [("photo",), ("model",), ("lock", "photo")])
def test_a_directory_with_the_name_of_ours(names: tuple[str, ...], tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    for name in names:
        (partial / name).write_text("precious")
    with pytest.raises(OutputError, match="out.partial holds files that are not ours; move them away, or give another"):
        work(tmp_path / "out", "first", restart=True)
    assert files(partial) == dict.fromkeys(names, "precious") and os.listdir(tmp_path) == ["out.partial"]


def test_files_put_beside_our_work_stay(tmp_path: Path) -> None:
    out, photo = tmp_path / "out", tmp_path / "out.partial" / "photo.part"
    stop(out, "first", 1)
    photo.write_text("precious")
    assert work(out, "first") == 1
    assert files(out) == whole("first") and files(photo.parent) == {"photo.part": "precious"}


def test_a_file_with_the_name_of_our_directory(tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text("precious")
    with pytest.raises(OutputError, match="a file of this name is in the way"):
        work(tmp_path / "out", "first")
    assert files(tmp_path) == {"out.partial": "precious"}


# ---------------------------------------------------------------- the lock, the records, the disk


def test_the_lock_is_held_until_all_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real, tried = tmp_path / "out", shutil.rmtree, []

    def rmtree(path: Path) -> None:
        with pytest.raises(OutputError, match="another run is writing"):
            Output(out, overwrite=True).__enter__()
        tried.append(path)
        real(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    work(out, "first")
    assert tried == [tmp_path / "out.partial" / "blocks"]
    work(out, "second")
    assert tmp_path / "out.partial" / "old" in tried


@pytest.mark.parametrize("again", [False, True], ids=["removed", "made again"])
def test_a_lock_that_another_run_removed(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its opening and its locking: it protects nothing, the run needs the one that is there."""
    lock, real, calls = tmp_path / "out.partial" / "lock", fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            lock.unlink()
            lock.touch() if again else lock.parent.rmdir()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Output(tmp_path / "out"):
        assert len(calls) == 2
        with lock.open("ab") as file, pytest.raises(BlockingIOError):
            real(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_records_are_forgotten_from_an_index_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop(out, "first", 2)
    with Output(out) as output:
        output.forget_from(1)
        assert len(output.finished_blocks()) == 1
    assert work(out, "first") == 1
    stop(out, "second", 1)
    with Output(out, overwrite=True) as output:
        output.forget_from(0)
    assert os.listdir(tmp_path) == ["out"]  # nothing was left to go on with


@pytest.mark.parametrize("lost", ["run.json", "model", "blocks/00000.json"])
def test_records_without_their_run_are_not_taken_over(lost: str, tmp_path: Path) -> None:
    stop(tmp_path / "out", "second", 2)
    path = tmp_path / "out.partial" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert work(tmp_path / "out", "third") == 0
    assert files(tmp_path / "out") == whole("third")


def test_names_are_forced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the file was renamed: its directory; after the output was: the directory it is in."""
    seen: list[tuple[Path, set[str]]] = []

    def sync(directory: Path) -> None:
        seen.append((directory, set(os.listdir(directory))))

    monkeypatch.setattr("compress.storage.files.sync_directory", sync)
    monkeypatch.setattr("compress.storage.workdir.sync_directory", sync)
    checkpoint.write_shard(tmp_path / "shard", {})
    write_text(tmp_path / "text", "")
    assert seen == [(tmp_path, {"shard"}), (tmp_path, {"shard", "text"})]
    work(tmp_path / "out", "first")
    assert (tmp_path, {"shard", "text", "out", "out.partial"}) in seen


def test_sync_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot do it is no error, a failing disk is one."""
    sync_directory(tmp_path)
    for code, fine in ((errno.EINVAL, True), (errno.EIO, False)):

        def fsync(descriptor: int, code: int = code) -> None:
            raise OSError(code, "no")

        monkeypatch.setattr(os, "fsync", fsync)
        if fine:
            sync_directory(tmp_path)
        else:
            with pytest.raises(OSError, match="no"):
                sync_directory(tmp_path)


@pytest.mark.parametrize("code", sorted(set(errno.errorcode) - {errno.EPIPE, errno.ENOMEM}))
def test_whatever_the_system_says_is_one_line(code: int, tmp_path: Path) -> None:
    """In the folder of the work, and at a file elsewhere, which is then named."""
    with pytest.raises(OutputError, match=f"^cannot write {tmp_path}: .*; ") as caught, writing(tmp_path, "--there"):
        raise OSError(code, os.strerror(code), str(tmp_path / "model" / "x"))
    assert "\n" not in str(caught.value)
    with (
        pytest.raises(OutputError, match="^/source/y: .*; mend that and run the same command again$"),
        writing(tmp_path),
    ):
        raise OSError(code, os.strerror(code), "/source/y")


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "x"), OSError(errno.ENOMEM, "x"), OSError("no number")])
def test_what_is_not_about_the_folder_passes(error: OSError, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, writing(tmp_path):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("step", ["shard", "record", "stage", "forget", "publish"])
def test_a_work_folder_that_vanishes_is_one_line(step: str, tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    with pytest.raises(OutputError, match="it is gone|No such file or directory; mend that") as caught, output:
        output.begin({}, {})
        shutil.rmtree(output.work)
        with writing(output.work):
            {
                "shard": lambda: checkpoint.write_shard(output.model / "x", {}),
                "record": lambda: output.finish_block(0, {}),
                "stage": lambda: output.finish_stage("rest", {}),
                "forget": lambda: write_text(output.run, ""),
                "publish": output.publish,
            }[step]()
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no folder that refuses new names")
def test_a_folder_in_which_nothing_can_be_made() -> None:
    with (
        pytest.raises(OutputError, match=r"cannot write /proc/out\.partial: .*give another --out"),
        Output(Path("/proc/out")),
    ):
        pass
