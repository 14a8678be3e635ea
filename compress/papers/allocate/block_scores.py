"""Score whole blocks by LIM and ZD (arXiv 2406.17415), and units by angles, for the allocators beside.

LIM ranks a block by how far it turns the hidden states, ZD, without data, by how many of its weights lie far above the
mean. The paper leaves open over what the cosine is averaged; here it is tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.allocate.sensitivity import Measurements
from compress.model import blockwise
from compress.model.skeleton import Skeleton


@torch.no_grad()
def lim(
    skeleton: Skeleton, tokens: Tensor, file: Path | None = None, device: torch.device | str = "cpu"
) -> list[float]:
    """Return -mean over tokens of cos(input, output) of each block; the larger, the more the block matters."""
    device, scores = torch.device(device), []
    stream = blockwise.HiddenStates(tokens.shape[0], file)
    try:
        calls = blockwise.record_inputs(skeleton, tokens, 1, stream, device)
        for index in range(len(skeleton.blocks)):
            block, name = skeleton.load_block(index, device), skeleton.block_prefix(index).rstrip(".")
            similar = 0.0
            for sample in range(stream.samples):
                before = stream.read(sample, 1).to(device)
                after = blockwise.run_block(block, calls[index][1], before, name)
                similar += nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).double().sum().item()
                stream.write(sample, after)
            scores.append(-similar / tokens.numel())
            skeleton.free()
        return scores
    finally:
        skeleton.free()
        stream.close()


def zd(weights: Iterable[Tensor]) -> float:
    """Return the share of a block's weights that lie more than one standard deviation above their mean.

    The smaller, the more the block matters.
    """
    flat = [weight.detach().flatten() for weight in weights]
    count = sum(weight.numel() for weight in flat)
    mean = sum(weight.sum(dtype=torch.float64).item() for weight in flat) / count
    variance = sum((weight.double() - mean).square().sum().item() for weight in flat) / count
    return sum(int((weight.double() - mean > math.sqrt(variance)).sum()) for weight in flat) / count


def measure_lim(store: Measurements) -> None:
    """Keep the LIM of every block."""
    skeleton = store.source()
    tokens = store.calibration.tokens[: store.samples]
    scores = lim(skeleton, tokens, store.database.folder / "stream", store.opened.job.device)
    _keep_blocks(store, "lim", scores, samples=store.samples)


def measure_zd(store: Measurements) -> None:
    """Keep the ZD of every block."""
    skeleton = store.source()
    scores = []
    for index in range(len(skeleton.blocks)):
        weights = store.originals(skeleton, index)
        scores.append(zd(weights.values()) if weights else 0.0)
    _keep_blocks(store, "zd", scores)


def measure_angles(store: Measurements) -> None:
    """Keep of each unit the mean angle, as a share of pi, between the residual stream in front of it and behind it."""
    skeleton, device = store.source(), torch.device(store.opened.job.device)
    tokens, scores = store.calibration.tokens[: store.samples], dict[str, float]()
    stream = blockwise.HiddenStates(tokens.shape[0], store.database.folder / "stream")
    try:
        calls = blockwise.record_inputs(skeleton, tokens, 1, stream, device)
        for index in range(len(skeleton.blocks)):
            block, name = skeleton.load_block(index, device), skeleton.block_prefix(index).rstrip(".")
            before = [stream.read(sample, 1).to(device) for sample in range(stream.samples)]
            behind = [blockwise.run_block(block, calls[index][1], states, name) for states in before]
            for sample, states in enumerate(behind):
                stream.write(sample, states)
            units = [group for group in store.groups if group.members[0].block == index]
            for number, group in reversed(list(enumerate(units))):
                for member in group.members:
                    skeleton.linear(block, member.name).weight.data.zero_()
                front = [blockwise.run_block(block, calls[index][1], x, name) for x in before] if number else before
                pairs = zip(front, behind, strict=True)
                cosines = [nn.functional.cosine_similarity(a.double(), b.double(), dim=-1) for a, b in pairs]
                scores[group.name] = float(torch.cat(cosines).clamp(-1, 1).arccos().mean()) / math.pi
                behind = front
            skeleton.free()
    finally:
        skeleton.free()
        stream.close()
    store.keep("angular", scores={"angular": scores}, samples=store.samples, forwards=1.0 * tokens.numel())


def _keep_blocks(store: Measurements, name: str, by_block: Sequence[float], **more: Any) -> None:
    """Keep a score of blocks as that of their units."""
    store.keep(name, scores={name: {group.name: by_block[group.members[0].block] for group in store.groups}}, **more)
