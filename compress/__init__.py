"""One recipe language, one packed format and one way to load for language-model compression.

    import compress
    from compress import recipe
    job = compress.Job("path/to/model", recipe.load("int4"), Path("models_out/small"))
    compress.prepare(job).plan                              # what would be done, with exact bytes; reads no weight
    compress.quantize(job)                                  # do it: a directory that transformers loads
    compress.evaluate.evaluate("models_out/small", text)    # how good the result is
    model = compress.load("models_out/small")               # the packed model; from_pretrained does the same

Importing this package makes `from_pretrained` know packed checkpoints, and imports neither torch nor transformers.

The files:
    cli         the command line: parse, call one function, print, map errors to exit codes; display: what it prints
    recipe      YAML -> Recipe: strict keys and types, every default visible; recipe_types: the data; recipe_blocks,
                overrides, strict_yaml: the reading beneath it
    plan        recipe and skeleton -> what happens to every linear, with exact bytes
    job         what the user asked for, made ready; memory: the budget, what may be resident, what spills
    pipeline    the loop over the blocks, the only module that sees everything
    allocation  a recipe that leaves bits open -> one that says what every linear gets; measure, damages, sensitivities:
                what that is decided by; database: packed levels; table, units: the choices; frontier: what bytes buy;
                forecast: what a plan says before that
    allocate/   allocators, one a file: which option for which part, within a budget?
    candidates  the divergence of many variants of the model at once; prefixes, teacher, head: the parts of it
    model       the skeleton: decoder blocks, linears, which of them share an input, experts; propagate: running blocks
    checkpoint  reading safetensors lazily, writing shards; output: the directory that is renamed into place last
    calib/      data.py: text -> tokens; stats.py: streamed statistics of the inputs; sensitivity.py: gradients, scores,
                answers to noise; fisher.py: gradients of weights; routing.py: where tokens go among experts; lm.py:
                whole models
    incoherence random signs and Hadamard transforms around what a method sees; asymmetric: targets that make up for the
                errors of earlier blocks; ops: the operations at run time; hadamard: transforms of any order
    quant/      methods, one a file: which codes? feedback: the column loop that they share; sweeps: its clean-up;
                linalg: factors and precision rules
    lowrank/    two thin matrices that make up for what rounding loses: found, stored in few bits, trained; adapter: the
                same in the form of PEFT
    kv/         codecs of the key-value cache, one a file; its store, what transformers sees, both ways to read it, its
                calibration; recipe_kv: its section of a recipe; cache_allocation: one budget for it and the weights
    formats/    one a file: how are the codes stored and decoded? packing: n-bit fields <-> words
    kernels/    how does a product run on them? cpu, triton: a file a format; dispatch: which of them;
                jit: functions compiled for the CPU at hand
    runtime/    modules that hold them: linear, experts; hf: loading through transformers
    autoload    how transformers finds runtime/hf without an import
    assemble    the finished directory; verify: is it what its manifest says?; report, progress: what happened
    evaluate/   perplexity, divergence and what a model writes
    plugins     finds a method or format by its file name and checks its contract
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
__all__ = ["Job", "__version__", "evaluate", "load", "prepare", "quantize"]

# Imported when asked for. `evaluate` is a package and `plan` a module: a function under either name would be hidden as
# soon as anything imports the module.
_HOMES = {"Job": "compress.job", "prepare": "compress.job", "quantize": "compress.pipeline"}

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
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "evaluate":
        return importlib.import_module("compress.evaluate")
    raise AttributeError(f"module 'compress' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
