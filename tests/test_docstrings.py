"""What docstrings, comments and recipes point to is there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from helpers import structure

ROOT = Path(__file__).parents[1]
# a/b.py, b.py and a/b/, not a part of something longer: no pattern, no place in an output folder, no address
PATH = re.compile(r"(?<![\w./<>{}*~$-])((?:[\w-]+/)*[\w-]+\.py\b|(?:[\w-]+/)+(?![\w<>{}*]))")
CLASS = re.compile(r"`(_?[A-Z][a-z]+\w*)`")


def product() -> list[Path]:
    folders = [ROOT / name for name in ("compress", "calib", "recipes")]
    return sorted(path for folder in folders for path in folder.rglob("*.py")) + sorted(ROOT.glob("*.py"))


def recipes() -> list[Path]:
    return sorted((ROOT / "recipes").rglob("*.yaml"))


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def found(pattern: re.Pattern[str], texts: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """(line, what the pattern finds) in texts."""
    for line, text in texts:
        for match in pattern.finditer(text):
            yield line + text.count("\n", 0, match.start()), match.group(1)


def exists(name: str, folder: Path) -> bool:
    """Whether a path is there: from the root of the repository, in compress/ or calib/, or beside who points to it."""
    return any((start / name).exists() for start in (ROOT, ROOT / "compress", ROOT / "calib", folder))


@cache
def names() -> frozenset[str]:
    """All identifiers of the sources."""
    known = set()
    for path in product():
        for node in structure.nodes(structure.parse(path)):
            for field in ("id", "attr", "arg", "name", "asname"):
                if isinstance(name := getattr(node, field, None), str):
                    known.add(name)
    return frozenset(known)


def lost(path: Path, source: str) -> list[str]:
    """file:line: what it points to, for each path that is not there and each class in backticks that there is not."""

    def bad(texts: list[tuple[int, str]]) -> list[tuple[int, str]]:
        paths = [hit for hit in found(PATH, texts) if not exists(hit[1], path.parent)]
        return paths + [hit for hit in found(CLASS, texts) if hit[1] not in names()]

    hits = bad([(1, source)])  # what is not in the source is not in its prose, which takes a tenth of a second to find
    if hits and path.suffix != ".yaml":
        hits = bad(list(prose(source)))
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in sorted(hits)]


def test_everything_that_is_pointed_to_is_there() -> None:
    bad = [line for path in product() + recipes() for line in lost(path, path.read_text(encoding="utf-8"))]
    assert not bad, "these point to nothing:\n" + "\n".join(bad)


# The check itself, on sources that it has to judge rightly.


def test_check_of_references() -> None:
    here = ROOT / "compress" / "kernels" / "some.py"
    for text in (
        '"""As compress/nowhere/x.py does."""',
        '"""\n\nIn compress/nowhere/."""',
        "x = 1  # as nothing.py",
        'def f():\n    """As `_Nowhere` does."""',
        'x: int\n"""As (nothing.py)."""',
    ):
        assert len(lost(here, text)) == 1, text
    for text in (
        '"""compress/kernels/llvm.py, dispatch.py, cpu/, kernels/cpu/int.py, stats.py and calib/."""',
        "x = 'compress/nowhere.py'",
        '"""OUT.partial/blocks/ or <folder>/x/, kernels/<folder>/<format>.py; and/or, https://host/path/x.py."""',
        '"""`Emitter` and `nothing` and Nothing."""',
    ):
        assert lost(here, text) == [], text
    recipe = ROOT / "recipes" / "some.yaml"
    assert lost(recipe, "# as compress/nowhere.py\nx: nothing.py  # and no/\n") == [
        "recipes/some.yaml:1: compress/nowhere.py",
        "recipes/some.yaml:2: no/",
        "recipes/some.yaml:2: nothing.py",
    ]
    assert lost(here, '"""One.\n\nTwo,\nnothing.py."""') == ["compress/kernels/some.py:4: nothing.py"]
