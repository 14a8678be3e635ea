"""List the built-in recipes by purpose, with their bits, what they read, and their cost.

Figures are those of the section `measured` of a recipe (compress/recipe/facts.py); the rest follows from its settings.
`compress recipes` and docs/generate_recipes.py show the same list.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Set
from typing import Any, Literal, NamedTuple

from compress import plugins
from compress.recipe import facts
from compress.recipe.facts import About, Measurement
from compress.recipe.read import load
from compress.recipe.sources import data, is_paper, names, text
from compress.recipe.yaml import compose, mapping

# Methods and transforms that store or read fewer numbers instead of fewer bits.
FEWER_NUMBERS = {"lord", "cut", "structured", "sparsegpt", "drop_blocks", "prune_width", "prune_experts"}
# Scores of allocators that need no measurement of every option.
CHEAP_SCORES = {"lim", "zd"}

# Purpose -> its name in a narrow table, in the order in which recipes are shown.
PURPOSES = {
    "Weights, 2 bits": "weights, 2 bits",
    "Weights, 3 bits": "weights, 3 bits",
    "Weights, 4 bits": "weights, 4 bits",
    "Weights, 8 bits": "weights, 8 bits",
    "Weights and activations": "activations, too",
    "Key-value cache": "cache",
    "Weights and key-value cache": "cache, too",
    "Bit allocation": "mixed bits",
    "Fewer numbers": "fewer numbers",
}
BITS_OF_PURPOSES = {purpose: int(purpose.split()[1]) for purpose in PURPOSES if purpose.endswith(" bits")}
# The weight whose bits stand for those of a recipe that is not measured.
PLANNED_SHAPE = (4096, 4096)
WHERE_TO_START = {
    "trellis4bit": "for 4 bits",
    "int4": "for engines that read integers",
    "vq2bit": "for 2 bits",
    "mixed3bit": "to fit a size",
    "kv4": "for the key-value cache",
}
Cost = Literal["data-free", "one pass", "search", "training"]
COSTS: dict[Cost, str] = {
    "data-free": "needs no text",
    "one pass": "runs calibration text through the model once",
    "search": "measures or scores many choices first",
    "training": "takes gradient steps on the calibration text",
}


class ListedRecipe(NamedTuple):
    """One built-in recipe: its name, its YAML data, and what it states about itself."""

    name: str
    data: dict[str, Any]
    about: About = About()
    measured: tuple[Measurement, ...] = ()

    @property
    def description(self) -> str:
        return str(self.data["description"])

    @property
    def is_paper(self) -> bool:
        """Whether the recipe lies in recipes/papers."""
        return is_paper(self.name)

    @property
    def bits(self) -> str:
        """Bits per weight, or per coded number of a cache: as measured, else as aimed at, else as planned, or ""."""
        measured = next((figure for run in self.measured if (figure := run.bpw or run.bits)), "")
        target = re.match(r"([\d.]+)bpw$", str(self.data.get("allocate", {}).get("target")))
        if measured or target or "allocate" in self.data or "quantize" not in self.data:
            return measured or (target[1] if target else "")
        return f"{_planned_bits(self.name):.4g}"

    @property
    def purpose(self) -> str:
        """One of PURPOSES."""
        quantize = self.data.get("quantize")
        if quantize is None:
            return "Key-value cache"
        if "allocate" in self.data:
            return "Bit allocation"
        if "activations" in quantize:
            return "Weights and activations"
        if "kv_cache" in self.data:
            return "Weights and key-value cache"
        methods = {quantize["method"], *(step["method"] for step in self.data.get("transform", []))}
        if quantize.keys() & {"lowrank", "sparsity"} or methods & FEWER_NUMBERS:
            return "Fewer numbers"
        return min(BITS_OF_PURPOSES, key=lambda purpose: abs(BITS_OF_PURPOSES[purpose] - float(self.bits)))

    @property
    def cost(self) -> Cost:
        """The most expensive thing that the recipe asks for; all but "data-free" read calibration text."""
        schemes, transforms = _schemes(self.data), self.data.get("transform", [])
        trained = any(map(_trains, [*(scheme.get("lowrank") or {} for scheme in schemes), *transforms]))
        cache = self.data.get("kv_cache", {})
        if trained or "tune" in self.data or cache.get("steps", 0) > 0:
            return "training"
        if "allocate" in self.data and _damages(self.data["allocate"]) - CHEAP_SCORES:
            return "search"
        by_block = any(plugins.constant("transform", step["method"], "SCOPE") == "block" for step in transforms)
        cached = any(plugins.constant("kv", codec, "NEEDS") for codec in _codecs(cache))
        cached |= any(plugins.constant("read", name, "NEEDS") for name in _codecs(cache.get("read", {})))
        if by_block or cached or "experts" in self.data or any(map(_reads_inputs, schemes)):
            return "one pass"
        return "data-free"


def entries() -> list[ListedRecipe]:
    """The built-in recipes by name, those of papers behind the others."""
    return [entry(name) for name in names()]


def entry(name: str) -> ListedRecipe:
    """One built-in recipe."""
    sections = mapping(compose(text(name), f"{name}.yaml"), "the recipe")
    return ListedRecipe(name, data(name), facts.about(sections), facts.measurements(sections))


def by_purpose() -> dict[str, list[ListedRecipe]]:
    """Purpose -> its recipes, those of fewer bits first, then those of less loss; ValueError if one has no purpose."""
    groups: dict[str, list[ListedRecipe]] = {purpose: [] for purpose in PURPOSES}
    for entry in sorted(entries(), key=_order):
        if entry.purpose not in groups:
            raise ValueError(f"{entry.name}: PURPOSES has no {entry.purpose!r}")
        groups[entry.purpose].append(entry)
    return groups


def _planned_bits(name: str) -> float:
    """The stored bits per weight of a recipe that is not measured, for a large weight, from its settings."""
    from compress import formats  # which imports torch: no recipe of ours needs it
    from compress.types import Stored

    scheme = load(name).quantize
    method = plugins.load("quant", scheme.method)
    parts = [Stored(method.FORMAT, method.plan_params(config, PLANNED_SHAPE)) for config in scheme.part_configs]
    original = scheme.levels[-1] if scheme.has_original else 0
    return 8 * sum(formats.nbytes(part, PLANNED_SHAPE) for part in parts) / math.prod(PLANNED_SHAPE) + original


def _schemes(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of all linears that are quantized: those of the recipe, of its rules and of its options."""
    base = data.get("quantize")
    if base is None:
        return []
    over = [*data.get("rules", []), *data.get("allocate", {}).get("options", [])]
    return [base, *({**base, **settings} for settings in over if not settings.get("keep"))]


def _reads_inputs(scheme: dict[str, Any]) -> bool:
    """Whether a weight is quantized with statistics of its inputs."""
    static = (scheme.get("activations") or {}).get("scale") == "tensor"
    corrected = (scheme.get("lowrank") or {"metric": "none"}).get("metric") != "none"
    unread = scheme.get("sparsity") is not None
    return static or corrected or unread or "hessian" in plugins.constant("quant", scheme["method"], "NEEDS")


def _trains(settings: dict[str, Any]) -> bool:
    """Whether settings of a transform or of a low-rank part ask for gradient steps."""
    steps = (settings.get(key, 0) for key in ("train", "train_blocks", "learn", "heal"))
    return any(isinstance(each, int) and each > 0 for each in steps)


def _damages(settings: dict[str, Any]) -> Set[str]:
    """What the allocator of a recipe needs measured."""
    module = plugins.load("allocate", settings["method"])
    fields = {field.name for field in dataclasses.fields(module.Config)}
    needed: Set[str] = module.needs(module.Config(**{key: settings[key] for key in settings.keys() & fields}))
    return needed


def _codecs(block: dict[str, Any]) -> set[str]:
    """The methods that a kv_cache section names, for all layers or for some."""
    inner = [block.get("keys", {}), block.get("values", {}), *block.get("layers", [])]
    return {block[key] for key in ("method",) if key in block}.union(*map(_codecs, filter(None, inner)))


def _order(entry: ListedRecipe) -> tuple[float, float]:
    loss = next((run.kl for run in entry.measured if run.kl), "")
    return float(entry.bits or "inf"), float(loss or "inf")
