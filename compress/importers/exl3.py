"""Read EXL3: tiles of 16 x 16 weights whose codes are windows of a stream of bits, between two Hadamard transforms.

`trellis` is int16 [in / 16, out / 16, 16 K]. A tile of K bits a weight is a ring of 256 K bits: words of 32 bits, the
lower half first, read from the highest bit on. Weight t is told by the 16 bits that end behind bit (t + 1) K. Half
rates (16 K + 8 halves of words) take K and K + 1 bits in turn. Weights of a tile are in the order in which tensor cores
hold them.

Which value 16 bits stand for is computed: they are multiplied by a large number, whose bits are two float16 numbers
that are added, or whose bytes are summed. A number of 32 bits beside the weight, `mcg` or `mul1`, tells by its name
which multiplier; without one it is the first version's.

W [in, out] = diag(suh) H M, then the same of outputs: (W H) diag(svh), with H the orthonormal Hadamard matrix of blocks
of 128. suh, svh are float16; older files have su, sv, the bits of signs. The tool multiplies in float16 on a GPU, in an
order of its own. Here products are float64 and rounded once.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from compress.importers import options
from compress.importers.source import CheckpointSource, Decoded, fill_rows, step
from compress.storage.checkpoint import Readable, StoredTensor

OPTIONS: options.Options = {
    **{"bits": options.NUMBER, "head_bits": options.NUMBER, "version": options.TEXT, "codebook": options.TEXT},
    **{"out_scales": options.TEXT, "calibration": (dict, None), "tensor_storage": (dict, None)},
}
TILE, WEIGHTS, WINDOW, BLOCK = 16, 256, 16, 128
CODEBOOKS = {"": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}  # marker -> the multiplier
FIRST_OFFSET = 64248484  # added by the first version
KEPT_BITS, FLIPPED_BITS = 0x8FFF8FFF, 0x3B603B60
SUM_SLOPE, SUM_SHIFT = (np.uint16(bits).view(np.float16).astype(np.float64) for bits in (0x1EEE, 0xC931))
RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8)


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    bits = source.settings.get("bits")
    return f"exl3 of {bits} bits" if bits is not None else "exl3"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    return {f"{module}.weight": _weight(source, module) for module in source.ending(".trellis")}


def _weight(source: CheckpointSource, module: str) -> Decoded:
    stored = source.take(f"{module}.trellis", (torch.int16,))
    markers = [marker for marker in ("mcg", "mul1") if f"{module}.{marker}" in source.stored]
    for marker in markers:
        source.take(f"{module}.{marker}", (torch.int32,), ())
    bits = stored.shape[-1] / TILE if len(stored.shape) == 3 else 0
    if (
        bits not in RATES
        or len(markers) > 1
        or (bits % 1 and markers != ["mul1"])
        or stored.shape[0] * stored.shape[1] == 0
    ):
        raise source.error(
            f"{stored.name} of shape {list(stored.shape)}, {' with '.join(markers) or 'of the first codebook'}, is no "
            "weight that can be read; give the original checkpoint"
        )
    inner, out = TILE * stored.shape[0], TILE * stored.shape[1]
    for size in (inner, out):
        if size % BLOCK:
            raise source.error(f"{stored.name} has {size} rows or columns, which are no whole blocks of {BLOCK}")
    sides = _side(source, module, "su", inner), _side(source, module, "sv", out)
    codebook = markers[0] if markers else ""

    def decode(start: int, stop: int) -> Tensor:
        trellis, (inputs, outputs) = stored.read(), (_scales(side) for side in sides)

        def rows(start: int, stop: int) -> Tensor:
            inside = _tiles(trellis[:, start // TILE : stop // TILE], bits, codebook)  # [in, rows]
            hadamard = _hadamard()
            turned = torch.einsum("ij,bjr->bir", hadamard, inside.view(-1, BLOCK, stop - start)).reshape(inner, -1)
            turned.mul_(inputs[:, None])
            both = (turned.view(inner, -1, BLOCK) @ hadamard).view(inner, -1).mul_(outputs[start:stop])
            return both.t().to(torch.float16)

        return fill_rows(
            (stop - start, inner), torch.float16, lambda a, b: rows(start + a, start + b), step((out, 4 * inner), BLOCK)
        )

    sources = (stored, *sides)
    return Decoded(f"{module}.weight", torch.float16, (out, inner), sources, decode, out)


def _side(source: CheckpointSource, module: str, name: str, size: int) -> StoredTensor:
    """Take the scales of inputs (su) or outputs (sv), or the bits of their signs."""
    if f"{module}.{name}h" in source.stored:
        return source.take(f"{module}.{name}h", (torch.float16,), (size,))
    return source.take(f"{module}.{name}", (torch.int16,), (size // 16,))


def _scales(side: StoredTensor) -> Tensor:
    """Return scales float64 [n]; of bits those that are set are -1."""
    stored = side.read()
    if stored.dtype == torch.float16:
        return stored.double()
    bits = (stored.int()[:, None] >> torch.arange(16)) & 1
    return 1.0 - 2.0 * bits.flatten().double()


def _tiles(trellis: Tensor, bits: float, codebook: str) -> Tensor:
    """Return the weights between the transforms, float64 [in, out], of tiles int16 [in / 16, out / 16, words]."""
    down, across, words = trellis.shape
    stream = (
        trellis.int().bitwise_and(0xFFFF).view(down, across, words // 2, 2).flip(-1).flatten(2)
    )  # highest bits first
    ends = torch.arange(1, WEIGHTS + 1) * int(bits) + (torch.arange(1, WEIGHTS + 1) // 2 if bits % 1 else 0)
    first = (ends - WINDOW) % (16 * words)
    word, shift = first // 16, first % 16
    pairs = stream[..., word] * 65536 + stream[..., (word + 1) % words]
    states = (pairs >> (16 - shift)) & 0xFFFF
    values = torch.empty(down, across, WEIGHTS, dtype=torch.float64)
    values[..., _order()] = _table(codebook)[states]
    return values.view(down, across, TILE, TILE).transpose(1, 2).reshape(down * TILE, across * TILE)


@cache
def _order() -> Tensor:
    """Return the place in a tile, by rows, of each weight of the stream, int64 [256]."""
    weight = torch.arange(WEIGHTS)
    lane, number = weight // 8, weight % 8
    row = 2 * (lane % 4) + torch.tensor((0, 1, 8, 9))[number % 4]
    return row * TILE + lane // 4 + 8 * (number // 4)


@cache
def _table(codebook: str) -> Tensor:
    """Return the value of all windows of 16 bits, float64 [65536], each a float16 number."""
    windows = np.arange(1 << WINDOW, dtype=np.uint64)
    product = windows * np.uint64(CODEBOOKS[codebook]) + np.uint64(0 if codebook else FIRST_OFFSET)
    product = product.astype(np.uint32)
    if codebook == "mul1":
        total = product.view(np.uint8).reshape(-1, 4).sum(1, dtype=np.float64)
        return torch.from_numpy(((1024 + total) * SUM_SLOPE + SUM_SHIFT).astype(np.float16).astype(np.float64))
    halves = ((product & np.uint32(KEPT_BITS)) ^ np.uint32(FLIPPED_BITS)).view(np.float16).astype(np.float64)
    return torch.from_numpy(halves.reshape(-1, 2).sum(1).astype(np.float16).astype(np.float64))


@cache
def _hadamard() -> Tensor:
    """Return the orthonormal Hadamard matrix, float64 [128, 128]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / BLOCK**0.5
