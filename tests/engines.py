"""Packed pico models for tests of the formats of llama.cpp and MLX, with a tokenizer that both read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compress import api
from pico import save_pico
from runs import Setup, job

# what blocks and groups of 32 need, and what readers do not take from a file
CHANGES: dict[str, dict[str, Any]] = {
    "gemma": {"intermediate_size": 160},
    "gemma2": {"intermediate_size": 160},
    "qwen3_moe": {"moe_intermediate_size": 64},
}
FOUR_BITS = ("bits=4", "group_size=32")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return the pico tokenizer with one merge and the usual split into words: "th" is one token, <eos> id 257."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(models.BPE(vocab={**vocabulary, "th": 256}, merges=[("t", "h")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", pad_token="<eos>")


def packed(
    name: str, folder: Path, settings: tuple[str, ...] = FOUR_BITS, changes: Mapping[str, Any] | None = None
) -> Path:
    """Quantize a pico model without data by the recipe int8 with these settings; return the packed checkpoint."""
    model = save_pico(name, folder / "model", changes={**CHANGES.get(name, {}), **(changes or {})})
    tokenizer().save_pretrained(model)
    api.quantize(job(model, Setup("int8", settings), folder / "packed"))
    return folder / "packed"


def token_ids(length: int = 24) -> torch.Tensor:
    """Return token ids int64 [1, length] that no text has."""
    return (torch.arange(length) * 7 % 250)[None]
