"""Read recipes from YAML with strict keys and types, and write them back with every default."""

from compress.recipe.read import ambiguous, is_paper, load, names, text
from compress.recipe.schema import CalibrationConfig, Recipe, Rule, Step, Target, dump, fingerprint

__all__ = [
    "CalibrationConfig",
    "Recipe",
    "Rule",
    "Step",
    "Target",
    "ambiguous",
    "dump",
    "fingerprint",
    "is_paper",
    "load",
    "names",
    "text",
]
