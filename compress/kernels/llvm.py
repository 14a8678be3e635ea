"""Compile functions for this CPU at run time, by LLVM through llvmlite: no compiler on the machine is needed.

An `Emitter` writes a function in LLVM's language, `compiled` turns it into machine code for the CPU at hand within a
second or two, and the function is called through ctypes, which lets go of the interpreter lock, so that `parallel` runs
it on as many threads as torch uses. Vectors of a width that the CPU does not have are split by LLVM. Where
llvmlite is missing or knows no target for this machine, `available` says so, and callers keep to torch. Machine code is
kept on disk: a later process writes functions anew, but compiles only those that are new.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import logging
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch

OPTIMIZED = {"opt": 3}  # of the machine code
PASSES = {"speed_level": 2}  # before that

_log = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Return whether code can be compiled here."""
    try:
        _machine()
    except (ImportError, OSError, RuntimeError) as error:
        _log.info("no compiled functions on this machine: %s", error)
        return False
    # without it float16 would be converted by a library function that compiled code does not find
    return platform.machine().lower() not in ("x86_64", "amd64") or "f16c" in features()


@cache
def features() -> frozenset[str]:
    """Return the names of the instruction sets of this CPU, as LLVM has them: "avx512vnni", "neon"."""
    from llvmlite import binding

    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


@cache
def processor_name() -> str:
    """Return LLVM's name of this CPU: "emeraldrapids", "znver4"."""
    from llvmlite import binding

    return str(binding.get_host_cpu_name())


@cache
def llvm_version() -> tuple[int, ...]:
    from llvmlite import binding

    return tuple(binding.llvm_version_info)


def _machine() -> Any:
    """Return what LLVM compiles for; one for each module, because an engine takes its own."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, flags = _processor()
    return binding.Target.from_default_triple().create_target_machine(cpu=cpu, features=flags, **OPTIMIZED)


@cache
def _processor() -> tuple[str, str]:
    """Return the name and flags of this CPU, as LLVM has them."""
    from llvmlite import binding

    flags = binding.get_host_cpu_features().flatten()
    if "avx512f" in features():
        flags += ",-prefer-256-bit"
    return processor_name(), flags


class Signature(NamedTuple):
    """A C function that returns nothing: what its arguments are called, addresses before 64-bit integers.

    This is the one place that knows an argument list. The function is written from it and called through ctypes by it;
    values that have names are put in its order by `arguments` and `around`.
    """

    name: str
    pointers: tuple[str, ...]
    integers: tuple[str, ...]

    @property
    def ctypes(self) -> list[Any]:
        """Return the types of the arguments as ctypes has them."""
        return [ctypes.c_void_p] * len(self.pointers) + [ctypes.c_int64] * len(self.integers)

    def arguments(self, *tensors: torch.Tensor, **values: int) -> tuple[int, ...]:
        """Return values of the named arguments in their order; the first tensors are the first pointers.

        TypeError if one is missing or unknown.
        """
        values |= {name: each.data_ptr() for name, each in zip(self.pointers, tensors, strict=False)}
        names = (*self.pointers, *self.integers)
        if values.keys() != set(names):
            wrong = ", ".join(sorted(values.keys() ^ set(names)))
            raise TypeError(f"{self}: missing or unknown: {wrong}")
        return tuple(values[name] for name in names)

    def around(self, passed: Sequence[str], values: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the values of the arguments before and behind those that a caller passes itself, in this order.

        TypeError if the arguments `passed` are not neighbours in this order, or a value is missing.
        """
        names = (*self.pointers, *self.integers)
        at = names.index(passed[0]) if passed[0] in names else 0
        before, behind = names[:at], names[at + len(passed) :]
        if names[at : at + len(passed)] != tuple(passed):
            raise TypeError(f"{self} does not take {', '.join(passed)} one after the other")
        if missing := [name for name in (*before, *behind) if name not in values]:
            raise TypeError(f"{self}: missing: {', '.join(missing)}")
        return tuple(values[name] for name in before), tuple(values[name] for name in behind)

    def __str__(self) -> str:
        return f"void {self.name}({', '.join((*self.pointers, *self.integers))})"


class Function(Protocol):
    """Machine code that is called with addresses and then integers, as its signature lists them."""

    signature: Signature

    def __call__(self, *arguments: int) -> None: ...


@cache
def function(kind: Callable[..., Any], *settings: Any) -> Function:
    """Return the function that kind(*settings) writes, compiled once for a process."""
    with without_collections():
        return compiled(kind(*settings))


@contextmanager
def without_collections() -> Iterator[None]:
    """While active, let Python not look for unreachable objects among all that torch and transformers have made.

    What is written makes so many objects that it would, several times, and take longer than the writing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compiled(emitter: Any) -> Function:
    """Return what an emitter wrote as a function."""
    source = str(emitter.module)
    return link(emitter.signature, key(source), lambda: source)


def link(signature: Signature, key: bytes, write: Callable[[], str]) -> Function:
    """Return a function from its object code on disk, or compiled from what `write` returns in LLVM's language."""
    from llvmlite import binding

    stored, machine = load_object(key), _machine()
    module = binding.parse_assembly(write() if stored is None else "")
    if stored is None:
        _optimize(module, machine, signature.name)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.set_object_cache(lambda _, code: store_object(key, code), lambda _: stored)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *signature.ctypes)(engine.get_function_address(signature.name))
    function.engine = engine  # type: ignore[attr-defined]  # which must live as long as the function
    function.signature = signature  # type: ignore[attr-defined]
    return cast(Function, function)


def assembly(emitter: Any) -> str:
    """Return what an emitter wrote in the language of this CPU, to be read (docs/kernel_tutorial.md)."""
    from llvmlite import binding

    machine, module = _machine(), binding.parse_assembly(str(emitter.module))
    _optimize(module, machine, emitter.signature.name)
    return str(machine.emit_assembly(module))


def key(source: str) -> bytes:
    """Return the key of all that machine code depends on."""
    import llvmlite
    from llvmlite import binding

    versions = (".".join(map(str, llvm_version())), llvmlite.__version__)
    return object_key((source, *versions, binding.get_default_triple(), *_processor(), f"{OPTIMIZED} {PASSES}"))


def _optimize(module: Any, machine: Any, name: str) -> None:
    """Run LLVM's passes on a module of which one function is called from outside."""
    from llvmlite import binding

    module.verify()
    for function in module.functions:
        if function.name != name and not function.is_declaration:
            function.linkage = "internal"
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(**PASSES))
    builder.getModulePassManager().run(module, builder)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="compress")


if hasattr(os, "register_at_fork"):  # threads do not live on in a child
    os.register_at_fork(after_in_child=_pool.cache_clear)


def parallel(work: Callable[[int, int], None], total: int, least: int = 1) -> None:
    """Run work(first, last) for ranges of `least` or more that cover range(total), on the threads of torch."""
    threads = min(torch.get_num_threads(), total // max(1, least))
    if threads <= 1:
        work(0, total)
        return
    bounds = [total * i // threads for i in range(threads + 1)]
    others = [_pool(threads).submit(work, *pair) for pair in zip(bounds[1:], bounds[2:], strict=False)]
    try:
        work(*bounds[:2])
    finally:
        wait(others)  # whatever happens: they write to memory that the caller frees
    for other in others:
        other.result()


# Object code on disk, so that a process does not compile what another one has compiled. A file has the name of its key,
# which is a hash of all that the code depends on, and holds a mark, the key, the hash of the object code and the object
# code. Anything else is as good as no file: cut off, damaged, put under another name. Object code is run: a folder or a
# file that belongs to another user, or that others may write, is not read.

MARK = b"compress object code 1\n"
LIMIT = 256 << 20  # bytes of all files
SUFFIX = ".object"
HASH = 32  # bytes
OTHERS = stat.S_IWGRP | stat.S_IWOTH
# How a file is opened: a link is not followed, and a pipe does not block; 0 where a system has no such flag.
UNFOLLOWED = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def object_key(parts: Iterable[str]) -> bytes:
    """Return the hash of these texts, which are told apart: no two lists of texts have the same key."""
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def load_object(key: bytes) -> bytes | None:
    """Return the object code that was stored under a key; None if there is none that can be trusted."""
    try:
        folder = _folder()
        if folder is None or not _is_ours(os.stat(folder)):
            return None
        path = folder / (key.hex() + SUFFIX)
        with open(os.open(path, os.O_RDONLY | UNFOLLOWED), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                return None
            content = file.read()
    except OSError:
        return None
    head, code = content[: len(MARK) + 2 * HASH], content[len(MARK) + 2 * HASH :]
    if head != MARK + key + hashlib.sha256(code).digest():
        return None
    with suppress(OSError):  # the folder may be read-only
        os.utime(path)  # the oldest go first
    return code


def store_object(key: bytes, code: bytes, over: bool = True) -> None:
    """Keep object code under a key, in place of a file that is there if `over`; nothing happens where it cannot be."""
    with suppress(OSError):
        folder = _folder()
        if folder is None:
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(os.stat(folder)):
            return
        _write(folder / (key.hex() + SUFFIX), MARK + key + hashlib.sha256(code).digest() + code, over)
        _shrink(folder)


def _folder() -> Path | None:
    """Return where object code is kept; None for a user without a home."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "")
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():  # other values are to be ignored, says the standard
        return Path(base) / "compress" / "kernels"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "compress" / "kernels"


def _is_ours(status: os.stat_result) -> bool:
    """Return whether this user owns a file or folder and nobody else may write it; yes where rights are unknown."""
    return not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & OTHERS)


def _write(path: Path, content: bytes, over: bool) -> None:
    """Write a file that is there as a whole or not at all, in place of another if `over`."""
    handle, name = tempfile.mkstemp(dir=path.parent)  # which nobody else can read or write
    try:
        with open(handle, "wb") as file:
            file.write(content)
        if over:
            os.replace(name, path)
        else:
            os.link(name, path)  # of several processes one comes first
    finally:
        with suppress(OSError):  # unless it has become the file
            os.unlink(name)


def _shrink(folder: Path) -> None:
    """Delete the files that were used the longest time ago until the rest is within the limit."""
    files = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # another process may delete it
            status = entry.stat(follow_symlinks=False)
            files.append((status.st_mtime_ns, entry.path, status.st_size))
    total = sum(size for _, _, size in files)
    for _, path, size in sorted(files):
        if total <= LIMIT:
            return
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
