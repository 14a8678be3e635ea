"""A module that holds a packed weight: its stored tensors under their names on disk, checked when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from compress import formats
from compress.types import PackedWeight, Stored


class PackedModule(nn.Module):
    """Hold the stored tensors of a weight `shape` = [rows, columns] as parameters that keep their types and are frozen.

    `to(dtype)`, `half()` and `float()` move them at most to another device.
    """

    def __init__(self, stored: Stored, shape: tuple[int, int], device: torch.device | str | None = None) -> None:
        """Reserve uninitialized storage. Raises ValueError if operations of the weight cannot have this shape."""
        super().__init__()
        self.stored, self.format, self.params, self.shape = stored, stored.format, stored.params, shape
        self.specs = formats.specs(stored, shape)
        self._unchecked: str | None = None  # its name, while `check` waits for tensors that are offloaded
        for name, (size, kind) in self.specs.items():
            tensor = torch.empty(size, dtype=kind, device=device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def check(self, name: str) -> None:
        """Check stored tensors that have come from a file (`formats.check`), values that are offloaded when first used.

        Raises CheckpointError, which begins with `name`.
        """
        weight = self.packed()
        formats.check(weight, name)
        self._unchecked = name if any(tensor.is_meta for tensor in weight.tensors.values()) else None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that go to disk, by name."""
        return {name: getattr(self, name).detach() for name in self.specs}

    def packed(self) -> PackedWeight:
        return PackedWeight(self.stored, self.tensors, self.shape)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns], decoded anew."""
        return formats.decode(self.packed(), dtype)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Load, and check what is there now; where torch is going to raise an error of its own, leave it to that."""
        errors: list[str] = rest[-1]
        before = len(errors)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if len(errors) == before and any(prefix + name in state_dict for name in self.specs):
            self.check(prefix.removesuffix("."))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applied to the stored tensors for their device only: their types are part of the format."""
        stored = {id(getattr(self, name)) for name in self.specs}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in stored and moved.dtype != tensor.dtype else moved

        super()._apply(move, recurse)
        return self
