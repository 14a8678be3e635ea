"""The memory budget: what is predicted, what is refused, and arrangements that change no byte of the result."""

from __future__ import annotations

import dataclasses
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import api, process_memory, ranks
from compress.calib.stats import nbytes
from compress.cli import tables
from compress.errors import BudgetError
from compress.model import hidden_states
from compress.model.blockwise import FULL, QUANTIZED, HiddenStates
from compress.model.skeleton import Skeleton
from compress.process_memory import parse_size, show
from compress.quant import gptq
from compress.run import memory_plan, pipeline, sizes
from compress.run.memory_plan import Arrangement
from compress.run.plan import make
from compress.run.sizes import split_passes
from compress.storage.checkpoint import open_checkpoint
from helpers.runs import GPTQ, RTN, Setup, cli, command, contents, job, one_line, report_of

MIB = 1 << 20
BASE = 100 * MIB


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("123", 123),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        (" 1.5 GB ", 1_500_000_000),
        (".5MiB", MIB // 2),
        ("800MB", 800_000_000),
        ("2KiB", 2048),
        ("7B", 7),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "8 XB", "-8GiB", "1e9", "8GiB8", "1.2.3", "nan", "8 GiB GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 8GiB"):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [show(n) for n in (0, 1023, 1024, 3 * MIB // 2, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 MiB",
        "5.00 GiB",
    ]


def test_passes() -> None:
    keys = {"a": 4, "b": 3, "c": 9, "d": 1, "e": 1}
    assert split_passes(keys, 18) == [["a", "b", "c", "d", "e"]]
    assert split_passes(keys, 8) == [["a", "b"], ["c"], ["d", "e"]]  # c alone is more than allowed
    assert split_passes(keys, 0) == [[key] for key in keys]
    assert split_passes({}, 8) == []


# ---------------------------------------------------------------- arranging


@pytest.fixture
def arrange(pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Arrangement]:
    """arrange(setup, samples, seq_len, limit) for a llama, in a process that has BASE bytes."""
    skeleton = Skeleton(open_checkpoint(pico_dir("llama")))
    monkeypatch.setattr(process_memory, "resident", lambda: BASE)
    monkeypatch.setattr(memory_plan, "TOKENIZING_NBYTES", 0)
    monkeypatch.setattr(gptq, "PACKED", 0)  # more than the rest of such a small model

    def arranged(setup: Setup, samples: int, seq_len: int, limit: int | None) -> Arrangement:
        return memory_plan.arrange(make(setup.load(), skeleton), skeleton, samples, seq_len, limit)

    return arranged


def test_the_fastest_arrangement_that_fits(arrange: Callable[..., Arrangement]) -> None:
    """With ever less memory: the stream goes to disk, batches shrink, statistics are collected in more passes."""
    stream = 10_000 * 256 * 64 * 4
    found = []
    limit = 1 << 40
    try:
        while True:
            found.append(arrange(GPTQ, 10_000, 256, limit))
            assert BASE < found[-1].peak_nbytes <= limit
            limit = found[-1].peak_nbytes - 1
    except BudgetError:
        pass
    assert (found[0].batch, found[0].spill, found[0].passes) == (memory_plan.BATCH_TOKENS // 256, False, 1)
    freed = 20 * MIB  # by a pass over a block, and kept for the next
    assert stream < found[0].peak_nbytes - BASE < stream + 100 * MIB + freed
    first_spilled = next(i for i, arrangement in enumerate(found) if arrangement.spill)
    assert first_spilled > 0 and all(arrangement.spill for arrangement in found[first_spilled:])
    assert found[first_spilled].batch == found[0].batch  # batches shrink only after that
    assert found[0].peak_nbytes - found[first_spilled].peak_nbytes > 0.9 * stream
    assert found[-1].batch == 1 and found[-1].passes > 1
    passes = [arrangement.passes for arrangement in found]
    assert passes == sorted(passes)
    assert found[-1].statistics_nbytes < found[0].statistics_nbytes == 3 * nbytes(64) + nbytes(192)


def test_without_statistics_there_is_nothing_to_arrange(arrange: Callable[..., Arrangement]) -> None:
    arrangement = arrange(RTN, 0, 0, 1 << 40)
    assert (arrangement.batch, arrangement.spill, arrangement.statistics_nbytes) == (1, False, 0)
    with pytest.raises(BudgetError):
        arrange(RTN, 0, 0, arrangement.peak_nbytes - 1)


@pytest.mark.parametrize("setup", [RTN, GPTQ])
@pytest.mark.parametrize("extra", [0, 3, 777, 12_345, 1_000_001])
def test_a_refusal_names_what_would_do(
    setup: Setup, extra: int, arrange: Callable[..., Arrangement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "resident", lambda: BASE + extra)
    samples, seq_len = (8, 32) if setup is GPTQ else (0, 0)
    with pytest.raises(BudgetError) as caught:
        arrange(setup, samples, seq_len, MIB)
    assert "\n" not in str(caught.value) and "more than --max-memory 1.00 MiB" in str(caught.value)
    named = re.search(r"needs at least ([0-9.]+ \w+)", str(caught.value))
    assert named
    enough = parse_size(named[1])
    assert arrange(setup, samples, seq_len, enough).peak_nbytes <= enough
    with pytest.raises(BudgetError):
        arrange(setup, samples, seq_len, enough - MIB)  # and it is no more than that


def test_without_a_limit_most_of_what_is_free_may_be_taken(
    arrange: Callable[..., Arrangement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "available", lambda: 1 << 30)
    arrangement = arrange(GPTQ, 100_000, 256, None)
    assert arrangement.spill and arrangement.peak_nbytes <= BASE + int(0.8 * (1 << 30))
    monkeypatch.setattr(process_memory, "available", lambda: 1000)
    with pytest.raises(BudgetError, match="more than the free memory"):
        arrange(GPTQ, 8, 32, None)


def test_a_tiny_limit_is_refused(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    result = cli(*command(pico_dir("llama"), GPTQ, tmp_path / "out"), "--max-memory", "1MiB")
    assert result.code == 1 and not list(tmp_path.iterdir())
    line = one_line(result)
    assert re.match(
        r"this run needs at least \d+ MiB \(.* of it for the program itself\), more than --max-memory", line
    )


def test_a_limit_is_kept(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    result = cli(*command(pico_dir("llama"), GPTQ, tmp_path / "out"), "--max-memory", "1GiB")
    assert result.code == 0, result.err
    used = report_of(tmp_path / "out")["memory"]
    assert used["measured_peak"] <= used["predicted_peak"] <= used["limit"] == 1 << 30


# ---------------------------------------------------------------- measuring


def test_the_peak_is_measured() -> None:
    before = process_memory.resident()
    with mmap.mmap(-1, 64 * MIB) as big:  # from the system and back to it; the allocator may keep what it is given
        big.write(b"\1" * (64 * MIB))
        during = process_memory.resident()
    assert during - before > 60 * MIB
    assert process_memory.resident() < during - 60 * MIB
    assert process_memory.peak() > during - MIB
    if os.access("/proc/self/clear_refs", os.W_OK):
        process_memory.reset_peak()
        assert process_memory.peak() < during - 60 * MIB
    assert 0 < process_memory.available() < 1 << 50


FRESH_PAGES = """
import resource, torch
from compress import process_memory

process_memory.return_freed_memory()
held = process_memory.resident()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
with process_memory.reusing():
    for _ in range(32):
        torch.zeros(4 << 20, dtype=torch.uint8)
cleared = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
print(cleared >> 20, process_memory.resident() - held >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have their own ways with freed memory")
def test_freed_tensors_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH_PAGES], capture_output=True, text=True, check=True)
    cleared, left = map(int, done.stdout.split())  # MiB
    assert cleared < 64 and left < 4  # of 128, and of 4


def test_a_counter_that_is_not_reset_refuses_nothing(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier peak above the limit counts no more; a later one above it does, and is measured."""
    real_write, real_status, peaks = Path.write_text, process_memory._status, [1 << 40]

    def write_text(path: Path, *args: Any, **kwargs: Any) -> int:
        if str(path) == "/proc/self/clear_refs":
            raise PermissionError
        return real_write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(process_memory, "_former", {"peak": 0})
    monkeypatch.setattr(process_memory, "_status", lambda field: peaks[-1] if field == "VmHWM" else real_status(field))
    report = api.quantize(dataclasses.replace(job(pico_dir("llama"), GPTQ, tmp_path / "out"), max_memory=1 << 39))
    assert report["memory"]["measured_peak"] is None
    assert "peak memory unknown (predicted" in "\n".join(tables.result_lines(report, "out"))
    process_memory.check(1 << 39)
    assert process_memory.peak() <= process_memory.resident() + MIB
    with pytest.raises(BudgetError):
        process_memory.check(MIB)
    peaks.append((1 << 40) + 1)
    assert process_memory.peak() == process_memory.measured_peak() == peaks[-1]
    with pytest.raises(BudgetError):
        process_memory.check(1 << 39)


def test_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "peak", lambda: 3 * MIB)
    process_memory.check(None)
    process_memory.check(3 * MIB)
    with pytest.raises(
        BudgetError, match=r"used 3\.00 MiB, more than --max-memory 2\.00 MiB; blocks that were finished are kept"
    ):
        process_memory.check(2 * MIB)


def test_a_run_stops_at_its_limit_and_goes_on_with_a_larger_one(
    pico_dir: Callable[..., Path],
    arranged: Callable[..., tuple[Path, dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, done = tmp_path / "out", tmp_path / "out.partial" / "blocks" / "00000.json"
    asked = dataclasses.replace(job(pico_dir("llama"), GPTQ, out), max_memory=1 << 40)
    with monkeypatch.context() as patch:
        real = memory_plan.arrange
        patch.setattr(memory_plan, "arrange", lambda *given: dataclasses.replace(real(*given), spill=True, batch=3))
        patch.setattr(process_memory, "peak", lambda: 1 << 41 if done.exists() else 1)
        with pytest.raises(BudgetError, match="blocks that were finished are kept"):
            api.quantize(asked)
    assert not out.exists()
    report = api.quantize(dataclasses.replace(asked, max_memory=1 << 42))
    assert report["resumed_blocks"] == 1 and report["memory"]["limit"] == 1 << 42
    assert report["arrangement"]["spill"] and report["arrangement"]["batch"] == 3  # as it was begun
    expected, _ = arranged("expected", "llama", batch=3)
    assert contents(out) == contents(expected)


# ---------------------------------------------------------------- arrangements that change nothing


@pytest.fixture
def arranged(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """arranged(name, model, **changes): a run with an arrangement forced on it -> its output and report."""
    real = memory_plan.arrange

    def run(name: str, model: str, **changes: Any) -> tuple[Path, dict[str, Any]]:
        with monkeypatch.context() as patch:
            patch.setattr(memory_plan, "arrange", lambda *given: dataclasses.replace(real(*given), **changes))
            report = api.quantize(job(pico_dir(model), GPTQ, tmp_path / name))
        assert {key: report["arrangement"][key] for key in changes} == changes
        return tmp_path / name, report

    return run


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama", {"spill": True}),
        ("llama", {"passes": 4, "statistics_nbytes": 1}),
        ("mixtral", {"spill": True, "passes": 2, "statistics_nbytes": 40_000}),
    ],
    ids=["spilled", "a pass for each input", "both"],
)
def test_an_arrangement_changes_no_byte(
    model: str,
    changes: dict[str, Any],
    arranged: Callable[..., tuple[Path, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, expected = arranged("plain", model, spill=False)
    written: list[int] = []
    passes: list[int] = []
    real_pwrite, real_split = os.pwrite, sizes.split_passes

    def pwrite(descriptor: int, raw: memoryview, offset: int) -> int:
        written.append(len(raw))
        return real_pwrite(descriptor, raw, offset)

    def splitting(keys: dict[str, int], allowed: int) -> list[list[str]]:
        passes.append(len(real_split(keys, allowed)))
        return real_split(keys, allowed)

    monkeypatch.setattr(hidden_states.os, "pwrite", pwrite)
    monkeypatch.setattr(sizes, "split_passes", splitting)
    out, report = arranged("other", model, **changes)
    assert contents(out) == contents(plain)
    assert sum(written) == (2 * 8 * 32 * 64 * 4 if "spill" in changes else 0)  # the embeddings, and after block 0
    assert (max(passes) > 1) == ("passes" in changes)
    errors = [[row["output_error"] for row in r["layers"]] for r in (report, expected)]
    assert errors[0] == errors[1]


def test_the_batch_changes_sums_in_the_last_bits_only(arranged: Callable[..., tuple[Path, dict[str, Any]]]) -> None:
    _, whole = arranged("whole", "llama", batch=8)
    _, parts = arranged("parts", "llama", batch=3)  # 3, 3 and 2 samples
    for row, other in zip(whole["layers"], parts["layers"], strict=True):
        assert row["tokens"] == other["tokens"] == 8 * 32
        assert row["output_error"] == pytest.approx(other["output_error"], rel=0.02)


def test_a_stream_on_disk_needs_space(
    arranged: Callable[..., tuple[Path, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(pipeline, "check_space", lambda directory, nbytes: asked.append(nbytes))
    out, report = arranged("plain", "llama", spill=False)
    arranged("spilled", "llama", spill=True)
    assert asked[1] - asked[0] == 8 * 32 * 64 * 4
    assert asked[0] >= report["nbytes"]["total"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams(dtype: torch.dtype, tmp_path: Path) -> None:
    states = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for file in (None, tmp_path / "stream"):
        stream = HiddenStates(7, file)
        for start in (0, 3, 6):
            stream.write(start, states[start : start + 3])
        assert (file is None) == (stream.tensor is not None)
        assert torch.equal(stream.read(0, 7), states) and stream.read(0, 7).dtype == dtype
        stream.write(2, -states[2:4])
        expected = torch.cat([states[:2], -states[2:4], states[4:]])
        assert torch.equal(stream.read(1, 4), expected[1:5])
        stream.close()
    assert not list(tmp_path.iterdir())


def test_a_stream_of_two_sides(tmp_path: Path) -> None:
    states = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0))
    for file in (None, tmp_path / "stream"):
        stream = HiddenStates(7, file, sides=2)
        stream.write(0, states)
        for start in (0, 4):
            stream.write(start, -states[start : start + 4], FULL)
        stream.write(6, 2 * states[6:], QUANTIZED)
        assert torch.equal(stream.read(0, 7, FULL), -states)
        assert torch.equal(stream.read(0, 7), torch.cat([states[:6], 2 * states[6:]]))
        assert stream.samples == 7
        stream.close()
    assert not list(tmp_path.iterdir())


def test_processes_hold_the_hessians_of_their_own_experts(
    pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = Skeleton(open_checkpoint(pico_dir("mixtral")))
    layers = make(GPTQ.load(), skeleton).layers
    alone = sizes.hessian_nbytes(layers)
    monkeypatch.setattr(ranks, "_joined", [ranks.Ranks(0, 4)])
    shared = sizes.hessian_nbytes(layers)
    experts = {layer.spec.input_key for layer in layers if layer.spec.is_expert}
    assert experts and all(4 * shared[key] == alone[key] for key in experts)
    assert all(shared[key] == alone[key] for key in alone.keys() - experts)
