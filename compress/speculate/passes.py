"""Forward passes of a few new tokens on a cache, as generate of transformers makes them, at the least cost.

What the cache forgets as tokens come, those behind a window, or the exact keys that it codes, it keeps until a round is
over: `begin`, `end_round` and `end` tell it.

A pass whose arguments say nothing but "these tokens follow the cache" calls the model with just that. With padding, or
arguments that only the model knows, transformers prepares the arguments of every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from compress.kv.layer import KVCache

KNOWN = {"past_key_values", "use_cache", "attention_mask", "position_ids", "logits_to_keep"}


class Passes:
    """A model, a cache and what the model's passes are given beside new tokens."""

    def __init__(self, model: Any, cache: Any, kwargs: dict[str, Any]) -> None:
        """kwargs: of generate for the token behind those in the cache."""
        self.model, self.cache, self.start = model, cache, int(cache.get_seq_length())
        self.length = self.start  # tokens in the cache
        self.device, self._records = model.device, False
        self.kwargs = {key: value for key, value in kwargs.items() if key != "logits_to_keep"}
        self.is_plain = _is_plain(model, self.kwargs, self.length)

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Run new tokens, which the cache then has, too; return logits float32 [tokens, vocab]."""
        return self._logits(self._run(tokens, {}))

    def forward_hidden(self, tokens: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run new tokens; return logits, and hidden states [tokens, width] of embeddings and each block."""
        outputs = self._run(tokens, {"output_hidden_states": True})
        return self._logits(outputs), tuple(each[0] for each in outputs.hidden_states)

    def begin(self) -> None:
        """Let the cache keep what it would forget."""
        self.cache.activate_past_recording()
        self._records = any(getattr(layer, "record_past", False) for layer in self.cache.layers)
        if isinstance(self.cache, KVCache):
            self.cache.holds = True

    def crop(self, count: int) -> None:
        """Take the last `count` tokens out of the cache."""
        self.cache.crop(-count)
        self.length -= count

    def end_round(self, count: int) -> None:
        """Take the last `count` tokens out, and let the cache forget and code as it does without drafts."""
        if count or self._records:
            self.crop(count)
        if isinstance(self.cache, KVCache):
            self.cache.settle()

    def end(self) -> None:
        """Let the cache forget again as tokens come."""
        for layer in self.cache.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False
        if isinstance(self.cache, KVCache):
            self.cache.holds = False

    @staticmethod
    def _logits(outputs: Any) -> Tensor:
        logits: Tensor = outputs.logits[0]
        return logits.float()

    def _run(self, tokens: Sequence[int], more: dict[str, Any]) -> Any:
        ids = torch.tensor([tokens], dtype=torch.int64, device=self.device)
        self.length += len(tokens)
        if self.is_plain:
            return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, **more)
        inputs = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=None, is_first_iteration=False, **self._grown()
        )
        return self.model(**inputs, **more)

    def _grown(self) -> dict[str, Any]:
        """Return the arguments of generate for all tokens up to the newest, as transformers lets them grow."""
        further = self.length - self.start - 1
        if not further:
            return dict(self.kwargs)
        grown: dict[str, Any] = self.model._update_model_kwargs_for_generation(
            {}, dict(self.kwargs), num_new_tokens=further
        )
        return grown


def _is_plain(model: Any, kwargs: dict[str, Any], tokens: int) -> bool:
    """Return whether passes need no arguments but new tokens and the cache; tokens: in the cache."""
    own = getattr(type(model), "prepare_inputs_for_generation", None)
    given = {key for key, value in kwargs.items() if value is not None}
    positions = kwargs.get("position_ids")
    follows = positions is None or (positions.dim() == 2 and int(positions[0, -1]) == tokens)
    return (
        own is GenerationMixin.prepare_inputs_for_generation
        and given <= KNOWN
        and kwargs.get("attention_mask") is None
        and follows
    )
