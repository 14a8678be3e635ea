"""Find the nearest E8P points (QuIP#, arXiv 2402.04396), and the residual codes behind them.

The search folds signs away as in the paper, but in two classes by the parity of the signs, each with its own list of
866 and 661 points that can be nearest; brute force over all 65536 points gives the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats.e8p import DIM, RHO, ball, lookup, magnitudes, odd_sum

CHUNK = 2048  # vectors compared with the grid at a time: 7 MB of scores
JOINED = 1 << 15  # the same on a GPU: 200 MB


class Nearest:
    """Exact search for the nearest E8P points.

    For shift s, z = x - s is compared with points whose coordinate signs have a fixed parity. With the signs of z
    folded into the codes, |z| meets, depending on their parity, an entry of the table as it is or with one coordinate
    negative, and then that coordinate is 1/2 (a larger one is never nearest: the entry with 1/2 there in its stead is
    nearer and has the right parity). Candidates after the nearest are the best of these points only.
    """

    def __init__(self, device: torch.device) -> None:
        entries, odd = magnitudes(), odd_sum()
        place = torch.arange(DIM)
        owner, negative = (entries == 0.5).nonzero(as_tuple=True)  # entries with one coordinate negative
        signed = entries[owner].masked_fill(place == negative[:, None], -0.5)
        self.grid: list[Tensor] = []  # for each parity: points [n, 8]
        self.half: list[Tensor] = []  # half their squared norms
        self.code: list[Tensor] = []  # and their codes where all signs of z are positive
        for parity in (False, True):
            other = odd[owner] != parity
            which = torch.cat([(odd == parity).nonzero()[:, 0], owner[other]])
            flips = torch.cat([torch.zeros(len(which) - int(other.sum())).long(), 1 << negative[other]])
            grid = torch.cat([entries[odd == parity], signed[other]])
            code = which << 8 | flips ^ odd[which].long() << DIM - 1
            self.grid.append(grid.to(device))
            self.half.append(grid.square().sum(1).div(2).to(device))
            self.code.append(code.to(device, torch.int32))
        self.powers = (1 << place).to(device, torch.int32)
        self.ball = ball().to(device)
        self.all = _Joined(torch.cat(self.grid), torch.cat(self.half), torch.cat(self.code), len(self.half[0]))

    def nearest(self, x: Tensor) -> Tensor:
        """Return codes [n] int32 of the nearest points to x [n, 8]."""
        codes, distances = self.candidates(x, 1)
        return codes.gather(1, distances.argmin(1, keepdim=True))[:, 0]

    def staged(self, x: Tensor, bits: int, count: int) -> Tensor:
        """Return codes [n, 2 * count, stages] int32 of the `count` points of each shift nearest to x [n, 8].

        At 3 and 4 bits each has a second code, nearest to what the first leaves.
        """
        codes = self.candidates(x, count)[0][..., None]
        if bits == 2:
            return codes
        rest = (x[:, None] - lookup(codes, 2)).mul_(RHO[bits]).flatten(0, 1)
        if bits == 3:
            second = torch.addmm(self.ball.square().sum(1) / 2, rest, self.ball.T, beta=-1).argmax(1).int()
        else:
            second = self.nearest(rest)
        return torch.cat([codes, second.view(codes.shape)], -1)

    def candidates(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` nearest points of each shift: codes [n, 2 * count] int32, squared distances float32."""
        codes = torch.empty(len(x), 2, count, dtype=torch.int32, device=x.device)
        distances = torch.empty(len(x), 2, count, device=x.device)
        for side, shift in enumerate((0.25, -0.25)):
            z = x - shift
            negative = z < 0
            byte = (negative * self.powers).sum(1, dtype=torch.int32)
            odd = negative.sum(1) % 2 == 1
            z.abs_()
            norm = z.square().sum(1)
            if x.is_cuda:
                at, best = self.all.best(z, odd, count)
                distances[:, side] = norm[:, None] - 2 * best
                codes[:, side] = self.all.code[at] ^ byte[:, None] ^ side
                continue
            for parity, chosen in enumerate((~odd, odd)):
                for rows in chosen.nonzero()[:, 0].split(CHUNK):
                    score = torch.addmm(self.half[parity], z[rows], self.grid[parity].T, beta=-1)
                    best, at = score.max(1, keepdim=True) if count == 1 else score.topk(count)
                    distances[rows, side] = norm[rows, None] - 2 * best
                    codes[rows, side] = self.code[parity][at] ^ byte[rows, None] ^ side
        return codes.flatten(1), distances.flatten(1)


class _Joined(NamedTuple):
    """The points of both parities in one table: more scores, but which vectors have which parity need not be known."""

    grid: Tensor  # [n, 8]
    half: Tensor  # [n]
    code: Tensor  # [n] int32
    even: int  # points of the first parity

    def best(self, z: Tensor, odd: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` best points of the parity of each z [vectors, 8], and their scores, [vectors, count]."""
        parts = []
        for vectors, is_odd in zip(z.split(JOINED), odd.split(JOINED), strict=True):
            score = torch.addmm(self.half, vectors, self.grid.T, beta=-1)
            score[:, : self.even].masked_fill_(is_odd[:, None], -torch.inf)
            score[:, self.even :].masked_fill_(~is_odd[:, None], -torch.inf)
            parts.append(score.topk(count))
        return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
