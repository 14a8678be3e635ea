"""Let a model and its original go on from the beginnings of texts, for people to read side by side.

Both write greedily, all prompts as one batch. A figure is not made of it: texts part at the first token that differs,
and what follows need not be worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.evaluate.generation import text_behind
from compress.model import writing
from compress.model.positions import max_positions

PROMPTS = 3
PROMPT, NEW = 32, 48  # tokens, at most


def continued(
    base: Any, model: Any, windows: Sequence[Tensor], decode: Callable[[Sequence[int]], str]
) -> list[dict[str, str]]:
    """Return "prompt", "base" and "model", what both write behind it, for a few windows.

    windows: for each text int64 [windows, tokens], of at least two tokens; texts take turns. model: with the cache that
    it is to write through attached.
    """
    first = [each[turn] for turn in range(PROMPTS) for each in windows if turn < len(each)][:PROMPTS]
    if not first:
        return []
    length = min(PROMPT, min(map(len, first)) // 2)
    start = torch.stack([window[:length] for window in first])
    prompts = [decode(tokens) for tokens in start.tolist()]
    said = [_written(each, start, decode) for each in (base, model)]
    return [{"prompt": prompt, "base": a, "model": b} for prompt, a, b in zip(prompts, *said, strict=True)]


def _written(model: Any, start: Tensor, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return what a model writes behind each row of start int64 [rows, tokens]."""
    stop, positions = writing.end_tokens(model), max_positions(model.config.get_text_config())
    new = NEW if positions is None else min(NEW, positions - start.shape[1])
    draw = writing.Draw(str(model.name_or_path), 0.0, torch.Generator())
    found = writing.write(model, start, new, draw, stop).tolist()
    return [text_behind(decode, row, start.shape[1]) for row in found]
