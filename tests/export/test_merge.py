"""`compress merge`: packed checkpoint + adapter -> packed checkpoint, in one command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress import api
from compress.errors import CompressError, OutputError
from compress.export import convert, for_runs
from compress.export.source import open_source
from compress.progress import silent
from helpers.pico import save_pico
from helpers.runs import GPTQ, RTN, Setup, cli, interrupt, job, one_line, stored_tensors

RANK, ALPHA = 4, 8.0
ADAPTED = ("q_proj", "down_proj")


def packed(folder: Path, model: str, setup: Setup) -> Path:
    source = save_pico(model, folder / "model", dtype=torch.bfloat16)
    api.quantize(job(source, setup, folder / "packed"))
    return folder / "packed"


def adapter(folder: Path, base: Path) -> dict[str, torch.Tensor]:
    """Write a LoRA of random matrices; return what it adds to each weight."""
    generator, tensors, added = torch.Generator().manual_seed(0), {}, {}
    for weight in open_source(base).packed:
        if weight.name.rsplit(".", 1)[-1] in ADAPTED:
            a = torch.randn(RANK, weight.shape[1], generator=generator) / 8
            b = torch.randn(weight.shape[0], RANK, generator=generator) / 8
            tensors[f"base_model.model.{weight.name}.lora_A.weight"] = a
            tensors[f"base_model.model.{weight.name}.lora_B.weight"] = b
            added[weight.name] = ALPHA / RANK * b @ a
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(ADAPTED), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return added


@pytest.mark.parametrize(("model", "setup", "adapted"), [("llama", RTN, 4), ("mixtral", RTN, 2), ("llama", GPTQ, 4)])
def test_the_sum_is_packed_again(model: str, setup: Setup, adapted: int, tmp_path: Path) -> None:
    """Decoded, every weight is the decoded one of the base and what the adapter adds, within the rounding."""
    base, out = packed(tmp_path, model, setup), tmp_path / "out"
    added = adapter(tmp_path / "lora", base)
    assert len(added) == adapted
    report = api.merge(base, dataclasses.replace(job(base, setup, out), adapter=tmp_path / "lora"))
    known = {weight.name: weight for weight in open_source(base).packed}
    merged = open_source(out)
    assert {weight.name: weight.stored for weight in merged.packed} == {n: each.stored for n, each in known.items()}
    for weight in merged.packed:
        expected = known[weight.name].dense(torch.float32) + added.get(weight.name, 0)
        error = (weight.dense(torch.float32) - expected).norm() / expected.norm()
        assert error < (0.01 if setup is RTN else 0.2), weight.name
    assert report["bpw"] == json.loads((base / "report.json").read_text())["bpw"]
    assert not (tmp_path / "out.decoded").exists()


@pytest.mark.slow
def test_as_two_commands_do_it(tmp_path: Path) -> None:
    """`merge` takes the checkpoint's own recipe, and gives what export and quantize give, in every bit."""
    base = packed(tmp_path, "llama", GPTQ)
    adapter(tmp_path / "lora", base)
    convert.export(base, "dense", tmp_path / "dense")
    words = ["--adapter", str(tmp_path / "lora"), "--calib", str(job(base, GPTQ, tmp_path).calib)]
    one = cli("merge", str(base), *words, "--out", str(tmp_path / "one"))
    assert one.code == 0, one.err
    recipe = ["--recipe", str(base / "recipe.yaml")]
    two = cli("quantize", str(tmp_path / "dense"), *recipe, *words, "--out", str(tmp_path / "two"))
    assert two.code == 0, two.err
    assert (tmp_path / "one/recipe.yaml").read_text() == (base / "recipe.yaml").read_text()
    expected, found = stored_tensors(tmp_path / "two"), stored_tensors(tmp_path / "one")
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_cannot_be_merged_is_refused_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = packed(tmp_path, "llama", RTN)
    adapter(tmp_path / "lora", base)
    asked = dataclasses.replace(job(base, RTN, tmp_path / "out"), adapter=tmp_path / "lora")

    def decode(*words: Any, **named: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(convert, "export", decode)
    with pytest.raises(AssertionError, match="decoded"):  # all that is refused below gets no further than to here
        api.merge(base, asked)
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        with pytest.raises(CompressError, match=r"adapter_config\.json"):
            api.merge(base, dataclasses.replace(asked, adapter=tmp_path / folder))
    with pytest.raises(CompressError, match="holds no packed weights"):
        api.merge(tmp_path / "model", asked)
    settings = tmp_path / "lora/adapter_config.json"
    settings.write_text(settings.read_text().replace("LORA", "IA3"))
    with pytest.raises(CompressError, match="only LORA"):
        api.merge(base, asked)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "lora", "model", "packed"]


def test_words_that_merge_nothing(tmp_path: Path) -> None:
    base = packed(tmp_path, "llama", RTN)
    words = ["merge", str(base), "--out", str(tmp_path / "out")]
    assert cli(*words).code == 2  # without an adapter
    adapter(tmp_path / "lora", base)
    (base / "recipe.yaml").unlink()
    without = cli(*words, "--adapter", str(tmp_path / "lora"))
    assert without.code == 1 and "recipe" in one_line(without)


def test_files_of_others_beside_the_output_stay(tmp_path: Path) -> None:
    base = packed(tmp_path, "llama", RTN)
    adapter(tmp_path / "lora", base)
    asked = dataclasses.replace(job(base, RTN, tmp_path / "out"), adapter=tmp_path / "lora")
    kept = tmp_path / "out.decoded" / base.name / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    for path in (kept, kept.parents[1] / "more"):
        path.write_text("")
        with pytest.raises(CompressError):
            api.merge(base, asked)
        assert path.exists() and not (tmp_path / "out").exists()
    in_the_way = dataclasses.replace(asked, out=tmp_path / "other")
    (tmp_path / "other.decoded").write_text("")
    with pytest.raises(OutputError, match=r"other\.decoded"):
        api.merge(base, in_the_way)
    assert (tmp_path / "other.decoded").is_file()


def test_one_merge_at_a_time(tmp_path: Path) -> None:
    base = packed(tmp_path, "llama", RTN)
    adapter(tmp_path / "lora", base)
    asked = dataclasses.replace(job(base, RTN, tmp_path / "out"), adapter=tmp_path / "lora")
    with for_runs.DecodedCheckpoint(base, asked.out) as first:
        model = first.write(silent)
        with pytest.raises(OutputError, match="another run is writing"):
            api.merge(base, asked)
        assert (model / "config.json").is_file()
    assert not model.exists()


@pytest.mark.slow
def test_an_interrupted_merge_goes_on(tmp_path: Path) -> None:
    base, out = packed(tmp_path, "llama", GPTQ), tmp_path / "out"
    adapter(tmp_path / "lora", base)
    words = ["merge", str(base), "--adapter", str(tmp_path / "lora"), "--calib", str(job(base, GPTQ, tmp_path).calib)]
    for where in (("compress.export.targets.dense", "write", 1), ("compress.quant.gptq", "quantize_rows", 10)):
        assert cli(*words, "--out", str(out), prepare=interrupt(*where)).code == -9
        assert not out.exists()
    again = cli(*words, "--out", str(out))
    assert again.code == 0 and "resumed after 1 of 2 blocks" in again.out
    assert cli(*words, "--out", str(tmp_path / "whole")).code == 0
    expected, found = stored_tensors(tmp_path / "whole"), stored_tensors(out)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert not out.with_name("out.decoded").exists() and not (out / "compress_export.json").exists()
