"""What limits the memory of a process: control groups of both versions, resource limits; and what happens beyond."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from compress import process_memory
from compress.cli.options import errors
from compress.errors import CheckpointError, out_of_memory
from compress.process_memory import Room, room

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
CPU = "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


class System:
    """A folder that stands for /proc and the mounted control groups of a machine with 64 GiB free."""

    def __init__(self, root: Path, cgroup: str, mounts: str) -> None:
        self.root, self.proc = root, root / "proc"
        self.write("proc/meminfo", "MemTotal:  99999999 kB\nMemAvailable:   67108864 kB\n")
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def v2(self, group: str, limit: str, used: int, cache: int = 0) -> None:
        folder = f"sys/fs/cgroup/{group}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\nactive_file 7\ninactive_file {cache}\n")

    def v1(self, group: str, limit: int, used: int, cache: int = 0, top: str = "sys/fs/cgroup/memory") -> None:
        self.write(f"{top}/{group}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{top}/{group}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{top}/{group}/memory.stat", f"inactive_file 3\ntotal_inactive_file {cache}\n")

    def room(self) -> int:
        return room(self.proc, self.root).nbytes


def test_without_limits_it_is_what_the_system_has_free(tmp_path: Path) -> None:
    system = System(tmp_path, "0::/user.slice\n", V2)
    system.v2("user.slice", "max", 5 * MIB)
    assert room(system.proc, tmp_path) == Room(64 << 30, "the free memory")


@pytest.mark.parametrize("group", ["", "system.slice", "system.slice/job_7", "system.slice/job_7/step_0"])
def test_the_least_limit_of_a_slice_and_those_around_it_holds(group: str, tmp_path: Path) -> None:
    system = System(tmp_path, "0::/system.slice/job_7/step_0\n", V2)
    for each in ("", "system.slice", "system.slice/job_7", "system.slice/job_7/step_0"):
        system.v2(each, str(300 * MIB) if each == group else "max", 100 * MIB, cache=30 * MIB)
    system.v2("system.slice/job_7/step_0/other", str(MIB), 0)
    assert room(system.proc, tmp_path) == Room(230 * MIB, "what the memory limit of its control group leaves")


def test_a_full_group_has_no_room(tmp_path: Path) -> None:
    system = System(tmp_path, "0::/a\n", V2)
    system.v2("a", str(MIB), 2 * MIB)
    assert system.room() == 0


def test_the_first_version_is_read_where_its_controller_is_mounted(tmp_path: Path) -> None:
    lines = "5:cpu:/other\n4:hugetlb,memory:/slurm/uid_1/job_2\n1:name=systemd:/x\n0::/\n"
    system = System(tmp_path, lines, CPU + V1.replace(" rw,memory", " rw,hugetlb,memory"))
    system.v1("slurm/uid_1/job_2", 9223372036854771712, 0)
    system.v1("slurm/uid_1", 300 * MIB, 60 * MIB, cache=10 * MIB)
    system.v1("slurm", 400 * MIB, 60 * MIB)
    assert system.room() == 250 * MIB


def test_a_container_sees_its_own_group_as_the_mounted_one(tmp_path: Path) -> None:
    """The path is that of the host; only the group itself is mounted, at a path with a space."""
    mount = V1.replace(" / /sys/fs/cgroup/memory", r" /docker/abc /mnt/a\040b")
    system = System(tmp_path, "4:memory:/docker/abc\n", mount)
    system.v1("", 300 * MIB, 0, top="mnt/a b")
    assert system.room() == 300 * MIB


@pytest.mark.parametrize("path", ["/../elsewhere", "/docker/other", "/"])
def test_a_path_that_the_mount_does_not_show_is_its_root(path: str, tmp_path: Path) -> None:
    system = System(tmp_path, f"0::{path}\n", V2.replace(" / /sys", " /docker/abc /sys"))
    system.v2("", str(300 * MIB), 0)
    system.v2("../elsewhere", str(MIB), 0)
    assert system.room() == 300 * MIB


@pytest.mark.parametrize(
    ("cgroup", "mounts"), [("", ""), ("0::/a\n", ""), ("nonsense\n0:\n", "nonsense - \n - cgroup2\n")]
)
def test_systems_without_groups(cgroup: str, mounts: str, tmp_path: Path) -> None:
    assert System(tmp_path, cgroup, mounts).room() == 64 << 30


@pytest.mark.parametrize(("name", "field", "option"), [("RLIMIT_AS", "VmSize", "-v"), ("RLIMIT_DATA", "VmData", "-d")])
def test_limits_of_the_process(
    name: str, field: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(tmp_path, "", "")
    system.write("proc/self/status", f"VmPeak: 9 kB\n{field}:   102400 kB\n")
    number, infinite = getattr(resource, name), (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (300 * MIB, -1) if asked == number else infinite)
    assert room(system.proc, tmp_path) == Room(200 * MIB, f"what `ulimit {option}` leaves")


def test_what_this_machine_says_is_read() -> None:
    assert 0 < process_memory.available() < 1 << 50


def limited(kib: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'ulimit -v {kib}; exec "$@"', "-", sys.executable, "-m", "compress", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("kib", [400_000, 1_200_000])
def test_too_little_for_the_libraries_is_one_line(kib: int, tmp_path: Path) -> None:
    """Whatever runs out, from an import to a tensor."""
    done = limited(kib, "quantize", "tests/models/books-8m", "--recipe", "int8", "--out", str(tmp_path / "out"))
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr.startswith("compress: ") and done.stderr.count("\n") == 1
    assert "out of memory" in done.stderr or "leaves" in done.stderr


def test_a_limit_of_the_process_is_planned_with(tmp_path: Path) -> None:
    """The run is refused before it begins, with what it would need."""
    words = ("quantize", "tests/models/books-8m", "--recipe", "int4", "--calib", "tests/data/books_calib.txt")
    for kib in (1_400_000, 1_600_000, 1_800_000):  # libraries reserve more addresses on some machines than on others
        done = limited(kib, *words, "--out", str(tmp_path / "out"))
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        if "needs at least" in done.stderr:
            break
    assert "more than what `ulimit -v` leaves" in done.stderr


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(ALLOCATOR),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_it_is_one_line_that_says_what_to_do(
    error: Exception, is_wrapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, errors():
        try:
            raise error
        except Exception as met:
            if is_wrapped:
                raise CheckpointError("transformers cannot load it") from met
            raise
    line = capsys.readouterr().err
    assert caught.value.exit_code == 1 and line.count("\n") == 1
    assert line.startswith("compress: out of memory (") and "--max-memory, a smaller batch" in line


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ImportError("no module"), OSError(2, "no file")])
def test_other_errors_are_none_of_these(error: Exception) -> None:
    assert out_of_memory(error) is None
