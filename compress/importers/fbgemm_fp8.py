"""Read float8 weights with a scale for each row: W[i, j] = codes[i, j] * weight_scale[i], in float32, rounded once."""

from __future__ import annotations

from compress.importers import options, scaled
from compress.importers.source import CheckpointSource
from compress.storage.checkpoint import Readable

OPTIONS: options.Options = {**options.PLAIN_MODULES, "activation_scale_ub": options.NUMBER}


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    return "fp8 by rows"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one whose scales are missing or do not fit."""
    weights: dict[str, Readable] = {}
    for name in [name for name, stored in source.stored.items() if stored.dtype in scaled.FLOAT8]:
        codes = scaled.plain(source.take(name))
        scale = source.take(f"{name}_scale", scaled.FLOATS)
        weights[name] = scaled.weight(source, name, codes, scaled.ScaleGrid(scale), source.dtype)
    source.drop(*scaled.RUNTIME_ENDINGS, ".input_scale_ub")
    return weights
