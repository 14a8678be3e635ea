"""Say in the keys of GGUF files how a model rotates queries and keys; refuse ways that llama.cpp does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from compress.errors import shown
from compress.export.targets.gguf.settings import DATA, FULL, SLIDING, TOOL, head_size, refusal
from compress.importers.gguf_header import (
    FACTOR,
    KIND,
    ORIGINAL_LENGTH,
    ROTATED,
    ROTATED_WITHIN,
    SECTIONS,
    THETA,
    THETA_WITHIN,
    Bands,
)

STRETCHES = {"linear": (FACTOR,), "yarn": (FACTOR, ORIGINAL_LENGTH)}  # rope_type -> keys beside its name
STRETCH_SETTINGS = {FACTOR: "factor", ORIGINAL_LENGTH: "original_max_position_embeddings"}
ROPE_SETTINGS = {"rope_type", "rope_theta", "partial_rotary_factor", *STRETCH_SETTINGS.values(), *Bands._fields}
ROPE_SETTINGS |= {"mrope_section", "mrope_interleaved"}  # of images: in text all sections count the same tokens
BAND_SETTINGS = {"beta_fast": 32.0, "beta_slow": 1.0}  # of yarn, with the only values that llama.cpp has everywhere
SCALES, LOG_SCALE = ("mscale", "mscale_all_dim"), "rope.scaling.yarn_log_multiplier"
STILL = 1e30  # a divisor of a rotary frequency that leaves nothing of it


class Positions(NamedTuple):
    """What a GGUF file says of rotary positions."""

    keys: Mapping[str, Any]
    divisors: tuple[float, ...] = ()  # of the rotary frequencies; () where they are as they are
    notes: tuple[str, ...] = ()  # for the user


def read_positions(config: PretrainedConfig, has_scales: bool) -> Positions:
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
    return _stretched(kind, facts, Positions(keys, (), notes), theta, int(share * head // 2))


def _stretched(kind: str, facts: Mapping[str, Any], plain: Positions, theta: float, moving: int) -> Positions:
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


def _within(config: PretrainedConfig, facts: Mapping[str, Any] | None) -> dict[str, Any]:
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
    usual = {**BAND_SETTINGS, "attention_factor": 0.1 * math.log(facts["factor"]) + 1}
    said = {
        key for key, value in usual.items() if facts.get(key) is None or math.isclose(facts[key], value, rel_tol=1e-4)
    }
    return {key: value for key, value in facts.items() if key not in said | {"truncate"}}
