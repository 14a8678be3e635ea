"""Match the tensors of a checkpoint with the weights of a model, and refuse what does not belong together.

A tensor that the model does not use is a sign that it is not the model that was stored: scales of a quantized weight,
layers that the configuration leaves out, another architecture. What models are known not to use is allowed: what their
transformers class lists as ignored, `UNUSED`, and draft heads (compress/runtime/draft_heads.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    GroupWeightRename,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from compress.errors import CheckpointError
from compress.model import architectures
from compress.runtime.draft_heads import is_of_head
from compress.runtime.linear import PackedModule
from compress.storage.checkpoint import Checkpoint, Readable

Sources = Mapping[str, list[Readable]]

UNUSED = (  # what any model may leave unused: what it computes itself, and older versions have stored
    r"rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$",  # rotary tables
    r"(^|\.)position_ids$",  # 0, 1, 2, ...
    r"\.(attn|attention)\.masked_bias$",  # the value of a masked score
)
TOWERS = r"^(model\.)?(vision|visual|vqmodel|audio|multi_modal)\w*\."  # beside the text, if that alone is opened
MASK_NAMES = r"\.(attn|attention)\.bias$"  # a mask is [1, 1, positions, positions]; with one dimension it is a bias


def sources(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, list[Readable]]:
    """Return parameter name -> the stored tensors that it is made of, by transformers' own renaming.

    A tensor that is split while it is loaded (the joint weight of queries, keys and values) stands under several names.
    """
    named: dict[str, list[Readable]] = {}
    for stored, names, _ in _rename_all(model, checkpoint):
        for name in names:
            named.setdefault(name, []).append(stored)
    return named


def names_of_converted(model: PreTrainedModel, checkpoint: Checkpoint) -> set[str]:
    """Return the names of the stored tensors to which transformers does more than to give them another name."""
    return {stored.name for stored, _, is_converted in _rename_all(model, checkpoint) if is_converted}


def _rename_all(model: PreTrainedModel, checkpoint: Checkpoint) -> Iterator[tuple[Readable, list[str], bool]]:
    """Yield each stored tensor, the parameters it is part of, and whether it is more than renamed for them."""
    mapping = get_model_conversion_mapping(model)
    renamings = [w for w in mapping if isinstance(w, WeightRenaming)]
    converters = [w for w in mapping if isinstance(w, WeightConverter)]
    state = model.state_dict()
    for key, stored in checkpoint.tensors.items():
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:  # a new name that is being renamed as if it were an old one
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        yield stored, _all_made(name, pattern, converters), pattern is not None


def conversions(model: PreTrainedModel, checkpoint: Checkpoint) -> list[WeightTransform]:
    """Return what transformers does to names and tensors while it loads them, for loading a part of a checkpoint.

    Some renamings depend on names that were seen before. These are shown the names of all tensors here.
    """
    mapping = get_model_conversion_mapping(model)
    if any(isinstance(entry, GroupWeightRename) for entry in mapping):
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        for key in checkpoint.tensors:
            rename_source_key(key, renamings, [])
    return mapping


def _all_made(name: str, pattern: str | None, converters: Iterable[WeightConverter]) -> list[str]:
    """Return the names of all parameters that a stored tensor is split into, where `name` is the first of them.

    pattern: that of the converter which has made the name, None without one.
    """
    targets = next((list(c.target_patterns) for c in converters if pattern in c.source_patterns), [])
    return [name.replace(targets[0], target) for target in targets] if len(targets) > 1 else [name]


def of_heads(tensors: Mapping[str, Readable], config: PretrainedConfig) -> dict[str, Readable]:
    """Return those of the stored tensors that have names of draft heads, sorted."""
    return {name: tensors[name] for name in sorted(tensors) if is_of_head(name, config)}


def find_unused(model: PreTrainedModel, aliases: Iterable[list[str]], stored_as: Sources) -> dict[str, Readable]:
    """Return the stored tensors that are nothing of the model, and further copies of a tied weight, by name.

    aliases: the names of each weight that has several.
    """
    state = model.state_dict()
    used = {stored.name for name, group in stored_as.items() if name in state for stored in group}
    copies = set[str]()
    for names in aliases:
        groups = [[stored.name for stored in stored_as[name]] for name in names if name in stored_as]
        copies.update(name for group in groups[1:] for name in group if name not in groups[0])
    every = {stored.name: stored for group in stored_as.values() for stored in group}
    return {name: stored for name, stored in every.items() if name not in used or name in copies}


def without_left_out(model: PreTrainedModel, checkpoint: Checkpoint, pattern: str) -> Checkpoint:
    """Return a checkpoint without the tensors that the model has no use for and whose names match, "": with all.

    pattern: that of what a level of the weights leaves out (compress/runtime/levels.py).
    """
    if not pattern:
        return checkpoint
    unused = {name for name in find_unused(model, (), sources(model, checkpoint)) if re.search(pattern, name)}
    return replace(checkpoint, tensors={key: each for key, each in checkpoint.tensors.items() if key not in unused})


def split(stored_as: Sources) -> set[str]:
    """Return the names of the stored tensors that several parameters are made of."""
    counts = Counter(stored.name for group in stored_as.values() for stored in group)
    return {name for name, count in counts.items() if count > 1}


def check(model: PreTrainedModel, checkpoint: Checkpoint, stored_as: Sources) -> None:
    """Raise CheckpointError for stored integers in the place of floating weights, and for tensors of no known use.

    `stored_as` is what `sources` returns.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for stored in stored_as.get(name, []) if parameter.is_floating_point() else ():
            if not stored.dtype.is_floating_point:
                raise CheckpointError(
                    f"{checkpoint.directory}: {stored.name} is stored as {stored.dtype}, the model has floating-point "
                    "numbers there; the checkpoint was quantized by another tool, give the original one"
                )
    unused = [stored for name in _unknown(model, checkpoint, stored_as) for stored in stored_as[name]]
    if unused:
        if (head := architectures.heads(stored.name for stored in unused)) is not None:
            raise CheckpointError(
                f"{checkpoint.directory} has {head}, the head of a reward model, a classifier or a critic, which "
                f"{type(model).__name__} has not; give the language model that it was made of"
            )
        first = min(unused, key=lambda stored: stored.name)
        raise CheckpointError(
            f"{checkpoint.directory} has {len(unused)} tensors that {type(model).__name__} does not use, first "
            f"{first.name} ({first.dtype}, {list(first.shape)}); it was quantized by another tool or is of another "
            "architecture: give the original checkpoint, or remove these tensors if they are no part of the model"
        )


def _unknown(model: PreTrainedModel, checkpoint: Checkpoint, stored_as: Sources) -> list[str]:
    """Return the names that the model neither uses nor is known to leave unused."""
    used = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
    ignored = [*UNUSED, *(model._keys_to_ignore_on_load_unexpected or ())]
    if "text_config" in checkpoint.config and model.config.get_text_config() is model.config:
        ignored.append(TOWERS)
    return [
        name
        for name, group in stored_as.items()
        if name not in used
        and not any(re.search(pattern, name) for pattern in ignored)
        and not (re.search(MASK_NAMES, name) and all(len(stored.shape) == 4 for stored in group))
        and not all(is_of_head(stored.name, model.config) for stored in group)
    ]


def check_copies(checkpoint: Checkpoint, aliases: Iterable[list[str]], stored_as: Sources) -> None:
    """Raise CheckpointError for a tied weight that is stored several times with different values.

    aliases: the names of each weight that has several.
    """
    for names in aliases:
        copies = [stored_as[name][0] for name in names if name in stored_as]
        for other in copies[1:]:
            if not is_copy(copies[0], other):
                raise CheckpointError(
                    f"{checkpoint.directory}: {copies[0].name} and {other.name} differ, but the configuration says "
                    "that they are one; set tie_word_embeddings to false in config.json if they are two, or remove one"
                )


def is_copy(first: Readable, other: Readable) -> bool:
    """Return whether two stored tensors are of one type and shape and hold the same bytes."""
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        return False
    return all(torch.equal(a, b) for a, b in zip(first.parts(), other.parts(), strict=True))


def is_computed(model: PreTrainedModel, name: str) -> bool:
    """Return whether the class of a model says that a parameter need not be stored, as positions that it computes."""
    patterns = model._keys_to_ignore_on_load_missing or ()
    return not architectures.is_head(model, name) and any(re.search(pattern, name) for pattern in patterns)


@torch.no_grad()
def compute(model: PreTrainedModel, name: str, device: torch.device) -> None:
    """Give a parameter that is not stored the values that its class begins it with. CheckpointError for random ones."""
    path, _, key = name.rpartition(".")
    module, values = model.get_submodule(path), list[torch.Tensor]()
    for seed in (0, 1):
        empty = torch.empty_like(module.get_parameter(key), device=device)
        module.register_parameter(key, torch.nn.Parameter(empty, requires_grad=False))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model._init_weights(module)
        values.append(module.get_parameter(key))
    if not torch.equal(*values):
        raise CheckpointError(f"the checkpoint has no tensor for {name}; download it again")


def check_parameters(
    model: PreTrainedModel,
    config: PretrainedConfig,
    checkpoint: Checkpoint,
    aliases: list[list[str]],
    sources: Sources,
) -> None:
    """Raise CheckpointError unless every parameter has its tensor in the checkpoint, in its shape and kind.

    config: of the whole model. aliases: names of each tied weight.
    """
    others = {name: group for group in aliases for name in group}
    packed = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, PackedModule)
        for key in module.specs
    }
    for name, parameter in model.named_parameters():
        stored_as = [alias for alias in others.get(name, [name]) if alias in sources]
        if not stored_as and is_computed(model, name):
            continue
        if not stored_as and architectures.is_head(model, name):
            why = architectures.without_head(config, name)
            raise CheckpointError(f"{checkpoint.directory} {why}")
        if not stored_as:
            raise CheckpointError(f"{checkpoint.directory} has no tensor for {name}; download it again")
        stored, shape = sources[stored_as[0]], tuple(parameter.shape)
        if name in packed and stored[0].dtype != parameter.dtype:
            raise CheckpointError(
                f"{checkpoint.directory}: {name} is stored as {stored[0].dtype}, its format says {parameter.dtype}"
            )
        if len(stored) == 1 and stored[0].name == name and stored[0].shape != shape and len(shape) < 3:
            raise CheckpointError(
                f"{checkpoint.directory}: {name} has shape {stored[0].shape}, the configuration asks for "
                f"{shape}; they do not belong together"
            )
