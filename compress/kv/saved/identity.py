"""Tell models apart by what is in memory, however they were loaded: a cache is worth nothing to another model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

SAMPLED = 1 << 14  # numbers hashed at the start and at the end of each tensor
PASSING = {"dtype", "torch_dtype", "_name_or_path", "transformers_version", "_attn_implementation", "use_cache"}


def fingerprint(model: Any) -> str:
    """Return a sha256 over the configuration of a PreTrainedModel, names, shapes and samples of all its weights.

    Samples are hashed as float32 where a weight is bfloat16 or float16, so that a checkpoint is the same model if it is
    loaded in a larger type. Packed weights are buffers, and count. So does which adapters are applied, and how much.
    """
    config = model.config.to_dict()
    plain = {key: value for key, value in config.items() if key not in PASSING}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=_named).encode())
    if applied := _applied_adapters(model):
        digest.update(json.dumps(applied).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        for sample in (flat[:SAMPLED], flat[-SAMPLED:]):
            digest.update(_bytes(sample))
    return digest.hexdigest()


def _applied_adapters(model: nn.Module) -> list[tuple[str, list[tuple[str, float]]]]:
    """Return layer -> adapters that it adds to its base, with their factors, by what PEFT's layers say of themselves.

    All adapters are among the weights of a model, whether they are applied or not. A merged one is in the base.
    """
    layers = []
    for name, module in model.named_modules():
        is_off, active = getattr(module, "disable_adapters", None), getattr(module, "active_adapters", None)
        if isinstance(is_off, bool) and isinstance(active, list):
            factors, merged = getattr(module, "scaling", None), getattr(module, "merged_adapters", [])
            factors = factors if isinstance(factors, dict) else {}
            added = [] if is_off else [each for each in active if each not in merged]
            layers.append((name, [(each, float(factors.get(each, 1.0))) for each in added]))
    return layers


def of_tokens(tokens: Tensor) -> str:
    """Return a sha256 of token ids [B, tokens]."""
    return hashlib.sha256(f"{list(tokens.shape)}".encode() + _bytes(tokens.to(torch.int64))).hexdigest()


def of_tensors(tensors: dict[str, Tensor]) -> str:
    """Return a sha256 of named tensors, all of their bytes; "" for none."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + _bytes(tensor))
    return digest.hexdigest() if tensors else ""


def _named(value: Any) -> str:
    """Return a text for a setting that JSON does not have, the same in every process."""
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def _bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor; of short floating-point types as float32."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
