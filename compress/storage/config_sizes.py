"""Compare the sizes in a model's configuration with what is stored, before anything is built by them.

A module tree of a billion layers, or a table for 2^40 positions, would take the machine's memory although no weight is
read. No model has more layers than tensors, and none is wider than its largest tensor has numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from compress.errors import CheckpointError, shown

LAYERS = re.compile(r"(layers?|blocks?|depths?|stages)$")
COUNTS = re.compile(r"(heads?|experts?|groups?|labels?|codebooks?)$")
SIZES = re.compile(
    r"(size|dim|rank|width|features|channels|d_model|d_ff|d_kv|embd?|inner"
    r"|positions?|embeddings|ctx|seq_len|seq_length|context_length)$"
)
# What any configuration may speak of, because parts of it may be unused.
SPARE_LAYERS, SPARE_COUNT, SPARE_SIZE = 128, 1 << 15, 1 << 24


def check(config: Mapping[str, Any], where: str, tensors: int, largest: int) -> None:
    """Raise CheckpointError, which begins with `where`, for a size that no stored tensor bears out.

    tensors: how many are stored; largest: numbers in the largest of them.
    """
    stored = f"{tensors:,} tensors are stored, the largest of {largest:,} numbers"
    limits = (
        (LAYERS, max(tensors, SPARE_LAYERS)),
        (COUNTS, max(tensors, SPARE_COUNT)),
        (SIZES, max(largest, SPARE_SIZE)),
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
