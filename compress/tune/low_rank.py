"""Train the low-rank parts of a packed model, everything else frozen: against the full model, or block by block.

`train_model`: A and B of all linears together, so that the packed model gives the logits of the original. The loss is
KL(original || packed) on the calibration text. This is the recovery of INT2.1 (arXiv 2306.08162). RILQ (arXiv
2412.01129) says why: at two bits the errors of all layers add up to one of high rank, which no layer can make up for by
itself. One sample in ten is not trained on; if the KL on these does not fall, the parts stay what they were. Both
models are in memory in float32, and the gradients. `tune: {method: end_to_end, trains: low_rank}` does the same with
the packed model alone in memory (compress/tune/end_to_end.py), and is what the recipe `int2-lrec` does.

`train_block`: A and B of one block at a time, so that the block gives what it gave with its own weights for the same
inputs, those of the quantized prefix (mean squared error). As ApiQ-bw (arXiv 2402.05147) without its learned clipping.
One block with its activations is in memory.

Factors are trained in float32 and stored in the 16 bits that they had. The errors of linears in a report are those from
before.

Not done: factors of fewer bits; a target from the full-precision prefix; anything but A and B; gradients through inputs
that are quantized.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.formats import lowrank
from compress.model.blockwise import BlockArgs, BlockInputs, call_block
from compress.model.load import load_model
from compress.numerics import kl
from compress.runtime.linear import PackedLinear
from compress.tune.descend import descend, match, relative_error
from compress.types import Correction, PackedWeight

TOKENS_PER_STEP = 1024
LOGITS = 5  # float32 numbers for each logit that are alive at a time: both models' own, logarithms, gradients
MASTERS = 16  # bytes of a trained parameter: itself, its gradient, two moments
STATES = 4  # times the activations of a forward pass that a forward and a backward pass take
HELD_OUT = 10  # one sample in this many is not trained on
FACTORS = tuple(lowrank.PREFIX + side for side in "ab")


@dataclass(frozen=True)
class LowRankRequest:
    """Training of a whole model, as a recipe asks for it."""

    steps: int
    rate: float
    names: frozenset[str]  # the linears whose parts are trained


class LowRankResult(NamedTuple):
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


def find_request(settings: Mapping[str, Correction | None]) -> LowRankRequest | None:
    """Return what the settings of all linears ask for, the most steps of any; None for no training."""
    trained = {name: part for name, part in settings.items() if part is not None and part.train}
    if not trained:
        return None
    most = max(trained.values(), key=lambda part: part.train)
    return LowRankRequest(most.train, most.train_rate, frozenset(trained))


class TrainingSizes(NamedTuple):
    """Numbers of elements that the memory of a training run depends on."""

    parameters: int  # of the original model
    linears: int  # of these, those that are packed
    packed: int  # bytes of them
    trained: int  # in low-rank parts
    vocabulary: int
    states: int  # of one token in all blocks: what linears read and write, and the residual stream


def whole_workspace(sizes: TrainingSizes, seq_len: int) -> int:
    """Return the bytes that `train_model` takes on a CPU: two float32 models, decoded weights, and one step."""
    models = 4 * (2 * sizes.parameters - sizes.linears) + sizes.packed + 4 * sizes.linears
    step = max(1, TOKENS_PER_STEP // seq_len) * seq_len * 4 * (sizes.states + LOGITS * sizes.vocabulary)
    return models + step + MASTERS * sizes.trained


def block_workspace(weights: int, packed: int, trained: int, states: int) -> int:
    """Return the bytes that `train_block` takes beside the block: its packed copy, decoded, and one batch.

    weights, packed: bytes of the block's; trained: parameters; states: bytes of a forward pass of a batch.
    """
    return weights + packed + STATES * states + MASTERS * trained


def train_model(
    directory: Path, source: Path, tokens: Tensor, request: LowRankRequest, device: str, say: Callable[[str], None]
) -> tuple[LowRankResult, dict[str, Tensor]]:
    """Train the packed checkpoint in `directory` against the original; its files stay as they are.

    Also returns the trained factors by their names on disk, none if they are no better.
    tokens [samples, seq_len], at least 2 samples or the only one is used for both.
    """
    started = time.monotonic()
    kind = "float32" if device == "cpu" else "auto"
    original_model, packed_model = (load_model(path, kind, device) for path in (source, directory))
    layers = {name: packed_model.get_submodule(name) for name in sorted(request.names)}
    held = max(1, len(tokens) // HELD_OUT)
    used, unseen = (tokens[:-held], tokens[-held:]) if len(tokens) > 1 else (tokens, tokens)
    masters = _open(packed_model, layers.values())
    before = _divergence(original_model, packed_model, unseen.to(device))
    batch = max(1, TOKENS_PER_STEP // tokens.shape[1])

    def loss(step: int) -> float:
        say(f"training low-rank parts, step {step + 1} of {request.steps}")
        rows = used[(torch.arange(batch) + step * batch) % len(used)].to(device)
        return _backward(original_model, packed_model, rows)

    descend(masters, request.steps, request.rate, loss)
    for layer in layers.values():
        _close(layer)
    after = _divergence(original_model, packed_model, unseen.to(device))
    seconds, count = time.monotonic() - started, sum(master.numel() for master in masters)
    trained = {f"{name}.{key}": layers[name].get_parameter(key).detach().cpu() for name in layers for key in FACTORS}
    result = LowRankResult(before, after, request.steps, seconds, count, after < before)
    return result, trained if result.improved else {}


def train_block(
    block: nn.Module,
    packed: Mapping[str, PackedWeight],
    settings: Mapping[str, Correction | None],
    batches: BlockInputs,
) -> tuple[dict[str, PackedWeight], str | None]:
    """Train the parts of one loaded block, `packed` by paths in the block; the block itself stays as it is.

    Returns the packed weights, those that were trained anew, and a note; nothing of both changes if no step is asked.
    """
    chosen = {name: part for name, part in settings.items() if part is not None and part.train_blocks}
    if not chosen:
        return dict(packed), None
    most = max(chosen.values(), key=lambda part: part.train_blocks)
    copied = copy.deepcopy(block)
    for name, weight in packed.items():
        copied.set_submodule(name, PackedLinear.from_packed(weight, getattr(block.get_submodule(name), "bias", None)))
    layers = {name: copied.get_submodule(name) for name in sorted(chosen)}
    masters = _open(copied, layers.values())

    def original(hidden: Tensor, call: BlockArgs) -> Tensor:
        return call_block(block, call, hidden)[0]

    def output_with_product(hidden: Tensor, call: BlockArgs) -> Tensor:
        return call_block(copied, call, hidden)[0]

    before = relative_error(original, output_with_product, batches)
    match(masters, most.train_blocks, most.train_rate, original, output_with_product, batches)
    for layer in layers.values():
        _close(layer)
    after = relative_error(original, output_with_product, batches)
    note = f"low-rank parts trained for {most.train_blocks} steps: error of the block {before:.3g} -> {after:.3g}"
    if not after < before:
        return dict(packed), f"{note}; no better, so they stay as they were"
    trained = {name: layer.packed() for name, layer in layers.items() if isinstance(layer, PackedLinear)}
    assert trained.keys() == layers.keys()
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


def _backward(original: nn.Module, packed: nn.Module, tokens: Tensor) -> float:
    """Return the mean KL of the predicted tokens, and leave its gradients behind."""
    with torch.no_grad():
        expected = original(input_ids=tokens, use_cache=False).logits
    with torch.enable_grad():
        mean = _kl(expected, packed(input_ids=tokens, use_cache=False).logits).mean()
        mean.backward()
    return mean.item()


@torch.no_grad()
def _divergence(original: nn.Module, packed: nn.Module, tokens: Tensor) -> float:
    """Return the mean KL(original || packed), in nats a token."""
    total = 0.0
    for row in tokens:
        logits = [model(input_ids=row[None], use_cache=False).logits for model in (original, packed)]
        total += _kl(*logits).double().mean().item()
    return total / len(tokens)


def _kl(original: Tensor, other: Tensor) -> Tensor:
    """Return KL(original || other) [batch * tokens] in nats of logits [batch, tokens, vocabulary]."""
    rows = kl.rows_at_a_time(original.shape[-1])
    pairs = zip(original.flatten(0, 1).split(rows), other.flatten(0, 1).split(rows), strict=True)
    return torch.cat([kl.from_logits(p.float(), q.float()) for p, q in pairs])
