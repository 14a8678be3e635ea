"""Compare what lies behind the blocks, the last norm and the output head, on the original's own hidden states.

Both models are run once more, the output of their last block replaced by what the original has there (rotated, where
the compressed model is). Logits that are like the original's clear both parts, whatever was moved between them: the
weight of the norm may be in the head. Where they are not, what the head takes tells which of the two is broken: it is
the original's, or, where the weight of the norm has moved, the hidden states brought to a mean square of 1.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.evaluate import feature_order
from compress.evaluate.feature_order import LIKE, SHIFTS

SEARCHED = 512  # rows of the head that are looked for at other places, at most


@dataclass(frozen=True)
class Part:
    """How the output of a part differs from the original's; norms and correlations are over a token's features."""

    name: str
    ratio: float  # norm of a token's output, to the original's; median over tokens
    unlike: float  # 1 - correlation; median over tokens


@dataclass(frozen=True)
class Tail:
    """What lies behind the blocks. `norm` is compared with the version of it that is most alike."""

    norm: Part
    head: Part  # on its own model's norm, on logits less their mean
    moved: str  # which rows of the head stand in another order, in words; "" for none


def compare(
    models: tuple[Any, Any], blocks: tuple[nn.Module, nn.Module], tokens: Tensor, hidden: tuple[Tensor, Tensor]
) -> Tail | None:
    """Compare the last norm and the output head of (base, model); None where one has no head.

    blocks: the last one of each. tokens int64 [1, seq_len]; hidden: what stands for the output of the blocks, each in
    the basis of its model.
    """
    if any(model.get_output_embeddings() is None for model in models):
        return None
    name, z, y = _run(models[0], blocks[0], tokens, hidden[0])
    _, z_other, y_other = _run(models[1], blocks[1], tokens, hidden[1])
    if y.shape != y_other.shape or z.shape != z_other.shape:
        return None
    unit = [(h / h.square().mean(-1, keepdim=True).sqrt()).reshape(z.shape) for h in hidden]
    norm = min((_part(name, version, z_other) for version in (z, *unit)), key=lambda part: part.unlike)
    y, y_other = (each - each.mean(-1, keepdim=True) for each in (y, y_other))
    head = next(name for name, module in models[0].named_modules() if module is models[0].get_output_embeddings())
    return Tail(norm, _part(head, y, y_other), _moved(y, y_other))


def _run(model: Any, block: nn.Module, tokens: Tensor, hidden: Tensor) -> tuple[str, Tensor, Tensor]:
    """Return the name of what stands in front of the head, and what the head takes and gives: float32 [tokens, n]."""
    head, seen, given = model.get_output_embeddings(), dict[str, Any](), dict[int, str]()

    def replace(_: nn.Module, args: Any, out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        put = hidden.to(first.dtype)
        return (put, *out[1:]) if isinstance(out, tuple) else put

    def keep(_: nn.Module, args: Any, out: Any) -> None:
        seen["z"], seen["y"] = args[0], out

    def named(name: str) -> Any:
        def hook(_: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                given[out.data_ptr()] = name

        return hook

    with ExitStack() as stack:
        stack.callback(block.register_forward_hook(replace).remove)
        stack.callback(head.register_forward_hook(keep).remove)
        for name, module in model.named_modules():
            if module is not head and not any(module.children()):
                stack.callback(module.register_forward_hook(named(name)).remove)
        model(tokens.to(model.device), use_cache=False)
    z, y = (seen[key].flatten(0, -2).float() for key in "zy")
    return given.get(seen["z"].data_ptr(), "the last norm"), z, y


def _part(name: str, y: Tensor, other: Tensor) -> Part:
    """Compare outputs [tokens, features] token by token."""
    norms = [each.norm(dim=1).clamp_min(1e-20) for each in (y, other)]
    alike = (y * other).sum(1) / (norms[0] * norms[1])
    return Part(name, float((norms[1] / norms[0]).median()), 1 - float(alike.median()))


def _moved(y: Tensor, other: Tensor) -> str:
    """Say which tokens of the original's logits stand elsewhere; "" for few, and where they are not found."""
    y, other = (each - each.mean(0) for each in (y, other))
    lost = (feature_order.correlations(y, other) < LIKE).nonzero()[:, 0]
    rows = lost[torch.linspace(0, len(lost) - 1, min(len(lost), SEARCHED)).long()] if len(lost) else lost
    if len(rows) < SHIFTS:
        return ""
    pairs = feature_order.elsewhere(y, other, rows, max(SHIFTS, len(rows) / 2))
    return feature_order.said(pairs) if pairs else ""
