"""Read recipes from YAML with strict keys and types, and write them back with every default."""

from compress.recipe.read import DATA_FREE, ambiguous, data_free, is_paper, load, names, text
from compress.recipe.schema import CalibrationConfig, Recipe, Rule, Step, Target, dump, fingerprint

__all__ = [
    "DATA_FREE",
    "CalibrationConfig",
    "Recipe",
    "Rule",
    "Step",
    "Target",
    "ambiguous",
    "data_free",
    "dump",
    "fingerprint",
    "is_paper",
    "load",
    "names",
    "text",
]
