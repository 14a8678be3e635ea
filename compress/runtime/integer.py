"""Products of quantized inputs with the codes of a weight, without dequantizing either.

    y[m, n] = s[m] * sum over groups g of scale[g, n] * (sum over k in g of q[m, k] code[n, k])

The inner sums are exact: int8 times int8 in int32. Weights of the format `int` without zero points can be multiplied so
(`obstacle` names what else it takes), codes of less than 8 bits in containers of 8; weights of the format `grid` in the
type of the inputs (runtime/scaled.py). Everything else is fake quantization: what the inputs have become is multiplied
with the dequantized weight in floating point. It is the same product but for rounding, and gradients pass through it
straight.

Few rows for a weight that a kernel reads in its stored form (compress/kernels/dispatch.py) are left to that kernel: it
reads a fraction of the bytes. On a CPU, codes of 8 bits with one scale a row are themselves read as they are stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compress import formats
from compress.formats import int as int_format
from compress.formats.stored import params_from_dict
from compress.kernels import dispatch, measured
from compress.kernels.contract import Prepared
from compress.kernels.processors import Processor, processor
from compress.runtime import activation_quant as inputs
from compress.runtime import scaled
from compress.types import Activations

LEAST_GROUP = 64  # columns: with smaller groups, adding up their float32 outputs costs more than the integers save
MIN_CAPABILITY = {"int": (7, 5), "fp8": (8, 9)}  # NVIDIA's compute capability with such matrix instructions
PADDED_MULTIPLE = 16  # rows, columns and tokens are padded to it for a GPU
MIN_TOKENS = 32  # torch._int_mm on a GPU takes more than 16
FEW = 4  # tokens up to which the CPU multiplies one after another: a product of more of them reorders the weight
EXACT_IN_FP8 = 5  # bits: integers to 16 are numbers of float8_e4m3fn
LARGEST_INT32 = 2**31 - 1
# Numbers of a temporary on a CPU: it stays in the cache, and in memory that was used before. That took half of the time
# of a product with 512 tokens.
PIECE = 1 << 18
LEAST_WIDTH = 256  # outputs of a piece

Sums = Callable[[int, int], Tensor]  # from one output to another -> float32 [tokens, outputs], without scales of tokens


class IntegerProduct(NamedTuple):
    """What is multiplied with what, beside the tensors."""

    format: str
    params: Any
    shape: tuple[int, int]  # of the weight, [out, in]
    activations: Activations


def describe(
    format: str, params: Any, shape: tuple[int, int], activations: Activations, device: torch.device | str
) -> str:
    """How the product is computed, for reports: "int8 x int8 integer matmul", "fp8 x fp8 matmul" or "fake: why"."""
    product, on = IntegerProduct(format, params, shape, activations), torch.device(device)
    if reason := obstacle(product, on):
        return f"fake: {reason}"
    name = "int8 x int8 integer matmul"
    if activations.dtype != "int":
        name = f"{activations.dtype} x {activations.dtype} matmul"
    packed = not is_direct(product, on) and dispatch.supported(on, format, params, shape) is not None
    return f"{name}; few rows by the kernel of packed weights" if packed else name


def obstacle(product: IntegerProduct, device: torch.device) -> str:
    """Why a product has to be computed from dequantized numbers; empty if it has not."""
    if product.activations.is_coded:
        return f"inputs of {product.activations.dtype}"
    if product.format == "grid":
        return _obstacle(product, processor(device)) or _failure(product, device)
    return _obstacle(product, processor(device))


def _failure(product: IntegerProduct, device: torch.device) -> str:
    """Why the device does not multiply blocks, which a trial tells."""
    return scaled.failure(product.activations.dtype, device) if product.activations.block else ""


@cache
def _obstacle(product: IntegerProduct, on: Processor) -> str:
    params, (_, columns), activations = product.params, product.shape, product.activations
    if product.format == "grid":
        return scaled.obstacle(params, product.shape, activations, on)
    if product.format != "int":
        return f"the format {product.format} has no integer codes"
    if activations.block:
        return f"inputs of {activations.dtype}"
    if not params.symmetric:
        return "the weight has zero points"
    group = min(params.group(columns), columns)
    if group < columns and (on.type != "cpu" or activations.dtype == "fp8" or group < LEAST_GROUP):
        return f"the weight has a scale for {group} columns"
    if activations.dtype == "fp8" and params.bits > EXACT_IN_FP8:
        return f"codes of {params.bits} bits are not numbers of fp8"
    if group * 2**params.bits * inputs.largest(activations) > LARGEST_INT32 and activations.dtype == "int":
        return f"sums over {group} columns leave int32"
    return _missing(activations.dtype, on)


def _missing(dtype: str, on: Processor) -> str:
    """What the processor lacks."""
    if on.capability is not None and torch.version.hip is None:
        return "" if on.capability >= MIN_CAPABILITY[dtype] else f"the GPU has no {dtype} matrix multiplication"
    if on.type == "cpu" and dtype == "int":
        if not _cpu_is_exact():
            return "int8 products are not exact on this CPU"
        return "" if _cpu_is_fast() else "int8 products are slower on this CPU than the kernel of packed weights"
    return f"no {dtype} matrix multiplication on {on.type}"


@cache
def _cpu_is_exact() -> bool:
    """Whether torch's integer products are right at their largest.

    Without instructions for products of bytes (VNNI on x86), oneDNN adds them up in pairs in int16, which saturates.
    """
    codes = torch.full((64, 256), -128, dtype=torch.int8)
    stored = torch.full((64, 256), 255, dtype=torch.uint8)
    for left in (codes, -1 - codes, stored):
        for tokens in (1, FEW + 1):
            x = torch.full((tokens, 256), 127, dtype=torch.int8)
            try:
                product = torch._int_mm(left, x.t())
            except RuntimeError:  # torch before 2.13 multiplies no unsigned bytes on a CPU
                return False
            if not (product == 256 * 127 * int(left[0, 0])).all():
                return False
    return True


def _cpu_is_fast() -> bool:
    """Whether torch's integer products take less than twice the time of the kernel, whose activations have 16 bits.

    They are exact, the kernel rounds to one part in 2^16; but on some CPUs (1.4 billion multiply-adds a second on an
    EPYC of the third generation) they take many times as long.
    """
    kernel, codes, x = _sample()
    if kernel is None or not dispatch.suits(kernel, x):
        return True
    octets = x.to(torch.int8).t()

    def twice() -> None:
        kernel(x)
        kernel(x)

    question = "int8 x int8 by torch, or twice the product with int16"
    candidates = {"torch": lambda: torch._int_mm(codes, octets), "kernel": twice}
    return measured.fastest(question, candidates) == "torch"


@cache
def _sample() -> tuple[Prepared | None, Tensor, Tensor]:
    """A product to be timed: its kernel, its codes and its inputs."""
    outputs, inputs, tokens = 512, 512, 64
    params = int_format.params_for(8, -1, True, inputs)
    codes = torch.full((outputs, inputs), 127, dtype=torch.uint8, device="cpu")
    stored = int_format.pack(codes, torch.ones(outputs, 1, device="cpu"), None, params)
    x = torch.ones(tokens, inputs, dtype=torch.bfloat16, device="cpu")
    return dispatch.prepare(x, stored, "int", params, (outputs, inputs)), codes.view(torch.int8), x


def takes_integers(product: IntegerProduct, x: Tensor) -> bool:
    """Whether x [..., in] is multiplied with the codes."""
    if (x.requires_grad and torch.is_grad_enabled()) or x.shape[-1] != product.shape[1]:
        return False
    if obstacle(product, x.device) or (product.activations.block and x.dtype != torch.bfloat16):
        return False
    return is_direct(product, x.device) or not dispatch.taken(*product[:3], x)


def is_direct(product: IntegerProduct, device: torch.device) -> bool:
    """Whether the codes are multiplied as they are stored, so that nothing derived from them has to be kept."""
    params, columns = product.params, product.shape[1]
    if product.format != "int":
        return False
    one_group = params.group(columns) >= columns
    return device.type == "cpu" and params.bits == 8 and one_group and sys.byteorder == "little"


def operands(product: IntegerProduct, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What `multiply` needs beside x: scales float32 [groups, out], and the codes of each group of columns.

    The codes are int8 [out, group], float8_e4m3fn for fp8, padded for a GPU; or the stored words, as bytes, if direct.
    """
    params, shape = product.params, product.shape
    if product.format == "grid":
        held = scaled.operands(tensors, params, shape, product.activations)
        return held if product.activations.block else (held[0], _pad(held[1], PADDED_MULTIPLE))
    if is_direct(product, tensors["scales"].device):
        return tensors["scales"][:1, : shape[0]].float(), tensors["words8"].view(torch.uint8)
    codes, scales, _ = int_format.unpack(tensors, params, shape)
    signed = (codes - 2 ** (params.bits - 1)).view(torch.int8)  # uint8 wraps around
    if product.activations.dtype == "fp8":
        signed = signed.to(inputs.FP8)
    pieces = signed.split(min(params.group(shape[1]), shape[1]), dim=1)
    kept = [piece.contiguous() if _is_on_cpu(piece) else _pad(piece, PADDED_MULTIPLE) for piece in pieces]
    return scales.T.float().contiguous(), *kept


def multiply(product: IntegerProduct, x: Tensor, held: tuple[Tensor, ...], in_scale: Tensor | None) -> Tensor:
    """x [..., in] times the weight whose `operands` are held -> [..., out] of the type of x."""
    out_features, in_features = product.shape
    given = x.reshape(-1, in_features)
    if product.activations.block:
        return scaled.multiply(given, held, product.activations, in_scale).view(*x.shape[:-1], out_features)
    count, on_cpu = len(given), x.device.type == "cpu"
    some = max(1, PIECE // in_features) if on_cpu else max(1, count)
    parts = [_quantize(part, product.activations, in_scale) for part in given.split(some)]
    q, tokens = (each[0] if len(each) == 1 else torch.cat(each) for each in zip(*parts, strict=True))
    sums = _direct_sums(q, held, product.params) if held[1].dtype == torch.uint8 else _sums_of_groups(q, held)
    width = max(LEAST_WIDTH, PIECE // max(1, count)) if on_cpu else out_features
    y = x.new_empty(count, out_features)
    for first in range(0, out_features, width):
        last = min(first + width, out_features)
        y[:, first:last] = sums(first, last).mul_(tokens)
    return y.view(*x.shape[:-1], out_features)


def _quantize(x: Tensor, activations: Activations, in_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [tokens, in] in the type that is multiplied, and its scales float32 [tokens, 1]."""
    q, tokens = inputs.quantize(x, activations, in_scale)
    return q.to(inputs.FP8 if activations.dtype == "fp8" else torch.int8), tokens


def _direct_sums(q: Tensor, held: tuple[Tensor, ...], params: int_format.Params) -> Sums:
    """q [tokens, in] times stored bytes [padded out, padded in], which are codes + 128, times the scales.

    The two bytes of a word are columns that lie a tile's words apart (compress/numerics/packing.py): q is put in their
    order.
    """
    scales, words = held
    padded = F.pad(q, (0, words.shape[1] - q.shape[1]))
    tile = (padded.shape[1] // (2 * params.tile_words), 2, params.tile_words)
    ordered = padded.unflatten(1, tile).transpose(-1, -2).reshape(padded.shape)
    shift = 128 * q.sum(1, keepdim=True, dtype=torch.int32)
    whole = _on_cpu(ordered, words)
    return lambda first, last: whole[:, first:last].contiguous().sub_(shift).mul(scales[:, first:last])


def _sums_of_groups(q: Tensor, held: tuple[Tensor, ...]) -> Sums:
    """q [tokens, in] times the codes of each group of columns, int8 or fp8 [out or more, group], times the scales."""
    scales, *pieces = held
    parts = q.split(pieces[0].shape[1], dim=1) if _is_on_cpu(pieces[0]) else (q,)

    def sums(first: int, last: int) -> Tensor:
        y = _sums(parts[0], pieces[0], first, last) * scales[0, first:last]
        for part, piece, scale in zip(parts[1:], pieces[1:], scales[1:], strict=True):
            y.addcmul_(_sums(part, piece, first, last).float(), scale[first:last])
        return y

    return sums


def _sums(q: Tensor, codes: Tensor, first: int, last: int) -> Tensor:
    """q [tokens, group] times rows of codes [out or more, group or more] -> int32 (float32 for fp8)."""
    return _on_cpu(q, codes[first:last]) if _is_on_cpu(codes) else _on_gpu(q, codes)[:, first:last]


def _is_on_cpu(codes: Tensor) -> bool:
    return codes.device.type == "cpu"


def _on_cpu(q: Tensor, codes: Tensor) -> Tensor:
    """int32 [tokens, out]; the weight comes first: oneDNN reorders its second operand in every call."""
    if q.shape[0] > FEW or q.shape[0] <= 1:
        return torch._int_mm(codes, q.t()).t()
    return torch.cat([torch._int_mm(codes, part.t()) for part in q.split(1)], dim=1).t()


def _on_gpu(q: Tensor, codes: Tensor) -> Tensor:
    """int32, float32 for fp8 [tokens, padded out]."""
    count = q.shape[0]
    tokens = max(MIN_TOKENS, -(-count // PADDED_MULTIPLE) * PADDED_MULTIPLE)
    octets = F.pad(q.view(torch.int8), (0, codes.shape[1] - q.shape[1], 0, tokens - count))
    if codes.dtype == torch.int8:
        return torch._int_mm(octets, codes.t())[:count]
    one = torch.ones((), dtype=torch.float32, device=q.device)
    return torch._scaled_mm(octets.view(codes.dtype), codes.t(), one, one, out_dtype=torch.float32)[:count]


def _pad(matrix: Tensor, multiple: int) -> Tensor:
    rows, columns = matrix.shape
    padded = F.pad(matrix.contiguous().view(torch.int8), (0, -columns % multiple, 0, -rows % multiple))
    return padded.view(matrix.dtype)


def multiply_by_scales(y: Tensor, scale: Tensor) -> Tensor:
    """A product y [..., out] with inputs from `activations.split`, times their scales [..., 1], of the type of y."""
    return (y * scale).to(y.dtype)


# For torch.compile and CUDA graphs: one operator, opaque to the compiler, for inputs without gradients.


@cache
def _read(weight: str, activations: str) -> tuple[IntegerProduct, list[str]]:
    known = json.loads(weight)
    format, shape = known["format"], (known["shape"][0], known["shape"][1])
    params = params_from_dict(format, known["params"])
    product = IntegerProduct(format, params, shape, Activations(**json.loads(activations)))
    return product, list(formats.get(format).specs(params, shape))


@torch.library.custom_op("compress::quantized_linear", mutates_args=())
def linear(x: Tensor, tensors: list[Tensor], in_scale: Tensor | None, weight: str, activations: str) -> Tensor:
    """x [..., in] quantized, times the stored weight -> [..., out].

    Tensors come in the order of the format's specs; `weight` is from `dispatch.described`, `activations` is JSON. Codes
    that are not multiplied as they are stored are unpacked in each call.
    """
    product, names = _read(weight, activations)
    stored = dict(zip(names, tensors, strict=True))
    if takes_integers(product, x):
        return multiply(product, x, operands(product, stored), in_scale)
    q, scale = inputs.split(x, product.activations, in_scale)
    return multiply_by_scales(dispatch.product(q, stored, *product[:3]), scale)


@linear.register_fake
def _(x: Tensor, tensors: list[Tensor], in_scale: Tensor | None, weight: str, activations: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], _read(weight, activations)[0].shape[0])
