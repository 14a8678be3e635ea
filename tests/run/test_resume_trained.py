"""Killed after or within the training of low-rank parts, or the calibration of a cache, a run writes the same bytes."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from compress import api
from compress.run import verify, write
from helpers.runs import GPTQ, cli, command, contents, interrupt, job, one_line, report_of

CACHE = "kv_cache={method: kvquant, keys: {bits: 3}, values: {bits: 3}, residual_length: 16}"
LOWRANK = "lowrank={{rank: 4, train: 8, train_rate: {}}}"
SETUP = GPTQ.set("bits=2", "calibration.num_samples=64", CACHE)
TRAINED = SETUP.set(LOWRANK.format(1e-3))
AT_THE_MANIFEST = interrupt("compress.run.records", "write_manifest", 1)
ONCE = """
import compress.{0} as module
def refuse(*args, **kwargs):
    raise AssertionError("{1} again")
module.{1} = refuse
"""
NOTHING_AGAIN = ONCE.format("tune.low_rank", "train_model") + ONCE.format("run.cache_calibration", "calibrate")


@pytest.fixture(scope="module")
def model(pico_dir: Callable[..., Path]) -> Path:
    return pico_dir("llama", shards=True)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "out"
    api.quantize(job(model, TRAINED, out))
    verify.verify(out)
    assert "no better" not in str(report_of(out)["notes"]["low-rank parts"])
    assert report_of(out)["kv_cache"]["calibration"]
    return contents(out)


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    """killed(folder) -> the command line of a run into folder/out that was killed at the manifest, as it was left."""
    place = tmp_path_factory.mktemp("killed")
    assert cli(*command(model, TRAINED, place / "out"), prepare=AT_THE_MANIFEST).code == -signal.SIGKILL

    def copy(folder: Path) -> list[str]:
        shutil.copytree(place, folder, dirs_exist_ok=True)
        return command(model, TRAINED, folder / "out")

    return copy


def finished(out: Path, blocks: int) -> dict[str, bytes]:
    """Files of a run that was resumed after so many blocks, and left nothing behind."""
    assert report_of(out)["resumed_blocks"] == blocks and len(report_of(out)["notes"]["low-rank parts"]) == 1
    assert not list(out.parent.glob(f"{out.name}?*")), "something was left beside the output"
    verify.verify(out)
    return contents(out)


@pytest.mark.slow
def test_killed_at_the_manifest(
    killed: Callable[[Path], list[str]], expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Twice; what was trained and calibrated is not done again."""
    words = killed(tmp_path)
    assert cli(*words, prepare=NOTHING_AGAIN + AT_THE_MANIFEST).code == -signal.SIGKILL
    result = cli(*words, prepare=NOTHING_AGAIN)
    assert result.code == 0, result.err
    assert finished(tmp_path / "out", 2) == expected


@pytest.mark.parametrize(
    ("module", "name", "call", "is_trained"),
    [
        pytest.param("compress.tune.low_rank", "_backward", 5, False, marks=pytest.mark.slow),
        ("compress.run.trained_tensors", "write_shard", 1, False),
        pytest.param("compress.run.trained_tensors", "put_into_shards", 1, True, marks=pytest.mark.slow),
        pytest.param(
            "compress.run.trained_tensors", "write_shard", 3, True, marks=pytest.mark.slow
        ),  # one shard is trained, the other is not
        ("compress.run.cache_calibration", "calibrate", 1, True),
        pytest.param("compress.runtime.kv_config", "write_shard", 1, True, marks=pytest.mark.slow),
        ("compress.run.verify", "self_check", 2, True),
    ],
)
def test_killed(
    module: str, name: str, call: int, is_trained: bool, model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    words = command(model, TRAINED, tmp_path / "out")
    assert cli(*words, prepare=interrupt(module, name, call)).code == -signal.SIGKILL
    result = cli(*words, prepare=ONCE.format("tune.low_rank", "train_model") if is_trained else "")
    assert result.code == 0, result.err
    assert finished(tmp_path / "out", 2) == expected


def test_killed_while_former_factors_are_put_back(
    killed: Callable[[Path], list[str]], expected: dict[str, bytes], tmp_path: Path
) -> None:
    words = killed(tmp_path)
    one_of_two = interrupt("compress.run.trained_tensors", "write_shard", 2)
    assert cli(*words, prepare=one_of_two).code == -signal.SIGKILL
    assert cli(*words, prepare=NOTHING_AGAIN).code == 0
    assert finished(tmp_path / "out", 2) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damaged", "at", "blocks"),
    [
        ("model/model-00002-of-00003.safetensors", -1, 1),
        ("model/model-00002-of-00003.safetensors", 0, 1),  # its header
        ("model/kv_cache.safetensors", -1, 2),
        ("blocks/trained.safetensors", -1, 0),
    ],
)
def test_damaged_files_are_made_again(
    damaged: str,
    at: int,
    blocks: int,
    killed: Callable[[Path], list[str]],
    expected: dict[str, bytes],
    tmp_path: Path,
) -> None:
    words = killed(tmp_path)
    path = tmp_path / "out.partial" / damaged
    raw = bytearray(path.read_bytes())
    raw[at] ^= 255
    path.write_bytes(raw)
    result = cli(*words)
    assert result.code == 0, result.err
    assert finished(tmp_path / "out", blocks) == expected


@pytest.mark.slow
def test_a_training_that_brings_nothing(model: Path, tmp_path: Path) -> None:
    """It is not tried again either."""
    setup = SETUP.set(LOWRANK.format(3.0))
    api.quantize(job(model, setup, tmp_path / "whole"))
    words = command(model, setup, tmp_path / "out")
    assert cli(*words, prepare=AT_THE_MANIFEST).code == -signal.SIGKILL
    assert cli(*words, prepare=NOTHING_AGAIN).code == 0
    assert finished(tmp_path / "out", 2) == contents(tmp_path / "whole")
    assert "no better" in str(report_of(tmp_path / "out")["notes"]["low-rank parts"])


LOST = """
import compress.run.trained_tensors as module
module.write_into = lambda path, tensors: None
"""


def test_the_self_check_reads_the_trained_shards(model: Path, tmp_path: Path) -> None:
    """Shards that still have the former factors fail the run."""
    result = cli(*command(model, TRAINED, tmp_path / "out"), prepare=LOST)
    assert result.code == 1 and not (tmp_path / "out").exists()
    assert one_line(result).startswith("self-check failed: block 0 read back from")


def test_the_report_says_what_the_last_check_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check comes after the last change of bytes, and the report holds its outcome."""
    real, seen = verify.self_check, []

    def check(directory: Path, *rest: object) -> str:
        real(directory, *rest)  # type: ignore[arg-type]
        seen.append({path.name: path.read_bytes() for path in directory.glob("*.*")})
        return "the outcome"

    monkeypatch.setattr(write.verify, "self_check", check)
    api.quantize(job(model, TRAINED, tmp_path / "out"))
    written = contents(tmp_path / "out")
    assert {name: raw for name, raw in seen[-1].items() if name != "README.md"} == {
        name: raw for name, raw in written.items() if name != "README.md"
    }
    assert json.loads((tmp_path / "out" / "report.json").read_text())["self_check"] == "the outcome"
