"""Killed at any moment, a run goes on where it was, and writes what an uninterrupted one writes, to the byte."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import api
from compress.run import verify
from compress.storage import checkpoint
from compress.storage.workdir import Output
from helpers.runs import (
    GPTQ,
    REPORTS,
    RTN,
    Setup,
    cli,
    command,
    contents,
    environment,
    interrupt,
    job,
    one_line,
    report_of,
    untouched,
)

IN_BLOCK_1 = interrupt("compress.quant.gptq", "quantize_rows", 10)  # of seven linears a block
IN_SELF_CHECK = interrupt("compress.run.verify", "self_check", 1)


@pytest.fixture(scope="module")
def model(pico_dir: Callable[..., Path]) -> Path:
    return pico_dir("llama", shards=True)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Setup], dict[str, bytes]]:
    """expected(setup) -> the files that an uninterrupted run writes."""
    known: dict[Setup, dict[str, bytes]] = {}

    def files(setup: Setup) -> dict[str, bytes]:
        if setup not in known:
            out = tmp_path_factory.mktemp("expected") / "out"
            api.quantize(job(model, setup, out))
            known[setup] = contents(out)
        return known[setup]

    return files


def finished(out: Path, blocks: int) -> dict[str, bytes]:
    """Files of a run that was resumed after this many blocks and left nothing else behind."""
    assert report_of(out)["resumed_blocks"] == blocks
    assert {path.name for path in out.iterdir()} == {*contents(out), *REPORTS}
    assert not list(out.parent.glob(f"{out.name}?*")), "something was left beside the output"
    return contents(out)


# ---------------------------------------------------------------- killed


def test_killed_in_the_middle_of_a_block(
    model: Path, expected: Callable[[Setup], dict[str, bytes]], tmp_path: Path
) -> None:
    """The real command line, killed from outside while it works on block 1."""
    out = tmp_path / "out"
    words = [sys.executable, "-m", "compress", *command(model, GPTQ, out)]
    done = tmp_path / "out.partial" / "blocks" / "00000.json"
    with subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 600
        while not done.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not out.exists() and not (tmp_path / "out.partial" / "blocks" / "00001.json").exists()
    result = cli(*command(model, GPTQ, out), "--json")
    assert result.code == 0 and json.loads(result.out)["resumed_blocks"] == 1
    assert finished(out, 1) == expected(GPTQ)
    verify.verify(out)


@pytest.mark.parametrize(
    ("where", "blocks"),
    [(interrupt("compress.calib.stats", "collect", 1), 0), (IN_SELF_CHECK, 2)],
    ids=["in block 0", "in the self-check"],
)
def test_killed(
    where: str, blocks: int, model: Path, expected: Callable[[Setup], dict[str, bytes]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = command(model, GPTQ, out)
    assert cli(*words, prepare=where).code == -signal.SIGKILL
    assert not out.exists()
    assert cli(*words).code == 0
    assert finished(out, blocks) == expected(GPTQ)


def test_killed_twice(model: Path, expected: Callable[[Setup], dict[str, bytes]], tmp_path: Path) -> None:
    words = command(model, GPTQ, tmp_path / "out")
    assert cli(*words, prepare=IN_BLOCK_1).code == -signal.SIGKILL
    assert cli(*words, prepare=interrupt("compress.quant.gptq", "quantize_rows", 3)).code == -signal.SIGKILL
    assert cli(*words).code == 0
    assert finished(tmp_path / "out", 1) == expected(GPTQ)


@pytest.mark.slow
def test_killed_before_each_rename(model: Path, expected: Callable[[Setup], dict[str, bytes]], tmp_path: Path) -> None:
    """Every file is put in place by os.replace; before each of them the run is killed once."""
    for call in count(1):
        out = tmp_path / str(call)
        words = command(model, RTN, out)
        result = cli(*words, prepare=interrupt("os", "replace", call))
        if result.code == 0:
            break
        assert result.code == -signal.SIGKILL and not out.exists(), call
        assert cli(*words).code == 0, call
        assert contents(out) == expected(RTN), call
        assert list(tmp_path.iterdir()) == [out], call
        shutil.rmtree(out)
    assert call > 10


@pytest.mark.parametrize("call", [1, 2, 3])
def test_killed_while_an_old_output_is_replaced(
    call: int, model: Path, expected: Callable[[Setup], dict[str, bytes]], tmp_path: Path
) -> None:
    """Before the old one is moved away, before the new one is put in its place, and after that."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    (out / checkpoint.MANIFEST).write_text("old")
    words = [*command(model, RTN, out), "--overwrite"]
    where = interrupt("os", "rename", call) if call < 3 else interrupt("shutil", "rmtree", 1)
    assert cli(*words, prepare=where).code == -signal.SIGKILL
    assert contents(out if call == 1 else tmp_path / "out.partial" / "old") == {"old": b"old"}  # nothing is lost
    assert contents(out if call == 3 else tmp_path / "out.partial" / "model") == expected(RTN)
    result = cli(*words)
    assert result.code == 0, result.err
    assert finished(out, 0 if call == 3 else 2) == expected(RTN)


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize(("call", "blocks"), [(10, 1), (2, 0)])
def test_control_c(
    call: int, blocks: int, model: Path, expected: Callable[[Setup], dict[str, bytes]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = command(model, GPTQ, out)
    result = cli(*words, prepare=interrupt("compress.quant.gptq", "quantize_rows", call, "SIGINT"))
    assert result.code == 130
    assert one_line(result) == "interrupted; run the same command again to go on after the last finished block"
    assert not out.exists()
    assert cli(*words).code == 0
    assert finished(out, blocks) == expected(GPTQ)


# ---------------------------------------------------------------- only the same run goes on


@pytest.fixture
def killed(model: Path, tmp_path: Path) -> Path:
    """An output of GPTQ whose run was killed in block 1."""
    assert cli(*command(model, GPTQ, tmp_path / "out"), prepare=IN_BLOCK_1).code == -signal.SIGKILL
    return tmp_path / "out"


def test_other_settings_are_refused_until_restart(
    model: Path, killed: Path, expected: Callable[[Setup], dict[str, bytes]], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("another text " * 100)
    words = command(model, GPTQ, killed)
    with untouched(killed.with_name("out.partial")):
        for changed, names in {
            ("--set", "bits=3"): "recipe",
            ("--seed", "1"): "calibration text, seed",
            ("--calib", str(text)): "calibration text",
        }.items():
            result = cli(*words, *changed)
            assert result.code == 1, changed
            line = one_line(result)
            assert f"an unfinished run with another {names}; give --restart to start over" in line
    other = GPTQ.set("bits=3")
    assert cli(*command(model, other, killed), "--restart").code == 0
    assert finished(killed, 0) == expected(other) != expected(GPTQ)


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    """One number of one weight was changed."""
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    words = command(copy, RTN, tmp_path / "out")
    assert cli(*words, prepare=IN_SELF_CHECK).code == -signal.SIGKILL
    shard = sorted(copy.glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    result = cli(*words)
    assert result.code == 1 and "an unfinished run with another model; give --restart" in one_line(result)


def test_what_does_not_change_the_result_may_change(
    model: Path, killed: Path, expected: Callable[[Setup], dict[str, bytes]]
) -> None:
    """The name of the recipe, the way to the model, the limit of memory."""
    asked = job(Path(os.path.relpath(model)), GPTQ, killed)
    asked = dataclasses.replace(asked, max_memory=1 << 40, recipe=dataclasses.replace(asked.recipe, description="x"))
    assert api.quantize(asked)["resumed_blocks"] == 1
    again = contents(killed)
    assert {name for name in again if again[name] != expected(GPTQ)[name]} == {"recipe.yaml"}


def test_the_number_of_threads_is_that_of_the_first_run(
    model: Path, killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums taken by more threads are taken in another order."""
    used: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    api.quantize(job(model, GPTQ, killed))
    assert used == [1, 7]


def test_a_damaged_shard_is_written_again(
    model: Path, killed: Path, expected: Callable[[Setup], dict[str, bytes]]
) -> None:
    path = next(killed.with_name("out.partial").glob("model/*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    assert api.quantize(job(model, GPTQ, killed))["resumed_blocks"] == 0
    assert contents(killed) == expected(GPTQ)


@pytest.mark.parametrize("damaged", ["journal", "run"])
def test_a_damaged_unfinished_run(
    damaged: str, model: Path, killed: Path, expected: Callable[[Setup], dict[str, bytes]]
) -> None:
    work = killed.with_name("out.partial")
    path = {
        "journal": work / "blocks" / "00000.json",
        "run": work / "run.json",
    }[damaged]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    result = cli(*command(model, GPTQ, killed))
    assert result.code == 1
    line = one_line(result)
    assert str(path) in line and "--restart to start over" in line
    assert not killed.exists()
    assert cli(*command(model, GPTQ, killed), "--restart").code == 0
    assert finished(killed, 0) == expected(GPTQ)


def test_blocks_after_a_gap_are_computed_again(
    model: Path, expected: Callable[[Setup], dict[str, bytes]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert cli(*command(model, GPTQ, out), prepare=IN_SELF_CHECK).code == -signal.SIGKILL
    (tmp_path / "out.partial" / "blocks" / "00000.json").unlink()
    (tmp_path / "out.partial" / "model" / "half-written.part").touch()
    assert cli(*command(model, GPTQ, out)).code == 0
    assert finished(out, 0) == expected(GPTQ)


# ---------------------------------------------------------------- one run at a time, one output


def test_a_second_run_is_refused_while_the_first_lives(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = command(model, RTN, out)
    with Output(out), untouched(tmp_path / "out.partial"):
        for extra in ([], ["--overwrite"], ["--restart"]):
            result = cli(*words, *extra)
            assert result.code == 1 and f"another run is writing {out}; wait for it" in one_line(result)
    assert cli(*words).code == 0


def test_a_dead_run_holds_no_lock(model: Path, killed: Path) -> None:
    assert (killed.with_name("out.partial") / "lock").exists()
    with Output(killed):
        pass


def test_an_existing_output_is_replaced_only_at_the_end(
    model: Path, expected: Callable[[Setup], dict[str, bytes]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    api.quantize(job(model, GPTQ, out))
    words = command(model, RTN, out)
    with untouched(out):
        result = cli(*words)
        assert result.code == 1 and "out exists already; give another --out, or --overwrite" in one_line(result)
        assert not (tmp_path / "out.partial").exists()
        assert cli(*words, "--overwrite", prepare=IN_SELF_CHECK).code == -signal.SIGKILL
    assert cli(*words, "--overwrite").code == 0
    assert finished(out, 2) == expected(RTN)


def test_another_directory_is_not_replaced(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "photo").write_text("precious")
    with untouched(tmp_path):
        result = cli(*command(model, RTN, out), "--overwrite")
    assert result.code == 1 and "out is not a checkpoint that compress wrote; delete it yourself" in one_line(result)
    assert not (tmp_path / "out.partial").exists()


def test_the_self_check_finds_a_shard_that_has_changed(model: Path, tmp_path: Path) -> None:
    """A disk that gives back another byte: the run fails, and the old output stays."""
    damage = """
from compress.run import verify
real = verify.self_check
def check(directory, *rest):
    path = directory / "model-00002-of-00003.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    real(directory, *rest)
verify.self_check = check
"""
    out = tmp_path / "out"
    words = command(model, RTN, out)
    result = cli(*words, prepare=damage)
    assert result.code == 1 and not out.exists()
    line = one_line(result)
    assert re.match("self-check failed: .*model-00002-of-00003.safetensors does not hold what was written", line)
    assert cli(*words).code == 0  # the shard on disk is not the recorded one: its block is computed again
    assert report_of(out)["resumed_blocks"] == 1
