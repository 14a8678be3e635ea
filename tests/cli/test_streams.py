"""Output that nobody reads, that cannot be written, or in an encoding that has few characters: no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.pico import save_pico
from helpers.runs import GPTQ, RTN, cli, command, environment, one_line

COMPRESS = f"{sys.executable} -m compress"


def shell(line: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["bash", "-c", line], check=False, capture_output=True, text=True, env={**environment(), **variables}
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_nobody_reads_the_output() -> None:
    for more in ({}, {"PYTHONUNBUFFERED": "1"}):
        reader, writer = os.pipe()
        os.close(reader)
        words = [sys.executable, "-m", "compress", "methods", "--json"]
        done = subprocess.run(words, check=False, stdout=writer, stderr=subprocess.PIPE, env={**environment(), **more})
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_the_output() -> None:
    for more in ({}, {"PYTHONUNBUFFERED": "1"}):
        code, _, err = shell(f"{COMPRESS} methods --json > /dev/full", **more)
        assert (code, err) == (1, "compress: cannot write the output: No space left on device\n")


def test_closed_streams_and_a_poor_encoding() -> None:
    assert shell(f"{COMPRESS} recipes >&- 2>&- <&-") == (0, "", "")
    poor = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    code, out, err = shell(f"{COMPRESS} plan ./Modèle", **poor)
    assert (code, out) == (1, "") and err.startswith("compress: ./Mod") and "is neither a directory" in err


FULL = """
import errno, os
from compress.storage import checkpoint
real, calls = os.fsync, 0
def fsync(descriptor):
    global calls
    calls += 1
    if calls == {call}:
        raise OSError(errno.{error}, os.strerror(errno.{error}))
    real(descriptor)
os.fsync = fsync
"""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("ENOSPC", "the disk is full; free some space and run the same command to go on"),
        (
            "EFBIG",
            "a file is larger than is allowed; raise ulimit -f and run the same command to go on",
        ),
        ("EROFS", "the file system is read-only; make it writable and run this again, or give another --out"),
        ("EIO", "the disk reports an error; run the same command to go on once it is mended"),
    ],
)
def test_a_disk_that_fails_in_the_middle(error: str, says: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    words = command(pico_dir("llama"), GPTQ, tmp_path / "out")
    result = cli(*words, prepare=FULL.format(call=11, error=error))
    assert result.code == 1 and one_line(result) == f"cannot write {tmp_path / 'out.partial'}: {says}"
    assert (tmp_path / "out.partial" / "run.json").is_file()
    assert cli(*words).code == 0


def test_names_and_places(tmp_path: Path) -> None:
    """Spaces, other alphabets, links, a slash at the end, another folder, and bytes that are no UTF-8."""
    folder = tmp_path / "mes modèles 模型"
    model = save_pico("llama", folder / "petit modèle")
    (tmp_path / "link").symlink_to(folder)
    odd = folder / os.fsdecode(b"odd\xff")
    odd.symlink_to(model)
    for number, name in enumerate(("link/petit modèle/", "./mes modèles 模型/petit modèle", str(odd))):
        out = f"link/sortie {number}/"
        result = cli("quantize", name, *RTN.options(), "--out", out, cwd=tmp_path)
        assert result.code == 0, result
        assert cli("verify", out, cwd=tmp_path).code == 0 and cli("inspect", f"./{out}", cwd=tmp_path).code == 0
        assert f"sortie {number}" in result.out
    assert cli("quantize", ".", *RTN.options(), "--out", "../again", cwd=model).code == 0
    assert {path.name for path in folder.iterdir()} == {
        model.name,
        odd.name,
        "again",
        *(f"sortie {i}" for i in range(3)),
    }
