"""Predict the seconds of a run from counts of what it does, times the speeds of the machine; nothing is run.

Counted are the passes over the calibration text, its statistics, the gradients at outputs of linears, and what each
method says of its own work (`work`, beside its `workspace`). A run is not counted whose methods do not say so, or which
searches, learns or tunes: `predict` returns None for it.

Speeds are measured once for a machine. Their times are those of one thread's CPU time, the least of several turns, so
that other programs do not count. They are kept on disk beside the answers of compress/kernels/measured.py, under the
same rules of trust, and measured anew where they cannot be kept. That takes a fraction of a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional

from compress import plugins
from compress.calib import gradient_pass
from compress.kernels import llvm, measured
from compress.model.skeleton import Skeleton
from compress.numerics import products
from compress.quant import two_sided
from compress.run import sizes
from compress.run.job import Job, Prepared
from compress.types import LayerPlan, LinearSpec, Work
from compress.version import __version__

STARTING = 3.0  # [s] of reading headers, tokenizing and checking what is written
OTHER_STEPS = 150  # a weight: loading, measuring its errors, packing, writing, reading back
UPPER = 0.95  # measured: of a whole product's time, what a symmetric one takes with its conversions
GRADIENT_PASSES = 4  # forward, again, and back, which is slower
HEAD_PASSES = 2  # forward and back
ERROR_ROWS = 512  # the most of a weight whose outputs are measured
SCORED = 2  # an attention that weighs tokens takes so many times more
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


class Seconds(NamedTuple):
    """What a run takes."""

    before: float  # until the first block begins
    blocks: float  # from then on

    @property
    def total(self) -> float:
        """All of it."""
        return self.before + self.blocks


def predict(job: Job, prepared: Prepared) -> Seconds | None:
    """Return the seconds of a run; None where counts do not tell."""
    recipe, plan = job.recipe, prepared.plan
    layers = [*plan.layers, *plan.tables]
    if not job.pack or recipe.transform or recipe.tune or recipe.pruning is not None or job.device != "cpu":
        return None
    if any(layer.scheme.lowrank is not None for layer in layers):
        return None
    works = [_work(layer) for layer in layers]
    known = [work for work in works if work is not None]
    if len(known) < len(works):
        return None
    machine = speeds_of_machine(prepared.skeleton.dtype)
    total = Work(sum(work.products for work in known), sum(work.steps for work in known))
    total = total.plus(_statistics(layers, prepared.samples * prepared.seq_len))
    spent = total.products / machine.float32 + total.steps / machine.steps
    spent += _passes(job, prepared, machine)
    threads = torch.get_num_threads()
    return Seconds(STARTING + _gradients(job, prepared, machine) / threads, spent / threads)


def _work(layer: LayerPlan) -> Work | None:
    """Return what quantizing a linear takes beside its statistics; None if its method does not say."""
    rows, columns = layer.spec.shape
    own = Work(0, OTHER_STEPS * rows * columns)
    if layer.scheme.config is None:
        return own
    method = plugins.load("quant", layer.scheme.method)
    if not hasattr(method, "work"):
        return None
    for config in layer.scheme.part_configs:
        own = own.plus(method.work(config, layer.spec.shape))
        own = own.plus(two_sided.work(layer.spec.shape)) if layer.scheme.two_sided else own
    if sizes.needs_statistics(layer):
        own = own.plus(Work(2 * min(rows, ERROR_ROWS) * columns**2, 0))
    return own


def _statistics(layers: list[LayerPlan], tokens: int) -> Work:
    """Return what summing x x^T over the tokens takes; that of experts, which share the tokens, is left out."""
    inputs = {key: users[0].spec for key, users in sizes.readers(layers).items()}
    return Work(sum(UPPER * tokens * spec.shape[1] ** 2 for spec in inputs.values() if not spec.is_expert), 0)


def _passes(job: Job, prepared: Prepared, machine: Speeds) -> float:
    """Return the seconds of one thread for the passes of the text through all blocks."""
    tokens, skeleton = prepared.samples * prepared.seq_len, prepared.skeleton
    if not tokens:
        return 0.0
    linears, attention = _of_token(skeleton.linears(is_needed=False)[0], skeleton, prepared.seq_len)
    weighs = 1 + SCORED * (job.recipe.calibration.importance != "none")
    sides = 2 + int(job.is_paired)
    return tokens * (sides * linears / machine.block + (sides - 1 + weighs) * attention / machine.attention)


def _gradients(job: Job, prepared: Prepared, machine: Speeds) -> float:
    """Return the seconds of one thread for taking gradients, as if none were kept."""
    if prepared.gradients is None or not prepared.gradients.tokens:
        return 0.0
    skeleton, tokens = prepared.skeleton, prepared.gradients.tokens
    in_type = speeds_of_machine(gradient_pass.computed_dtype(skeleton, job.device))
    specs = skeleton.linears(is_needed=False)[0]
    linears, attention = _of_token(specs, skeleton, prepared.seq_len)
    head = HEAD_PASSES * skeleton.vocab_size * skeleton.config.get_text_config().hidden_size
    outputs = sum(UPPER * spec.shape[0] ** 2 for spec in specs if not spec.is_expert)
    each = (GRADIENT_PASSES * linears + head) / in_type.block + (GRADIENT_PASSES + 1) * attention / in_type.attention
    return tokens * (each + outputs / machine.float32)


def _of_token(specs: Iterable[LinearSpec], skeleton: Skeleton, seq_len: int) -> tuple[float, float]:
    """Return the multiply-adds of linears, and those of attention, that a token takes in all blocks."""
    config = skeleton.config.get_text_config()
    linears, blocks = 0.0, set[int]()
    experts = max(1, getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1)
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    for spec in specs:
        linears += spec.shape[0] * spec.shape[1] * (chosen / experts if spec.is_expert else 1)
        blocks.add(spec.block)
    width = getattr(config, "num_attention_heads", 1) * (getattr(config, "head_dim", None) or 0) or config.hidden_size
    return linears, float(len(blocks) * seq_len * width)


@cache
def speeds_of_machine(dtype: torch.dtype) -> Speeds:
    """Return the speeds, with blocks that compute in a type; as kept, or else measured now."""
    about = ("speeds", str(dtype), torch.__version__, torch.backends.cpu.get_cpu_capability(), __version__)
    key = llvm.key("\n".join(about)) if llvm.available() else None
    kept = None if key is None else _read_speeds(llvm.load_object(key))
    if kept is not None:
        return kept
    speeds = measure_speeds(dtype)
    if key is not None:
        llvm.store_object(key, json.dumps(asdict(speeds)).encode())
    return speeds


def measure_speeds(dtype: torch.dtype) -> Speeds:
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


def _read_speeds(content: bytes | None) -> Speeds | None:
    """Return speeds as kept; None for anything else."""
    try:
        values = json.loads(content or b"")
        speeds = Speeds(**{name: float(value) for name, value in values.items()})
    except (ValueError, TypeError, AttributeError):
        return None
    return speeds if all(value > 0 for value in vars(speeds).values()) else None
