"""Compile functions for this CPU at run time, by LLVM through llvmlite: no compiler on the machine is needed.

An `Emitter` writes a function in LLVM's language, `compiled` turns it into machine code for the CPU at hand within a
second or two, and the function is called through ctypes, which lets go of the interpreter lock, so that `parallel` runs
it on as many threads as torch uses. Vectors of a width that the CPU does not have are split by LLVM. Where
llvmlite is missing or knows no target for this machine, `available` says so, and callers keep to torch. Machine code is
kept on disk (compress/kernels/object_cache.py): a later process writes functions anew, but compiles only those that are
new.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import torch

from compress.kernels import object_cache

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

    This is the one place that knows an argument list: the function is written from it, called through ctypes by it, and
    `arguments` puts values in its order.
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

    def __str__(self) -> str:
        return f"void {self.name}({', '.join((*self.pointers, *self.integers))})"


class Emitter:
    """Writes one function: llvmlite's builder with what kernels need over and over.

    Offsets count elements of the type that is loaded or stored. Nothing is assumed about alignment but that of an
    element: tensors are views of files.
    """

    def __init__(self, name: str, pointers: str | int, integers: str | int) -> None:
        """Begin void name(pointers, 64-bit integers): their names, or how many; no pointer aliases another."""
        from llvmlite import ir

        self.ir, self.pointer = ir, ir.PointerType()
        self.byte, self.short, self.word, self.index = (ir.IntType(bits) for bits in (8, 16, 32, 64))
        self.half, self.float, self.bfloat = ir.HalfType(), ir.FloatType(), _bfloat()
        self.signature = Signature(name, _names("pointer", pointers), _names("integer", integers))
        count = len(self.signature.pointers)
        kind = ir.FunctionType(ir.VoidType(), [self.pointer] * count + [self.index] * len(self.signature.integers))
        self.module = ir.Module(context=ir.Context())  # a context of its own: types of the shared one would pile up
        function = ir.Function(self.module, kind, name)
        for argument in function.args[:count]:
            argument.add_attribute("noalias")
        self.pointers, self.integers = function.args[:count], function.args[count:]
        self.b = ir.IRBuilder(function.append_basic_block())
        self._entry = self.b.block

    def i64(self, value: int) -> Any:
        return self.index(value)

    def vector(self, kind: Any, lanes: int) -> Any:
        return self.ir.VectorType(kind, lanes)

    def variable(self, kind: Any) -> Any:
        """Take memory for one value of the function, which LLVM turns into a register; made in the first block."""
        with self.b.goto_block(self._entry):
            return self.b.alloca(kind)

    def at(self, pointer: Any, offset: Any, kind: Any) -> Any:
        return self.b.gep(pointer, [offset], source_etype=kind)

    def load(self, pointer: Any, offset: Any, kind: Any, lanes: int = 0) -> Any:
        """Load the element, or `lanes` of them as a vector."""
        loaded = self.vector(kind, lanes) if lanes else kind
        return self.b.load(self.at(pointer, offset, kind), typ=loaded, align=_bytes(kind))

    def store(self, value: Any, pointer: Any, offset: Any) -> None:
        kind = getattr(value.type, "element", value.type)
        self.b.store(value, self.at(pointer, offset, kind), align=_bytes(kind))

    def constant(self, kind: Any, lanes: int, value: float) -> Any:
        return self.ir.Constant(self.vector(kind, lanes), [value] * lanes)

    def splat(self, value: Any, lanes: int) -> Any:
        kind = self.vector(value.type, lanes)
        single = self.b.insert_element(kind(self.ir.Undefined), value, self.word(0))
        return self.b.shuffle_vector(single, kind(self.ir.Undefined), self.constant(self.word, lanes, 0))

    def shuffled(self, a: Any, b: Any, order: Sequence[int]) -> Any:
        """Return elements of a, then b, in this order."""
        return self.b.shuffle_vector(a, b, self.ir.Constant(self.vector(self.word, len(order)), list(order)))

    def smaller(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    @contextmanager
    def loop(self, stop: Any, start: Any = None) -> Iterator[Any]:
        """Loop over range(start, stop): the index is the value of the block; what follows comes after the loop."""
        b, before = self.b, self.b.block
        head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(self.index)
        index.add_incoming(start if start is not None else self.i64(0), before)
        b.cbranch(b.icmp_signed("<", index, stop), body, done)
        b.position_at_end(body)
        yield index
        index.add_incoming(b.add(index, self.i64(1)), b.block)
        b.branch(head)
        b.position_at_end(done)


@cache
def _bfloat() -> Any:
    """Return LLVM's type, which llvmlite does not have."""
    from llvmlite import ir

    class BFloat(ir.Type):
        def _to_string(self) -> str:
            return "bfloat"

    return BFloat()


def _bytes(kind: Any) -> int:
    """Return the bytes of an element."""
    return {"half": 2, "float": 4}.get(str(kind)) or kind.width // 8


class Function(Protocol):
    """Machine code that is called with addresses and then integers, as its signature lists them."""

    signature: Signature

    def __call__(self, *arguments: int) -> None: ...


@cache
def function(kind: Callable[..., Emitter], *settings: Any) -> Function:
    """Return the function that kind(*settings) writes, compiled once for a process."""
    return compiled(kind(*settings))


def compiled(emitter: Emitter) -> Function:
    """Return what an emitter wrote as a function."""
    source = str(emitter.module)
    return link(emitter.signature, key(source), lambda: source)


def link(signature: Signature, key: bytes, write: Callable[[], str]) -> Function:
    """Return a function from its object code on disk, or compiled from what `write` returns in LLVM's language."""
    from llvmlite import binding

    stored, machine = object_cache.load(key), _machine()
    module = binding.parse_assembly(write() if stored is None else "")
    if stored is None:
        _optimize(module, machine, signature.name)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.set_object_cache(lambda _, code: object_cache.store(key, code), lambda _: stored)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *signature.ctypes)(engine.get_function_address(signature.name))
    function.engine = engine  # type: ignore[attr-defined]  # which must live as long as the function
    function.signature = signature  # type: ignore[attr-defined]
    return cast(Function, function)


def key(source: str) -> bytes:
    """Return the key of all that machine code depends on."""
    import llvmlite
    from llvmlite import binding

    versions = (".".join(map(str, llvm_version())), llvmlite.__version__)
    return object_cache.key((source, *versions, binding.get_default_triple(), *_processor(), f"{OPTIMIZED} {PASSES}"))


def _names(kind: str, arguments: str | int) -> tuple[str, ...]:
    """Return the names of arguments, made up where only their number is known."""
    return tuple(arguments.split()) if isinstance(arguments, str) else tuple(f"{kind}{i}" for i in range(arguments))


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
