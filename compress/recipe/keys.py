"""Read the settings of plugins and of recipe sections from their sources, without running them.

A setting is a field of a dataclass. What is said about it is the comment behind the field, with the comment lines that
follow; a unit stands in front of it in brackets:

    tokens: int = 512  # [tokens] of each sequence, on which the search compares outputs
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from compress import plugins
from compress.errors import SHOWN, RecipeError, shown

SECTIONS = {  # sections of a recipe -> the module and the class of their keys
    "calibration": ("compress.recipe.schema", "CalibrationConfig"),
    "quantize": ("compress.types", "Scheme"),
    "activations": ("compress.types", "Activations"),
    "lowrank": ("compress.types", "Correction"),
    "sparsity": ("compress.types", "Sparsity"),
    "allocate": ("compress.recipe.schema", "Allocation"),
    "experts": ("compress.types", "ExpertPruning"),
    "kv_cache": ("compress.kv.settings", "CacheSettings"),
    "kv_policy": ("compress.kv.settings", "Policy"),
    "kv_evict": ("compress.kv.evict.settings", "Budget"),
}
CLASSES = {"Target": "str"}  # what YAML holds for our classes; for all others a mapping
RECIPE = "recipe"  # the kind of the sections


class RecipeKey(NamedTuple):
    """One key of a recipe."""

    name: str
    type: str
    default: str | None  # as YAML says it; None: there is none
    unit: str
    text: str


class _Class(NamedTuple):
    """A class and the source that defines it."""

    node: ast.ClassDef
    path: Path
    module: str


def all_names() -> list[str]:
    """KIND/NAME of every plugin and of every section of a recipe."""
    listed = [f"{kind}/{name}" for kind in plugins.SETTABLE for name in plugins.names(kind)]
    return listed + [f"{RECIPE}/{section}" for section in SECTIONS]


def is_paper(full: str) -> bool:
    """Whether a plugin lies in compress/papers."""
    kind, _, name = full.partition("/")
    return kind != RECIPE and plugins.is_paper(kind, name)


def full_name(name: str) -> str:
    """KIND/NAME of what is meant by it, or by NAME alone where that is unique; RecipeError otherwise."""
    listed = all_names()
    if name in listed:
        return name
    meant = [each for each in listed if each.partition("/")[2] == name]
    if len(meant) > 1:
        raise RecipeError(f"{name} is {' and '.join(meant)}; name one of them")
    if not meant:
        short = [each.partition("/")[2] for each in listed]
        close = difflib.get_close_matches(name, listed if "/" in name else short, 3) if len(name) < SHOWN else []
        advice = f"did you mean {' or '.join(close)}?" if close else "`compress methods --all` lists them"
        raise RecipeError(f"unknown method {shown(name)}; {advice}")
    return meant[0]


def describe(full: str) -> str:
    """The first line of the docstring of a plugin or of a section."""
    kind, _, name = full.partition("/")
    if kind != RECIPE:
        return plugins.describe(kind, name)
    return (ast.get_docstring(_class(*SECTIONS[name]).node) or "").partition("\n")[0]


def settings(full: str) -> list[RecipeKey]:
    """The settings of a plugin or of a section, those of base classes first."""
    kind, _, name = full.partition("/")
    if kind == RECIPE:
        return _settings(_class(*SECTIONS[name]))
    return _settings(_class(plugins.module_name(kind, name), plugins.KINDS[kind][0]))


def _settings(cls: _Class) -> list[RecipeKey]:
    inherited = [_settings(_class(cls.module, ast.unparse(base))) for base in cls.node.bases]
    comments = _comments(cls.path)
    own = [
        _setting(cls, node, " ".join(_following(comments, node)))
        for node in cls.node.body
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.annotation) != "Any"  # settings of a method that is named
        and not ast.unparse(node.annotation).startswith("ClassVar")
    ]
    listed = {setting.name: setting for setting in [*(each for base in inherited for each in base), *own]}
    return list(listed.values())


def _setting(cls: _Class, node: ast.AnnAssign, comment: str) -> RecipeKey:
    unit, text = re.fullmatch(r"(?:\[([^]]+)\] *)?(.*)", comment).groups("")  # type: ignore[union-attr]
    default = None if node.value is None else _yaml(ast.unparse(_constant(cls.module, node.value)))
    return RecipeKey(ast.unparse(node.target), _type(cls.module, node.annotation), default, unit, text)


def _comments(path: Path) -> dict[int, tuple[str, bool]]:
    """Line -> its comment, and whether nothing else is on the line."""
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(io.StringIO(file.read()).readline))
    return {
        token.start[0]: (token.string.lstrip("# ").rstrip(), token.line.lstrip().startswith("#"))
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def _following(comments: dict[int, tuple[str, bool]], node: ast.AnnAssign) -> Iterator[str]:
    """The comments of a field: those on its lines, then those that fill the lines below."""
    line = node.lineno
    end = node.end_lineno or line
    while line <= end or comments.get(line, ("", False))[1]:
        if line in comments:
            yield comments[line][0]
        line += 1


def _type(module: str, annotation: ast.expr) -> str:
    """A type in the words of YAML: `int`, `low | high` for choices, `list of float`."""
    if isinstance(annotation, ast.BinOp):
        return f"{_type(module, annotation.left)} | {_type(module, annotation.right)}"
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        name = ast.unparse(annotation.value)
        if name == "Literal":
            return " | ".join(_type(module, choice) for choice in inner)
        return f"list of {_type(module, inner[0])}" if name == "tuple" else _yaml(ast.unparse(annotation))
    if isinstance(annotation, ast.Name) and annotation.id[0].isupper():
        alias = _find(module, annotation.id, ast.Assign)
        if alias is not None and isinstance(alias[0], ast.Assign):
            return _type(alias[1], alias[0].value)
        return CLASSES.get(annotation.id, "mapping")
    return _yaml(ast.unparse(annotation))


def _constant(module: str, value: ast.expr) -> ast.expr:
    """The value of a named constant; any other value as it is."""
    definition = _find(module, value.id, ast.AnnAssign) if isinstance(value, ast.Name) else None
    named = definition[0].value if definition is not None and isinstance(definition[0], ast.AnnAssign) else None
    return value if named is None else named


def _yaml(python: str) -> str:
    """A literal of Python as YAML says it."""
    words = {"None": "null", "True": "true", "False": "false", "()": "[]"}
    return words.get(python) or (f"[{python[1:-1].rstrip(',')}]" if python[0] == "(" else python.strip("'\""))


def _class(module: str, name: str) -> _Class:
    """The class that a module defines or imports by a name such as `Config` or `grid.GridConfig`."""
    definition = _find(module, name, ast.ClassDef)
    node, owner = definition or (None, "")
    if not isinstance(node, ast.ClassDef):
        raise LookupError(f"{module} has no class {name}")
    return _Class(node, _path(owner), owner)


def _find(module: str, name: str, sort: type[ast.stmt]) -> tuple[ast.stmt, str] | None:
    """The statement that defines a name of a module, and the module it stands in; imports of ours are followed."""
    first, _, rest = name.partition(".")
    tree = plugins.parse(_path(module))
    for node in ast.walk(tree):
        if isinstance(node, sort) and name in (getattr(node, "name", ""), *_targets(node)):
            return node, module
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("compress"):
            continue
        for alias in node.names:
            if first == (alias.asname or alias.name):
                source = f"{node.module}.{alias.name}" if rest else str(node.module)
                return _find(source, rest or alias.name, sort)
    return None


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)  # imports the packages above it only
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {module}")
    return Path(spec.origin)
