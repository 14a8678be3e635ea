"""Pico models of text beside images: two blocks of text, one or two of a vision tower, random weights, no network.

model = build("llava")                          # PreTrainedModel in float32, eval mode
inputs = with_image("llava", model)             # what `forward` and `generate` take: a text with an image in it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from helpers.pico import EOS_ID, VOCAB_SIZE

IMAGE_ID = VOCAB_SIZE - 1  # stands where the states of an image go
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_SQUARE = {**_TOWER, "image_size": 28, "patch_size": 14, "projection_dim": 32}
_LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

_CONFIGS: dict[str, dict[str, Any]] = {  # what differs, of the whole and its parts
    "qwen2_5_vl": {
        "text_config": _MROPE,
        "vision_config": {**_QWEN_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        **{"video_token_id": VOCAB_SIZE - 2, "vision_start_token_id": VOCAB_SIZE - 3, "vision_end_token_id": 5},
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", "sliding_window": 32, "tie_word_embeddings": True},
        "vision_config": {**_SQUARE, "model_type": "siglip_vision_model"},
        **{"mm_tokens_per_image": 4, "boi_token_id": 6, "eoi_token_id": 7, "tie_word_embeddings": True},
    },
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {**_SQUARE, "model_type": "clip_vision_model"},
        "image_seq_length": 4,
    },
    "idefics3": {
        "text_config": {"model_type": "llama"},
        "vision_config": {**_TOWER, "image_size": 28, "patch_size": 14},
    },
    "qwen3_5": {
        "text_config": {**_LINEAR, "layer_types": ["linear_attention", "full_attention"]},
        "vision_config": {
            **_QWEN_VISION,
            "patch_size": 14,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
        **{"video_token_id": VOCAB_SIZE - 2, "vision_start_token_id": VOCAB_SIZE - 3, "vision_end_token_id": 5},
    },
    "mllama": {  # blocks 1 and 3 attend to images only
        "text_config": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "bos_token_id": EOS_ID},
        "vision_config": {
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1},
            **{"attention_heads": 2, "image_size": 28, "patch_size": 14, "max_num_tiles": 1},
            **{"vision_output_dim": 64, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]},
        },
    },
}


def build(name: str, changes: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Return a model of this type, every parameter random; changes: to the configuration of its text."""
    parts = {"text_config": {**_TEXT, **_CONFIGS[name]["text_config"], **(changes or {})}}
    image = "image_token_index" if name == "mllama" else "image_token_id"
    config = CONFIG_MAPPING[name](**{image: IMAGE_ID, "tie_word_embeddings": False, **_CONFIGS[name], **parts})
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(noise, alpha=0.2)
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
    return model


def with_image(name: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a text of 14 tokens with an image of four tokens in it, and its pixels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 200, (1, 14), generator=generator)
    ids[0, 3:7] = IMAGE_ID
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name.startswith("qwen"):
        ids[0, 2] = VOCAB_SIZE - 3
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        kinds = (ids == IMAGE_ID).int()
        return {
            **inputs,
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": kinds,
        }
    inputs["pixel_values"] = torch.randn(1, 3, 28, 28, generator=generator)
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE_ID).int()
    return inputs
