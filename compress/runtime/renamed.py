"""Find the modules that a packed checkpoint lists in a class that has other names for them.

A checkpoint of text beside images lists the modules of the whole model. AutoModelForCausalLM may open its text part by
a class of its own, in which the same weights have shorter names, and the rest of the model is missing. A class of
another task (AutoModelForSequenceClassification) has no output head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn


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
    found = {}
    for name in listed:
        if not any(re.search(pattern, f"{name}.weight") for pattern in left_out):
            key, _ = rename_source_key(f"{name}.weight", renamings, [], whole.base_model_prefix, state)
            found[key.removesuffix(".weight")] = name
    return found if _has_all(model, found) else {name: name for name in listed}


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
