"""`import compress` is light, and packed checkpoints load in fresh processes, with and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from compress.runtime.hf import CompressQuantizer, build_config
from compress.runtime.linear import PackedLinear
from helpers.pico import PICO, round_to_nearest

ROOT = Path(__file__).parents[2]
INSTALLED = any(e.value == "compress.autoload:install" for e in entry_points(group="torch.backends"))

LOAD = """
import sys
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    logits = model(torch.arange(32).view(2, 16)).logits
torch.testing.assert_close(logits, torch.load(sys.argv[1] + "/logits.pt"))
"""
KNOWN = """
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
def known():
    return "compress" in AUTO_QUANTIZATION_CONFIG_MAPPING and "compress" in AUTO_QUANTIZER_MAPPING
"""
OPTED_OUT = """
import sys
import torch
ours = lambda: [finder for finder in sys.meta_path if type(finder).__module__ == "compress.autoload"]
assert not ours() and "compress" not in sys.modules
import compress
assert len(ours()) == 1
"""
LAYERS = """
import sys
assert not [name for name in sys.modules if name.startswith(("compress.quant", "compress.calib"))]
"""
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
OPT_OUT = {"COMPRESS_AUTOLOAD": "0"}

CASES: dict[str, tuple[str, dict[str, str]]] = {
    "no import": ("from transformers import AutoModelForCausalLM" + LOAD, {}),
    "import first": ("import compress" + LOAD, NO_AUTOLOAD),
    "import last": (f"{KNOWN}assert not known()\nimport compress\nassert known()\n" + LOAD, NO_AUTOLOAD),
    "transformers half loaded": (f"{KNOWN}import transformers.modeling_utils\nassert known()\n" + LAYERS, {}),
    "opted out": (OPTED_OUT, OPT_OUT),
}
NEEDS_ENTRY_POINT = {"no import", "transformers half loaded"}


def python(code: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.Popen[str]]:
    """All cases at once: most of their time is the start of the interpreter."""
    directory = tmp_path_factory.mktemp("packed")
    model = PICO["llama"]()
    weight = round_to_nearest(model.model.layers[0].mlp.up_proj.weight, 4, 32)
    model.model.layers[0].mlp.up_proj = PackedLinear.from_packed(weight)
    config = build_config({"model.layers.0.mlp.up_proj": weight.stored})
    model.hf_quantizer, model.config.quantization_config = CompressQuantizer(config), config
    model.save_pretrained(directory)
    with torch.no_grad():
        torch.save(model(torch.arange(32).view(2, 16)).logits, directory / "logits.pt")
    return {name: python(code, str(directory), **variables) for name, (code, variables) in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_fresh_process(case: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    _, errors = processes[case].communicate(timeout=6000)
    if case in NEEDS_ENTRY_POINT and not INSTALLED:
        pytest.skip("the package is not installed, so torch does not know its entry point")
    assert processes[case].returncode == 0, errors


@pytest.fixture(scope="module")
def light() -> Callable[..., str]:
    def run(code: str, **variables: str) -> str:
        process = python(code, **variables)
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        return output

    return run


def test_importing_is_fast_and_loads_nothing_heavy(light: Callable[..., str]) -> None:
    code = """
import sys, time
start = time.process_time()
import compress
seconds = time.process_time() - start
assert not {"torch", "transformers", "numpy", "scipy", "datasets"} & set(sys.modules)
print(seconds)
"""
    seconds = min(float(light(code)) for _ in range(3))
    assert seconds < 0.05, f"{seconds * 1000:.0f} ms"


def test_opting_out_leaves_an_explicit_import_alone(light: Callable[..., str]) -> None:
    code = """
import sys
import compress
hooks = list(sys.meta_path)
compress.autoload.install()  # as torch calls it, some time after the program's own import
assert sys.modules["compress"] is compress and sys.meta_path == hooks
"""
    light(code, **OPT_OUT)


@pytest.mark.slow
def test_public_names(light: Callable[..., str]) -> None:
    code = """
import compress
assert set(compress.__all__) <= set(dir(compress))
assert compress.__version__
assert callable(compress.quantize) and callable(compress.prepare) and callable(compress.Job) and callable(compress.load)
assert callable(compress.evaluate.evaluate)
import compress.run.plan
assert callable(compress.run.plan.make)
try:
    compress.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
else:
    raise SystemExit("an unknown name was found")
"""
    light(code)


def test_the_subpackages_beside_the_package_resolve(light: Callable[..., str]) -> None:
    light("import compress.calib, compress.recipes")
