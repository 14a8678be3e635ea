"""Match a model with the list of packed modules in config.json, when it is loaded and when it is saved again.

A checkpoint of text beside images lists the modules of the whole model. AutoModelForCausalLM may open its text part by
a class of its own, in which the same weights have shorter names, and the rest of the model is missing. A class of
another task (AutoModelForSequenceClassification) has no output head.

A saved config.json lists what is still packed, and has the notice for those without compress.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from compress.errors import CheckpointError
from compress.runtime import draft_heads
from compress.runtime.linear import PackedModule
from compress.storage import json_text
from compress.storage.checkpoint import write_text
from compress.storage.paths import METHOD

DRAFT_HEADS = "draft_heads"  # key of the shapes of those listed linears that are in draft heads


def check_shapes(shapes: Any, modules: Any) -> None:
    """Raise CheckpointError for what is no table of the shapes of listed linears."""
    table = {} if shapes is None else shapes
    values = table.values() if isinstance(table, dict) else (None,)
    is_right = all(isinstance(x, list) and len(x) == 2 and all(type(n) is int and n > 0 for n in x) for x in values)
    if not is_right or any(name not in (modules or ()) for name in table):
        raise CheckpointError(
            "quantization_config: draft_heads is no table of the shapes of listed linears; download or write the "
            "checkpoint again"
        )


def offer_heads(model: Any, names: Collection[str], place_packed: draft_heads.PlacePacked) -> None:
    """Let `generate(use_mtp=True)` open the heads of a packed model; names: of their packed linears."""
    draft_heads.offer(model, names, place_packed)


def take_notice_away(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove the notice from a configuration that has been read, so that the weights are looked for as always."""
    if getattr(config, json_text.NOTICE_KEY, None) == json_text.NOTICE:
        delattr(config, json_text.NOTICE_KEY)
    return config


def keep_notice() -> None:
    """Let configurations of packed models be written with the notice; again does no harm.

    transformers removes "transformers_weights" from every configuration that it saves, and asks no quantizer. The
    notice is part of the file when it appears, so that it is uploaded with it. Other configurations are not touched.
    """
    stock: Any = PreTrainedConfig.to_json_file
    if getattr(stock, "keeps_notice", False):
        return

    @functools.wraps(stock)
    def to_json_file(
        self: PreTrainedConfig, json_file_path: str | os.PathLike[str], use_diff: bool = True, **options: Any
    ) -> None:
        if not _has_packed(self):
            stock(self, json_file_path, use_diff, **options)
            return
        values = _without_gone(json.loads(self.to_json_string(use_diff)), self.quantization_config)
        if values.get("quantization_config", {}).get("modules"):
            values = json_text.add_notice(values)
        write_text(Path(json_file_path), json.dumps(values, indent=2, sort_keys=True) + "\n")

    to_json_file.keeps_notice = True  # type: ignore[attr-defined]
    PreTrainedConfig.to_json_file = to_json_file  # type: ignore[method-assign]


def _has_packed(config: PreTrainedConfig) -> bool:
    """Tell whether a configuration lists packed modules."""
    packed = getattr(config, "quantization_config", None)
    values = packed if isinstance(packed, dict) else getattr(packed, "__dict__", {})
    return values.get("quant_method") == METHOD and bool(values.get("modules"))


def _without_gone(values: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the values of a config.json without the modules that the quantizer has marked as gone, and unmark them."""
    gone = config.gone if hasattr(config, "gone") else ()
    if not gone:
        return values
    config.gone = frozenset()
    packed = dict(values["quantization_config"])
    for key in ("modules", "experts", DRAFT_HEADS):
        kept = {name: entry for name, entry in packed.pop(key, {}).items() if name not in gone}
        packed |= {key: kept} if kept or key == "modules" else {}
    if packed["modules"] or "kv_cache" in packed:
        return {**values, "quantization_config": packed}
    return {key: value for key, value in values.items() if key != "quantization_config"}


def state_with(model: nn.Module, replaced: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of a model by name, as if these modules stood in the place of those of their names."""
    inside = tuple(f"{name}." for name in replaced)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inside)}
    for name, module in replaced.items():
        state |= module.state_dict(prefix=f"{name}.")
    return state


def no_longer_packed(model: nn.Module, listed: dict[str, str]) -> set[str]:
    """Return the listed names (name in the model -> name in the list) of modules without packed weights.

    The output head of the class that was packed is one of them in a class with another head.
    """
    modules = dict(model.named_modules())
    plain = {
        name
        for name in listed.keys() & modules.keys()
        if not any(isinstance(module, PackedModule) for module in modules[name].modules())
    }
    absent = {name for name in listed if name.partition(".")[0] not in modules}
    return {listed[name] for name in plain | absent}


def names_in(model: nn.Module, listed: Collection[str]) -> dict[str, str]:
    """Return name in this model -> name in the list, for modules that the whole model has under the listed names.

    Names are changed as transformers changes those of the weights while it loads them. What the class says that it
    leaves out of a checkpoint is left out. Names without a module stay as they are: the caller refuses them.
    """
    if _has_all(model, listed):
        return {name: name for name in listed}
    # transformers may be half loaded when this file is imported
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    whole: Any = model
    renamings = [entry for entry in get_model_conversion_mapping(whole) if isinstance(entry, WeightRenaming)]
    state = whole.state_dict()
    left_out = whole._keys_to_ignore_on_load_unexpected or ()
    names = {}
    for name in listed:
        if not any(re.search(pattern, f"{name}.weight") for pattern in left_out):
            key, _ = rename_source_key(f"{name}.weight", renamings, [], whole.base_model_prefix, state)
            names[key.removesuffix(".weight")] = name
    return names if _has_all(model, names) else {name: name for name in listed}


def without_other_head(model: Any, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names (in this model -> in the list) but for the head of the checkpoint's class, if this is another.

    Such a class, of sequence classification say, has the body of the checkpoint and a head of its own, which
    transformers initializes. Other names without a module are kept: the caller refuses them.
    """
    body, classes = model.base_model_prefix, model.config.architectures or ()
    if not body or not hasattr(model, body) or not classes or type(model).__name__ in classes:
        return dict(names)
    heads = {name.partition(".")[0] for name in names} - {body, *(name for name, _ in model.named_children())}
    return {name: listed for name, listed in names.items() if name.partition(".")[0] not in heads}


def _has_all(model: nn.Module, names: Collection[str]) -> bool:
    """Return whether the model has modules of these names; of the linears of experts, that of the experts will do."""
    modules = {name for name, _ in model.named_modules()}
    return all(name in modules or name.rsplit(".", 2)[0] in modules for name in names)


def check_loaded(name: str, module: PackedModule) -> None:
    """Check that every tensor came from the checkpoint, and what it holds, and freeze it again.

    Loading marks floating tensors as trainable. Raises CheckpointError.
    """
    for key, tensor in module.named_parameters(recurse=False):
        if tensor.is_meta:  # offloaded, read when it is needed
            continue
        if not getattr(tensor, "_is_hf_initialized", False):
            raise CheckpointError(f"{name}.{key} is not in the checkpoint; download or write it again")
        if key in module.specs:
            tensor.requires_grad_(False)
    module.check(name)
