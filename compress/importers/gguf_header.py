"""Read the header of a GGUF file: its metadata and the places of its tensors, with nothing taken on trust.

A file is a magic number, a version, two counts, keys with typed values, a table of tensors, and their bytes. Every
length is compared with what is left of the file before anything of that length is read; lists of text (vocabularies)
are walked over and only counted.
"""

from __future__ import annotations

import math
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from compress.errors import CheckpointError, shown
from compress.importers import gguf_blocks, gguf_points
from compress.storage import safetensors_header
from compress.storage.files import open_regular

MAGIC, VERSIONS = b"GGUF", (2, 3)
TEXT_LIMIT = 16 << 20  # bytes of one text: a chat template, or a vocabulary's own rules
ITEMS_LIMIT = 4_000_000  # entries of all lists together: the reader of the tokenizer takes some 500 bytes for each
KEYS_LIMIT, TENSORS_LIMIT = 65_536, 1_000_000
DIMENSIONS = 4
KEPT_ITEMS = 1024  # a longer list of numbers (one for each token) is only counted, too
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.IGNORECASE)
SETTINGS = {  # key -> attribute of a configuration of transformers; a model has those that it knows
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
WIDTHS = (  # keys of sizes that some tensor has as one of its dimensions
    *("embedding_length", "feed_forward_length", "vocab_size", "attention.key_length", "attention.value_length"),
    *("attention.head_count", "attention.head_count_kv", "expert_count", "expert_used_count"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
)
BLOCKS, HEADS, KV_HEADS = "block_count", "attention.head_count", "attention.head_count_kv"
THETA, THETA_WITHIN = "rope.freq_base", "rope.freq_base_swa"  # the second of layers that see a window
SECTIONS = "rope.dimension_sections"
ROTATED, ROTATED_WITHIN = "rope.dimension_count", "rope.dimension_count_swa"  # entries of a head that are rotated
WINDOW, WINDOWS = "attention.sliding_window", "attention.sliding_window_pattern"
KIND, FACTOR = "rope.scaling.type", "rope.scaling.factor"
ORIGINAL_LENGTH = "rope.scaling.original_context_length"
FREQUENCIES = "rope_freqs.weight"  # tensor: by how much each rotary frequency is divided, float32 [head size / 2]
HEAD = "output.weight"  # tensor of the output head; a file without one has tied embeddings


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file."""

    name: str
    file: Path
    type: int  # its number in GGUF
    shape: tuple[int, ...]  # as in torch: rows first
    offset: int  # bytes from the start of the file
    nbytes: int
    factor: GgufTensor | None = None  # of all values, or of those of each expert; float32


class GgufHeader(NamedTuple):
    """What a GGUF file says of itself."""

    metadata: dict[str, Any]  # lists of text, and long ones of numbers, stand there as their length
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The architecture in the words of GGUF."""
        return str(self.metadata["general.architecture"])


def read_all(first: Path) -> GgufHeader:
    """Read the header of a file, and those of the files that go on with it (name-00001-of-00003.gguf).

    The metadata is that of the first. Raises CheckpointError.
    """
    parts = [read(file) for file in split_files(first)]
    tensors: dict[str, GgufTensor] = {}
    for index, part in enumerate(parts):
        number, count = part.metadata.get("split.no", index), part.metadata.get("split.count", len(parts))
        if (number, count) != (index, len(parts)) and count != 0:
            raise CheckpointError(
                f"{first} is part {number} of {count}, by its name {index} of {len(parts)}; name the files as they "
                "were published, and give the first"
            )
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise CheckpointError(f"{first}: tensor {shown(twice[0])} is in two of its parts; download them again")
        tensors.update(part.tensors)
    if not isinstance(parts[0].metadata.get("general.architecture"), str):
        raise CheckpointError(f"{first} is damaged: its header has no general.architecture; download it again")
    return GgufHeader(parts[0].metadata, _with_factors(tensors))


def _with_factors(tensors: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Return the tensors with the factors of those of NVFP4 in place of the tensors that hold these.

    A factor of another kind is left as it is, a tensor that no model has.
    """
    made = dict(tensors)
    for name, entry in tensors.items():
        stem = name.removesuffix(".weight")
        factor = tensors.get(f"{stem}.scale")
        if entry.type != gguf_points.NVFP4:
            continue
        made.pop(f"{stem}.input_scale", None)
        if factor is not None and factor.type == 0 and factor.shape in ((1,), entry.shape[:-2]):
            made[name] = entry._replace(factor=factor)
            del made[factor.name]
    return made


def split_files(first: Path) -> list[Path]:
    """Return the files that hold one model, the given one if that is whole; CheckpointError for a missing one."""
    match = SPLIT.fullmatch(first.name)
    if match is None:
        return [first]
    stem, number, count = match.groups()
    if int(number) != 1 or not 1 <= int(count) <= TENSORS_LIMIT:
        raise CheckpointError(
            f"{first} is not the first part of a split file; give the one that ends in -00001-of-{count}"
        )
    files = [first.with_name(f"{stem}-{index + 1:05d}-of-{count}.gguf") for index in range(int(count))]
    if missing := [file for file in files if not file.is_file()]:
        raise CheckpointError(f"{missing[0]} is missing, one of {count} parts; download it into the same directory")
    return files


def read(path: Path) -> GgufHeader:
    """Read the header of one file. Raises CheckpointError."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is missing; download it again")
    try:
        with open_regular(path) as stream:
            return _Reader(stream, path).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error


class _Reader:
    """A stream and the bytes that are left of it."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.stream, self.path = stream, path
        self.size = os.fstat(stream.fileno()).st_size
        self.items = 0

    def header(self) -> GgufHeader:
        magic = self.stream.read(4)
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file; give one that ends in .gguf, as it was published")
        version = self._number("I")
        if version not in VERSIONS:
            is_turned = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
            reason = "is written for big-endian machines" if is_turned else f"has version {version} of GGUF"
            raise CheckpointError(f"{self.path} {reason}; versions 2 and 3 (little-endian) are read")
        tensors, keys = self._number("Q"), self._number("Q")
        self._check(tensors <= TENSORS_LIMIT and keys <= KEYS_LIMIT, f"{tensors} tensors and {keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text(1 << 16)
            self._check(key not in metadata, f"key {shown(key)} twice")
            metadata[key] = self._value(self._number("I"), key)
        alignment = metadata.get("general.alignment", 32)
        is_sound = type(alignment) is int and 8 <= alignment <= 1 << 20 and alignment & (alignment - 1) == 0
        self._check(is_sound, f"alignment {shown(alignment)}")
        entries = [self._entry() for _ in range(tensors)]
        base = -(-self.stream.tell() // alignment) * alignment
        by_name: dict[str, GgufTensor] = {}
        for entry in entries:
            self._check(entry.name not in by_name, f"tensor {shown(entry.name)} twice")
            self._check(entry.offset % alignment == 0, f"tensor {shown(entry.name)} out of line")
            by_name[entry.name] = entry._replace(offset=base + entry.offset)
        spans = [
            safetensors_header.Span(entry.name, entry.offset, entry.offset + entry.nbytes) for entry in by_name.values()
        ]
        if wrong := safetensors_header.layout_fault(spans, base, self.size, alignment):
            raise CheckpointError(f"{self.path} {wrong}; download it again")
        return GgufHeader(metadata, by_name)

    def _check(self, is_sound: bool, what: str) -> None:
        if not is_sound:
            raise CheckpointError(f"{self.path} is damaged: its header has {what}; download it again")

    def _take(self, count: int) -> bytes:
        left = self.size - self.stream.tell()
        raw = self.stream.read(count) if count <= left else b""
        self._check(len(raw) == count, f"{count} bytes to come where {left} are left")
        return raw

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _text(self, limit: int = TEXT_LIMIT) -> str:
        length = self._number("Q")
        self._check(length <= limit, f"a text of {length} bytes")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} is damaged: its header has text that is not UTF-8") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == TEXT:
            return self._text()
        self._check(kind == LIST, f"a value of kind {kind} for {shown(key)}")
        inner, count = self._number("I"), self._number("Q")
        self.items += count
        self._check(self.items <= ITEMS_LIMIT, f"lists of {self.items} entries")
        if inner == TEXT:
            for _ in range(count):
                length = self._number("Q")
                self._check(
                    length <= TEXT_LIMIT and length <= self.size - self.stream.tell(), f"a text of {length} bytes"
                )
                self.stream.seek(length, os.SEEK_CUR)
            return count
        self._check(inner in SCALARS, f"a list of kind {inner} for {shown(key)}")
        raw = self._take(count * struct.calcsize(f"<{SCALARS[inner]}"))
        return count if count > KEPT_ITEMS else list(struct.unpack(f"<{count}{SCALARS[inner]}", raw))

    def _entry(self) -> GgufTensor:
        """Return the next tensor; its offset counts from where the data begins."""
        name, dimensions = self._text(1 << 10), self._number("I")
        self._check(1 <= dimensions <= DIMENSIONS, f"tensor {shown(name)} of {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        elements = math.prod(shape)
        self._check(
            0 < elements <= self.size * 16 and offset <= self.size, f"tensor {shown(name)} of shape {shown(shape)}"
        )
        if kind in gguf_blocks.PLAIN:
            return GgufTensor(name, self.path, kind, shape, offset, elements * gguf_blocks.PLAIN[kind].itemsize)
        block = gguf_blocks.BLOCKS.get(kind)
        if block is None:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} is of type {gguf_blocks.type_name(kind)}, which is not read; give "
                "a file of another type, such as Q8_0"
            )
        self._check(shape[-1] % block.elements == 0, f"tensor {shown(name)} with rows of {shape[-1]} for {block.name}")
        return GgufTensor(name, self.path, kind, shape, offset, elements // block.elements * block.nbytes)


class Bands(NamedTuple):
    """The one way to stretch positions that is written as a tensor: long wavelengths by a factor, short ones not."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def divisors(self, theta: float, count: int) -> list[float]:
        """Return what each of `count` rotary frequencies is divided by."""
        divisors = []
        for index in range(count):
            wavelength = 2 * math.pi * theta ** (index / count)
            turns = self.original_max_position_embeddings / wavelength
            share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            share = min(1.0, max(0.0, share))
            divisors.append(1 / ((1 - share) / self.factor + share))
        return divisors
