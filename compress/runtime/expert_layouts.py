"""Describe how transformers holds the experts of a block, as data: which matrices there are, and how they are called.

The weights of all experts of a block are a few parameters, whose first dimension counts the experts. Modules differ in
the names of these parameters, in which way round the matrices lie, in how gate and up share one parameter, in biases,
in the function between up and down, and in what their `forward` is given. `describe` reads all of this from the
module's parameters, attributes and signature. Experts are computed from it in compress/runtime/experts.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SINGLE = "proj"  # the name of the one matrix of an expert that is no more than a linear
POST_NORM = "post_expert_norm"  # transformers' name of a norm over what an expert gives

ROUTED, SORTED, SHARED = "routed", "sorted", "shared"
CALLS = {  # what a module's forward is given -> how its experts are called
    ("hidden_states", "top_k_index", "top_k_weights"): ROUTED,
    ("hidden_states", "router_indices", "routing_weights"): ROUTED,
    ("hidden_states",): SORTED,  # rows of expert 0, then as many of expert 1, ...
    ("inputs", "expert_size"): SORTED,  # and how many rows each expert has
    ("hidden_states", "gammas"): SHARED,  # all tokens to all experts, and how much each counts
}

Gate = Callable[..., Tensor]  # (the fused module without weights, outputs of all projections but the last) -> Tensor


class FusedPart(NamedTuple):
    """One projection of all experts: where their matrices [out, in] lie in a parameter of the fused module.

    The parameter is [experts, out, in], [experts, in, out] if `transposed`, or such matrices below each other in two
    dimensions.
    """

    projection: str
    parameter: str
    transposed: bool = False
    rows: slice = slice(None)  # of the outputs that the parameter holds
    bias: str | None = None  # parameter [experts, out], of the same rows

    def matrix(self, parameter: Tensor, experts: int, number: int) -> Tensor:
        """Return the matrix [out, in] of expert `number`, a view of the parameter."""
        matrix = (parameter if parameter.dim() == 3 else parameter.unflatten(0, (experts, -1)))[number]
        return (matrix.T if self.transposed else matrix)[self.rows]

    def vector(self, parameter: Tensor, number: int) -> Tensor:
        """Return the bias [out] of expert `number`, a view of the parameter."""
        return parameter[number][self.rows]


class ExpertLayout(NamedTuple):
    """How a module holds and computes its experts."""

    experts: int
    parts: tuple[FusedPart, ...]  # in the order of computation; the last one reads what `gate` gives
    call: str  # ROUTED, SORTED or SHARED
    gate: Gate | None  # None: an expert is its one projection
    identities: int = 0  # numbers behind those of the experts, which give a token back as it is
    has_post_norm: bool = False  # a norm over what an expert gives, before it is weighted

    @property
    def projections(self) -> tuple[str, ...]:
        return tuple(part.projection for part in self.parts)

    @property
    def is_bilinear(self) -> bool:
        """Whether a channel of up is just multiplied into what down reads."""
        return self.gate is gated_product

    @property
    def is_open(self) -> bool:
        """Whether the module's inputs are read, and its outputs written, by projections and nothing else."""
        return self.call == ROUTED and not self.identities and not self.has_post_norm

    def shape(self, module: nn.Module, part: FusedPart) -> tuple[int, int]:
        """Return [out, in] of a projection."""
        out, columns = part.matrix(module.get_parameter(part.parameter).detach().to("meta"), self.experts, 0).shape
        return out, columns


def gated_product(fused: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """Return act(gate) * up."""
    return _activation(fused)(gate) * up


def activate(fused: nn.Module, up: Tensor) -> Tensor:
    """Return act(up)."""
    return _activation(fused)(up)


def inner_multiplied(fused: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """Return act(gate) * up, where the activation is that of the module `mlp` within."""
    return cast(Tensor, fused.get_submodule("mlp.activation_fn")(gate)) * up


def own_concatenated(fused: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """Return what the module's own gate function gives for gate and up behind each other."""
    return _own_gate(fused)(torch.cat((gate, up), -1))


def own_interleaved(fused: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """Return what the module's own gate function gives for channels of gate and up in turn."""
    return _own_gate(fused)(torch.stack((gate, up), -1).flatten(-2))


def _activation(fused: nn.Module) -> Callable[[Tensor], Tensor]:
    return cast(Callable[[Tensor], Tensor], fused.act_fn)


def _own_gate(fused: nn.Module) -> Callable[[Tensor], Tensor]:
    return cast(Callable[[Tensor], Tensor], fused._apply_gate)


def describe(module: nn.Module) -> ExpertLayout | str | None:
    """Return the layout of a module of experts, the reason why it has none that is known, or None: it has no experts.

    The module may be on meta.
    """
    for wanted, family in FAMILIES.items():
        if all(_dimensions(module, name) == family.dimensions for name in wanted):
            call = CALLS.get(_arguments(module))
            if call is None and wanted == SINGLE_PARAMETER:  # any convolution has such a parameter
                return None
            if call is None:
                return f"experts that are called with ({', '.join(_arguments(module))}), which is not known"
            shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
            if others := shapes.keys() - {*wanted, *(f"{name}_bias" for name in wanted), f"{POST_NORM}.weight"}:
                return f"experts with a parameter of no known use, {min(others)}"
            layout = family.layout(module, shapes, call)
            return layout if isinstance(layout, str) else layout._replace(has_post_norm=POST_NORM in module._modules)
    return None


def _dimensions(module: nn.Module, name: str) -> int:
    """Return the number of dimensions of a parameter of the module or of a child of it; 0 without such a parameter."""
    child, _, key = name.rpartition(".")
    owner = module._modules.get(child) if child else module
    parameter = owner._parameters.get(key) if owner is not None else None
    return 0 if parameter is None else parameter.dim()


def _arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the names of what forward is given, that of a decorated module being its own."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


Shapes = dict[str, tuple[int, ...]]


class _Family(NamedTuple):
    """Modules whose parameters have the same names."""

    dimensions: int  # of each of them
    layout: Callable[[nn.Module, Shapes, str], ExpertLayout | str]


def _gate_and_up_in_one(module: nn.Module, shapes: Shapes, call: str) -> ExpertLayout | str:
    fused, down = shapes["gate_up_proj"], shapes["down_proj"]
    inner, is_transposed = down[2], False
    if fused[1:] == (down[2], 2 * down[1]):
        inner, is_transposed = down[1], True
    elif fused[1:] != (2 * down[2], down[1]):
        return f"experts whose gate_up_proj {list(fused)} and down_proj {list(down)} do not belong together"
    identities = fused[0] - down[0]
    if identities and not isinstance(getattr(module, "identity_expert", None), nn.Identity):
        return f"{fused[0]} experts in gate_up_proj and {down[0]} in down_proj"
    is_interleaved = not getattr(module, "is_concatenated", True)
    gate_rows, up_rows = slice(0, inner), slice(inner, None)
    if is_interleaved:
        gate_rows, up_rows = slice(0, None, 2), slice(1, None, 2)
    fused_bias, down_bias = _bias("gate_up_proj", shapes), _bias("down_proj", shapes)
    parts = (
        FusedPart("gate_proj", "gate_up_proj", is_transposed, gate_rows, fused_bias),
        FusedPart("up_proj", "gate_up_proj", is_transposed, up_rows, fused_bias),
        FusedPart("down_proj", "down_proj", is_transposed, bias=down_bias),
    )
    return ExpertLayout(down[0], parts, call, _gate(module, is_interleaved), identities)


def _without_gate(module: nn.Module, shapes: Shapes, call: str) -> ExpertLayout | str:
    is_transposed = bool(getattr(module, "is_transposed", False))
    parts = tuple(FusedPart(name, name, is_transposed, bias=_bias(name, shapes)) for name in PROJECTIONS[1:])
    return ExpertLayout(shapes["down_proj"][0], parts, call, activate)


def _three(module: nn.Module, shapes: Shapes, call: str) -> ExpertLayout | str:
    is_transposed = bool(getattr(module, "is_transposed", False))
    parts = tuple(FusedPart(name, name, is_transposed, bias=_bias(name, shapes)) for name in PROJECTIONS)
    return ExpertLayout(shapes["down_proj"][0], parts, call, _gate(module, is_interleaved=False))


def _stacked_layout(module: nn.Module, shapes: Shapes, call: str) -> ExpertLayout | str:
    """Gate, up and down, which is transposed, with the experts below each other."""
    experts = getattr(module, "num_experts", None)
    if not isinstance(experts, int) or any(shape[0] % experts for shape in shapes.values()):
        return "experts below each other, whose number is not known"
    parts = (
        FusedPart("gate_proj", "mlp.w1"),
        FusedPart("up_proj", "mlp.v1"),
        FusedPart("down_proj", "mlp.w2", transposed=True),
    )
    return ExpertLayout(experts, parts, call, inner_multiplied)


def _one(module: nn.Module, shapes: Shapes, call: str) -> ExpertLayout | str:
    return ExpertLayout(shapes["weight"][0], (FusedPart(SINGLE, "weight"),), call, None)


def _bias(parameter: str, shapes: Shapes) -> str | None:
    return f"{parameter}_bias" if f"{parameter}_bias" in shapes else None


def _gate(module: nn.Module, is_interleaved: bool) -> Gate:
    """Return the gate function: the module's own where it has one."""
    from transformers.integrations import moe  # transformers may be half loaded when this file is imported

    own = getattr(type(module), "_apply_gate", None)
    if own is None or own is moe._default_apply_gate:
        return gated_product
    return own_interleaved if is_interleaved else own_concatenated


SINGLE_PARAMETER = ("weight",)
FAMILIES: dict[tuple[str, ...], _Family] = {
    ("gate_up_proj", "down_proj"): _Family(3, _gate_and_up_in_one),
    ("gate_proj", "up_proj", "down_proj"): _Family(3, _three),
    ("up_proj", "down_proj"): _Family(3, _without_gate),
    ("mlp.w1", "mlp.v1", "mlp.w2"): _Family(2, _stacked_layout),
    SINGLE_PARAMETER: _Family(3, _one),
}
