"""Checkpoint directories: what is read is what safetensors wrote, and the other way round; damage is found."""

from __future__ import annotations

import errno
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compress.errors import CheckpointError
from compress.storage import checkpoint, files
from compress.storage.checkpoint import CONFIG, DTYPES, INDEX, open_checkpoint, read_header, write_shard, write_text


def every_dtype() -> dict[str, Tensor]:
    """A tensor of each type with random bytes, a scalar and an empty one."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if name == "BOOL" else 256, (3 * 5 * dtype.itemsize,), generator=generator)
        tensors[f"a.{name}"] = raw.to(torch.uint8).view(dtype).view(3, 5)
    return tensors | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of two shards: a, b in the first, c in the second."""
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4)}, tmp_path / "one.safetensors")
    save_file({"c": torch.full((5,), 2.0)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    (tmp_path / CONFIG).write_text('{"model_type": "llama"}')
    return tmp_path


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def error(read: Callable[[], object]) -> str:
    """The message, which must be one line."""
    with pytest.raises(CheckpointError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- reading and writing


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    stored = read_header(tmp_path / "x.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = stored[name].read()
        assert (read.dtype, read.shape, stored[name].nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
        assert raw(read) == raw(tensor)


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors = every_dtype() | {"transposed": torch.arange(6.0).view(2, 3).T}
    digest = write_shard(tmp_path / "x.safetensors", tensors)
    assert digest == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    assert digest == checkpoint.sha256(tmp_path / "x.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape, raw(read)) == (tensor.dtype, tensor.shape, raw(tensor))
    for stored in read_header(tmp_path / "x.safetensors").values():
        assert stored.offset % stored.dtype.itemsize == 0


def test_metadata_of_any_name_is_written(tmp_path: Path) -> None:
    metadata = {"path": "a", "tensors": "b", "model.layers.0.weight": "c"}
    write_shard(tmp_path / "x.safetensors", {"a": torch.ones(2)}, metadata=metadata)
    assert checkpoint.read_metadata(tmp_path / "x.safetensors") == {"format": "pt", **metadata}


def test_equal_tensors_give_equal_files(tmp_path: Path) -> None:
    tensors = every_dtype()
    first = write_shard(tmp_path / "first.safetensors", tensors)
    assert write_shard(tmp_path / "second.safetensors", dict(reversed(tensors.items()))) == first
    on_disk = read_header(tmp_path / "first.safetensors")
    assert write_shard(tmp_path / "third.safetensors", on_disk) == first
    assert write_shard(tmp_path / "other.safetensors", tensors | {"scalar": torch.tensor(4.0)}) != first


def test_tensors_are_copied_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.arange(1000.0), "b": torch.arange(7, dtype=torch.uint8)}
    first = write_shard(tmp_path / "first.safetensors", tensors)
    monkeypatch.setattr(checkpoint, "CHUNK", 64)
    assert write_shard(tmp_path / "again.safetensors", read_header(tmp_path / "first.safetensors")) == first


@pytest.mark.parametrize("write", [lambda p: write_shard(p, {"a": torch.ones(9)}), lambda p: write_text(p, "new")])
def test_a_file_is_replaced_whole_or_not_at_all(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("old")

    def full(stream: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full)
        with pytest.raises(OSError, match="no space left"):
            write(path)
    assert path.read_text() == "old"
    write(path)
    assert path.read_bytes()[:3] != b"old" and [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_shards_are_opened_together(directory: Path) -> None:
    opened = open_checkpoint(directory)
    assert opened.config == {"model_type": "llama"} and opened.directory == directory
    assert {name: stored.file.name for name, stored in opened.tensors.items()} == {
        "a": "one.safetensors",
        "b": "one.safetensors",
        "c": "two.safetensors",
    }
    assert opened.nbytes == 4 * (6 + 4 + 5)
    assert opened.tensors["c"].read().tolist() == [2.0] * 5


def test_a_tensor_that_the_index_does_not_list_is_left_out(directory: Path) -> None:
    write_index(directory, {"a": "one.safetensors", "c": "two.safetensors"})
    assert open_checkpoint(directory).tensors.keys() == {"a", "c"}


def test_a_tensor_in_two_shards_is_that_of_the_last_as_in_transformers(directory: Path) -> None:
    save_file({"c": torch.full((5,), 2.0), "a": torch.full((2, 3), 9.0)}, directory / "two.safetensors")
    assert open_checkpoint(directory).tensors["a"].read().unique().tolist() == [9.0]


@pytest.mark.parametrize("file", ["model.safetensors", "any.safetensors"])
def test_one_file_needs_no_index(file: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(2)}, tmp_path / file)
    assert open_checkpoint(tmp_path).tensors.keys() == {"a"}


# ---------------------------------------------------------------- damage


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "is not a directory" in error(lambda: open_checkpoint(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    assert "is not a directory" in error(lambda: open_checkpoint(tmp_path / "file"))
    assert "has no config.json" in error(lambda: open_checkpoint(tmp_path))
    config = tmp_path / CONFIG
    for text, expected in [
        ("{", "is not valid JSON"),
        ("[1]", "does not hold a JSON object"),
        ("[" * 100_000, "is not valid JSON"),
        ("{}", "names no model_type"),
        ('{"model_type": "llama"}', "has no model.safetensors"),
    ]:
        config.write_text(text)
        assert expected in error(lambda: open_checkpoint(tmp_path))
    config.write_bytes(b'{"model_type": "\xff"}')
    assert "is not valid JSON" in error(lambda: open_checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text('{"model_type": "llama"}')
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    assert "only pickled weights" in error(lambda: open_checkpoint(tmp_path))


def test_several_files_without_an_index(directory: Path) -> None:
    (directory / INDEX).unlink()
    assert "2 safetensors files but no model.safetensors.index.json" in error(lambda: open_checkpoint(directory))


@pytest.mark.parametrize("file", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", "", 3, None])
def test_an_index_stays_inside_the_directory(file: object, directory: Path) -> None:
    write_index(directory, {"a": file})
    assert "places tensor 'a' in" in error(lambda: open_checkpoint(directory))


@pytest.mark.parametrize("weight_map", [None, {}, [], "one.safetensors"])
def test_an_index_without_a_map(weight_map: object, directory: Path) -> None:
    write_index(directory, weight_map)
    assert "has no weight_map" in error(lambda: open_checkpoint(directory))


def test_what_the_index_promises_must_be_there(directory: Path) -> None:
    weight_map = {"a": "one.safetensors", "x": "two.safetensors", "y": "two.safetensors"}
    write_index(directory, weight_map)
    assert "lists 2 tensors that no shard has, the first is 'x'" in error(lambda: open_checkpoint(directory))
    write_index(directory, weight_map | {"c": "three.safetensors"})
    assert "three.safetensors is missing" in error(lambda: open_checkpoint(directory))


def test_every_truncation_is_found(directory: Path) -> None:
    path = directory / "one.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "one.safetensors" in error(lambda: open_checkpoint(directory)), length


def test_a_file_cut_after_it_was_opened(directory: Path, tmp_path: Path) -> None:
    stored = read_header(directory / "one.safetensors")["b"]
    (directory / "one.safetensors").write_bytes((directory / "one.safetensors").read_bytes()[:-1])
    assert "ended within tensor 'b'" in error(stored.read)
    assert "ended within tensor 'b'" in error(lambda: write_shard(tmp_path / "copy.safetensors", {"b": stored}))
    assert not (tmp_path / "copy.safetensors").exists()


def shard(path: Path, header: str, data: bytes = bytes(16)) -> Path:
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)
    return path


ENTRY = '{"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("F32", "F33"),
        ('"F32"', "[]"),
        ('"F32"', "null"),
        ("[2, 2]", "[2, 3]"),
        ("[2, 2]", "[-2, -2]"),
        ("[2, 2]", '["2", 2]'),
        ("[2, 2]", "[2.5, 2]"),
        ("[2, 2]", "[Infinity]"),
        ("[2, 2]", "4"),
        ("[0, 16]", "[16, 0]"),
        ("[0, 16]", "[-16, 0]"),
        ("[0, 16]", "[0.0, 16.0]"),
        ("[0, 16]", "[64, 80]"),
        ("[0, 16]", "[0]"),
        ("[0, 16]", "{}"),
        ('"shape"', '"shapes"'),
        ('{"dtype"', '[{"dtype"'),
        (ENTRY, "[]"),
        (ENTRY, "[" * 100_000),
    ],
)
def test_malformed_headers(old: str, new: str, tmp_path: Path) -> None:
    assert read_header(shard(tmp_path / "x", f'{{"a": {ENTRY}}}'))["a"].shape == (2, 2)
    assert ENTRY.count(old) == 1
    path = shard(tmp_path / "x", f'{{"a": {ENTRY.replace(old, new)}}}')
    assert error(lambda: read_header(path)).startswith(str(path))


def test_damaged_headers_never_lead_out_of_the_file(tmp_path: Path) -> None:
    """Any byte of the header changed: a clear error, or tensors that lie within the file."""
    save_file({"a": torch.ones(2, 3), "bias": torch.zeros(4, dtype=torch.int8)}, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    refused = 0
    for place in range(header):
        for byte in draw.sample(range(256), 4):
            (tmp_path / "y").write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            try:
                stored = read_header(tmp_path / "y")
            except CheckpointError as refusal:
                assert "\n" not in str(refusal)
                refused += 1
                continue
            for tensor in stored.values():
                assert tensor.offset > 8 and tensor.offset + tensor.nbytes <= len(whole)
                assert tensor.read().nbytes == tensor.nbytes
    assert refused > header
