"""What the modules of tools share: a clock, sizes from the headers of files, readers of packed integers."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor


class Clock:
    """Wall and CPU (user + system, all threads) seconds of a `with` block."""

    wall = cpu = 0.0

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self._wall, _cpu_seconds() - self._cpu


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_rss() -> int:
    """Return the peak resident bytes of this process since its exec.

    VmHWM and not ru_maxrss: the latter starts at the size that the parent had when it started this process.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def read_headers(directory: Path) -> dict[str, int]:
    """Return the stored bytes of every tensor of a checkpoint, from the files' headers."""
    stored: dict[str, int] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        stored |= {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}
    return stored


def read_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the unquantized model."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def source_linears(model: Path) -> dict[str, tuple[int, int]]:
    """Return the decoder blocks' linear modules of the unquantized model and their shapes (out, in)."""
    shapes = read_shapes(model).items()
    named = [(name, shape) for name, shape in shapes if name.endswith(".weight") and ".layers." in name]
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in named if len(shape) == 2}


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint as they are stored."""
    stored: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= load_file(file)
    return stored


def owner(name: str, linears: dict[str, tuple[int, int]]) -> str | None:
    """Return the linear below whose name a tensor is stored, None for one of no linear."""
    while name:
        name = name.rpartition(".")[0]
        if name in linears:
            return name
    return None


def take_parts(stored: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    """Take what lies below a module's name out of `stored`, and return it by the rest of the names."""
    names = [name for name in stored if name.startswith(f"{module}.")]
    return {name.removeprefix(f"{module}."): stored.pop(name) for name in names}


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return codes [rows, count] int64 >= 0 of int32 words [rows, w], a little-endian bit stream along each row."""
    shifts = torch.arange(32, dtype=torch.int32)
    stream = ((words.unsqueeze(-1) >> shifts) & 1).reshape(words.shape[0], -1)[:, : count * bits]  # one bit an entry
    return (stream.reshape(words.shape[0], count, bits).long() << torch.arange(bits)).sum(-1)


def read_others(model: Path) -> dict[str, Tensor]:
    """Return the tensors of the unquantized model that are no weights of the decoder's linears."""
    linears = {f"{name}.weight" for name in source_linears(model)}
    return {name: tensor for name, tensor in read_checkpoint(model).items() if name not in linears}


def restore_modules(
    packed: Path, mark: str, decode: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Tensor]
) -> dict[str, Tensor]:
    """Return the plain tensors of a checkpoint, and its linears, each of which stores a tensor that ends in `mark`.

    decode(tensors of a linear, quantization_config of config.json) returns its weight [out, in].
    """
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    stored = read_checkpoint(packed)
    plain: dict[str, Tensor] = {}
    for module in [name.removesuffix(mark) for name in stored if name.endswith(mark)]:
        parts = take_parts(stored, module)
        plain[f"{module}.weight"] = decode(parts, config)
        if "bias" in parts:
            plain[f"{module}.bias"] = parts["bias"].float()
    return plain | {name: tensor.float() for name, tensor in stored.items()}
