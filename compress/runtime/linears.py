"""Find the modules that compute x W^T + b, whatever their class, and give them as `nn.Linear`.

Some models have linear layers of their own: with W stored as [in, out], or with a forward pass that does what that of
`nn.Linear` does. They are found by running a small copy of the module, not by name. Where a model is worked on, an
`nn.Linear` takes their place, with the weight as [out, in]; stored names stay.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.runtime.linear import PackedLinear, is_plain_linear

CALL_FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def sparse_for(model: nn.Module, tokens: str | None) -> Iterator[None]:
    """While active, leave inputs unread in linears with `sparsity` for these tokens: decode, all, or None (none)."""
    sparse = [each for each in model.modules() if isinstance(each, PackedLinear) and each.sparsity is not None]
    before = [each.sparse_tokens for each in sparse]
    for each in sparse:
        each.sparse_tokens = tokens  # type: ignore[assignment]
    try:
        yield
    finally:
        for each, own in zip(sparse, before, strict=True):
            each.sparse_tokens = own


class TurnedLinear(nn.Linear):
    """An `nn.Linear` in the place of a module that holds, and a checkpoint that stores, the weight as [in, out]."""


def set_aside_weights(model: nn.Module) -> None:
    """Give None for a weight to packed linears whose owner looks at it only if it is a tensor (T5 asks for its type).

    The owner then goes on as if there were none; every other owner that asks finds no such attribute.
    """
    for name, module in model.named_modules():
        path, _, own = name.rpartition(".")
        if isinstance(module, PackedLinear) and takes_no_weight(model.get_submodule(path), own):
            vars(module)["weight"] = None


@functools.lru_cache(maxsize=256)
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class that was made while a program ran
        return ""


def takes_no_weight(owner: nn.Module, child: str) -> bool:
    """Return whether a module's class looks at the weight of a child only where that is a tensor."""
    return f"isinstance(self.{child}.weight, torch.Tensor)" in _source(cast(Any, type(owner)))


def shape_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (out_features, in_features) of a module whose place a PackedLinear can take; None for any other."""
    if is_plain_linear(module):
        return cast(tuple[int, int], tuple(module.get_parameter("weight").shape))
    is_turned = _is_turned(module)
    if is_turned is None:
        return None
    first, second = module.get_parameter("weight").shape
    return (second, first) if is_turned else (first, second)


def foreign(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of the linears below `module` that are not of the class `nn.Linear`."""
    for name, child in list(module.named_modules()):
        if not is_plain_linear(child) and shape_of(child) is not None:
            yield name, child


def as_linear(module: nn.Module) -> nn.Linear:
    """Return an `nn.Linear` that computes what a module does for which `shape_of` is not None.

    A weight that is turned is a copy, and that of the module goes to the meta device; any other is shared.
    """
    shape = shape_of(module)
    assert shape is not None, "the caller asks shape_of first"
    weight, bias = module.get_parameter("weight"), cast("nn.Parameter | None", module.bias)
    turned = bool(_is_turned(module))
    linear = (TurnedLinear if turned else nn.Linear)(shape[1], shape[0], bias is not None, device="meta")
    linear.weight = weight
    if turned:
        linear.weight = nn.Parameter(weight.detach().T.contiguous(), weight.requires_grad)
        module.register_parameter("weight", nn.Parameter(weight.detach().to("meta"), weight.requires_grad))
    if bias is not None:
        linear.bias = bias
    return linear.train(module.training)


def as_stored(linear: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """Return a parameter of a linear in the layout of the checkpoint; `name` is its last part."""
    return parameter.T if isinstance(linear, TurnedLinear) and name == "weight" else parameter


def dequantize_module(packed: PackedLinear, dtype: torch.dtype) -> nn.Module:
    """Return a module with the dequantized weight, of the class that was replaced when the model was loaded."""
    return in_place_of(packed, packed.to_linear(dtype))


def in_place_of(packed: PackedLinear, linear: nn.Module) -> nn.Module:
    """Return a linear as a module of the class that the packed one has replaced when the model was loaded."""
    template = vars(packed).get("replaced")
    if template is None:
        return linear
    module = copy.deepcopy(template)
    weight = linear.get_parameter("weight")
    module.weight = nn.Parameter(weight.detach().T.contiguous()) if _is_turned(template) else weight
    module.bias = linear.bias
    return cast(nn.Module, module.train(packed.training))


def remember(packed: PackedLinear, replaced: nn.Module) -> None:
    """Let `dequantize_module` know the module, on the meta device, whose place a PackedLinear takes."""
    if not is_plain_linear(replaced):
        vars(packed)["replaced"] = copy.deepcopy(replaced).to("meta")  # not a child: it holds no part of the model


def is_turned(packed: PackedLinear) -> bool:
    """Return whether the module that a PackedLinear has replaced holds its weight as [in, out]."""
    template = vars(packed).get("replaced")
    return template is not None and bool(_is_turned(template))


@torch.no_grad()
def _is_turned(module: nn.Module) -> bool | None:
    """Return whether the module computes x W + b (True), x W^T + b (False), or anything else (None).

    A copy with a small weight is run. Its sizes take the place of the module's wherever an attribute has them.
    """
    own = dict(module.named_parameters(recurse=False))
    if not {"weight"} <= own.keys() <= {"weight", "bias"} or own["weight"].dim() != 2 or not hasattr(module, "bias"):
        return None
    if any(True for _ in module.children()) or list(module.buffers()) or isinstance(module, PackedLinear):
        return None
    first, second = own["weight"].shape
    sizes = {first: 4} if first == second else {first: 5, second: 3}
    weight = torch.arange(sizes[first] * sizes[second], dtype=torch.float32, device="cpu").reshape(sizes[first], -1)
    for turned in (False, True):
        matrix = weight.T if turned else weight
        bias = torch.arange(matrix.shape[0], dtype=torch.float32, device="cpu") if "bias" in own else None
        x = torch.arange(2 * matrix.shape[1], dtype=torch.float32, device="cpu").reshape(2, -1) - 3
        try:
            y = _small(module, sizes, weight, bias)(x)
        except CALL_FAILURES:
            continue
        if isinstance(y, Tensor) and torch.equal(y, nn.functional.linear(x, matrix, bias)):
            return turned
    return None


def _small(module: nn.Module, sizes: dict[int, int], weight: Tensor, bias: Tensor | None) -> Any:
    """Return a copy of the module of other sizes (old -> new) with these parameters."""
    small = copy.copy(module)
    for key, value in list(vars(small).items()):
        if type(value) is int and value in sizes:
            vars(small)[key] = sizes[value]
    parameters = {"weight": nn.Parameter(weight), "bias": None if bias is None else nn.Parameter(bias)}
    vars(small)["_parameters"] = parameters
    return small
