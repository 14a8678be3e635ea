"""PVQ of activations: code directions of an input's vectors as points of a pyramid, their lengths apart (2410.16926).

The paper quantizes activations as it does weights. A token, made Gaussian by the rotation in front of the linear
(`incoherence: true`), is cut into vectors of VECTOR_DIM inputs. Each becomes

    scale * level[gain] * y / ||y||        y integer, sum |y| = K

with `scale` of the token in bfloat16 and Lloyd's levels of the Beta-distributed lengths
(compress/papers/quant/pvq.py). Nothing is calibrated, and a token's values depend on nothing but the token. `bits` are
those of a code with its gain, divided by the inputs of a vector; K is the largest that they pay for: 45, 96 and 406 at
3, 4 and 6 bits. The scale's 16 bits for a token come on top, as those of `int` do.

Squared error of Gaussian inputs at 3, 4 and 6 bits: 0.0263, 0.0063, 0.0005; that of `int` with its best clipping
0.048, 0.0131, 0.0009 (512 tokens of 576 inputs).

Differences: the greedy search of the direction and the levels are those of our weights, since only the abstract and
the formulas above were followed. Values are rounded once to the type of the activations.

Not done: a product of integers (y are small integers, but the points of a row of weights and of a token are scaled
differently in each vector); static scales; linears that are cut by columns.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from compress.papers.formats import pvq as pvq_format
from compress.papers.quant.pvq import gain_levels, search
from compress.types import Activations

VECTOR_DIM = 32
GAIN_BITS = 4
CHUNK = 1 << 13  # vectors coded at a time
TINY = 1e-30


def check_inputs(activations: Activations) -> None:
    """Raise ValueError for more bits than points are counted for."""
    if activations.bits > 6:
        raise ValueError(f"bits {activations.bits}: pvq has 2 to 6")


def round_inputs(x: Tensor, activations: Activations) -> Tensor:
    """Return the values [..., n] that tokens x [..., n], float32 and finite, are coded as."""
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x.reshape(-1, columns), (0, -columns % VECTOR_DIM))
    params = pvq_format.Params(VECTOR_DIM, count_pulses(activations.bits), GAIN_BITS)
    levels = gain_levels(params, padded.shape[1]).to(x.device)
    scales = token_scales(padded).repeat_interleave(padded.shape[1] // VECTOR_DIM)
    vectors = padded.view(-1, VECTOR_DIM)
    coded = torch.empty_like(vectors)
    for start in range(0, len(vectors), CHUNK):
        rows = slice(start, start + CHUNK)
        coded[rows] = _round_vectors(vectors[rows], scales[rows], levels, params.pulses)
    return coded.view_as(padded)[:, :columns].reshape(x.shape)


def token_scales(tokens: Tensor) -> Tensor:
    """Return the length [tokens] of a typical vector of each token [tokens, n], a bfloat16 number in float32."""
    largest = tokens.abs().amax(1, keepdim=True).clamp(min=TINY)
    lengths = (tokens / largest).square().mean(1).mul(VECTOR_DIM).sqrt() * largest[:, 0]
    return lengths.bfloat16().float()


@lru_cache
def count_pulses(bits: int) -> int:
    """Return the most pulses of a vector whose point and gain take `bits` for each input."""
    pulses = 1
    while GAIN_BITS + pvq_format.rank_bits(VECTOR_DIM, pulses + 1) <= bits * VECTOR_DIM:
        pulses += 1
    return pulses


def _round_vectors(vectors: Tensor, scales: Tensor, levels: Tensor, pulses: int) -> Tensor:
    """Return the coded values of vectors [n, D]; scales [n]."""
    points = search(vectors, pulses)
    directions = points / points.norm(dim=1, keepdim=True)
    lengths = (vectors * directions).sum(1) / scales.clamp(min=TINY)
    gains = torch.bucketize(lengths.contiguous(), (levels[1:] + levels[:-1]) / 2)
    return directions * (levels[gains] * scales)[:, None]
