"""GPTQ and AWQ exports read by GPTQModel: skipped where it is not installed, run by `make exports`.

Its reader decodes weights in float16, which is the type that our scales are stored in: they are compared in every bit.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compress import api
from compress.export import convert
from compress.export.source import open_source
from compress.model.load import load_model
from helpers.pico import save_pico
from helpers.runs import KEEP_TABLES, Setup, job

pytestmark = [  # GPTQModel leaves its temporary directories to the interpreter
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <finalize:pytest.PytestUnraisableExceptionWarning"),
]
TOKENS = torch.arange(40).view(2, 20) * 5
FOUR_BITS = ("quantize.bits=4", "group_size=32")
ASYMMETRIC = ("symmetric=false",)
CASES = [
    ("gptq", "llama", FOUR_BITS),
    ("gptq", "qwen2", (*FOUR_BITS, *ASYMMETRIC)),
    ("gptq", "llama", ("quantize.bits=8", "group_size=32")),
    ("gptq", "llama", ("quantize.bits=2", "group_size=32")),
    ("gptq", "llama", (*FOUR_BITS, "rules=[{match: '*down_proj', bits: 8}]")),
    ("awq", "llama", FOUR_BITS),
    ("awq", "qwen2", (*FOUR_BITS, *ASYMMETRIC)),
]
TOLERANCE = 0.02  # of the largest logit: the reader computes in 16 bits
UNUSED = "gptqmodel.models.definitions.internvl_chat"  # the one file of it that needs torchvision


@pytest.fixture
def gptqmodel(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("gptqmodel") is None:
        pytest.skip("gptqmodel is not installed; `make exports` does")
    stub = ModuleType(UNUSED)
    vars(stub)["InternVLChatQModel"] = object
    monkeypatch.setitem(sys.modules, UNUSED, stub)
    return importlib.import_module("gptqmodel")


@pytest.mark.parametrize(("target", "model", "settings"), CASES)
def test_gptqmodel_decodes_our_weights(
    gptqmodel: Any, target: str, model: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    source = save_pico(model, tmp_path / "model", dtype=torch.bfloat16)
    api.quantize(job(source, Setup("int8", (*KEEP_TABLES, *settings)), tmp_path / "packed"))
    convert.export(tmp_path / "packed", target, tmp_path / "out")
    backend = gptqmodel.BACKEND.TORCH if target == "gptq" else gptqmodel.BACKEND.TORCH_AWQ
    read = gptqmodel.GPTQModel.load(str(tmp_path / "out"), device="cpu", backend=backend, dtype=torch.float16).model
    for weight in open_source(tmp_path / "packed").packed:
        linear = read.get_submodule(weight.name)
        bias, linear.bias = linear.bias, None
        with torch.no_grad():
            decoded = linear(torch.eye(weight.shape[1], dtype=torch.float16))  # of exact products
        linear.bias = bias
        assert torch.equal(decoded.T, weight.dense(torch.float16)), weight.name
    ours = load_model(tmp_path / "packed", "float32")
    with torch.no_grad():
        expected, found = ours(TOKENS).logits, read(TOKENS).logits.float()
    assert (expected - found).abs().max() <= TOLERANCE * expected.abs().max()
