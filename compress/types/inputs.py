"""Define what becomes of the inputs of a linear at run time: they are quantized, and small ones go unread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

IN_SCALE = "in_scale"  # the stored tensor of a static scale of activations, float32 [1]
IN_THRESHOLD = "in_threshold"  # the stored tensor of thresholds, float32 [1] or [in_features]
Levels = Literal["uniform", "greedy", "evolve"]

INPUT_BLOCKS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "fp8-block": 128}  # dtype -> inputs that share a scale
INPUT_TYPES = ("int", "fp8", *INPUT_BLOCKS)


@dataclass(frozen=True)
class Activations:
    """Quantization of the inputs of a linear at run time: signed and symmetric, after the input transforms.

    q = round(clamp(x / s, -Q, Q)) with Q = 2^(bits - 1) - 1 and s = clip max|x| / Q over a token, or s as calibrated.
    In types with blocks each block has a scale, as compress/runtime/activation_quant.py says.
    """

    bits: int = 8  # [bits] of one activation: 2 to 8; 4 for nvfp4 and mxfp4
    scale: Literal["token", "tensor"] = "token"  # of each token, or one calibrated `in_scale` (int, fp8, nvfp4)
    clip: float = 1.0  # [fraction] of the largest magnitude that is kept; what is larger is clamped
    dtype: str = "int"  # int; fp8: float8_e4m3fn, its largest number 448 in place of Q; a type with blocks: nvfp4 (16
    # inputs), mxfp4 and mxfp8 (32), fp8-block (128); or a file of compress/papers/inputs, which codes tokens: pvq

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits {self.bits} is not between 2 and 8")
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip {self.clip} is not between 0 and 1")
        if self.is_coded and (self.clip != 1 or self.scale != "token"):
            raise ValueError(f"{self.dtype} codes whole tokens; remove clip, and set scale: token")
        if self.dtype in INPUT_TYPES[1:] and self.bits != (own := 4 if self.dtype in ("nvfp4", "mxfp4") else 8):
            raise ValueError(f"bits {self.bits}: {self.dtype} has {own}")
        if self.block and self.clip != 1:
            raise ValueError(f"clip {self.clip}: blocks of {self.dtype} keep their largest magnitude; remove clip")
        if self.scale == "tensor" and self.dtype in ("mxfp4", "mxfp8", "fp8-block"):
            raise ValueError(f"scale tensor: {self.dtype} has scales of blocks alone; set scale: token")

    @property
    def block(self) -> int:
        """Inputs of a token that share a scale; 0: the type has no blocks."""
        return INPUT_BLOCKS.get(self.dtype, 0)

    @property
    def has_token_scale(self) -> bool:
        """Whether a scale is taken from all inputs of a token."""
        return self.scale == "token" and self.dtype in ("int", "fp8", "nvfp4")

    @property
    def is_coded(self) -> bool:
        """Whether a file of compress/papers/inputs rounds whole tokens: the type is none of ours."""
        return self.dtype not in INPUT_TYPES


@dataclass(frozen=True)
class InputSparsity:
    """Inputs that a linear reads at run time: x_j with |x_j| >= in_threshold_j, behind the input transforms.

    y = W (x * mask); with score rank also + B^T A (x * (1 - mask)), the low-rank part being for nothing else. Elsewhere
    a low-rank part belongs to W. Tokens that `tokens` leaves out are multiplied with W alone.
    """

    share: float = 0.5  # [fraction] of inputs that go unread; in a recipe with score rank, of multiplications saved
    score: Literal["magnitude", "weighted", "rank"] = "weighted"  # which inputs are read: those of large |x_j| (TEAL),
    # of |x_j| times the norm of their column of W (WINA), or the same, and a low-rank part stands for the others
    # (R-Sparse)
    tokens: Literal["decode", "all"] = "decode"  # decode: where one token comes at a time; all: of prompts, too

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share {self.share} is not a fraction: at least 0 and less than 1")

    @property
    def has_rest_part(self) -> bool:
        """Whether the low-rank part is given the inputs that are not read, and no others."""
        return self.score == "rank"

    def thresholds(self, in_features: int) -> int:
        """Count the stored thresholds of a linear: one, or one for each input."""
        return 1 if self.score == "magnitude" else in_features


@dataclass(frozen=True)
class Sparsity(InputSparsity):
    """Activation sparsity: inputs of a linear that are small go unread at run time."""

    levels: Levels = "evolve"  # shares of the linears of a block: all alike; or such that its output changes least,
    # raised one at a time (greedy, TEAL) or by an evolutionary search, with score rank of `columns` (R-Sparse)
    columns: float = 0.9  # [fraction] of a linear's multiplications that inputs take which are read; a low-rank part
    # takes the others (score rank)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.columns <= 1:
            raise ValueError(f"columns {self.columns} is not a fraction: above 0 and at most 1")
        if self.has_rest_part and self.levels == "greedy":
            raise ValueError("levels greedy is not for the score rank; set levels: uniform or evolve")

    def for_linear(self, share: float) -> InputSparsity:
        """Return what a linear with this share stores."""
        return InputSparsity(share, self.score, self.tokens)

    def unread(self, columns: float | None = None) -> float:
        """Return the share of inputs that go unread where these take so much of a linear's multiplications."""
        part = (self.columns if columns is None else columns) if self.has_rest_part else 1.0
        return 1 - (1 - self.share) * part

    def rank(self, shape: tuple[int, int], columns: float | None = None) -> int:
        """Return the rank of the low-rank part of a weight [out, in]: at least 1, as what is stored has to have."""
        part = self.columns if columns is None else columns
        left = (1 - self.share) * (1 - part) * shape[0] * shape[1]
        return max(1, min(int(left / sum(shape)), *shape))
