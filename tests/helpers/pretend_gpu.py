"""Tensors that say they are on a GPU, on a machine without one: what mixes devices fails, and waits are counted.

    with Gpu() as gpu:
        result = work(gpu.put(weight))     # any tensor that is made of `result` is "on the GPU", too
    gpu.waits                              # function of ours -> times that it read a value of the device
    gpu.uploads                            # function of ours -> times that it copied a tensor to the device

A GPU's tensors are a subclass of tensors on the CPU, whose operations compute there. An operation on tensors of both
devices raises RuntimeError as torch does, but for numbers (no dimensions) of the CPU. Only Python's operators are seen:
that is all that the code under test uses.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)
WAITS = {
    "item",
    "tolist",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "cpu",
    "unique",
    "equal",
    "masked_select",
}
MIXING = {"__get__", "to", "copy_", "__getitem__", "__setitem__"}  # copies; indices and values that are copied first


class OnGpu(torch.Tensor):
    """A tensor whose device is a GPU by its own account."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def record_stream(self, stream: Any) -> None:
        """There are no streams here."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _plain(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def _put(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(OnGpu)


def _is_gpu(device: Any) -> bool:
    return device is not None and not isinstance(device, Tensor) and torch.device(device).type == "cuda"


ACTIVE: list[Gpu] = []


def _run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; its results are on the device of its arguments, or on the one that is asked for."""
    name = getattr(func, "__name__", "")
    if func is torch.device:
        return func(*args, **kwargs)
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, OnGpu)]
    others = [x for x in tensors if not isinstance(x, OnGpu) and x.dim() > 0]
    devices = [x for x in leaves if isinstance(x, (str, torch.device)) and _is_device(x)]
    if ours and others and name not in MIXING:
        raise RuntimeError(f"{name}: tensors of a GPU and of the CPU, {[tuple(x.shape) for x in tensors]}")
    if ours and (name in WAITS or _is_masked(name, args)):
        _note("waits")
    is_uploading = devices and _is_gpu(devices[-1]) and (others or name == "tensor")
    if is_uploading or (ours and others):
        _note("uploads")
    cpu = torch.device("cpu")
    moved = [
        _plain(x) if isinstance(x, OnGpu) else cpu if isinstance(x, (str, torch.device)) and _is_device(x) else x
        for x in leaves
    ]
    new_args, new_kwargs = tree_unflatten(moved, tree)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*new_args, **new_kwargs)
    on_gpu = _is_gpu(devices[-1]) if devices else bool(ours) and name not in ("cpu", "numpy")
    if name == "type_as" or (name == "to" and len(tensors) > 1):
        on_gpu = isinstance(tensors[1], OnGpu)
    if not on_gpu:
        return result
    for old, plain in zip(leaves, moved, strict=True):
        if isinstance(old, OnGpu) and result is plain:
            return old
    return tree_map_only(Tensor, _put, result)


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device) or x.partition(":")[0] in ("cpu", "cuda")


def _note(what: str) -> None:
    """Count what happens at the function of ours that asks for it."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if ROOT in path.parents and "tests" not in path.parts:
            for gpu in ACTIVE:
                getattr(gpu, what)[f"{path.stem}:{frame.name}"] += 1
            return


def _is_masked(name: str, args: Any) -> bool:
    """Whether an index is a mask, whose true entries have to be counted."""
    index = args[1] if name == "__getitem__" and len(args) > 1 else ()
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in parts)


class Gpu(TorchFunctionMode):
    """While active, tensors can be put on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()

    def put(self, x: Tensor) -> Tensor:
        return _put(x.clone())

    def __enter__(self) -> Gpu:
        ACTIVE.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        ACTIVE.remove(self)
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})
