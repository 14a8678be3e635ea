"""Models whose activations leave float16: what needs no data is quantized, all else says which option helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import api
from compress.model.load import load_model
from compress.run import verify
from helpers import pico
from helpers.runs import TEXT, Result, cli, one_line, report_of, stored_tensors

FEW = ("--calib", str(TEXT), "--set", "calibration.num_samples=8", "--set", "calibration.seq_len=32")
OVERFLOW = "model.layers.0 overflows float16, as the original does"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float16 checkpoint whose first block gives numbers beyond float16; all weights are finite."""
    folder = pico.save_pico("llama", tmp_path_factory.mktemp("overflow") / "model", dtype=torch.float16)
    tensors = load_file(folder / "model.safetensors")
    for name, factor in (("down_proj", 4e4), ("up_proj", 50)):
        key = f"model.layers.0.mlp.{name}.weight"
        tensors[key] = (tensors[key].float() * factor).clamp(-6e4, 6e4).half()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantized(model: Path, out: Path, recipe: str, *options: str) -> Result:
    return cli("quantize", str(model), "--recipe", recipe, "--out", str(out), *options)


def logits(directory: Path) -> torch.Tensor:
    found = load_model(directory)
    with torch.no_grad():
        return found(torch.arange(40).view(1, 40)).logits.float()


def test_a_recipe_without_data_goes_through(model: Path, tmp_path: Path) -> None:
    """It says that the result overflows as the original does; the check of a finished checkpoint takes it, too."""
    result = quantized(model, tmp_path / "out", "int8")
    assert result.code == 0 and result.err.count(OVERFLOW) == 1 and "--dtype float32" in result.err
    assert report_of(tmp_path / "out")["self_check"] == "passed"
    assert verify.verify(tmp_path / "out")["blocks"] == 2


@pytest.mark.parametrize("recipe", ["int4", "awq4bit", "vq2bit", "w8a8-smooth"])
def test_a_recipe_with_data_names_the_option(recipe: str, model: Path, tmp_path: Path) -> None:
    result = quantized(model, tmp_path / "out", recipe, *FEW)
    line = one_line(result)
    assert result.code == 1 and line.startswith("the output of model.layers.0 is not finite; float16 may be too narrow")
    left = {path.suffix for path in tmp_path.iterdir()} - {".gradients"}  # which were taken in float32
    assert "quantize with --dtype float32" in line and not left


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["int4", "int8", "quarot4bit"])
def test_a_wider_type_is_calibrated_and_loaded_in(recipe: str, dtype: str, model: Path, tmp_path: Path) -> None:
    """config.json and report.json name it, the result loads in it, and what is not packed has its stored bits."""
    result = quantized(model, tmp_path / "out", recipe, *FEW, "--dtype", dtype)
    assert result.code == 0 and "overflows" not in result.err, result.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == report_of(tmp_path / "out")["dtype"] == dtype
    found = logits(tmp_path / "out")
    assert found.isfinite().all()
    reference = load_model(model, "float32")
    with torch.no_grad():
        wanted = reference(torch.arange(40).view(1, 40)).logits
    centred = wanted - wanted.mean(-1, keepdim=True)
    error = (found - found.mean(-1, keepdim=True) - centred).norm() / centred.norm()
    assert error < (0.1 if recipe == "int8" else 0.7)
    if recipe != "quarot4bit":
        stored, own = stored_tensors(tmp_path / "out"), load_file(model / "model.safetensors")
        kept = stored.keys() & own.keys()
        assert kept and all(torch.equal(stored[name], own[name]) for name in kept)


def test_it_is_what_a_configuration_with_that_type_gives(model: Path, tmp_path: Path) -> None:
    (tmp_path / "changed").mkdir()
    for file in model.iterdir():
        (tmp_path / "changed" / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "changed" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float32"}))
    assert quantized(model, tmp_path / "a", "int4", *FEW, "--dtype", "float32").code == 0
    assert quantized(tmp_path / "changed", tmp_path / "b", "int4", *FEW).code == 0
    one, other = (stored_tensors(tmp_path / name) for name in "ab")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_run_keeps_its_type(model: Path, tmp_path: Path, pico_dir: Callable[..., Path]) -> None:
    source = "from compress.run import write\nwrite.finish = None\n"
    words = ["quantize", str(model), "--recipe", "int4", "--out", str(tmp_path / "out"), *FEW]
    assert cli(*words, "--dtype", "float32", prepare=source).code != 0
    assert "holds an unfinished run with another dtype" in one_line(cli(*words, "--dtype", "bfloat16"))
    assert cli(*words, "--dtype", "float32").code == 0


def test_a_plan_and_the_program_know_it(model: Path, tmp_path: Path) -> None:
    result = cli("plan", str(model), "--recipe", "int4", *FEW, "--dtype", "float32", "--json")
    assert result.code == 0, result.err
    assert api.load(model, "float32").dtype == torch.float32
    assert "Invalid value for '--dtype'" in cli("plan", str(model), "--dtype", "int8").err
