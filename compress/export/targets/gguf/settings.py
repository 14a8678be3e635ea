"""Read gguf.yaml, and compute settings of GGUF files that a configuration of transformers has by no name of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from compress.errors import ExportError

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("gguf.yaml").read_text(encoding="utf-8"))
TOOL: str = DATA["tool"]  # the name of llama.cpp in messages
FULL, SLIDING = "full_attention", "sliding_attention"  # layer_types of a configuration


def refusal(reason: str) -> ExportError:
    """Return the error for a model that llama.cpp would compute otherwise."""
    return ExportError(f"the model cannot be written as GGUF: {reason}; export to another target")


def read_setting(config: PretrainedConfig, words: str) -> Any:
    """Return what a configuration says: a setting, a product (4*a), a sum (a+b), or a function of `COMPUTED` (f()).

    None where it has none of that name.
    """
    if words.endswith("()"):
        return COMPUTED[words[:-2]](config)
    for sign, join in (("+", sum), ("*", math.prod)):
        if sign in words:
            values = [int(part) if part.isdigit() else getattr(config, part, None) for part in words.split(sign)]
            return join(values) if all(isinstance(value, int | float) for value in values) else None
    return getattr(config, words, None)


def head_size(config: PretrainedConfig, kind: str = FULL) -> int:
    """Return the size of a head; where layers differ, that of those of this kind (one of layer_types)."""
    kinds = getattr(config, "layer_types", None) or []
    if kind in kinds and getattr(config, "per_layer_config", None):
        config = config.per_layer_config[kinds.index(kind)]
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _head_size_within(config: PretrainedConfig) -> int:
    return head_size(config, SLIDING)


def _key_heads(config: PretrainedConfig) -> list[int]:
    """Return the heads of keys and values of each layer, 0 for one without attention."""
    kinds = config.layer_types
    if not getattr(config, "per_layer_config", None):
        return [config.num_key_value_heads if kind in (FULL, SLIDING) else 0 for kind in kinds]
    return [
        config.per_layer_config[layer].num_key_value_heads if kind in (FULL, SLIDING) else 0
        for layer, kind in enumerate(kinds)
    ]


def _sharing_layers(config: PretrainedConfig) -> int:
    """Return how many layers take keys and values of earlier ones."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    if config.num_kv_shared_layers and config.layer_types[:first][-2:] != [SLIDING, FULL]:
        raise refusal("the layers whose keys and values others take are not the last two before these")
    return int(config.num_kv_shared_layers)


def _inner_sizes(config: PretrainedConfig) -> int | list[int]:
    """Return the width of feed-forward layers, twice as wide where a layer has no keys and values of its own."""
    if not config.use_double_wide_mlp:
        return int(config.intermediate_size)
    first = config.num_hidden_layers - config.num_kv_shared_layers
    return [config.intermediate_size * (1 if layer < first else 2) for layer in range(config.num_hidden_layers)]


def _adjusted_inner_size(config: PretrainedConfig) -> int:
    """Return the width of feed-forward layers after two thirds, a factor, and rounding up to a multiple."""
    size = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    multiple = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple


COMPUTED: dict[str, Callable[[PretrainedConfig], Any]] = {
    **{"head_size": head_size, "head_size_within": _head_size_within, "key_heads": _key_heads},
    **{"sharing_layers": _sharing_layers, "inner_sizes": _inner_sizes, "adjusted_inner_size": _adjusted_inner_size},
}
