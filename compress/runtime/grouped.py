"""Run the packed experts of a block together: one product with the first linears of all of them, one with the last.

The products are those of compress/kernels/grouped.py. What lies around a stored matrix is applied to the rows of all
pairs of a token and an expert: once for all experts where these share it, otherwise with each expert's own diagonal.
No shape depends on where tokens go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.formats import transforms as operations
from compress.formats.transforms import DIAGONAL, Diagonal
from compress.kernels import dispatch, grouped
from compress.runtime.linear import PackedLinear
from compress.types import PackedWeight, Stored, WeightTransforms

Around = Callable[[Tensor, Tensor], Tensor]  # (rows of pairs, or those that all experts read; ids) -> rows


class GroupedExperts:
    """The packed linears of experts that compute alike: some that read the inputs, one that reads what they give."""

    def __init__(self, experts: Sequence[Sequence[PackedLinear]], dtype: torch.dtype) -> None:
        """experts: the linears of each, in the order of computation. Raises ValueError where they cannot be grouped."""
        self.count = len(experts)
        *first, last = ([linears[i] for linears in experts] for i in range(len(experts[0])))
        bare = all(linear.is_bare for linears in first for linear in linears)
        together = [first] if bare and first else [[linears] for linears in first]
        self._first = [_Product(linears, dtype) for linears in together]
        self._last = _Product([last], dtype)
        self._has_bias = any(linear.bias is not None for linears in experts for linear in linears)

    def run(
        self,
        x: Tensor,
        routing: tuple[Tensor, Tensor],
        gate: Callable[..., Tensor] | None,
        norm: Callable[[Tensor], Tensor] | None = None,
        weighs_inputs: bool = False,
    ) -> Tensor:
        """Return the weighted sums [tokens, hidden] over the experts; x [tokens, hidden].

        routing: numbers of experts and their weights, [tokens, top_k] each; a number of no expert counts for nothing.
        gate: what the last linear reads of the outputs of the others, None if there are no others. norm: applied to
        what an expert gives. weighs_inputs: weights are those of an expert's inputs instead of its outputs.
        """
        ids, weights = routing
        flat = ids.reshape(-1).long()
        route = self._last.route(flat)
        if weighs_inputs:
            x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        if gate is not None:
            x = gate(*(y for product in self._first for y in product(x, flat, route)))
        (y,) = self._last(x, flat, route)
        y = y if norm is None else norm(y)
        if self._has_bias or norm is not None:
            y = y.masked_fill(~((flat >= 0) & (flat < self.count))[:, None], 0)
        y = y.unflatten(0, ids.shape).float()
        return (y if weighs_inputs else y * weights[..., None].float()).sum(1).to(x.dtype)


class ExpertRunner:
    """Experts made to run together for a type of activations, or the reason why they run one by one."""

    def __init__(self, experts: Sequence[Sequence[object]], dtype: torch.dtype) -> None:
        self.dtype, self.reason = dtype, ""
        self.together: GroupedExperts | None = None
        self._modules = [linear for each in experts for linear in each]
        linears = [[linear for linear in each if type(linear) is PackedLinear] for each in experts]
        self._linears = [linear for each in linears for linear in each]
        self._is_watched = _are_watched(self._linears)
        try:
            if len(self._linears) < len(self._modules):
                raise ValueError("linears that are not packed")
            if self._is_watched:
                raise ValueError("linears whose calls are watched")
            with torch.inference_mode(False), torch.no_grad():
                self.together = GroupedExperts(linears, dtype)
        except ValueError as error:
            self.reason = str(error)
        self._addresses = _addresses(self._linears)

    def __reduce__(self) -> Any:
        return type(None), ()  # addresses do not go into copies

    def is_current(self, experts: Sequence[Sequence[object]], dtype: torch.dtype) -> bool:
        """Return whether this was made of these linears, whose tensors are where they were, for this type."""
        linears = [linear for each in experts for linear in each]
        if dtype != self.dtype or len(linears) != len(self._modules) or not all(map(is_, linears, self._modules)):
            return False
        if self._is_watched != _are_watched(self._linears):
            return False
        return self.together is None or _addresses(self._linears) == self._addresses


class _Product:
    """Linears of all experts that read the same inputs: several that are bare, or one with what lies around it."""

    def __init__(self, linears: Sequence[Sequence[PackedLinear]], dtype: torch.dtype) -> None:
        """linears: those of each projection, by experts. Raises ValueError where no kernel multiplies with them."""
        every = [linear for each in linears for linear in each]
        if any(each.activations or each.lowrank or each.sparsity for each in every):
            raise ValueError("inputs that are rounded or unread, or low-rank parts")
        if not all(linear._matrix for linear in every):
            raise ValueError("linears that are dropped")
        prepared = grouped.prepare([[_matrix(each) for each in expert] for expert in zip(*linears, strict=True)], dtype)
        if prepared is None:
            formats = " and ".join(sorted({linear.format for linear in every}))
            raise ValueError(f"no kernel multiplies with all of them together ({formats})")
        self._number, self._group = prepared
        for stacks, each in zip(self._group.stacks, linears, strict=False):
            for number, linear in enumerate(each):
                linear._weight.forget()
                for name, stack in stacks.items():  # in place of the tensor that was copied there
                    cast(nn.Parameter, linear._parameters[name]).data = stack[number]
        self._sizes = [each[0].out_features for each in linears]
        self._before, self._after = (_around(linears[0], side) for side in ("in", "out"))
        self._is_shared = self._before is None or self._before[1]
        biases = [linear.bias for linear in linears[0] if linear.bias is not None]
        self._bias = torch.stack([bias.detach() for bias in biases]) if biases else None
        if biases and len(biases) != len(linears[0]):
            raise ValueError("biases of some experts")

    def route(self, ids: Tensor) -> list[Tensor]:
        """Return what all products of a layer need to know of ids int64 [pairs]."""
        return self._group.route(ids)

    def __call__(self, x: Tensor, ids: Tensor, route: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs [pairs, out] of each projection for rows x [rows, in] of `pairs / rows` pairs each."""
        if self._before is not None:
            if not self._before[1]:
                x = x.repeat_interleave(ids.shape[0] // max(1, x.shape[0]), 0, output_size=ids.shape[0])
            x = self._before[0](x, ids)
        if torch.compiler.is_compiling():
            y = grouped.product(x, ids, route, self._number, self._group.width)
        else:
            y = grouped.multiply(self._group, x, ids, route)
        y = y if self._after is None else self._after[0](y, ids)
        if self._bias is not None:
            y = (y + self._bias[ids.clamp(0, len(self._bias) - 1)]).to(y.dtype)
        return y.split(self._sizes, -1)


def _around(linears: Sequence[PackedLinear], side: str) -> tuple[Around, bool] | None:
    """Return the operations on one side of the matrices, and whether all experts share them; None: there are none."""
    names = linears[0].ops.input if side == "in" else linears[0].ops.output
    if any((linear.ops.input if side == "in" else linear.ops.output) != names for linear in linears):
        raise ValueError("transforms that differ")
    if not names:
        return None
    stored = {name: [linear.tensors.get(f"{side}_{name}") for linear in linears] for name in names}
    own = {
        name: [tensor for tensor in tensors if tensor is not None]
        for name, tensors in stored.items()
        if tensors[0] is not None and not all(torch.equal(tensors[0], cast(Tensor, each)) for each in tensors[1:])
    }
    ops, run = (
        (WeightTransforms(input=names), dispatch.before) if side == "in" else
        (WeightTransforms(output=names), dispatch.after)
    )  # fmt: skip
    if not own:
        tensors = linears[0].tensors
        return (lambda x, _: run(x, ops, tensors)), True
    if not all(name in DIAGONAL for name in own):
        raise ValueError("transforms that differ between experts")
    size = linears[0].in_features if side == "in" else linears[0].out_features
    tables = {
        name: torch.stack([Diagonal(name, each).values(size, torch.float32) for each in tensors])
        for name, tensors in own.items()
    }
    shared = linears[0].tensors

    def change(x: Tensor, ids: Tensor) -> Tensor:
        rows = ids.clamp(0, len(linears) - 1)
        for name in names:
            if name in tables:
                x = (x.float() * tables[name][rows]).to(x.dtype)
            else:
                x = operations.apply_input(x, WeightTransforms(input=(name,)), _rename(shared, side))
        return x

    return change, False


def _rename(tensors: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    """Return the tensors of one side under the names that those of the inputs have."""
    return {"in_" + name.removeprefix(side + "_"): tensor for name, tensor in tensors.items()}


def _matrix(linear: PackedLinear) -> PackedWeight:
    """Return the stored matrix alone, whose tensors are those of the linear."""
    tensors = {name: cast(Tensor, linear._parameters[name]).detach() for name in linear._matrix}
    return PackedWeight(Stored(linear.format, linear.params), tensors, linear.shape)


def _addresses(linears: Sequence[PackedLinear]) -> list[int]:
    """Return where the tensors of linears are."""
    return [t.data_ptr() for linear in linears for t in linear._parameters.values() if t is not None]


def _are_watched(linears: Sequence[PackedLinear]) -> bool:
    """Return whether somebody is to see the calls of single linears."""
    return any(linear._forward_hooks or linear._forward_pre_hooks for linear in linears)


def is_static(x: Tensor) -> bool:
    """Return whether shapes may not depend on where tokens go: on a GPU, in what is compiled or recorded in a graph."""
    return x.is_cuda and (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing())


def run_in_turn(
    x: Tensor,
    routing: tuple[Tensor, Tensor],
    count: int,
    compute: Callable[[int, Tensor], Tensor],
    weighs_inputs: bool = False,
) -> Tensor:
    """Return what `GroupedExperts.run` does, by giving every expert all tokens: slow, but no shape depends on the ids.

    compute(number, x [tokens, hidden]): what an expert gives.
    """
    ids, weights = routing
    out = torch.zeros_like(x)
    for number in range(count):
        chosen = ids == number
        weight = weights.masked_fill(~chosen, 0).sum(-1, keepdim=True)
        y = compute(number, x * weight.to(x.dtype)) if weighs_inputs else (compute(number, x) * weight).to(out.dtype)
        out = out + y.masked_fill(~chosen.any(-1, keepdim=True), 0)
    return out
