"""Attend to transformers' own caches by compiled functions where a pass on a CPU has few tokens.

    attach(model)
    model.generate(**inputs)

torch's attention of one token costs several times the reading of keys and values, of bfloat16 17 times
(benchmarks/attention_cpu.py); the compiled one (compress/kernels/cpu/attention.py) takes about as long as the reading
and computes in float32. It is the model's only during a pass that reads up to 16 tokens of a sequence, and only where
the model's own is "sdpa". Whatever is not plain causal attention, with left padding and a sliding window or
without, goes to sdpa from here: masks of other kinds, dropout, sinks, gradients.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from compress.kernels import llvm
from compress.kernels.cpu import attention as compiled
from compress.kernels.cpu.attention import HeadSizes, Manner
from compress.kv import hooks

NAME, REPLACED = "compress_plain", "sdpa"  # attention functions
UNUSUAL = ("softcap", "s_aux", "position_bias", "cache")  # arguments of attention that sdpa knows better, or refuses

_MARK = "_compress_plain_attention"
_pass = threading.local()  # what is known of the masks of the running pass


class Visibility(NamedTuple):
    """What the queries of a pass see: each the positions up to its own, as far back as the window and the start."""

    stop: int  # keys that are seen at all
    window: int  # positions; 0: all
    starts: Tensor | None  # int64 [batch], the first position that is seen


def attach(model: nn.Module) -> None:
    """Let passes of few tokens use compiled attention; again does no harm."""
    if hasattr(model, _MARK) or not hasattr(model, "config") or not llvm.available():
        return
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    entered = model.register_forward_pre_hook(_enter, with_kwargs=True)
    setattr(model, _MARK, [entered, model.register_forward_hook(_leave, always_call=True)])


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    for handle in vars(model).pop(_MARK, ()):
        handle.remove()


def _enter(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if not _is_short(args, kwargs) or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != REPLACED or kwargs.get("output_attentions") or model.device.type != "cpu":
        return
    cache = hooks.cache_of(kwargs)
    if cache is None or cache.path != "fused":
        _pass.read, _pass.config = {}, config
        _choose(config, NAME)


def _leave(model: Any, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    config, _pass.config = getattr(_pass, "config", None), None
    if config is not None:
        _choose(config, REPLACED)
        _pass.read = {}


def _choose(config: Any, name: str) -> None:
    """Choose the attention function that a configuration names; its setter looks for other configurations inside."""
    if config.sub_configs:
        config._attn_implementation = name
    else:
        vars(config)["_attn_implementation_internal"] = name


def _is_short(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a pass is given few tokens."""
    for ids in (args[0] if args else None, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if isinstance(ids, Tensor) and ids.dim() >= 2:
            return 0 < ids.shape[1] <= compiled.MOST
    return False


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, n, width], key and value [B, h, m, width], mask as sdpa has it -> [B, n, H, value width]."""
    sight = None
    is_usual = not kwargs.get("dropout") and all(kwargs.get(name) is None for name in UNUSUAL)
    if is_usual and _is_plain(query, key, value):
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        sight = _sight(query, key, attention_mask, causal)
    if sight is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    manner = Manner(scaling, window=sight.window, starts=sight.starts)
    return compiled.attend(query, key[:, :, : sight.stop], value[:, :, : sight.stop], manner), None


def _is_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether compiled functions attend to such tensors, and no gradient has to be passed back."""
    tensors = query, key, value
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if not all(each.is_cpu and each.dim() == 4 for each in tensors):
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return False
    if len({each.dtype for each in tensors}) > 1 or not all(each.stride(3) == 1 for each in tensors):
        return False
    is_alike = key.shape[:3] == value.shape[:3] and len(key) == len(query) and 0 < query.shape[2] <= compiled.MOST
    heads = HeadSizes(query.shape[1], key.shape[1], query.shape[3], value.shape[3], 1.0)
    return is_alike and key.shape[3] == query.shape[3] and compiled.supports(heads, key.dtype, query.dtype)


def _sight(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Visibility | None:
    """Return what queries see by a mask of sdpa's; None where that is nothing of the kind."""
    new, tokens = query.shape[2], key.shape[2]
    if mask is None:
        return Visibility(tokens, 0, None) if new == 1 or (causal and new == tokens) else None
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2:] != (new, tokens):
        return None
    if mask.shape[0] != query.shape[0]:
        return None
    read: dict[int, tuple[Tensor, Visibility | None]] = getattr(_pass, "read", {})
    if id(mask) not in read:
        read[id(mask)] = mask, read_mask(mask[:, 0])
    return read[id(mask)][1]


def read_mask(mask: Tensor) -> Visibility | None:
    """Return what a mask [B, n, m] lets queries see, or None: not intervals that end at neighbouring positions."""
    new, tokens = mask.shape[1:]
    first = mask.int().argmax(-1)
    last = tokens - 1 - mask.flip(-1).int().argmax(-1)
    sizes = last - first + 1
    if not torch.equal(mask.sum(-1), sizes):  # with gaps, or nothing is seen
        return None
    stop = int(last[0, -1]) + 1
    if not torch.equal(last, torch.arange(stop - new, stop).expand_as(last)):
        return None
    starts, window = first[:, 0], 0
    if not torch.equal(first, starts[:, None].expand_as(first)):
        window = int(sizes.max())
        if not torch.equal(first, torch.maximum(starts[:, None], last + 1 - window)):
            return None
    return Visibility(stop, window, starts.contiguous() if starts.any() else None)
