"""Read float8 weights with a scale for each row: W[i, j] = codes[i, j] * weight_scale[i], in float32, rounded once."""

from __future__ import annotations

from compress.importers import options, scaled
from compress.importers.source import Source
from compress.storage.checkpoint import Readable

OPTIONS: options.Options = {**options.MODULES, "activation_scale_ub": options.NUMBER}


def describe(source: Source) -> str:
    """Return how the weights are stored."""
    return "fp8 by rows"


def tensors(source: Source) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one whose scales are missing or do not fit."""
    found: dict[str, Readable] = {}
    for name in [name for name, stored in source.stored.items() if stored.dtype in scaled.FLOAT8]:
        codes = scaled.plain(source.take(name))
        scale = source.take(f"{name}_scale", scaled.FLOATS)
        found[name] = scaled.weight(source, name, codes, scaled.Scales(scale), source.dtype)
    source.drop(*scaled.AUXILIARY, ".input_scale_ub")
    return found
