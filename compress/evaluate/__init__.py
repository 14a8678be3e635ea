"""Evaluate a checkpoint: perplexity, divergence from another one, tasks, the text that it writes, and its speed.

Importing this package imports no torch: tasks are listed by their file names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.evaluate.activation_sparsity import measure_sparsity
    from compress.evaluate.generation import generate
    from compress.evaluate.scores import Comparison, Execution, Scores, evaluate

__all__ = ["Comparison", "Execution", "Scores", "evaluate", "generate", "measure_sparsity"]
MODULES = {"generate": "generation", "measure_sparsity": "activation_sparsity"}  # what lies elsewhere than in scores.py


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES.get(name, 'scores')}"), name)
