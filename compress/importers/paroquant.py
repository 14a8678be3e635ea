"""Read ParoQuant: AWQ's integers of 4 bits behind scales and rotations of pairs of inputs (arXiv 2511.10645).

qweight, qzeros and scales are those of AWQ, in groups. Inputs are multiplied by channel_scales [1, in]; then in each of
krot rounds theta [krot, in / 2] rotates the pairs (i, j) of inputs of a group that pairs int16 [krot, in] lists, by
their numbers within it: (x_i, x_j) <- (x_i cos + x_j sin, x_j cos - x_i sin). The weight, as AWQ's kernels have it in
float16, takes the rotations in here, the last round first, and the scales; that is float32, rounded once. Experts share
theirs with all of their module: gate_up_weight_theta and so on lie beside their numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.importers import options, scaled, turned
from compress.importers.source import CheckpointSource, Decoded, step
from compress.storage.checkpoint import Readable, StoredTensor

OPTIONS: options.Options = {
    **options.PLAIN_MODULES,
    **{"bits": (4, None), "group_size": (int, None), "krot": (int, None)},
}
GROUP = 128  # inputs that share a scale, and are rotated among each other, where the settings do not say
SHARED = {"gate_proj": "gate_up_weight_", "up_proj": "gate_up_weight_", "down_proj": "down_weight_"}


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    return f"paroquant of 4 bits in groups of {source.number('group_size', GROUP, 2)}"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    weights: dict[str, Readable] = {f"{module}.weight": _weight(source, module) for module in source.ending(".qweight")}
    source.drop(*(f".{prefix}{part}" for prefix in SHARED.values() for part in ("theta", "pairs", "channel_scales")))
    return weights


def _weight(source: CheckpointSource, module: str) -> Decoded:
    size = source.number("group_size", GROUP, 2)
    rotated = turned.awq(source, module, size)
    _, inner = rotated.shape
    theta, pairs, factors = _surroundings(source, module)
    rounds = theta.shape[0] if theta.shape else 0
    expected = {theta: (rounds, inner // 2), pairs: (rounds, inner), factors: (1, inner)}
    for stored, shape in expected.items():
        if stored.shape != shape or inner % size or size % 2:
            raise source.error(
                f"{stored.name} has the shape {list(stored.shape)}, {inner} inputs in groups of {size} ask for "
                f"{list(shape)}"
            )

    def decode(start: int, stop: int) -> Tensor:
        first, second = _places(source, pairs, size)
        angles = theta.read().float()
        columns = rotated.decode(start, stop).float().t().contiguous()  # [in, rows]
        for number in reversed(range(rounds)):
            cos, sin = angles[number].cos()[:, None], angles[number].sin()[:, None]
            one, other = columns[first[number]], columns[second[number]]
            columns[first[number]], columns[second[number]] = cos * one - sin * other, sin * one + cos * other
        return columns.mul_(factors.read().float().view(-1, 1)).t().to(rotated.dtype)

    sources = (*rotated.sources, theta, pairs, factors)
    return Decoded(rotated.name, rotated.dtype, rotated.shape, sources, decode, step(rotated.shape, turned.MULTIPLE))


def _surroundings(source: CheckpointSource, module: str) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
    """Return angles, pairs and scales of a weight: its own, or those of all experts of its module, which are left."""
    types = {"theta": scaled.FLOATS, "pairs": (torch.int16,), "channel_scales": scaled.FLOATS}
    experts, _, last = module.rpartition(".")
    shared = f"{experts.rpartition('.')[0]}.{SHARED.get(last, '')}"
    if f"{module}.theta" not in source.stored and f"{shared}theta" in source.stored:
        kept = {f"{shared}{part}": source.stored.get(f"{shared}{part}") for part in types}
        taken = [source.take(f"{shared}{part}", types[part]) for part in types]
        source.stored.update({name: stored for name, stored in kept.items() if stored is not None})
    else:
        taken = [source.take(f"{module}.{part}", types[part]) for part in types]
    return taken[0], taken[1], taken[2]


def _places(source: CheckpointSource, stored: StoredTensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second inputs of all pairs, int64 [krot, in / 2] each; an input is in one of a round."""
    pairs = stored.read().long().unflatten(1, (-1, size))  # [krot, groups, size]
    if not (pairs.sort(-1).values == torch.arange(size)).all():
        raise source.error(f"{stored.name} does not have every input of a group in one pair; download it again")
    places = (pairs + size * torch.arange(pairs.shape[1])[:, None]).flatten(1)
    return places[:, ::2], places[:, 1::2]
