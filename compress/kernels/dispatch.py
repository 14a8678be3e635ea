"""Which kernel multiplies activations with a stored weight: a table (format, device, type, rows) -> kernel.

The table is the files: `compress/kernels/<folder of the device>/<format>.py` with

- `supports(params, shape) -> bool`: whether it can run a weight [out, in] with these parameters, and is worth it;
- `most_rows(params, shape, dtype) -> int`: rows of activations up to which it beats decoding the weight and F.linear;
- `matmul(x, tensors, params, shape) -> Tensor`: x [rows, in] of a type in TYPES, contiguous, and the stored tensors as
  they lie on disk -> [rows, out], of the type of x or float32;
- optional `TYPES`: the types of activations that it takes, where they are others;
- optional `bind(tensors, params, shape) -> Bound`: `matmul` for tensors that stay where they are, prepared once;
- optional `MOST_RANK`: up to which `matmul` takes (hidden [rows, rank], factor [rank, out]) as `added`, a fifth
  argument, and adds their product where it writes its results;
- optional `decode(tensors, params, shape, dtype) -> Tensor`: a faster way to what the format's own decoder gives, or
- optional `decoder(tensors, params, shape, dtype) -> Decoder`, which writes some of the rows of that at a time, and
  `arranged(x, tensors, params) -> Tensor` beside it, if it writes columns in an order of its own: x in this order.

Where there is none, or more rows, or a gradient to pass back, the weight is decoded: always possible and always right.
(Traced by torch.compile, a product that passes a gradient back still takes the kernel: the operator cannot tell.)
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from compress import formats
from compress.formats import transforms as operations
from compress.formats.stored import params_from_dict
from compress.kernels import llvm
from compress.types import WeightTransforms

FOLDERS = {"cpu": "compress.kernels.cpu", "cuda": "compress.kernels.triton"}
LEAST_CAPABILITY = (8, 0)  # products in bfloat16
PANEL = 1 << 22  # bytes that are decoded at a time: what F.linear reads next is still in the cache of a CPU
PANEL_ROWS = 16
TYPES = (torch.bfloat16, torch.float16)  # kernels round activations more than a float32 user would expect

Shape = tuple[int, int]
Bound = Callable[[Tensor], Tensor]  # x [..., in] of a type in TYPES, contiguous -> [..., out] of the same type
Decoder = Callable[[Tensor, int], None]  # (out [n, in], contiguous; first of the n rows, a multiple of PANEL_ROWS)


class Kernel(Protocol):
    """The contract of a kernel file."""

    def supports(self, params: Any, shape: Shape) -> bool: ...

    def most_rows(self, params: Any, shape: Shape, dtype: torch.dtype) -> int: ...

    def matmul(self, x: Tensor, tensors: Mapping[str, Tensor], params: Any, shape: Shape) -> Tensor: ...


class Processor(NamedTuple):
    """What the choice of a kernel depends on, beside the weight."""

    type: str
    capability: tuple[int, int] | None = None  # of an NVIDIA GPU; None where there is none: Triton's interpreter
    features: frozenset[str] = frozenset()  # of a CPU


def processor(device: torch.device | str) -> Processor:
    """The processor behind a device; a type alone stands for the current device of that type."""
    device = torch.device(device) if isinstance(device, str) else device
    if device.type == "cpu":
        return Processor("cpu", features=llvm.features() if llvm.available() else frozenset())
    if device.type != "cuda":
        return Processor(device.type)
    if device.index is not None:
        return _gpu(device.index)
    return _gpu(torch.cuda.current_device()) if torch.cuda.device_count() else Processor("cuda")


@cache
def _gpu(index: int) -> Processor:
    """Looked up once: a GPU keeps its index for as long as a process lives."""
    return Processor("cuda", torch.cuda.get_device_capability(index))


@cache
def _module(device: str, format: str) -> Kernel | None:
    if device not in FOLDERS or (device == "cuda" and not _has_triton()):
        return None
    name = f"{FOLDERS[device]}.{format}"
    return cast(Kernel, importlib.import_module(name)) if importlib.util.find_spec(name) else None


@cache
def _has_triton() -> bool:
    """Whether kernels for NVIDIA's GPUs can be compiled; AMD's go by the same name."""
    return importlib.util.find_spec("triton") is not None and torch.version.hip is None


def _is_able(on: Processor) -> bool:
    return on.capability is None or on.capability >= LEAST_CAPABILITY


def supported(device: torch.device | str, format: str, params: Any, shape: Shape) -> Kernel | None:
    """The kernel for this weight on a device, None if it has to be decoded there."""
    return _supported(processor(device), format, params, shape)


@cache
def _supported(on: Processor, format: str, params: Any, shape: Shape) -> Kernel | None:
    module = _module(on.type, format) if _is_able(on) else None
    return module if module is not None and module.supports(params, shape) else None


def forget() -> None:
    """Choose anew from now on: what a choice depends on has changed that is not part of `Processor`."""
    _supported.cache_clear()
    _gpu.cache_clear()


def find(format: str, params: Any, shape: Shape, x: Tensor) -> Kernel | None:
    """The kernel for this weight and the type and device of x; `suits` says whether these rows may take it."""
    kernel = supported(x.device, format, params, shape)
    return kernel if x.dtype in getattr(kernel, "TYPES", TYPES) else None


def suits(kernel: Kernel, params: Any, shape: Shape, x: Tensor) -> bool:
    """Whether these activations may take the kernel: few enough rows, and no gradient to pass back."""
    if x.shape[-1] != shape[1] or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return 0 < x.numel() // shape[1] <= kernel.most_rows(params, shape, x.dtype)


def taken(format: str, params: Any, shape: Shape, x: Tensor) -> bool:
    """Whether a kernel multiplies these activations, rather than that the weight is decoded."""
    kernel = find(format, params, shape, x)
    return kernel is not None and suits(kernel, params, shape, x)


def product(x: Tensor, tensors: Mapping[str, Tensor], format: str, params: Any, shape: Shape) -> Tensor:
    """x [..., in] times the stored weight [out, in] -> [..., out] of the type of x, by the kernel or by decoding."""
    kernel = find(format, params, shape, x) if all(_readable(t, x) for t in tensors.values()) else None
    with _on(x.device):
        if kernel is None or not suits(kernel, params, shape, x):
            return _decoded_product(kernel, x, tensors, format, params, shape)
        y = kernel.matmul(x.reshape(-1, shape[1]).contiguous(), tensors, params, shape)
    return y.to(x.dtype).view(*x.shape[:-1], shape[0])


def _decoded_product(
    kernel: Any, x: Tensor, tensors: Mapping[str, Tensor], format: str, params: Any, shape: Shape
) -> Tensor:
    """F.linear with the decoded weight; without a gradient to pass back some rows of the weight at a time."""
    decoder = getattr(kernel, "decoder", None)
    if decoder is None or x.shape[-1] != shape[1] or (x.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, _decoded(kernel, tensors, format, params, shape, x.dtype))
    write: Decoder = decoder(tensors, params, shape, x.dtype)
    x = kernel.arranged(x, tensors, params) if hasattr(kernel, "arranged") else x
    count = -(-shape[0] * shape[1] * x.element_size() // PANEL)
    rows = -(-shape[0] // (count * PANEL_ROWS)) * PANEL_ROWS  # panels have the same size, but the last one
    y = x.new_empty(*x.shape[:-1], shape[0])
    panel = x.new_empty(rows, shape[1])
    for first in range(0, shape[0], rows):
        part = panel[: shape[0] - first]
        write(part, first)
        y[..., first : first + rows] = F.linear(x, part)
    return y


class Prepared:
    """A stored weight that is multiplied many times: its kernel is looked up, and told where its tensors are, once."""

    def __init__(self, format: str, params: Any, shape: Shape) -> None:
        self.format, self.params, self.shape = format, params, shape
        self._names = list(formats.get(format).specs(params, shape))
        self.forget()

    def __reduce__(self) -> Any:
        return Prepared, (self.format, self.params, self.shape)  # addresses do not go into copies

    def forget(self) -> None:
        """Let go of the tensors: a layer that is about to replace them calls this, so that their memory is freed."""
        self._places: list[int] = []  # addresses of the tensors that were prepared
        self._bound: Bound | None = None
        self._most: dict[torch.dtype, int] = {}  # rows of activations

    def product(self, x: Tensor, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        """As the function `product`, of the tensors of a layer by name; None if that has to be called."""
        if not x.is_cpu:
            return None
        stored = [tensors[name] for name in self._names]
        places = [t.data_ptr() if t is not None and t.is_contiguous() else 0 for t in stored]
        if places != self._places:
            self._prepare(x, tensors, places)
        bound, most = self._bound, self._most.get(x.dtype, 0)
        if bound is None or x.shape[-1] != self.shape[1] or not 0 < x.numel() // self.shape[1] <= most:
            return None
        return None if x.requires_grad and torch.is_grad_enabled() else bound(x.contiguous())

    def _prepare(self, x: Tensor, tensors: Mapping[str, Tensor | None], places: list[int]) -> None:
        kernel: Any = supported(x.device, self.format, self.params, self.shape)
        stored = {name: tensors[name] for name in self._names}
        able = hasattr(kernel, "bind") and all(t is not None and _readable(t, x) for t in stored.values())
        self._bound = kernel.bind(stored, self.params, self.shape) if able else None
        types = getattr(kernel, "TYPES", TYPES)
        self._most = {dtype: kernel.most_rows(self.params, self.shape, dtype) for dtype in types} if able else {}
        self._places = places


def _readable(stored: Tensor, x: Tensor) -> bool:
    """Whether a kernel that is given an address finds there what it expects; decoding raises or copes where not."""
    return stored.device == x.device and stored.is_contiguous()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _decoded(
    kernel: Kernel | None, tensors: Mapping[str, Tensor], format: str, params: Any, shape: Shape, dtype: torch.dtype
) -> Tensor:
    if kernel is not None and hasattr(kernel, "decode"):
        return kernel.decode(tensors, params, shape, dtype)
    return formats.get(format).decode(tensors, params, shape, dtype)


def product_with_lowrank(
    x: Tensor, tensors: Mapping[str, Tensor], weight: tuple[str, Any, Shape], a: Tensor, b: Tensor
) -> Tensor | None:
    """`product` with a weight (format, params, shape), plus x A^T B, by a kernel that adds; None if there is none."""
    format, params, shape = weight
    kernel: Any = find(format, params, shape, x)
    if a.shape[0] > getattr(kernel, "MOST_RANK", 0) or not suits(kernel, params, shape, x):
        return None
    if not all(_readable(t, x) for t in tensors.values()):
        return None
    with _on(x.device):
        flat = x.reshape(-1, shape[1]).contiguous()
        y = kernel.matmul(flat, tensors, params, shape, (F.linear(flat, a), b.contiguous()))
    return y.to(x.dtype).view(*x.shape[:-1], shape[0])


def with_lowrank(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y [..., out] + x A^T B; y is a result that nobody else holds, x [..., in], A [rank, in], B [rank, out].

    The second product is added where the first kernel has left its results: no other pass over them.
    """
    hidden = F.linear(x, a).flatten(0, -2) if x.dim() > 1 else F.linear(x, a)[None]
    flat = y.view(-1, y.shape[-1])
    recorded = torch.is_grad_enabled() and (y.requires_grad or hidden.requires_grad)
    if recorded or torch.compiler.is_compiling():
        total = torch.addmm(flat, hidden, b)
    else:
        total = flat.addmm_(hidden, b)
    return total.view(y.shape)


def before(x: Tensor, ops: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """The operations on the inputs of a stored matrix: x [..., in] -> [..., in] of the same type."""
    if _one_launch(x, ops.input, ("signs", "hadamard")):
        with _on(x.device):
            return _hadamard().transform(x, before=tensors["in_signs"])
    return operations.apply_input(x, ops, tensors)


def after(y: Tensor, ops: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """The operations on its outputs [..., out]."""
    if _one_launch(y, ops.output, ("hadamard", "signs")):
        with _on(y.device):
            return _hadamard().transform(y, after=tensors["out_signs"])
    return operations.apply_output(y, ops, tensors)


def _one_launch(x: Tensor, names: tuple[str, ...], fused: tuple[str, ...]) -> bool:
    if names != fused or x.device.type != "cuda" or torch.compiler.is_compiling() or not _has_triton():
        return False
    if not _is_able(processor(x.device)):
        return False
    return not (x.requires_grad and torch.is_grad_enabled())


def _hadamard() -> Any:
    return importlib.import_module(f"{FOLDERS['cuda']}.hadamard")


# For torch.compile and CUDA graphs: one operator, opaque to the compiler.


def described(format: str, params: Any, shape: Shape) -> str:
    """What `linear` needs to know beside tensors, as text: operators take no objects."""
    return json.dumps({"format": format, "params": dataclasses.asdict(params), "shape": shape})


@cache
def _read(description: str) -> tuple[str, Any, Shape, list[str]]:
    known = json.loads(description)
    format, shape = known["format"], (known["shape"][0], known["shape"][1])
    params = params_from_dict(format, known["params"])
    return format, params, shape, list(formats.get(format).specs(params, shape))


@torch.library.custom_op("compress::linear", mutates_args=())
def linear(x: Tensor, tensors: list[Tensor], description: str) -> Tensor:
    """`product` as an operator; tensors in the order of the format's specs, description from `described`."""
    format, params, shape, names = _read(description)
    return product(x, dict(zip(names, tensors, strict=True)), format, params, shape)


@linear.register_fake
def _(x: Tensor, tensors: list[Tensor], description: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], _read(description)[2][0])


@torch.library.custom_op("compress::linear_backward", mutates_args=())
def linear_backward(gradient: Tensor, tensors: list[Tensor], description: str) -> Tensor:
    """gradient [..., out] of `linear` -> that of its x [..., in]."""
    format, params, shape, names = _read(description)
    stored = dict(zip(names, tensors, strict=True))
    return gradient @ formats.get(format).decode(stored, params, shape, gradient.dtype)


@linear_backward.register_fake
def _(gradient: Tensor, tensors: list[Tensor], description: str) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], _read(description)[2][1])


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor], str], output: Tensor) -> None:
    _, tensors, ctx.description = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, list[None], None]:
    tensors = list(ctx.saved_tensors)
    return linear_backward(gradient, tensors, ctx.description), [None] * len(tensors), None


linear.register_autograd(_backward, setup_context=_keep)
