"""Measure the structure of the sources: lines, files, cycles, fan-out, pairs that could be one file, keys of plugins.

    python tests/helpers/structure.py          # the figures
    python tests/helpers/structure.py --list   # and what they are made of

Imports inside functions and under TYPE_CHECKING count. Nothing of the sources is run.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES = 400  # the limit of tests/test_size.py
PAPERS = "compress.papers"


def module_name(path: Path) -> str:
    """compress/x.py -> compress.x, calib/x.py -> compress.calib.x; a package has the name of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("compress", *parts) if parts[0] == "calib" else parts
    return ".".join(parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    """Module -> its file."""
    paths = [path for folder in ("compress", "calib") for path in (ROOT / folder).rglob("*.py")]
    return {module_name(path): path for path in sorted(paths) if "compress/calib" not in str(path)}


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which all tests of a process share."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a tree, parents before their children; a tree is walked once."""
    return list(ast.walk(tree))


def tree(name: str) -> ast.Module:
    return parse(modules()[name])


@cache
def lines(name: str) -> int:
    return len(modules()[name].read_text(encoding="utf-8").splitlines())


@cache
def imports(name: str) -> frozenset[str]:
    """The modules of ours that a module imports anywhere in its text."""
    imported = set()
    for node in nodes(tree(name)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {member if member in modules() else node.module or "" for member in members}
    return frozenset(imported & modules().keys() - {name})


def importers() -> dict[str, set[str]]:
    """Module -> the modules that import it."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for name in modules():
        for imported in imports(name):
            graph[imported].add(name)
    return graph


def cycles() -> list[list[str]]:
    """Groups of modules that import each other, each sorted."""
    reach: dict[str, set[str]] = {}
    for start in modules():
        seen: set[str] = set()
        stack = [start]
        while stack:
            for imported in imports(stack.pop()) - seen:
                seen.add(imported)
                stack.append(imported)
        reach[start] = seen
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in modules()}
    return [list(group) for group in sorted(groups) if group]


def fan_out() -> dict[str, int]:
    """Module -> how many modules of ours it imports."""
    return {name: len(imports(name)) for name in modules()}


def pairs() -> list[tuple[str, str]]:
    """(module, its only importer) where both lie in one folder and would fit into one file."""
    found = []
    for name, by in importers().items():
        only = next(iter(by)) if len(by) == 1 else None
        is_package = modules()[name].name == "__init__.py"
        if only is None or is_package or name.rpartition(".")[0] != only.rpartition(".")[0]:
            continue
        if lines(name) + lines(only) <= FILE_LINES:
            found.append((name, only))
    return found


def keys() -> list[str]:
    """kind/plugin.key of every setting of every plugin that a recipe can name, those of base classes once."""
    sys.path.insert(0, str(ROOT))
    from compress import plugins
    from compress.recipe import keys as settings

    names = [f"{kind}/{name}" for kind in plugins.SETTABLE for name in plugins.names(kind)]
    return [f"{name}.{setting.name}" for name in names for setting in settings.settings(name)]


def is_paper(name: str) -> bool:
    return f"{name}.".startswith(f"{PAPERS}.")


def total(names: Iterable[str]) -> int:
    return sum(map(lines, names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the pairs, the cycles and the largest fan-outs")
    listed = parser.parse_args().list
    core = [name for name in modules() if not is_paper(name)]
    wide = sorted(fan_out().items(), key=lambda item: -item[1])
    print(f"lines     {total(modules())}, of the core {total(core)}")
    print(f"files     {len(modules())}, of the core {len(core)}")
    print(f"cycles    {len(cycles())} of {sum(map(len, cycles()))} modules")
    print(f"fan-out   {wide[0][1]} at most ({wide[0][0]})")
    print(f"pairs     {len(pairs())} that one file would hold")
    print(f"keys      {len(keys())}")
    if listed:
        for group in cycles():
            print("cycle", *group)
        for name, count in wide:
            if count > 14:
                print("fan-out", count, name)
        for pair in pairs():
            print("pair", *pair)


if __name__ == "__main__":
    main()
