"""Models whose weights have levels, rounded to nearest part by part.

model = nested_model("llama")               # every linear 4 + 4 bits, in memory, ready to be saved
model = nested_model("llama_tied", (2, 2, 4), tables=True)
model = nested_model("llama", (4,), original=torch.bfloat16)  # and the weights of this type themselves
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn
from transformers import PreTrainedModel

from compress import formats
from compress.formats import dense, nested
from compress.runtime import levels
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.hf import CompressQuantizer, build_config, swap
from compress.types import PackedWeight, Stored
from helpers.pico import PICO, round_to_nearest


def rounded_in_parts(
    weight: torch.Tensor, bits: Sequence[int] = (4, 4), group_size: int = 32, original: torch.dtype | None = None
) -> PackedWeight:
    """A weight [out, in] as a sum of integers of so many bits, each rounded to what the ones before it leave.

    original: the type that the weight itself is stored in beside the sum, as the last level.
    """
    parts, rest = [], weight.float()
    for each in bits:
        parts.append(round_to_nearest(rest, each, group_size))
        rest = rest - formats.decode(parts[-1], torch.float32)
    names = list(accumulate(bits))
    if original is not None:
        params = dense.Params(str(original).removeprefix("torch."))
        shape = (weight.shape[0], weight.shape[1])
        parts.append(PackedWeight(Stored("dense", params), dense.pack(weight, params), shape))
        names.append(8 * original.itemsize)
    return nested.join(parts, names)


def pack_model(model: PreTrainedModel, weights: dict[str, PackedWeight]) -> PreTrainedModel:
    """Replace modules of a model by packed ones with these weights."""
    config = build_config({name: weight.stored for name, weight in weights.items()})
    swap(model, config)
    for name, weight in weights.items():
        for key, tensor in weight.tensors.items():
            model.get_submodule(name).get_parameter(key).data.copy_(tensor)
    model.hf_quantizer, model.config.quantization_config = CompressQuantizer(config), config
    levels.offer(model)
    return model.eval()


def nested_model(
    name: str, bits: Sequence[int] = (4, 4), tables: bool = False, original: torch.dtype | None = None
) -> PreTrainedModel:
    """A pico model with all linears of its blocks in parts, `tables`: and the table of embeddings, tied or not."""
    model = PICO[name]()
    opened = {key: Experts.from_fused(module) for key, module in model.named_modules() if is_fused_experts(module)}
    linears = {key: each for key, each in model.named_modules() if isinstance(each, nn.Linear) and key != "lm_head"}
    linears |= {
        f"{key}.{inner}": each
        for key, experts in opened.items()
        for inner, each in experts.named_modules()
        if isinstance(each, nn.Linear)
    }
    linears = {key: each for key, each in linears.items() if not key.endswith((".gate", ".router"))}
    dense_weights = {key: each.weight.detach() for key, each in linears.items()}
    if tables:
        dense_weights["model.embed_tokens"] = model.get_input_embeddings().weight.detach()
    weights = {key: rounded_in_parts(each, bits, original=original) for key, each in dense_weights.items()}
    return pack_model(model, weights)
