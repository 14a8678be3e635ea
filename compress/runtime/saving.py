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
from compress.storage.checkpoint import write_text
from compress.storage.paths import METHOD


def take_notice_away(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove the notice from a configuration that has been read, so that the weights are looked for as always."""
    if getattr(config, notice.KEY, None) == notice.TEXT:
        delattr(config, notice.KEY)
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
        values = notice.added(json.loads(self.to_json_string(use_diff)))
        write_text(Path(json_file_path), json.dumps(values, indent=2, sort_keys=True) + "\n")

    to_json_file.keeps_notice = True  # type: ignore[attr-defined]
    PreTrainedConfig.to_json_file = to_json_file  # type: ignore[method-assign]


def _has_packed(config: PreTrainedConfig) -> bool:
    """Tell whether a configuration lists packed modules."""
    packed = getattr(config, "quantization_config", None)
    values = packed if isinstance(packed, dict) else getattr(packed, "__dict__", {})
    return values.get("quant_method") == METHOD and bool(values.get("modules"))


def no_longer_packed(model: nn.Module, listed: dict[str, str]) -> set[str]:
    """Return the listed names (name in the model -> name in the list) of modules without packed weights."""
    modules = dict(model.named_modules())
    return {
        listed_name
        for name, listed_name in listed.items()
        if name in modules and not any(isinstance(module, PackedModule) for module in modules[name].modules())
    }
