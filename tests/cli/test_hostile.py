"""Checkpoints that bring code along: no command runs any of it, be it a pickle or a module for transformers."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file

from compress import api
from compress.cli.app import app
from compress.errors import CheckpointError
from compress.model import load
from compress.run import verify
from compress.storage.checkpoint import CONFIG
from helpers.pico import save_pico
from helpers.runs import RTN, TEXT, cli, job

MARKER = "code-was-run"
PROGRESS = re.compile(  # of a study; notes on files that are left out
    r"compress: (\d+ (cells|of \d+)|left out of |config.json names code )"
)
MODULE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer
Config.model_type = "evil"
"""
AUTO_MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.Tokenizer"}


class Bait:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return io.open, (str(self.marker), "w")


def pickled(directory: Path, *names: str) -> None:
    for name in names:
        torch.save({"lm_head.weight": Bait(directory.parent / MARKER)}, directory / name)


def remote_code(directory: Path) -> None:
    """Let the configuration and the tokenizer name a module in the directory."""
    (directory / "evil.py").write_text(MODULE.format(marker=str(directory.parent / MARKER)))
    for name in (CONFIG, "tokenizer_config.json"):
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**values, "auto_map": AUTO_MAP}))


def only_pickles(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()
    pickled(directory, "pytorch_model.bin")
    remote_code(directory)


def unknown_model(directory: Path) -> None:
    pickled(directory, "pytorch_model.bin", "training_args.bin")
    remote_code(directory)
    values = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**values, "model_type": "evil", "architectures": ["Evil"]}))


def known_model(directory: Path) -> None:
    pickled(directory, "pytorch_model.bin", "adapter_model.bin")
    remote_code(directory)


SOURCES = [only_pickles, unknown_model, known_model]
DATA_FREE = ["--recipe", "int8"]
ALLOCATION = ["--recipe", "mixed3bit", "--calib", str(TEXT), "--set", "calibration.num_samples=2"]
ALLOCATION += ["--set", "calibration.seq_len=16", "--set", "allocate.samples=2"]
ALLOCATION += ["--set", "allocate.options=[{method: rtn, bits: 2}, {method: rtn, bits: 4}]"]
NEEDED: dict[str, list[str]] = {  # what a command must be given beside the checkpoint; a new one may need nothing
    "quantize": [*DATA_FREE, "--out", "out"],
    "plan": DATA_FREE,
    "imatrix": ["--calib", str(TEXT), "--set", "calibration.num_samples=2", "--out", "m.gguf"],
    "transform": ["--recipe", "w4a8", "--out", "out", "--calib", str(TEXT), "--set", "calibration.num_samples=2"],
    "allocate": [*ALLOCATION, "--measurements", "measured", "--text", str(TEXT), "--points", "2"],
    "eval": ["--text", str(TEXT), "--seq-len", "32", "--max-tokens", "64"],
    "generate": ["--prompt", "a", "--max-new-tokens", "2"],
    "draft": ["--text", str(TEXT), "--seq-len", "16", "--choice-tokens", "16", "--max-tokens", "16", "--dry-run"],
    "bench": ["--prompt-tokens", "2", "--new-tokens", "1"],
    "export": ["--to", "dense", "--out", "exported"],
    "push": ["me/model", "--dry-run"],
    "merge": ["--adapter", "lora", *DATA_FREE, "--out", "out"],
    "recommend": ["--fits", "1GiB", "--no-timing"],
    "sampling": ["--text", str(TEXT), "--seq-len", "32", "--max-tokens", "64", "--prompts", "2", "--new-tokens", "2"],
    "study": ["--recipes", "int8", "--text", str(TEXT), "--window", "32", "--max-tokens", "64", "--out", "study"],
    "kv save": ["--prompt", "a", "--out", "saved.kv"],
    "kv load": ["saved.kv"],
    "kv bench": ["--text", str(TEXT), "--kv", "kv8", "--context", "64", "--max-tokens", "128", "--no-speed"],
}


@cache
def commands() -> dict[str, Any]:
    """The commands that are given a checkpoint, by name, as the command line has them."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    inner = {f"kv {name}": command for name, command in group.commands["kv"].commands.items()}  # type: ignore[attr-defined]
    names = {"model", "directory"}
    every = {**group.commands, **inner, "inspect --page": group.commands["inspect"]}
    return {
        name: command for name, command in every.items() if names & {parameter.name for parameter in command.params}
    }


def words(name: str, directory: Path) -> list[str]:
    """A command line on this checkpoint, which is given wherever one can be."""
    has_base = name != "inspect" and "base" in {p.name for p in commands()[name].params}  # which is for its page
    options = ["--base", str(directory)] if has_base else []
    return [*name.split(), str(directory), *NEEDED.get(name, []), *options]


def lora(folder: Path) -> None:
    """An adapter of one linear of the model."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": torch.zeros(2, 64), f"{name}.lora_B.weight": torch.zeros(64, 2)}
    save_file(factors, folder / "adapter_model.safetensors")


def test_the_baits_work(tmp_path: Path) -> None:
    """Who unpickles or imports them makes the marker."""
    directory = save_pico("llama", tmp_path / "model")
    known_model(directory)
    marker = tmp_path / MARKER
    for source in (
        f"import torch; torch.load({str(directory / 'pytorch_model.bin')!r}, weights_only=False)",
        f"import transformers; transformers.AutoConfig.from_pretrained({str(directory)!r}, trust_remote_code=True)",
    ):
        assert not marker.exists()
        cli("--version", prepare=source)
        assert marker.exists()
        marker.unlink()


def cases() -> Iterator[Any]:
    """Every command and every source; a study of a model that can be opened takes long."""
    for name in sorted(commands()):
        for hostile in SOURCES:
            marks = [pytest.mark.slow] if name == "study" and hostile is known_model else []
            yield pytest.param(name, hostile, id=f"{name}-{hostile.__name__}", marks=marks)


@pytest.mark.parametrize(("name", "hostile"), list(cases()))
def test_no_command_runs_code_of_a_checkpoint(name: str, hostile: Callable[[Path], None], tmp_path: Path) -> None:
    directory = save_pico("llama", tmp_path / "model")
    lora(tmp_path / "lora")
    hostile(directory)
    result = cli(*words(name, directory), cwd=tmp_path)
    assert not (tmp_path / MARKER).exists(), result
    assert result.code in (0, 1), result
    said = [line for line in result.err.splitlines() if line.startswith("compress: ")]
    errors = [line for line in said if not PROGRESS.match(line)]
    assert len(errors) == result.code and "Traceback" not in result.err, result
    if hostile is not known_model:
        assert result.code == 1, result


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    source = save_pico("llama", directory / "source", changes={"head_dim": 32})  # a group of kv bench's recipe
    api.quantize(job(source, RTN, directory / "out"))
    return directory / "out"


@pytest.mark.parametrize("name", ["bench", "eval", "generate", "inspect", "kv bench", "verify"])
def test_packed_checkpoints_that_bring_code(name: str, packed: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed, tmp_path / "model"))
    known_model(directory)
    result = cli(*words(name, directory), cwd=tmp_path)
    assert not (tmp_path / MARKER).exists() and "Traceback" not in result.err, result
    if name == "verify":
        assert result.code == 1 and "is not listed in" in result.err
        for path in directory.glob("*.bin"):
            path.unlink()
        with pytest.raises(CheckpointError, match=f"{CONFIG} is not the file that was written"):
            verify.verify(directory)
    else:
        assert result.code == 0, result


def test_weights_that_are_elsewhere(packed: Path, tmp_path: Path) -> None:
    """Files that transformers would read in place of those of the index."""
    for changed in ("transformers_weights", "adapter_config.json"):
        directory = Path(shutil.copytree(packed, tmp_path / changed))
        pickled(directory, "adapter_model.bin")
        if changed == "adapter_config.json":
            (directory / changed).write_text(json.dumps({"base_model_name_or_path": str(packed)}))
        else:
            values = json.loads((directory / CONFIG).read_text())
            (directory / CONFIG).write_text(json.dumps({**values, changed: "adapter_model.bin"}))
        with pytest.raises(CheckpointError, match=f"has {changed}, so its weights are not those of its index"):
            load.load_model(directory)
    assert not (tmp_path / MARKER).exists()
