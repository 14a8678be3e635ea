"""A few very different architectures, through the command line and back; `make sweep` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep import steps
from sweep.page import page

DATA = Path(__file__).parents[1]
FEW = {  # model -> step
    "llama": "int4",
    "qwen3_moe": "int8",  # fused experts
    "gpt2": "int4",  # linears stored as [in, out]
    "falcon": "int8",  # linears of a class of its own
    "bamba": "int8",  # blocks give two outputs
    "glm_moe_dsa": "int8",  # blocks read what the block before chose
    "gemma3n_text": "int8",  # four-dimensional hidden states, inputs of each layer
    "mamba": "int8",  # reads a weight itself
    "rwkv": "int8",
    "zamba": "int8",  # a block shares weights with one before it
    "opt": "int8",
    "bloom": "int8",  # no maximum position
    "deepseek_v3": "int8",
    "qwen3_next": "int8",
    "camembert": "int8",
    "gpt_oss": "int4",  # experts transposed, interleaved, with biases
    "hy_v4": "int8",  # wants parameters named "scale" in float32
    "inkling2_text": "int8",  # computes its router in float32
    "vlm:llava": "int4",
}
REST = {
    "rwkv",
    "opt",
    "deepseek_v3",
    "qwen3_next",
    "camembert",
    "bloom",
    "mamba",
    "hy_v4",
    "inkling2_text",
    "falcon",
}  # slow tests


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in REST else name for name in FEW])
def test_models_are_quantized_and_loaded(name: str, tmp_path: Path) -> None:
    step = FEW[name]
    place = steps.Place(tmp_path / "row", DATA / "models/books-8m", DATA / "data/books_calib.txt", 100)
    row = steps.run_row(name, (step,), place)
    assert row["build"] == "ok" and row[step]["outcome"] == "ok", row
    assert row[step]["share"] > 0.5 and row[step]["error"] <= steps.BOUNDS[step]


def test_the_page_names_what_went_wrong() -> None:
    entry = {"outcome": "crash", "said": "ValueError: /a/b/c of <class 'x.Y'>"}
    good = {"outcome": "ok", "said": "", "error": 0.01, "share": 0.25}
    rows = [
        {"model": "one", "build": "ok", "kind": "One", "int8": good, "int4": entry},
        {"model": "two", "build": "build: no"},
    ]
    text = page(rows, "versions")
    assert "| one | One | 25.0% | 0.010 | **crash** |" in text and "ValueError: c of Y" in text
    assert "| int4 | 0 | 1 |" in text and "one 25%" in text and "build: no" in text
