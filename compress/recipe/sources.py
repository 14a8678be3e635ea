"""Find recipes by name or file, and make one tree of several: `extends`, `vq2bit+kv2`, files of --set.

    extends: int4              # a built-in recipe, a file beside this one, or several as `vq2bit+kv2`
    quantize: {bits: 3}        # over what int4 says: keys are added to its blocks or replace theirs

In a file over another one a list replaces the list, a block that names another `method` replaces the block, and a
section that is `null` takes the section away. What a recipe says about itself is not inherited.

`A+B` puts recipes of different sections side by side, such as one of weights and one of a cache. Files of --set lie
over that in their order, and `key=value` over all of them (compress/recipe/read.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yaml import MappingNode, Node, ScalarNode

from compress import plugins
from compress.errors import RecipeError, shown
from compress.recipe.schema import EXTENDS, RENAMED, SETTING_KEYS, TEXT_OF_ACCEPTANCE, TOP_KEYS
from compress.recipe.yaml import (
    OVERRIDE,
    TAG,
    Entries,
    check_keys,
    compose,
    error_at,
    is_null,
    mapping,
    plain,
    rename,
    start,
    value,
)
from compress.storage.files import open_regular

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

MAX_FILE_NBYTES = 16 << 20
MAX_CHAIN = 16  # recipes that extend each other
PACKAGE, PAPERS = "compress.recipes", "papers"
SUFFIXES = (".yaml", ".yml")


def names() -> list[str]:
    """Return the names of the built-in recipes, sorted, those of papers behind the others."""
    return [*_names_in(files(PACKAGE)), *_names_in(files(PACKAGE) / PAPERS)]


def is_paper(name: str) -> bool:
    """Return whether a built-in recipe lies in recipes/papers, which holds what is not on the frontier."""
    return name in _names_in(files(PACKAGE) / PAPERS)


def text(name: str) -> str:
    """Return the YAML of a built-in recipe, comments included."""
    if name not in names():
        raise RecipeError(_unknown(name))
    folder = files(PACKAGE) / PAPERS if is_paper(name) else files(PACKAGE)
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def ambiguous(name: str) -> str | None:
    """Return a note that a built-in recipe is taken where a file here has its name, too; None without such a file."""
    if name not in names() or not Path(name).is_file():
        return None
    return f"{name} is the built-in recipe; the file of this name is ./{name}"


def data(name: str) -> dict[str, Any]:
    """Return a built-in recipe as plain data, with what it extends."""
    marked = plain(_only(tree(name)[1], ("name", "description", *SETTING_KEYS)), "the recipe")
    return dict(json.loads(json.dumps(marked)))  # texts without what tells unquoted ones apart


def tree(name_or_file: str, folder: Path | None = None, chain: Sequence[str] = ()) -> tuple[str, Node]:
    """Return the name and the tree of a recipe: built-in, in a file, or several of these as `A+B`.

    folder: that relative paths start from; None: the working directory. chain: the recipes that extend this one.
    Raises RecipeError.
    """
    path = (folder or Path()) / name_or_file
    if not name_or_file:
        raise RecipeError(_unknown(name_or_file))
    if name_or_file in names():
        place = f"{name_or_file}.yaml"
        return name_or_file, _resolve(compose(text(name_or_file), place), place, None, chain)
    if os.path.isfile(path):  # False for what no file can be called, too
        root = _from_file(path)
        return path.stem, _resolve(root, os.path.realpath(path), path.parent, chain)
    first, plus, last = name_or_file.rpartition("+")
    if plus and not os.path.isdir(path):
        return _side_by_side(tree(first, folder, chain), tree(last, folder, chain))
    if os.path.isdir(path):
        raise RecipeError(f"{name_or_file} is a directory; give a YAML file, or a built-in recipe (`compress recipes`)")
    raise RecipeError(f"there is no such file, and {_unknown(name_or_file)}")


def is_file_of_set(override: str) -> bool:
    """Return whether a value of --set is a file that lies over the recipe, not `key=value`."""
    return "=" not in override and override.endswith(SUFFIXES)


def lay_over(root: Node, file: str) -> Node:
    """Return the tree of a recipe with that of a file over it; RecipeError."""
    if not os.path.isfile(file):
        raise RecipeError(f"{OVERRIDE}{file}: there is no such file; give a YAML file, or key=value")
    return _over(root, tree(file)[1])


def _resolve(root: Node, place: str, folder: Path | None, chain: Sequence[str]) -> Node:
    """Return the tree of a recipe over that of the recipe that it extends, if any."""
    if not isinstance(root, MappingNode):
        return root
    rename(root, RENAMED)
    entries = mapping(root, "a recipe")
    if place in chain:
        raise error_at(root, f"extends itself: {' -> '.join(Path(each).name for each in (*chain, place))}")
    if len(chain) >= MAX_CHAIN:
        raise error_at(root, f"more than {MAX_CHAIN} recipes extend each other; write one of them out")
    root = _with_path(root, entries, folder)
    if EXTENDS not in entries:
        return root
    at, _ = entries[EXTENDS]
    base = value(entries, EXTENDS, str)
    try:
        _, below = tree(base, folder, (*chain, place))
    except RecipeError as error:
        raise error_at(at, f"extends {shown(base)}: {error}") from error
    return _over(_only(below, SETTING_KEYS), without(root, EXTENDS))


def _with_path(root: MappingNode, entries: Entries, folder: Path | None) -> MappingNode:
    """Return the tree of a file whose text of acceptance is named as seen from the working directory."""
    section, key = TEXT_OF_ACCEPTANCE
    block = entries[section][1] if section in entries else None
    if folder is None or not isinstance(block, MappingNode):
        return root

    def locate(name: Node, content: Node) -> Node:
        if name.value != key or not isinstance(content, ScalarNode) or content.tag != f"{TAG}str":
            return content
        return ScalarNode(content.tag, str(folder / content.value), content.start_mark, content.end_mark)

    changed = _like(block, [(name, locate(name, content)) for name, content in block.value])
    return _like(root, [(name, changed if content is block else content) for name, content in root.value])


def _over(below: Node, above: Node) -> Node:
    """Return a tree over another one; both are of whole recipes."""
    if not isinstance(below, MappingNode) or not isinstance(above, MappingNode):
        return above
    merged = _merge(below, above)
    gone = {key for key, (_, content) in mapping(above, "a recipe").items() if is_null(content)}
    return without(merged, *gone & {*SETTING_KEYS})


def _merge(below: MappingNode, above: MappingNode) -> MappingNode:
    """Return a block with the keys of another one over its own; one that names another method replaces it."""
    first, second = mapping(below, "a block"), mapping(above, "a block")
    methods = [entries["method"][1].value for entries in (first, second) if "method" in entries]
    if len(methods) == 2 and methods[0] != methods[1]:
        return above
    merged = dict(first)
    for key, (at, content) in second.items():
        old = first[key][1] if key in first else None
        both = isinstance(old, MappingNode) and isinstance(content, MappingNode)
        merged[key] = (at, _merge(old, content) if both else content)  # type: ignore[arg-type]
    return _like(above, list(merged.values()))


def _side_by_side(first: tuple[str, Node], second: tuple[str, Node]) -> tuple[str, Node]:
    """Return two recipes as one; RecipeError for a section that both have and that differs."""
    name = f"{first[0]}+{second[0]}"
    sides = [mapping(root, "a recipe") for _, root in (first, second)]
    for (own, _), entries in zip((first, second), sides, strict=True):
        check_keys(entries, TOP_KEYS, f"the recipe {own}")
    shared = [key for key in SETTING_KEYS if all(key in entries for entries in sides)]
    unequal = [key for key in shared if len({str(plain(entries[key][1], key)) for entries in sides}) > 1]
    if unequal:
        raise RecipeError(
            f"{name}: {first[0]} and {second[0]} both have {', '.join(unequal)}; put a recipe of weights beside one of "
            "a cache, or write a file that extends one of them"
        )
    pairs = [pair for entries in reversed(sides) for key, pair in entries.items() if key in SETTING_KEYS]
    mark = start(f"{name}.yaml")
    said = [ScalarNode(f"{TAG}str", each, mark, mark) for each in ("description", f"{first[0]} and {second[0]}")]
    by_key = {pair[0].value: pair for pair in pairs}
    return name, MappingNode(f"{TAG}map", [(said[0], said[1]), *by_key.values()], mark, mark)


def _only(root: Node, keys: Sequence[str]) -> Node:
    """Return a tree with these keys alone."""
    assert isinstance(root, MappingNode)
    return _like(root, [pair for pair in root.value if pair[0].value in keys])


def without(root: MappingNode, *keys: str) -> MappingNode:
    """Return a tree without some keys."""
    return _like(root, [pair for pair in root.value if pair[0].value not in keys])


def _like(node: MappingNode, pairs: list[tuple[Node, Node]]) -> MappingNode:
    """Return a block with other keys and values in the place of one."""
    return MappingNode(node.tag, pairs, node.start_mark, node.end_mark)


def _names_in(folder: Traversable) -> list[str]:
    """Return the names of the recipes in a folder, sorted; none where there is no such folder."""
    entries = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml"))


def _unknown(name: str) -> str:
    """Return the error for a recipe that does not exist, with the names that are close to it."""
    close = plugins.close_words(name, names(), 3)
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    return f"unknown recipe {shown(name)}; {guess}`compress recipes --all` lists them"


def _from_file(path: Path) -> Node:
    """Return the tree of a file; one that is no recipe but text is refused without a word of it in the error."""
    try:
        with open_regular(path) as stream:
            raw = stream.read(MAX_FILE_NBYTES + 1)
        content = raw.decode("utf-8")
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}; give a YAML file") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"cannot read the recipe {path}: it is not utf-8 text; give a YAML file") from error
    if len(raw) > MAX_FILE_NBYTES:
        raise RecipeError(f"{path} is not a recipe: it has more than {MAX_FILE_NBYTES >> 20} MiB; give a YAML file")
    root = compose(content, str(path))
    if isinstance(root, ScalarNode) and root.value:
        raise error_at(root, "a recipe must be keys with values, found text; give a YAML file")
    return root
