"""Check the calibrated tensors of a cache before a codec is built on them.

They are named "layers.<layer>.<keys|values>.<name>". Compiled code trusts their shapes, so that each is compared with
what its codec says of it: `specs(config, spec)`, names, shapes and types, and `check(static, config, spec)`, values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from compress import plugins
from compress.kv.codec import Spec
from compress.kv.settings import KINDS, Coding, Codings, Reading, reading_layers
from compress.numerics import checks


def of(static: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
    """Return the tensors of one codec, by the names that it gives them."""
    prefix = _prefix(spec)
    return {name.removeprefix(prefix): tensor for name, tensor in static.items() if name.startswith(prefix)}


def check(coding: Coding, spec: Spec, own: Mapping[str, Tensor]) -> None:
    """Check the tensors that one codec reads, whatever else there is.

    Raises ValueError, which begins with the name of a tensor.
    """
    _checked(_specs("kv", coding, spec), plugins.load("kv", coding.method), coding.config, spec, own)


def check_reader(reading: Reading, spec: Spec, own: Mapping[str, Tensor]) -> None:
    """Check the tensors by which a layer chooses the tokens that it reads; raise ValueError as `check` does."""
    _checked(_specs("read", reading, spec), plugins.load("read", reading.method), reading.config, spec, own)


def _checked(specs: Mapping[str, checks.Spec], plugin: Any, config: Any, spec: Spec, own: Mapping[str, Tensor]) -> None:
    read = {name: tensor for name, tensor in own.items() if name in specs}
    checks.specified(read, specs)
    for name, tensor in read.items():
        if tensor.is_floating_point():
            checks.finite(name, tensor)
    check_values = getattr(plugin, "check", None)
    if check_values is not None and read:
        check_values(read, config, spec)


def check_names(
    codings: Codings,
    heads: tuple[int, int, int],
    tensors: Mapping[str, Any],
    is_certain: bool,
    reading: Reading | None = None,
) -> None:
    """Check what a file says that it holds for the layers of a model, before any of it is read.

    heads: of queries, of keys, and the width of a head; unless these are certain, names are checked and nothing else.
    tensors: whatever has a `shape` and a `dtype`, by full name. Raises ValueError, which begins with such a name.
    """
    expected = {}
    named = [(_specs("kv", coding, spec), spec) for coding, spec in _codecs(codings, heads)]
    named += [(_specs("read", own, spec), spec) for own, spec in _readers(codings, heads, reading)]
    for specs, spec in named:
        for name, (shape, dtype) in specs.items():
            full = _prefix(spec) + name
            held = tensors.get(full) if not is_certain else None
            expected[full] = (shape, dtype) if held is None else (tuple(held.shape), held.dtype)
    checks.specified(tensors, expected)


def check_all(
    codings: Codings, heads: tuple[int, int, int], static: Mapping[str, Tensor], reading: Reading | None = None
) -> None:
    """Check the tensors of all layers of a model. Raises ValueError, which begins with the full name of a tensor."""
    calls = [(partial(check, coding), spec) for coding, spec in _codecs(codings, heads)]
    calls += [(partial(check_reader, own), spec) for own, spec in _readers(codings, heads, reading)]
    for call, spec in calls:
        try:
            call(spec, of(static, spec))
        except ValueError as error:
            raise ValueError(f"{_prefix(spec)}{error}") from error


def _codecs(codings: Codings, heads: tuple[int, int, int]) -> Iterator[tuple[Coding, Spec]]:
    queries, count, width = heads
    for index, layer in enumerate(codings):
        for kind in KINDS:
            yield layer[kind], Spec(kind, index, len(codings), count, width, max(1, queries // count))  # type: ignore[arg-type]


def _readers(codings: Codings, heads: tuple[int, int, int], reading: Reading | None) -> Iterator[tuple[Reading, Spec]]:
    queries, count, width = heads
    for index in reading_layers(codings) if reading is not None else ():
        assert reading is not None
        yield reading, Spec("read", index, len(codings), count, width, max(1, queries // count))


def _specs(kind: str, settings: Coding | Reading, spec: Spec) -> dict[str, checks.Spec]:
    specs = getattr(plugins.load(kind, settings.method), "specs", None)  # none: it is not calibrated
    return {} if specs is None else dict(specs(settings.config, spec))


def _prefix(spec: Spec) -> str:
    return f"layers.{spec.layer}.{spec.kind}."
