"""The data that modules pass to each other. Frozen, no behaviour beyond derived sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearSpec:
    """One linear of a decoder block, as the skeleton shows it (no weight is read).

    `input_key` names the shared input: linears with equal keys read the same tensor and share their statistics.
    """

    name: str  # module path with experts unfused: model.layers.0.mlp.experts.3.up_proj
    shape: tuple[int, int]  # (out_features, in_features)
    dtype: torch.dtype  # of the stored weight
    block: int  # index of the decoder block
    input_key: str
    is_expert: bool = False

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Stats:
    """Streamed statistics of one shared input: hessian = sum over tokens of x x^T [in, in], float32.

    drift = sum over tokens of (y - x) x^T [in, in], float32, y being the same input in the full-precision model; None
    where it was not taken. The engine uses it up (compress/asymmetric.py): methods never see it.
    """

    hessian: Tensor
    count: int  # tokens summed
    drift: Tensor | None = None


@dataclass(frozen=True)
class Ops:
    """Operations around a stored matrix M, by their names in compress/ops.py, in the order in which they are applied.

    y = output ops(M input ops(x)): the effective weight is Out M In.
    """

    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.input or self.output)


NO_OPS = Ops()
IN_SCALE = "in_scale"  # the stored tensor of a static scale of activations, float32 [1]


@dataclass(frozen=True)
class Activations:
    """How the inputs of a linear are quantized at run time: signed and symmetric, after the input ops.

    q = round(clamp(x / s, -Q, Q)) with Q = 2^(bits - 1) - 1 and s = clip max|x| / Q over a token, or s as calibrated.
    """

    bits: int = 8
    scale: Literal["token", "tensor"] = "token"  # of each token as it comes; of the tensor, stored as `in_scale`
    clip: float = 1.0  # of the largest magnitude
    dtype: Literal["int", "fp8"] = "int"  # fp8: float8_e4m3fn, its largest number 448 in place of Q

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits {self.bits} is not between 2 and 8")
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip {self.clip} is not between 0 and 1")
        if self.dtype == "fp8" and self.bits != 8:
            raise ValueError(f"bits {self.bits}: fp8 has 8")


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight [out_features, in_features] in the form that goes to disk.

    `params` is the `Params` dataclass of the format; `tensors` are exactly the stored tensors, those of `ops` included.
    """

    format: str
    params: Any
    tensors: dict[str, Tensor]
    shape: tuple[int, int]
    ops: Ops = NO_OPS
    activations: Activations | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def bpw(self) -> float:
        """Stored bits per weight, all overhead included."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class Scheme:
    """What a rule decides for one linear: the method that chooses the codes and its settings (`Config`)."""

    method: str
    config: Any
    incoherence: bool = False  # the method is given the weight and its statistics in a random rotated basis
    activations: Activations | None = None  # None: the inputs stay as they are


@dataclass(frozen=True)
class Quantized:
    """What a weight method returns: the packed weight and what the report should say about how it went."""

    weight: PackedWeight
    notes: tuple[str, ...] = ()  # fallbacks, retries; each one sentence


@dataclass(frozen=True)
class LayerPlan:
    """The decision for one linear, with its exact stored bytes."""

    spec: LinearSpec
    scheme: Scheme
    format: str
    params: Any
    nbytes: int
    ops: Ops = NO_OPS
    activations: Activations | None = None

    @property
    def bpw(self) -> float:
        return 8 * self.nbytes / self.spec.numel


@dataclass(frozen=True)
class Plan:
    """Everything decided before a weight is touched."""

    layers: tuple[LayerPlan, ...]
    kept: dict[str, str] = field(default_factory=dict)  # linear name -> why it stays as it is
    kept_nbytes: dict[str, int] = field(default_factory=dict)  # source tensor -> bytes of what is not packed
    schemes: dict[str, Scheme] = field(default_factory=dict)  # linear name -> what the recipe decides for it

    @property
    def quantized_nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors, exact."""
        return self.quantized_nbytes + sum(self.kept_nbytes.values())

    @property
    def bpw(self) -> float:
        """Stored bits per quantized weight."""
        numel = sum(layer.spec.numel for layer in self.layers)
        return 8 * self.quantized_nbytes / numel if numel else 0.0


@dataclass(frozen=True)
class LayerReport:
    """What happened to one linear."""

    name: str
    shape: tuple[int, int]
    method: str
    format: str
    params: dict[str, Any]  # of the format, as config.json stores them
    bpw: float
    nbytes: int
    weight_error: float  # ||W - Q||^2 / ||W||^2
    output_error: float | None  # tr(R H R^T) / tr(W H W^T), over at most 512 rows; None for data-free methods
    tokens: int  # calibration tokens that reached it
    seconds: float
    notes: tuple[str, ...] = ()
    ops: Ops = NO_OPS
    activations: Activations | None = None


class Stored(NamedTuple):
    """How a weight is stored: a format and its `Params`, and the operations around it."""

    format: str
    params: Any
    ops: Ops = NO_OPS
    activations: Activations | None = None
