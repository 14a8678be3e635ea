"""Whatever is wrong with the input: one line that says so, exit code 1, nothing written, nothing harmed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import api
from compress.errors import OutputError
from compress.storage import workdir
from compress.storage.checkpoint import CONFIG, INDEX
from helpers.pico import save_pico
from helpers.runs import GPTQ, RTN, Setup, cli, command, contents, job, one_line, report_of, stored_tensors, untouched

Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def model(pico_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint in several shards, to be damaged."""
    return Path(shutil.copytree(pico_dir("llama", shards=True), tmp_path / "model"))


def refused(*words: str, model: Path, out: Path) -> str:
    """The one line with which a command is refused; the model is as before, and there is no output."""
    with untouched(model.parent if model.is_file() else model):
        result = cli(*words)
    assert result.code == 1, result
    assert not out.exists() and not out.with_name(out.name + ".partial").exists()
    return one_line(result)


def quantize(model: Path, setup: Setup = RTN) -> str:
    """The refusal to quantize."""
    out = model.parent / "out"
    return refused(*command(model, setup, out), model=model, out=out)


# ---------------------------------------------------------------- recipes


def test_a_misspelled_key_of_a_recipe(model: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("quantize:\n  method: rtn\n  bitz: 8\n")
    line = quantize(model, Setup(str(tmp_path / "my.yaml")))
    assert "my.yaml, line 3: quantize (rtn): unknown key 'bitz'" in line and "did you mean 'bits'?" in line
    line = quantize(model, RTN.set("quantize.bitz=8"))
    assert "--set quantize.bitz=8" in line and "did you mean 'bits'?" in line


def test_impossible_bits(model: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("quantize:\n  method: rtn\n  bits: 9\n")
    line = quantize(model, Setup(str(tmp_path / "my.yaml")))
    assert "my.yaml, line 3: quantize (rtn): bits 9" in line
    line = quantize(model, RTN.set("bits=9"))
    assert "--set bits=9" in line and "bits 9" in line


def test_an_unknown_recipe(model: Path) -> None:
    line = quantize(model, Setup("int44"))
    assert "unknown recipe 'int44'; did you mean int4 " in line


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("trellis", "bits=9", "bits 9 is not one of 1..8, nor a multiple of 0.25 between 1 and 4"),
        ("trellis", "bits=0", "bits 0 is not one of 1..8, nor a multiple of 0.25 between 1 and 4"),
        ("trellis", "bits=2.3", "bits 2.3 is not one of 1..8, nor a multiple of 0.25 between 1 and 4"),
        ("trellis", "bits=2.5 code=3inst", "code '3inst' has no parts of a bit; set code: mul1, or whole bits"),
        ("trellis", "bits=2.5 tile_rows=16", "tile_rows 16 is not a multiple of 32 up to 256"),
        ("trellis", "bits=2 state_bits=3", "state_bits 3 is not one of 4..16, which code 'mul1' at 2 bits needs"),
        ("trellis", "bits=2 state_bits=17", "state_bits 17 is not one of 4..16, which code 'mul1' at 2 bits needs"),
        ("trellis", "tile_rows=10", "tile_rows 10 is not a multiple of 16 up to 256"),
        ("trellis", "code=mul2", "code 'mul2' is not one of mul1, 1mad, 3inst, mcg, hyb"),
        ("trellis", "code=hyb bits=5", "bits 5 is too many for code 'hyb'"),
        ("gptvq", "vector_dim=3", "vector_dim 3 is not one of 1, 2, 4"),
        ("gptvq", "bits=0", "bits 0 is not one of 1..12"),
        ("gptvq", "bits=13", "bits 13 is not one of 1..12"),
        ("vptq", "bits=17", "bits 17 is not one of 1..16"),
        ("vptq", "vector_dim=33", "vector_dim 33 is not one of 1..32"),
        ("pvq", "bpw=0", "bpw 0.0 is not in (0, 8]"),
        ("pvq", "vector_dim=7", "vector_dim 7 is not one of 8, 16, 32, 64, 128"),
        ("e8p", "bits=5", "bits 5 is not one of (2, 3, 4)"),
        ("glvq", "dim=9", "dim was taken away and is always 8; remove the key"),
        ("glvq", "group_size=100", "group_size 100 is not a positive multiple of 16"),
    ],
)
def test_settings_that_cannot_be(method: str, settings: str, expected: str, model: Path) -> None:
    """The line ends with what is wrong, after the override that did it."""
    overrides = settings.split()
    line = quantize(model, Setup("int4", (f"method={method}", *overrides)))
    assert re.fullmatch(r"--set (\S+): quantize \((\w+)\): (.*)", line), line
    said = line.removeprefix("--set ").split(": ", 2)
    assert said[0] in overrides and said[1:] == [f"quantize ({method})", expected]


def test_a_size_without_a_rotation(tmp_path: Path) -> None:
    """4106 is twice a prime number: too large a table. The refused plan names the linear and both ways out."""
    model = save_pico("llama", tmp_path / "model", changes={"intermediate_size": 4106})
    rotated = RTN.set("incoherence=true")
    assert quantize(model, rotated) == (
        "model.layers.0.mlp.gate_proj (4106 x 64): no Hadamard transform of size 4106: its odd part 2053 is over 2048; "
        "set incoherence: false there; change the setting, or give this linear a rule of its own"
    )
    out = tmp_path / "out"
    rule = "rules=[{match: '*.mlp.*', incoherence: false}]"
    assert cli(*command(model, rotated.set(rule), out)).code == 0
    assert {row["name"].split(".")[3]: bool(row["ops"]["input"]) for row in report_of(out)["layers"]} == {
        "self_attn": True,
        "mlp": False,
    }


def test_a_rule_that_matches_nothing(model: Path) -> None:
    line = quantize(model, RTN.set("rules=[{match: '*.query', keep: true}]"))
    assert "rule '*.query' matches no linear" in line and "model.layers.0.self_attn.q_proj" in line
    line = quantize(model, RTN.set("ignore=['model.layers.*']"))
    assert "leaves no linear to quantize" in line


# ---------------------------------------------------------------- models


def test_no_model(model: Path) -> None:
    (model / CONFIG).unlink()
    assert "has no config.json; is it" in quantize(model)
    line = quantize(next(model.glob("*.safetensors")))
    assert "is not a directory; give a Hugging Face checkpoint directory or a hub id" in line
    assert "nowhere is neither a directory nor a hub id" in quantize(model.parent / "nowhere")


def test_a_hub_id_without_a_network(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with untouched(tmp_path):
        result = cli("quantize", "nobody/nothing", "--recipe", "int8", "--out", str(out))
    line = one_line(result)
    assert result.code == 1 and not list(tmp_path.iterdir())
    assert line.startswith("nobody/nothing is no directory here and could not be fetched from the hub")
    assert line.endswith("give the path of a downloaded checkpoint")


def test_a_truncated_shard(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)
    assert f"{shard.name} is truncated" in quantize(model)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("../elsewhere.safetensors", "'../elsewhere.safetensors', outside the directory; refused"),
        ("missing.safetensors", "missing.safetensors is missing; download the checkpoint again"),
    ],
)
def test_an_index_that_points_elsewhere(file: str, expected: str, model: Path) -> None:
    shutil.copy(next(model.glob("*.safetensors")), model.parent / "elsewhere.safetensors")
    index = json.loads((model / INDEX).read_text())
    index["weight_map"][f"{Q}.weight"] = file
    (model / INDEX).write_text(json.dumps(index))
    assert expected in quantize(model)


def test_pickled_weights(model: Path) -> None:
    for path in (*model.glob("*.safetensors"), model / INDEX):
        path.unlink()
    torch.save({"weight": torch.ones(2)}, model / "pytorch_model.bin")
    assert "has only pickled weights (.bin)" in quantize(model)


def change_tensors(model: Path, change: Callable[[dict[str, torch.Tensor]], object], name: str = f"{Q}.weight") -> None:
    """Rewrite the shard that has this tensor."""
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            change(tensors)
            save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("setup", [RTN, GPTQ], ids=["rtn", "gptq"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite(value: float, setup: Setup, model: Path) -> None:
    change_tensors(model, lambda tensors: tensors[f"{Q}.weight"].view(-1)[77].fill_(value))
    with untouched(model):
        result = cli(*command(model, setup, model.parent / "out"))
    line = one_line(result)
    assert result.code == 1 and not (model.parent / "out").exists()
    assert line == f"the weight of {Q} has NaN or infinite values; repair the checkpoint"


def test_a_norm_that_is_not_finite(model: Path) -> None:
    name = "model.layers.0.input_layernorm.weight"
    change_tensors(model, lambda tensors: tensors[name].fill_(torch.inf), name)
    for setup in (RTN, GPTQ):
        assert quantize(model, setup).startswith("the output of model.layers.0 is not finite; check the checkpoint")


@pytest.mark.parametrize("name", [f"{Q}.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_that_do_not_fit_the_configuration(name: str, model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.update({name: torch.ones(32)}), name)
    assert re.search(rf"{name} has shape \(32,\), the configuration asks for \(\d+.*; they do", quantize(model))
    change_tensors(model, lambda tensors: tensors.pop(name), name)
    index = json.loads((model / INDEX).read_text())
    del index["weight_map"][name]
    (model / INDEX).write_text(json.dumps(index))
    tied = "if that is its table of embeddings set tie_word_embeddings to true in config.json"
    bare = "if it is an embedding model name its class without a head under architectures there (LlamaModel)"
    said = f", its output head; {tied}, {bare}, else" if name == "lm_head.weight" else ";"
    assert quantize(model).endswith(f"has no tensor for {name}{said} download it again")


def test_a_quantized_checkpoint(model: Path, tmp_path: Path) -> None:
    api.quantize(job(model, RTN, tmp_path / "packed"))
    assert "packed is already quantized (compress); give the original checkpoint" in quantize(tmp_path / "packed")
    config = json.loads((model / CONFIG).read_text())
    (model / CONFIG).write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert "says that it is quantized (gptq of 4 bits with a scale for each row), but no weight is" in quantize(model)
    (model / CONFIG).write_text(json.dumps({**config, "quantization_config": None}))
    assert cli(*command(model, RTN, tmp_path / "out")).code == 0


def test_an_unknown_architecture(model: Path) -> None:
    (model / CONFIG).write_text('{"model_type": "perpetuum_mobile"}')
    assert "perpetuum_mobile" in quantize(model)


# ---------------------------------------------------------------- calibration text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"ten tokens", "has only 10 tokens, one sample needs 32; give more text or lower calibration.seq_len"),
        (b"", "text.txt is empty; give a file with text"),
        ("naïve".encode("latin-1") * 100, "byte 2 is not UTF-8; convert the file to UTF-8 text"),
    ],
)
def test_unusable_text(text: bytes, expected: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(text)
    out = tmp_path / "out"
    words = [*command(model, GPTQ, out), "--calib", str(tmp_path / "text.txt")]
    line = refused(*words, model=model, out=out)
    assert str(tmp_path / "text.txt") in line and line.endswith(expected)


def test_a_model_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert "model has no readable tokenizer" in quantize(model, GPTQ)
    assert cli(*command(model, RTN, tmp_path / "out")).code == 0  # needs none


# ---------------------------------------------------------------- output


def test_an_output_below_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    out = tmp_path / "file" / "out"
    assert "a part of the path is a file; give another --out" in refused(
        *command(model, RTN, out), model=model, out=out
    )
    assert (tmp_path / "file").read_text() == "precious"


def test_an_output_with_too_long_a_name(model: Path, tmp_path: Path) -> None:
    result = cli(*command(model, RTN, tmp_path / ("x" * 300)))
    assert result.code == 1 and "too long; give another --out" in one_line(result)


@pytest.mark.parametrize("out", [".", "..", "link"])
def test_the_model_is_never_overwritten(out: str, model: Path) -> None:
    """Neither by its own directory nor by one that holds it, however it is written."""
    (model.parent / "link").symlink_to(model)
    with untouched(model.parent):
        result = cli(*command(model, RTN, model / out if out != "link" else model.parent / out), "--overwrite")
    assert result.code == 1 and "give another --out" in one_line(result)
    assert not list(model.parent.glob("*.partial"))


def _fails(words: list[str]) -> bool:
    return subprocess.run(words, check=False, capture_output=True).returncode != 0


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A small disk of its own."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if os.geteuid() != 0 or shutil.which("mount") is None or _fails(mount):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_read_only_disk(model: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro") as disk:
        line = refused(*command(model, RTN, disk / "out"), model=model, out=disk / "out")
    assert "the file system is read-only; give another --out" in line


def test_too_little_space_is_found_before_the_work(model: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        line = refused(*command(model, RTN, disk / "out"), model=model, out=disk / "out")
    assert "1020.00 KiB free, the run needs 64.2" in line or "1.00 MiB free, the run needs 64.2" in line, line
    assert line.endswith("free some space or give another --out")


NO_CHECK = "from compress.run import pipeline\npipeline.check_space = lambda directory, nbytes: None"


@pytest.mark.parametrize(("setup", "blocks"), [(RTN, 1), (GPTQ, 2)], ids=["in a block", "in the rest"])
def test_a_disk_that_fills_up(setup: Setup, blocks: int, model: Path, tmp_path: Path) -> None:
    api.quantize(job(model, setup, tmp_path / "expected"))
    with mounted(tmp_path / "disk", "size=100k") as disk:
        words = command(model, setup, disk / "out")
        with untouched(model):
            result = cli(*words, prepare=NO_CHECK)
        assert result.code == 1
        line = one_line(result)
        assert line.endswith("the disk is full; free some space and run the same command to go on")
        assert not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        again = cli(*words, prepare=NO_CHECK)
        assert again.code == 0, again.err
        assert report_of(disk / "out")["resumed_blocks"] == blocks
        assert contents(disk / "out") == contents(tmp_path / "expected")
        assert [path.name for path in disk.iterdir()] == ["out"]


def test_check_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, used, free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(workdir.shutil, "disk_usage", lambda path: (total, used, free))
    workdir.check_space(tmp_path / "not" / "yet", free - workdir.SPARE)
    with pytest.raises(OutputError, match="free some space"):
        workdir.check_space(tmp_path / "not" / "yet", free - workdir.SPARE + 1)
    monkeypatch.setattr(workdir.shutil, "disk_usage", lambda path: (0, 0, 0))
    workdir.check_space(tmp_path, 1 << 60)


# ---------------------------------------------------------------- odd, but right


def test_an_all_zero_layer(model: Path, tmp_path: Path) -> None:
    change_tensors(model, lambda tensors: tensors[f"{Q}.weight"].zero_())
    for setup in (RTN, GPTQ):
        out = tmp_path / setup.name
        api.quantize(job(model, setup, out))
        row = next(row for row in report_of(out)["layers"] if row["name"] == Q)
        assert row["weight_error"] == 0.0 and row["output_error"] in (0.0, None)
        assert not any(t.isnan().any() for t in stored_tensors(out).values())
