"""Measure and train cut keys and values of one layer on the output of its attention (for matryoshka.py).

An `AttendedText` is the calibration text of one layer, as attention saw it. Queries look back over exact sinks, coded
tokens and the `exact_tail` newest tokens, which are exact, as a cache has them. With o the output of attention for a
query and o' that with coded keys (or values) of so many channels, the damage is

    sum over queries of (o' - o)^T F (o' - o),   F = mean of g g^T, g the gradient of the model's loss by o

for each query head, the second order of the loss with the empirical Fisher matrix in the place of its curvature. It has
the same unit for all layers, heads, keys and values. Training lowers it by the Cayley map, U = U0 (I - A)(I + A)^-1
with A skew and 0 at first, which stays orthogonal: at each step, each head is cut to a rank that is drawn anew, so that
its leading columns come to carry most. The damage at each rank counts relative to that at the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kv.codec import Spec
from compress.kv.codecs.components import components

MEASURED_QUERIES = 512  # damages are sums over about so many
STEP_QUERIES = 64
MIN_DAMAGE = 1e-9  # damages are divided by no less, relative to the largest


class Sight(NamedTuple):
    """What some queries of one sample see: m queries times g query heads of each of h KV heads, n tokens."""

    queries: Tensor  # [h, g m, width], scaled
    keys: Tensor  # [h, n, width]
    values: Tensor  # [h, n, width]
    is_seen: Tensor  # bool [m, n], causal
    is_coded: Tensor  # bool [m, n], a part of those


class AttendedText:
    """The samples of a layer, and what its queries see."""

    def __init__(self, spec: Spec, samples: Mapping[str, Tensor], exact_tail: int) -> None:
        self.spec = spec
        sinks = {kind: samples[f"{kind}_sink"] for kind in ("keys", "values")}
        self.count, self.sink = sinks["keys"].shape[:2]
        self.states = samples[spec.kind]  # tokens, h, width
        self.whole = {
            kind: torch.cat((sinks[kind], samples[kind].unflatten(0, (self.count, -1))), 1).transpose(1, 2)
            for kind in sinks
        }  # samples, h, sink + n, width
        queries = samples["queries_scaled"].unflatten(0, (self.count, -1))
        self.queries = queries.unflatten(2, (spec.heads, -1)).permute(0, 2, 3, 1, 4)  # samples, h, g, n, width
        slopes = samples["gradients_output"].unflatten(1, (spec.heads, -1)).permute(1, 2, 0, 3).double()
        self.fisher = (slopes.mT @ slopes / slopes.shape[2]).to(queries.dtype)  # h, g, width, width
        self.length = queries.shape[1]
        self.tail = min(exact_tail, self.length // 2)
        self.measured = min(max(1, MEASURED_QUERIES // self.count), self.length - self.tail)  # queries of a sample

    def basis(self, is_weighted: bool) -> tuple[Tensor, Tensor]:
        """Return mean [h, width] and back [h, width, width] float64, x = mean + back z with z of unit variance."""
        moment = None
        if is_weighted and self.spec.kind == "keys":
            q = self.queries.permute(1, 0, 2, 3, 4).flatten(1, 3).double()
            moment = q.mT @ q / q.shape[1]
        elif is_weighted:
            moment = self.fisher.double().sum(1)
            size = moment.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
            moment = torch.where(size > 0, moment / size, torch.eye(self.spec.width).to(moment))
        alike = torch.full_like(self.states[..., 0], 1 / len(self.states), dtype=torch.float64)  # weights of tokens
        mean, back, _ = components(self.states, moment, alike, alike)
        return mean, back

    def damages(self, mean: Tensor, back: Tensor, ranks: Sequence[int]) -> Tensor:
        """mean [h, width], back [h, width, width] -> the damage of each of these ranks, float64 [h, len(ranks)]."""
        places = torch.linspace(self.tail, self.length - 1, self.measured).long()
        total = back.new_zeros(self.spec.heads, len(ranks))
        for sample in range(self.count):
            sight = self.sight(sample, places)
            pair = mean.to(sight.keys), back.to(sight.keys), torch.linalg.inv(back).mT.to(sight.keys)
            measure = self._of_keys if self.spec.kind == "keys" else self._of_values
            for at, damage in enumerate(measure(sight, *pair, ranks)):
                total[:, at] += damage.double()
        return total

    def sight(self, sample: int, places: Tensor) -> Sight:
        """Return what the queries at these places (counted behind the sinks) see."""
        keys, values = (self.whole[kind][sample] for kind in ("keys", "values"))
        queries = self.queries[sample][:, :, places].flatten(1, 2)
        at, now = torch.arange(keys.shape[1], device=keys.device), places.to(keys.device)[:, None] + self.sink
        return Sight(queries, keys, values, at <= now, (at >= self.sink) & (at <= now - self.tail))

    def _of_keys(self, sight: Sight, mean: Tensor, back: Tensor, forward: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return damages [h] at each rank, which ascend."""
        exact = self._by_query(sight.queries @ sight.keys.mT)
        output = attend(exact, sight.is_seen, sight.values)
        z, turned = (sight.keys - mean[:, None]) @ forward, sight.queries @ back
        scores = self._by_query(sight.queries @ mean[..., None]).expand_as(exact)
        damages, start = [], 0
        for rank in ranks:
            scores = scores + self._by_query(turned[..., start:rank] @ z[..., start:rank].mT)
            start = rank
            mixed = torch.where(sight.is_coded, scores, exact)
            damages.append(self.felt(attend(mixed, sight.is_seen, sight.values) - output))
        return damages

    def _of_values(
        self, sight: Sight, mean: Tensor, back: Tensor, forward: Tensor, ranks: Sequence[int]
    ) -> list[Tensor]:
        """Return damages [h] at each rank."""
        p = weights(self._by_query(sight.queries @ sight.keys.mT), sight.is_seen) * sight.is_coded
        z = (sight.values - mean[:, None]) @ forward
        mixed = (p.flatten(1, 2) @ z).unflatten(1, p.shape[1:3])  # h, g, m, width
        return [self.felt(mixed[..., rank:] @ back[:, None, :, rank:].mT) for rank in ranks]

    def _by_query(self, rows: Tensor) -> Tensor:
        """[h, g m, n] -> [h, g, m, n]."""
        return rows.unflatten(1, (self.fisher.shape[1], -1))

    def felt(self, difference: Tensor) -> Tensor:
        """Return the damage [h] of a difference [h, g, m, width] of outputs."""
        return ((difference @ self.fisher) * difference).sum((1, 2, 3))

    def train(self, mean: Tensor, back: Tensor, steps: int, rate: float, unit: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return mean and back after so many steps of Adam at this rate; the columns of back are orthogonal."""
        width, heads = self.spec.width, self.spec.heads
        ranks = [*range(unit, width, unit)] or [width]
        base = self.damages(mean, back, ranks) / (self.count * self.measured)
        base = base.clamp(min=MIN_DAMAGE * float(base.max()) + 1e-30).float()
        generator = torch.Generator().manual_seed(seed * 1_000_003 + 2 * self.spec.layer + (self.spec.kind == "keys"))
        with torch.inference_mode(False), torch.enable_grad():
            start = (back / back.norm(dim=1, keepdim=True)).to(self.states.dtype)
            free = torch.zeros(heads, width, width, device=start.device, requires_grad=True)
            centre = mean.to(self.states.dtype).clone().requires_grad_()
            optimizer = torch.optim.Adam([free, centre], lr=rate)
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
                sample = int(torch.randint(self.count, (1,), generator=generator))
                count = min(STEP_QUERIES, self.length - self.tail)
                places = self.tail + torch.randperm(self.length - self.tail, generator=generator)[:count].sort().values
                drawn = torch.randint(len(ranks), (heads,), generator=generator)
                is_kept = (torch.arange(width) < torch.tensor(ranks)[drawn][:, None]).to(start.device)
                loss = self._loss(self.sight(sample, places), centre, start @ cayley(free), is_kept)
                optimizer.zero_grad()
                (loss / count / base.gather(1, drawn.to(base.device)[:, None])[:, 0]).sum().backward()
                optimizer.step()
            mean, basis = centre.detach().double(), start.double() @ cayley(free.detach().double())
        return mean, self.scale_columns(mean, basis)

    def scale_columns(self, mean: Tensor, basis: Tensor) -> Tensor:
        """mean [h, width], basis [h, width, width] orthogonal -> back: columns times what the states measure there."""
        states = self.states.double().transpose(0, 1) - mean[:, None]
        sizes = (states @ basis).square().mean(1).sqrt()
        return basis * sizes.clamp(min=1e-3 * float(sizes.mean()) + 1e-9)[:, None]

    def _loss(self, sight: Sight, mean: Tensor, basis: Tensor, is_kept: Tensor) -> Tensor:
        """Return the damage [h] with the columns of `basis` [h, width, width] that are kept, bool [h, width]."""
        kept = basis * is_kept[:, None]
        exact = self._by_query(sight.queries @ sight.keys.mT)
        if self.spec.kind == "keys":
            z = (sight.keys - mean[:, None]) @ kept
            scores = self._by_query((sight.queries @ kept) @ z.mT + sight.queries @ mean[..., None])
            output = attend(torch.where(sight.is_coded, scores, exact), sight.is_seen, sight.values)
            return self.felt(output - attend(exact, sight.is_seen, sight.values))
        p = weights(exact, sight.is_seen) * sight.is_coded
        centred = sight.values - mean[:, None]
        lost = centred - (centred @ kept) @ kept.mT
        return self.felt((p.flatten(1, 2) @ lost).unflatten(1, p.shape[1:3]))


def cayley(free: Tensor) -> Tensor:
    """free [h, width, width] -> orthogonal matrices (I - A)(I + A)^-1 with A = free - free^T."""
    skew, one = free - free.mT, torch.eye(free.shape[-1]).to(free)
    return torch.linalg.solve(one + skew, one - skew)  # the two factors commute


def weights(scores: Tensor, is_seen: Tensor) -> Tensor:
    """Return the probabilities [h, g, m, n] of scores alike; is_seen bool [m, n]."""
    return scores.masked_fill(~is_seen, torch.finfo(scores.dtype).min).softmax(-1)


def attend(scores: Tensor, is_seen: Tensor, values: Tensor) -> Tensor:
    """scores [h, g, m, n], values [h, n, width] -> outputs [h, g, m, width]."""
    p = weights(scores, is_seen)
    return (p.flatten(1, 2) @ values).unflatten(1, p.shape[1:3])
