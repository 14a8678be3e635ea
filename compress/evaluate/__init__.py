"""How good a checkpoint is: perplexity, divergence from another checkpoint, what it writes, and how fast (speed)."""

from compress.evaluate.generation import generate
from compress.evaluate.scores import Comparison, Execution, Scores, evaluate

__all__ = ["Comparison", "Execution", "Scores", "evaluate", "generate"]
