"""Evaluate a checkpoint: perplexity, divergence from another one, the text that it writes, and its speed."""

from compress.evaluate.generation import generate
from compress.evaluate.scores import Comparison, Execution, Scores, evaluate

__all__ = ["Comparison", "Execution", "Scores", "evaluate", "generate"]
