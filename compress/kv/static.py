"""Check the calibrated tensors of a cache before a codec is built on them, and read what heads a model has.

They are named "layers.<layer>.<keys|values>.<name>". Compiled code trusts their shapes, so that each is compared with
what its codec says of it: `specs(config, spec)`, names, shapes and types, and `check(static, config, spec)`, values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from compress import plugins
from compress.errors import RecipeError
from compress.kv.codec import Spec
from compress.kv.settings import KINDS, Coding, Codings, Reading, reading_layers
from compress.numerics import checks


def of(static: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
    """Return the tensors of one codec, by the names that it gives them."""
    prefix = _prefix(spec)
    return {name.removeprefix(prefix): tensor for name, tensor in static.items() if name.startswith(prefix)}


def of_checked(settings: Coding | Reading, static: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
    """Return what `of` does; raise RecipeError where these are not the tensors of the settings."""
    tensors = of(static, spec)
    try:
        check(settings, spec, tensors)
    except ValueError as error:
        raise RecipeError(
            f"{spec.where}: {settings.method} is calibrated, but {error}; calibrate the cache with these settings"
        ) from error
    return tensors


def check(settings: Coding | Reading, spec: Spec, own: Mapping[str, Tensor]) -> None:
    """Check the tensors that one codec reads, or by which a layer chooses tokens, whatever else there is.

    Raises ValueError, which begins with the name of a tensor.
    """
    specs = _specs(settings, spec)
    read = {name: tensor for name, tensor in own.items() if name in specs}
    checks.check_specs(read, specs)
    for name, tensor in read.items():
        if tensor.is_floating_point():
            checks.finite(name, tensor)
    check_values = getattr(_plugin(settings, spec), "check", None)
    if check_values is not None and read:
        check_values(read, settings.config, spec)


def check_names(
    codings: Codings,
    heads: tuple[int, int, int],
    tensors: Mapping[str, Any],
    is_certain: bool,
    reading: Reading | None = None,
) -> None:
    """Check the names, shapes and types that a file lists for the layers of a model, before any of it is read.

    heads: of queries, of keys, and the width of a head; unless these are certain, names are checked and nothing else.
    tensors: whatever has a `shape` and a `dtype`, by full name. Raises ValueError, which begins with such a name.
    """
    expected = {}
    for settings, spec in _calibrated_places(codings, heads, reading):
        for name, (shape, dtype) in _specs(settings, spec).items():
            full = _prefix(spec) + name
            held = tensors.get(full) if not is_certain else None
            expected[full] = (shape, dtype) if held is None else (tuple(held.shape), held.dtype)
    checks.check_specs(tensors, expected)


def check_all(
    codings: Codings, heads: tuple[int, int, int], static: Mapping[str, Tensor], reading: Reading | None = None
) -> None:
    """Check the tensors of all layers of a model. Raises ValueError, which begins with the full name of a tensor."""
    for settings, spec in _calibrated_places(codings, heads, reading):
        try:
            check(settings, spec, of(static, spec))
        except ValueError as error:
            raise ValueError(f"{_prefix(spec)}{error}") from error


def _calibrated_places(
    codings: Codings, heads: tuple[int, int, int], reading: Reading | None
) -> Iterator[tuple[Coding | Reading, Spec]]:
    """Yield the settings and the place of each codec, then of all that chooses tokens."""
    queries, count, width = heads
    layers = range(len(codings))
    places: list[tuple[Any, str, int]] = [(codings[index][kind], kind, index) for index in layers for kind in KINDS]
    places += [(reading, "read", index) for index in reading_layers(codings) if reading is not None]
    for settings, kind, index in places:
        yield settings, Spec(kind, index, len(codings), count, width, max(1, queries // count))  # type: ignore[arg-type]


def _plugin(settings: Coding | Reading, spec: Spec) -> Any:
    return plugins.load("read" if spec.kind == "read" else "kv", settings.method)


def _specs(settings: Coding | Reading, spec: Spec) -> dict[str, checks.Spec]:
    specs = getattr(_plugin(settings, spec), "specs", None)  # none: it is not calibrated
    return {} if specs is None else dict(specs(settings.config, spec))


def _prefix(spec: Spec) -> str:
    return f"layers.{spec.layer}.{spec.kind}."


def head_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of query heads, of KV heads, and the width of a head, as a configuration states them."""
    decoder = config.get_text_config(decoder=True)
    queries = decoder.num_attention_heads
    width = getattr(decoder, "head_dim", None) or decoder.hidden_size // queries
    return queries, getattr(decoder, "num_key_value_heads", None) or queries, width


def states_heads(config: Any) -> bool:
    """Return whether `head_shape` reads all that a configuration has about the heads of its keys.

    Where it has further settings (latent keys, layers with heads of their own, all queries sharing a head), the first
    keys that come tell their shape.
    """
    decoder = config.get_text_config(decoder=True)
    read = {"num_attention_heads", "num_key_value_heads", "head_dim", *decoder.attribute_map.values()}
    return not any(
        word in key for key in decoder.to_dict() if key not in read for word in ("head", "kv", "multi_query")
    )
