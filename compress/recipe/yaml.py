"""Read YAML as typed values; every error names the file, the line, the key and what would be right.

Works on the tree of YAML nodes, because a node knows where it was written. Types are those of dataclass fields: bool,
int, float, str, None, Literal, unions of them, and tuple[type, ...] for lists. Nothing is converted silently: "4" is no
integer, true is no integer, a null is no text; an integer is a float. Keys that occur twice are errors, so are tags.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml
from yaml import AliasEvent, MappingNode, Mark, Node, ScalarNode, SequenceNode

from compress.errors import RecipeError, first_line, shown
from compress.plugins import MISMATCH, Unquoted, expected, typed, unknown

Entries = dict[str, tuple[Node, Node]]  # key -> the node of the key, the node of its value

OVERRIDE = "--set "  # begins the source of what was not written in a file
TAG = "tag:yaml.org,2002:"
MAX_DEPTH = 32  # lists and blocks in each other
# Keys and values of a recipe; those behind an alias count wherever it stands.
MAX_NODES = 100_000


class _Loader(yaml.SafeLoader):
    """Compose a tree of bounded size and depth; RecipeError where the text goes beyond, before it is read on."""

    def __init__(self, content: str, source: str) -> None:
        super().__init__(content)
        self.name = source  # goes into the marks of all nodes
        self.depth = 0
        self.sizes: dict[int, int] = {}  # id of a finished node -> keys and values in it

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()
        is_alias = isinstance(event, AliasEvent)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecipeError(f"{_where(event.start_mark)}: nested more than {MAX_DEPTH} deep; no recipe needs that")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if is_alias and id(node) not in self.sizes:
            raise RecipeError(f"{_where(event.start_mark)}: an alias inside of what it stands for; write it out")
        if node is not None and not is_alias:
            self.sizes[id(node)] = 1 + sum(self.sizes[id(child)] for child in _children(node))
        if self.sizes.get(id(node), 0) > MAX_NODES:
            where = _where(event.start_mark)
            raise RecipeError(f"{where}: more than {MAX_NODES:,} keys and values; shorten the recipe")
        return node


def _children(node: Node) -> Sequence[Node]:
    if isinstance(node, MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, SequenceNode) else ()


def compose(content: str, source: str) -> Node:
    """Return the root of the one document in `content`, a null node if it is empty; `source` names it in messages."""
    try:
        root = _Loader(content, source).get_single_node()
    except yaml.MarkedYAMLError as error:
        reason = " ".join(filter(None, (error.context, error.problem)))
        hint = "; put a pattern that begins with * in quotes" if "alias" in reason else ""
        mark = error.problem_mark or start(source)
        raise RecipeError(f"{_where(mark)}: not valid YAML: {first_line(Exception(reason))}{hint}") from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise RecipeError(f"{source}: not valid YAML: {first_line(error)}") from error
    return root or ScalarNode(f"{TAG}null", "", start(source), start(source))


def start(source: str) -> Mark:
    """Return the place of the first character of `source`."""
    return Mark(source, 0, 0, 0, None, 0)


def error_at(node: Node, message: str) -> RecipeError:
    return RecipeError(f"{_where(node.start_mark)}: {message}")


def is_null(node: Node) -> bool:
    return node.tag == f"{TAG}null"


def is_override(node: Node) -> bool:
    return node.start_mark.name.startswith(OVERRIDE)


def mapping(node: Node, where: str) -> Entries:
    """Return the keys and values of a block; `where` names it in messages."""
    if not isinstance(node, MappingNode) or node.tag != f"{TAG}map":
        raise error_at(node, f"{where} must be keys with values, found {describe_node(node)}")
    entries: Entries = {}
    for key, content in node.value:
        if not isinstance(key, ScalarNode):
            raise error_at(key, f"a key of {where} must be a word, found {describe_node(key)}")
        if key.value in entries:
            first = _where(entries[key.value][0].start_mark)
            raise error_at(key, f"{where} has {shown(key.value)} twice, first at {first}")
        entries[key.value] = (key, content)
    return entries


def check_keys(entries: Entries, known: Sequence[str], where: str) -> None:
    for key, (at, _) in entries.items():
        if key not in known:
            raise error_at(at, f"{where}: {unknown('key', key, known)}")


def sequence(entries: Entries, key: str) -> list[Node]:
    """Return the nodes of a list; none if the key is absent."""
    if key not in entries:
        return []
    at, node = entries[key]
    if not isinstance(node, SequenceNode) or node.tag != f"{TAG}seq":
        raise error_at(at, f"{key} must be a list, found {describe_node(node)}")
    return node.value


def value(entries: Entries, key: str, hint: Any, default: Any = None) -> Any:
    """Return the value of a key as the type `hint`; `default` if the key is absent."""
    if key not in entries:
        return default
    at, node = entries[key]
    if isinstance(node, SequenceNode):  # of several types a list is the one that takes it
        hint = next((each for each in typing.get_args(hint) if typing.get_origin(each) is tuple), hint)
    if typing.get_origin(hint) is tuple:
        item, _ = typing.get_args(hint)
        return tuple(value({key: (node, node)}, key, item) for node in sequence(entries, key))
    result = typed(_scalar(node), hint)
    if result is MISMATCH:
        raise error_at(at, f"{key} must be {expected(hint)}, found {describe_node(node)}")
    return result


def plain(node: Node, where: str) -> Any:
    """Return a node as plain data; RecipeError for a date, a tag or an ambiguous number."""
    if isinstance(node, SequenceNode) and node.tag == f"{TAG}seq":
        return [plain(item, where) for item in node.value]
    if isinstance(node, MappingNode):
        return {key: plain(content, f"{where}.{key}") for key, (_, content) in mapping(node, where).items()}
    result = _scalar(node)
    if result is MISMATCH:
        raise error_at(node, f"{where} cannot be {describe_node(node)}")
    return result


def describe_node(node: Node) -> str:
    """Return a node in words."""
    tag = node.tag.removeprefix(TAG)
    if tag == "str":
        return f"the text {shown(node.value)}"
    words = {"map": "keys with values", "seq": "a list", "null": "nothing"}
    return words.get(tag) or f"{shown(node.value)[1:-1] if isinstance(node, ScalarNode) else 'values'} ({tag})"


def rename(root: Node, renamed: Mapping[tuple[str, str], str]) -> None:
    """Give the old keys of a recipe's sections their new names, in place; say so on stderr."""
    for key, block in root.value if isinstance(root, MappingNode) else ():
        for inner, _ in block.value if isinstance(block, MappingNode) else ():
            if new := renamed.get((str(key.value), str(inner.value))):
                say_renamed(_where(inner.start_mark), f"{key.value}.{inner.value}", new)
                inner.value = new


def say_renamed(where: str, old: str, new: str) -> None:
    print(f"compress: {where}: {old} is now called {new}", file=sys.stderr)


def replace_at(node: Node | None, path: Sequence[str], change: Callable[[Any], Node], source: str) -> Node:
    """Return a copy of the tree with `change(old node or None)` at `path`, with the blocks on the way."""
    if not path:
        return change(node)
    head, rest = path[0], path[1:]
    if isinstance(node, SequenceNode) and head.isdecimal() and int(head) < len(node.value):
        items = list(node.value)
        items[int(head)] = replace_at(items[int(head)], rest, change, source)
        return SequenceNode(node.tag, items, node.start_mark, node.end_mark)
    if node is not None and not isinstance(node, MappingNode):
        size = f" of {len(node.value)}, counted from 0" if isinstance(node, SequenceNode) else ""
        raise RecipeError(f"{source}: there is no {shown(head)} in {describe_node(node)}{size}")
    mark = start(source)
    node = node or MappingNode(f"{TAG}map", [], mark, mark)
    old = next((content for key, content in node.value if key.value == head), None)
    pairs = [(key, content) for key, content in node.value if key.value != head]
    pairs.append((ScalarNode(f"{TAG}str", head, mark, mark), replace_at(old, rest, change, source)))
    return MappingNode(node.tag, pairs, node.start_mark, node.end_mark)


def _where(mark: Mark) -> str:
    return mark.name if mark.name.startswith(OVERRIDE) else f"{mark.name}, line {mark.line + 1}"


def _scalar(node: Node) -> Any:
    """Return what YAML takes a scalar for; MISMATCH for lists, blocks, dates, tags and numbers like 017 or 1:30."""
    readers: dict[str, Callable[[str], Any]] = {
        f"{TAG}int": lambda word: int(word, 0),
        f"{TAG}bool": lambda word: yaml.SafeLoader.bool_values[word.lower()],
        f"{TAG}null": lambda word: None,
        f"{TAG}float": float,
        f"{TAG}str": Unquoted if isinstance(node, ScalarNode) and node.style is None else str,
    }
    try:
        return readers[node.tag](node.value)
    except (KeyError, ValueError):
        return MISMATCH
