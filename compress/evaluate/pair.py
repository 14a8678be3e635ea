"""Two loaded models, the original and the compressed one: opened together, and compared on text.

Where a cache is named, the compressed model reads through it, and the original without: its own cache is exact.

The noise floor is the KL of the original to itself in another number type, weights and arithmetic both: bfloat16 beside
float32 (float32 where the scores are in another type), on the first windows of a text. A difference of that size is
rounding, and says nothing of the compression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.evaluate import cache_scores, lost_tokens
from compress.evaluate.cache_candidates import check, open_reader
from compress.evaluate.reader import Execution, Reader
from compress.evaluate.scores import Comparison, TextWindows, positions, summary, windows_at_a_time
from compress.kv.settings import CacheSettings
from compress.model import load as lm
from compress.progress import Progress

FLOOR_WINDOWS = 4  # windows of a text that the noise floor is measured on


@dataclass(frozen=True)
class Pair:
    """A model and its original, with their tokenizers, the original first."""

    directories: tuple[Path, Path]
    base: Reader
    model: Reader
    tokenizers: tuple[Any, Any]

    @property
    def configs(self) -> tuple[Any, Any]:
        """The configurations of the text models."""
        base, model = (each.model.config.get_text_config() for each in (self.base, self.model))
        return base, model


def open_pair(
    directory: Path,
    base: Path,
    execution: Execution,
    caches: Mapping[str, CacheSettings] | None,
    calib: str | None,
    progress: Progress,
) -> Pair:
    """Load a model and its original. CheckpointError where they cannot be compared: other numbers of token ids.

    caches: the one that the model reads through, by name; empty: its own; None: none. calib: text to calibrate it on.
    """
    sizes = [lm.load_config(each).vocab_size for each in (base, directory)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{base.name} knows {sizes[0]:,} token ids, {directory.name} {sizes[1]:,}; predictions over other tokens "
            "cannot be compared"
        )
    if caches is not None:
        check(directory, caches, calib)
    tokenizers = lm.load_tokenizer(base), lm.load_tokenizer(directory)
    original = Reader(lm.load_model(base, execution.dtype, execution.device), name=base.name)
    if caches is None:
        model = Reader(lm.load_model(directory, execution.dtype, execution.device), name=directory.name)
    else:
        original.attach_cache()  # the exact one, where the original stores another
        model = open_reader(directory, execution, caches, calib, progress)
    return Pair((base, directory), original, model, tokenizers)


def compare_text(
    pair: Pair, name: str, cut: TextWindows, progress: Progress
) -> tuple[Comparison, lost_tokens.LostTokens | None]:
    """Return the scores of a text, and where they were lost; None for that through a cache. name: of the text."""
    if pair.model.cache is not None:
        return cache_scores.compare_text(pair.model, pair.base.model, cut, name, progress), None
    windows, unscored = cut.tokens, cut.prefix.unscored
    readers = [pair.model, pair.base]
    batch, figures = windows_at_a_time(readers, windows.shape[1]), []
    for begin in range(0, len(windows), batch):
        figures.append(positions(readers, windows[begin : begin + batch]))
        progress(f"scoring {name}", min(begin + batch, len(windows)), len(windows))
    by_window = _by_window(figures, windows, unscored)
    comparison = summary(by_window, name, windows.shape[1], cut.prefix.text)
    assert isinstance(comparison, Comparison)
    lost = lost_tokens.find(readers, windows, by_window[2], name, pair.tokenizers[0].decode)
    return comparison, lost


def noise_floor(pair: Pair, cut: TextWindows, execution: Execution, progress: Progress) -> dict[str, Any]:
    """Return the KL of the original to itself in another number type."""
    progress("measuring the noise floor", 0, 0)
    dtype = str(pair.base.model.dtype).removeprefix("torch.")
    other_dtype = "bfloat16" if dtype == "float32" else "float32"
    directory = pair.directories[0]
    other = Reader(lm.load_model(directory, other_dtype, execution.device), name=directory.name)
    windows = cut.tokens[:FLOOR_WINDOWS]
    readers = [other, pair.base]
    batches = windows.split(windows_at_a_time(readers, windows.shape[1]))
    by_window = _by_window([positions(readers, batch) for batch in batches], windows, cut.prefix.unscored)
    return {
        "kl_mean": float(by_window[2].mean()),
        "same_top1": float(by_window[3].mean()),
        "tokens": by_window[0].numel(),
        "path": f"the original in {other_dtype} against itself in {dtype}",
    }


def _by_window(figures: list[Tensor], windows: Tensor, unscored: int) -> Tensor:
    """Return what `scores.positions` gives for batches of windows as [4, windows, scored tokens]."""
    return torch.cat(figures, 1).view(4, len(windows), windows.shape[1] - 1)[..., unscored:]
