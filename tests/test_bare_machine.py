"""A machine with torch, transformers, safetensors and numpy alone: what needs more says so in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.runs import TEXT

ROOT = Path(__file__).parents[1]
ABSENT = ("accelerate", "bitsandbytes", "datasets", "llvmlite", "matplotlib", "pyarrow", "rich", "scipy", "typer")
BLOCK = f"""
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Finder())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name.partition(".")[0] in {ABSENT} else real(name, package)
importlib.util.find_spec = find_spec
"""
QUANTIZE = """
import pathlib
import compress
from compress import recipe
model, out, calib, *settings = sys.argv[1:]
job = compress.Job(model, recipe.load(settings[0], settings[1:]), pathlib.Path(out), calib=calib or None)
print(compress.quantize(job)["bpw"])
print(type(compress.load(out)).__name__)
print(compress.evaluate.evaluate(out, calib, seq_len=32, max_tokens=64).tokens if calib else 0)
"""
TEXTS = [  # recipe, overrides; calibration text, "" for what the model writes itself
    (("int4", "group_size=32"), str(TEXT)),
    pytest.param(("vq2bit", "state_bits=6"), "", marks=pytest.mark.slow),  # whose search is compiled elsewhere
]


def run(source: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python source behind the finder that knows none of the packages."""
    command = [sys.executable, "-c", BLOCK + source, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=600)


@pytest.mark.parametrize(("settings", "calib"), TEXTS)
def test_a_model_is_quantized_and_loaded(
    pico_dir: Callable[..., Path], tmp_path: Path, settings: tuple[str, ...], calib: str
) -> None:
    small = ("calibration.num_samples=4", "calibration.seq_len=32")
    done = run(QUANTIZE, str(pico_dir("llama")), str(tmp_path / "out"), calib, *settings, *small)
    assert done.returncode == 0, done.stderr
    bits, kind, tokens = done.stdout.split()
    assert 2 < float(bits) < 9 and kind == "LlamaForCausalLM" and int(tokens) == (62 if calib else 0)


@pytest.mark.parametrize("command", [["-m", "compress"], ["cli.py"]])
def test_the_command_line_names_what_it_lacks(command: list[str]) -> None:
    source = f"import runpy\nsys.argv = ['compress']\nrunpy.run_{'module' if command[0] == '-m' else 'path'}"
    done = run(f"{source}({command[-1]!r}, run_name='__main__')")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "compress: the command line needs the package typer, which is not installed here; pip install typer; from "
        "Python, compress.quantize works without it\n"
    )


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("from compress.papers.quant import pvq\npvq.gain_levels(pvq.pvq_format.Params(8, 4, 2), 64)", "scipy"),
        ("from compress.calib import documents\nnext(documents.documents('no-such/data-set'))", "datasets"),
        (
            "from compress.calib import documents\nopen(sys.argv[1], 'w')\nnext(documents.documents(sys.argv[1]))",
            "pyarrow",
        ),
    ],
)
def test_a_part_names_the_package_that_it_needs(source: str, package: str, tmp_path: Path) -> None:
    caught = f"try:\n    exec({source!r})\nexcept MissingPackageError as error:\n    print(error)"
    done = run(f"from compress.errors import MissingPackageError\n{caught}", str(tmp_path / "x.parquet"))
    assert done.returncode == 0, done.stderr
    assert f"needs the package {package}, which is not installed here; pip install {package}" in done.stdout
