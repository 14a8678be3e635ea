"""Find weight methods, transforms, allocators, formats, cache codecs, drafts and tasks by file names, no registry.

A plugin is one file `compress/<package of its kind>/<name>.py`, or `<name>/__init__.py` in a folder with its own
modules, that defines the names which `KINDS` lists for its kind.
Published methods that are not on the frontier lie in `compress/papers/<folder of their kind>/`. They are found in the
same way, behind the others.

    quant      Config, quantize(weight, stats, config, seed), FORMAT it writes, NEEDS (hessian, largest_weight, or
               nothing), INCOHERENCE (its default), plan_params(config, shape), workspace(config, shape) in bytes, and
               prepare, quantize_rows, join, row_unit where rows are quantized in tiles, TWO_SIDED where stats.output
               counts, too: docs/adding_a_method.md
    transform  Config, apply(...), SCOPE: "block" or "model", as compress/transform/smooth.py and
               compress/transform/rotate.py do
    allocate   Config, allocate(problem, config, bench), needs(config): compress/allocate/__init__.py
    formats    Params, specs, pack, decode, and check where stored integers select: compress/formats/__init__.py
    importers  describe(source), tensors(source), OPTIONS: compress/importers/__init__.py
    export     refuses(weight), write(export, out), SUFFIX: compress/export/targets/__init__.py
    tune       Config, workspace(config, ...) in bytes, SCOPE: "block" with BlockTuning, as compress/tune/blockwise.py
               has, or "model" with train, positions and disk, as compress/tune/end_to_end.py has
    codes      serves(packed), Codes(packed, target, rates), BYTES, RATE: compress/tune/codes/__init__.py
    kv         Config, build(config, spec, static), NEEDS, and calibrate, specs, check where it is calibrated:
               compress/kv/__init__.py
    evict      Config, score(config, seen), NEEDS, LAYER: compress/kv/evict/__init__.py
    read       Config, build(config, spec, static), NEEDS, LAYER, and calibrate, specs, WORK where it is calibrated:
               compress/kv/sparse/__init__.py
    inputs     check_inputs(activations), round_inputs(x, activations): compress/runtime/activation_quant.py
    speculate  Config, build(config, session), PART: compress/speculate/drafting.py
    task       Config, items(config, material), WAY, SUITES, and correct where models write:
               compress/evaluate/tasks/__init__.py

Adding one changes no existing line. Listing reads the sources and runs nothing, so that it is instant and imports no
torch; `load` imports one file and checks its contract.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from compress.errors import SHOWN, RecipeError, cut, shown

# kind (a sub-package of compress) -> what each of its plugins defines. The first two names tell a plugin from a file
# that plugins share, such as quant/feedback.py.
KINDS = {
    "quant": ("Config", "quantize", "FORMAT", "NEEDS", "INCOHERENCE", "plan_params", "workspace"),
    "transform": ("Config", "apply", "SCOPE"),
    "allocate": ("Config", "allocate", "needs"),
    "formats": ("Params", "decode", "specs", "pack"),
    "kv": ("Config", "build", "NEEDS"),
    "evict": ("Config", "score", "NEEDS", "LAYER"),
    "read": ("Config", "build", "NEEDS", "LAYER"),
    "tune": ("Config", "workspace", "SCOPE"),
    "codes": ("serves", "Codes", "BYTES", "RATE"),
    "importers": ("describe", "tensors", "OPTIONS"),
    "export": ("refuses", "write", "SUFFIX"),
    "inputs": ("check_inputs", "round_inputs"),
    "speculate": ("Config", "build", "PART"),
    "task": ("Config", "items", "WAY", "SUITES"),
}
SETTABLE = tuple(
    kind for kind in KINDS if kind not in ("codes", "importers", "export", "inputs", "speculate", "task")
)  # in recipes
# (kind, former name) -> the present name of a plugin, for recipes and checkpoints of earlier versions
ALIASES = {("quant", "cut"): "structured", ("formats", "cut"): "structured"}
# (kind, name) -> the plugin that was split off from it, which has the keys that it had once (its REMOVED_KEYS)
SPLIT_OFF = {("transform", "rotate"): "spin"}
_FOLDERS = {
    "allocate": "allocate.methods",
    "kv": "kv.codecs",
    "evict": "kv.evict",
    "read": "kv.sparse",
    "codes": "tune.codes",
    "export": "export.targets",
    "inputs": "runtime.inputs",
    "speculate": "speculate.drafts",
    "task": "evaluate.tasks",
}
PACKAGES = {kind: _FOLDERS.get(kind, kind) for kind in KINDS}
_PAPER_FOLDERS = {"kv": "codecs", "read": "sparse", "task": "tasks"}
PAPERS = {  # importers and exports follow formats, not papers
    kind: f"papers.{_PAPER_FOLDERS.get(kind, kind)}" for kind in KINDS if kind not in ("importers", "export")
}

LARGEST = 1 << 53  # of an integer in settings: no number of anything is larger, and a float holds it exactly
MISMATCH = object()  # "this value is not of that type"; None is a value

_checked: dict[tuple[str, str], ModuleType] = {}  # (kind, name) -> what `load` has found to keep the contract


def names(kind: str) -> list[str]:
    """Return the plugins of a kind, sorted, those of papers behind the others."""
    core = _files_of(PACKAGES[kind])
    papers = {name: path for name, path in _files(kind).items() if name not in core}
    return [name for files in (core, papers) for name in sorted(files) if _is_plugin(kind, parse(files[name]))]


def is_paper(kind: str, name: str) -> bool:
    """Return whether a plugin lies in compress/papers, which holds what is not on the frontier."""
    return name not in _files_of(PACKAGES[kind]) and kind in PAPERS and name in _files_of(PAPERS[kind])


def module_name(kind: str, name: str) -> str:
    """Return the full name of the module that a plugin is."""
    return f"compress.{(PAPERS if is_paper(kind, name) else PACKAGES)[kind]}.{name}"


def describe(kind: str, name: str) -> str:
    """Return the first line of a plugin's docstring, "" if it has none; RecipeError if there is no such plugin."""
    return (ast.get_docstring(_find(kind, name)) or "").partition("\n")[0]


def load(kind: str, name: str) -> ModuleType:
    """Import a plugin; RecipeError for an unknown name, TypeError if the file does not keep the contract.

    A module that has been checked is looked up from then on, as long as it stays the imported one.
    """
    known = _checked.get((kind, name))
    if known is not None and sys.modules.get(known.__name__) is known:
        return known
    _find(kind, name)
    module = importlib.import_module(module_name(kind, name))
    if missing := [attribute for attribute in KINDS[kind] if not hasattr(module, attribute)]:
        raise TypeError(f"{module.__file__} does not define {', '.join(missing)}, which every {kind} plugin must")
    _checked[kind, name] = module
    return module


def current(kind: str, name: str) -> str:
    """Return the present name of a plugin that may have been renamed; any other name as it is."""
    return ALIASES.get((kind, name), name)


def before_split(kind: str, name: str) -> str:
    """Return the name of the plugin that a plugin was split off from; any other name as it is."""
    return next((whole for (of, whole), part in SPLIT_OFF.items() if (of, part) == (kind, name)), name)


def constant(kind: str, name: str, attribute: str) -> Any:
    """Return a constant of a plugin; literals and frozensets of literals are read from the source, not imported."""
    for node in _find(kind, name).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if attribute in map(ast.unparse, targets) and isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "frozenset":
                return frozenset(*map(ast.literal_eval, value.args))
            if isinstance(value, ast.Constant):
                return value.value
    return getattr(load(kind, name), attribute)


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """Return the error for a word that is not among the known ones, with the closest of them (case is ignored)."""
    known = list(known)
    close = close_words(word, known, 1)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {shown(word)}; known: {', '.join(known) or 'none'}{guess}"


def close_words(word: str, known: Iterable[str], count: int) -> list[str]:
    """Return the known words that are closest to a word, `count` at most; case is ignored.

    A word that is the last part of others, as `a` is of `b.a`, means one of these.
    """
    by_lower = {each.lower(): each for each in known}
    by_lower = {each: by_lower[each] for each in by_lower if each.endswith(f".{word.lower()}")} or by_lower
    close = difflib.get_close_matches(word.lower(), by_lower, n=count) if len(word) <= SHOWN else []
    return [by_lower[each] for each in close]


class Unquoted(str):
    """Text that stands in a file without quotes: where a number is due, 1e-3 is one."""


def hints(config: Any) -> dict[str, Any]:
    """Return the types of the fields of a plugin's settings, an instance of its Config."""
    return typing.get_type_hints(type(config))


def typed(value: Any, hint: Any) -> Any:
    """Return plain data as the type of a field, or MISMATCH.

    Types are bool, int, float, str, None, Literal, unions of them, and tuple[type, ...] for lists. An integer is a
    finite float; nothing else is converted: "4" is no integer, true is no integer, a null is no text. No integer is
    larger than LARGEST.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next((t for option in arguments if (t := typed(value, option)) is not MISMATCH), MISMATCH)
    if origin is tuple:
        items = [typed(item, arguments[0]) for item in value] if isinstance(value, list | tuple) else [MISMATCH]
        return MISMATCH if MISMATCH in items else tuple(items)
    if hint is float:
        return _number(value)
    value = str(value) if isinstance(value, str) else value
    if origin is typing.Literal:
        return value if any(value == option and type(value) is type(option) for option in arguments) else MISMATCH
    if type(value) is not hint or (hint is int and abs(value) > LARGEST):
        return MISMATCH
    return value


def removed_keys(config: type) -> Mapping[str, Any]:
    """Return the keys that the settings of a plugin had once, and for each the value that it works with now."""
    removed: Mapping[str, Any] = getattr(config, "REMOVED_KEYS", {})
    return removed


def plain(config: Any) -> dict[str, Any]:
    """Return settings, an instance of a dataclass, as plain data: lists in the place of tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def _number(value: Any) -> Any:
    try:
        number = float(value) if type(value) in (int, float, Unquoted) else math.nan
    except (ValueError, OverflowError):
        return MISMATCH
    return number if math.isfinite(number) else MISMATCH


def replaced(base: Any, values: Mapping[str, Any], where: str, error: Callable[[str, str], Exception]) -> Any:
    """Return the dataclass instance `base` with other values; error(key, message) is raised for impossible ones."""
    try:
        return dataclasses.replace(base, **values)
    except ValueError as problem:  # begins with the name of the field, if one field is at fault
        raise error(str(problem).partition(" ")[0], f"{where}: {cut(str(problem), 4 * SHOWN)}") from problem


def expected(hint: Any) -> str:
    """Return the type of a field in words."""
    plain = {bool: "true or false", int: "an integer", float: "a finite number", str: "text", type(None): "null"}
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(json.dumps, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a list"
    return plain.get(hint) or " or ".join(expected(option) for option in typing.get_args(hint))


def found(value: Any) -> str:
    """Return plain data in words."""
    if isinstance(value, str):
        return f"the text {shown(str(value))}"
    kind = type(value).__name__
    words: dict[type, str] = {dict: "keys with values", list: "a list", tuple: "a list", type(None): "nothing"}
    return words.get(type(value)) or f"{json.dumps(value) if type(value) is bool else shown(value)} ({kind})"


def _find(kind: str, name: str) -> ast.Module:
    """Return the syntax tree of a plugin; RecipeError if there is no such plugin."""
    path = _files(kind).get(name)
    tree = parse(path) if path else None
    if tree is None or not _is_plugin(kind, tree):
        raise RecipeError(unknown(f"{kind} plugin", name, names(kind)))
    return tree


def _files(kind: str) -> dict[str, Path]:
    """Return the files that may be plugins of a kind, by name."""
    papers = _files_of(PAPERS[kind]) if kind in PAPERS else {}
    return papers | _files_of(PACKAGES[kind])


def _files_of(package: str) -> dict[str, Path]:
    """Return the files of a package of compress by name; a folder's is its __init__.py."""
    spec = importlib.util.find_spec(f"compress.{package}")  # imports the packages above it only
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    packages = {path.parent.name: path for folder in folders for path in folder.glob("[!_]*/__init__.py")}
    return packages | {path.stem: path for folder in folders for path in folder.glob("[!_]*.py")}


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file, parsed anew only if the file has changed."""
    state = path.stat()
    return _parsed(path, state.st_mtime_ns, state.st_size)


@functools.cache
def _parsed(path: Path, mtime_ns: int, size: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _is_plugin(kind: str, tree: ast.Module) -> bool:
    """Tell a plugin from a file that plugins share: it defines the first two names itself, imports do not count."""
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return defined.issuperset(KINDS[kind][:2])
