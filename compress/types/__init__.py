"""Define the data that modules pass to each other: frozen, with no behaviour beyond derived sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from compress.types.inputs import IN_SCALE as IN_SCALE
from compress.types.inputs import IN_THRESHOLD as IN_THRESHOLD
from compress.types.inputs import INPUT_BLOCKS as INPUT_BLOCKS
from compress.types.inputs import INPUT_TYPES as INPUT_TYPES
from compress.types.inputs import Activations as Activations
from compress.types.inputs import InputSparsity as InputSparsity
from compress.types.inputs import Sparsity as Sparsity
from compress.types.lowrank import Correction as Correction
from compress.types.lowrank import LowRank as LowRank


class Work(NamedTuple):
    """What quantizing takes, from shapes alone: counts that a prediction multiplies with the speeds of a machine."""

    products: float  # multiply-adds of float32 matrix products
    steps: float  # numbers that loops go over, each with a multiplication and an addition

    def plus(self, other: Work) -> Work:
        """Return both together."""
        return Work(self.products + other.products, self.steps + other.steps)


@dataclass(frozen=True)
class LinearSpec:
    """One linear of a decoder block, as the skeleton shows it (no weight is read).

    `input_key` names the shared input: linears with equal keys read the same tensor and share their statistics.
    """

    name: str  # module path with experts unfused: model.layers.0.mlp.experts.3.up_proj
    shape: tuple[int, int]  # (out_features, in_features)
    dtype: torch.dtype  # of the stored weight
    block: int  # index of the decoder block; -1: outside of the blocks
    input_key: str
    is_expert: bool = False
    parameters: tuple[str, ...] = ()  # of the model, that an expert's tensors are parts of; or all that a table serves

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


class OutputMetric(NamedTuple):
    """The output Hessian G of a linear: second moments of the loss's gradient at its outputs (YAQA, arXiv 2505.22988).

    The loss of an error E [in, out] of the transposed weight is tr(E^T H E G).
    """

    block: Callable[[slice], Tensor]  # rows of the weight -> their G, float32, positive definite, diagonal about 1


@dataclass(frozen=True)
class Stats:
    """Streamed statistics of one shared input: hessian = sum over tokens of x x^T [in, in], float32.

    drift = sum over tokens of (y - x) x^T [in, in], float32, y being the same input in the full-precision model; None
    where it was not taken. The engine uses it up (compress/quant/target_correction.py): methods never see it.
    output: what errors of a linear's outputs cost, None where they cost all the same.
    largest_inputs: the largest magnitude of each input over all tokens [in], float32; None in a rotated basis.
    largest_weight: float32 [], the largest magnitude of all weights of a block that read the input, each in the basis
    in which it is rounded, before target correction. None where a method does not ask for it, and for weights of
    towers: then it is the weight's own. A method that asks for nothing else is given a Hessian [0, 0] and the count 0.
    """

    hessian: Tensor
    count: int  # tokens summed
    drift: Tensor | None = None
    output: OutputMetric | None = None
    largest_inputs: Tensor | None = None
    largest_weight: Tensor | None = None


@dataclass(frozen=True)
class WeightTransforms:
    """Transforms around a stored matrix M, by their names in formats/transforms.py, in the order of application.

    y = output transforms(M input transforms(x)): the effective weight is Out M In.
    """

    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.input or self.output)


NO_TRANSFORMS = WeightTransforms()


@dataclass(frozen=True)
class ExpertPruning:
    """Recipe: online pruning of experts, by which tokens go without those that matter little to them."""

    prune: bool = False  # tokens go without experts that matter little to them
    layers: int = 10  # [blocks] in which experts are pruned: those that it harms least
    protected: float = 0.02  # [fraction] of the tokens that keep all experts: those of the largest ||h||_1

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise ValueError(f"layers {self.layers} is negative")
        if not 0 <= self.protected < 1:
            raise ValueError(f"protected {self.protected} is not a share: at least 0 and less than 1")


@dataclass(frozen=True)
class Pruning:
    """Condition on which a token goes without the least of its experts (compress/runtime/experts.py)."""

    threshold: float  # where that expert's routing weight is less than this times the largest one
    protected: float | None = None  # ||h||_1 from which a token keeps all; None: no token is protected
    taken: float = 1.0  # share of that weight which the token's other experts take over, in proportion to theirs

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold} is not above 0 and at most 1")
        if self.protected is not None and not self.protected > 0:
            raise ValueError(f"protected {self.protected} is not above 0")
        if not 0 <= self.taken <= 1:
            raise ValueError(f"taken {self.taken} is not a share: at least 0 and at most 1")


class Fisher(NamedTuple):
    """Diagonal of the loss's Fisher matrix for a weight [out, in], as a product: rows[i]^2 columns[j]^2."""

    rows: Tensor  # [out] float32, positive
    columns: Tensor  # [in] float32, positive


@dataclass(frozen=True)
class Stored:
    """Storage of a weight: a format and its `Params`, the transforms around the matrix, and what is beside it.

    The low-rank part is added to the stored matrix inside of the transforms: Out (M + B^T A) In. The functions of
    compress/formats tell its tensors and bytes, formats/stored.py writes and reads it.
    """

    format: str
    params: Any
    ops: WeightTransforms = NO_TRANSFORMS
    activations: Activations | None = None
    lowrank: LowRank | None = None
    sparsity: InputSparsity | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a linear stays as it is."""
        return self.format == "dense" and self.sparsity is None

    @property
    def has_rest_part(self) -> bool:
        """Whether the low-rank part is that of inputs which are not read, and no part of the weight."""
        return self.sparsity is not None and self.sparsity.has_rest_part

    @property
    def has_in_scale(self) -> bool:
        """Whether the inputs are quantized by a static scale, which is stored."""
        return self.activations is not None and self.activations.scale == "tensor"


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight [out_features, in_features] in the form that goes to disk; `tensors`: all that is stored."""

    stored: Stored
    tensors: dict[str, Tensor]
    shape: tuple[int, int]

    @property
    def format(self) -> str:
        return self.stored.format

    @property
    def params(self) -> Any:
        return self.stored.params

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def bpw(self) -> float:
        """Stored bits per weight, all overhead included."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


class SparseInputs(NamedTuple):
    """What a linear stores for inputs that go unread."""

    sparsity: InputSparsity  # with the share that is reached over the calibration text
    tensors: dict[str, Tensor]
    lowrank: LowRank | None = None  # of the part for these inputs


OutScales = Literal["none", "ones", "rms", "sensitivity", "auto"]
VectorBits = Literal[16, 8]


@dataclass(frozen=True)
class Scheme:
    """Decision of a rule for one linear: the method that chooses the codes and its settings (`Config`)."""

    method: str  # how codes are chosen: a file of compress/quant; its settings stand beside it
    config: Any  # settings of the method
    incoherence: bool | int = False  # choose the codes in a random rotated basis, or behind Hadamard transforms of
    # blocks of so many inputs; by default what suits the method
    activations: Activations | None = None  # quantize the inputs at run time, too: keys of recipe/activations; null:
    # they stay as they are
    lowrank: Correction | None = None  # add a low-rank part: keys of recipe/lowrank; null: none
    two_sided: bool = False  # feed errors back between outputs, too, by the loss's gradients there
    out_scales: OutScales = "none"  # stored scales of the outputs, by which the weight is divided before it is rotated:
    # none; ones, to be trained; rms, of each output's weights; sensitivity, by the loss's gradients, too; auto: rms for
    # linears with 512 inputs or more
    in_vector: bool = False  # store real numbers in place of the signs of the inputs, to be trained; at first the signs
    vector_bits: VectorBits = 16  # [bits] of a stored scale or number, its sign included: 16 or 8
    nested: bool | tuple[int | float, ...] = False  # store levels of fewer bits within the weight, whose parts add up:
    # [2, 4, 8], of which one is `bits`; true: half of its bits, and all; a last 16 (32) is the original itself
    sparsity: Sparsity | None = None  # leave small inputs unread at run time: keys of recipe/sparsity; null: read all

    @property
    def level_bits(self) -> tuple[int | float, ...]:
        """Bits of the levels of a nested weight, rising; () of any other."""
        if isinstance(self.nested, tuple):
            return self.nested
        return (self.config.bits // 2, self.config.bits) if self.nested else ()

    @property
    def levels(self) -> tuple[int, ...]:
        """Names of the levels: their whole bits."""
        return tuple(map(int, self.level_bits))

    @property
    def has_original(self) -> bool:
        """Whether the last level is the original weight, in its own type of so many bits."""
        return bool(self.nested) and self.level_bits[-1:] in ((16,), (32,))

    @property
    def part_configs(self) -> tuple[Any, ...]:
        """Settings of the rounded parts of a nested weight, each level has one more; of any other its own."""
        steps = pairwise((0, *(self.level_bits[:-1] if self.has_original else self.level_bits)))
        return tuple(replace(self.config, bits=high - low) for low, high in steps) if self.nested else (self.config,)


@dataclass(frozen=True)
class Quantized:
    """Result of a weight method: the packed weight, and notes for the report."""

    weight: PackedWeight
    notes: tuple[str, ...] = ()  # fallbacks, retries; each one sentence


@dataclass(frozen=True)
class LayerPlan:
    """Decision for one linear, with its exact stored bytes."""

    spec: LinearSpec
    scheme: Scheme
    stored: Stored
    nbytes: int

    @property
    def bpw(self) -> float:
        return 8 * self.nbytes / self.spec.numel


@dataclass(frozen=True)
class Plan:
    """All that is decided before a weight is touched."""

    layers: tuple[LayerPlan, ...]
    CHOSEN: ClassVar[str] = "kept by the recipe"  # a reason in `kept_reasons`
    GATE: ClassVar[str] = "a gate of a recurrence, which carries errors on"  # reasons of what is left alone by default
    ROUTER: ClassVar[str] = "a router of experts"
    BIASED: ClassVar[str] = "its bias would stay if its weight were dropped"
    kept_reasons: dict[str, str] = field(default_factory=dict)  # linear name -> why it stays as it is
    kept_nbytes: dict[str, int] = field(default_factory=dict)  # source tensor -> bytes of what is not packed
    schemes: dict[str, Scheme] = field(default_factory=dict)  # linear name -> what the recipe decides for it
    tower_layers: tuple[LayerPlan, ...] = ()  # what is quantized of towers, and of decoder blocks that text skips
    draft_layers: tuple[LayerPlan, ...] = ()  # what is quantized of draft heads, by stored names
    chosen_numel: int = 0  # weights of the linears that could be packed, and that the recipe leaves as they are
    tables: tuple[LayerPlan, ...] = ()  # outside of the blocks: embeddings, the output head, or one table for both
    embedding_tables: tuple[str, ...] = ()  # names of those tables whose rows are embeddings
    tables_are_shared: bool = False  # `tables` is one for embeddings and head, with which a transform computes as two
    messages: tuple[str, ...] = ()  # lines that are shown before anything is done
    one_sided: str = ""  # why rounding that the recipe asks to be two-sided is not, "" if it is as asked
    written_numel: int = 0  # parameters of the model that is written
    numel: int = 0  # parameters of the original, a tied table counted once
    unused: tuple[str, ...] = ()  # stored tensors that are nothing of the model, or a further copy of a tied weight

    @property
    def spared_names(self) -> tuple[str, ...]:
        """Return the linears that the recipe would quantize, and that are left alone (compress/model/spared.py)."""
        return tuple(name for name, reason in self.kept_reasons.items() if reason in (self.GATE, self.ROUTER))

    @property
    def packed(self) -> tuple[LayerPlan, ...]:
        return (*self.layers, *self.tower_layers, *self.draft_layers, *self.tables)

    @property
    def quantized_nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.packed)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors, exact."""
        return self.quantized_nbytes + sum(self.kept_nbytes.values())

    @property
    def bpw(self) -> float:
        """Stored bits per packed weight."""
        numel = sum(layer.spec.numel for layer in self.packed)
        return 8 * self.quantized_nbytes / numel if numel else 0.0

    @property
    def unused_nbytes(self) -> dict[str, int]:
        """Bytes of the tensors that are copied and that the model does not use."""
        return {name: self.kept_nbytes[name] for name in self.unused if name in self.kept_nbytes}

    @property
    def whole_bpw(self) -> float:
        """All stored bits of the model per parameter of the original."""
        used = self.nbytes - sum(self.unused_nbytes.values())
        return 8 * used / self.numel if self.numel else 0.0

    @property
    def share(self) -> float:
        """Share of the written parameters that is packed."""
        numel = sum(layer.spec.numel for layer in self.packed if not layer.stored.is_plain)
        return numel / self.written_numel if self.written_numel else 0.0


@dataclass(frozen=True)
class LayerReport:
    """Report of one linear: how it is stored and how far it is from the original."""

    name: str
    shape: tuple[int, int]
    method: str
    stored: Stored
    bpw: float
    nbytes: int
    weight_error: float  # ||W - Q||^2 / ||W||^2
    output_error: float | None  # tr(R H R^T) / tr(W H W^T), over at most 512 rows; None for data-free methods
    tokens: int  # calibration tokens that reached it
    seconds: float
    notes: tuple[str, ...] = ()
    two_sided_error: float | None = None  # tr(E^T H E G) / tr(W^T H W G), over those rows; None without gradients
    lost_rows: float = 0.0  # share of the rows of which nothing is left beside others over 1,000 times as large
