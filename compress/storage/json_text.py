"""Read JSON that others have written, with limits on what it may cost, and check the sizes that a config.json has.

A module tree of a billion layers, or a table for 2^40 positions, would take the machine's memory although no weight is
read. No model has more layers than tensors, and none is wider than its largest tensor has numbers.

transformers answers an unknown quantization method with a warning, and fills what it does not find with random numbers.
config.json therefore names, as the file of the weights ("transformers_weights"), a sentence: transformers raises a
ValueError that ends with it. Where this package is installed the key is taken away before it is read (runtime/hf.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from compress.errors import CheckpointError, shown

TEXT_LIMIT = 100 << 20  # bytes; the safetensors library refuses larger headers too
CONTAINERS = 2_000_000  # lists and objects: each costs some 100 bytes of memory
MAX_DEPTH = 64  # lists and objects in each other
MAX_DIGITS = 40  # an integer has no more
LAYER_KEYS = re.compile(r"(layers?|blocks?|depths?|stages)$")
COUNT_KEYS = re.compile(r"(heads?|experts?|groups?|labels?|codebooks?)$")
SIZE_KEYS = re.compile(
    r"(size|dim|rank|width|features|channels|d_model|d_ff|d_kv|embd?|inner"
    r"|positions?|embeddings|ctx|seq_len|seq_length|context_length)$"
)
# What any configuration may speak of, because parts of it may be unused.
SPARE_LAYERS, SPARE_COUNT, SPARE_SIZE = 128, 1 << 15, 1 << 24


def loads(raw: bytes | str, is_strict: bool = False) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises ValueError, with the reason in one line, for what is not JSON, and for JSON that is too large, too deep, has
    integers of more digits than anything needs, or text that is not Unicode (half of a surrogate pair). is_strict:
    also for names that stand twice in an object, and for numbers that other readers refuse or read in another way (NaN,
    Infinity, 1e999, -0).
    """
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    if len(text) > TEXT_LIMIT:
        raise ValueError(f"more than {TEXT_LIMIT >> 20} MiB")
    if text.count("[") + text.count("{") > CONTAINERS:
        raise ValueError(f"more than {CONTAINERS:,} lists and objects")
    try:
        value = json.loads(text, **(STRICT if is_strict else PYTHONS))
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from error
    _check_depth(value)
    if re.search(r"\\u[dD][89a-fA-F]", text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # UnicodeEncodeError is a ValueError
    return value


class Lines(str):
    """Stand in a layout for text of several lines, in which any character may be."""


class Maybe(NamedTuple):
    """Stand in a layout for a value that may be null, else is like the layout in it; `is_new`: that may be absent."""

    layout: Any
    is_new: bool = False  # older files have no such key


INTEGER, NUMBER, TEXT, OBJECT = (int,), (int, float), (str,), dict[str, Any]()  # layouts, see `mismatch`
SOME, LINES = (*NUMBER, type(None)), (Lines,)


def mismatch(value: Any, layout: Any, where: str = "it") -> str | None:
    """Return in a few words what is not as `layout` says, None if all is.

    layout: types, of which a value must be one; [layout of every item]; {key: layout of its value}, where other keys
    may stand beside; {str: layout of every value that no key names}; `Maybe`. Texts must be printable, but for LINES.
    """
    if isinstance(layout, Maybe):
        return None if value is None else mismatch(value, layout.layout, where)
    if isinstance(layout, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        return next(filter(None, (mismatch(item, layout[0], where) for item in value)), None)
    if isinstance(layout, dict):
        if not isinstance(value, dict):
            return f"{where} is no object"
        if str in layout:
            named = {key: inner for key, inner in layout.items() if key is not str}
            layout = {**dict.fromkeys(value, layout[str]), **named}
        missing = [key for key in layout if key not in value]
        if needed := [key for key in missing if not (isinstance(layout[key], Maybe) and layout[key].is_new)]:
            return f"{where} has no {needed[0]}"
        return next(filter(None, (mismatch(value.get(key), inner, shown(key)) for key, inner in layout.items())), None)
    if isinstance(value, str) and Lines in layout:
        return None
    if type(value) not in layout or (isinstance(value, str) and not value.isprintable()):
        return f"{where} is {shown(value)}"
    return None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _strict_integer(digits: str) -> int:
    return _refuse(digits) if digits == "-0" else _integer(digits)


def _strict_number(digits: str) -> float:
    return value if math.isfinite(value := float(digits)) else _refuse(digits)


def _refuse(word: str) -> Any:
    raise ValueError(f"it has {shown(word)}, which is no number of JSON")


def _strict_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict[str, Any]()
    for name, inner in pairs:
        if name in value:
            raise ValueError(f"it has {shown(name)} twice")
        value[name] = inner
    return value


PYTHONS: dict[str, Any] = {"parse_int": _integer}  # what json.loads takes
STRICT: dict[str, Any] = {
    "parse_int": _strict_integer,
    "parse_float": _strict_number,
    "parse_constant": _refuse,
    "object_pairs_hook": _strict_object,
}


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for outer in level
            if isinstance(outer, dict | list)
            for child in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def check_sizes(config: Mapping[str, Any], where: str, tensors: int, largest: int) -> None:
    """Raise CheckpointError, which begins with `where`, for a size that no stored tensor bears out.

    tensors: how many are stored; largest: numbers in the largest of them.
    """
    stored = f"{tensors:,} tensors are stored, the largest of {largest:,} numbers"
    limits = (
        (LAYER_KEYS, max(tensors, SPARE_LAYERS)),
        (COUNT_KEYS, max(tensors, SPARE_COUNT)),
        (SIZE_KEYS, max(largest, SPARE_SIZE)),
    )
    sizes = {key: value for key, value in config.items() if key != "quantization_config"}  # which is about packing
    for key, value in _numbers(sizes):
        limit = next((limit for pattern, limit in limits if pattern.search(key)), None)
        if limit is not None and not value <= limit:
            raise CheckpointError(
                f"{where} says {shown(key)} {shown(value)}, but {stored}; they are of two models, download both again"
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield the key and the value of every number, those in inner tables and lists included."""
    for key, value in config.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield from _numbers(item)
            elif isinstance(item, int | float):
                yield key, item


NOTICE_KEY = "transformers_weights"
NOTICE = "the weights are packed by compress, so run `pip install compress-llm` and load the model again"


def add_notice(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json with the notice."""
    return {**config, NOTICE_KEY: NOTICE}


def remove_notice(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json without the notice; a name of a file stays."""
    return {key: value for key, value in config.items() if key != NOTICE_KEY or value != NOTICE}
