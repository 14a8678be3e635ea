"""Compute products of 16-bit tensors in float32 on processors that are slower at them in 16 bits.

The result is that of the 16-bit product up to the order of its sums: both add up in float32 and round once, at the end.
Without matrix instructions (AMX) an x86 processor takes 1.8 times as long for bfloat16 as for float32 where it has
instructions for bfloat16 at all (Xeon, 4096 x 576 x 1536, one thread: 82 and 152 GFLOP/s, with the casts 134 to 141),
and 8 times as long where it has none.

torch multiplies float32 by MKL, which keeps to AVX2 on AMD's processors. oneDNN, which torch has as well, does not: it
takes 0.45 of the time there with AVX-512 (Zen 5, 512 x 576 x 1536, one thread: 102 and 217 GFLOP/s), and 0.9 with AVX2.
The processor decides, and not a measurement: sums are in another order, and a run that is resumed gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

WEIGHT_SLICE = 1 << 23  # numbers of a weight that are widened at a time: 32 MiB
ROWS_SLICE = 1 << 20  # numbers of inputs, and of outputs: 4 MiB each, which stay near the processor
WORKSPACE = 4 * (WEIGHT_SLICE + 2 * ROWS_SLICE)  # bytes that `linear` takes beside its result
_capabilities: Mapping[str, Any] = torch.cpu.get_capabilities()


def is_slow(dtype: torch.dtype, processor: Mapping[str, Any] = _capabilities) -> bool:
    """Return whether a processor multiplies in float32 faster than in this type; False where that was not measured.

    processor: what `torch.cpu.get_capabilities` says of it. AMD's instructions for bfloat16 are as fast as they should
    be by their description.
    """
    if processor.get("architecture") != "x86_64":
        return False
    if dtype == torch.bfloat16:
        is_amd = "AMD" in processor.get("cpu_name", "")
        return not processor.get("amx_bf16") and not (processor.get("avx512_bf16") and is_amd)
    return dtype == torch.float16 and not (processor.get("avx512_fp16") or processor.get("amx_fp16"))


def is_fast(dtype: torch.dtype, processor: Mapping[str, Any] = _capabilities) -> bool:
    """Return whether an x86 processor multiplies in this 16-bit type clearly faster than in float32.

    Those with AMX do so, and AMD's with instructions for bfloat16 (Zen 5: 450 and 217 GFLOP/s).
    """
    if processor.get("architecture") != "x86_64" or dtype != torch.bfloat16:
        return False
    return not is_slow(dtype, processor)


def uses_onednn(processor: Mapping[str, Any] = _capabilities) -> bool:
    """Return whether `multiply` is oneDNN's product on a processor, and not that of torch itself."""
    is_amd = processor.get("architecture") == "x86_64" and "AMD" in processor.get("cpu_name", "")
    return is_amd and hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()


def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T (+ bias) of float32 matrices [rows, columns] and [outputs, columns]; bias [outputs].

    oneDNN falls back to plain loops where rows do not lie one behind the other. Such matrices are copied, so that the
    layout of a weight in memory changes no bit.
    """
    is_plain = left.dtype == right.dtype == torch.float32 and left.numel() > 0 and right.numel() > 0
    if is_plain and left.device.type == "cpu" and uses_onednn():
        operands = left.contiguous(), right.contiguous()
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(*operands, bias, "none", [], ""))
    return functional.linear(left, right, bias)


class _Linear(torch.autograd.Function):
    """`multiply` with a gradient by `left` alone."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(right)
        return multiply(left.reshape(-1, left.shape[-1]), right, bias).view(*left.shape[:-1], len(right))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (right,), (behind,) = ctx.saved_tensors, gradients
        rows = behind.reshape(-1, behind.shape[-1]).contiguous()
        return multiply(rows, right.T.contiguous()).view(*behind.shape[:-1], right.shape[1]), None, None


class Backward(TorchFunctionMode):
    """While active, compute linears of float32 on the CPU by `multiply`, with gradients by their inputs.

    A linear whose weight takes a gradient is torch's own.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Compute one function of torch."""
        if func is functional.linear and len(args) in (2, 3) and not kwargs and _is_ours(*args):
            return _Linear.apply(*args, *(None,) * (3 - len(args)))
        return func(*args, **(kwargs or {}))


def _is_ours(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    needs_any = weight.requires_grad or (bias is not None and bias.requires_grad)
    takes_gradient = needs_any and torch.is_grad_enabled()  # else a parameter gives what a plain tensor does
    return not takes_gradient and input.dtype == weight.dtype == torch.float32 and input.device.type == "cpu"


class Widened(TorchFunctionMode):
    """While active, compute linears and attention on 16-bit tensors of the CPU in float32 where `is_slow`.

    What is passed on is in 16 bits as ever. For passes without gradients: those would keep the widened tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Compute one function of torch."""
        own = _WIDENED.get(func)
        if own is not None and args and args[0].device.type == "cpu" and is_slow(args[0].dtype):
            return own(*args, **(kwargs or {}))
        if func is functional.linear and len(args) in (2, 3) and not kwargs and _is_ours(*args):
            return _Linear.apply(*args, *(None,) * (3 - len(args)))
        return func(*args, **(kwargs or {}))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return torch.nn.functional.linear of 16-bit tensors, summed in float32, some rows and outputs at a time."""
    outputs, columns = weight.shape
    rows = input.reshape(-1, columns)
    out = rows.new_empty(len(rows), outputs)
    step = max(1, WEIGHT_SLICE // max(columns, 1))
    count = max(1, ROWS_SLICE // max(columns, min(step, outputs), 1))
    for start in range(0, outputs, step):
        part = slice(start, start + step)
        wide, shift = weight[part].float(), None if bias is None else bias[part].float()
        for first in range(0, len(rows), count):
            some = slice(first, first + count)
            out[some, part] = multiply(rows[some].float(), wide, shift)
    return out.view(*input.shape[:-1], outputs)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *others: Any, **named: Any
) -> Tensor:
    """Return torch's scaled_dot_product_attention of 16-bit tensors in float32, one sample at a time.

    query [batch, heads, tokens, head_dim], and as torch has it: a mask [batch or 1, heads or 1, tokens, keys] or less.
    """
    batch, heads, tokens = query.shape[:3]
    out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)  # as torch's own kernel lays it out
    for i in range(batch):
        q, k, v = (x[i : i + 1].float() for x in (query, key, value))
        mask = attn_mask
        if mask is not None and mask.dim() == 4 and mask.shape[0] == batch:
            mask = mask[i : i + 1]
        if mask is not None and mask.is_floating_point():
            mask = mask.float()
        out[i] = functional.scaled_dot_product_attention(q, k, v, mask, *others, **named)[0]
    return out


_WIDENED: dict[Any, Callable[..., Tensor]] = {
    functional.linear: linear,
    functional.scaled_dot_product_attention: attention,
}
