"""Check the calibrated tensors of a cache before a codec is built on them.

They are named "layers.<layer>.<keys|values>.<name>". Compiled code trusts their shapes, so that each is compared with
what its codec says of it: `specs(config, spec)`, names, shapes and types, and `check(static, config, spec)`, values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from compress import plugins
from compress.kv.codec import Spec
from compress.kv.settings import KINDS, Coding, Codings
from compress.numerics import checks


def of(static: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
    """Return the tensors of one codec, by the names that it gives them."""
    prefix = _prefix(spec)
    return {name.removeprefix(prefix): tensor for name, tensor in static.items() if name.startswith(prefix)}


def check(coding: Coding, spec: Spec, own: Mapping[str, Tensor]) -> None:
    """Check the tensors that one codec reads, whatever else there is.

    Raises ValueError, which begins with the name of a tensor.
    """
    specs = _specs(coding, spec)
    read = {name: tensor for name, tensor in own.items() if name in specs}
    checks.specified(read, specs)
    for name, tensor in read.items():
        if tensor.is_floating_point():
            checks.finite(name, tensor)
    check_values = getattr(plugins.load("kv", coding.method), "check", None)
    if check_values is not None and read:
        check_values(read, coding.config, spec)


def check_names(codings: Codings, heads: tuple[int, int, int], tensors: Mapping[str, Any], is_certain: bool) -> None:
    """Check what a file says that it holds for the layers of a model, before any of it is read.

    heads: of queries, of keys, and the width of a head; unless these are certain, names are checked and nothing else.
    tensors: whatever has a `shape` and a `dtype`, by full name. Raises ValueError, which begins with such a name.
    """
    expected = {}
    for coding, spec in _codecs(codings, heads):
        for name, (shape, dtype) in _specs(coding, spec).items():
            full = _prefix(spec) + name
            held = tensors.get(full) if not is_certain else None
            expected[full] = (shape, dtype) if held is None else (tuple(held.shape), held.dtype)
    checks.specified(tensors, expected)


def check_all(codings: Codings, heads: tuple[int, int, int], static: Mapping[str, Tensor]) -> None:
    """Check the tensors of all layers of a model. Raises ValueError, which begins with the full name of a tensor."""
    for coding, spec in _codecs(codings, heads):
        try:
            check(coding, spec, of(static, spec))
        except ValueError as error:
            raise ValueError(f"{_prefix(spec)}{error}") from error


def _codecs(codings: Codings, heads: tuple[int, int, int]) -> Iterator[tuple[Coding, Spec]]:
    queries, count, width = heads
    for index, layer in enumerate(codings):
        for kind in KINDS:
            yield layer[kind], Spec(kind, index, len(codings), count, width, max(1, queries // count))  # type: ignore[arg-type]


def _specs(coding: Coding, spec: Spec) -> dict[str, checks.Spec]:
    specs = getattr(plugins.load("kv", coding.method), "specs", None)  # none: it is not calibrated
    return {} if specs is None else dict(specs(coding.config, spec))


def _prefix(spec: Spec) -> str:
    return f"layers.{spec.layer}.{spec.kind}."
