"""Headers of GGUF files: whatever is wrong with one is one clear line, found before anything large is read."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from compress.errors import CheckpointError
from compress.importers import gguf_header

TEXT, LIST, UINT32, FLOAT32 = 8, 9, 4, 6


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


KEYS = [
    key("general.architecture", TEXT, text("llama")),
    key("llama.block_count", UINT32, struct.pack("<I", 2)),
    key("tokenizer.ggml.tokens", LIST, struct.pack("<IQ", TEXT, 2) + text("a") + text("été")),
    key("tokenizer.ggml.scores", LIST, struct.pack("<IQ2f", FLOAT32, 2, 0.5, 1.0)),
]
ENTRIES = [entry("a.weight", (3, 32), 8, 0), entry("b.weight", (5,), 0, 128)]


def made(
    keys: list[bytes] = KEYS, entries: list[bytes] = ENTRIES, version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    counts = (len(entries), len(keys)) if counts is None else counts
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(entries)
    return header + bytes(-len(header) % 32) + bytes(148)


def read(tmp_path: Path, raw: bytes) -> gguf_header.GgufHeader:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    return gguf_header.read_all(path)


@pytest.mark.parametrize("version", [2, 3])
def test_a_header(version: int, tmp_path: Path) -> None:
    header = read(tmp_path, made(version=version))
    assert header.architecture == "llama" and header.metadata["llama.block_count"] == 2
    assert header.metadata["tokenizer.ggml.tokens"] == 2 and header.metadata["tokenizer.ggml.scores"] == [0.5, 1.0]
    base = len(made()) - 148
    assert [(e.shape, e.type, e.offset, e.nbytes) for e in header.tensors.values()] == [
        ((3, 32), 8, base, 102),
        ((5,), 0, base + 128, 20),
    ]


def test_padding_behind_the_last_tensor_and_another_order(tmp_path: Path) -> None:
    assert read(tmp_path, made() + bytes(12)).tensors == read(tmp_path, made()).tensors
    assert read(tmp_path, made(entries=ENTRIES[::-1])).tensors == read(tmp_path, made()).tensors


def listed(kind: int, count: int) -> bytes:
    return key("x", LIST, struct.pack("<IQ", kind, count))


BAD = {
    "another format": (b"PK\x03\x04" + made()[4:], "is not a GGUF file"),
    "nothing": (b"", "is not a GGUF file"),
    "an old version": (made(version=1), "has version 1 of GGUF"),
    "the other byte order": (made(version=3 << 24), "is written for big-endian machines"),
    "too many tensors": (made(counts=(1 << 40, 4)), "1099511627776 tensors and 4 keys"),
    "too many keys": (made(counts=(2, 1 << 63)), "keys"),
    "one key too many": (made(counts=(2, 5)), "is damaged"),
    "no architecture": (made(keys=KEYS[1:]), "no general.architecture"),
    "a key twice": (made(keys=[*KEYS, KEYS[1]]), "key 'llama.block_count' twice"),
    "a long text": (made(keys=[*KEYS, text("x") + struct.pack("<IQ", TEXT, 1 << 40)]), "a text of 1099511627776 bytes"),
    "no UTF-8": (made(keys=[*KEYS, key("x", TEXT, struct.pack("<Q", 1) + b"\xff")]), "not UTF-8"),
    "a long list": (made(keys=[*KEYS, listed(UINT32, 1 << 40)]), "lists of"),
    "a list beyond the file": (made(keys=[*KEYS, listed(UINT32, 1 << 20)]), "bytes to come where"),
    "texts beyond the file": (made(keys=[*KEYS, listed(TEXT, 1000)]), "is damaged"),
    "a list of lists": (made(keys=[*KEYS, listed(LIST, 1)]), "a list of kind 9"),
    "an unknown kind": (made(keys=[*KEYS, key("x", 77, b"")]), "a value of kind 77"),
    "a crooked alignment": (made(keys=[*KEYS, key("general.alignment", UINT32, struct.pack("<I", 7))]), "alignment 7"),
    "a tensor twice": (made(entries=[ENTRIES[0]] * 2), "tensor 'a.weight' twice"),
    "a tensor out of line": (made(entries=[entry("a", (32,), 0, 5)]), "tensor 'a' out of line"),
    "all tensors in one place": (
        made(entries=[ENTRIES[0], entry("b.weight", (5,), 0, 0)]),
        "tensor 'a.weight' begins at byte",
    ),
    "a tensor inside of another": (
        made(entries=[entry("a", (16,), 0, 0), entry("b", (1,), 0, 32)]),
        "inside of what is before it ('a')",
    ),
    "a hole": (made(entries=[entry("a", (8,), 0, 0), entry("b", (21,), 0, 64)]), "32 bytes in front of tensor 'b'"),
    "a hole in front": (made(entries=[entry("a", (29,), 0, 32)]), "32 bytes in front of tensor 'a'"),
    "bytes behind the last": (made() + bytes(13), "1 bytes behind its last tensor"),
    "an alignment that is no power of two": (
        made(keys=[*KEYS, key("general.alignment", UINT32, struct.pack("<I", 24))]),
        "alignment 24",
    ),
    "no dimensions": (made(entries=[entry("a", (), 0, 0)]), "of 0 dimensions"),
    "an empty tensor": (made(entries=[entry("a", (0, 4), 0, 0)]), "of shape"),
    "a huge tensor": (made(entries=[entry("a", (1 << 62, 1 << 62), 0, 0)]), "of shape"),
    "a tensor behind the end": (made(entries=[entry("a", (64,), 0, 0)]), "is truncated"),
    "half a block": (made(entries=[entry("a", (3, 31), 8, 0)]), "with rows of 31 for Q8_0"),
    "a type that is not read": (
        made(entries=[entry("a", (32,), 15, 0)]),
        "tensor 'a' is of type Q8_K, which is not read",
    ),
    "an unknown type": (made(entries=[entry("a", (32,), 99, 0)]), "of type number 99, which is not read"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_header(name: str, tmp_path: Path) -> None:
    raw, said = BAD[name]
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, raw)
    assert said in str(raised.value) and str(tmp_path / "m.gguf") in str(raised.value)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    raw = made()
    for length in range(len(raw)):
        with pytest.raises(CheckpointError):
            read(tmp_path, raw[:length])


def test_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """No change of a header leads anywhere else: no other error, no tensor outside of the file."""
    source, raw = random.Random(0), made()
    for _ in range(2000):
        changed = bytearray(raw)
        for _ in range(source.randint(1, 4)):
            changed[source.randrange(len(raw) - 148)] = source.choice((0, 1, 255, source.randrange(256)))
        try:
            header = read(tmp_path, bytes(changed))
        except CheckpointError:
            continue
        assert all(0 <= e.offset <= e.offset + e.nbytes <= len(raw) for e in header.tensors.values())


def test_a_part_that_is_not_the_first(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00003.gguf"
    path.write_bytes(made())
    with pytest.raises(CheckpointError, match="is not the first part of a split file"):
        gguf_header.read_all(path)
