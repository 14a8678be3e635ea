"""Check tensors that come from a file, before anything computes with them: names, types, shapes and values.

Every function raises ValueError. Its message begins with the name of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Spec = tuple[tuple[int, ...], torch.dtype]


def check_specs(tensors: Mapping[str, Any], specs: Mapping[str, Spec]) -> None:
    """Check that there are the specified tensors and no others; anything with `shape` and `dtype` counts as one."""
    for name, (shape, dtype) in specs.items():
        if name not in tensors:
            raise ValueError(f"{name} is missing, expected {_type_and_shape(dtype, shape)}")
        tensor = tensors[name]
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            held = _type_and_shape(tensor.dtype, tuple(tensor.shape))
            raise ValueError(f"{name} is {held}, expected {_type_and_shape(dtype, shape)}")
    if extra := sorted(tensors.keys() - specs.keys()):
        raise ValueError(f"{extra[0]} is not expected here")


def finite(name: str, tensor: Tensor) -> None:
    """Check that a floating tensor holds no NaN and no infinity."""
    tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # few operations know float8
    if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # ten times as fast as all of isfinite
        raise ValueError(f"{name} holds a number that is not finite")


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all floating tensors are finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point())


def advice(dtype: torch.dtype) -> str:
    """Return what to do about numbers that are not finite, computed in this type from weights that are."""
    if dtype == torch.float32:
        return "check the checkpoint's weights"
    return f"{str(dtype).removeprefix('torch.')} may be too narrow: quantize with --dtype float32, or check its weights"


def positive(name: str, tensor: Tensor) -> None:
    """Check that all numbers are finite and above 0."""
    finite(name, tensor)
    if tensor.numel() and float(tensor.amin()) <= 0:
        raise ValueError(f"{name} holds {float(tensor.amin()):g}, which is not above 0")


def ascending(name: str, tensor: Tensor) -> None:
    """Check that no number [n] is below the one before it."""
    if bool((tensor[1:] < tensor[:-1]).any()):
        raise ValueError(f"{name} is not in ascending order")


def within(name: str, integers: Tensor, low: int, high: int) -> None:
    """Check that all integers are at least `low` and at most `high`."""
    if integers.numel():
        for value in torch.stack(integers.aminmax()).tolist():
            if not low <= value <= high:
                raise ValueError(f"{name} holds {value}, which is not between {low} and {high}")


def distinct(name: str, indices: Tensor, count: int) -> None:
    """Check that integers [n] are indices below `count`, none of them twice; n = count: a permutation."""
    within(name, indices, 0, count - 1)
    ordered = indices.flatten().sort().values
    if bool((again := ordered[1:] == ordered[:-1]).any()):
        raise ValueError(f"{name} holds {int(ordered[1:][again][0])} twice")


def _type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that there is not enough memory: another run may have it."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def distinct_numbers(specs: Mapping[str, Spec]) -> dict[str, Tensor]:
    """Return tensors of these shapes and types in whose rows no number is twice: 0, 1, 2, ..."""
    return {name: torch.arange(shape[-1]).expand(shape).to(dtype) for name, (shape, dtype) in specs.items()}
