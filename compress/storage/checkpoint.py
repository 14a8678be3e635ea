"""Read and write checkpoint directories, one tensor at a time.

Reading parses the safetensors headers itself and reads each tensor's bytes with a plain read: nothing is mapped, so the
resident memory is what the caller holds, and a truncated or unsafe file is found before work starts. Nothing is
unpickled. Writing streams tensors into a temporary file beside the target, hashes them on the way, syncs and renames:
a file that has its final name is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from compress.errors import CheckpointError, first_line, shown
from compress.storage import json_text, paths, safetensors_header
from compress.storage.files import open_regular, replacing

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"  # all tensors in one file; an index beside it, of an earlier save, does not count
CONFIG, MANIFEST = paths.CONFIG, paths.MANIFEST
CHUNK = 8 << 20  # bytes copied at a time

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Writable: TypeAlias = "Tensor | Readable | EditedTensor"


class Readable(Protocol):
    """A tensor that is read when it is asked for: as it is on disk, or decoded from what is on disk."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor that `read` returns."""

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """Return the tensors on disk that it is read from."""

    def parts(self) -> Iterator[Tensor]:
        """Yield the tensor's bytes, uint8 [CHUNK], the last part [at most CHUNK]."""

    def read(self) -> Tensor:
        """Return the tensor in memory of its own."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the entries start .. stop - 1 of the first dimension."""

    def renamed(self, name: str) -> Readable:
        """Return the same under another name."""


class StoredTensor(NamedTuple):
    """A tensor on disk: its file, place, type and shape."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int

    def parts(self) -> Iterator[Tensor]:
        """Yield the tensor's bytes, uint8 [at most CHUNK]."""
        for start in range(0, self.nbytes, CHUNK):
            count = min(CHUNK, self.nbytes - start)
            yield self._replace(dtype=torch.uint8, shape=(count,), offset=self.offset + start, nbytes=count).read()

    def read(self) -> Tensor:
        """Return the tensor in memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if self.nbytes:
            view = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
            with open_regular(self.file) as stream:
                stream.raw.seek(self.offset, os.SEEK_SET)
                done = 0
                while done < self.nbytes:
                    count = stream.raw.readinto(view[done:])
                    if not count:
                        raise CheckpointError(
                            f"{self.file.name} ended within tensor {shown(self.name)}; copy the file again"
                        )
                    done += count
        return tensor

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """Return the tensors on disk that it is read from: itself."""
        return (self,)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the entries start .. stop - 1 of the first dimension."""
        row = self.nbytes // max(1, self.shape[0])
        shape = (stop - start, *self.shape[1:])
        return self._replace(shape=shape, offset=self.offset + start * row, nbytes=(stop - start) * row).read()

    def renamed(self, name: str) -> StoredTensor:
        """Return the same under another name."""
        return self._replace(name=name)


class EditedTensor(NamedTuple):
    """A stored tensor [rows, columns] that is changed while it is copied, some rows at a time."""

    stored: Readable
    change: Callable[[Tensor], Tensor]  # rows [r, columns] -> rows of the same shape and type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def parts(self) -> Iterator[Tensor]:
        step = max(1, CHUNK // (self.stored.nbytes // self.shape[0]))
        for start in range(0, self.shape[0], step):
            yield self.change(self.stored.rows(start, min(start + step, self.shape[0])))


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint directory; only headers have been read."""

    directory: Path
    config: dict[str, Any]
    tensors: Mapping[str, Readable]
    base: str = ""  # how another tool has stored what is decoded here, in words; "" where all is read as it is
    base_settings: Mapping[str, Any] = field(default_factory=dict)  # that tool's, by which it is decoded

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors as they are read."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """Return the files that the tensors are read from, sorted."""
        return sorted({source.file for tensor in self.tensors.values() for source in tensor.sources})


def open_checkpoint(directory: Path) -> Checkpoint:
    """List the tensors of a checkpoint directory.

    Raises CheckpointError for a directory without config or safetensors, an index that points outside the directory, a
    missing or truncated shard, an index that promises tensors its shards do not have, a config of a larger model, or
    float8 weights without a quantization_config.
    """
    config = read_config(directory)
    tensors: dict[str, StoredTensor] = {}
    weight_map = {} if (directory / SINGLE).is_file() else _weight_map(directory)  # transformers looks in this order
    for file in sorted(set(weight_map.values())) if weight_map else _single_file(directory):
        tensors.update(read_header(directory / file))
    if missing := sorted(set(weight_map) - set(tensors)):
        raise CheckpointError(
            f"{directory / INDEX} lists {len(missing)} tensors that no shard has, the first is {shown(missing[0])}; "
            "download the checkpoint again"
        )
    if weight_map:
        tensors = {name: stored for name, stored in tensors.items() if name in weight_map}
    largest = max((math.prod(stored.shape) for stored in tensors.values()), default=0)
    json_text.check_sizes(config, str(directory / CONFIG), len(tensors), largest)
    if not config.get("quantization_config") and not (directory / paths.MODELOPT_SETTINGS).is_file():
        _check_scaled(directory, tensors)
    return Checkpoint(directory, config, tensors)


def _check_scaled(directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError for float8 weights: nothing says which scales they are to be multiplied with."""
    if names := sorted(name for name, stored in tensors.items() if stored.dtype in FLOAT8):
        raise CheckpointError(
            f"{directory} stores {len(names)} tensors as float8, first {names[0]}, and its {CONFIG} has no "
            "quantization_config that says how they are scaled; give the original checkpoint (bfloat16 or float16), or "
            f"the {CONFIG} that was published with these weights"
        )


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json as a dict, without the notice to those who have no compress."""
    paths.check_checkpoint(directory)
    path = directory / CONFIG
    config = json_text.remove_notice(read_json(path))
    if not config.get("model_type"):
        raise CheckpointError(f"{path} names no model_type; is it a Hugging Face model configuration?")
    return config


def read_json(path: Path, remedy: str = "download it again") -> dict[str, Any]:
    """Return a JSON object from a file; raise CheckpointError for anything else. remedy: what to do about it."""
    try:
        with open_regular(path) as stream:
            value = json_text.loads(stream.read(json_text.TEXT_LIMIT + 1))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({first_line(error)}); {remedy}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; {remedy}")
    return value


def _weight_map(directory: Path) -> dict[str, str]:
    """Return tensor name -> file name from the index, {} without one; files must lie inside the directory."""
    path = directory / INDEX
    if not path.is_file():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{path} places tensor {shown(name)} in {shown(file)}, outside the directory; refused"
            )
    return weight_map


def _single_file(directory: Path) -> list[str]:
    if (directory / SINGLE).is_file():
        return [SINGLE]
    shards = sorted(p.name for p in directory.glob("*.safetensors"))
    if len(shards) == 1:
        return shards
    if shards:
        raise CheckpointError(f"{directory} has {len(shards)} safetensors files but no {INDEX}; add the index")
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise CheckpointError(
            f"{directory} has only pickled weights (.bin), which can run code when loaded and are not read; "
            "convert the checkpoint to safetensors first"
        )
    raise CheckpointError(f"{directory} has no model.safetensors and no {INDEX}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file; the header is checked against the file's size."""
    try:
        return {entry.name: _stored_tensor(path, entry) for entry in safetensors_header.read(path).entries}
    except ValueError as error:
        raise safetensors_header.malformed_error(path, error) from error


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file."""
    return safetensors_header.read(path).metadata


def _stored_tensor(path: Path, entry: safetensors_header.Entry) -> StoredTensor:
    dtype, nbytes = DTYPES.get(entry.dtype), entry.stop - entry.start
    if dtype is None:
        raise ValueError(f"tensor {shown(entry.name)} is of type {shown(entry.dtype)}, which is not read")
    if nbytes != math.prod(entry.shape) * dtype.itemsize:
        raise ValueError(f"tensor {shown(entry.name)} has {nbytes} bytes for shape {shown(entry.shape)}")
    return StoredTensor(entry.name, path, dtype, entry.shape, entry.start, nbytes)


def write_shard(path: Path, tensors: Mapping[str, Writable], *, metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file whole or not at all; return the sha256 of its bytes.

    Values are tensors in memory or tensors on disk, which are copied (and changed) in chunks. Entries are ordered by
    element size, then name, so that every tensor is aligned and equal input gives equal bytes. metadata: of the file.
    """
    entries = sorted(tensors.items(), key=lambda kv: (-kv[1].dtype.itemsize, kv[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, value in entries:
        start, end = end, end + math.prod(value.shape) * value.dtype.itemsize
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    digest = hashlib.sha256()
    with replacing(path) as stream:
        for chunk in _chunks(raw, [value for _, value in entries]):
            digest.update(chunk)
            stream.write(chunk)
    return digest.hexdigest()


def _chunks(header: bytes, values: Iterable[Writable]) -> Iterable[bytes | memoryview]:
    yield len(header).to_bytes(8, "little") + header
    for value in values:
        if not isinstance(value, Tensor):
            yield from map(_bytes, value.parts())
        elif value.numel():
            yield _bytes(value)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    with replacing(path) as stream:
        stream.write(text.encode(errors="backslashreplace"))  # names of files may hold what is no character


def sha256(path: Path) -> str:
    """Return the hash of a file's bytes."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
