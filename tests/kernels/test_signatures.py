"""Argument lists of compiled functions: names that are put in order, and refused where they do not fit."""

from __future__ import annotations

import pytest
import torch

from compress.kernels import llvm
from compress.kernels.loops import compiler
from compress.kernels.loops.compiler import Floats, loop

SIGNATURE = llvm.Signature("scale", ("x", "out"), ("first", "last", "factor"))


@loop
def add(x: Floats, out: Floats, count: int) -> None:
    for i in range(count):
        out[i] += x[i]


@loop
def refuse(x: Floats, count: int) -> None:
    if count < 0:
        raise ValueError("negative")
    x[0] = count


def test_named_values_are_put_in_order() -> None:
    x, out = torch.zeros(2), torch.ones(2)
    assert SIGNATURE.arguments(x, out, factor=3, last=2, first=1) == (x.data_ptr(), out.data_ptr(), 1, 2, 3)
    assert SIGNATURE.around(("out", "first", "last"), {"factor": 7, "x": 5, "more": 9}) == ((5,), (7,))
    assert str(SIGNATURE) == "void scale(x, out, first, last, factor)"


def test_names_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2)
    with pytest.raises(TypeError, match=r"void scale.*missing or unknown: fact0r, factor"):
        SIGNATURE.arguments(x, x, first=0, last=1, fact0r=2)
    with pytest.raises(TypeError, match="missing: factor"):
        SIGNATURE.around(("out", "first", "last"), {"x": 5})
    with pytest.raises(TypeError, match="does not take first, out one after the other"):
        SIGNATURE.around(("first", "out"), {"x": 5, "last": 1, "factor": 2})


def test_loops_declare_arrays_before_integers() -> None:
    assert compiler.signature(add) == llvm.Signature("add", ("x", "out"), ("count",))

    def count_first(count: int, x: Floats) -> None: ...

    with pytest.raises(TypeError, match="count_first: arguments are arrays"):
        loop(count_first)


@pytest.mark.skipif(not compiler.available(), reason="nothing can be compiled here")
def test_a_loop_runs_and_one_that_may_raise_is_refused() -> None:
    x, out = torch.arange(100.0), torch.ones(100)
    run = compiler.compiled(add)
    run(*run.signature.arguments(x, out, count=100))
    assert torch.equal(out, x + 1)
    with pytest.raises(TypeError, match="refuse: something in it may raise an exception"):
        compiler.compiled(refuse)
