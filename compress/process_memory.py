"""Measure the memory of this process, and write sizes as people do."""

from __future__ import annotations

import ctypes
import math
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from compress.errors import BudgetError

GIB = 1 << 30
RETURNED = 1 << 20  # bytes; larger blocks go back to the system when freed, smaller ones by `trim`
REUSED = 32 << 20  # the same while freed memory is reused; the most that the C library takes
HELD = 64 << 20  # bytes that are free at the end of the heap and stay for later
_former = {"peak": 0}  # bytes that the system's counter had reached when it could not be reset
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB}
UNITS |= {"K": 1 << 10, "M": 1 << 20, "G": GIB}  # as other programs read them


def parse_size(text: str) -> int:
    """Bytes from "8GiB", "8G" (the same), "1.5 GB" or a plain number; raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS or not math.isfinite(float(match[1])):
        raise ValueError(f"{text!r} is not a size such as 8GiB or 1.5GB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def show(nbytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def resident() -> int:
    """Memory of this process that is resident now, in bytes."""
    return _status("VmRSS") or _highest()


def peak() -> int:
    """Largest resident memory of this process since `reset_peak` that is known, in bytes.

    Where the system did not reset its counter and this is still at the former peak, it is what is resident now.
    """
    found = measured_peak()
    return _status("VmRSS") if found is None else found


def measured_peak() -> int | None:
    """The largest resident memory since `reset_peak` in bytes; None where the system has only an earlier one."""
    highest = _highest()
    return highest if highest > _former["peak"] else None


def reset_peak() -> None:
    """Start a new measurement of `peak`; where the kernel refuses, the peak so far is no longer taken for one."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        _former["peak"] = _highest()
    else:
        _former["peak"] = 0


def _highest() -> int:
    """The largest resident memory that the system has counted, in bytes."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Room(NamedTuple):
    """Memory that this process can still take."""

    nbytes: int
    what: str  # that has no more, in words


def available() -> int:
    """Memory that the system and the limits of this process can still give, in bytes."""
    return room().nbytes


def room(proc: Path = Path("/proc"), mounts: Path = Path("/")) -> Room:
    """Return the least of what the system, the control groups of this process and its resource limits can still give.

    proc: the folder of process information; mounts: the root under which its mount points lie.
    """
    free = _proc(proc / "meminfo", "MemAvailable") or 1 << 40
    rooms = [Room(free, "the free memory"), *_group_rooms(proc / "self", mounts), *_limit_rooms(proc / "self")]
    return min(rooms, key=lambda each: each.nbytes)


# type of a file system of control groups -> files with the limit and what is used, and what of that can be given back
_GROUP_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _group_rooms(process: Path, mounts: Path) -> Iterator[Room]:
    """Yield what each control group that this process is in can still give: its own, and those around it."""
    for kind, folder, top in _groups(process, mounts):
        limit_file, used_file, cache_field = _GROUP_FILES[kind]
        for group in (folder, *folder.parents):
            limit, used = _number(group / limit_file), _number(group / used_file)
            if limit is not None and used is not None:
                cache = re.search(rf"^{cache_field} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
                nbytes = max(0, limit - used + (int(cache[1]) if cache else 0))
                yield Room(nbytes, "what the memory limit of its control group leaves")
            if group == top:
                break


def _groups(process: Path, mounts: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield the type of each hierarchy that counts memory, the folder of this process in it, and the topmost one."""
    paths = {}
    for line in _text(process / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in _text(process / "mountinfo").splitlines():
        mount, _, file_system = line.partition(" - ")
        fields, types = mount.split(), file_system.split()
        kind = types[0] if types else ""
        is_counting = kind == "cgroup2" or (kind == "cgroup" and "memory" in types[-1].split(","))
        if is_counting and kind in paths and len(fields) > 4:
            root, top = (_unescaped(field) for field in fields[3:5])
            top_folder = mounts / top.lstrip("/")
            inner = PurePosixPath(paths[kind])
            is_inside = inner.is_relative_to(root) and ".." not in inner.parts  # else it is another container's view
            yield kind, top_folder / inner.relative_to(root) if is_inside else top_folder, top_folder


def _limit_rooms(process: Path) -> Iterator[Room]:
    """Yield what the resource limits of this process leave: of its addresses, and of its data."""
    for limit, field, option in ((resource.RLIMIT_AS, "VmSize", "-v"), (resource.RLIMIT_DATA, "VmData", "-d")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            yield Room(max(0, most - _proc(process / "status", field)), f"what `ulimit {option}` leaves")


def _unescaped(field: str) -> str:
    """Return a path of a table of mounts, in which spaces and other separators are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _number(path: Path) -> int | None:
    """Return the number in a file; None where there is no such file, or a word such as "max"."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """Return the text of a file of the system, "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def return_freed_memory() -> None:
    """Make the C library hand freed tensors back to the system instead of keeping them for later."""
    _return_from(RETURNED)


@contextmanager
def reusing() -> Iterator[None]:
    """Keep freed tensors for those that follow, and hand them back at the end.

    A page that the system gives anew is cleared first. For passes that make and free the same tensors again and again,
    and would take a quarter longer with fresh ones.
    """
    _return_from(REUSED)
    try:
        yield
    finally:
        _return_from(RETURNED)
        trim()


def _return_from(nbytes: int) -> None:
    """Make the C library hand blocks of at least so many bytes back to the system when they are freed."""
    try:
        library = ctypes.CDLL(None)
        library.mallopt(-3, nbytes)  # M_MMAP_THRESHOLD
        library.mallopt(-1, HELD if nbytes == RETURNED else 1 << 30)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        return


def trim() -> None:
    """Hand memory that was freed in small pieces back to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def check(limit: int | None, ahead: int = 0) -> None:
    """Raise BudgetError if the peak so far is over the limit, or what is resident and `ahead` more bytes would be."""
    if limit is None:
        return
    again = "blocks that were finished are kept: run the same command with a larger limit"
    if (used := peak()) > limit:
        raise BudgetError(f"the run used {show(used)}, more than --max-memory {show(limit)}; {again}")
    if ahead and (held := resident()) + ahead > limit:
        raise BudgetError(
            f"the run holds {show(held)} and its next block takes up to {show(ahead)}, together more than --max-memory "
            f"{show(limit)}; {again}"
        )


def _status(field: str) -> int:
    return _proc(Path("/proc/self/status"), field)


def _proc(path: Path, field: str) -> int:
    """A "Field:   123 kB" line of a proc file in bytes; 0 where there is none."""
    found = re.search(rf"^{field}:\s+(\d+) kB", _text(path), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
