"""Packed pico models for tests of the formats of llama.cpp and MLX, with a tokenizer that both read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compress import api
from helpers.pico import save_pico
from helpers.runs import SMALL, Setup, job

# what blocks and groups of 32 need, and what readers do not take from a file
CHANGES: dict[str, dict[str, Any]] = {
    "gemma": {"intermediate_size": 160},
    "gemma2": {"intermediate_size": 160},
    "qwen3_moe": {"moe_intermediate_size": 64},
}
SUPER_BLOCKS: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
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


def k_quants(folder: Path) -> Path:
    """Quantize a pico model whose widths are super-blocks to K-quants of all types; return the packed checkpoint."""
    model = save_pico("llama", folder / "model", changes=SUPER_BLOCKS)
    tokenizer().save_pretrained(model)
    types = {"q_proj": "q2_k", "k_proj": "q3_k", "o_proj": "q5_k", "up_proj": "q6_k"}
    rules = ", ".join(f"{{match: '*{name}', type: {kind}}}" for name, kind in types.items())
    api.quantize(job(model, Setup("q4_k", (*SMALL, f"rules=[{rules}]")), folder / "packed"))
    return folder / "packed"


def token_ids(length: int = 24) -> torch.Tensor:
    """Return token ids int64 [1, length] that no text has."""
    return (torch.arange(length) * 7 % 250)[None]
