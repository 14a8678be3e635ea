"""Runs in several processes: the bytes of one process, and an end for all when one of them ends."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import in_processes
import pytest

from compress import evaluate, ranks
from compress.__main__ import main as compress_main
from compress.cli import interruption
from compress.errors import NumericalError, OutputError, ProcessLostError
from compress.model.skeleton import Skeleton
from compress.quant import feedback, gptq
from compress.ranks import connected
from compress.run import memory_plan, plan
from compress.run.loop import DividedBlock
from compress.storage.checkpoint import open_checkpoint
from helpers import forked
from helpers.pico import save_pico
from helpers.runs import TEXT, cli, contents

TESTS = Path(__file__).parents[1]
MODELS = ("llama", "mixtral")
NAMES = ["gptq", "paired", "experts", "mixed"]
OTHERS = ["static", "lowrank", "rotated", "plain", "nested", "tuned"]
LIMIT = 600  # seconds


@pytest.fixture(autouse=True)
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore afterwards what `in_processes` sets."""
    monkeypatch.setattr(feedback, "ROWS_PER_TILE", feedback.ROWS_PER_TILE)
    monkeypatch.setattr(memory_plan, "BATCH_TOKENS", memory_plan.BATCH_TOKENS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save_pico(name, folder / name, changes={"intermediate_size": 160} if name == "llama" else None)
    return folder


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A folder of its own with the models."""
    for name in MODELS:
        (tmp_path / name).symlink_to(models / name)
    return tmp_path


def same(folder: Path, processes: int, names: list[str]) -> None:
    for name in names:
        files = contents(folder / str(processes) / name)
        assert "model.safetensors.index.json" in files
        assert files == contents(folder / "1" / name), name


@pytest.mark.parametrize(
    "processes", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_any_number_of_processes_writes_the_same_bytes(folder: Path, processes: int) -> None:
    names = NAMES if processes == 2 else [*NAMES, *OTHERS]
    in_processes.main(folder, names)
    assert forked.together(processes, partial(in_processes.main, folder, names)) == [0] * processes
    same(folder, processes, names)


@pytest.mark.slow
def test_two_machines_that_torchrun_connects(folder: Path) -> None:
    """Each with a launcher of its own."""
    in_processes.main(folder, NAMES)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        place = ["--master_addr", "127.0.0.1", "--master_port", str(found.getsockname()[1])]
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *place]
    nodes = [
        subprocess.Popen(
            [*words, "--node_rank", str(node), in_processes.__file__, str(folder), *NAMES],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        for node in range(2)
    ]
    assert [node.wait(LIMIT) for node in nodes] == [0, 0]
    same(folder, 2, NAMES)


def words(folder: Path) -> list[str]:
    """A command line that several processes share."""
    return ["quantize", str(folder / "llama"), "--recipe", "int3", "--calib", str(TEXT), "--out", str(folder / "out")]


def test_the_main_process_speaks_for_all(folder: Path) -> None:
    """What torchrun starts, without torchrun and its fresh interpreters."""

    def work() -> None:
        name = os.environ["RANK"]
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{stream}{name}", os.O_RDWR | os.O_CREAT), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = ["compress", *words(folder)]
        with pytest.raises(SystemExit) as end:
            compress_main()
        assert not end.value.code

    assert forked.together(2, work) == [0, 0]
    out, err = ("".join((folder / f"{stream}{rank}").read_text() for rank in range(2)) for stream in ("out", "err"))
    assert out.count("self-check passed") == 1 and err.count("predicted peak memory") == 1
    assert cli("verify", str(folder / "out")).code == 0


@pytest.mark.slow
def test_torchrun_starts_the_command_line(folder: Path) -> None:
    """The main process speaks for all."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "compress"]
    done = subprocess.run([*command, *words(folder)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("self-check passed") == 1 and done.stderr.count("predicted peak memory") == 1
    assert cli("verify", str(folder / "out")).code == 0


def killed(work: Callable[[], object], is_due: Callable[[], bool], victim: int, then: int = 0) -> list[int]:
    """Run two processes, kill one of them when it is due, unless it has ended; return the exit codes.

    then: the signal that the other gets; 0: none.
    """
    with forked.store() as place:
        pids = [forked.start(place, rank, 2, work) for rank in range(2)]
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while not is_due() and os.waitid(os.P_PID, pids[victim], peek) is None:
            time.sleep(0.002)
        os.kill(pids[victim], signal.SIGKILL)
        dead = time.monotonic()
        if then:
            time.sleep(1)  # the other waits for the dead one by now: without the signal it would wait for SILENCE
            os.kill(pids[1 - victim], then)
        codes = [forked.code(pid) for pid in pids]
        assert time.monotonic() - dead < LIMIT
        return codes


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_process_ends_the_other_and_one_process_goes_on(
    folder: Path, victim: int, capfd: pytest.CaptureFixture[str]
) -> None:
    in_processes.main(folder, ["gptq"])
    out = folder / "2" / "gptq.partial"
    first = out / "blocks" / "00000.json"
    codes = killed(partial(in_processes.main, folder, ["gptq"]), first.exists, victim)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1
    assert "another process has ended" in capfd.readouterr().err
    assert first.exists() and not (folder / "2" / "gptq").exists()
    (folder / "1").rename(folder / "expected")
    (folder / "2").rename(folder / "1")
    in_processes.main(folder, ["gptq"])
    assert contents(folder / "1" / "gptq") == contents(folder / "expected" / "gptq")


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_process_is_named_where_torchrun_ends_the_other(
    folder: Path, victim: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By SIGTERM, which finds it in a collective operation or on its way out of one."""
    monkeypatch.setattr(connected, "BEAT", 0.5)
    monkeypatch.setattr(connected, "SILENCE", 4.0)

    def work() -> None:
        interruption.install()
        in_processes.main(folder, ["gptq"])

    first = folder / "2" / "gptq.partial" / "blocks" / "00000.json"
    codes = killed(work, first.exists, victim, signal.SIGTERM)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] != 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("compress: ")]
    assert [f"process {victim} gives no sign of life" in line or "has ended" in line for line in lines] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_of_torchrun_is_announced(folder: Path, victim: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "compress"]
    many = ["--set", "calibration.num_samples=512", "--set", "calibration.seq_len=64"]
    run = subprocess.Popen([*command, *words(folder), *many], stderr=subprocess.PIPE, text=True)
    while not (folder / "out.partial" / "blocks" / "00000.json").exists():
        assert run.poll() is None
        time.sleep(0.01)
    os.kill(next(pid for pid in descendants(run.pid) if rank_of(pid) == victim), signal.SIGKILL)
    dead = time.monotonic()
    err = run.communicate(timeout=LIMIT)[1]
    lines = [line for line in err.splitlines() if line.startswith("compress: ")]
    assert time.monotonic() - dead < 60
    assert any("gives no sign of life" in line or "has ended" in line for line in lines), err


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have started."""
    listed = [(each / "children").read_text().split() for each in Path(f"/proc/{pid}/task").iterdir()]
    children = [int(word) for each in listed for word in each]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def rank_of(pid: int) -> int:
    """Return the number that torchrun has given a process, -1 for another."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), -1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paired", "mixed"])
def test_processes_killed_at_any_time(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sign of life included; a process that never gave one is waited for longer than here."""
    monkeypatch.setattr(connected, "STARTING", connected.PATIENCE)
    in_processes.main(folder, [name])
    work = partial(in_processes.main, folder, [name])
    begun = time.monotonic()
    assert forked.together(2, work) == [0, 0]
    whole, draw = time.monotonic() - begun, random.Random(0)
    for _ in range(20):
        shutil.rmtree(folder / "2")
        due = time.monotonic() + draw.uniform(0, whole)
        codes = killed(work, lambda due=due: time.monotonic() > due, draw.randrange(2))
        if codes != [0, 0] and not (folder / "2" / name).exists():
            assert forked.together(2, work) == [0, 0]
        same(folder, 2, [name])


@pytest.mark.slow
def test_a_process_that_stands_still_ends_the_other(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As one does on a machine that has lost its network."""
    first = folder / "2" / "gptq.partial" / "blocks" / "00000.json"
    with forked.store() as place:
        pids = [forked.start(place, rank, 2, partial(in_processes.main, folder, ["gptq"])) for rank in range(2)]
        while not first.exists():
            time.sleep(0.002)
        os.kill(pids[1], signal.SIGSTOP)
        stopped = time.monotonic()
        assert forked.code(pids[0]) == 1 and time.monotonic() - stopped < LIMIT
        os.kill(pids[1], signal.SIGKILL)
        forked.code(pids[1])
    assert "process 1 gives no sign of life" in capfd.readouterr().err


def test_an_error_of_one_process_ends_all_with_its_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = gptq.quantize_rows

    def failing(rounding: Any, rows: slice) -> object:
        if ranks.current().rank == 1:
            raise NumericalError("its own bad luck")
        return real(rounding, rows)

    monkeypatch.setattr(gptq, "quantize_rows", failing)

    def work() -> None:
        with pytest.raises(NumericalError if ranks.given()[0] else ProcessLostError, match="its own bad luck"):
            in_processes.main(folder, ["gptq"])

    assert forked.together(2, work) == [0, 0]
    assert "process 1: " in capfd.readouterr().err
    assert not (folder / "2" / "gptq").exists()


def test_an_error_of_all_is_said_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "2" / "gptq").mkdir(parents=True)
    (folder / "2" / "gptq" / "mine").touch()

    def work() -> None:
        with pytest.raises(ProcessLostError if ranks.given()[0] else OutputError, match="exists already"):
            in_processes.main(folder, ["gptq"])

    assert forked.together(2, work) == [0, 0]
    assert "process" not in capfd.readouterr().err


def test_scores_do_not_depend_on_the_processes(folder: Path) -> None:
    def work(out: Path) -> None:
        scores = evaluate.evaluate(folder / "llama", TEXT, seq_len=64, execution=evaluate.Execution(batch=3))
        if ranks.given()[0] == 0:
            out.write_text(repr(scores))

    work(folder / "one")
    assert forked.together(2, partial(work, folder / "two")) == [0, 0]
    assert (folder / "one").read_text() == (folder / "two").read_text() != ""


def test_a_command_that_is_not_shared_is_refused(folder: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    result = cli("verify", str(folder / "llama"), prepare=f"import os; os.environ.update({environment})")
    assert result.code == 2 and "verify runs in one process; start it without torchrun" in result.err


def test_work_is_dealt_evenly_and_completely() -> None:
    three = [ranks.Ranks(rank, 3) for rank in range(3)]
    for count in range(10):
        assert [i for part in three[0].parts(count) for i in range(count)[part]] == list(range(count))
        assert count == 0 or range(count)[three[0].part(count)][0] == 0


def test_work_is_divided_evenly_and_completely() -> None:
    three = [ranks.Ranks(rank, 3) for rank in range(3)]
    costs = {name: float(cost) for name, cost in zip("abcdefg", (20, 5, 4, 3, 3, 2, 1), strict=True)}
    for pieces, most in ((dict.fromkeys(costs, 1), 20), (dict.fromkeys(costs, 1) | {"a": 20}, 13)):
        dealt = three[1].divide(costs, pieces)
        loads = [0.0] * 3
        for name, portions in dealt.items():
            assert [i for portion in portions for i in portion.pieces] == list(range(pieces[name]))
            assert len({portion.rank for portion in portions}) == len(portions)
            for portion in portions:
                loads[portion.rank] += len(portion.pieces) * costs[name] / pieces[name]
        assert dealt == three[2].divide(costs, pieces) and max(loads) <= most


def test_one_task_is_divided_among_all() -> None:
    assert ranks.Ranks(0, 4).divide({"a": 8.0}, {"a": 8}) == {"a": [(k, range(2 * k, 2 * k + 2)) for k in range(4)]}
    assert ranks.Ranks(0, 3).divide({"a": 1.0}, {"a": 2}) == {"a": [(0, range(1)), (1, range(1, 2))]}
    assert ranks.Ranks().divide({"a": 0.0, "b": 1.0}, {"a": 2, "b": 3}) == {"a": [(0, range(2))], "b": [(0, range(3))]}


@pytest.mark.parametrize("name", ["gptq", "paired", "mixed"])
def test_linears_of_these_runs_are_divided(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes share one, so that comparing bytes says something of its tiles."""
    monkeypatch.setattr(feedback, "ROWS_PER_TILE", in_processes.ROWS)
    model, setup = in_processes.SETUPS[name]
    loaded = dataclasses.replace(setup.load(), allocate=None)
    layers = plan.make(loaded, Skeleton(open_checkpoint(folder / model))).layers
    block = DividedBlock(ranks.Ranks(0, 2), [layer for layer in layers if layer.spec.block == 0], seed=0)
    assert [len(portions) for portions in block.portions.values()].count(2) == 1
