"""Run compiled code on tensors that end where memory that may not be read begins, in processes of their own.

    assert guard_pages.run("weights").code == 0  # "cache", "refused", "unchecked"

A read past the end of a tensor ends the process by a signal. "unchecked" shows that it does: without the check of
calibrated tensors, compiled code reads a mean that is too short. Each prints what it did in one line.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from helpers.runs import Result, cli

PAGE = mmap.PAGESIZE
HEADS, WIDTH, TOKENS = 2, 64, 1200
_mapped: list[mmap.mmap] = []  # as long as the process lives


def run(what: str) -> Result:
    """Do one of `TASKS` in a process of its own, which prints what it did."""
    return cli("--version", prepare=f"from helpers import guard_pages\nprint(guard_pages.TASKS[{what!r}]())")


def guarded(tensor: Tensor) -> Tensor:
    """A copy whose last byte is the last one before a page that may not be read."""
    size = -(-tensor.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE)
    _mapped.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(PAGE), 0) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=size - tensor.nbytes)
    return flat.view(tensor.shape).copy_(tensor)


def weights() -> str:
    """Multiply with and decode a weight of each layout; its tensors pass the check."""
    from compress import formats
    from compress.kernels import dispatch
    from compress.types import PackedWeight
    from helpers import cpu_weights

    seen: dict[str, Any] = {}
    for case in cpu_weights.WEIGHTS:
        make, arguments = case.values
        weight = make(*arguments)
        if weight.format in seen and not getattr(weight.params, "outliers", 0):
            continue
        tensors = {name: guarded(tensor) for name, tensor in weight.tensors.items()}
        formats.check(PackedWeight(weight.stored, tensors, weight.shape), weight.format)
        seen[weight.format] = tensors
        for rows in (1, 5, 70):
            x = guarded(torch.randn(rows, weight.shape[1]))
            found = dispatch.product(x, tensors, weight.format, weight.params, weight.shape)
            assert found.shape == (rows, weight.shape[0])
    return f"multiplied with {' '.join(sorted(seen))}"


def calibrated() -> dict[str, Tensor]:
    from compress.kv.codec import Spec
    from compress.kv.codecs import pca
    from compress.kv.settings import KINDS

    samples = {name: torch.randn(600, HEADS, WIDTH) for name in ("keys_pre", "values")}
    samples["queries_pre"] = torch.randn(600, 2 * HEADS, WIDTH)
    static = {}
    for kind in KINDS:
        own = pca.calibrate(pca.Config(), Spec(kind, 0, 1, HEADS, WIDTH, 2), samples)  # type: ignore[arg-type]
        static |= {f"layers.0.{kind}.{name}": tensor for name, tensor in own.items()}
    return static


def too_short(static: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With means of one channel."""
    return {name: tensor[:, :1].clone() if name.endswith(".mean") else tensor for name, tensor in static.items()}


def attend(static: Mapping[str, Tensor]) -> str:
    """Fill a cache and read it, by compiled code where there is some, whose own tensors are guarded, too."""
    from transformers import LlamaConfig

    from compress.kernels import dispatch
    from compress.kv.cache import make_cache
    from compress.kv.layer import CodedLayer
    from compress.kv.settings import KINDS

    kernel = dispatch.kv("cpu", "prerope")
    if kernel is not None:
        transform = kernel.transform
        kernel.transform = lambda *given: _guarded_fields(transform(*given))
    sizes = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH, "num_hidden_layers": 1}
    recipe = {"method": "pca", "bits": 2.0, "sink": 4, "residual_length": 32}
    cache = make_cache(
        LlamaConfig(**sizes), recipe, {name: guarded(tensor) for name, tensor in static.items()}, "fused"
    )
    layer = cache.layers[0]
    assert isinstance(layer, CodedLayer)
    angle = torch.arange(TOKENS)[:, None] * 10000.0 ** -(torch.arange(WIDTH // 2).repeat(2) / (WIDTH // 2))
    layer.turns = angle.cos()[None], angle.sin()[None]
    keys, values, queries = (torch.randn(1, heads, TOKENS, WIDTH) for heads in (HEADS, HEADS, 2 * HEADS))
    layer.update(keys, values)
    layer.commit(queries)
    for kind in KINDS:
        assert layer.stores[kind].read().isfinite().all()
    scores = torch.empty(1, HEADS, 2, TOKENS)
    layer.stores["keys"].scores(torch.randn(1, HEADS, 2, WIDTH), scores)
    assert layer.stores["values"].mix(scores.softmax(-1)).isfinite().all()
    return "read the cache by " + ("plain code" if kernel is None else "compiled code")


def _guarded_fields(made: Any) -> Any:
    return made._replace(back=guarded(made.back), firsts=guarded(made.firsts), mean=guarded(made.mean))


def refused() -> str:
    from compress.errors import RecipeError

    try:
        return attend(too_short(calibrated()))
    except RecipeError as error:
        return f"refused: {error}"


def unchecked() -> str:
    from compress.kv import static

    static.check = lambda *given: None  # type: ignore[assignment]
    return attend(too_short(calibrated()))


TASKS: dict[str, Callable[[], str]] = {
    "weights": weights,
    "cache": lambda: attend(calibrated()),
    "refused": refused,
    "unchecked": unchecked,
}
