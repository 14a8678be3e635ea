"""Read recipes from YAML with strict keys and types, and write them back with every default."""

from compress.recipe.read import DATA_FREE, data_free, load
from compress.recipe.schema import CalibrationConfig, Recipe, Rule, Step, Target, dump, fingerprint
from compress.recipe.sources import ambiguous, data, is_paper, names, text

__all__ = [
    "DATA_FREE",
    "CalibrationConfig",
    "Recipe",
    "Rule",
    "Step",
    "Target",
    "ambiguous",
    "data",
    "data_free",
    "dump",
    "fingerprint",
    "is_paper",
    "load",
    "names",
    "text",
]
