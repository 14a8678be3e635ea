"""Exports are read back by our importers with the same weights, and by transformers without us."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from compress import api, importers
from compress.errors import ExportError, OutputError, RecipeError
from compress.export import convert
from compress.export.place import RECORD
from compress.export.source import PackedSource, open_source
from compress.model.load import load_model
from helpers import without_us
from helpers.pico import build, save, save_pico
from helpers.runs import KEEP_TABLES, SMALL, Setup, cli, job, one_line, stored_tensors, untouched
from helpers.without_us import TOKENS

ASYMMETRIC = ("symmetric=false",)
SPARSE = ("quantize.method=sparsegpt", *SMALL)
INT8_INPUTS = ("quantize.bits=8", "group_size=-1", "activations={bits: 8, scale: token}")


def packed(folder: Path, model: str, *settings: str, tables: bool = False) -> Path:
    """A model of two blocks, packed as int4 in groups of 16 unless `settings` say otherwise."""
    source = save_pico(model, folder / "model", dtype=torch.bfloat16)
    kept = () if tables else KEEP_TABLES
    api.quantize(job(source, Setup("int8", (*kept, "quantize.bits=4", "group_size=16", *settings)), folder / "packed"))
    return folder / "packed"


def assert_equal(out: Path, source: PackedSource, weights: int) -> None:
    """Every weight that our importer decodes is ours, in the importer's type, and nothing else has changed."""
    read = importers.open_checkpoint(out)
    assert len([weight for weight in source.packed if not weight.roles]) == weights
    for weight in source.packed:
        tensor = read.tensors[f"{weight.name}.weight"].read()
        assert torch.equal(tensor, weight.dense(tensor.dtype)), weight.name
    for name, stored in source.plain.items():
        assert torch.equal(read.tensors[name].read(), stored.read()), name
    assert len(read.tensors) == len(source.plain) + len(source.packed)


CASES = [
    ("gptq", "llama", 14, ()),
    ("gptq", "qwen2", 14, ASYMMETRIC),
    ("gptq", "llama", 14, ("quantize.bits=3", "group_size=32")),
    ("gptq", "mixtral", 32, ("quantize.bits=2",)),
    ("gptq", "llama", 14, ("rules=[{match: '*down_proj', bits: 8}]",)),
    ("awq", "qwen2", 14, ASYMMETRIC),
    ("awq", "mixtral", 32, ()),
    ("compressed-tensors", "llama", 14, ("quantize.bits=5",)),
    ("compressed-tensors", "qwen2", 14, (*ASYMMETRIC, "quantize.bits=3")),
    ("compressed-tensors", "qwen3_moe", 56, ()),
    ("compressed-tensors", "llama", 14, ("rules=[{match: '*down_proj', bits: 8, group_size: -1}]",)),
    ("compressed-tensors", "llama", 14, INT8_INPUTS),
    ("compressed-tensors", "llama", 14, (*SPARSE, "bits=16")),
    ("torchao", "llama", 14, ("quantize.bits=8", "group_size=-1")),
    ("torchao", "qwen2", 14, ASYMMETRIC),
]


@pytest.mark.parametrize(("target", "model", "weights", "settings"), CASES)
def test_weights_come_back(target: str, model: str, weights: int, settings: tuple[str, ...], tmp_path: Path) -> None:
    directory = packed(tmp_path, model, *settings)
    convert.export(directory, target, tmp_path / "out")
    assert_equal(tmp_path / "out", open_source(directory), weights)


@pytest.mark.parametrize("model", ["llama_tied", "gpt_neox", "mixtral"])
def test_dense_is_the_same_function(model: str, tmp_path: Path) -> None:
    directory = packed(tmp_path, model, tables=True)
    result = convert.export(directory, "dense", tmp_path / "out", torch.float32)
    assert result.notes == ()
    ours, plain = (load_model(path, "float32") for path in (directory, tmp_path / "out"))
    with torch.no_grad():
        assert torch.allclose(ours(TOKENS).logits, plain(TOKENS).logits, atol=2e-5)
    assert {tensor.dtype for tensor in stored_tensors(tmp_path / "out").values()} == {torch.float32}


@pytest.mark.parametrize(("name", "settings"), [("int3", ()), ("int3-eora", ("incoherence=false",))])
def test_dense_holds_what_no_other_target_holds(name: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    source = save_pico("llama", tmp_path / "model", dtype=torch.bfloat16)
    small = ("calibration.num_samples=4", "calibration.seq_len=32", "calibration.importance=none", "group_size=32")
    api.quantize(job(source, Setup(name, (*small, *settings)), tmp_path / "packed"))
    with pytest.raises(ExportError, match=r"incoherence: false|lowrank: null"):
        convert.export(tmp_path / "packed", "gptq", tmp_path / "out")
    convert.export(tmp_path / "packed", "dense", tmp_path / "out", torch.float32)
    ours, plain = (load_model(tmp_path / path, "float32") for path in ("packed", "out"))
    with torch.no_grad():
        assert torch.allclose(ours(TOKENS).logits, plain(TOKENS).logits, atol=1e-3)


# target, model, settings, bound; fused experts are decoded in the float16 of the scales
WITHOUT_US: list[tuple[str, str, tuple[str, ...], float]] = [
    ("compressed-tensors", "llama", (), 1e-4),
    ("compressed-tensors", "mixtral", (), 1e-2),
    ("dense", "qwen2", (), 1e-4),
]
TORCHAO: list[tuple[str, str, tuple[str, ...], float]] = [
    ("torchao", "llama", ("quantize.bits=8", "group_size=-1"), 1e-4),
    ("torchao", "qwen2", ASYMMETRIC, 1e-4),
]


@pytest.mark.slow
def test_transformers_without_us(tmp_path: Path) -> None:
    assert_read_without_us(WITHOUT_US, tmp_path)


def test_torchao_without_us(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed; `make exports` does")
    assert_read_without_us(TORCHAO, tmp_path)


def assert_read_without_us(cases: list[tuple[str, str, tuple[str, ...], float]], folder: Path) -> None:
    """A process without us computes the same logits from what was exported."""
    known, written = [], []
    for target, model, settings, _ in cases:
        directory, out = packed(folder / f"{model}-{target}", model, *settings), folder / f"out-{model}-{target}"
        convert.export(directory, target, out, None if target == "compressed-tensors" else torch.float32)
        with torch.no_grad():
            known.append(load_model(directory, "float32")(TOKENS).logits)
        written.append(out)
    for (*case, bound), ours, found in zip(cases, known, without_us.logits(written, folder), strict=True):
        assert (found - ours).abs().max() < bound, case


REFUSED = [
    ("awq", ("quantize.bits=3",), "it has 3 bits; set bits to one of 4"),
    ("gptq", INT8_INPUTS, "set activations: null"),
    ("awq", ("rules=[{match: '*down_proj', bits: 4, group_size: -1}]",), "one group_size for all"),
    ("compressed-tensors", ("symmetric=false", "rules=[{match: '*down_proj', bits: 8}]"), "symmetric: true"),
    ("torchao", (*ASYMMETRIC, "group_size=-1"), "leaves the zero points of whole rows out"),
    ("compressed-tensors", SPARSE, "2:4 in 16 bits alone; set keep: 2, of: 4 and bits: 16"),
    (
        "compressed-tensors",
        ("quantize.method=rtn", *SMALL, "rules=[{match: '*k_proj', method: sparsegpt, bits: 16}]"),
        "no others",
    ),
    ("gptqq", (), "did you mean 'gptq'"),
]


@pytest.mark.parametrize(("target", "settings", "reason"), REFUSED)
def test_refusals(target: str, settings: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    directory = packed(tmp_path, "llama", *settings)
    with pytest.raises(ExportError) as error:
        convert.export(directory, target, tmp_path / "out")
    assert reason in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "packed"}


def test_packed_tables_become_plain_with_their_cost(tmp_path: Path) -> None:
    directory = packed(tmp_path, "llama_tied", tables=True)
    result = convert.export(directory, "gptq", tmp_path / "out")
    assert any("33.00 KiB in place of" in note for note in result.notes)
    stored = stored_tensors(tmp_path / "out")
    assert stored["model.embed_tokens.weight"].dtype == torch.float16
    assert "lm_head.weight" not in stored
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


def test_a_cache_recipe_is_left_out(tmp_path: Path) -> None:
    source = save_pico("llama", tmp_path / "model", dtype=torch.bfloat16)
    api.quantize(dataclasses.replace(job(source, Setup("kv8"), tmp_path / "packed"), pack=False))
    result = convert.export(tmp_path / "packed", "dense", tmp_path / "out")
    assert "cache recipe is left out" in result.notes[0] and len(result.notes) == 1
    notes = convert.prepare(open_source(tmp_path / "packed"), "mlx").notes
    assert notes[1] == "its own smaller cache, with other numbers than ours: mlx_lm.generate --kv-bits 8"
    before, after = stored_tensors(source), stored_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("target", ["awq", "torchao"])
def test_shards(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.export.directory.SHARD", 20_000)
    directory = packed(tmp_path, "llama")
    convert.export(directory, target, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert_equal(tmp_path / "out", open_source(directory), 14)


def test_the_command(tmp_path: Path) -> None:
    directory = packed(tmp_path, "llama")
    words = ("export", str(directory), "--to", "gptq", "--out", str(tmp_path / "out"))
    done = cli(*words)
    assert (done.code, done.out.count("\n")) == (0, 1)
    assert "exists already" in one_line(cli(*words))
    assert cli(*words, "--overwrite").code == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(OutputError, match="delete it yourself"):
        convert.export(directory, "gptq", tmp_path / "other", overwrite=True)
    assert [*(tmp_path / "other").iterdir()] == [tmp_path / "other" / "file"]
    assert {"gptq", "dense"} <= json.loads(cli("export", "--list", "--json").out).keys()


@pytest.mark.parametrize("target", ["mlx", "gptq", "awq", "compressed-tensors", "torchao"])
def test_numbers_stay_finite(target: str, tmp_path: Path) -> None:
    """Neither what is written nor what readers make of it becomes infinite in the type of the scales."""
    model = build("llama").to(torch.bfloat16)
    model.get_parameter("model.norm.weight").data[3] = 1e5
    settings = (*KEEP_TABLES, "quantize.bits=4", "group_size=32")
    api.quantize(job(save(model, tmp_path / "model"), Setup("int8", settings), tmp_path / "packed"))
    with pytest.raises(ExportError, match=r"model.norm.weight has values outside of the range of float16; set --dtype"):
        convert.export(tmp_path / "packed", target, tmp_path / "out")
    convert.export(tmp_path / "packed", target, tmp_path / "out", torch.bfloat16)
    assert stored_tensors(tmp_path / "out")["model.norm.weight"].max() > 9e4


def test_dense_says_that_inputs_are_not_quantized(tmp_path: Path) -> None:
    notes = convert.export(packed(tmp_path, "llama", *INT8_INPUTS), "dense", tmp_path / "out").notes
    assert notes == ("inputs of linears are not quantized: plain weights cannot say so",)


@pytest.mark.parametrize(
    ("target", "dtype"), [("dense", None), ("dense", torch.float32), ("gptq", None), ("torchao", None)]
)
def test_the_disk_is_asked_for_what_will_be_written(
    target: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(convert, "check_space", lambda folder, nbytes: asked.append(nbytes))
    convert.export(packed(tmp_path, "llama_tied", tables=True), target, tmp_path / "out", dtype)
    written = sum(tensor.nbytes for tensor in stored_tensors(tmp_path / "out").values())
    assert asked[0] == pytest.approx(written, rel=0 if target == "dense" else 0.1)


@pytest.mark.parametrize("place", ["packed", "link", ".", "packed/in", "link/in"])
def test_the_source_is_never_replaced(place: str, tmp_path: Path) -> None:
    """Neither by itself, nor through a link, nor with a directory around it that holds the record of an export.

    Nor is anything put into it.
    """
    directory = packed(tmp_path, "llama")
    (tmp_path / RECORD).write_text("{}")
    (tmp_path / "link").symlink_to(directory)
    with untouched(tmp_path), pytest.raises(OutputError, match="holds the model itself|lies inside of"):
        convert.export(directory, "dense", tmp_path / place, overwrite=True)


def test_a_recipe_names_its_export(tmp_path: Path) -> None:
    directory = packed(tmp_path, "llama", "export=gptq")
    assert "export: gptq" in (directory / "recipe.yaml").read_text()
    for settings, reason in ((("quantize.bits=5",), "it has 5 bits"), (("incoherence=true",), "incoherence: false")):
        setup = Setup("int8", (*KEEP_TABLES, "export=gptq", *settings))
        with pytest.raises(ExportError, match=reason):
            api.quantize(job(tmp_path / "model", setup, tmp_path / "out"))
        assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match="did you mean 'gptq'"):
        Setup("int8", ("export=gptqq",)).load()
