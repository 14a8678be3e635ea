"""Limits of size: what does not fit is split, not squeezed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from helpers.structure import nodes, parse

ROOT = Path(__file__).parents[1]
FILE_LINES, FUNCTION_LINES, ARGUMENTS, BRANCHES = 400, 60, 7, 4

SOURCES = sorted([*(ROOT / "compress").rglob("*.py"), *(ROOT / "calib").rglob("*.py"), *ROOT.glob("*.py")])
OTHERS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
# an option of a command is an argument of its function
COMMANDS = {ROOT / "cli.py", *(ROOT / "compress" / "cli").glob("*.py")}
# the arguments of attention are what an engine has, or what it calls its backends with
GIVEN = {"compress/kernels/paged.py: attend", "compress/serving/vllm_cache.py: forward"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def long_functions(tree: ast.Module) -> dict[str, int]:
    """Name -> lines, decorators not counted."""
    lines = {f"{f.name} (line {f.lineno})": (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions(tree)}
    return {name: count for name, count in lines.items() if count > FUNCTION_LINES}


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is compiled: an argument is a pointer, a size or a constant."""
    decorators = {ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list}
    return bool(decorators & {"triton.jit", "loop", "inlined"})


def many_arguments(tree: ast.Module) -> dict[str, int]:
    """Name -> arguments, without self and cls; kernels do not count."""
    found = {}
    for f in functions(tree):
        if is_kernel(f):
            continue
        names = [a.arg for a in (*f.args.posonlyargs, *f.args.args)]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        count = len(names) + len(f.args.kwonlyargs) + (f.args.vararg is not None) + (f.args.kwarg is not None)
        found[f"{f.name} (line {f.lineno})"] = count
    return {name: count for name, count in found.items() if count > ARGUMENTS}


def long_chains(tree: ast.Module) -> dict[str, int]:
    """Line -> branches (if and elif) of each chain."""
    chains = {}
    elifs: set[int] = set()
    for node in nodes(tree):  # parents come before their children
        if not isinstance(node, ast.If) or id(node) in elifs:
            continue
        branches, last = 1, node
        while (
            len(last.orelse) == 1
            and isinstance(last.orelse[0], ast.If)
            and last.orelse[0].col_offset == node.col_offset
        ):
            last = last.orelse[0]
            elifs.add(id(last))
            branches += 1
        chains[f"line {node.lineno}"] = branches
    return {line: count for line, count in chains.items() if count > BRANCHES}


def offenders(find: Callable[[Path], object], paths: list[Path]) -> dict[str, object]:
    """File -> what is too large in it, for those where something is."""
    return {relative(path): wrong for path in paths if (wrong := find(path))}


def test_lengths_of_files() -> None:
    counts = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in [*SOURCES, *OTHERS]}
    assert {path: count for path, count in counts.items() if count > FILE_LINES} == {}


def test_lengths_of_functions() -> None:
    assert offenders(lambda path: long_functions(parse(path)), [*SOURCES, *OTHERS]) == {}


def test_arguments() -> None:
    asked = [path for path in SOURCES if path not in COMMANDS]
    many = [f"{relative(path)}: {name.split()[0]}" for path in asked for name in many_arguments(parse(path))]
    assert sorted(many) == sorted(GIVEN)


def test_branches() -> None:
    assert offenders(lambda path: long_chains(parse(path)), SOURCES) == {}


def test_the_sources_are_found() -> None:
    assert {"compress/numerics/packing.py", "compress/formats/int.py", "calib/__init__.py"} <= {
        relative(path) for path in SOURCES
    }
    assert {"tests/test_size.py", "tests/conftest.py"} <= {relative(path) for path in OTHERS}


def test_check_of_functions() -> None:
    body = "\n    x = 1"
    assert long_functions(ast.parse("def f():" + body * 59)) == {}
    assert long_functions(ast.parse("class A:\n  async def f():" + body * 60)) == {"f (line 2)": 61}


def test_check_of_arguments() -> None:
    assert many_arguments(ast.parse("class A:\n def f(self, a, b, c, d, e, f, g): pass")) == {}
    assert many_arguments(ast.parse("def f(a, b, /, c, d, *e, f, g, **h): pass")) == {"f (line 1)": 8}


def test_check_of_chains() -> None:
    chain = "if a: pass\n" + "elif b: pass\n" * 3
    assert long_chains(ast.parse(chain + "else:\n  if c: pass\n")) == {}
    assert long_chains(ast.parse("\n" + chain + "elif c: pass\nelse: pass\n")) == {"line 2": 5}
    assert long_chains(ast.parse("if a: pass\n" * 9)) == {}
