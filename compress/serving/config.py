"""Answer what serving engines ask of a quantization method about a whole checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compress.runtime import hf
from compress.serving.listed import Listed


class PackedConfig:
    """`quantization_config` of config.json, with the names that an engine's modules have; the base of its own class."""

    engine: str  # its name in messages
    nearest_cache: str  # the one of its cache types that is most like a compressed one

    def __init__(self, config: hf.CompressConfig, warn: Callable[[str], object]) -> None:
        """Read the lists; `warn` of a cache section, because engines store keys and values in types of their own."""
        super().__init__()
        self.listed = Listed(config)
        if config.kv_cache is not None:
            warn(
                f"the checkpoint's kv_cache section is not applied: {self.engine} has cache types of its own, of which "
                f"--kv-cache-dtype {self.nearest_cache} is the nearest"
            )

    def get_name(self) -> str:
        """Return the name of the method in config.json."""
        return hf.METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the types of activations that layers take."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return what the kernels need of a GPU of NVIDIA: compute capability 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files: all is in config.json."""
        return []
