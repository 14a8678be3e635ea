"""Score whole blocks by LIM and ZD (arXiv 2406.17415), for compress/papers/allocate/layerwise.py.

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


def _keep_blocks(store: Measurements, name: str, by_block: Sequence[float], **more: Any) -> None:
    """Keep a score of blocks as that of their units."""
    store.keep(name, scores={name: {group.name: by_block[group.members[0].block] for group in store.groups}}, **more)
