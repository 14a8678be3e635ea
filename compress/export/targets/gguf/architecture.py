"""Say how llama.cpp names a model's tensors and settings; refuse models that it would compute in another way."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor

from compress.errors import ExportError, shown
from compress.importers.gguf_header import (
    FACTOR,
    KIND,
    ORIGINAL_LENGTH,
    ROTATED,
    SETTINGS,
    THETA,
    WINDOW,
    Bands,
)

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("gguf.yaml").read_text(encoding="utf-8"))
TOOL: str = DATA["tool"]  # the name of llama.cpp in messages
CONTEXT = "context_length"
SLIDING, FULL = "sliding_attention", "full_attention"  # layer_types of a configuration
STRETCHES = {"linear": (FACTOR,), "yarn": (FACTOR, ORIGINAL_LENGTH)}  # rope_type -> keys beside its name
STRETCH_SETTINGS = {FACTOR: "factor", ORIGINAL_LENGTH: "original_max_position_embeddings"}
ROPE_SETTINGS = {"rope_type", "rope_theta", "partial_rotary_factor", *STRETCH_SETTINGS.values(), *Bands._fields}
EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.")


@dataclass(frozen=True)
class Model:
    """A model as llama.cpp sees it."""

    architecture: str
    metadata: dict[str, Any]  # key with the architecture in front -> value
    divisors: tuple[float, ...]  # of the rotary frequencies; () where they are as they are
    notes: tuple[str, ...]  # for the user
    heads: tuple[int, int]  # of queries; of keys and values
    is_paired: bool  # rows of queries and keys are stored with the halves of a rotary pair side by side
    norm_offset: float  # what is added to the weights of norms
    names: Callable[[str], str | None]  # of the package gguf: name of a module or tensor -> without .weight

    def place(self, name: str) -> tuple[str, int | None]:
        """Return the name of a tensor in the file, and which of its experts a tensor of the model is (None: all of it).

        Raises ExportError for a tensor that llama.cpp does not have.
        """
        stem, dot, suffix = name.rpartition(".")
        expert = EXPERT.search(stem)
        gguf_name = self.names(EXPERT.sub("", stem)) if suffix in ("weight", "bias") else None
        if gguf_name is None:
            raise ExportError(
                f"{TOOL} has no tensor for {shown(name)} in models of architecture {self.architecture}; export to "
                "another target"
            )
        return f"{gguf_name}{dot}{suffix}", int(expert[1]) if expert else None

    def rows(self, name: str, count: int) -> Tensor | None:
        """Return which rows of the model's tensor are those of the tensor `name` in the file; None: all in order."""
        parts = ("attn_q", "attn_k")
        if not self.is_paired or name.split(".")[-2] not in parts:
            return None
        heads = self.heads[parts.index(name.split(".")[-2])]
        return torch.arange(count).view(heads, 2, -1).transpose(1, 2).flatten()


def describe(config: transformers.PretrainedConfig) -> Model:
    """Return how llama.cpp sees a model; ExportError for one that it does not know, or would compute otherwise."""
    import gguf

    known = DATA["architectures"]
    if config.model_type not in known:
        raise ExportError(
            f"models of type {config.model_type} are not written as GGUF (those that are: {', '.join(known)}); export "
            "to another target"
        )
    facts = known[config.model_type]
    for setting, value in facts["requires"].items():
        if (own := getattr(config, setting, value)) != value:
            raise _refusal(f"{setting} is {shown(own)}, {TOOL} computes with {shown(value)}")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "query_pre_attn_scalar", head) != head:
        raise _refusal(f"query_pre_attn_scalar is not the size of a head, by which {TOOL} scales")
    values = {key: getattr(config, name, None) for key, name in SETTINGS.items()}
    values |= _windows(config, bool(facts.get("windows")))
    stretch, divisors = _positions(config, head)
    values |= stretch
    notes = []
    if values[CONTEXT] != config.max_position_embeddings:
        notes.append(
            f"context_length is {values[CONTEXT]}, the sliding window: {TOOL} attends to all tokens, which is the "
            "same up to there"
        )
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == facts["name"])
    return Model(
        facts["name"],
        {f"{facts['name']}.{key}": value for key, value in values.items() if value is not None},
        divisors,
        tuple(notes),
        (config.num_attention_heads, config.num_key_value_heads),
        bool(facts.get("paired")),
        float(facts.get("norms", 0)),
        gguf.get_tensor_name_map(number, config.num_hidden_layers).get_name,
    )


def _refusal(reason: str) -> ExportError:
    return ExportError(f"the model cannot be written as GGUF: {reason}; export to another target")


def _windows(config: transformers.PretrainedConfig, is_known: bool) -> dict[str, Any]:
    """Return the keys for layers that see a window of the last tokens only; `is_known`: llama.cpp has such layers."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = SLIDING in kinds if kinds is not None else getattr(config, "use_sliding_window", True)
    if not window or not slides:
        return {}
    if not is_known:
        return {CONTEXT: min(window, config.max_position_embeddings)}
    if kinds is None or kinds != ([SLIDING, FULL] * len(kinds))[: len(kinds)]:
        raise _refusal("its layers do not alternate between a window and all tokens")
    return {WINDOW: window}


def _positions(config: transformers.PretrainedConfig, head: int) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Return the keys for rotary positions, and the divisors of their frequencies."""
    facts = {key: value for key, value in config.rope_parameters.items() if value is not None}
    kind, theta = facts.get("rope_type", "default"), float(facts.get("rope_theta", 10000.0))
    rotated = int(head * facts.get("partial_rotary_factor", 1.0))
    keys: dict[str, Any] = {THETA: theta, ROTATED: rotated}
    if unknown := sorted(map(str, facts.keys() - ROPE_SETTINGS)):
        raise _refusal(f"rope_parameters has {', '.join(unknown)}, for which it has no key here")
    if kind == "default":
        return keys, ()
    if kind == DATA["stretched"]:
        return keys, tuple(Bands(*(facts[name] for name in Bands._fields)).divisors(theta, rotated // 2))
    if kind not in STRETCHES:
        raise _refusal(f"positions are stretched in a way ({shown(kind)}) that is not written")
    added = {key: facts.get(STRETCH_SETTINGS[key]) for key in STRETCHES[kind]}
    return {**keys, KIND: kind, **added, FACTOR: float(facts["factor"])}, ()
