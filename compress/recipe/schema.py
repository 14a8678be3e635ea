"""Define a recipe as data, and write it as YAML; compress/recipe/read.py reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import yaml

from compress import plugins
from compress.process_memory import UNITS
from compress.recipe import facts

if TYPE_CHECKING:
    from compress.kv.settings import CacheSettings
    from compress.types import ExpertPruning, Scheme

# Keys of a scheme that only stand in a recipe where they are not these.
OUTPUT_DEFAULTS = {"two_sided": False, "out_scales": "none", "in_vector": False, "vector_bits": 16, "nested": False}
KEEP = "keep"  # the option, and the method of a scheme, that leaves a weight as it is
TABLES = ("embeddings", "head")  # sections for what lies outside of the blocks
DRAFT_HEADS = "draft_heads"  # the section for layers that predict further tokens
OTHER_KEYS = (DRAFT_HEADS, "allocate", "tune", "experts", "kv_cache", "towers", "export", "accept")
SETTING_KEYS = ("calibration", "transform", "quantize", "rules", "ignore", *TABLES, *OTHER_KEYS)
TOP_KEYS = ("name", "description", *SETTING_KEYS, *facts.SECTIONS)
CACHE_KEYS = ("context", "cache_bits", "cache_options", "cache_estimator")
EXTENDS, TEXT_OF_ACCEPTANCE = "extends", ("accept", "text")  # keys that name other files
ALLOCATE_KEYS = (
    "method",
    "target",
    "options",
    "tables",
    "units",
    "samples",
    *CACHE_KEYS,
)  # beside the method's settings
RENAMED = {("calibration", "asymmetric"): "target_correction"}  # (section, old key) -> new key
ToPlain = Callable[[Any], dict[str, Any]]
OF_EXPERTS = frozenset({"expert", "expert_squares", "share", "routing"})  # what is measured of whole experts only

Importance = Literal[
    "none",
    "auto",  # attention, where it can be seen
    "attention",
    "first_tokens",
    "activation_norm",
    "input_output_difference",
    "token_rarity",
    "token_similarity",
]


Bos = Literal["auto", "never", "always"]
AUTO: Literal["auto"] = "auto"
GRADIENT_TOKENS = 8192  # unless a recipe says another number


@dataclass(frozen=True)
class CalibrationConfig:
    """The text that statistics are collected on, and how its tokens count."""

    num_samples: int | Literal["auto"] = AUTO  # [sequences] of calibration text; auto: what makes up `tokens`
    seq_len: int | Literal["auto"] = AUTO  # [tokens] of each sequence; capped by the maximum of the model
    target_correction: float = 0.0  # [fraction] of the way from each weight to its target
    # (compress/quant/target_correction.py); 0: off
    importance: Importance = "none"  # what a token weighs in the statistics (calib/token_importance.py)
    importance_min: float = 0.005  # [fraction] of the largest weight of a sample that its least important token has
    rolled: int = 1  # [copies] of each sample that are used, each shifted in a circle
    gradient_tokens: int = GRADIENT_TOKENS  # [tokens] of the first sequences, on which the loss's gradients at outputs
    # of linears are taken (calib/output_gradients.py)
    bos: Bos = "auto"  # what each sequence begins with: auto, what the tokenizer puts before a text by itself; never,
    # nothing; always, at least its begin-of-text token
    tokens: int | Literal["auto"] = AUTO  # of calibration text in all, in place of num_samples; auto: as many as are
    # enough (calib/enough.py)

    def __post_init__(self) -> None:
        for key in ("tokens", "num_samples", "seq_len", "rolled", "gradient_tokens"):
            if (number := getattr(self, key)) != AUTO and number < 1:
                raise ValueError(f"{key} {number} is not positive")
        if AUTO not in (self.tokens, self.num_samples):
            raise ValueError("tokens and num_samples are both given; remove one of them")
        if not 0 <= self.target_correction <= 1:
            raise ValueError(f"target_correction {self.target_correction} is not between 0 and 1")
        if not 0 < self.importance_min <= 1:
            raise ValueError(f"importance_min {self.importance_min} is not above 0 and at most 1")


@dataclass(frozen=True)
class Step:
    """A transform before quantization, or tuning along with it."""

    method: str
    config: Any


@dataclass(frozen=True)
class Rule:
    match: tuple[str, ...]  # fnmatch patterns, any of which may match
    scheme: Scheme | None  # None: keep the weight as it is
    alternatives: bool = False  # names of the same thing in several architectures: it is enough that one is the model's

    def matches(self, name: str) -> bool:
        return name in self._names or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    @cached_property
    def _names(self) -> frozenset[str]:
        """Plain names: an allocation lists thousands of them."""
        return frozenset(self.match)

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(pattern for pattern in self.match if any(sign in pattern for sign in "*?["))


@dataclass(frozen=True)
class Acceptance:
    """What a checkpoint must reach beside its original; a run whose checkpoint falls short ends with exit code 3."""

    kl: float | None = None  # [nats a token] of divergence at most, on `text`
    task: Mapping[str, float] = field(default_factory=dict)  # name of a task -> the least share of right answers, less
    # the original's: {recall: -0.02}
    text: str | None = None  # file that is scored, as seen from the recipe's folder; default: the text that compress
    # comes with, where the run was calibrated on another one


Units = Literal["fused", "linear", "expert", "sublayer", "block"]
CacheEstimator = Literal["kl_one_at_a_time", "output_error", "rule"]


@dataclass(frozen=True)
class Target:
    """The aim of an allocation: stored bits a quantized weight, bytes of all stored tensors, a KL, or a share.

    "3.25bpw" (or "3.25 bits"), "2.1GiB", "0.05kl" (nats a token of calibration), "75% units" (not dropped), "70% time".
    """

    text: str

    def __post_init__(self) -> None:
        if re.fullmatch(r"[0-9]*\.?[0-9]+", self.text) is not None:
            raise ValueError(f"target {self.text} has no unit: {self.text}bpw or {self.text}GiB?")
        pattern = r"[0-9]*\.?[0-9]+ ?(bpw|bits?|kl|% ?(units|time)|[kmg](i?b)?|b)"
        if re.fullmatch(pattern, self.text, re.IGNORECASE) is None:
            raise ValueError(
                f"target {self.text!r} is neither bits a weight (3.25bpw) nor a size (2.1GiB) nor a share (75% units)"
            )
        if not 0 < self.value < math.inf:
            raise ValueError(f"target {self.text!r} is not positive and finite")

    @property
    def unit(self) -> str:
        """bpw, kl, %units, %time, or a unit of size."""
        unit = self.text.lstrip("0123456789. ").lower().replace(" ", "")
        return "bpw" if unit in ("bit", "bits") else unit

    @property
    def is_size(self) -> bool:
        """Whether it is a size, in bytes."""
        return self.unit not in ("bpw", "kl") and not self.is_share

    @property
    def is_share(self) -> bool:
        """Whether it is a share of what the original takes."""
        return self.unit.startswith("%")

    @property
    def nbytes(self) -> int:
        """Bytes of a target that is a size."""
        return int(self.value * UNITS[self.unit.upper()])

    @property
    def value(self) -> float:
        return float(re.match(r"[0-9.]+", self.text)[0])  # type: ignore[index]


@dataclass(frozen=True)
class Allocation:
    """A choice among options for each unit of the model, to be made by a method of compress/allocate."""

    method: str  # how options are chosen: a file of compress/allocate/methods; its settings stand beside it
    config: Any  # settings of the method
    options: tuple[Scheme | None, ...]  # what a unit may get, like rules: {bits: 2}, {method: NAME, bits: 4}, {keep:
    # true}; default: bits 2 to 8
    target: Target | None = None  # what is aimed at: 3.25bpw, 2.1GiB of all tensors, 0.05kl, 75% units, 70% time
    units: Units = "fused"  # what gets one option together: fused (what is stored alike: q, k, v and gate, up; all
    # experts of a block), one linear, one expert, a sublayer (attention or MLP with its experts), or a block
    samples: int = 32  # [sequences] of calibration on which measured choices are scored
    context: int | None = None  # [tokens] whose cache is within the target, too; its bits are chosen with those of the
    # weights
    cache_bits: tuple[float, ...] = ()  # [bits] offered to the keys and values of each layer; empty: those that the
    # method takes
    cache_estimator: CacheEstimator = "kl_one_at_a_time"  # of what errors of the cache cost
    # (compress/allocate/cache_units.py)
    cache_options: tuple[Mapping[str, Any], ...] = ()  # settings of kv_cache offered to the keys and values of each
    # layer in place of cache_bits: {bits: 2}, {method: lloyd, bits: 3}, {bits: 4, evict: {keep: 0.5}}
    tables: tuple[Scheme | None, ...] = ()  # what the token embeddings and the output head may get, like the sections
    # embeddings and head: {bits: 8}, {keep: true}; they then count in the target; empty: they are not allocated


def option_names(options: tuple[Scheme | None, ...]) -> list[str]:
    """Return short names of options: the method where they differ in it, and its bits, or all settings that differ."""
    methods = {option.method for option in options if option is not None}
    names = []
    for option in options:
        if option is None:
            names.append(KEEP)
            continue
        plain = settings(option)
        kin = [settings(other) for other in options if other is not None and other.method == option.method]
        keys = dict.fromkeys(key for other in kin for key in other if key != "method")
        differing = [key for key in keys if any(other.get(key) != plain.get(key) for other in kin)]
        if "bits" in differing and len({other["bits"] for other in kin}) == len(kin):
            differing = ["bits"]
        parts = [_setting_words(key, plain.get(key), [other.get(key) for other in kin]) for key in differing]
        parts = sorted(filter(None, parts), key=lambda part: part.startswith("+"))
        names.append(" ".join([*([option.method] if len(methods) > 1 or not parts else []), *parts]))
    return names


def _setting_words(key: str, value: Any, all_of_kin: list[Any]) -> str:
    """Return one setting of an option in a few words; of a part, what differs between those that have it, or ""."""
    if not any(isinstance(other, dict) for other in all_of_kin):
        return f"{key}={value}"
    if value is None:
        return ""
    parts = [other for other in all_of_kin if other is not None]
    differing = [name for name in value if any(other[name] != value[name] for other in parts)]
    return f"+ {key}" + "".join(f" {name}={value[name]}" for name in differing)


def settings(scheme: Scheme, plain: ToPlain = dataclasses.asdict) -> dict[str, Any]:
    """Return a scheme in the layout of its YAML; plain: gives the settings of its method as JSON values.

    Of two-sided rounding and stored scales it says only what is not the default, as did recipes before there were any.
    """
    activations = dataclasses.asdict(scheme.activations) if scheme.activations else None
    lowrank = dataclasses.asdict(scheme.lowrank) if scheme.lowrank else None
    around = {"incoherence": scheme.incoherence, "activations": activations, "lowrank": lowrank}
    around |= {key: getattr(scheme, key) for key, usual in OUTPUT_DEFAULTS.items() if getattr(scheme, key) != usual}
    if scheme.sparsity is not None:
        around["sparsity"] = dataclasses.asdict(scheme.sparsity)
    return {"method": scheme.method, **around, **plain(scheme.config)}


@dataclass(frozen=True)
class Recipe:
    name: str
    description: str
    calibration: CalibrationConfig
    quantize: Scheme
    rules: tuple[Rule, ...] = ()
    ignore: tuple[str, ...] = ()
    transform: tuple[Step, ...] = ()
    allocate: Allocation | None = None
    tune: tuple[Step, ...] = ()  # what is trained beside the codes: of a block at a time, then of the whole model
    experts: ExpertPruning | None = None  # None: tokens get all experts that they are routed to
    kv_cache: CacheSettings | None = None  # None: generation stores keys and values as they are
    towers: tuple[Rule, ...] = ()  # for linears beside the text model, which no rule matches stay as they are
    embeddings: Scheme | None = None  # of the token embeddings; None: they stay as they are
    head: Scheme | None = None  # of the output head; None: it stays as it is
    draft_heads: Scheme | None = None  # of the linears of draft heads; None: 8 bits; the method KEEP: as they are
    export: str | None = None  # the format of another tool that the result must fit (compress/export/targets)
    accept: Acceptance | None = None  # what the result must reach; None: nothing is scored

    @property
    def packs(self) -> bool:
        """True if it has a `quantize` section."""
        return self.quantize.method != KEEP

    @property
    def pruning(self) -> ExpertPruning | None:
        """The settings of expert pruning, None without it."""
        return self.experts if self.experts is not None and self.experts.prune else None

    def tuning(self, scope: Literal["block", "model"]) -> Step | None:
        """Return the step of tuning of this scope, None without one."""
        return next((step for step in self.tune if plugins.constant("tune", step.method, "SCOPE") == scope), None)

    def scheme_for(self, name: str) -> Scheme | None:
        """Return the scheme of the linear of this full module name; None: it is kept as it is."""
        if any(fnmatchcase(name, pattern) for pattern in self.ignore):
            return None
        for rule in self.rules:
            if rule.matches(name):
                return rule.scheme
        return self.quantize if self.packs else None

    def tower_scheme(self, name: str) -> Scheme | None:
        """Return the scheme of a linear beside the text model (vision, audio, projectors); None: it is kept."""
        return next((rule.scheme for rule in self.towers if rule.matches(name)), None)

    def is_open(self, name: str) -> bool:
        """Return whether neither `ignore` nor a rule decides about a linear, so that an allocation may."""
        return not any(fnmatchcase(name, pattern) for pattern in self.ignore) and not any(
            rule.matches(name) for rule in self.rules
        )


def dump(recipe: Recipe) -> str:
    """Return YAML with every default written out; loads back to an equal recipe."""
    return yaml.safe_dump(_plain(recipe), sort_keys=False, allow_unicode=True, width=120)


def fingerprint(recipe: Recipe) -> str:
    """Return the sha256 (hex) of everything that decides numbers: all but name, description and what is accepted.

    Recipes keep the fingerprint that they had in earlier versions. calibration.bos is left out where it is auto: what
    samples begin with is then the tokenizer's matter. Keys that a method had once count with the value that it works
    with now, and a method that was split off from another counts under the name of that one.
    """
    content = _plain(recipe, _with_former_keys)
    for key in ("name", "description", "accept"):
        content.pop(key, None)
    if recipe.calibration.bos == "auto":
        del content["calibration"]["bos"]
    for step in content["transform"]:
        step["method"] = plugins.before_split("transform", step["method"])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _with_former_keys(config: Any) -> dict[str, Any]:
    """Return settings with the keys that were taken away, at the values that the method works with."""
    return {**plugins.removed_keys(type(config)), **dataclasses.asdict(config)}


def _plain(recipe: Recipe, plain: ToPlain = dataclasses.asdict) -> dict[str, Any]:
    """Return the recipe in the layout of its YAML; plain: gives the settings of a method."""
    tables = {key: scheme for key in TABLES if (scheme := getattr(recipe, key)) is not None}
    return {
        "name": recipe.name,
        "description": recipe.description,
        "calibration": _plain_calibration(recipe.calibration),
        "transform": [plain_step(step, plain) for step in recipe.transform],
        **({"quantize": settings(recipe.quantize, plain)} if recipe.packs else {}),
        "rules": [_plain_rule(rule, plain) for rule in recipe.rules],
        "ignore": list(recipe.ignore),
        **{key: settings(scheme, plain) for key, scheme in tables.items()},
        **({DRAFT_HEADS: _kept_or(recipe.draft_heads, plain)} if recipe.draft_heads is not None else {}),
        **({"allocate": _plain_allocation(recipe.allocate, plain)} if recipe.allocate is not None else {}),
        **plain_tuning(recipe.tune, plain),
        **({"experts": dataclasses.asdict(recipe.experts)} if recipe.experts is not None else {}),
        **({"kv_cache": recipe.kv_cache.plain()} if recipe.kv_cache is not None else {}),
        **({"towers": [_plain_rule(rule, plain) for rule in recipe.towers]} if recipe.towers else {}),
        **({"export": recipe.export} if recipe.export is not None else {}),
        **({"accept": dataclasses.asdict(recipe.accept)} if recipe.accept is not None else {}),
    }


def _plain_calibration(config: CalibrationConfig) -> dict[str, Any]:
    """Return the section; it says `tokens` and `gradient_tokens` only where they are given: once there were none."""
    content = dataclasses.asdict(config)
    if config.tokens == AUTO:
        del content["tokens"]
    if config.gradient_tokens == GRADIENT_TOKENS:
        del content["gradient_tokens"]
    return content


def _plain_allocation(allocation: Allocation, plain: ToPlain) -> dict[str, Any]:
    return {
        "method": allocation.method,
        "target": allocation.target.text if allocation.target is not None else None,
        "options": [_kept_or(option, plain) for option in allocation.options],
        **({"tables": [_kept_or(option, plain) for option in allocation.tables]} if allocation.tables else {}),
        "units": allocation.units,
        "samples": allocation.samples,
        "context": allocation.context,
        "cache_bits": list(allocation.cache_bits),
        **({"cache_options": [dict(each) for each in allocation.cache_options]} if allocation.cache_options else {}),
        "cache_estimator": allocation.cache_estimator,
        **plain(allocation.config),
    }


def _kept_or(scheme: Scheme | None, plain: ToPlain) -> dict[str, Any]:
    return settings(scheme, plain) if scheme is not None and scheme.method != KEEP else {"keep": True}


def _plain_rule(rule: Rule, plain: ToPlain) -> dict[str, Any]:
    match = rule.match[0] if len(rule.match) == 1 else list(rule.match)
    return {"match_any" if rule.alternatives else "match": match, **_kept_or(rule.scheme, plain)}


def plain_tuning(steps: Sequence[Step], plain: ToPlain = dataclasses.asdict) -> dict[str, Any]:
    """Return the section `tune` of a recipe: one step as a block, several as a list, nothing without any."""
    blocks = [plain_step(step, plain) for step in steps]
    return {"tune": blocks if len(blocks) > 1 else blocks[0]} if blocks else {}


def plain_step(step: Step, plain: ToPlain = dataclasses.asdict) -> dict[str, Any]:
    """Return a step in the layout of its YAML."""
    return {"method": step.method, **plain(step.config)}
