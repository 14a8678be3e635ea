"""Say how llama.cpp names a model's tensors and settings; refuse models that it would compute in another way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import transformers

from compress.errors import ExportError, shown
from compress.export.targets.gguf import edits
from compress.export.targets.gguf.settings import DATA, FULL, SLIDING, TOOL, head_size, read_setting, refusal
from compress.importers.gguf_header import (
    FACTOR,
    KIND,
    ORIGINAL_LENGTH,
    ROTATED,
    ROTATED_WITHIN,
    SECTIONS,
    SETTINGS,
    THETA,
    THETA_WITHIN,
    WINDOW,
    WINDOWS,
    Bands,
)

CONTEXT = "context_length"
STRETCHES = {"linear": (FACTOR,), "yarn": (FACTOR, ORIGINAL_LENGTH)}  # rope_type -> keys beside its name
STRETCH_SETTINGS = {FACTOR: "factor", ORIGINAL_LENGTH: "original_max_position_embeddings"}
ROPE_SETTINGS = {"rope_type", "rope_theta", "partial_rotary_factor", *STRETCH_SETTINGS.values(), *Bands._fields}
ROPE_SETTINGS |= {"mrope_section", "mrope_interleaved"}  # of images: in text all sections count the same tokens
YARN_BANDS = {"beta_fast": 32.0, "beta_slow": 1.0}  # the only values that all of llama.cpp has
SCALES, LOG_SCALE = ("mscale", "mscale_all_dim"), "rope.scaling.yarn_log_multiplier"
STILL = 1e30  # a divisor of a rotary frequency that leaves nothing of it
EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.")
TEXT_PREFIX = re.compile(
    r"^(model\.language_model|language_model\.model|language_model)\."
)  # models with towers have it
SAME = "="  # before the name of a setting: `requires` its value


@dataclass(frozen=True)
class Model:
    """A model as llama.cpp sees it."""

    architecture: str
    metadata: dict[str, Any]  # key with the architecture in front -> value
    divisors: tuple[float, ...]  # of the rotary frequencies; () where they are as they are
    notes: tuple[str, ...]  # for the user
    names: Callable[[str], str | None]  # of the package gguf: name of a module or tensor -> without .weight
    config: transformers.PretrainedConfig  # of the text part
    rules: tuple[Mapping[str, Any], ...]  # `edits` of gguf.yaml: compress/export/targets/gguf/edits.py
    has_towers: bool  # of images or audio, which llama.cpp has in a file of their own

    def edit(self, named: Mapping[str, edits.Source]) -> dict[str, edits.Source]:
        """Return the tensors of the text model, cut and computed as llama.cpp has them, by the names for `place`."""
        if self.has_towers:
            within = {name: tensor for name, tensor in named.items() if TEXT_PREFIX.match(name)}
            inner = {TEXT_PREFIX.sub("model.", name): tensor for name, tensor in within.items()}
            inner = {name.replace("model.lm_head", "lm_head"): tensor for name, tensor in inner.items()}
            named = inner | {name: tensor for name, tensor in named.items() if name.startswith("lm_head.")}
        return edits.apply(self.rules, self.config, named)

    def place(self, name: str) -> tuple[str, int | None]:
        """Return the name of a tensor in the file, and which of its experts a tensor of the model is (None: all of it).

        Raises ExportError for a tensor that llama.cpp does not have.
        """
        stem, dot, suffix = name.rpartition(".")
        expert = EXPERT.search(stem)
        if suffix not in ("weight", "bias", "scale"):
            stem, dot, suffix = name, "", ""
        gguf_name = self.names(EXPERT.sub("", stem))
        if gguf_name is None:
            raise ExportError(
                f"{TOOL} has no tensor for {shown(name)} in models of architecture {self.architecture}; export to "
                "another target"
            )
        return f"{gguf_name}{dot}{suffix}", int(expert[1]) if expert else None


def describe(whole: transformers.PretrainedConfig) -> Model:
    """Return how llama.cpp sees a model; ExportError for one that it does not know, or would compute otherwise."""
    config, known = whole.get_text_config(), DATA["architectures"]
    if config.model_type not in known:
        raise ExportError(
            f"models of type {config.model_type} are not written as GGUF (those that are: {', '.join(known)}); export "
            "to another target"
        )
    facts = known[config.model_type]
    _check_settings(config, facts)
    named = {**SETTINGS, **facts.get("keys", {})}
    values = facts.get("sets", {}) | {key: read_setting(config, name) for key, name in named.items()}
    values |= _windows(config, facts.get("windows"))
    positions = read_positions(config, bool(facts.get("yarn_scales")))
    values |= positions.keys
    notes = [*positions.notes]
    if values[CONTEXT] != config.max_position_embeddings:
        notes.append(
            f"context_length is {values[CONTEXT]}, the sliding window: {TOOL} attends to all tokens, which is the "
            "same up to there"
        )
    if whole is not config:
        notes.append(f"the text model alone is written: {TOOL} has images and audio in a file of their own (mmproj)")
    return Model(
        facts["name"],
        {f"{facts['name']}.{key}": value for key, value in values.items() if value is not None},
        positions.divisors,
        tuple(notes),
        _names([facts["name"], *facts.get("names", ())], config.num_hidden_layers),
        config,
        tuple(facts.get("edits", ())),
        whole is not config,
    )


def _names(architectures: list[str], layers: int) -> Callable[[str], str | None]:
    """Return what gives the name of a tensor in the file, by the first of these architectures that has one."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    if missing := [name for name in architectures if name not in numbers]:
        raise ExportError(f"the installed package gguf has no {missing[0]}; update it (pip install -U gguf)")
    maps = [gguf.get_tensor_name_map(numbers[name], layers) for name in architectures]
    return lambda name: next((place for each in maps if (place := each.get_name(name)) is not None), None)


def _check_settings(config: transformers.PretrainedConfig, facts: Mapping[str, Any]) -> None:
    """Raise ExportError for a setting with which llama.cpp computes something else."""
    for setting, value in facts["requires"].items():
        if isinstance(value, str) and value.startswith(SAME):
            value = getattr(config, value.removeprefix(SAME), None)
        if (own := getattr(config, setting, value)) != value:
            raise refusal(f"{setting} is {shown(own)}, {TOOL} computes with {shown(value)}")
    for setting, period in facts.get("periods", {}).items():
        own = getattr(config, setting, None)
        if own is not None and own != (period * len(own))[: len(own)]:
            raise refusal(f"{setting} is not {', '.join(map(str, period))}, again and again, as {TOOL} has it")
    head = head_size(config)
    if config.num_hidden_layers == facts.get("widened"):
        head = config.hidden_size // config.num_attention_heads
    if getattr(config, "query_pre_attn_scalar", head) != head:
        raise refusal(f"query_pre_attn_scalar is not {head}, by which {TOOL} scales")


def _windows(config: transformers.PretrainedConfig, way: str | None) -> dict[str, Any]:
    """Return the keys for layers that see a window of the last tokens only.

    way: how llama.cpp has such layers, "alternating" or "listed"; None: it has none.
    """
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = SLIDING in kinds if kinds is not None else getattr(config, "use_sliding_window", True)
    if way == "listed" and window and kinds:
        return {WINDOW: window, WINDOWS: [kind == SLIDING for kind in kinds]}
    if not window or not slides:
        return {}
    if way is None:
        return {CONTEXT: min(window, config.max_position_embeddings)}
    if kinds is None or kinds != ([SLIDING, FULL] * len(kinds))[: len(kinds)]:
        raise refusal("its layers do not alternate between a window and all tokens")
    return {WINDOW: window}


class Positions(NamedTuple):
    """What a GGUF file says of rotary positions."""

    keys: Mapping[str, Any]
    divisors: tuple[float, ...] = ()  # of the rotary frequencies; () where they are as they are
    notes: tuple[str, ...] = ()  # for the user


def read_positions(config: transformers.PretrainedConfig, has_scales: bool) -> Positions:
    """Return what a file says of a model's positions; ExportError for ways that llama.cpp does not have.

    has_scales: it knows the two scales of scores that yarn may have, where they are one.
    """
    every = getattr(config, "rope_parameters", None) or {}
    facts = {key: value for key, value in every.get(FULL, every).items() if value is not None}
    if not facts:
        return Positions({})
    kind, theta = facts.get("rope_type", "default"), float(facts.get("rope_theta", 10000.0))
    head, share = head_size(config), facts.get("partial_rotary_factor", 1.0)
    rotated = head if kind == DATA["proportional"] else int(head * share)
    keys: dict[str, Any] = {THETA: theta, ROTATED: rotated, **_within(config, every.get(SLIDING))}
    if sections := facts.get("mrope_section"):
        keys[SECTIONS] = [*sections, 0][:4]
    if has_scales and facts.get(SCALES[0]) == facts.get(SCALES[1], ()):
        keys[LOG_SCALE] = 0.1 * facts[SCALES[0]]
        facts = {key: value for key, value in facts.items() if key not in SCALES} | {"attention_factor": None}
    notes = _notes(facts)
    facts = _of_yarn(facts) if kind == "yarn" else facts
    if unknown := sorted(map(str, facts.keys() - ROPE_SETTINGS)):
        raise refusal(f"rope_parameters has {', '.join(unknown)}, for which it has no key here")
    return _stretch_keys(kind, facts, Positions(keys, (), notes), theta, int(share * head // 2))


def _stretch_keys(kind: str, facts: Mapping[str, Any], plain: Positions, theta: float, moving: int) -> Positions:
    """Return what is said of a way to stretch positions; moving: how many pairs of a head are rotated."""
    if kind == "default":
        return plain
    if kind == DATA["stretched"]:
        return plain._replace(divisors=tuple(Bands(*(facts[name] for name in Bands._fields)).divisors(theta, moving)))
    if kind == DATA["proportional"]:  # the last pairs stand still
        pairs = plain.keys[ROTATED] // 2
        return plain._replace(divisors=(1.0,) * moving + (STILL,) * (pairs - moving))
    if kind not in STRETCHES:
        raise refusal(f"positions are stretched in a way ({shown(kind)}) that is not written")
    added = {key: facts.get(STRETCH_SETTINGS[key]) for key in STRETCHES[kind]}
    return plain._replace(keys={**plain.keys, KIND: kind, **added, FACTOR: float(facts["factor"])})


def _within(config: transformers.PretrainedConfig, facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys of layers that see a window, where they rotate otherwise."""
    if not facts:
        return {}
    if facts.get("rope_type", "default") != "default":
        raise refusal("the positions of its layers with a window are stretched")
    own, head = head_size(config, SLIDING), head_size(config)
    return {THETA_WITHIN: float(facts["rope_theta"])} | ({} if own == head else {ROTATED_WITHIN: own})


def _notes(facts: Mapping[str, Any]) -> tuple[str, ...]:
    if facts.get("truncate") is not False:
        return ()
    return (
        f"{TOOL} rounds the bounds between which positions are stretched (truncate is false), which changes them "
        "slightly",
    )


def _of_yarn(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of yarn without those that say what llama.cpp does anyway."""
    usual = {**YARN_BANDS, "attention_factor": 0.1 * math.log(facts["factor"]) + 1}
    said = {
        key for key, value in usual.items() if facts.get(key) is None or math.isclose(facts[key], value, rel_tol=1e-4)
    }
    return {key: value for key, value in facts.items() if key not in said | {"truncate"}}
