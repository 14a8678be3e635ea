"""Training of the low-rank parts of a packed model, everything else frozen: against the full model, or block by block.

`whole`: A and B of all linears together, so that the packed model gives the logits of the original: KL(original ||
packed) on the calibration text, AdamW, a cosine from `train_rate` to a twentieth of it. This is the recovery of INT2.1
(arXiv 2306.08162; RILQ, arXiv 2412.01129, on why: at two bits the errors of all layers add up to one of high rank, that
no layer can make up for by itself). One sample in ten is not trained on; if the KL on these does not fall, the parts
stay what they were. Both models are in memory, and the gradients: the cost is that of a few hundred training steps.

`blocks`: A and B of one block at a time, so that the block gives what it gave with its own weights for the same inputs,
those of the quantized prefix (mean squared error). As ApiQ-bw (arXiv 2402.05147) without its learned clipping. One
block with its activations is in memory.

Factors are trained in float32 and stored in the 16 bits that they had. The errors of linears in a report are those from
before.

Not done: factors of fewer bits; a target from the full-precision prefix; anything but A and B; gradients through inputs
that are quantized.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress.errors import NumericalError
from compress.formats import lowrank
from compress.model import load
from compress.numerics import kl
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import StoredTensor, read_header, write_shard
from compress.types import Correction, PackedWeight

BATCH_TOKENS = 1024  # of a step
LOGITS = 8  # float32 numbers for each logit that are alive at a time: both models' own, logarithms, gradients
MASTERS = 16  # bytes of a trained parameter: itself, its gradient, two moments
STATES = 4  # times the activations of a forward pass that a forward and a backward pass take
HELD_OUT = 10  # one sample in this many is not trained on
LAST = 0.05  # of the rate, at the end
WARM_UP = 10  # steps
MOST_NORM = 1.0  # of the gradient
FACTORS = tuple(lowrank.PREFIX + side for side in "ab")

Batch = tuple[Tensor, tuple[Any, ...], Mapping[str, Any]]  # hidden states, other arguments of a block


@dataclass(frozen=True)
class Asked:
    """What the recipe asks of the training of a whole model."""

    steps: int
    rate: float
    names: frozenset[str]  # the linears whose parts are trained


class Result(NamedTuple):
    """KL in nats a token on the samples that were held out."""

    before: float
    after: float
    steps: int
    seconds: float
    parameters: int
    improved: bool  # and so kept

    @property
    def note(self) -> str:
        kept = "" if self.improved else "; no better, so the parts stay as they were"
        return (
            f"low-rank parts ({self.parameters} parameters) trained for {self.steps} steps in {self.seconds:.0f} s: KL "
            f"on held-out calibration text {self.before:.4f} -> {self.after:.4f}{kept}; errors of linears are from "
            "before it"
        )


def asked(settings: Mapping[str, Correction | None]) -> Asked | None:
    """What the recipe asks for, from the settings of every linear; None for no training. The most steps count."""
    trained = {name: part for name, part in settings.items() if part is not None and part.train}
    if not trained:
        return None
    most = max(trained.values(), key=lambda part: part.train)
    return Asked(most.train, most.train_rate, frozenset(trained))


class Sizes(NamedTuple):
    """What the memory of a training run depends on; numbers of elements."""

    parameters: int  # of the original model
    linears: int  # of these, those that are packed
    packed: int  # bytes of them
    trained: int  # in low-rank parts
    vocabulary: int
    states: int  # of one token in all blocks: what linears read and write, and the residual stream


def whole_workspace(sizes: Sizes, seq_len: int) -> int:
    """Bytes that `whole` takes on a CPU: two models in float32, decoded weights kept for gradients, and one step."""
    models = 4 * (2 * sizes.parameters - sizes.linears) + sizes.packed + 4 * sizes.linears
    step = max(1, BATCH_TOKENS // seq_len) * seq_len * 4 * (sizes.states + LOGITS * sizes.vocabulary)
    return models + step + MASTERS * sizes.trained


def block_workspace(weights: int, packed: int, trained: int, states: int) -> int:
    """Bytes that `blocks` takes beside the block: its packed copy, decoded for gradients, and one batch.

    weights, packed: bytes of the block's; trained: parameters; states: bytes of a forward pass of a batch.
    """
    return weights + packed + STATES * states + MASTERS * trained


def whole(
    directory: Path, original: Path, tokens: Tensor, wanted: Asked, device: str, say: Callable[[str], None]
) -> tuple[Result, dict[str, Tensor]]:
    """Train the packed checkpoint in `directory` against the original; its files stay as they are.

    Also returns the trained factors by their names on disk, none if they are no better.
    tokens [samples, seq_len], at least 2 samples or the only one is used for both.
    """
    started = time.monotonic()
    kind = "float32" if device == "cpu" else "auto"
    teacher, student = (load.load_model(path, kind, device) for path in (original, directory))
    layers = {name: student.get_submodule(name) for name in sorted(wanted.names)}
    held = max(1, len(tokens) // HELD_OUT)
    used, unseen = (tokens[:-held], tokens[-held:]) if len(tokens) > 1 else (tokens, tokens)
    masters = _open(student, layers.values())
    before = _divergence(teacher, student, unseen.to(device))
    batch = max(1, BATCH_TOKENS // tokens.shape[1])

    def loss(step: int) -> float:
        say(f"training low-rank parts, step {step + 1} of {wanted.steps}")
        rows = used[(torch.arange(batch) + step * batch) % len(used)].to(device)
        return _backward(teacher, student, rows)

    descend(masters, wanted.steps, wanted.rate, loss)
    for layer in layers.values():
        _close(layer)
    after = _divergence(teacher, student, unseen.to(device))
    seconds, count = time.monotonic() - started, sum(master.numel() for master in masters)
    trained = {f"{name}.{key}": layers[name].get_parameter(key).detach().cpu() for name in layers for key in FACTORS}
    result = Result(before, after, wanted.steps, seconds, count, after < before)
    return result, trained if result.improved else {}


def blocks(
    block: nn.Module,
    packed: Mapping[str, PackedWeight],
    settings: Mapping[str, Correction | None],
    batches: Callable[[], Iterable[Batch]],
) -> tuple[dict[str, PackedWeight], str | None]:
    """Train the parts of one loaded block, `packed` by paths in the block; the block itself stays as it is.

    Returns the packed weights, those that were trained anew, and a note; nothing of both changes if no step is asked.
    """
    chosen = {name: part for name, part in settings.items() if part is not None and part.train_blocks}
    if not chosen:
        return dict(packed), None
    most = max(chosen.values(), key=lambda part: part.train_blocks)
    student = copy.deepcopy(block)
    for name, weight in packed.items():
        student.set_submodule(name, PackedLinear.from_packed(weight, getattr(block.get_submodule(name), "bias", None)))
    layers = {name: student.get_submodule(name) for name in sorted(chosen)}
    masters = _open(student, layers.values())
    stream, former = endless(batches), {name: packed[name] for name in layers}

    def loss(step: int) -> float:
        hidden, args, kwargs = next(stream)
        with torch.no_grad():
            wanted = _states(block(hidden, *args, **kwargs)).float()
        with torch.enable_grad():
            found = _states(student(hidden, *args, **kwargs)).float()
            error = (found - wanted).square().mean() / wanted.square().mean()
            error.backward()
        return error.item()

    before = _error(block, student, batches)
    descend(masters, most.train_blocks, most.train_rate, loss)
    for layer in layers.values():
        _close(layer)
    after = _error(block, student, batches)
    note = f"low-rank parts trained for {most.train_blocks} steps: error of the block {before:.3g} -> {after:.3g}"
    if not after < before:
        return dict(packed), f"{note}; no better, so they stay as they were"
    trained = {name: layer.packed() for name, layer in layers.items() if isinstance(layer, PackedLinear)}
    assert trained.keys() == former.keys()
    return {**packed, **trained}, note


def _open(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Freeze the model, and make float32 parameters of the factors of these layers."""
    model.requires_grad_(False)
    masters = []
    for layer in layers:
        for key in FACTORS:
            master = nn.Parameter(layer.get_parameter(key).detach().float())
            layer.register_parameter(key, master)
            masters.append(master)
    return masters


def _close(layer: nn.Module) -> None:
    """Round the factors to the type that they are stored in."""
    assert isinstance(layer, PackedLinear)
    for key in FACTORS:
        kind = layer.specs[key][1]
        stored = layer.get_parameter(key).detach().to(kind).contiguous()
        layer.register_parameter(key, nn.Parameter(stored, requires_grad=False))


def descend(masters: Sequence[nn.Parameter], steps: int, rate: float, loss: Callable[[int], float]) -> None:
    """AdamW; loss(step) leaves gradients behind. Raises NumericalError where it is not finite."""
    optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=0.0)
    for step in range(steps):
        share = min(1.0, (step + 1) / WARM_UP)
        cosine = LAST + (1 - LAST) * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * share * cosine
        optimizer.zero_grad()
        found = loss(step)
        if not math.isfinite(found):
            raise NumericalError(f"the loss of low-rank parts is {found} at step {step + 1}; lower lowrank.train_rate")
        torch.nn.utils.clip_grad_norm_(masters, MOST_NORM)
        optimizer.step()


def _backward(teacher: nn.Module, student: nn.Module, tokens: Tensor) -> float:
    """Mean KL of the predicted tokens, with its gradients."""
    with torch.no_grad():
        wanted = teacher(input_ids=tokens, use_cache=False).logits
    with torch.enable_grad():
        mean = _kl(wanted, student(input_ids=tokens, use_cache=False).logits).mean()
        mean.backward()
    return mean.item()


@torch.no_grad()
def _divergence(teacher: nn.Module, student: nn.Module, tokens: Tensor) -> float:
    """Mean KL(teacher || student), in nats a token."""
    total = 0.0
    for row in tokens:
        logits = [model(input_ids=row[None], use_cache=False).logits for model in (teacher, student)]
        total += _kl(*logits).double().mean().item()
    return total / len(tokens)


def _kl(original: Tensor, other: Tensor) -> Tensor:
    """Return KL(original || other) [batch * tokens] in nats of logits [batch, tokens, vocabulary]."""
    rows = kl.rows_at_a_time(original.shape[-1])
    pairs = zip(original.flatten(0, 1).split(rows), other.flatten(0, 1).split(rows), strict=True)
    return torch.cat([kl.from_logits(p.float(), q.float()) for p, q in pairs])


@torch.no_grad()
def _error(block: nn.Module, student: nn.Module, batches: Callable[[], Iterable[Batch]]) -> float:
    """Relative squared error of what the block gives, over all batches."""
    error = size = 0.0
    for hidden, args, kwargs in batches():
        wanted, found = (_states(one(hidden, *args, **kwargs)).float() for one in (block, student))
        error += (found - wanted).square().sum(dtype=torch.float64).item()
        size += wanted.square().sum(dtype=torch.float64).item()
    return error / size


def _states(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def endless(batches: Callable[[], Iterable[Any]]) -> Any:
    """Batch after batch, from the first again after the last."""
    while True:
        yield from batches()


def write(path: Path, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
    """Put those of these that a shard has in the place of its tensors of the same names."""
    stored: dict[str, Tensor | StoredTensor] = dict(read_header(path))
    if changed := {name: tensor for name, tensor in tensors.items() if name in stored}:
        write_shard(path, {**stored, **changed})
