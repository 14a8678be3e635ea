"""Hand the stored tensors of a checkpoint to an importer, checked, and make tensors that are decoded when read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CheckpointError, shown
from compress.storage.checkpoint import CHUNK, CONFIG, StoredTensor

DEFAULT_DTYPE = torch.bfloat16  # the model's, where its configuration names none


@dataclass(frozen=True)
class Decoded:
    """A tensor that is computed from stored ones whenever it is read, some rows at a time.

    Rows are the entries of the first dimension; a single number is one row.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[StoredTensor, ...]
    decode: Callable[[int, int], Tensor]  # (start, stop), start a multiple of `step` -> these rows, in `dtype`
    step: int  # rows that are decoded at a time

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor that `read` returns."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the tensor in memory of its own."""
        return fill_rows(self.shape, self.dtype, self.decode, self.step)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the entries start .. stop - 1 of the first dimension."""
        first = start - start % self.step
        last = min(stop + -stop % self.step, count_rows(self.shape))
        return self.decode(first, last)[start - first : stop - first]

    def parts(self) -> Iterator[Tensor]:
        """Yield the tensor's bytes, uint8 [CHUNK], the last part [at most CHUNK]."""
        rest = torch.empty(0, dtype=torch.uint8)
        count = count_rows(self.shape)
        for start in range(0, count, self.step):
            rows = self.decode(start, min(start + self.step, count))
            *whole, rest = torch.cat([rest, rows.contiguous().reshape(-1).view(torch.uint8)]).split(CHUNK)
            yield from whole
            rest = rest.clone()
        if len(rest):
            yield rest

    def renamed(self, name: str) -> Decoded:
        """Return the same under another name."""
        return replace(self, name=name)


def count_rows(shape: tuple[int, ...]) -> int:
    """Return the entries of the first dimension, one of a single number."""
    return shape[0] if shape else 1


def step(shape: tuple[int, ...], multiple: int = 1) -> int:
    """Return how many rows of a tensor to decode at a time: CHUNK bytes in float32, and a multiple of `multiple`."""
    row = 4 * multiple * max(1, torch.Size(shape[1:]).numel())
    return multiple * max(1, CHUNK // row)


def fill_rows(shape: tuple[int, ...], dtype: torch.dtype, rows: Callable[[int, int], Tensor], step: int) -> Tensor:
    """Return a tensor that `rows(start, stop)` gives, `step` rows at a time."""
    if step >= (count := count_rows(shape)):
        return rows(0, count).contiguous()
    tensor = torch.empty(shape, dtype=dtype)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        tensor[start:stop] = rows(start, stop)
    return tensor


@dataclass
class CheckpointSource:
    """The stored tensors of a checkpoint that nobody has taken yet, and the settings of the tool that wrote it."""

    directory: Path
    config: Mapping[str, Any]
    settings: Mapping[str, Any]  # quantization_config
    stored: dict[str, StoredTensor]

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the model's weights that the configuration names."""
        text = self.config.get("text_config")
        for section in (self.config, text if isinstance(text, dict) else {}):
            named = section.get("dtype") or section.get("torch_dtype")
            dtype = getattr(torch, str(named).removeprefix("torch."), None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2:
                return dtype
        return DEFAULT_DTYPE

    def ending(self, ending: str) -> list[str]:
        """Return the names without `ending` of the tensors that have it, sorted."""
        return sorted(name.removesuffix(ending) for name in self.stored if name.endswith(ending))

    def take(
        self, name: str, dtypes: tuple[torch.dtype, ...] = (), shape: tuple[int, ...] | None = None
    ) -> StoredTensor:
        """Take a stored tensor; CheckpointError if it is not there, or of another type or shape than these."""
        stored = self.stored.pop(name, None)
        if stored is None:
            raise self.error(f"{name} is missing, without which its weight cannot be decoded; download it again")
        if dtypes and stored.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(f"{name} is stored as {str(stored.dtype).removeprefix('torch.')}, not as {names}")
        if shape is not None and stored.shape != shape:
            raise self.error(f"{name} has the shape {list(stored.shape)}, its weight asks for {list(shape)}")
        return stored

    def drop(self, *endings: str) -> None:
        """Leave out the tensors with these endings: they serve the other tool's products, and no weight."""
        for name in [name for name in self.stored if name.endswith(endings)]:
            del self.stored[name]

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer of the settings; CheckpointError for anything else, or less than `least`."""
        value = self.settings.get(key, default)
        if type(value) is not int or value < least:
            raise self.error(f"{CONFIG}: quantization_config has {key} {shown(value)}, not a number from {least} on")
        return value

    def error(self, message: str) -> CheckpointError:
        """Return the error that says what is wrong with this checkpoint."""
        return CheckpointError(f"{self.directory}: {message}")
