"""Read from a configuration what heads a model has."""

from __future__ import annotations

from typing import Any


def head_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of query heads, of KV heads, and the width of a head, as a configuration states them."""
    decoder = config.get_text_config(decoder=True)
    queries = decoder.num_attention_heads
    width = getattr(decoder, "head_dim", None) or decoder.hidden_size // queries
    return queries, getattr(decoder, "num_key_value_heads", None) or queries, width


def states_heads(config: Any) -> bool:
    """Return whether a configuration says of the heads of its keys what `head_shape` reads, and nothing more.

    Where it has further settings (latent keys, layers with heads of their own, all queries sharing a head), the first
    keys that come tell their shape.
    """
    decoder = config.get_text_config(decoder=True)
    read = {"num_attention_heads", "num_key_value_heads", "head_dim", *decoder.attribute_map.values()}
    return not any(
        word in key for key in decoder.to_dict() if key not in read for word in ("head", "kv", "multi_query")
    )
