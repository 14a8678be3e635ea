"""Check the sizes that a config.json speaks of, and add the notice by which transformers refuses packed weights.

A module tree of a billion layers, or a table for 2^40 positions, would take the machine's memory although no weight is
read. No model has more layers than tensors, and none is wider than its largest tensor has numbers.

transformers answers an unknown quantization method with a warning, and fills what it does not find with random numbers.
config.json therefore names, as the file of the weights ("transformers_weights"), a sentence: transformers raises a
ValueError that ends with it. Where this package is installed the key is taken away before it is read (runtime/hf.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from compress.errors import CheckpointError, shown

LAYER_KEYS = re.compile(r"(layers?|blocks?|depths?|stages)$")
COUNT_KEYS = re.compile(r"(heads?|experts?|groups?|labels?|codebooks?)$")
SIZE_KEYS = re.compile(
    r"(size|dim|rank|width|features|channels|d_model|d_ff|d_kv|embd?|inner"
    r"|positions?|embeddings|ctx|seq_len|seq_length|context_length)$"
)
# What any configuration may speak of, because parts of it may be unused.
SPARE_LAYERS, SPARE_COUNT, SPARE_SIZE = 128, 1 << 15, 1 << 24


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
