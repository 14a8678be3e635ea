"""Killed before, within or after end-to-end tuning, behind training of low-rank parts, a run writes the same bytes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from compress import api
from compress.run import verify
from helpers.runs import GPTQ, cli, command, contents, interrupt, job, report_of

LOWRANK = "lowrank={rank: 4, train: 8, train_rate: 1e-3}"
TUNE = "tune={{method: end_to_end, steps: 4, batch_tokens: 2048, rate: {0}, norm_rate: {0}, held_out: 4}}"
SETUP = GPTQ.set("bits=2", "calibration.num_samples=64", LOWRANK)
TUNED = SETUP.set(TUNE.format(0.01))
MODULE = "compress.run.trained_tensors"
AT_THE_MANIFEST = interrupt("compress.run.records", "write_manifest", 1)
NOT_AGAIN = """
import compress.tune.end_to_end as tuning, compress.tune.low_rank as parts
def refuse(*args, **kwargs):
    raise AssertionError("trained again")
tuning.train = parts.train_model = refuse
"""


@pytest.fixture(scope="module")
def model(pico_dir: Callable[..., Path]) -> Path:
    return pico_dir("llama", shards=True)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "out"
    api.quantize(job(model, TUNED, out))
    verify.verify(out)
    assert "no better" not in str(report_of(out)["notes"])
    return contents(out)


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    """killed(folder) -> the command line of a run into folder/out that was killed at the manifest, as it was left."""
    place = tmp_path_factory.mktemp("killed")
    assert cli(*command(model, TUNED, place / "out"), prepare=AT_THE_MANIFEST).code == -signal.SIGKILL

    def copy(folder: Path) -> list[str]:
        shutil.copytree(place, folder, dirs_exist_ok=True)
        return command(model, TUNED, folder / "out")

    return copy


def finished(words: list[str], out: Path, prepare: str = "", blocks: int = 2) -> dict[str, bytes]:
    """Files of a run that is resumed after so many blocks, and leaves nothing behind."""
    result = cli(*words, prepare=prepare)
    assert result.code == 0, result.err
    notes = report_of(out)["notes"]
    assert report_of(out)["resumed_blocks"] == blocks
    assert len(notes["low-rank parts"]) == len(notes["end-to-end tuning"]) == 1
    assert not list(out.parent.glob(f"{out.name}?*")), "something was left beside the output"
    verify.verify(out)
    return contents(out)


@pytest.mark.slow
def test_killed_at_the_manifest(
    killed: Callable[[Path], list[str]], expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Once while the tensors from before both trainings are put back, too; nothing is trained again."""
    words = killed(tmp_path)
    assert cli(*words, prepare=NOT_AGAIN + interrupt(MODULE, "write_shard", 2)).code == -signal.SIGKILL
    assert cli(*words, prepare=NOT_AGAIN + AT_THE_MANIFEST).code == -signal.SIGKILL
    assert finished(words, tmp_path / "out", NOT_AGAIN) == expected


@pytest.mark.parametrize(
    ("module", "name", "call", "is_trained"),
    [
        ("compress.calib.reference_logprobs", "_make", 1, False),
        pytest.param("compress.tune.streamed", "_through", 30, False, marks=pytest.mark.slow),  # within a step
        pytest.param(MODULE, "_keep", 2, False, marks=pytest.mark.slow),
        (MODULE, "put_into_shards", 2, True),
        pytest.param(MODULE, "write_shard", 6, True, marks=pytest.mark.slow),  # one shard is tuned, the others are not
    ],
)
def test_killed(
    module: str, name: str, call: int, is_trained: bool, model: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    words = command(model, TUNED, tmp_path / "out")
    assert cli(*words, prepare=interrupt(module, name, call)).code == -signal.SIGKILL
    assert finished(words, tmp_path / "out", NOT_AGAIN if is_trained else "") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damaged", "blocks"),
    [
        ("model/model-00002-of-00003.safetensors", 1),
        ("model/model-00003-of-00003.safetensors", 2),  # where the final norm is
        ("blocks/tuned.safetensors", 0),
    ],
)
def test_damaged_files_are_made_again(
    damaged: str, blocks: int, killed: Callable[[Path], list[str]], expected: dict[str, bytes], tmp_path: Path
) -> None:
    words = killed(tmp_path)
    path = tmp_path / "out.partial" / damaged
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 255
    path.write_bytes(raw)
    assert finished(words, tmp_path / "out", blocks=blocks) == expected


@pytest.mark.slow
def test_tuning_that_brings_nothing(model: Path, tmp_path: Path) -> None:
    """It leaves the bytes of a run without it, and is not tried again."""
    setup = SETUP.set(TUNE.format(0.9))
    words = command(model, setup, tmp_path / "out")
    assert cli(*words, prepare=AT_THE_MANIFEST).code == -signal.SIGKILL
    found = finished(words, tmp_path / "out", NOT_AGAIN)
    assert "no better" in report_of(tmp_path / "out")["notes"]["end-to-end tuning"][0]
    api.quantize(job(model, SETUP, tmp_path / "plain"))
    plain = contents(tmp_path / "plain")
    shards = [name for name in plain if name.endswith(".safetensors")]
    assert len(shards) == 3 and all(found[name] == plain[name] for name in shards)
