"""Tables of config.json that nobody wrote with compress: one clear line before anything is built by them."""

from __future__ import annotations

from typing import Any

import pytest

from compress import formats, plugins
from compress.errors import CheckpointError
from compress.formats import stored
from compress.runtime.hf import CompressConfig

INT = {"bits": 4, "group_size": 64, "symmetric": True, "tile_words": 16}


def refused(packed: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        CompressConfig.read(packed)
    line = str(caught.value)
    assert line.startswith("quantization_config") and len(line) < 300
    return line


@pytest.mark.parametrize("packed", [None, 3, [], ["compress"], "compress", {}, {"quant_method": "gptq", "bits": 4}])
def test_what_is_not_ours(packed: Any) -> None:
    assert "give a checkpoint that compress wrote" in refused(packed)


@pytest.mark.parametrize("key", ["default", "modules", "experts"])
@pytest.mark.parametrize("value", [3, True, [], ["a"], "x", 1.5])
def test_tables_that_are_none(key: str, value: Any) -> None:
    assert f"{key} is not a table" in refused({"quant_method": "compress", key: value})


@pytest.mark.parametrize("key", ["modules", "experts"])
@pytest.mark.parametrize("value", [3, None, [], "x"])
def test_entries_that_are_none(key: str, value: Any) -> None:
    assert f"{key} is not a table of tables" in refused({"quant_method": "compress", key: {"a": {}, "b": value}})


@pytest.mark.parametrize("version", [True, 1.0, "1", None, [1], 10**6000, "x" * 10**6], ids=lambda v: type(v).__name__)
def test_versions_that_are_none(version: Any) -> None:
    assert "upgrade compress" in refused({"quant_method": "compress", "version": version})


def test_many_unknown_keys() -> None:
    assert "unknown keys ['key0', " in refused({"quant_method": "compress", **{f"key{i}": 1 for i in range(10_000)}})


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "__class__",
        "stored",
        "transforms",
        "_private",
        "os",
        "..",
        "../int",
        "a.b",
        "",
        "int\n",
        "x" * 10**6,
    ],
    ids=lambda name: repr(name[:12]),
)
def test_only_files_of_formats_are_formats(name: str) -> None:
    with pytest.raises(CheckpointError, match="is unknown to this version of compress; upgrade compress") as caught:
        formats.get(name)
    assert len(str(caught.value)) < 200
    for known in plugins.names("formats"):
        assert hasattr(formats.get(known), "decode")


@pytest.mark.parametrize("key", ["bits", "group_size", "tile_words"])
@pytest.mark.parametrize("value", [True, None, 4.0, "4", [4], {}, 10**30, -(10**30), float("nan")], ids=repr)
def test_integers_are_integers(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"format 'int' has {key} .*, which this version does not know"):
        stored.params_from_dict("int", {**INT, key: value})


@pytest.mark.parametrize("bits", [[True], [2.0], ["2"], [[2]], [None], [10**30], {"a": 1}, 2], ids=repr)
def test_items_of_lists_too(bits: Any) -> None:
    with pytest.raises(CheckpointError, match="format 'codebook' has bits .*, which this version does not know"):
        stored.params_from_dict("codebook", {"bits": bits, "vector_dim": 2, "tile_words": 4})


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), True, 10**400, "1", None, [1.0]], ids=lambda v: str(v)[:9]
)
def test_fractions_are_finite(value: Any) -> None:
    table = {"format": "int", "params": INT, "activations": {"bits": 8, "clip": value}}
    with pytest.raises(CheckpointError, match="a: activations has clip .*, which this version does not know"):
        stored.from_dict(table, "a")
