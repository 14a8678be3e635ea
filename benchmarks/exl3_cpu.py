"""EXL3's quantizer as a CPU program: OUR RE-IMPLEMENTATION from its description, not the tool itself.

exllamav3 quantizes on NVIDIA GPUs alone. This follows version 1.6 of its quantizer as it was read (its loss, order of
steps, constants and what it stores), shares no code with it, and writes no file that it reads. Figures from here say
what the algorithm reaches, not what the tool takes.

A weight is [in, out]. A tile of 16 x 16 is one circular stream of 256 * bits bits; a weight is `mul1` or `mcg` of the
last 16 bits at its place, places in the order of tensor cores. Steps of one input with the weights that read it:

1. H = mean of x x^T, 0.025 of its mean diagonal added, signs and Hadamard transforms of blocks of 128 on both sides;
2. each weight: outputs divided by their root mean square (relative to the mean) and by random signs, transformed;
   inputs divided by theirs and by the input's signs, transformed; all multiplied by the factor that lowers the error of
   a sample of tiles most, searched on a grid;
3. LDLQ: rows of tiles from the last to the first, what later ones left over fed back through the block LDL factor of H;
   with an output Hessian along both axes, tiles by anti-diagonals;
4. both vectors refitted to the chosen tiles in the metric H, twice in turn, stored as float16.

What differs: the path search is compress's own (compress/quant/viterbi.py: integer costs, and a first search around the
seam alone, paths within 0.2% of the exact error); step 2 tries the finer of the tool's two grids alone, around the
factor at which the weights have the code's own power, on a third of the sampled tiles; a test by which gate and up may
get no output scales is left out, they are always on; stored bits are in plain order, as many as the tool stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.quant.viterbi import Search

TILE, WINDOW = 16, 16  # rows and columns of a tile; bits that give a weight
WEIGHTS = TILE * TILE
CODE_RMS = 1.24371088  # to which inputs are scaled before the factor is searched
DRIFT = {1: 1.08, 1.5: 1.035, 2: 1.018, 2.5: 1.009, 3: 1.004}  # bits -> growth of targets by feedback
STEP = 0.075  # of the grid of factors
SAMPLED = 3  # one of so many tiles of the sample is tried
DAMP = 0.025
TINY = 1e-30

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """What is asked of the quantizer."""

    bits: int
    code: str = "mul1"
    hadamard: int = 128  # size of a transform; inputs and outputs are padded to whole ones
    output_damp: float = DAMP


class Packed(NamedTuple):
    """What EXL3 stores of a linear [in, out]."""

    trellis: Tensor  # int16 [in / 16, out / 16, 16 * bits]
    suh: Tensor  # float16 [in]: signs and scales of inputs
    svh: Tensor  # float16 [out]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, and four of the number that names the code."""
        return sum(part.numel() * part.element_size() for part in self) + 4


class Codes:
    """The search of tiles: values [tiles, 256] by rows -> quantized values and states, states in stored order."""

    def __init__(self, setting: Setting, window: int = WINDOW) -> None:
        self.table = trellis_format.states_table(trellis_format.Params(setting.bits, window, WEIGHTS, setting.code))
        self.search = Search(self.table, window, setting.bits)
        self.order = core_order()

    def encode(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return quantized values [tiles, 256] by rows, and states [tiles, 256] in stored order."""
        states = self.search.encode(tiles[:, self.order].contiguous())
        return self.values(states), states

    def values(self, states: Tensor) -> Tensor:
        """Return what states [tiles, 256] stand for, by rows."""
        values = torch.empty(states.shape)
        values[:, self.order] = self.table[:, 0][states]
        return values


def core_order() -> Tensor:
    """Return the place in a tile, by rows, of each weight of a stream [256]: what a lane of a tensor core holds."""
    places = []
    for lane in range(32):
        rows = [2 * (lane % 4) + step for step in (0, 1, 8, 9)]
        places += [row * TILE + column for column in (lane // 4, lane // 4 + 8) for row in rows]
    return torch.tensor(places)


def transform(x: Tensor, dim: int, size: int) -> Tensor:
    """Apply orthonormal Hadamard matrices to blocks of `size` (a power of two) along a dimension; its own inverse."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    moved = x.movedim(dim, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, size) @ (matrix / size**0.5)
    return blocks.reshape(moved.shape).movedim(-1, dim)


def pad(x: Tensor, size: int) -> Tensor:
    """Add zeros until both dimensions are multiples of `size`."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % size, 0, -x.shape[0] % size))


def block_ldl(hessian: Tensor, size: int = TILE) -> Tensor:
    """Return L - I of H = L D L^T, L unit lower triangular in blocks of `size`."""
    lower = torch.linalg.cholesky(hessian)
    blocks = len(hessian) // size
    diagonal = torch.stack([lower[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(blocks)])
    inverse = torch.linalg.inv(diagonal)
    factor = (lower.view(len(hessian), blocks, size).transpose(0, 1) @ inverse).transpose(0, 1).reshape(hessian.shape)
    for i in range(blocks):
        factor[i * size : (i + 1) * size, i * size : (i + 1) * size] = 0
    return factor


def damped(hessian: Tensor, fraction: float) -> Tensor:
    """Return H with a fraction of its mean diagonal added."""
    return hessian + fraction * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)


def to_tiles(weight: Tensor) -> Tensor:
    """Return the tiles of a weight [in, out], [in / 16, out / 16, 256]."""
    rows, columns = weight.shape
    return weight.view(rows // TILE, TILE, columns // TILE, TILE).transpose(1, 2).reshape(-1, columns // TILE, WEIGHTS)


def from_tiles(tiles: Tensor) -> Tensor:
    """Undo `to_tiles`."""
    down, across, _ = tiles.shape
    return tiles.view(down, across, TILE, TILE).transpose(1, 2).reshape(down * TILE, across * TILE)


def ldlq(weight: Tensor, factor: Tensor, encode: Encode) -> tuple[Tensor, Tensor]:
    """Round rows of tiles from the last to the first; weight [in, out], factor of `block_ldl` of H.

    Returns values [in, out] and states [in / 16, out / 16, 256]. What a row of tiles is rounded from is its weight plus
    the transposed column of L below it times the errors of the rows below.
    """
    error, states = torch.zeros_like(weight), []
    for start in range(len(weight) - TILE, -1, -TILE):
        rows, below = slice(start, start + TILE), slice(start + TILE, None)
        target = torch.addmm(weight[rows], factor[below, rows].T, error[below])
        values, chosen = encode(to_tiles(target)[0])
        error[rows] = weight[rows] - from_tiles(values[None])
        states.append(chosen)
    return weight - error, torch.stack(states[::-1])


def ldlq_two_sided(weight: Tensor, factor: Tensor, output_factor: Tensor, encode: Encode) -> tuple[Tensor, Tensor]:
    """Round by anti-diagonals of tiles from the far corner, errors fed back along both axes (YAQA).

    A tile's target is its part of W + L_in^T E L_out, E of the tiles that are rounded, L with ones on the diagonal.
    """
    inputs = factor + torch.eye(len(factor), dtype=factor.dtype)
    outputs = output_factor + torch.eye(len(output_factor), dtype=factor.dtype)
    tiles, fed = to_tiles(weight), torch.zeros_like(weight)
    down, across, _ = tiles.shape
    values, states = torch.zeros_like(tiles), torch.zeros(tiles.shape, dtype=torch.long)
    for total in range(down + across - 2, -1, -1):
        a = torch.arange(max(0, total - across + 1), min(down - 1, total) + 1)
        c = total - a
        values[a, c], states[a, c] = encode(tiles[a, c] + to_tiles(fed)[a, c])
        error = (tiles[a, c] - values[a, c]).view(-1, TILE, TILE)
        rows = (a[:, None] * TILE + torch.arange(TILE)).flatten()
        columns = c[:, None] * TILE + torch.arange(TILE)
        last_row, last_column = int(rows.max()) + 1, int(columns.max()) + 1  # what lies beyond is rounded
        right = (error @ outputs[columns][:, :, :last_column]).flatten(0, 1)
        fed[:last_row, :last_column] += inputs[rows, :last_row].T @ right
    return from_tiles(values), states


def sample_tiles(weight: Tensor, width: int = 3) -> Tensor:
    """Return tiles along a wrapped diagonal, and those of the largest and least power, [tiles, 256]."""
    tiles = to_tiles(weight)
    down, across, _ = tiles.shape
    steps = torch.arange(max(down, across))[:, None].expand(-1, width)
    taken = [tiles[steps % down, (steps + torch.arange(width)) % across].flatten(0, 1)]
    power, flat = tiles.square().mean(2).flatten(), tiles.flatten(0, 1)
    count = min(max(8, steps.numel() // 16), (len(flat) + 1) // 2)
    return torch.cat([*taken, flat[power.topk(count).indices], flat[power.topk(count, largest=False).indices]])


def search_factor(tiles: Tensor, encode: Encode) -> float:
    """Return the factor on the weights that lowers the squared error of sampled tiles most."""

    def loss(sample: Tensor, factor: float) -> float:
        return float((encode(sample * factor)[0] / factor - sample).square().mean())

    tiles = tiles[::SAMPLED]
    grid = [1 / CODE_RMS + STEP * step for step in (-2, -1, 0, 1, 2)]
    losses = [loss(tiles, factor) for factor in grid]
    best = min(range(5), key=losses.__getitem__)
    if best in (0, 4):
        return grid[best]
    left, middle, right = losses[best - 1 : best + 2]
    bend = left - 2 * middle + right
    offset = 0.5 * (left - right) / bend if bend > 0 else 0.0
    return grid[best] + STEP * max(-0.5, min(0.5, offset))


class Scaled(NamedTuple):
    """A weight as it is rounded: W = diag(su) P weight P diag(sv)."""

    weight: Tensor  # [in, out]
    su: Tensor  # [in]
    sv: Tensor  # [out]


def scale(weight: Tensor, signs: Tensor, codes: Codes, setting: Setting, generator: torch.Generator) -> Scaled:
    """Return a padded weight [in, out] in the basis and scale in which it is rounded; signs [in] are its input's."""
    spread = weight.square().mean(0).sqrt()
    spread = spread / spread.mean().clamp_min(TINY)
    outputs = torch.where(spread < TINY, torch.full_like(spread, 0.1), spread)
    sv = draw_signs(weight.shape[1], generator) * outputs
    turned = transform(weight / sv, 1, setting.hadamard)
    sv = torch.where(spread < TINY, torch.zeros_like(sv), sv)
    inputs = turned.square().mean(1).sqrt()
    su = signs * torch.where(inputs < TINY, torch.full_like(inputs, 0.1), inputs) / CODE_RMS
    turned = transform(turned / su[:, None], 0, setting.hadamard)
    factor = search_factor(sample_tiles(turned) * DRIFT.get(setting.bits, 1.0), codes.encode)
    return Scaled(turned * factor, su / factor, sv)


def draw_signs(count: int, generator: torch.Generator) -> Tensor:
    """Return random signs [count] float32."""
    return torch.randint(0, 2, (count,), generator=generator).float() * 2 - 1


def unscale(scaled: Scaled, size: int) -> Tensor:
    """Return the weight [in, out] in the model's own basis."""
    left = transform(scaled.weight, 0, size) * scaled.su[:, None]
    return transform(left, 1, size) * scaled.sv


def refit(weight: Tensor, values: Tensor, hessian: Tensor, rounds: int = 2) -> tuple[Tensor, Tensor]:
    """Return factors on inputs and outputs of the quantized `values` [in, out] that lower the loss tr(E^T H E)."""
    rows, columns = torch.ones(len(weight)), torch.ones(weight.shape[1])
    pulled = hessian @ weight
    for _ in range(rounds):
        scaled = rows[:, None] * values * columns
        power = (scaled * (hessian @ scaled)).sum(0)
        factor = torch.where(power > TINY, (scaled * pulled).sum(0) / power.clamp_min(TINY), torch.ones_like(power))
        columns, scaled = columns * factor, scaled * factor
        system = (scaled @ scaled.T) * hessian
        system.diagonal().add_(1e-6 * system.diagonal().mean())
        solved = torch.linalg.solve(system, (scaled * pulled).sum(1))
        rows = rows * torch.where(solved.isfinite() & (solved > 0), solved, torch.ones_like(solved))
    return rows, columns


def quantize_readers(
    weights: Sequence[Tensor],
    moment: Tensor,
    setting: Setting,
    seed: int = 0,
    output_moments: Sequence[Tensor] | None = None,
) -> list[Packed]:
    """Quantize the weights [in, out] that read one input, float32; moment: mean of x x^T, [in, in].

    output_moments: of each weight the second moment of the loss's gradients at its outputs, [out, out]; it switches to
    feedback along both axes.
    """
    codes, generator, size = Codes(setting), torch.Generator().manual_seed(seed), setting.hadamard
    hessian = damped(pad(moment.float(), size), DAMP)
    signs = draw_signs(len(hessian), generator)
    rotated = transform(transform(hessian * signs * signs[:, None], 1, size), 0, size)
    factor = block_ldl(rotated)
    padded = [pad(weight.float(), size) for weight in weights]
    scaled = [scale(weight, signs, codes, setting, generator) for weight in padded]
    if output_moments is None:
        values, states = ldlq(torch.cat([each.weight for each in scaled], 1), factor, codes.encode)
        widths = [each.weight.shape[1] for each in scaled]
        rounded = list(zip(values.split(widths, 1), states.split([w // TILE for w in widths], 1), strict=True))
    else:
        pairs = zip(scaled, output_moments, strict=True)
        factors = [_output_factor(each, output, setting) for each, output in pairs]
        both = zip(scaled, factors, strict=True)
        rounded = [ldlq_two_sided(each.weight, factor, outputs, codes.encode) for each, outputs in both]
    return [
        _pack(weight, each, values, states, hessian, setting)
        for weight, each, (values, states) in zip(padded, scaled, rounded, strict=True)
    ]


def _output_factor(scaled: Scaled, moment: Tensor, setting: Setting) -> Tensor:
    """Return the block factor of the output Hessian in the basis of the scaled weight."""
    outputs = pad(moment.float(), setting.hadamard) * scaled.sv * scaled.sv[:, None]
    outputs = transform(transform(outputs, 1, setting.hadamard), 0, setting.hadamard)
    outputs /= outputs.diagonal().mean().clamp_min(TINY)
    outputs.diagonal().add_(setting.output_damp)
    return block_ldl(outputs)


def _pack(weight: Tensor, scaled: Scaled, values: Tensor, states: Tensor, hessian: Tensor, setting: Setting) -> Packed:
    """Refit the vectors and return what is stored."""
    rows, columns = refit(weight, unscale(replace_weight(scaled, values), setting.hadamard), hessian)
    return Packed(pack_states(states, setting.bits), (scaled.su * rows).half(), (scaled.sv * columns).half())


def replace_weight(scaled: Scaled, weight: Tensor) -> Scaled:
    return scaled._replace(weight=weight)


def pack_states(states: Tensor, bits: int) -> Tensor:
    """Return the new bits of each state [.., 256] as words of 16 bits, first bit highest, int16 [.., 16 * bits]."""
    shifts = torch.arange(bits - 1, -1, -1)
    stream = ((states[..., None] >> shifts) & 1).flatten(-2).unflatten(-1, (-1, 16))
    words = (stream << torch.arange(15, -1, -1)).sum(-1)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)


def unpack_states(words: Tensor, bits: int) -> Tensor:
    """Return the states [.., 256]: the 16 bits of the circular stream that end with a weight's own."""
    stream = ((words.long()[..., None] >> torch.arange(15, -1, -1)) & 1).flatten(-2)  # [.., 256 * bits]
    ends = (torch.arange(WEIGHTS) + 1) * bits
    places = (ends[:, None] - WINDOW + torch.arange(WINDOW)) % (WEIGHTS * bits)
    return (stream[..., places] << torch.arange(WINDOW - 1, -1, -1)).sum(-1)


def decode(packed: Packed, setting: Setting, shape: tuple[int, int]) -> Tensor:
    """Return the weight [in, out] of what is stored, float32, without padding."""
    states = unpack_states(packed.trellis, setting.bits)
    codes = Codes(replace(setting))
    values = from_tiles(codes.values(states.flatten(0, 1)).view(states.shape))
    weight = unscale(Scaled(values, packed.suh.float(), packed.svh.float()), setting.hadamard)
    return weight[: shape[0], : shape[1]]
