"""Importance matrices: sums of squares under the names of GGUF files, and what a run makes of them without text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from compress import api, formats, plugins
from compress.errors import CalibrationError, RecipeError
from compress.export.source import open_source
from compress.model.load import load_model
from compress.progress import silent
from compress.run import collect_importance, importance_matrix
from compress.types import Stats
from helpers.engines import tokenizer
from helpers.pico import save_pico
from helpers.runs import KEEP_TABLES, SMALL, Setup, job

gguf = pytest.importorskip("gguf")

ROUNDED = Setup("int4", (*KEEP_TABLES, *SMALL, "group_size=32", "two_sided=false"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its importance matrix."""
    folder = tmp_path_factory.mktemp("matrix")
    model = save_pico("llama", folder / "model")
    tokenizer().save_pretrained(model)
    importance_matrix.write(collect_importance.collect(job(model, ROUNDED, folder / "x"), silent), folder / "m.gguf")
    assert {path.name for path in folder.iterdir()} == {"model", "m.gguf"}
    return model, folder / "m.gguf"


def test_the_file_holds_the_squares_of_inputs(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model itself, run on the same tokens, shows them; the package gguf reads names, shapes and keys."""
    model, file = made
    tokens = {}
    original = collect_importance.calibration_text.calibration

    def keep(*arguments: object) -> object:
        text = original(*arguments)  # type: ignore[arg-type]
        tokens["all"] = text.tokens  # type: ignore[union-attr]
        return text

    monkeypatch.setattr(collect_importance.calibration_text, "calibration", keep)
    collect_importance.collect(job(model, ROUNDED, model.parent / "x"), silent)
    loaded, sums = load_model(model), dict[str, torch.Tensor]()
    for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
        linear = loaded.get_submodule(f"model.layers.1.{name}")
        linear.register_forward_pre_hook(
            lambda _, given, name=name: sums.update({name: given[0].double().flatten(0, 1).square().sum(0)})
        )
    loaded(tokens["all"])
    read = gguf.GGUFReader(file)
    by_name = {tensor.name: tensor for tensor in read.tensors}
    assert len(by_name) == 2 * 7 * loaded.config.num_hidden_layers
    for name, place in (
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.down_proj", "ffn_down"),
    ):
        found = torch.from_numpy(by_name[f"blk.1.{place}.weight.in_sum2"].data.copy())
        assert found.shape == (1, len(sums[name]))
        assert torch.allclose(found[0].double(), sums[name], rtol=1e-4)
        assert by_name[f"blk.1.{place}.weight.counts"].data.flatten().tolist() == [tokens["all"].numel()]
    fields = {key: field.contents() for key, field in read.fields.items()}
    assert fields["general.type"] == "imatrix" and len(fields["imatrix.datasets"]) == 1
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == tuple(tokens["all"].shape)


def test_a_run_goes_by_the_matrix_and_reads_no_text(made: tuple[Path, Path], tmp_path: Path) -> None:
    model, file = made
    asked = dataclasses.replace(job(model, ROUNDED, tmp_path / "out"), calib="absent.txt", imatrix=file)
    api.quantize(asked)
    squares = importance_matrix.read(file)["blk.0.ffn_up.weight"][0]
    weight = load_model(model).get_parameter("model.layers.0.mlp.up_proj.weight").detach()
    method = plugins.load("quant", ROUNDED.load().quantize.method)
    expected = method.quantize(weight, Stats(torch.diag(squares.sums), squares.count), ROUNDED.load().quantize.config)
    stored = next(each for each in open_source(tmp_path / "out").packed if each.name == "model.layers.0.mlp.up_proj")
    assert torch.equal(stored.dense(torch.float32), formats.decode(expected.weight, torch.float32))


def test_other_files_and_recipes_that_need_text_are_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    model, file = made
    other = save_pico("llama", tmp_path / "other", changes={"intermediate_size": 96})
    with pytest.raises(CalibrationError, match=r"has 192 inputs of model.layers.0.mlp.down_proj, which has 96 inputs"):
        api.quantize(dataclasses.replace(job(other, ROUNDED, tmp_path / "out"), imatrix=file))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CalibrationError, match="is no importance matrix"):
        api.quantize(dataclasses.replace(job(model, ROUNDED, tmp_path / "out"), imatrix=tmp_path / "model.gguf"))
    with pytest.raises(RecipeError, match="needs calibration text for more than the sizes of inputs"):
        api.quantize(dataclasses.replace(job(model, Setup("mixed3bit", SMALL), tmp_path / "out"), imatrix=file))


def test_experts_are_rows_of_one_tensor(tmp_path: Path) -> None:
    """An expert that no token reached has zeros and the count 0."""
    model = save_pico("qwen3_moe", tmp_path / "model")
    tokenizer().save_pretrained(model)
    matrix = collect_importance.collect(job(model, ROUNDED, tmp_path / "x"), silent)
    importance_matrix.write(matrix, tmp_path / "m.gguf")
    assert not matrix.unnamed
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    sums, counts = read["blk.0.ffn_down_exps.weight.in_sum2"].data, read["blk.0.ffn_down_exps.weight.counts"].data
    assert len(sums) == len(counts) > 1
    assert ((sums.sum(1) > 0) == (counts[:, 0] > 0)).all()
    assert counts.sum() > counts.max()
