"""What transformers writes of a packed model: the list of what is packed, and the notice for those without compress."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from compress.runtime.packed import PackedModule
from compress.storage import notice
from compress.storage.checkpoint import CONFIG, read_json, write_text
from compress.storage.paths import METHOD


def take_notice_away(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove the notice from a configuration that has been read, so that the weights are looked for as always."""
    if getattr(config, notice.KEY, None) == notice.TEXT:
        delattr(config, notice.KEY)
    return config


def keep_notice() -> None:
    """Let configurations of packed models be saved with the notice; again does no harm.

    transformers removes "transformers_weights" from every configuration that it saves, and asks no quantizer.
    """
    stock: Any = PreTrainedConfig.save_pretrained
    if getattr(stock, "keeps_notice", False):
        return

    @functools.wraps(stock)
    def save_pretrained(
        self: PreTrainedConfig, save_directory: str | os.PathLike[str], *args: Any, **options: Any
    ) -> Any:
        result = stock(self, save_directory, *args, **options)
        path = Path(save_directory) / CONFIG
        values = read_json(path)
        packed = values.get("quantization_config")
        if isinstance(packed, dict) and packed.get("quant_method") == METHOD and packed.get("modules"):
            write_text(path, json.dumps(notice.added(values), indent=2, sort_keys=True) + "\n")
        return result

    save_pretrained.keeps_notice = True  # type: ignore[attr-defined]
    PreTrainedConfig.save_pretrained = save_pretrained  # type: ignore[method-assign]


def no_longer_packed(model: nn.Module, listed: dict[str, str]) -> set[str]:
    """Return the listed names (name in the model -> name in the list) of modules without packed weights."""
    modules = dict(model.named_modules())
    return {
        listed_name
        for name, listed_name in listed.items()
        if name in modules and not any(isinstance(module, PackedModule) for module in modules[name].modules())
    }
