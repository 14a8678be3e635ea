"""Make a packed checkpoint fail in a transformers that does not know it, instead of loading random weights.

transformers answers an unknown quantization method with a warning, and fills what it does not find with random numbers.
config.json therefore names, as the file of the weights ("transformers_weights"), a sentence: transformers raises a
ValueError that ends with it. Where this package is installed the key is taken away before it is read (runtime/hf.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "transformers_weights"
TEXT = "the weights are packed by compress, so run `pip install compress-llm` and load the model again"


def added(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json with the notice."""
    return {**config, KEY: TEXT}


def removed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json without the notice; a name of a file stays."""
    return {key: value for key, value in config.items() if key != KEY or value != TEXT}
