"""Say how llama.cpp names a model's tensors and settings; refuse models that it would compute in another way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers

from compress.errors import ExportError, shown
from compress.export.targets.gguf import edits
from compress.export.targets.gguf.positions import read_positions
from compress.export.targets.gguf.settings import DATA, FULL, SLIDING, TOOL, head_size, read_setting, refusal
from compress.importers.gguf_header import SETTINGS, WINDOW, WINDOWS

CONTEXT = "context_length"
EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.")
WITHIN = re.compile(r"^(model\.language_model|language_model\.model|language_model)\.")  # of a model with towers
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

    def edited(self, named: Mapping[str, edits.Source]) -> dict[str, edits.Source]:
        """Return the tensors of the text model, cut and computed as llama.cpp has them, by the names for `place`."""
        if self.has_towers:
            inner = {WITHIN.sub("model.", name): tensor for name, tensor in named.items() if WITHIN.match(name)}
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
