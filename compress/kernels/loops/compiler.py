"""Compile plain Python loops for this CPU: numba writes LLVM's language, compress/kernels/llvm.py makes machine code.

A `loop` is a function of flat arrays and integers that its annotations declare, and returns nothing. What it calls is
either in `numba`'s reach (numbers, `numpy` functions of one number, slices) or decorated with `inlined`. Nothing is
checked: an index past the end reads what lies there. Object code goes to the cache of compress/kernels/llvm.py,
under a key of the source of the loop's module and of numba's version, so that a process that finds its code there
imports no numba. numba's own cache is not used: it would unpickle what it reads.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from types import FunctionType
from typing import Any

from compress.kernels import llvm

# Annotations of arrays, and what their elements are.
Floats = Any
Bytes = Any
Shorts = Any
Words = Any
Longs = Any
ELEMENTS = {"Floats": "float32", "Bytes": "uint8", "Shorts": "uint16", "Words": "uint32", "Longs": "int64"}
UNBOUNDED = 1 << 40  # elements of every array, as far as the loop knows
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": False,
    "boundscheck": False,
    "_nrt": False,
}


@cache
def available() -> bool:
    """Return whether loops can be compiled here."""
    return llvm.available() and importlib.util.find_spec("numba") is not None


class Inlined:
    """A function that loops call: numba sees it as part of them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def inlined(function: Callable[..., Any]) -> Any:
    """Mark a function as one that loops of its module call."""
    return Inlined(function)


@inlined
def multiply_add(a: float, b: float, c: float) -> float:
    """Return a * b + c, rounded once where the processor has an instruction for it: `_multiply_add` in a loop."""
    raise NotImplementedError("runs in compiled loops only")


def loop(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a function that is compiled as a whole, and check its annotations."""
    signature(function)
    return function


def signature(function: Callable[..., None]) -> llvm.Signature:
    """Return the C signature that the annotations of a loop declare: arrays first, then integers."""
    kinds = {name: str(parameter.annotation) for name, parameter in inspect.signature(function).parameters.items()}
    pointers = [name for name, kind in kinds.items() if kind in ELEMENTS]
    integers = [name for name, kind in kinds.items() if kind == "int"]
    if [*kinds] != pointers + integers:
        raise TypeError(f"{function.__name__}: arguments are arrays ({', '.join(ELEMENTS)}), then int")
    return llvm.Signature(function.__name__, tuple(pointers), tuple(integers))


@cache
def compiled(function: Callable[..., None]) -> llvm.Function:
    """Return a loop as a function of addresses and then integers, compiled once for a process."""
    return llvm.link(signature(function), _key(function), lambda: _module_text(function))


def is_on_disk(function: Callable[..., None]) -> bool:
    """Return whether the object code of a loop is there, so that it takes no compiler."""
    return llvm.load_object(_key(function)) is not None


def _key(function: Callable[..., None]) -> bytes:
    """Return the key of a loop's object code."""
    source = inspect.getsource(sys.modules[function.__module__]) + inspect.getsource(sys.modules[__name__])
    return llvm.key(f"{function.__name__}\n{metadata.version('numba')}\n{source}")


def _module_text(function: Callable[..., None]) -> str:
    """Return a loop in LLVM's language, behind a function of its name that takes addresses and integers."""
    import numba

    kinds = [str(parameter.annotation) for parameter in inspect.signature(function).parameters.values()]
    arrays = {name: numba.types.Array(getattr(numba.types, element), 1, "C") for name, element in ELEMENTS.items()}
    types = tuple(arrays.get(kind, numba.int64) for kind in kinds)
    njit: Any = numba.njit  # its declared types know only a part of the options
    dispatcher = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(_with_numba_globals(function))
    dispatcher.compile(numba.void(*types))
    result = dispatcher.overloads[types]
    text, name = result.library.get_llvm_str(), result.fndesc.llvm_func_name
    if ".const.picklebuf" in text:  # what numba keeps of an exception
        raise TypeError(f"{function.__name__}: something in it may raise an exception, which nobody would see")
    return text + _entry(function.__name__, name, kinds)


def _with_numba_globals(function: Any) -> FunctionType:
    """Return a function whose globals are numba's in the place of ours."""
    import numba

    njit: Any = numba.njit
    known = dict(function.__globals__)
    for name in function.__code__.co_names:
        value = known.get(name)
        if value is multiply_add:
            known[name] = _multiply_add()
        elif isinstance(value, Inlined):
            known[name] = njit(forceinline=True, **OPTIONS)(_with_numba_globals(value.function))
    return FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)


@cache
def _multiply_add() -> Any:
    """Return `multiply_add` of float32 for numba: an instruction of LLVM that numba has no name for."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    def write(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        name, kind = "llvm.fmuladd.f32", ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 3)
        return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), arguments)

    return intrinsic(lambda _, a, b, c: (types.float32(types.float32, types.float32, types.float32), write))


def _entry(name: str, mangled: str, kinds: list[str]) -> str:
    """Return the C function in LLVM's language: it gives numba's the sizes and strides that belong to an array."""
    passed = []
    for i, kind in enumerate(kinds):
        if kind in ELEMENTS:
            nbytes = 8 if kind == "Longs" else 4 if kind in ("Floats", "Words") else 2 if kind == "Shorts" else 1
            passed.append(f"ptr null, ptr null, i64 {UNBOUNDED}, i64 {nbytes}, ptr %{i}, i64 {UNBOUNDED}, i64 {nbytes}")
        else:
            passed.append(f"i64 %{i}")
    declared = ", ".join("ptr noalias" if kind in ELEMENTS else "i64" for kind in kinds)
    return (
        f"\ndefine void @{name}({declared}) {{\n  %result = alloca ptr\n  %error = alloca ptr\n"
        f'  call i32 @"{mangled}"(ptr %result, ptr %error, {", ".join(passed)})\n  ret void\n}}\n'
    )
