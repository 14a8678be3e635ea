"""A refused run leaves nothing that blocks the next one, whatever it was refused for; what holds work stays."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.pico import save_pico
from helpers.runs import GPTQ, RTN, TEXT, Setup, cli, command, interrupt, one_line

MEASURED = """
calibration: {num_samples: 4, seq_len: 24}
quantize: {method: rtn, bits: 4, group_size: 32}
allocate: {method: knapsack, estimator: weight, samples: 2, options: [{bits: 2}, {bits: 4}, {bits: 6}]}
"""


@pytest.fixture
def model(pico_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(pico_dir("llama", shards=True), tmp_path / "model"))


@pytest.fixture
def mine(tmp_path: Path) -> Setup:
    (tmp_path / "mine.yaml").write_text(MEASURED)
    return Setup(str(tmp_path / "mine.yaml"))


def measure(model: Path, setup: Setup, folder: Path, *more: str) -> list[str]:
    return [
        "allocate",
        "--measure",
        str(model),
        *setup.options(),
        "--calib",
        str(TEXT),
        "--measurements",
        str(folder),
        *more,
    ]


def spoil(model: Path) -> None:
    """Put a NaN into a weight of the first block."""
    name = "model.layers.0.mlp.up_proj.weight"
    (path,) = (path for path in model.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def test_no_refusal_leaves_a_work_directory(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "few.txt").write_text("ten tokens")
    before = sorted(tmp_path.iterdir())
    for more, said in {
        ("--set", "rules=[{match: '*.query', keep: true}]"): "matches no linear",
        ("--max-memory", "1MiB"): "needs at least",
        ("--calib", str(tmp_path / "few.txt")): "has only 10 tokens",
        ("--calib", "nowhere/none"): "is neither a file nor a data set",
        ("--set", "allocate={}", "--target", "1bpw"): "below the least",
        ("--set", "allocate={}", "--target", "1KiB"): "below the least",
    }.items():
        result = cli(*command(model, GPTQ, out), *more)
        assert result.code == 1 and said in one_line(result), result
        assert sorted(tmp_path.iterdir()) == before
    spoil(model)
    result = cli(*command(model, GPTQ, out))
    assert result.code == 1 and "NaN" in one_line(result)
    assert sorted(tmp_path.iterdir()) == before


def test_what_was_killed_before_its_first_block_binds_nobody(model: Path, mine: Setup, tmp_path: Path) -> None:
    """Neither an output nor a folder of measurements."""
    out, folder = tmp_path / "out", tmp_path / "measured"
    assert (
        cli(*command(model, GPTQ, out), prepare=interrupt("compress.quant.gptq", "quantize_rows", 2)).code
        == -signal.SIGKILL
    )
    assert (tmp_path / "out.partial" / "run.json").is_file()
    assert cli(*command(model, RTN, out)).code == 0
    first = interrupt("compress.quant.rtn", "quantize", 2)
    assert cli(*measure(model, mine, folder), prepare=first).code == -signal.SIGKILL
    assert (folder / "run.json").is_file() and not list(folder.glob("levels/*.json"))
    result = cli(*measure(model, mine, folder, "--seed", "1"), prepare=first.replace("SIGKILL", "SIGTERM"))
    assert result.code == 143 and not folder.exists()
    assert cli(*measure(model, mine, folder, "--seed", "1")).code == 0


def test_a_measurement_that_holds_work_stays(model: Path, mine: Setup, tmp_path: Path) -> None:
    folder = tmp_path / "measured"
    in_block_1 = interrupt("compress.quant.rtn", "quantize", 30, "SIGTERM")  # 21 of each block
    assert cli(*measure(model, mine, folder), prepare=in_block_1).code == 143
    assert (folder / "levels" / "00000.json").is_file()
    result = cli(*measure(model, mine, folder, "--seed", "1"))
    assert result.code == 1 and "was measured with another calibration text, seed" in one_line(result)
    assert cli(*measure(model, mine, folder)).code == 0


def test_a_folder_of_others_keeps_what_it_holds(model: Path, mine: Setup, tmp_path: Path) -> None:
    """Given for measurements that are refused, though it has a file of the name of ours."""
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "run.json").write_text("of another program")
    for _ in range(2):
        result = cli(*measure(model, mine, folder))
        assert result.code == 1 and "run.json is damaged" in one_line(result)
        assert (folder / "run.json").read_text() == "of another program" and not (folder / "levels").exists()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "photo").write_text("precious")
    spoil(model)
    result = cli(*measure(model, mine, folder))
    assert result.code == 1 and "NaN" in one_line(result)
    assert [path.name for path in folder.iterdir()] == ["photo"] and (folder / "photo").read_text() == "precious"


def test_targets_are_answered_before_measuring(mine: Setup, tmp_path: Path) -> None:
    """Those that no choice reaches, with the least that one does; beside a cache, too."""
    model = save_pico("llama", tmp_path / "model")
    before = sorted(tmp_path.iterdir())
    words = ["--calib", str(TEXT), "--out", str(tmp_path / "out")]
    with_cache = mine.set("kv_cache={method: kivi, bits: 4, group_size: 16, residual_length: 16}").options()
    for more, said in {
        (*mine.options(), "--target", "2bpw"): "below the least that the options allow: 2.500",
        (*mine.options(), "--target", "100KB"): "below the least that the options allow: 2.500",
        (*with_cache, "--target", "100KB", "--context", "100"): "below the least that the options allow: 2.500",
    }.items():
        for name in ("quantize", "plan"):
            result = cli(name, str(model), *words, *more)
            assert result.code == 1 and said in one_line(result) and "raise it" in result.err, result
    alone = ["--recipe", "kv4", "--set", "kv_cache.group_size=16", "--set", "allocate={context: 100}"]
    result = cli("quantize", str(model), *words, *alone, "--target", "100KB")
    assert result.code == 1 and "leaves nothing for the cache: the weights take 517.25 KiB" in one_line(result)
    assert sorted(tmp_path.iterdir()) == before


def test_a_cache_that_does_not_fit_is_found_before_weights_are_measured(mine: Setup, tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model")
    words = ["--calib", str(TEXT), "--measurements", str(tmp_path / "m"), "--out", str(tmp_path / "out")]
    options = mine.set(
        "kv_cache={method: kivi, bits: 4, group_size: 16, residual_length: 16}", "calibration.seq_len=128"
    ).options()
    result = cli("quantize", str(model), *words, *options, "--target", "190KB", "--context", "250")
    assert result.code == 1 and "of it the cache of 250 tokens; raise the target" in one_line(result), result
    assert not list(tmp_path.glob("m/levels/*")) and not (tmp_path / "m" / "run.json").exists()


def test_more_than_enough_is_said_once(mine: Setup, tmp_path: Path) -> None:
    model, out = save_pico("llama", tmp_path / "model"), tmp_path / "out"
    note = "compress: target 12bpw is above the largest options (6.500 bpw, "
    words = [str(model), *mine.options(), "--calib", str(TEXT), "--target", "12bpw"]
    result = cli("quantize", *words, "--out", str(out))
    assert result.code == 0 and result.err.count(note) == 1 and "every linear gets its largest" in result.err
    assert "6.500 bits per packed weight" in result.out
    assert cli("plan", *words, "--out", str(out)).err.count(note) == 1


def test_a_short_calibration_is_said(model: Path, mine: Setup, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * 100)
    text = ["--calib", str(tmp_path / "short.txt")]
    for words, said in {
        (*command(model, GPTQ, tmp_path / "out"), *text): "3 of 8 samples",
        (*measure(model, mine, tmp_path / "m"), *text): "4 of 4 samples",
        (*measure(model, mine.set("calibration.num_samples=9"), tmp_path / "n"), *text): "4 of 9 samples",
    }.items():
        result = cli(*words)
        note = f"compress: calibration: {said}; the text has only 100 tokens\n"
        assert result.code == 0 and (note in result.err) == (said != "4 of 4 samples"), result
    (tmp_path / "long.txt").write_text("some text to calibrate on " * 100)
    words = ["--kv", "kv2", "--calib", str(tmp_path / "long.txt"), "--prompt", "x", "--max-new-tokens", "2"]
    result = cli("generate", str(model), *words)
    assert result.code == 0 and "compress: calibration: 10 of 32 samples; the text has only 2,600 tokens" in result.err
