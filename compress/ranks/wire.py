"""Turn values into bytes for other processes, and back; what is received can be data only, never code.

A message is the length of a JSON text, the text, and the bytes of the tensors that it names, one after another. In the
text a value is null, a truth value, a number, a text, or a list that begins with the kind of the value. Objects are
dataclasses and named tuples of this package; nothing of them is called when they are made anew.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGE = "compress."
TEXT_LENGTH_NBYTES = 8  # a little-endian number
SIMPLE = (type(None), bool, int, float, str)
PLURAL: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
SPANS: dict[str, Callable[..., Any]] = {"slice": slice, "range": range}


def encode(value: Any) -> Tensor:
    """Return a value as uint8 [n] on the CPU. Raises TypeError for one that is no data."""
    tensors: list[Tensor] = []
    text = json.dumps(_plain(value, tensors), separators=(",", ":")).encode()
    message = torch.empty(TEXT_LENGTH_NBYTES + len(text) + sum(t.nbytes for t in tensors), dtype=torch.uint8)
    head = len(text).to_bytes(TEXT_LENGTH_NBYTES, "little") + text
    message[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    place = len(head)
    for tensor in tensors:
        message[place : place + tensor.nbytes] = tensor.detach().contiguous().view(-1).view(torch.uint8)
        place += tensor.nbytes
    return message


def decode(message: Tensor, device: torch.device) -> Any:
    """Return the value of a message, uint8 [n]; device: of the tensors that were on a GPU where it was made."""
    length = int.from_bytes(message[:TEXT_LENGTH_NBYTES].numpy().tobytes(), "little")
    text = message[TEXT_LENGTH_NBYTES : TEXT_LENGTH_NBYTES + length].numpy().tobytes()
    return _Decoder(message[TEXT_LENGTH_NBYTES + length :], device).value(json.loads(text))


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) in SIMPLE or isinstance(value, str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", _name(value.dtype), list(value.shape), value.is_cuda]
    if isinstance(value, torch.dtype):
        return ["dtype", _name(value)]
    if isinstance(value, Path):
        return ["path", str(value)]
    return _plain_of_several(value, lambda each: _plain(each, tensors))


def _plain_of_several(value: Any, plain: Callable[[Any], Any]) -> list[Any]:
    kind = type(value)
    if isinstance(value, dict):
        return ["dict", *([plain(key), plain(each)] for key, each in value.items())]
    if isinstance(value, slice | range):
        return [kind.__name__, value.start, value.stop, value.step]
    if kind.__name__ in PLURAL and kind.__module__ == "builtins":
        return [kind.__name__, *map(plain, value)]
    if not kind.__module__.startswith(PACKAGE) or not (hasattr(value, "_fields") or dataclasses.is_dataclass(value)):
        raise TypeError(f"values of {kind.__module__}.{kind.__qualname__} are not sent to other processes")
    return ["object", kind.__module__, kind.__qualname__, *(plain(getattr(value, name)) for name in _fields(kind))]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fields(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a named tuple or a dataclass, which may have been added to it later, too."""
    if issubclass(kind, tuple):
        fields: tuple[str, ...] = kind._fields
        return fields
    return tuple(field.name for field in dataclasses.fields(kind))


class _Decoder:
    """Make values from their plain form; the bytes of tensors are taken in the order in which they come."""

    def __init__(self, raw: Tensor, device: torch.device) -> None:
        self.raw, self.device, self.place = raw, device, 0

    def value(self, plain: Any) -> Any:
        """Return the value. Raises ValueError for what `encode` does not make."""
        if type(plain) in SIMPLE:
            return plain
        kind, *given = plain
        if kind in PLURAL:
            return PLURAL[kind](list(map(self.value, given)))
        if kind in SPANS:
            return SPANS[kind](*given)
        makers: dict[str, Callable[..., Any]] = {
            "dict": lambda *pairs: {self.value(key): self.value(value) for key, value in pairs},
            "path": Path,
            "dtype": _dtype,
            "tensor": self._tensor,
            "object": self._object,
        }
        if kind not in makers:
            raise ValueError(f"{kind!r} is no kind of value")
        return makers[kind](*given)

    def _tensor(self, dtype: str, shape: list[int], is_cuda: bool) -> Tensor:
        known = _dtype(dtype)
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"{shape} is no shape")
        nbytes = math.prod(shape) * known.itemsize
        own = self.raw[self.place : self.place + nbytes].clone()  # aligned, and without the rest of the message
        self.place += nbytes
        return own.view(known).view(shape).to(self.device if is_cuda else "cpu")

    def _object(self, module: str, name: str, *values: Any) -> Any:
        kind = _kind(module, name)
        given = [self.value(each) for each in values]
        if issubclass(kind, tuple):
            return tuple.__new__(kind, given)
        made = object.__new__(kind)
        for field, value in itertools.zip_longest(_fields(kind), given):
            object.__setattr__(made, field, value)
        return made


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of numbers")
    return dtype


def _kind(module: str, name: str) -> Any:
    """Return a dataclass or a named tuple of this package by its name."""
    if not module.startswith(PACKAGE) or "__main__" in module:
        raise ValueError(f"{module} is no module of this package")
    importlib.import_module(module)
    value: Any = sys.modules[module]
    for part in name.split("."):
        value = vars(value).get(part)
    is_data = isinstance(value, type) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields"))
    if not is_data or value.__module__ != module:
        raise ValueError(f"{module}.{name} is no kind of data")
    return value
