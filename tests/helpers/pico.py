"""Pico models built in code: two blocks, hidden 64, seeded random weights, a byte tokenizer. No network, no warnings.

    model = PICO["llama"]()                         # PreTrainedModel in float32, eval mode
    directory = save_pico("mixtral", tmp_path / "m", shards=True, dtype=torch.bfloat16)

Every parameter is random, norms and biases included, so that a tensor that is lost, swapped or ignored shows in the
logits. The widths differ on purpose: only some intermediate sizes are multiples of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compress.formats import int as int_format
from compress.types import PackedWeight, Stored

VOCAB_SIZE = 264  # 256 bytes, <eos>, and seven ids that no text produces
EOS_ID = 256
SHARD_SIZE = "100KB"  # of a checkpoint saved with shards=True: several files

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
_GQA: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (model type, what differs from _COMMON)
    "llama": ("llama", {**_GQA, "intermediate_size": 192}),
    "llama_tied": ("llama", {**_GQA, "intermediate_size": 192, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**_GQA, "intermediate_size": 128, "sliding_window": 32}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "intermediate_size": 160}),  # q, k, v biases
    "qwen3": ("qwen3", {**_GQA, "intermediate_size": 192}),  # q and k norms
    "gemma": ("gemma", {**_GQA, "intermediate_size": 144, "tie_word_embeddings": True}),  # norm weight is 1 + w
    "gemma2": (
        "gemma2",
        {
            **_GQA,
            "intermediate_size": 144,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
        },
    ),
    "phi3": ("phi3", {"num_key_value_heads": 2, "intermediate_size": 192}),  # qkv_proj and gate_up_proj are one linear
    "gpt_neox": ("gpt_neox", {"intermediate_size": 256}),  # fused qkv, biases, layer norms
    "opt": (
        "opt",
        {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0, "tie_word_embeddings": True},
    ),  # biases, learned positions
    "mixtral": (
        "mixtral",
        {**_GQA, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **_GQA,
            "intermediate_size": 192,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
}
ODD: dict[str, Any] = {  # changes to "llama": all sizes multiples of 2, and of nothing else that matters
    "hidden_size": 50,
    "intermediate_size": 66,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 10,
}


def build(name: str, changes: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """A model of PICO, with changes to its configuration."""
    model_type, differences = _CONFIGS[name]
    return of_type(model_type, {**differences, **(changes or {})})


def of_type(model_type: str, differences: Mapping[str, Any]) -> PreTrainedModel:
    """A model of any type of transformers, as small and as random."""
    config = CONFIG_MAPPING[model_type](**{**_COMMON, **differences})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms start at one (or at an offset of zero), biases at zero
                parameter.add_(noise, alpha=0.2)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


PICO: dict[str, Callable[[], PreTrainedModel]] = {name: partial(build, name) for name in _CONFIGS}


def pico_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte (ids 0..255 in an order of its own) and <eos>."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def beginning(tokenizer: PreTrainedTokenizerFast, *tokens: str, end: str = "") -> PreTrainedTokenizerFast:
    """The tokenizer, which from now on puts these special tokens before every text, and `end` behind it."""
    tokenizer.add_special_tokens({"bos_token": tokens[-1], "additional_special_tokens": list(tokens[:-1])})
    around = [*tokens, *([end] if end else [])]
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in around]
    single = " ".join((*tokens, "$A", *([end] if end else [])))
    model = tokenizer.backend_tokenizer
    model.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids)
    return tokenizer


def save_pico(
    name: str,
    directory: Path,
    shards: bool = False,
    dtype: torch.dtype = torch.float32,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint as transformers writes it: config.json, safetensors (with an index if `shards`), tokenizer."""
    return save(build(name, changes).to(dtype), directory, shards)


def save(model: PreTrainedModel, directory: Path, shards: bool = False) -> Path:
    """The same of any model."""
    model.config.dtype = model.dtype
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE if shards else "1GB")
    pico_tokenizer().save_pretrained(directory)
    return directory


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool = True) -> PackedWeight:
    """weight [out, in] in the `int` format, each code the nearest: the plainest way to a packed weight."""
    shape = (weight.shape[0], weight.shape[1])
    params = int_format.params_for(bits, group_size, symmetric, shape[1])
    length = shape[1] if group_size == -1 else group_size
    count = -(-shape[1] // length)
    grouped = torch.nn.functional.pad(weight.detach().float(), (0, count * length - shape[1])).view(shape[0], count, -1)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)  # [out, groups]
    levels = 2**bits - 1
    if symmetric:
        scales = (torch.maximum(-low, high) * 2 / levels).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((high - low) / levels).half().float()
        zeros = (-low / scales).round().clamp(0, levels)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, levels).to(torch.uint8)
    codes = codes.flatten(1)[:, : shape[1]]
    tensors = int_format.pack(codes, scales, None if symmetric else zeros.to(torch.uint8), params)
    return PackedWeight(Stored("int", params), tensors, shape)
