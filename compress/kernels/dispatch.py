"""Find the kernel that multiplies activations with a stored weight, by device and format, or decode the weight.

Kernels are files, `compress/kernels/<folder of the device>/<format>.py` (compress/kernels/contract.py), and so are
those that read keys and values, `kv_<name>.py`. Where there is no kernel, or where there are more rows of activations
than it is good for, or a gradient to pass back, the weight is decoded: always possible and always right. (Traced by
torch.compile, a product that passes a gradient back still takes the kernel: the operator cannot tell.)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from compress import formats
from compress.errors import TokenIdError
from compress.formats import transforms as operations
from compress.formats.stored import params_from_dict
from compress.formats.transforms import Diagonal
from compress.kernels import measured, processors
from compress.kernels.contract import PANEL_ROWS, Prepared, Shape
from compress.kernels.processors import Processor, processor
from compress.types import PackedWeight, Stored, WeightTransforms

# Where kernels are, by types of devices: those of published methods behind the frontier lie with these.
FOLDERS = {
    "cpu": ("compress.kernels.cpu", "compress.papers.kernels.cpu"),
    "cuda": ("compress.kernels.triton",),
}
PANEL = 1 << 22  # bytes that are decoded at a time: what F.linear reads next is still in the cache of a CPU
PANELS = {torch.float32: 1 << 20}  # the same for types with a size of their own


@cache
def _module(on: Processor, name: str) -> Any:
    """Return the kernel file of this name for a processor, None if there is none or the processor is too old."""
    if on.type not in FOLDERS or (on.type == "cuda" and not processors.has_triton(on)):
        return None
    paths = [f"{folder}.{name}" for folder in FOLDERS[on.type]]
    return next((importlib.import_module(path) for path in paths if importlib.util.find_spec(path)), None)


def kv(device: torch.device | str, name: str) -> Any:
    """Return the kernel file `kv_<name>` that reads keys and values on a device, None if there is none."""
    return _module(processor(device), f"kv_{name}")


def pages(device: torch.device) -> Any:
    """Return the kernel file that reads and writes packed pages on a device, None if there is none."""
    return _module(processor(device), "paged")


def experts(device: torch.device | str) -> Any:
    """Return the kernel file that multiplies with the weights of experts, None if there is none; see grouped.py."""
    return _module(processor(device), "grouped")


def supported(device: torch.device | str, format: str, params: Any, shape: Shape) -> Prepared | None:
    """Return a kernel without tensors, whose limits may be asked for; None if such weights are decoded on a device."""
    return _supported(processor(device), format, params, shape)


@cache
def _supported(on: Processor, format: str, params: Any, shape: Shape) -> Prepared | None:
    module = _module(on, format)
    if module is None:
        return None
    specs = formats.get(format).specs(params, shape).items()
    tensors = {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in specs}
    return module.prepare(tensors, params, shape)


def forget() -> None:
    """Choose anew from now on: what a choice depends on has changed that is not part of `Processor`."""
    for choice in (_supported, _module):
        choice.cache_clear()
    processors.forget()
    measured.forget()


def prepare(x: Tensor, tensors: Mapping[str, Tensor | None], format: str, params: Any, shape: Shape) -> Prepared | None:
    """Return the kernel for a stored weight on the device of x; None if there is none that can read its tensors."""
    module = _module(processor(x.device), format)
    readable = {name: t for name, t in tensors.items() if t is not None and _readable(t, x)}
    return None if module is None or len(readable) < len(tensors) else module.prepare(readable, params, shape)


def prepare_part(device: str, part: PackedWeight) -> Prepared | None:
    """Return the kernel for a part of what a kernel of a type of device was given to prepare; None: there is none."""
    module = _module(processor(device), part.format)
    return None if module is None else module.prepare(part.tensors, part.params, part.shape)


def _readable(stored: Tensor, x: Tensor) -> bool:
    """Return whether a kernel that is given an address finds there what it expects; decoding raises or copes if not."""
    return stored.device == x.device and stored.is_contiguous()


def suits(kernel: Prepared, x: Tensor) -> bool:
    """Return whether the kernel multiplies these activations: few enough rows, and no gradient to pass back."""
    return x.dtype in kernel.types and _are_few(x, kernel.shape[1], kernel.most_rows(x.dtype))


def _are_few(x: Tensor, columns: int, most: int) -> bool:
    if x.shape[-1] != columns or not 0 < x.numel() // columns <= most:
        return False
    return not (x.requires_grad and torch.is_grad_enabled())


def taken(format: str, params: Any, shape: Shape, x: Tensor) -> bool:
    """Return whether a kernel multiplies these activations, rather than that the weight is decoded."""
    kernel = supported(x.device, format, params, shape)
    return kernel is not None and suits(kernel, x)


def product(x: Tensor, tensors: Mapping[str, Tensor], format: str, params: Any, shape: Shape) -> Tensor:
    """Return x [..., in] times the stored weight [out, in]: [..., out] of the type of x, by kernel or by decoding."""
    kernel = prepare(x, tensors, format, params, shape)
    if kernel is None or x.dtype not in kernel.types:
        return F.linear(x, formats.get(format).decode(tensors, params, shape, x.dtype))
    with current(x.device):
        return kernel(x.contiguous()) if suits(kernel, x) else decoded_product(kernel, x)


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return F.linear of x [..., in] with a weight [out, in] of its type, by a kernel where torch is slow with it.

    The bias [out] may be of another type.
    """
    shape = (weight.shape[0], weight.shape[1])
    kernel = prepare(x, {"values": weight}, "dense", None, shape) if x.is_cpu else None
    if kernel is None or x.dtype not in kernel.types or kernel.panel_type(x.dtype) == x.dtype:
        y = F.linear(x, weight, bias if bias is None or bias.dtype == x.dtype else None)
        return y if bias is None or bias.dtype == x.dtype else (y + bias).to(x.dtype)
    y = kernel(x.contiguous()) if suits(kernel, x) else decoded_product(kernel, x)
    return y if bias is None else (y + bias).to(x.dtype)


def decoded_product(kernel: Prepared, x: Tensor, into: Tensor | None = None) -> Tensor:
    """Return F.linear with the decoded weight, written `into` a tensor if it is given.

    Without a gradient to pass back some rows of the weight are decoded at a time.
    """
    outputs, inputs = kernel.shape
    kind = kernel.panel_type(x.dtype)
    write = None if x.requires_grad and torch.is_grad_enabled() else kernel.decoder(kind)
    if x.shape[-1] != inputs or write is None:
        y = F.linear(x, kernel.decode(x.dtype))
        return y if into is None else into.copy_(y)
    y = x.new_empty(*x.shape[:-1], outputs) if into is None else into
    x = kernel.arranged(x).to(kind)
    count = -(-outputs * inputs * x.element_size() // PANELS.get(kind, PANEL))
    rows = -(-outputs // (count * PANEL_ROWS)) * PANEL_ROWS  # panels have the same size, but the last one
    panel = x.new_empty(rows, inputs)
    for first in range(0, outputs, rows):
        weights = panel[: outputs - first]
        write(weights, first)
        y[..., first : first + rows] = F.linear(x, weights)
    return y


def decode(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return a weight [out, in] with nothing around it, decoded by a kernel: of its device, or the CPU; or without."""
    tensors, device = weight.tensors, next(iter(weight.tensors.values())).device
    for on in dict.fromkeys((device, torch.device("cpu"))):
        moved = {name: tensor.to(on) for name, tensor in tensors.items()}
        kernel = prepare(torch.empty(0, device=on), moved, weight.format, weight.params, weight.shape)
        if kernel is not None:
            with current(on):
                return kernel.decode(dtype).to(device)
    return formats.decode_stored(weight, dtype)


def rows(
    ids: Tensor, tensors: Mapping[str, Tensor], format: str, params: Any, shape: Shape, dtype: torch.dtype
) -> Tensor:
    """Return the rows ids [n] of a stored weight [out, in] of a format with rows: [n, in] of `dtype`, by kernel or not.

    No other row is read. Raises TokenIdError on a CPU for an id that is no row; a GPU is not waited for, its kernel
    gives rows of NaN.
    """
    if ids.is_cpu and ids.numel():
        _check_ids(ids, shape[0])
    module = _module(processor(ids.device), format)
    if hasattr(module, "look_up") and ids.numel() and all(_readable(t, ids) for t in tensors.values()):
        with current(ids.device):
            looked_up = module.look_up(tensors, params, shape, ids.contiguous(), dtype)
        if looked_up is not None:
            return cast(Tensor, looked_up)
    return formats.decode_rows(PackedWeight(Stored(format, params), dict(tensors), shape), ids.long(), dtype)


def _check_ids(ids: Tensor, count: int) -> None:
    lowest, highest = (int(end) for end in ids.aminmax())
    if lowest < 0 or highest >= count:
        raise TokenIdError(
            f"token id {lowest if lowest < 0 else highest} is not in the table of {count} rows; "
            "give ids of the tokenizer that lies beside the checkpoint"
        )


class Weight:
    """A stored weight that is multiplied many times: prepared once, and anew where its tensors have moved."""

    def __init__(self, format: str, params: Any, shape: Shape) -> None:
        self.format, self.params, self.shape = format, params, shape
        self._names = list(formats.get(format).specs(params, shape))
        self.forget()

    def __reduce__(self) -> Any:
        return Weight, (self.format, self.params, self.shape)  # addresses do not go into copies

    def forget(self) -> None:
        """Let go of the tensors: a layer that is about to replace them calls this, so that their memory is freed."""
        self._addresses: list[int] = []  # of the tensors that were prepared
        self._device: torch.device | None = None
        self._kernel: Prepared | None = None
        self._most: dict[torch.dtype, int] = {}  # rows of activations that the kernel takes, by their types

    def prepared(self, x: Tensor, tensors: Mapping[str, Tensor | None]) -> Prepared | None:
        """Return the kernel for the type and device of x, given the tensors of a layer by name; None: there is none."""
        stored = [tensors[name] for name in self._names]
        addresses = [t.data_ptr() if t is not None and t.is_contiguous() else 0 for t in stored]
        if addresses != self._addresses or x.device != self._device:
            by_name = dict(zip(self._names, stored, strict=True))
            self._kernel = kernel = prepare(x, by_name, self.format, self.params, self.shape)
            self._most = {dtype: kernel.most_rows(dtype) for dtype in kernel.types} if kernel is not None else {}
            self._addresses, self._device = addresses, x.device
        return self._kernel if x.dtype in self._most else None

    def takes(self, x: Tensor) -> bool:
        """Return whether the prepared kernel multiplies these activations, rather than that the weight is decoded."""
        return _are_few(x, self.shape[1], self._most[x.dtype])

    def product(self, x: Tensor, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        """Run the function `product` on the tensors of a layer; None if the weight has to be decoded by its format."""
        kernel = self.prepared(x, tensors)
        if kernel is None:
            return None
        run = kernel if self.takes(x) else partial(decoded_product, kernel)
        if x.is_cpu:
            return run(x.contiguous())
        with current(x.device):
            return run(x.contiguous())

    def product_with_lowrank(
        self, x: Tensor, tensors: Mapping[str, Tensor | None], a: Tensor, b: Tensor
    ) -> Tensor | None:
        """Return the product plus x A^T B, by a kernel that adds; None if there is none."""
        kernel = self.prepared(x, tensors)
        if kernel is None or a.shape[0] > kernel.most_rank or not suits(kernel, x):
            return None
        with current(x.device):
            return kernel.plus(x.contiguous(), F.linear(x, a), b.contiguous())


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device current: kernels are launched on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def with_lowrank(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y [..., out] + x A^T B; y is a result that nobody else holds, x [..., in], A [rank, in], B [rank, out].

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


FUSED = ("signs", "channel_scale16", "channel_scale8")  # diagonals that Hadamard kernels multiply by
# Operations on one side -> the diagonal that is in one call with the Hadamard transform.
FUSED_BEFORE: dict[tuple[str, ...], str] = {(name, "hadamard"): name for name in FUSED}
FUSED_AFTER: dict[tuple[str, ...], str] = {("hadamard", name): name for name in FUSED}


def before(x: Tensor, ops: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return x [..., in] after the operations on the inputs of a stored matrix, of the same type."""
    name = FUSED_BEFORE.get(ops.input)
    kernel = _hadamard(x, tensors[f"in_{name}"]) if name is not None else None
    if name is None or kernel is None:
        return operations.apply_input(x, ops, tensors)
    with current(x.device):
        return kernel.transform(x, before=Diagonal(name, tensors[f"in_{name}"]))


def after(y: Tensor, ops: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return y [..., out] after the operations on the outputs of a stored matrix."""
    name = FUSED_AFTER.get(ops.output)
    kernel = _hadamard(y, tensors[f"out_{name}"]) if name is not None else None
    if name is None or kernel is None:
        return operations.apply_output(y, ops, tensors)
    with current(y.device):
        return kernel.transform(y, after=Diagonal(name, tensors[f"out_{name}"]))


def _hadamard(x: Tensor, stored: Tensor) -> Any:
    """Return the kernel that transforms x and multiplies by a stored diagonal in one launch.

    None: there is none, or a gradient reaches one of them.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if (x.requires_grad or stored.requires_grad) and torch.is_grad_enabled():
        return None
    return _module(processor(x.device), "hadamard")


# For torch.compile and CUDA graphs: one operator, opaque to the compiler.


def described(format: str, params: Any, shape: Shape) -> str:
    """Return what `linear` needs to know beside tensors, as text: operators take no objects."""
    return json.dumps({"format": format, "params": dataclasses.asdict(params), "shape": shape})


@cache
def _read(description: str) -> tuple[str, Any, Shape, list[str]]:
    known = json.loads(description)
    format, shape = known["format"], (known["shape"][0], known["shape"][1])
    params = params_from_dict(format, known["params"])
    return format, params, shape, list(formats.get(format).specs(params, shape))


@torch.library.custom_op("compress::linear", mutates_args=())
def linear(x: Tensor, tensors: list[Tensor], description: str) -> Tensor:
    """Run `product` as an operator; tensors in the order of the format's specs, description from `described`."""
    format, params, shape, names = _read(description)
    aliases = {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}
    y = _weight_of(description, tensors[0]).product(x, aliases)
    return F.linear(x, formats.get(format).decode(aliases, params, shape, x.dtype)) if y is None else y


_WEIGHTS: dict[tuple[str, int], Weight] = {}  # key: description and identity of the first tensor


def _weight_of(description: str, first: Tensor) -> Weight:
    """Return what a call before has prepared for a tensor, which is given up with the tensor; it holds aliases only."""
    key = description, id(first)
    if (weight := _WEIGHTS.get(key)) is None:
        weight = _WEIGHTS[key] = Weight(*_read(description)[:3])
        weakref.finalize(first, _WEIGHTS.pop, key, None).atexit = False
    return weight


@linear.register_fake
def _(x: Tensor, tensors: list[Tensor], description: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], _read(description)[2][0])


@torch.library.custom_op("compress::linear_backward", mutates_args=())
def linear_backward(gradient: Tensor, tensors: list[Tensor], description: str) -> Tensor:
    """Return the gradient of x [..., in] from that of the result [..., out] of `linear`."""
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
    return linear_backward(gradient, [*ctx.saved_tensors], ctx.description), [None] * len(ctx.saved_tensors), None


linear.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("compress::rows", mutates_args=())
def traced_rows(ids: Tensor, tensors: list[Tensor], description: str, dtype: torch.dtype) -> Tensor:
    """Run `rows` as an operator; arguments as those of `linear`."""
    format, params, shape, names = _read(description)
    return rows(ids, dict(zip(names, tensors, strict=True)), format, params, shape, dtype)


@traced_rows.register_fake
def _(ids: Tensor, tensors: list[Tensor], description: str, dtype: torch.dtype) -> Tensor:
    return ids.new_empty(ids.shape[0], _read(description)[2][1], dtype=dtype)
