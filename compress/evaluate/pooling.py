"""Make embeddings of texts as sentence-transformers does: the settings are in files beside a model.

modules.json names the folder of the pooling, whose config.json says how the states of the tokens become one vector.
config_sentence_transformers.json has what is put before a question or a document. Without these files an encoder's
states are averaged, and of a decoder the last one is taken. Layers behind the pooling are not applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError, first_line
from compress.storage.checkpoint import read_json
from compress.storage.files import read_text
from compress.storage.json_text import loads
from compress.storage.manifest import MODULES

PROMPTS, LENGTH = "config_sentence_transformers.json", "sentence_*_config.json"


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def _last(states: Tensor, mask: Tensor) -> Tensor:
    return states[torch.arange(len(states)), mask.sum(1) - 1]


POOLINGS: dict[
    str, Callable[[Tensor, Tensor], Tensor]
] = {  # of states [n, tokens, hidden], mask [n, tokens] of 0 and 1
    "cls_token": lambda states, mask: states[:, 0],
    "mean_tokens": _mean,
    "max_tokens": lambda states, mask: states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1),
    "mean_sqrt_len_tokens": lambda states, mask: _mean(states, mask) * mask.sum(1, keepdim=True).sqrt(),
    "weightedmean_tokens": lambda states, mask: _mean(states, mask * torch.arange(1, mask.shape[1] + 1)),
    "lasttoken": _last,
}
SHORT = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "weightedmean": "weightedmean_tokens"}


@dataclass(frozen=True)
class Pooling:
    """How a model makes embeddings."""

    modes: tuple[str, ...]  # keys of POOLINGS, whose vectors are joined
    prompts: Mapping[str, str] = field(default_factory=dict)  # "query" or "document" -> what is put before one
    most_tokens: int | None = None  # of a text; the rest is cut off

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings [n, width] float32 of states [n, tokens, hidden]; mask [n, tokens]: 0 at padding."""
        return torch.cat([POOLINGS[mode](states.float(), mask) for mode in self.modes], 1)


def is_listed(directory: Path) -> bool:
    """Return whether a directory says how its model makes embeddings."""
    return (directory / MODULES).is_file()


def read(directory: Path, model: nn.Module) -> Pooling:
    """Return how the model of a directory makes embeddings; CheckpointError for settings that cannot be read."""
    folders = [str(each["path"]) for each in _read_layers(directory) if str(each.get("type")).endswith("Pooling")]
    settings = read_json(directory / folders[0] / "config.json") if folders else {}
    modes = [mode for mode in POOLINGS if settings.get(f"pooling_mode_{mode}")]
    if not modes and (named := settings.get("pooling_mode")):
        given = [named] if isinstance(named, str) else named
        modes = [mode for each in given if (mode := SHORT.get(each, each)) in POOLINGS]
    if not modes:
        modes = ["lasttoken" if any(getattr(each, "is_causal", False) for each in model.modules()) else "mean_tokens"]
    prompts, length = (
        next((read_json(path) for path in sorted(directory.glob(name))), dict[str, Any]()) for name in (PROMPTS, LENGTH)
    )
    return Pooling(tuple(modes), prompts.get("prompts") or {}, length.get("max_seq_length"))


def _read_layers(directory: Path) -> list[dict[str, Any]]:
    """Return the layers that a directory lists, [] where it lists none."""
    if not is_listed(directory):
        return []
    try:
        layers = loads(read_text(directory / MODULES))
    except ValueError as error:
        raise CheckpointError(f"{directory / MODULES} is not valid JSON ({first_line(error)})") from error
    if not isinstance(layers, list) or not all(isinstance(each, dict) and "path" in each for each in layers):
        raise CheckpointError(f"{directory / MODULES} is no list of layers with a path each; download it again")
    return layers
