"""Say which setting of a model each key of a GGUF file holds, and how such files stretch positions.

Keys stand behind the name of the architecture in the file: `<architecture>.context_length`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SETTINGS = {  # key -> attribute of a configuration of transformers; a model has those that it knows
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
WIDTHS = (  # keys of sizes that some tensor has as one of its dimensions
    *("embedding_length", "feed_forward_length", "vocab_size", "attention.key_length", "attention.value_length"),
    *("attention.head_count", "attention.head_count_kv", "expert_count", "expert_used_count"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
)
BLOCKS, HEADS, KV_HEADS = "block_count", "attention.head_count", "attention.head_count_kv"
THETA = "rope.freq_base"
ROTATED = "rope.dimension_count"  # entries of a head that are rotated
WINDOW = "attention.sliding_window"
KIND, FACTOR = "rope.scaling.type", "rope.scaling.factor"
ORIGINAL_LENGTH = "rope.scaling.original_context_length"
FREQUENCIES = "rope_freqs.weight"  # tensor: by how much each rotary frequency is divided, float32 [head size / 2]
HEAD = "output.weight"  # tensor of the output head; a file without one has tied embeddings


class Bands(NamedTuple):
    """The one way to stretch positions that is written as a tensor: long wavelengths by a factor, short ones not."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def divisors(self, theta: float, count: int) -> list[float]:
        """Return what each of `count` rotary frequencies is divided by."""
        found = []
        for index in range(count):
            wavelength = 2 * math.pi * theta ** (index / count)
            turns = self.original_max_position_embeddings / wavelength
            share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            share = min(1.0, max(0.0, share))
            found.append(1 / ((1 - share) / self.factor + share))
        return found
