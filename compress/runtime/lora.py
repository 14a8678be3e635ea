"""A LoRA layer of PEFT whose base is a packed linear; imported when PEFT meets one (runtime/peft_hooks.py)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import nn

from compress.errors import AdapterError
from compress.runtime import linears
from compress.runtime.linear import PackedLinear

INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # ways to begin that do not look at the base weight


class PackedLoraLinear(Linear):
    """y = base(x) + scaling B A dropout(x), with a base that stays packed until the adapter is merged.

    Merging decodes the base into a plain linear of type `dtype` and adds the adapter to that. Unmerging puts the
    packed base back, unchanged.
    """

    base_layer: nn.Module

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: Any, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        """Wrap a packed linear. Raises AdapterError for variants and initial values that need a plain base weight."""
        if config.init_lora_weights not in INITIAL:
            raise AdapterError(
                f"init_lora_weights {config.init_lora_weights!r} computes with the base weight, which is packed; use "
                "True or 'gaussian', or load the original"
            )
        if config.use_dora:
            raise AdapterError(
                "use_dora computes with the base weight, which is packed; leave it out, or load the original"
            )
        self.merged_dtype = dtype
        with warnings.catch_warnings():  # of a type of layer that PEFT does not know; it reads its sizes all the same
            warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
            super().__init__(base_layer, adapter_name, config=config, **options)

    def update_layer(self, adapter_name: str, *values: Any, **options: Any) -> None:
        """Add an adapter, on the device of the packed tensors."""
        base = self.get_base_layer()
        device = next(base.parameters()).device
        if isinstance(base, PackedLinear) and options["config"].init_lora_weights == "orthogonal":
            vars(base)["weight"] = torch.empty(0, device=device)  # PEFT reads its type, and nothing else
        try:
            super().update_layer(adapter_name, *values, **options)
        finally:
            vars(base).pop("weight", None)
        for part in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            if not any(parameter.is_meta for parameter in part.parameters()):
                part.to(device)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters (default: the active ones) to the decoded weight of the base."""
        packed = self.base_layer
        names = self.active_adapters if adapter_names is None else adapter_names
        if not isinstance(packed, PackedLinear) or not set(names) - set(self.merged_adapters):
            super().merge(safe_merge, adapter_names)
            return
        before = list(self.merged_adapters)
        self.base_layer = packed.to_linear(self.merged_dtype)
        try:
            super().merge(safe_merge, adapter_names)
        except BaseException:  # adapters before the one that failed are in the linear that is let go
            self.base_layer = packed
            self.merged_adapters[:] = before
            raise
        self.__dict__["packed"] = packed  # not a child: it holds no part of the model now

    def unmerge(self) -> None:
        """Put the packed base back."""
        packed = self.__dict__.pop("packed", None)
        if packed is None:
            super().unmerge()
            return
        self.base_layer = packed
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return what takes this layer's place in the model without adapters: the base, merged if asked for."""
        if merge:
            self.merge(safe_merge, adapter_names)
        packed, base = self.__dict__.get("packed"), self.get_base_layer()
        return base if packed is None else linears.in_place_of(packed, base)
