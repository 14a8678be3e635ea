"""One recipe language, one packed format and one way to load for language-model compression.

    import compress
    plan = compress.plan(...)                   # what a recipe would do, with exact bytes, before a weight is touched
    compress.quantize(...)                      # do it: a directory that transformers loads
    compress.evaluate.evaluate(...)             # how good the result is
    model = compress.load("models_out/...")     # the packed model; from_pretrained does the same

Importing this package makes `from_pretrained` know packed checkpoints, and imports neither torch nor transformers.

The files, in the order of a run:
    cli         the command line: parse, call one function, print, map errors to exit codes
    recipe      YAML -> Recipe; strict keys and types; every default visible
    pipeline    the loop over the blocks; the only module that sees everything
    checkpoint  reading safetensors lazily, writing shards, the journal for resuming
    model       the skeleton: decoder blocks, linears, which linears share an input, experts
    memory      the memory budget: what may be resident, what spills, the measured peak
    calib/      data.py: text -> tokens; stats.py: streamed statistics of the inputs
    quant/      methods, one a file: which codes?
    linalg      damped Cholesky factors and precision rules
    plugins     finds a method or format by its file name and checks its contract
    formats/    one a file: how are the codes stored and decoded?
    packing     n-bit fields <-> words
    runtime/    how does a product run on them? linear, experts, fastpath; hf: loading through transformers
    autoload    how transformers finds runtime/hf without an import
    verify      is a written checkpoint what its manifest says?
    evaluate/   perplexity, divergence and other measures
    report      report.json and the table on screen
    types       the data that modules pass to each other
    errors      every error that the user's input can cause
"""

from __future__ import annotations

import importlib
import os as _os
from typing import TYPE_CHECKING, Any

from compress import autoload

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if _os.path.isfile(_os.path.join(_root, "pyproject.toml")):
    __path__.append(_root)  # a checkout: compress.recipes -> ./recipes, compress.calib -> ./calib

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "load", "plan", "quantize"]

_LAZY = {"quantize": "compress.pipeline", "plan": "compress.pipeline"}

autoload.register()


def load(
    directory: str | _os.PathLike[str],
    dtype: torch.dtype | str = "auto",
    device_map: str | dict[str, Any] | None = None,
) -> PreTrainedModel:
    """The causal language model in `directory`, packed or plain; the options are those of from_pretrained."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map=device_map)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if (
        name == "evaluate"
    ):  # the package: a function of that name would be hidden as soon as anything imports the package
        return importlib.import_module("compress.evaluate")
    raise AttributeError(f"module 'compress' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
