"""Make calls of linears: packed ones by their kernels, transforms around them included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.formats.transforms import Diagonal
from compress.kernels import dispatch, llvm, sparse_inputs
from compress.kernels.calls import ActivationRows, CompiledCall, Take
from compress.kernels.cpu import dense, hadamard
from compress.kernels.cpu.copy_rows import CopyRows
from compress.kernels.cpu.gate import Add
from compress.runtime.linear import PackedLinear, is_plain_linear
from compress.types import IN_THRESHOLD


def linear_calls(
    linears: Sequence[nn.Module], rows: ActivationRows, take: Take, is_single: bool
) -> list[CompiledCall] | None:
    """Return what writes what all linears give for rows, behind each other; None if one has to be called itself.

    is_single: each row is the only new token of its sequence.
    """
    plain = [each for each in linears if is_plain_linear(each)]
    if len(plain) == len(linears):
        return _plain_calls(plain, rows, take)
    packed = [each for each in linears if isinstance(each, PackedLinear)]
    if len(packed) < len(linears) or any(not _is_compiled(each) for each in packed):
        return None
    if len(packed) > 1 and all(each.is_bare for each in packed):
        kernels = [_kernel(each, rows) for each in packed]
        first = kernels[0]
        if first is not None and all(kernel is not None for kernel in kernels):
            calls = first.calls(rows, take, cast(Any, kernels[1:]))
            if calls is not None:
                return list(calls)
    calls, size = list[CompiledCall](), rows.dtype.itemsize
    for each in packed:
        own = _packed_calls(each, rows, take, is_single)
        if own is None:
            return None
        calls += own
        rows = rows._replace(target=rows.target + each.out_features * size)
    return calls


def _plain_calls(linears: Sequence[nn.Module], rows: ActivationRows, take: Take) -> list[CompiledCall] | None:
    """Return the calls of linears whose weights are not packed; None for types that are not read."""
    weights = [each.get_parameter("weight") for each in linears]
    if len({weight.dtype for weight in weights}) > 1 or not all(dense.supports(each, rows.dtype) for each in weights):
        return None
    return dense.product_calls(rows, take, weights, [cast(Any, each).bias for each in linears])


def _is_compiled(linear: PackedLinear) -> bool:
    """Return whether nothing lies around the product but what has calls."""
    ops = linear.ops
    return (
        linear.activations is None
        and linear.lowrank is None
        and (not ops.input or ops.input in dispatch.FUSED_BEFORE)
        and (not ops.output or ops.output in dispatch.FUSED_AFTER)
    )


def _kernel(linear: PackedLinear, rows: ActivationRows) -> Any:
    like = torch.empty(0, dtype=rows.dtype, device="cpu")
    return linear._weight.prepared(like, linear._parameters)


def _packed_calls(linear: PackedLinear, rows: ActivationRows, take: Take, is_single: bool) -> list[CompiledCall] | None:
    """Return the calls of one packed linear, None where there are none."""
    kernel, calls, size = _kernel(linear, rows), list[CompiledCall](), rows.dtype.itemsize
    if kernel is None:
        return None
    inputs, outputs, given = linear.in_features, linear.out_features, rows
    before, after = dispatch.FUSED_BEFORE.get(linear.ops.input), dispatch.FUSED_AFTER.get(linear.ops.output)
    if before is not None:
        turned = take(rows.count * inputs * size)
        diagonal = Diagonal(before, _tensor(linear, f"in_{before}"))
        into = rows._replace(target=turned, width=inputs)
        calls.append(cast(CompiledCall, hadamard.transform_call(inputs, into, take, before=diagonal)))
        given = given._replace(source=turned)
    if after is not None:
        given = given._replace(target=take(rows.count * outputs * size), width=outputs)
    reads_all = linear.sparse_tokens is None or not (is_single or linear.sparse_tokens == "all")
    products = kernel.calls(given, take) if reads_all else _sparse_calls(linear, kernel, given, take)
    if products is None:
        return None
    calls += products
    if after is not None:
        diagonal = Diagonal(after, _tensor(linear, f"out_{after}"))
        is_dense = rows.width == outputs or rows.count == 1
        place = rows.target if is_dense else take(rows.count * outputs * size)
        into = ActivationRows(rows.count, rows.dtype, given.target, place, outputs)
        calls.append(cast(CompiledCall, hadamard.transform_call(outputs, into, take, after=diagonal)))
        if not is_dense:
            copy = llvm.function(CopyRows, rows.dtype)
            calls.append(CompiledCall(copy, (place, rows.target, rows.count, outputs, rows.width)))
    if linear.bias is not None:
        add = llvm.function(Add, rows.dtype, linear.bias.dtype)
        calls.append(CompiledCall(add, (rows.target, linear.bias.data_ptr(), rows.count, outputs, rows.width, 0)))
    return None if any(call is None for call in calls) else calls


def _sparse_calls(linear: PackedLinear, kernel: Any, rows: ActivationRows, take: Take) -> list[CompiledCall] | None:
    """Return the calls of a product whose small inputs go unread; None where no kernel has them, for these rows."""
    is_dense = rows.width == linear.out_features or rows.count == 1
    fits = hasattr(kernel, "sparse_calls") and is_dense and rows.count <= sparse_inputs.MOST_ROWS
    return kernel.sparse_calls(rows, take, _tensor(linear, IN_THRESHOLD)) if fits else None


def _tensor(linear: PackedLinear, name: str) -> Tensor:
    return linear.get_parameter(name)
