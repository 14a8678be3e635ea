"""Functions compiled for this CPU at run time, by LLVM through llvmlite: no compiler on the machine is needed.

A caller builds an `llvmlite.ir` module, `compile_module` turns it into machine code for the CPU at hand in some
milliseconds, and the functions are called through ctypes, which lets go of the interpreter lock, so that `parallel`
runs them on as many threads as torch uses. Vectors of a width that the CPU does not have are split by LLVM. Where
llvmlite is missing or knows no target for this machine, `available` says so, and callers keep to torch.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from llvmlite import ir

_log = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Whether code can be compiled here."""
    try:
        _machine()
    except (ImportError, OSError, RuntimeError) as error:
        _log.info("no compiled functions on this machine: %s", error)
        return False
    return True


@cache
def features() -> frozenset[str]:
    """Names of the instruction sets of this CPU, as LLVM has them: "avx512vnni", "neon"."""
    from llvmlite import binding

    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def _machine() -> Any:
    """What LLVM compiles for; one for each module, because an engine takes its own."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    flags = binding.get_host_cpu_features().flatten()
    if "avx512f" in features():
        flags += ",-prefer-256-bit"
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=flags, opt=3
    )


class Compiled:
    """The machine code of a module; functions are valid as long as this lives."""

    def __init__(self, module: ir.Module) -> None:
        from llvmlite import binding

        machine = _machine()
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(parsed, builder)
        self._engine = binding.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()

    def function(self, name: str, pointers: int, integers: int) -> Callable[..., None]:
        """The function of that name, whose parameters are pointers, then 64-bit integers; it returns nothing."""
        kinds = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * integers
        return ctypes.CFUNCTYPE(None, *kinds)(self._engine.get_function_address(name))


@contextmanager
def loop(builder: ir.IRBuilder, stop: ir.Value, start: ir.Value | None = None) -> Iterator[ir.Value]:
    """for index in range(start, stop): 64-bit, the index is the value of the block; the builder goes on after it."""
    from llvmlite import ir

    index_type = ir.IntType(64)
    before = builder.block
    head, body, done = (builder.append_basic_block(name) for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(index_type)
    index.add_incoming(start if start is not None else index_type(0), before)
    builder.cbranch(builder.icmp_signed("<", index, stop), body, done)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, index_type(1)), builder.block)
    builder.branch(head)
    builder.position_at_end(done)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="compress")


def parallel(work: Callable[[int, int], None], total: int) -> None:
    """work(first, last) for ranges that cover range(total), on torch's number of threads."""
    threads = min(torch.get_num_threads(), total)
    if threads <= 1:
        work(0, total)
        return
    bounds = [total * i // threads for i in range(threads + 1)]
    for done in [_pool(threads).submit(work, *pair) for pair in zip(bounds, bounds[1:], strict=False)]:
        done.result()
