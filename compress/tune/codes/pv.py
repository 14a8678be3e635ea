"""Codes of vectors and paths follow the largest gradients, a few at a time (PV-Tuning, arXiv 2405.14852).

PV-Tuning (Malinovskii et al. 2024) trains what is continuous by Adam and moves discrete codes in a subspace: a dense
copy of the weights takes the gradient steps, straight through the codes, and only the share of vectors that is
furthest from its code is encoded anew, so that each can move by a whole entry while the weight as a whole changes
little. Scales, codebooks and norms are trained along with it.

What a unit is, and how it is encoded, depends on the format (compress/tune/codes/vectors.py): a vector of `codebook`
takes the nearest entry, eight columns of `e8p` the nearest point with its residual code, and a column of a tile of
`trellis` is searched as a whole, because a code there decides those behind it. Codes move behind every EVERY-th step,
and only where that brings the unit nearer to the dense copy.

- Of codebooks the dense copy is kept (the paper's default): it starts at the stored weight and travels `codes_rate`
  times the root mean square of the quantization error at most; where a code has moved, it goes on from there, since
  vectors overshoot otherwise.
- Of E8P and trellises it starts at the stored weight in every move (the paper's pure V step), and takes one step along
  the gradient since the last move: of the units that are encoded anew, by STEP_SHARE * codes_rate times that root mean
  square. Their units are larger, and AdamW moves all weights alike, so that a kept copy is mostly noise to them.
  Gradients of E8P are in units of their root mean square over each column; a path lies in one column.

Measured on the held-out error of the third block of tests/models/books-8m, 100 steps (`fixed`; a kept copy; a step
along the gradient; the same with scales of columns): E8P 97.7%, 94.1%, 93.5%, 91.5%; a trellis of 10 bits 97.6%, 96.4%,
94.8%, 96.8%; GPTVQ 97.9%, 92.1%, 100%, 98.9%. With three times as many units in a move E8P gained nothing. The
divergence of `e8p2bit` tuned so is 0.0301, 0.0316 with `fixed` (32,704 tokens); that of trellises was not measured.

Differences: the loss is that of a block, not of the model. In place of a beam search, the codes of several stages of a
codebook move one after the other, first the one that lowers the error most.

Not done: lattices, pyramid codes, and codebooks made of factors, which keep their codes (compress/tune/codes/fixed.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.formats import e8p as e8p_format
from compress.formats import trellis as trellis_format
from compress.formats.e8p import DIM
from compress.quant.e8p import Nearest
from compress.quant.viterbi import Search
from compress.tune.codes import vectors
from compress.tune.codes.vectors import TINY, CodebookVectors, Units, in_scales
from compress.tune.trained import Rates, Trained, TrainedWeight, strip_surroundings
from compress.types import PackedWeight

BYTES = 24 + 4 * 4  # [bytes] for each weight, beside what `fixed` takes: a trained number, and what encoding takes
RATE = 2.0  # default of `codes_rate`
EVERY = 5  # steps between moves
STEP_SHARE = 0.5  # the share of `codes_rate` by which weights of E8P and trellises move in a move
CANDIDATES = {2: 1, 3: 8, 4: 8}  # bits of a weight -> first points of each shift
PATHS_PER_SEARCH = 1 << 10
VECTORS_PER_SEARCH = 1 << 14


class Paths(Units):
    """One weight of the format `trellis`; `codes` has one tensor: the stored words.

    A code decides the windows of those behind it, and the last window of a path goes on in the first, so that no part
    of a path can be replaced by itself. The search is the one that chose the path (compress/quant/viterbi.py), for the
    wanted weights in units of the scales; a path is taken only where it is nearer. With scales of rows the search
    weighs all rows alike, and the comparison does not. Searching a weight anew costs about 1.5 * 2^state_bits
    transitions.
    """

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__(packed, [packed.tensors["words"].clone()])
        self.search: Search | None = None

    def set_codes(self, codes: list[Tensor]) -> None:
        """Take these words."""
        self.codes = [each.clone() for each in codes]
        tensors = {**self.packed.tensors, "words": self.codes[0]}
        self.packed = PackedWeight(self.packed.stored, tensors, self.packed.shape)

    def changed_share(self) -> float:
        """Return the share of codes that moved: of the steps of all paths, those with other new bits."""
        params = self.packed.params
        moved, steps = 0, trellis_format.step_bits(params.symbol_bits)
        masks = torch.tensor([(1 << bits) - 1 for bits in steps], device=self.codes[0].device)[:, None]
        for now, first in zip(self._tiles(self.codes[0]), self._tiles(self.first[0]), strict=True):
            different = trellis_format.unpack(now, params) ^ trellis_format.unpack(first, params)
            moved += int((different.unflatten(0, (-1, len(masks))) & masks != 0).sum())
        return moved * params.symbol_bits / (16 * self.codes[0].numel())

    def _tiles(self, words: Tensor) -> Tensor:
        """Return stored words as [tiles, words of a path, in]."""
        params = self.packed.params
        return words.view(-1, params.tile_words, words.shape[1])

    def units(self, matrix: Tensor) -> Tensor:
        """Return the paths [tiles * in, rows of a tile] of a matrix [out, in], tile by tile, zeros behind its end."""
        tile = self.packed.params.tile_rows
        padded = torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % tile))
        return padded.unflatten(0, (-1, tile)).transpose(1, 2).flatten(0, 1)

    @torch.no_grad()
    def encode(self, wanted: Tensor, chosen: Tensor) -> None:
        """Search some paths anew, for rows behind the last one as if these were to stay as they are."""
        tensors, params = self.tensors(), self.packed.params
        search, columns = self._search(tensors.get("table")), self.packed.shape[1]
        words = self._tiles(self.codes[0].clone())
        factors = self._factors(tensors)
        paths, rows = self.units(wanted), torch.arange(params.tile_rows, device=wanted.device)
        for part in chosen.split(PATHS_PER_SEARCH):
            tile, column = part // columns, part % columns
            old = trellis_format.unpack(words[tile, :, column].T.contiguous(), params).T  # path, step
            factor = factors[tile]
            before = search.table[old].flatten(1)
            target = in_scales(paths[part], factor)
            is_stored = tile[:, None] * params.tile_rows + rows < wanted.shape[0]
            target = torch.where(is_stored, target, before)
            states = search.encode(target)
            errors = [
                (factor * (values - target)).square().sum(1) for values in (search.table[states].flatten(1), before)
            ]
            nearer = errors[0] < errors[1]
            states = torch.where(nearer[:, None], states, old)
            words[tile, :, column] = trellis_format.pack(states.T, 1.0, params, None, None)["words"].T
        self.set_codes([words.view(self.codes[0].shape)])

    def _search(self, table: Tensor | None) -> Search:
        """Return the search through what states emit now; only a stored table changes."""
        if self.search is None or table is not None:
            params = self.packed.params
            levels = trellis_format.states_table(params, table).to(self.packed.tensors["words"].device)
            self.search = Search(levels, params.state_bits, params.symbol_bits)
        return self.search

    def _factors(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the factor of each row as it is now, [tiles, rows of a tile]."""
        params = self.packed.params
        rows = trellis_format.padded_rows(params, self.packed.shape[0])
        factors = tensors["scale"].expand(rows)
        if params.row_scales:
            factors = factors * tensors["row_scales"]
        return factors.view(-1, params.tile_rows)


class LatticePoints(Units):
    """One weight of the format `e8p`; `codes` has those of each stage, int32 [out, blocks of 8 columns].

    What a unit is, is scale * row scale * point, so that its nearest point is found in units of these scales. Behind
    each of the CANDIDATES nearest first points of either shift the nearest residual point is taken, and the best sum
    of both.
    """

    by_columns = True

    def __init__(self, packed: PackedWeight) -> None:
        (rows, columns), tensors = packed.shape, packed.tensors
        names = ("codes", "residual")[: 1 if packed.params.bits == 2 else 2]
        blocks = -(-columns // DIM)
        super().__init__(packed, [tensors[name][:rows, :blocks].int() & 0xFFFF for name in names])
        self.search = Nearest(tensors["codes"].device)

    def set_codes(self, codes: list[Tensor]) -> None:
        """Take these codes, and pack them."""
        self.codes = [each.clone() for each in codes]
        params, shape, tensors = self.packed.params, self.packed.shape, self.packed.tensors
        row_scales = tensors["row_scales"][: shape[0]] if params.row_scales else None
        packed = e8p_format.pack(torch.stack(codes, -1), tensors["scale"], row_scales, params, shape)
        self.packed = PackedWeight(self.packed.stored, {**tensors, **packed}, shape)

    def units(self, matrix: Tensor) -> Tensor:
        """Return the vectors [vectors, 8] of a matrix [out, in], zeros behind its end."""
        return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % DIM)).unflatten(1, (-1, DIM)).flatten(0, 1)

    @torch.no_grad()
    def encode(self, wanted: Tensor, chosen: Tensor) -> None:
        """Encode some vectors anew, those at the right edge as if what is behind it were to stay as it is."""
        held = torch.stack(self.codes, -1).flatten(0, 1)  # vector, stage
        factors, bits = self._factors(), self.packed.params.bits
        vectors, blocks = self.units(wanted), self.codes[0].shape[1]
        places = torch.arange(DIM, device=wanted.device)
        for part in chosen.split(VECTORS_PER_SEARCH):
            factor, old = factors[part // blocks], held[part]
            before = e8p_format.lookup(old, bits)
            x = in_scales(vectors[part], factor)
            is_stored = (part % blocks * DIM)[:, None] + places < wanted.shape[1]
            x = torch.where(is_stored, x, before)
            codes = self.search.stage_candidates(x, bits, CANDIDATES[bits])  # vector, candidate, stage
            errors = (e8p_format.lookup(codes, bits) - x[:, None]).square().sum(-1)
            least, best = errors.min(1)
            nearer = least < (before - x).square().sum(-1)
            nearest = codes[torch.arange(len(part), device=part.device), best]
            held[part] = torch.where(nearer[:, None], nearest, old)
        self.set_codes([each.contiguous() for each in held.view(*self.codes[0].shape, -1).unbind(-1)])

    def _factors(self) -> Tensor:
        """Return the factor of each row's points as it is now, [out, 1]."""
        tensors, rows = self.tensors(), self.packed.shape[0]
        if self.packed.params.row_scales:
            return e8p_format.row_scale(tensors["scale"], tensors["row_scales"][:rows])[:, None]
        return tensors["scale"].expand(rows, 1)


def _units(packed: PackedWeight) -> type[LatticePoints] | type[Paths] | type[CodebookVectors] | None:
    """Return what cuts a weight into units, None where its codes stay."""
    if vectors.serves(packed):
        return CodebookVectors
    if packed.format == "e8p":
        return LatticePoints
    return Paths if packed.format == "trellis" else None


def serves(packed: PackedWeight) -> bool:
    """Return whether codes of a weight can move."""
    return _units(packed) is not None


class _Copy:
    """A dense copy that AdamW moves; it is where its codes are, and by how much they have not followed yet."""

    def __init__(self, start: Tensor, error: float, rates: Rates) -> None:
        """error: root mean square of the quantization error."""
        self.dense = Trained(start, unit=rates.travel * error)

    def straight(self) -> Tensor:
        """Return zeros [out, in] through which gradients reach the copy."""
        dense = self.dense.value()
        return dense - dense.detach()

    def find_wanted(self, units: Units, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the matrix [out, in] should be, and the numbers of the units that are to be encoded anew."""
        wanted = self.dense.value()
        distance = units.units(wanted - before).square().sum(-1)
        return wanted, _most(distance, units.share)

    def follow(self, before: Tensor, now: Tensor) -> None:
        """Go on from the matrix where codes have moved."""
        moved = now != before
        self.dense.moved[moved] = ((now - self.dense.start) / self.dense.unit)[moved]


class _Gradient:
    """A step along the gradient since the last move, from where the codes are."""

    def __init__(self, start: Tensor, error: float, rates: Rates) -> None:
        """error: root mean square of the quantization error."""
        self.length = STEP_SHARE * rates.codes_rate * error
        self.probe = nn.Parameter(torch.zeros_like(start))

    def straight(self) -> Tensor:
        """Return zeros [out, in] whose gradient is that of the matrix."""
        return self.probe

    def find_wanted(self, units: Units, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the matrix [out, in] should be, and the numbers of the units that are to be encoded anew."""
        slope = self.probe.grad
        if slope is None:
            return before, torch.empty(0, dtype=torch.long, device=before.device)
        if units.by_columns:
            slope = slope / slope.square().mean(0).sqrt().clamp(min=TINY)
        power = units.units(slope).square().mean(-1)
        chosen = _most(power, units.share)
        return before - self.length / power[chosen].mean().sqrt().clamp(min=TINY) * slope, chosen

    def follow(self, before: Tensor, now: Tensor) -> None:
        """Forget the gradient."""
        self.probe.grad = None


def _most(values: Tensor, share: float) -> Tensor:
    """Return where the largest of values [n] are, a share of them and at least one."""
    return values.topk(max(1, int(share * len(values)))).indices


class Codes(TrainedWeight):
    """One packed weight and its dense copy."""

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates) -> None:
        super().__init__(packed)
        units = _units(packed)
        assert units is not None
        self.units: Units = units(packed)
        with torch.no_grad():
            start = self.units.matrix()
            wanted = strip_surroundings(target, packed)
            error = start if wanted is None else wanted - start
            size = float(error.square().mean().sqrt()) or 1.0
        self.trained = dict(self.units.trained)
        self.target: _Copy | _Gradient
        if units.keeps_copy:
            self.target = _Copy(start, size, rates)
            self.trained["dense"] = self.target.dense
        else:
            self.target = _Gradient(start, size, rates)

    def matrix(self) -> Tensor:
        """Return the stored matrix [out, in], float32; gradients go straight through the codes, too."""
        return self.units.matrix() + self.target.straight()

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        return self.units.around(self.matrix())

    @torch.no_grad()
    def behind(self, step: int) -> None:
        """Encode some units anew, behind every EVERY-th step."""
        if (step + 1) % EVERY:
            return
        before = self.units.matrix()
        wanted, chosen = self.target.find_wanted(self.units, before)
        self.units.encode(wanted, chosen)
        self.target.follow(before, self.units.matrix())

    def keep(self) -> None:
        """Remember the present state as the best."""
        super().keep()
        self.units.keep()

    def restore(self) -> None:
        """Return to the best state."""
        super().restore()
        self.units.restore()

    def changed_share(self) -> float:
        """Return the share of codes that moved."""
        return self.units.changed_share()

    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self.units.pack()
