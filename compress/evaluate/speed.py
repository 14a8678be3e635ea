"""Time a checkpoint: prefill and decode in tokens a second, and each shape of packed layer beside bfloat16.

What is compared is timed in turns in the same run, so that a busy machine slows all of it alike. Calls go round over
the layers of a shape (and over copies of the bfloat16 weight), so that no weight is found in a cache because it was
just used. On a GPU a round is one CUDA graph.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress import process_memory
from compress.errors import BudgetError
from compress.kernels import dispatch
from compress.model.load import load_model
from compress.model.writing import sequence_nbytes
from compress.runtime.linear import PackedLinear

Call = Callable[[], object]

MIN_SECONDS_PER_KIND = 0.3
MIN_ROUNDS = 5
COPY_NBYTES = {"cpu": 1 << 26, "cuda": 1 << 28}  # the buffer that is copied: larger than caches
ROTATED_NBYTES = {"cpu": 1 << 26, "cuda": 1 << 28}  # the bfloat16 weights that calls go round


@dataclass(frozen=True)
class LayerSpeed:
    """One shape of packed layer, for one call with `rows` activations."""

    shape: tuple[int, int]  # out, in
    format: str
    bpw: float
    count: int  # layers of the model like this one
    kernel: bool  # whether the stored weights are read by a kernel, rather than decoded
    rows: int
    seconds: float
    bytes_per_s: float  # of the stored tensors
    copy_share: float  # of the rate at which memory is copied, read and written bytes counted
    bfloat16_s: float  # F.linear with a bfloat16 weight of this shape

    @property
    def ratio(self) -> float:
        return self.bfloat16_s / self.seconds


@dataclass(frozen=True)
class Speed:
    """Rates that `measure` found, those of all sequences of the batch together."""

    device: str
    threads: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    copy_bytes_per_s: float
    layers: list[LayerSpeed] = field(default_factory=list)
    base: str = ""  # name of the original that was timed in turns with it; "" for none
    base_prefill_tokens_per_s: float | None = None
    base_decode_tokens_per_s: float | None = None

    def plain(self) -> dict[str, Any]:
        """Return the rates as JSON takes them, with `ratio` of each layer."""
        return {**asdict(self), "layers": [{**asdict(layer), "ratio": layer.ratio} for layer in self.layers]}


def measure(
    model: Path,
    device: str = "cpu",
    batch: int = 1,
    prompt_tokens: int = 128,
    new_tokens: int = 32,
    base: Path | None = None,
) -> Speed:
    """Load the checkpoint in bfloat16 and time it; its packed layers one by one, too.

    base: the original, which is loaded beside it and timed in turns with it.
    """
    loaded: list[Any] = [load_model(each, "bfloat16", device) for each in (model, base) if each is not None]
    with torch.inference_mode():
        (prefill, decode), *others = _generation(loaded, batch, prompt_tokens, new_tokens)
        copied = copy_rate(device)
        layers = [_layer(group, batch, copied) for group in _alike(loaded[0])]
    threads = torch.get_num_threads()
    speed = Speed(device, threads, batch, prompt_tokens, new_tokens, prefill, decode, copied, layers)
    if base is None:
        return speed
    rates = others[0]
    return replace(speed, base=base.name, base_prefill_tokens_per_s=rates[0], base_decode_tokens_per_s=rates[1])


def _generation(models: Sequence[Any], batch: int, prompt_tokens: int, new_tokens: int) -> list[tuple[float, float]]:
    """Return tokens a second of the prompt and of what follows, by each model's own generate: the better of two."""
    for model in models:
        _check_size(model, batch, prompt_tokens + new_tokens)
    vocabulary = min(model.get_input_embeddings().num_embeddings for model in models)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (batch, prompt_tokens), generator=generator).to(models[0].device)

    def seconds(model: Any, count: int) -> float:
        start = now(model.device)
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return now(model.device) - start

    for model in models:
        seconds(model, 2)
    turns = [[[seconds(model, count) for model in models] for count in (1, 1 + new_tokens)] for _ in range(2)]
    least = [[min(times) for times in zip(*of_count, strict=True)] for of_count in zip(*turns, strict=True)]
    return [
        (batch * prompt_tokens / first, batch * new_tokens / max(whole - first, 1e-9))
        for first, whole in zip(*least, strict=True)
    ]


def _check_size(model: Any, batch: int, tokens: int) -> None:
    """Raise BudgetError for sequences that cannot be in memory, not even packed as no cache packs them."""
    least = batch * sequence_nbytes(model.config.get_text_config(), tokens) // 16
    if least > process_memory.available():
        raise BudgetError(
            f"{batch} sequences of {tokens} tokens take more than {process_memory.show(least)}, which is not free; "
            "ask for fewer"
        )


def now(device: torch.device) -> float:
    """Return the time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def copy_rate(device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the bytes a second, read and written ones together, of a copy inside the device's memory.

    clock: what counts the seconds of a CPU.
    """
    source = torch.ones(COPY_NBYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (seconds,) = in_turns([[lambda: target.copy_(source)]], device, clock)
    return 2 * source.nbytes / seconds


def _alike(model: nn.Module) -> list[list[PackedLinear]]:
    """Return the packed layers, grouped by shape, format, operations and low-rank part."""
    groups: dict[Any, list[PackedLinear]] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            key = (module.shape, module.format, module.params, module.ops, module.lowrank)
            groups.setdefault(key, []).append(module)
    return list(groups.values())


def _layer(modules: Sequence[PackedLinear], rows: int, copied: float) -> LayerSpeed:
    first = modules[0]
    device = first.get_parameter(next(iter(first.specs))).device
    x = torch.randn(rows, first.in_features, dtype=torch.bfloat16, device=device)
    weights = bfloat16_weights(first.shape, device.type)
    packed = [lambda module=module: module(x) for module in modules]
    plain = [lambda weight=weight: F.linear(x, weight) for weight in weights]
    seconds, bfloat16_s = in_turns([packed, plain], device.type)
    stored = first.packed()
    used = dispatch.taken(first.format, first.params, first.shape, x)
    rate = stored.nbytes / seconds
    return LayerSpeed(
        first.shape, first.format, stored.bpw, len(modules), used, rows, seconds, rate, rate / copied, bfloat16_s
    )


def bfloat16_weights(shape: tuple[int, int], device: str) -> list[Tensor]:
    """Return random weights [out, in], as many as exceed the caches together."""
    count = max(2, math.ceil(ROTATED_NBYTES[device] / (2 * shape[0] * shape[1])))
    return [torch.randn(shape, device=device).bfloat16() for _ in range(count)]


def in_turns(
    kinds: Sequence[Sequence[Call]], device: str, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the median seconds of a call of each kind; the calls of a kind are taken in turn, and so are the kinds.

    clock: what counts the seconds of a CPU.
    """
    rounds = [_graph(calls) if device == "cuda" else _timed_round(calls, clock) for calls in kinds]
    for round in rounds:
        round()  # compiles, decodes, fills caches
    seconds: list[list[float]] = [[] for _ in kinds]
    end, left = time.perf_counter() + MIN_SECONDS_PER_KIND * len(kinds), MIN_ROUNDS
    while left > 0 or time.perf_counter() < end:
        left -= 1
        for times, round in zip(seconds, rounds, strict=True):
            times += round()
    return [statistics.median(times) for times in seconds]


def _timed_round(calls: Sequence[Call], clock: Callable[[], float]) -> Callable[[], list[float]]:
    """Return a round that makes all calls and gives the seconds of each."""

    def round() -> list[float]:
        times = []
        for call in calls:
            start = clock()
            call()
            times.append(clock() - start)
        return times

    return round


def _graph(calls: Sequence[Call]) -> Callable[[], list[float]]:
    """Return a round that replays all calls as one CUDA graph and gives the mean."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def round() -> list[float]:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return [begin.elapsed_time(end) / 1e3 / len(calls)]

    return round
