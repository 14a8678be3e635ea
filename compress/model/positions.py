"""Find how many tokens a model can read at once."""

from __future__ import annotations

import transformers
from torch import nn

NAMES = (  # what configurations call it
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "max_sequence_length"),
    *("context_length", "n_ctx"),
)


def max_positions(config: transformers.PretrainedConfig) -> int | None:
    """Return the longest sequence that a model is made for, if its configuration (of the text model) says so."""
    values = [getattr(config, name, None) for name in NAMES]
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def beyond(config: transformers.PretrainedConfig, context: int) -> str | None:
    """Return a line for a context that is longer than what a model is made for, None for any other."""
    longest = max_positions(config.get_text_config())
    if longest is None or context <= longest:
        return None
    return f"a context of {context:,} tokens is longer than the {longest:,} positions that the model is made for"


def most_tokens(model: transformers.PreTrainedModel) -> int | None:
    """Return the tokens that a model reads at most, if that is known; the model may be on the meta device.

    Positions that begin behind that of the padding leave fewer than the configuration says.
    """
    longest = max_positions(model.config.get_text_config())
    tokens = model.get_input_embeddings()
    for module in model.modules() if longest is not None else ():
        if isinstance(module, nn.Embedding) and module is not tokens and module.num_embeddings == longest:
            return longest if module.padding_idx is None else longest - module.padding_idx - 1
    return longest
