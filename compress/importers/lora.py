"""Merge a LoRA adapter into the weights of a checkpoint, while they are read.

An adapter is a directory as PEFT writes it: adapter_config.json and adapter_model.safetensors. Each module that it
names has two matrices, A [r, in] and B [out, r]. Its weight becomes W + s B A, summed in float32 and rounded once to
the type of W, where s is alpha / r, or alpha / sqrt(r) (rsLoRA). With DoRA every row (output) of the sum is scaled to a
length that is stored. A tensor of the adapter that nothing is done with is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.errors import CheckpointError, shown
from compress.importers import options
from compress.importers.source import Decoded, step
from compress.storage import checkpoint as storage
from compress.storage import paths
from compress.storage.checkpoint import Checkpoint, Readable, StoredTensor

ADAPTER_FOLDER = "compress_adapter"  # the folder of a merged adapter, inside a checkpoint directory
CONFIG, WEIGHTS = paths.ADAPTER_CONFIG, paths.ADAPTER
PREFIX = "base_model.model."
KEYS = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector(?:\.weight)?)")
TABLE_NAMES = re.compile(r"\.base_layer\.|\.lora_embedding_")  # parts of names that PEFT saves of adapted tables only
REFUSED = (
    *("modules_to_save", "target_parameters", "lora_bias", "layer_replication", "trainable_token_indices"),
    *("alora_invocation_tokens", "use_qalora"),
)
FLAGS = ("use_rslora", "use_dora", "fan_in_fan_out")
INITS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Update:
    """What an adapter does to one weight."""

    a: StoredTensor  # [r, in]
    b: StoredTensor  # [out, r]
    magnitude: StoredTensor | None  # [out], of DoRA
    scaling: float
    is_turned: bool  # the weight is stored as [in, out]; as the settings have it, then as `_is_turned` finds it

    def apply(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """Return rows start .. stop - 1 of the merged weight, in float32, from those of the weight.

        With DoRA on a turned weight all rows are given.
        """
        a, b = self.a.read().float(), self.b.read().float()
        product = a[:, start:stop].T @ b.T if self.is_turned else b[start:stop] @ a
        merge_adapter = rows.float() + self.scaling * product
        if self.magnitude is None:
            return merge_adapter
        magnitude, outputs = self.magnitude.read().float().reshape(-1), 1 - int(self.is_turned)
        lengths = merge_adapter.norm(dim=outputs, keepdim=True)
        return merge_adapter * ((magnitude[None] if self.is_turned else magnitude[start:stop, None]) / lengths)


def check(adapter: Path) -> None:
    """Raise CheckpointError for a directory that holds no adapter that can be merged; no weights are read."""
    paths.check_adapter(adapter)
    settings = storage.read_json(adapter / CONFIG)
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{adapter / CONFIG}: peft_type is {shown(settings.get('peft_type'))}; only LORA is merged"
        )
    for key in REFUSED:
        if settings.get(key):
            raise CheckpointError(
                f"{adapter / CONFIG} has {key} {shown(settings[key])}, which is not merged; merge it with PEFT "
                "(merge_and_unload) and give the result"
            )
    for key in FLAGS:
        if not options.is_allowed(settings.get(key), options.FLAG):
            raise CheckpointError(
                f"{adapter / CONFIG} has {key} {shown(settings[key])}, which is neither true nor false; save the "
                "adapter again"
            )
    if (begun := settings.get("init_lora_weights", True)) not in INITS_THAT_KEEP_THE_BASE:
        raise CheckpointError(
            f"{adapter / CONFIG}: init_lora_weights {shown(begun)} changes the base weights, too; merge it with PEFT "
            "(merge_and_unload) and give the result"
        )
    if settings.get("bias", "none") != "none":
        raise CheckpointError(
            f"{adapter / CONFIG}: trained biases ({shown(settings['bias'])}) are not merged; use PEFT"
        )


def merge_adapter(checkpoint: Checkpoint, adapter: Path) -> Checkpoint:
    """Return the checkpoint with the adapter merged into its weights as they are read.

    Raises CheckpointError for an adapter of another model, of another kind, or with tensors of no use.
    """
    check(adapter)
    tensors: dict[str, Readable] = dict(checkpoint.tensors)
    for module, update in _updates(adapter, _ties_tables(checkpoint.config)).items():
        name = _weight_name(f"{module}.weight", tensors, adapter)
        turned = dataclasses.replace(update, is_turned=_is_turned(name, update, tensors))
        tensors[name] = _merged_weight(tensors[name], turned, adapter)
    digest = hashlib.sha256()
    for file in (CONFIG, WEIGHTS):
        digest.update(storage.sha256(adapter / file).encode())
    base = ", ".join(filter(None, [checkpoint.base, f"adapter {adapter.resolve().name} merged"]))
    settings = {**checkpoint.base_settings, "adapter": digest.hexdigest()}
    return Checkpoint(checkpoint.directory, checkpoint.config, tensors, base, settings)


def _ties_tables(config: Mapping[str, Any]) -> bool:
    """Return whether the output head of a model is its table of embeddings."""
    inner = config.get("text_config")
    return any(bool(part.get("tie_word_embeddings")) for part in (config, inner) if isinstance(part, dict))


def _updates(adapter: Path, is_tied: bool) -> dict[str, Update]:
    """Return module -> what is done to its weight. is_tied: the model has one table for embeddings and output head."""
    settings = storage.read_json(adapter / CONFIG)
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in storage.read_header(adapter / WEIGHTS).items():
        match = KEYS.fullmatch(name.removeprefix(PREFIX))
        if is_tied and TABLE_NAMES.search(name):
            raise CheckpointError(
                f"{adapter / WEIGHTS}: {shown(name)} is of the embeddings or the output head, which are one table in "
                "this model: merge_and_unload of PEFT would change both; give it two (tie_word_embeddings: false, the "
                "head a copy) and merge the adapter into that with PEFT"
            )
        if match is None or not stored.dtype.is_floating_point:
            raise CheckpointError(
                f"{adapter / WEIGHTS}: tensor {shown(name)} is no part of a LoRA on a linear layer; merge the adapter "
                "with PEFT (merge_and_unload) and give the result"
            )
        modules.setdefault(match[1], {})[match[2].removesuffix(".weight")] = stored
    if not modules:
        raise CheckpointError(f"{adapter / WEIGHTS} holds no tensors; save the adapter again")
    return {module: _update(adapter, settings, module, parts) for module, parts in modules.items()}


def _update(adapter: Path, settings: Mapping[str, Any], module: str, parts: Mapping[str, StoredTensor]) -> Update:
    a, b, magnitude = (parts.get(key) for key in ("lora_A", "lora_B", "lora_magnitude_vector"))
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise CheckpointError(f"{adapter / WEIGHTS}: the matrices A and B of {shown(module)} do not fit each other")
    if (magnitude is not None) != bool(settings.get("use_dora")):
        raise CheckpointError(f"{adapter}: use_dora and the tensors of {shown(module)} do not agree; save it again")
    alphas = settings.get("alpha_pattern") or {}
    if not isinstance(alphas, dict):
        raise CheckpointError(f"{adapter / CONFIG}: alpha_pattern {shown(alphas)} is no table; save the adapter again")
    alpha = next((alphas[key] for key in alphas if _matches(adapter, key, module)), settings.get("lora_alpha"))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"{adapter / CONFIG}: lora_alpha {shown(alpha)} of {shown(module)} is no number")
    rank = a.shape[0]  # what rank_pattern or r say, too
    scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return Update(a, b, magnitude, scaling, bool(settings.get("fan_in_fan_out")))


def _matches(adapter: Path, pattern: str, module: str) -> bool:
    """Return whether a pattern of the adapter's settings, a name or a simple expression, means a module."""
    starts = [0, *(place + 1 for place, letter in enumerate(module) if letter == ".")]
    try:  # as peft has it: the end of the module's name, from any of its dots on, where ^ means the whole name
        return any(options.matches(f"({pattern})$", module, start) for start in starts)
    except ValueError as error:
        raise CheckpointError(f"{adapter / CONFIG}: pattern {shown(pattern)} {error}") from error


def _weight_name(name: str, tensors: Mapping[str, Readable], adapter: Path) -> str:
    """Return the name on disk of a weight: this, or the only one that differs from it by what stands in front."""
    if name in tensors:
        return name
    close = [each for each in tensors if each.endswith(f".{name}") or name.endswith(f".{each}")]
    if len(close) != 1:
        raise CheckpointError(
            f"{adapter} changes {shown(name)}, which the checkpoint does not store under that name; it is of another "
            "model, or its weight is stored together with others: merge it with PEFT and give the result"
        )
    return close[0]


def _is_turned(name: str, update: Update, tensors: Mapping[str, Readable]) -> bool:
    """Return whether a weight is stored as [in, out], which PEFT takes from the layer and not from its settings.

    The shape says so. A square weight is stored like those with a bias that are not square, if it has a bias itself.
    """
    shape = (update.b.shape[0], update.a.shape[1])
    if shape[0] != shape[1]:
        return tensors[name].shape == shape[::-1]
    biased = [each for each in tensors if each.endswith(".weight") and f"{each.removesuffix('weight')}bias" in tensors]
    if name not in biased:
        return False
    sizes = [(tensors[each].shape, tensors[f"{each.removesuffix('weight')}bias"].shape) for each in biased]
    turned = {bias == size[1:] for size, bias in sizes if len(size) == 2 and size[0] != size[1]}
    return turned.pop() if len(turned) == 1 else update.is_turned


def _merged_weight(weight: Readable, update: Update, adapter: Path) -> Decoded:
    outputs, inputs = update.b.shape[0], update.a.shape[1]
    shape = (inputs, outputs) if update.is_turned else (outputs, inputs)
    is_whole = update.magnitude is None or update.magnitude.shape in ((outputs,), (outputs, 1), (1, outputs))
    if weight.shape != shape or not weight.dtype.is_floating_point or not is_whole:
        raise CheckpointError(
            f"{adapter} is made for {weight.name} of shape {list(shape)}, the checkpoint has {list(weight.shape)}; it "
            "is of another model"
        )

    def decode(start: int, stop: int) -> Tensor:
        return update.apply(weight.rows(start, stop), start, stop).to(weight.dtype)

    factors = [each for each in (update.a, update.b, update.magnitude) if each is not None]
    rows = shape[0] if update.magnitude is not None and update.is_turned else step(shape)
    return Decoded(weight.name, weight.dtype, shape, (*weight.sources, *factors), decode, rows)
