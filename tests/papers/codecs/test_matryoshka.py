"""Nested bases: against plain algebra and plain attention, ranks by greedy search, training, both ways to read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kv.codec import Spec
from compress.papers.codecs import matryoshka
from compress.papers.codecs.coefficients import greedy, grid
from helpers.kv_cases import refusal

HEADS, GROUP, WIDTH = 2, 2, 8
COUNT, LENGTH, SINK, TAIL = 3, 40, 3, 6
KINDS = ("keys", "values")


def spec(kind: Any, layer: int = 0) -> Spec:
    return Spec(kind, layer, 2, HEADS, WIDTH, GROUP)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def samples(seed: int = 0) -> dict[str, Tensor]:
    """Keys and values with a mean and a direction of most variance; queries and gradients that ask for another."""
    tokens, fall = COUNT * LENGTH, torch.logspace(0, -1, WIDTH)
    found = {}
    for i, kind in enumerate(KINDS):
        turn = torch.linalg.qr(normal(HEADS, WIDTH, WIDTH, seed=seed + 5 + i))[0]
        mean = normal(HEADS, WIDTH, seed=seed + 3)
        found[kind] = torch.einsum("thc,hdc->thd", normal(tokens, HEADS, WIDTH, seed=seed + i) * fall, turn) + mean
        found[f"{kind}_sink"] = 2 * normal(COUNT, SINK, HEADS, WIDTH, seed=seed + 7 + i)
    found["queries_scaled"] = normal(tokens, HEADS * GROUP, WIDTH, seed=seed + 20) * fall.flip(0)
    found["gradients_output"] = normal(tokens, HEADS * GROUP, WIDTH, seed=seed + 21) * fall.flip(0).sqrt()
    return found


def calibrated(kind: str, **settings: Any) -> dict[str, Tensor]:
    config = matryoshka.Config(**{"exact_tail": TAIL, "unit": 2, **settings})
    return matryoshka.calibrate(config, spec(kind), samples())


def codec(kind: str, ranks: list[int], **settings: Any) -> tuple[matryoshka.Nested, Mapping[str, Tensor]]:
    static = {**calibrated(kind, **settings), "ranks": torch.tensor(ranks, dtype=torch.int32)}
    return matryoshka.Nested(spec(kind), matryoshka.Config(**settings), static), static


def plain(x: Tensor, static: Mapping[str, Tensor], head: int, rank: int) -> Tensor:
    """x [n, WIDTH] of a head -> float64, projected on its first components."""
    back, mean = static["back"][head].double(), static["mean"][head].double()
    z = torch.linalg.solve(back, (x.double() - mean).T).T
    return z[:, :rank] @ back[:, :rank].T + mean


@pytest.mark.parametrize("basis", ["weighted", "orthogonal"])
@pytest.mark.parametrize("ranks", [[5, 3], [4, 4], [1, 8]])
@pytest.mark.parametrize("kind", KINDS)
def test_against_plain_projections(kind: str, ranks: list[int], basis: str) -> None:
    made, static = codec(kind, ranks, basis=basis)
    x = normal(1, HEADS, 30, WIDTH, seed=40)
    block = made.encode(x, {})
    assert block["rows"].shape == (1, 1, 30, sum(ranks)) and block["rows"].dtype == torch.float16
    for head, rank in enumerate(ranks):
        expected = plain(x[0, head], static, head, rank)
        torch.testing.assert_close(made.decode(block)[0, head].double(), expected, atol=8e-3, rtol=2e-3)
        if rank == WIDTH:
            torch.testing.assert_close(expected, x[0, head].double(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("ranks", [[5, 3], [4, 4]])
def test_reading_without_decoding(ranks: list[int], bits: int) -> None:
    x, q = normal(2, HEADS, 30, WIDTH, seed=42) + 1, normal(2, HEADS, 5, WIDTH, seed=43)
    keys, _ = codec("keys", ranks, bits=bits)
    block = keys.encode(x, {})
    expected = q.double() @ keys.decode(block).double().mT
    torch.testing.assert_close(keys.scores(keys.query(q, {}), block).double(), expected, atol=2e-5, rtol=1e-4)
    p = 0.5 * q @ x.mT.softmax(-1)  # of any sum
    values, _ = codec("values", ranks, bits=bits)
    block = values.encode(x, {})
    found = values.output(values.mix(p, block), p.sum(-1, keepdim=True), {})
    torch.testing.assert_close(found.double(), p.double() @ values.decode(block).double(), atol=5e-5, rtol=1e-4)


def slow_damage(kind: str, given: Mapping[str, Tensor], static: Mapping[str, Tensor], head: int, rank: int) -> float:
    """Query by query in float64; every query behind the first TAIL of a sample."""
    states = {k: given[k].double().view(COUNT, LENGTH, HEADS, WIDTH)[:, :, head] for k in KINDS}
    sinks = {k: given[f"{k}_sink"][:, :, head].double() for k in KINDS}
    total = 0.0
    for member in range(GROUP):
        at = head * GROUP + member
        slopes = given["gradients_output"][:, at].double()
        fisher = slopes.T @ slopes / len(slopes)
        for sample, place in itertools.product(range(COUNT), range(TAIL, LENGTH)):
            exact = {k: torch.cat((sinks[k][sample], states[k][sample, : place + 1])) for k in KINDS}
            coded = exact[kind].clone()
            last = place + 1 - TAIL
            coded[SINK : SINK + last] = plain(coded[SINK : SINK + last], static, head, rank)
            q = given["queries_scaled"].view(COUNT, LENGTH, -1, WIDTH)[sample, place, at].double()
            outputs = []
            for cache in (exact, {**exact, kind: coded}):
                outputs.append((cache["keys"] @ q).softmax(0) @ cache["values"])
            difference = outputs[1] - outputs[0]
            total += float(difference @ fisher @ difference)
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_damages_against_plain_attention(kind: str) -> None:
    given = samples()
    static = calibrated(kind)
    ranks = grid(WIDTH, 2)
    assert ranks == [2, 4, 6, 8]
    for head, column in ((0, 0), (1, 1), (1, 2)):
        expected = slow_damage(kind, given, static, head, ranks[column])
        assert float(static["damages"][head, column]) == pytest.approx(expected, rel=2e-3)
    assert float(static["damages"][:, -1].max()) < 1e-6 * float(static["damages"][:, 0].min())


def test_greedy_is_optimal_on_convex_curves() -> None:
    grids = [[2, 4, 6, 8], [2, 4, 6, 8], [3, 6, 7]]
    generator = torch.Generator().manual_seed(3)
    for budget in (8, 13, 17, 22, 23):
        falls = [torch.rand(len(ranks), generator=generator).sort().values for ranks in grids]
        sizes = [torch.tensor(ranks, dtype=torch.float32).diff() for ranks in grids]
        curves = []
        for size, fall in zip(sizes, falls, strict=True):
            steps = size * fall[1:].flip(0)  # a channel more lowers the damage by less
            curves.append(torch.cat((steps.flip(0).cumsum(0).flip(0), torch.zeros(1))))
        found = greedy(curves, grids, budget)
        assert sum(found) <= budget

        def damage(ranks: Any, curves: list[Tensor] = curves) -> float:
            return sum(float(c[g.index(r)]) for c, g, r in zip(curves, grids, ranks, strict=True))

        same = [ranks for ranks in itertools.product(*grids) if sum(ranks) <= sum(found)]
        assert damage(found) == pytest.approx(min(map(damage, same)), abs=1e-6)
    assert greedy(curves, grids, 0) == [2, 2, 3]


def test_layers_and_kinds_share_a_budget() -> None:
    config = matryoshka.Config(keep=0.5, unit=2)
    learned = []
    for layer, kind in itertools.product(range(2), KINDS):
        static = {"damages": torch.tensor([[3.0, 2, 1, 0]] * HEADS) * 100.0 ** (layer + (kind == "values"))}
        learned.append((config, spec(kind, layer), static))
    matryoshka.balance(learned)
    ranks = [static["ranks"].tolist() for _, _, static in learned]
    assert sum(map(sum, ranks)) == 4 * HEADS * WIDTH // 2
    assert ranks == [[2, 2], [2, 2], [2, 6], [8, 8]]  # the keys of layer 1 and the values of layer 0 hurt alike


@pytest.mark.parametrize("kind", KINDS)
def test_the_weighted_basis_loses_least(kind: str) -> None:
    """No projection of this rank, oblique ones of random directions included, loses less in the metric."""
    given, static = samples(), calibrated(kind)
    asked = given["queries_scaled" if kind == "keys" else "gradients_output"].view(-1, HEADS, GROUP, WIDTH)
    x, q = given[kind][:, 0].double(), asked[:, 0].flatten(0, 1).double()
    centred, moment = x - x.mean(0), q.T @ q / len(q)

    def lost(projected: Tensor) -> float:
        return float(((x - projected) @ moment * (x - projected)).sum())

    best = lost(plain(x, static, 0, 3))
    generator = torch.Generator().manual_seed(5)
    back = static["back"][0].double()
    for _ in range(20):
        near = back + 0.05 * back.norm(dim=0) * torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        moved = torch.linalg.solve(near, centred.T).T[:, :3] @ near[:, :3].T + x.mean(0)
        assert lost(moved) > best
    assert best < lost(plain(x, calibrated(kind, basis="orthogonal"), 0, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_training_keeps_the_basis_orthogonal_and_lowers_the_damage(kind: str) -> None:
    first = calibrated(kind, basis="orthogonal")
    found = calibrated(kind, basis="orthogonal", steps=80, rate=1e-2)
    for static in (first, found):
        unit = static["back"].double()
        unit = unit / unit.norm(dim=1, keepdim=True)
        torch.testing.assert_close(unit.mT @ unit, torch.eye(WIDTH).double().expand(HEADS, -1, -1), atol=4e-3, rtol=0)
    ratio = found["damages"][:, :-1] / first["damages"][:, :-1]
    assert float(ratio.log().mean().exp()) < 0.9


def test_what_is_refused() -> None:
    assert "matryoshka is calibrated, but mean is missing" in refusal("matryoshka", spec("keys"), {})
    own = calibrated("keys", unit=4)
    zero = {**own, "ranks": torch.zeros(HEADS, dtype=torch.int32)}
    assert "ranks holds 0, which is not between 1 and 8" in refusal("matryoshka", spec("keys"), zero)
    for settings, match in (({"keep": 0.0}, "keep 0.0"), ({"steps": 5}, "steps 5 train an orthogonal basis")):
        with pytest.raises(ValueError, match=match):
            matryoshka.Config(**settings)
