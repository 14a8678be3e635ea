"""GGUF files of tiny models, written by the package gguf: what llama.cpp's converter would write for them.

write(build("llama"), tmp_path / "model.gguf", "llama", types=("Q8_0",))
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from helpers.pico import EOS_ID, VOCAB_SIZE, pico_tokenizer

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def write(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    types: Sequence[str] = ("F32",),
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    parts: int = 1,
    *,
    bos: bool | None = None,
) -> Path:
    """Write a model as GGUF; tensors of two and more dimensions take turns in `types`. Return the first file.

    `extra`: metadata, without the architecture's name in front; `tensors`: more of them, as float32; `bos`: whether the
    end-of-text token is put before every text; None: the file does not say.
    """
    import gguf

    split = {"split_max_tensors": -(-len(model.state_dict()) // parts)} if parts > 1 else {}
    writer = gguf.GGUFWriter(path, architecture, **split)
    for key, value in {**_metadata(model), **(extra or {})}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    _add_tokenizer(writer)
    if bos is not None:
        writer.add_bos_token_id(EOS_ID)
        writer.add_add_bos_token(bos)
    turns = cycle(types)
    for name, values in {**_tensors(model, architecture), **(tensors or {})}.items():
        kind = gguf.GGMLQuantizationType[next(turns) if values.ndim > 1 else "F32"]
        data = gguf.quantize(np.ascontiguousarray(values, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _metadata(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "rope.dimension_count": head,
        "attention.key_length": head,
        "vocab_size": config.vocab_size,
    }
    if hasattr(config, "num_experts"):
        values |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return values


def _add_tokenizer(writer: Any) -> None:
    tokens = sorted(pico_tokenizer().get_vocab().items(), key=lambda pair: pair[1])
    names = [token for token, _ in tokens]
    names += [names[0] + names[1], *(f"<unused{i}>" for i in range(VOCAB_SIZE - 1 - len(tokens)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(names)
    writer.add_token_types([3 if index == EOS_ID else 1 for index in range(len(names))])
    writer.add_token_merges([f"{names[0]} {names[1]}"])
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(EOS_ID)
    writer.add_chat_template(TEMPLATE)


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    import gguf

    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.float()
        if name.endswith("experts.gate_up_proj"):
            block = name.split(".")[2]
            for kind, half in zip(("gate", "up"), values.chunk(2, 1), strict=True):
                found[f"blk.{block}.ffn_{kind}_exps.weight"] = half.numpy()
            continue
        stem, dot, suffix = name.rpartition(".")
        mapped = names.get_name(stem) if suffix in ("weight", "bias") else names.get_name(name)
        assert mapped is not None, name
        found[f"{mapped}{dot}{suffix}" if suffix in ("weight", "bias") else f"{mapped}.weight"] = _turned(
            values, mapped, architecture, model
        ).numpy()
    return found


def _turned(values: torch.Tensor, name: str, architecture: str, model: PreTrainedModel) -> torch.Tensor:
    """Return a tensor as llama.cpp wants it: rotary pairs side by side, norms with their one."""
    config = model.config
    if architecture == "llama" and name.endswith(("attn_q", "attn_k")):
        heads = config.num_attention_heads if name.endswith("attn_q") else config.num_key_value_heads
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm"):
        return values + 1
    return values
