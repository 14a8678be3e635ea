"""Read what the `kv_cache` section of a checkpoint makes of each attention layer of an engine whose cache has pages.

Nothing here needs an engine. The settings are those that generation in transformers uses, or the nearest that pages can
hold (compress/kv/paging.py). Layers with sliding windows are coded, too: beside pages of exact numbers those of the
others would be padded to the same size, and nothing would be saved.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import cached_file

from compress.errors import UnsupportedModelError
from compress.kv import paging, static
from compress.kv.cache import layer_types
from compress.kv.codec import Spec
from compress.kv.pages import PagedCodes, Pages, Turn
from compress.kv.settings import KINDS, CacheSettings, Codings
from compress.runtime import kv_config

# Types of vLLM's own on GPUs: (bytes a channel of keys and values together, bytes beside them) of a token and KV head.
VLLM_TYPES = {
    "int8_per_token_head": (2.0, 8),
    "turboquant_k8v4": (1.5, 4),
    "int4_per_token_head": (1.0, 8),
    "turboquant_4bit_nc": (1.0, 6),
    "turboquant_k3v4_nc": (0.875, 6),
    "turboquant_3bit_nc": (0.75, 6),
}


class LayerCache(NamedTuple):
    """How pages hold the keys and values of a layer, of the KV heads of one rank."""

    keys: PagedCodes
    values: PagedCodes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token of a KV head."""
        return self.pages(1).token_bytes

    def pages(self, tokens: int) -> Pages:
        """Return the layout of pages of so many tokens."""
        return Pages(self.keys.codes, self.values.codes, tokens)


def of_heads(held: PagedCodes, heads: range, device: torch.device) -> PagedCodes:
    """Return what some of the KV heads need of it, on a device."""
    span, turn = slice(heads.start, heads.stop), held.turn
    forward, inverse = (matrix[span] if matrix.dim() > 2 else matrix for matrix in (turn.forward, turn.inverse))
    mean = None if turn.mean is None else turn.mean[span].to(device)
    levels = None if held.levels is None else held.levels.to(device)
    return PagedCodes(held.codes, Turn(forward.to(device), inverse.to(device), mean), levels)


def heads_of_rank(total: int, rank: int, ranks: int) -> range:
    """Return the KV heads that a rank of tensor parallelism holds; where there are fewer heads than ranks, one of them.

    Raises UnsupportedModelError where they cannot be shared out evenly.
    """
    if total % ranks and ranks % total:
        raise UnsupportedModelError(
            f"kv_cache: {total} KV heads are not shared evenly by {ranks} ranks; set another --tensor-parallel-size"
        )
    count, first = max(1, total // ranks), rank * total // ranks
    return range(first, first + count)


def vllm_types(token_bytes: int, width: int) -> str:
    """Return the flags of vLLM's own types of the nearest size, with their bytes, for a message.

    token_bytes: of a token and KV head, keys and values; width: of a head.
    """
    sizes = {name: int(width * channel + beside) for name, (channel, beside) in VLLM_TYPES.items()}
    nearest = {}
    for kind in ("per_token_head", "turboquant"):
        name = min((name for name in sizes if kind in name), key=lambda name: abs(sizes[name] - token_bytes))
        nearest[name] = sizes[name]
    return " or ".join(f"--kv-cache-dtype {name} ({size} bytes)" for name, size in nearest.items())


class CheckpointCache:
    """The cache of one checkpoint: its settings and calibrated tensors, read when a layer first asks."""

    def __init__(self, section: Any, model: str, config: Any, revision: str | None = None) -> None:
        """section: `kv_cache` of config.json; model: the folder or the name on the hub; config: of the model."""
        self._section, self._model, self._config, self._revision = section, model, config, revision

    @cached_property
    def layer_count(self) -> int:
        """Layers of the decoder."""
        return len(layer_types(self._config))

    @cached_property
    def _settings(self) -> CacheSettings:
        return kv_config.read(self._section, self.layer_count)

    @cached_property
    def _servable(self) -> tuple[Codings, str | None]:
        return paging.servable(self._settings, self.layer_count)

    @cached_property
    def _static(self) -> dict[str, Tensor]:
        return kv_config.read_static(self._section, self._directory(), self._config, self._settings)

    def _directory(self) -> Path:
        """Return the folder of the calibrated tensors, which are fetched from the hub if they are not here."""
        if Path(self._model).is_dir() or self._section.get("static") is None:
            return Path(self._model)
        return Path(str(cached_file(self._model, kv_config.FILE, revision=self._revision))).parent

    @property
    def note(self) -> str | None:
        """A line of what pages hold otherwise than the section says; None if nothing."""
        return self._servable[1]

    def _heads(self, index: int) -> int | None:
        """Return the KV heads of a layer, as the configuration or calibrated tensors tell them; None: neither does."""
        if static.states_heads(self._config):
            return static.head_shape(self._config)[1]
        names = (f"layers.{index}.{kind}.forward" for kind in KINDS)
        return next((len(self._static[name]) for name in names if name in self._static), None)

    def layer(self, index: int, shape: tuple[int, int, int], ranks: tuple[int, int]) -> LayerCache | None:
        """Return how pages hold a layer on a rank, None where it stays exact.

        shape: KV heads of the rank, width of keys, width of values; ranks: (this one, all). Raises RecipeError where
        codes do not fit the heads.
        """
        total = self._heads(index) or shape[0] * ranks[1]
        specs = {
            kind: Spec(kind, index, self.layer_count, total, width, 1)  # type: ignore[arg-type]
            for kind, width in zip(KINDS, shape[1:], strict=True)
        }
        held = paging.for_layer(self._servable[0][index], specs, self._static)
        if held is None:
            return None
        heads, device = heads_of_rank(total, *ranks), torch.empty(0).device
        return LayerCache(*(of_heads(each, heads, device) for each in held))
