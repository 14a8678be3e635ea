"""Layouts of files with tensors: what the safetensors library refuses is refused, and what it reads is read alike."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save

from compress.errors import CheckpointError
from compress.storage import safetensors_header
from compress.storage.checkpoint import read_header
from compress.storage.safetensors_header import Span

ENTRY = '{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}'


def file(header: str | bytes, data: int = 16) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def library(raw: bytes) -> dict[str, tuple[Any, bytes]] | None:
    """Return what the safetensors library reads, None where it refuses."""
    try:
        return {name: (tuple(each["shape"]), bytes(each["data"])) for name, each in safetensors.deserialize(raw)}
    except safetensors.SafetensorError:
        return None


def ours(raw: bytes, path: Path) -> dict[str, tuple[Any, bytes]] | None:
    """Return what is read here, None where it is refused in one line that names the file."""
    path.write_bytes(raw)
    try:
        found = read_header(path)
    except CheckpointError as error:
        assert str(error).startswith((str(path), f"shard {path}")) and "\n" not in str(error)
        return None
    return {
        name: (tensor.shape, tensor.read().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in found.items()
    }


LAYOUTS = {  # offsets of tensors of 4 bytes, and bytes of data
    "one after another": ([(0, 4), (4, 8)], 8),
    "in another order": ([(4, 8), (0, 4)], 8),
    "the same bytes": ([(0, 4), (0, 4)], 8),
    "shared bytes": ([(0, 4), (2, 6)], 6),
    "a hole": ([(0, 4), (8, 12)], 12),
    "a hole in front": ([(4, 8)], 8),
    "bytes behind the last": ([(0, 4)], 5),
    "too few bytes": ([(0, 4), (4, 8)], 7),
    "no tensor, but bytes": ([], 4),
    "no tensor": ([], 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_the_library_refuses_are_refused(name: str, tmp_path: Path) -> None:
    offsets, data = LAYOUTS[name]
    header = {str(i): {"dtype": "U8", "shape": [4], "data_offsets": list(each)} for i, each in enumerate(offsets)}
    raw = file(json.dumps(header), data)
    assert ours(raw, tmp_path / "x") == library(raw)


WORDS = {  # headers of a file with 16 bytes of tensors
    "a name twice": f'{{"a":{ENTRY},"a":{ENTRY}}}',
    "a key twice": '{"a":{"dtype":"F32","dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}',
    "a key more": '{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16],"x":1}}',
    "NaN": '{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16],"x":NaN}}',
    "a large number": '{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16],"x":1e999}}',
    "minus nothing": '{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[-0,16]}}',
    "a number with a point": '{"a":{"dtype":"F32","shape":[2.0,2],"data_offsets":[0,16]}}',
    "sizes whose product overflows": (
        f'{{"a":{ENTRY},"b":{{"dtype":"F32","shape":[9223372036854775808,4,0],"data_offsets":[16,16]}}}}'
    ),
    "a size beyond 64 bits": (
        f'{{"a":{ENTRY},"b":{{"dtype":"F32","shape":[0,18446744073709551616],"data_offsets":[16,16]}}}}'
    ),
    "empty tensors": f'{{"b":{{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]}},"a":{ENTRY}}}',
    "numbers in the metadata": f'{{"__metadata__":{{"x":1}},"a":{ENTRY}}}',
    "no metadata": f'{{"__metadata__":null,"a":{ENTRY}}}',
    "space in front": f' {{"a":{ENTRY}}}',
    "space behind": f'{{"a":{ENTRY}}}    ',
    "words behind": f'{{"a":{ENTRY}}} x',
    "half a character": f'{{"\\ud800":{ENTRY}}}',
    "a type of 4 bits": '{"a":{"dtype":"F4","shape":[32],"data_offsets":[0,16]}}',
}


@pytest.mark.parametrize("name", WORDS)
def test_headers_that_the_library_refuses_are_refused(name: str, tmp_path: Path) -> None:
    raw = file(WORDS[name])
    assert ours(raw, tmp_path / "x") in (library(raw), None)


READ = ("empty tensors", "no metadata", "space behind", "a key more")


@pytest.mark.parametrize("name", READ)
def test_headers_of_real_tools_are_read(name: str, tmp_path: Path) -> None:
    raw = file(WORDS[name])
    assert ours(raw, tmp_path / "x") == library(raw) is not None


def test_the_library_s_largest_header_is_the_largest(tmp_path: Path) -> None:
    for spare in (0, 1):
        header = f'{{"a":{ENTRY}}}'
        raw = file(header + " " * (100_000_000 - len(header) + spare))
        assert (ours(raw, tmp_path / "x") is None) == (library(raw) is None) == bool(spare)


# ---------------------------------------------------------------- random damage


def damaged(draw: random.Random) -> Iterator[bytes]:
    """Yield files of the library with bytes, numbers or parts of the header changed, or bytes cut off or added."""
    whole = save(
        {"a": torch.ones(2, 3), "bias": torch.zeros(4, dtype=torch.int8), "e": torch.ones(0)}, {"format": "pt"}
    )
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length].decode(), whole[8 + length :]
    while True:
        way = draw.randrange(4)
        if way == 0:
            place = draw.randrange(len(whole) - len(data))
            yield whole[:place] + bytes([draw.randrange(256)]) + whole[place + 1 :]
        elif way == 1:
            numbers = list(re.finditer(r"\d+", header))
            chosen = draw.choice(numbers)
            number = draw.choice([0, 1, 3, 4, 8, 24, 28, 32, int(chosen[0]) + draw.choice((-1, 1, 4, 8)), 1 << 64])
            changed = header[: chosen.start()] + str(number) + header[chosen.end() :]
            yield file(changed, 0) + data
        elif way == 2:
            begin, end = sorted(draw.randrange(len(header)) for _ in range(2))
            part, at = header[begin:end], draw.randrange(len(header))
            yield file(header[:at] + part + header[at:], 0) + data
        else:
            size = draw.randrange(len(whole) + 8)
            yield whole[:size] + bytes(max(0, size - len(whole)))


def test_damaged_files_are_refused_where_the_library_refuses_them(tmp_path: Path) -> None:
    files = damaged(random.Random(0))
    refused = stricter = 0
    for _ in range(4000):
        raw = next(files)
        theirs, found = library(raw), ours(raw, tmp_path / "x")
        assert found in (theirs, None), raw
        refused += theirs is None
        stricter += found is None and theirs is not None
    assert 1000 < refused < 3900 and stricter < 400


# ---------------------------------------------------------------- the checker


def test_padding_is_no_hole() -> None:
    assert safetensors_header.layout_fault([Span("a", 32, 42), Span("b", 64, 65)], 32, 65, 32) is None
    assert safetensors_header.layout_fault([Span("a", 32, 42), Span("b", 64, 65)], 32, 96, 32) is None
    assert "1 bytes behind its last" in str(
        safetensors_header.layout_fault([Span("a", 32, 42), Span("b", 64, 65)], 32, 97, 32)
    )
    assert "32 bytes in front of tensor 'b'" in str(
        safetensors_header.layout_fault([Span("a", 32, 42), Span("b", 96, 97)], 32, 97, 32)
    )
    assert "inside of what is before it ('a')" in str(
        safetensors_header.layout_fault([Span("a", 0, 42), Span("b", 32, 64)], 0, 64, 32)
    )
    assert "truncated: 64 bytes of 65" in str(
        safetensors_header.layout_fault([Span("a", 32, 42), Span("b", 64, 65)], 32, 64, 32)
    )
