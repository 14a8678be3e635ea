"""One recipe language, one packed format and one way to load for language-model compression.

    import compress
    from compress import recipe
    job = compress.Job("path/to/model", recipe.load("int4"), Path("models_out/small"))
    compress.prepare(job).plan                              # what would be done, with exact bytes; reads no weight
    compress.quantize(job)                                  # do it: a directory that transformers loads
    compress.evaluate.evaluate("models_out/small", text)    # how good the result is
    model = compress.load("models_out/small")               # the packed model; from_pretrained loads the same

Importing this package makes `from_pretrained` know packed checkpoints, and imports neither torch nor transformers.

The packages, each of which imports only those before it:
    errors, types, plugins, progress     what everything may use
    ranks, pages    processes that share a run; HTML pages from plain data
    numerics    factors of matrices, Hadamard transforms, packed words
    formats     one file a format: how codes are stored and decoded; transforms: what lies around a stored matrix
    kernels     products that read stored weights: kernels/cpu/ (LLVM), kernels/loops/ (numba), kernels/triton/
    storage     safetensors and checkpoint directories; the working directory of a run, renamed into place last
    importers   checkpoints of other tools, read as plain weights
    kv          the key-value cache: store, cache, attention; kv/codecs/: one file a codec
    runtime, serving    modules that hold packed weights; how transformers, vLLM and SGLang load them
    speculate   generate with drafts of the model itself, checked by one pass; speculate/drafts/: one file a draft
    model       the skeleton of a model, running it block by block, tracing what feeds what
    recipe      YAML -> Recipe and back
    calib       calibration text, statistics of inputs, gradients, samples for cache codecs
    lowrank, tune    low-rank parts beside weights, and their training
    quant       one file a weight method: which codes?
    transform   what is done to weights before: rotation, scaling
    run         a job from its plan to the finished checkpoint
    evaluate    perplexity, divergence, speed, caches, tasks
    allocate    bits within a budget: options, what they damage, allocators (allocate/methods/)
    export      checkpoints in the formats of other tools
    api, study, cli    whole tasks: allocate and run, plan, load; grids of recipes; the command line
    papers      published methods behind the frontier, found by name; nothing imports them
"""

from __future__ import annotations

import importlib
from typing import Any

from compress import autoload
from compress.version import __version__

__all__ = ["Job", "__version__", "evaluate", "load", "prepare", "quantize", "speculate"]

# Imported when asked for. `evaluate` is a package: a function of its name would be hidden once anything imports it.
_HOMES = {
    "Job": "compress.run.job",
    "load": "compress.api",
    "prepare": "compress.run.prepare",
    "quantize": "compress.api",
}

autoload.register()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("evaluate", "speculate"):
        return importlib.import_module(f"compress.{name}")
    raise AttributeError(f"module 'compress' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
