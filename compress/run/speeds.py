"""Measure what the processor does in a second, once for a machine: what a prediction multiplies its counts with.

Times are those of one thread's CPU time, the least of several turns, so that other programs do not count. They are kept
on disk beside the answers of compress/kernels/measured.py, under the same rules of trust, and measured anew where they
cannot be kept. That takes a fraction of a second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch.nn import functional

from compress.kernels import llvm, measured
from compress.numerics import products
from compress.version import __version__

TOKENS, COLUMNS, OUTPUTS = 512, 576, 768  # the product that is timed
HEADS, HEAD_DIM = 4, 64  # the attention that is timed
NUMBERS = 1 << 14  # float32, stepped over: they stay in the cache


@dataclass(frozen=True)
class Speeds:
    """What one thread does in a second."""

    block: float  # multiply-adds of a block's linears, in the type that it computes in
    float32: float  # multiply-adds of float32 products
    attention: float  # multiply-adds of attention between tokens, those that a causal mask leaves out not counted
    steps: float  # multiplications and additions of a number by a vector loop


@cache
def of_machine(dtype: torch.dtype) -> Speeds:
    """Return the speeds, with blocks that compute in a type; as kept, or else measured now."""
    about = ("speeds", str(dtype), torch.__version__, torch.backends.cpu.get_cpu_capability(), __version__)
    key = llvm.key("\n".join(about)) if llvm.available() else None
    kept = None if key is None else _read(llvm.load_object(key))
    if kept is not None:
        return kept
    speeds = measure(dtype)
    if key is not None:
        llvm.store_object(key, json.dumps(asdict(speeds)).encode())
    return speeds


def measure(dtype: torch.dtype) -> Speeds:
    """Measure the speeds."""
    x, weight = torch.ones(TOKENS, COLUMNS, device="cpu"), torch.ones(OUTPUTS, COLUMNS, device="cpu")
    x16, weight16 = x.to(dtype), weight.to(dtype)
    states = torch.ones(1, HEADS, TOKENS, HEAD_DIM, dtype=dtype, device="cpu")
    a, b, c = (torch.ones(NUMBERS, device="cpu") for _ in range(3))

    def block() -> None:
        with products.Widened():
            functional.linear(x16, weight16)

    def attention() -> None:
        with products.Widened():
            functional.scaled_dot_product_attention(states, states, states, is_causal=True)

    spent = measured.times(
        {
            "block": block,
            "float32": lambda: products.multiply(x, weight),
            "attention": attention,
            "steps": lambda: torch.addcmul(a, b, c, out=c),
        }
    )
    counts = {
        "block": TOKENS * COLUMNS * OUTPUTS,
        "float32": TOKENS * COLUMNS * OUTPUTS,
        "attention": HEADS * TOKENS**2 * HEAD_DIM,  # two products, half of each
        "steps": NUMBERS,
    }
    return Speeds(**{name: 1e9 * count / spent[name] for name, count in counts.items()})


def _read(content: bytes | None) -> Speeds | None:
    """Return speeds as kept; None for anything else."""
    try:
        values = json.loads(content or b"")
        speeds = Speeds(**{name: float(value) for name, value in values.items()})
    except (ValueError, TypeError, AttributeError):
        return None
    return speeds if all(value > 0 for value in vars(speeds).values()) else None
