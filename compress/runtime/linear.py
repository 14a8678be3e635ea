"""A linear layer whose weight stays packed in memory.

`forward` runs a kernel that reads the stored tensors (compress/kernels/dispatch.py) where one exists for the format,
the type and device of the activations and the number of rows; otherwise it decodes the weight to the type of the
activations and calls F.linear. Where there is no kernel at all, what was decoded is kept in a cache with a limit in
bytes. The cache saves time only: which path runs, and so every number, does not depend on what it holds.

Where inputs are quantized (compress/runtime/activation_quant.py), the product is one of integers if it can be
(runtime/integer.py), otherwise that of what the inputs have become, as above.

A low-rank part lies beside the stored matrix, inside of the operations around it, and is given the inputs as they come
from these operations, never quantized.

Small inputs may go unread (`InputSparsity`): a kernel skips their columns of the weight where there is one for the
format (compress/kernels/sparse_inputs.py), elsewhere they are multiplied as zeros. That is for tokens that come one at
a time, or for all (`sparse_tokens`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from compress import formats
from compress.formats import levels
from compress.formats import lowrank as lowrank_format
from compress.formats import transforms as operations
from compress.kernels import dispatch, sparse_inputs
from compress.kernels.fused import Weights
from compress.runtime import activation_quant as inputs
from compress.runtime import integer
from compress.runtime.plain_linear import CompiledLinear
from compress.runtime.weight_cache import CACHE, Derived
from compress.types import IN_SCALE, IN_THRESHOLD, PackedWeight, Stored


class PackedModule(nn.Module):
    """Hold the stored tensors of a weight `shape` = [rows, columns] as parameters that keep their types and are frozen.

    `to(dtype)`, `half()` and `float()` move them at most to another device. Where the weight has levels
    (compress/formats/levels.py), `format`, `params` and what else says how it is read are those of the level that
    `set_level` has chosen; `stored`, `specs` and `tensors` are those of the whole.
    """

    level: int | None = None  # None: the whole weight
    _matrix: list[str]  # names of the tensors of the stored matrix alone
    _described: str

    def __init__(self, stored: Stored, shape: tuple[int, int], device: torch.device | str | None = None) -> None:
        """Reserve uninitialized storage. Raises ValueError if operations of the weight cannot have this shape."""
        super().__init__()
        self.stored, self.format, self.params, self.shape = stored, stored.format, stored.params, shape
        self.specs, self.known_levels = formats.specs(stored, shape), levels.levels(stored)
        self._ways: dict[int | None, dict[str, Any]] = {}  # level -> what forward passes read
        self.set_level(None)
        self._unchecked: str | None = None  # its name, while `check` waits for tensors that are offloaded
        for name, (size, kind) in self.specs.items():
            tensor = torch.empty(size, dtype=kind, device=device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def set_level(self, level: int | None) -> None:
        """Compute at a level of the weight from now on, None: with all of it; see `levels.at_level` for others."""
        if not self.known_levels and self._ways:
            return
        level = None if level is None or level >= self.known_levels[-1] else level
        if level not in self._ways:
            self._ways[level] = self._way(levels.at_level(self.stored, level)) | {"level": level}
        vars(self).update(self._ways[level])

    def _way(self, stored: Stored) -> dict[str, Any]:
        """Return the attributes that differ between levels, for a weight that is stored so."""
        return {
            "format": stored.format,
            "params": stored.params,
            "_matrix": list(formats.get(stored.format).specs(stored.params, self.shape)),
            "_described": dispatch.described(stored.format, stored.params, self.shape),
        }

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

    def _view(self) -> PackedWeight:
        """Return what is stored of the weight at the present level."""
        return levels.view(self.packed(), self.level)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns] at the present level, decoded anew."""
        weight = self._view()
        return dispatch.decode(weight, dtype) if formats.is_unpacked(self.stored) else formats.decode(weight, dtype)

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


def are_unpacked(packed: Sequence[PackedModule]) -> bool:
    """Return whether all packed weights of a model are stored for their bytes alone, and are here."""
    ways = {module.stored for module in packed if not module.stored.is_plain}
    is_here = not any(tensor.is_meta for module in packed for tensor in module.tensors.values())
    return is_here and bool(ways) and all(map(formats.is_unpacked, ways))


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes just what `nn.Linear` does, so that a PackedLinear can take its place."""
    return isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, CompiledLinear.forward)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + bias of the type of y, whatever the type of the bias."""
    return y if bias is None else (y + bias).to(y.dtype)


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


class PackedLinear(PackedModule):
    """y = x W^T + bias with W [out_features, in_features] stored in a format of compress.formats.

    Where `ops` (compress/formats/transforms.py) lie around the stored matrix M, W = Out M In: they are applied to the
    inputs of the product with M, and to its outputs before the bias. With `activations`, what M is multiplied with is
    quantized. With `lowrank`, W = Out (M + B^T A) In. With `sparsity`, inputs of M that are small go unread.

    The stored tensors are parameters under their names on disk and keep their types: `to(dtype)`, `half()` and
    `float()` convert the bias only.
    """

    bias: nn.Parameter | None
    _weight: dispatch.Weight

    def __init__(
        self,
        stored: Stored,
        shape: tuple[int, int],
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Uninitialized storage for a weight of `shape`; `dtype` is the bias's.

        Raises ValueError if the operations cannot have this shape.
        """
        super().__init__(stored, shape, device)
        self.ops, self.activations, self.lowrank = stored.ops, stored.activations, stored.lowrank
        self.sparsity, self.sparse_tokens = stored.sparsity, stored.sparsity and stored.sparsity.tokens
        self.out_features, self.in_features = shape
        self._described_inputs = (
            "" if stored.activations is None else json.dumps(dataclasses.asdict(stored.activations))
        )
        empty = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", empty)

    def _way(self, stored: Stored) -> dict[str, Any]:
        return super()._way(stored) | {"_weight": dispatch.Weight(stored.format, stored.params, self.shape)}

    @classmethod
    def from_packed(
        cls, weight: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> PackedLinear:
        """A layer that shares the tensors of `weight`; `dtype` (default: as it is) is that of the bias."""
        layer = cls(weight.stored, weight.shape, device="meta")
        for name, tensor in weight.tensors.items():
            specified = layer.specs[name]
            assert (tuple(tensor.shape), tensor.dtype) == specified, f"{weight.format}: {name} is not as specified"
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
        assert weight.tensors.keys() == layer.specs.keys(), f"{weight.format}: tensors are missing"
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().to(dtype or bias.dtype), requires_grad=bias.requires_grad)
        return layer

    def to_linear(self, dtype: torch.dtype) -> nn.Linear:
        """A plain linear with copies of the dequantized weight and the bias in `dtype`; it quantizes no inputs."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.dequantize(dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().to(dtype, copy=True))
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] of any floating type -> [..., out_features] of the same type."""
        if self._unchecked is not None:
            self.check(self._unchecked)
        if not self.ops:
            return self._product(x, self._parameters["bias"])  # an attribute costs as much as a small product
        tensors = cast("dict[str, Tensor]", self._parameters)
        y = self._product(dispatch.before(x, self.ops, tensors), None)
        y = dispatch.after(y, self.ops, tensors)
        return y if self.bias is None else (y + self.bias).to(x.dtype)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features], quantized if it is to be, times the stored matrix, plus the low-rank part and bias."""
        if self.sparse_tokens is not None and (self.sparse_tokens == "all" or x.dim() < 2 or x.shape[-2] == 1):
            return self._sparse_product(x, bias)
        if self.lowrank is not None and not self.stored.has_rest_part:
            return self._product_with_lowrank(x, bias, *self._factors(x.dtype))
        return self._matrix_product(x, bias)

    def _sparse_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features] without small inputs, times the stored matrix, plus low-rank part and bias."""
        threshold, y = cast(Tensor, self._parameters[IN_THRESHOLD]), None
        if self.activations is None and not _is_traced():
            kernel = self._weight.prepared(x, self._parameters)
            tokens = x.reshape(-1, self.in_features)
            y = None if kernel is None else sparse_inputs.product_with(tokens, kernel, threshold)
        if y is not None and self.lowrank is None:
            return _plus(y.view(*x.shape[:-1], -1), bias)
        read = torch.where(x.abs() < threshold, 0, x)
        y = self._matrix_product(read, None) if y is None else y.view(*x.shape[:-1], -1)
        if self.lowrank is not None:
            y = dispatch.with_lowrank(y, x - read if self.stored.has_rest_part else read, *self._factors(x.dtype))
        return _plus(y, bias)

    def _product_with_lowrank(self, x: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        trained = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
        if self.activations is None and not trained and not _is_traced():
            y = self._weight.product_with_lowrank(x, self._parameters, a, b)
            if y is not None:
                return _plus(y, bias)
        return _plus(dispatch.with_lowrank(self._matrix_product(x, None), x, a, b), bias)

    def _factors(self, dtype: torch.dtype) -> Derived:
        """The factors of the low-rank part, A [rank, in_features] and B [rank, out_features]."""
        assert self.lowrank is not None
        lowrank = self.lowrank

        def build() -> Derived:
            a, b = lowrank_format.part_factors(tensors, lowrank, self.shape, dtype)
            return a, b.contiguous() if b.is_cuda else b  # as a kernel reads it

        tensors = {name: getattr(self, name) for name in self.specs if name.startswith(lowrank_format.PREFIX)}
        trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values())
        return build() if trained or _is_traced() else CACHE.get(self, ("lowrank", dtype), build)

    def _matrix_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features], quantized if it is to be, times the stored matrix, plus bias."""
        if not self._matrix:  # zeros, of which nothing is stored
            return _plus(x.new_zeros(*x.shape[:-1], self.out_features), bias)
        if self.activations is None:
            return self._multiply(x, bias)
        y = self._quantized_product(x, integer.IntegerProduct(self.format, self.params, self.shape, self.activations))
        return _plus(y, bias)

    def _quantized_product(self, x: Tensor, product: integer.IntegerProduct) -> Tensor:
        in_scale = self._parameters.get(IN_SCALE)
        tensors = {name: getattr(self, name) for name in self._matrix}
        if _is_traced() and not (x.requires_grad and torch.is_grad_enabled()):
            return integer.linear(x, list(tensors.values()), in_scale, self._described, self._described_inputs)
        if not _is_traced() and integer.takes_integers(product, x):
            if integer.is_direct(product, x.device):
                held = integer.operands(product, tensors)
            else:
                held = CACHE.get(self, ("codes", self.level), lambda: integer.operands(product, tensors))
            return integer.multiply(product, x, held, in_scale)
        q, scale = inputs.split(x, product.activations, in_scale)
        return integer.multiply_by_scales(self._multiply(q, None), scale)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features] as it is times the stored matrix, plus bias."""
        if _is_traced():
            y = dispatch.linear(x, [getattr(self, name) for name in self._matrix], self._described)
            return _plus(y, bias)
        product = self._weight.product(x, self._parameters)
        if product is not None:
            return _plus(product, bias)
        (weight,) = CACHE.get(self, (x.dtype, self.level), lambda: (formats.decode_stored(self._view(), x.dtype),))
        return dispatch.plain_product(x, weight, bias)

    @property
    def is_bare(self) -> bool:
        """Whether nothing lies around the product with the stored matrix: no operation, rounding, low rank or bias."""
        is_plain = self.activations is None and self.lowrank is None and self.sparsity is None
        return not self.ops and is_plain and self._parameters["bias"] is None

    @property
    def is_dropped(self) -> bool:
        """Whether it gives zeros for every input."""
        return not self._matrix and self.lowrank is None and self._parameters["bias"] is None

    def extra_repr(self) -> str:
        bias = self.bias is not None
        around = f", {operations.describe(self.ops)}" if self.ops else ""
        if self.activations is not None:
            around += f", {inputs.describe(self.activations)}"
        if self.lowrank is not None:
            around += f", {lowrank_format.describe(self.lowrank)}"
        if self.sparsity is not None:
            around += f", {self.sparsity.share:.0%} of inputs unread"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.params}{around}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the stored tensors; what was derived from them is let go before."""
        CACHE.drop(self)
        for way in self._ways.values():
            way["_weight"].forget()  # it holds the tensors that are replaced
        return super()._apply(fn, recurse)


class FusedLinears:
    """Bare linears (`is_bare`) that read the same inputs, multiplied in one call where kernels can."""

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        self.linears = tuple(linears)
        self._weights = Weights([linear._weight for linear in self.linears])

    def product(self, x: Tensor) -> Tensor | None:
        """Return what all linears give for x [..., in], behind each other; None: run them singly."""
        if _is_traced():
            return None
        return self._weights.product(x, [linear._parameters for linear in self.linears])
