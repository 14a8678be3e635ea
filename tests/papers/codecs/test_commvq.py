"""CommVQ: the identity with the rotary embedding, search and steps against brute force, both readings, bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import CalibrationError, RecipeError
from compress.kv.codec import Spec, rotate
from compress.papers.codecs import additive, commvq
from compress.papers.codecs.additive import CodeSearch

HEADS, WIDTH, QUERIES = 2, 16, 2
SETTINGS: list[dict[str, Any]] = [
    {"bits": 1.0, "entries": 16},
    {"bits": 2.0, "entries": 4, "tied": False, "norm": "token"},
    {"bits": 1.5, "entries": 64, "norm": "head"},
]


def spec(kind: Any, width: int = WIDTH) -> Spec:
    return Spec(kind, 0, 1, HEADS, width, QUERIES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def samples(tokens: int = 400, width: int = WIDTH) -> dict[str, Tensor]:
    """Clusters, so that codebooks have something to learn."""
    own = torch.randint(0, 30, (tokens,), generator=torch.Generator().manual_seed(5))
    x = (3 * normal(30, HEADS, width, seed=1))[own] + 0.5 * normal(tokens, HEADS, width, seed=2) + 2
    queries = normal(tokens, HEADS * QUERIES, width, seed=3) * torch.linspace(0.3, 2, width)
    return {"keys_pre": x, "values": x.flip(0), "queries": queries}


def codec(kind: str, settings: dict[str, Any], width: int = WIDTH) -> commvq.Additive:
    config = commvq.Config(**settings)
    made = commvq.build(config, spec(kind, width), commvq.calibrate(config, spec(kind, width), samples(width=width)))
    assert isinstance(made, commvq.Additive)
    return made


def exactly(made: commvq.Additive) -> commvq.Additive:
    """In float64."""
    made.static = {name: tensor.double() for name, tensor in made.static.items()}
    return made


def numbers(made: commvq.Additive, block: dict[str, Tensor]) -> Tensor:
    """What the codes stand for, in float64, entry by entry."""
    codes = made.codes(block).long()
    x = torch.zeros(*codes.shape[:3], made.spec.width, dtype=torch.float64)
    for head in range(HEADS):
        for place in range(made.count):
            x[:, head] += made.static["tables"][head, place][codes[:, head, :, place]]
    if "norms" in block:
        x = x * made.norms.load(block["norms"])
    return x + made.static["mean"]


def turns(tokens: int, rotary: int) -> dict[str, Tensor]:
    half = rotary // 2
    angle = (torch.arange(tokens).double() + 3)[:, None] * 100.0 ** (-torch.arange(half) / half)
    both = torch.cat((angle, angle), -1)[None]
    return {"cos": both.cos(), "sin": both.sin()}


def test_entries_commute_with_turns() -> None:
    """[[x, -y], [y, x]] R_t = R_t [[x, -y], [y, x]], and a turn by a right angle is one of these."""
    table, t = normal(7, WIDTH).double(), turns(5, WIDTH)
    for token in range(5):
        row = {name: x[:, token : token + 1].expand(-1, 7, -1) for name, x in t.items()}
        one = rotate_double(additive.quarter_turn(table), **row)
        torch.testing.assert_close(one, additive.quarter_turn(rotate_double(table, **row)), atol=1e-15, rtol=0)
    x, y = table[3, : WIDTH // 2], table[3, WIDTH // 2 :]
    a, b = table[1, : WIDTH // 2], table[1, WIDTH // 2 :]
    pair = torch.cat((x - b, y + a))  # C_3 e1 + C_1 e2
    torch.testing.assert_close(pair, table[3] + additive.quarter_turn(table[1]))


def rotate_double(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, width] with cos, sin [1, n, width]."""
    return x * cos[0] + additive.quarter_turn(x) * sin[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rotary", [WIDTH, WIDTH // 2])
def test_scores_without_decoding(settings: dict[str, Any], rotary: int) -> None:
    made, x = exactly(codec("keys", settings)), samples(50)["keys_pre"].transpose(0, 1)[None].expand(2, -1, -1, -1)
    block = {**made.encode(x.double(), {}), **turns(50, rotary)}
    q = normal(2, HEADS, 3, WIDTH, seed=7).double()
    keys, half = numbers(made, block), rotary // 2
    torch.testing.assert_close(made.decode(block), keys, atol=1e-12, rtol=1e-12)
    first, second, rest = keys[..., :half], keys[..., half:rotary], keys[..., rotary:]
    cos, sin = (block[name][:, None, :, :half] for name in ("cos", "sin"))
    keys = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    torch.testing.assert_close(made.direct_scores(q, block), q @ keys.mT, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(made.scores(q.float(), block), (q @ keys.mT).float(), atol=1e-3, rtol=1e-4)
    assert rotate(keys.float(), block["cos"], block["sin"]).shape == keys.shape


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_values_without_decoding(settings: dict[str, Any]) -> None:
    made, x = exactly(codec("values", settings)), samples(60)["values"].transpose(0, 1)[None]
    block, p = made.encode(x.double(), {}), normal(1, HEADS, 3, 60, seed=1).double().softmax(-1) / 2
    expected = p @ numbers(made, block)
    mass = p.sum(-1, keepdim=True)
    torch.testing.assert_close(made.output(made.mix(p, block), mass, {}), expected, atol=1e-12, rtol=1e-12)
    scaled = p * made.norms.load(block["norms"]).mT if "norms" in block else p
    found = made.output(made.direct_mix(scaled, block), mass, {})
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("pairs", [True, False])
def test_search_against_all_sums(pairs: bool) -> None:
    """Greedy codes are those of a plain loop; sweeps never raise the error, and end near the best of all sums."""
    x, tables = normal(1, 60, WIDTH).double(), normal(1, 4, 4, WIDTH, seed=1).double()
    every = torch.cartesian_prod(*(torch.arange(4),) * 4)
    best = torch.cdist(x[0], additive.total(every[None], tables)[0]).square().min(-1)[0]
    errors = []
    for sweeps in (0, 1, 4):
        codes = additive.encode(x, tables, CodeSearch(sweeps, pairs))
        errors.append((x - additive.total(codes, tables)).square().sum(-1)[0])
        single = torch.cat([additive.encode(x[:, i : i + 1], tables, CodeSearch(sweeps, pairs)) for i in range(60)], 1)
        assert torch.equal(codes, single)
    assert (errors[1] <= errors[0] + 1e-9).all() and (errors[2] <= errors[1] + 1e-9).all()
    assert (errors[2] >= best - 1e-9).all() and errors[2].sum() < 1.5 * best.sum()
    if not pairs:
        left, codes = x[0].clone(), []
        for m in range(4):
            codes.append(torch.cdist(left, tables[0, m]).min(-1)[1])
            left -= tables[0, m, codes[-1]]
        assert torch.equal(additive.encode(x, tables, CodeSearch(0, False))[0].long(), torch.stack(codes, -1))


@pytest.mark.parametrize("tied", [True, False])
def test_the_maximization_step_is_least_squares(tied: bool) -> None:
    """Against a dense design matrix, for real numbers: T' N T of the paper with its 0, 1, -1 map."""
    a, m, count = 3, 4, 50
    x = normal(1, count, 8).double()
    codes = torch.randint(0, a, (1, count, m), generator=torch.Generator().manual_seed(0))
    before = additive.all_books(normal(1, m // 2, a, 8, seed=2).double(), True)
    found = additive.solve(*additive.moments(x, codes, a), before, tied)
    books = m // 2 if tied else m
    design = torch.zeros(count, 8, books * a * 8, dtype=torch.float64)
    eye = torch.eye(8, dtype=torch.float64)
    for n in range(count):
        for i in range(m):
            entry = (i // 2 if tied else i) * a + int(codes[0, n, i])
            turn = additive.quarter_turn(eye).mT if tied and i % 2 else eye
            design[n, :, entry * 8 : entry * 8 + 8] += turn
    held = math.sqrt(additive.RIDGE) * torch.eye(design.shape[-1], dtype=torch.float64)
    weight = 2**0.5 if tied else 1.0  # a tied entry stands in two codebooks
    old = additive.own_books(before, tied).flatten()
    rows = torch.cat((design.flatten(0, 1), weight * held))
    expected = torch.linalg.lstsq(rows, torch.cat((x.flatten(), weight * held @ old)), driver="gelsd").solution
    torch.testing.assert_close(additive.own_books(found, tied).flatten(), expected, atol=1e-8, rtol=1e-8)
    losses = [float((x - additive.total(codes, t)).square().sum()) for t in (before, found)]
    assert losses[1] < losses[0]


def test_the_metric_of_keys() -> None:
    """It commutes with right angles; for queries whose pairs have no direction it is the error of scores."""
    one = samples()["queries"].unflatten(1, (HEADS, -1)).transpose(0, 1).flatten(1, 2)
    queries = torch.cat((one, additive.quarter_turn(one)), 1).double()
    factor, errors = commvq.metric(queries), normal(HEADS, 20, WIDTH, seed=4).double()
    torch.testing.assert_close(additive.quarter_turn(errors @ factor), additive.quarter_turn(errors) @ factor)
    felt = (errors @ queries.mT).square().mean(-1)
    size = queries.square().mean((1, 2))[:, None]
    torch.testing.assert_close((errors @ factor).square().sum(-1), felt / size, rtol=0.02, atol=0)


def test_packed_codes() -> None:
    for bits in range(1, 9):
        for count in (1, 5, 30):
            codes = torch.randint(0, 2**bits, (2, 3, count), generator=torch.Generator().manual_seed(bits)).byte()
            rows = commvq.pack(codes, bits)
            assert torch.equal(commvq.unpack(rows, bits, count), codes)
            assert rows.shape[-1] == sum(-(-count * width // 8) for width in commvq.planes(bits))


def test_what_is_refused() -> None:
    for settings, match in (({"bits": 0.0}, "bits 0.0"), ({"entries": 48}, "entries 48"), ({"sweeps": -1}, "sweeps")):
        with pytest.raises(ValueError, match=match):
            commvq.Config(**settings)
    with pytest.raises(RecipeError, match=r"bits 0.5 is less than one stage of two codes takes, 0.75"):
        commvq.check_heads(commvq.Config(bits=0.5), spec("keys"))
    with pytest.raises(RecipeError, match="15 channels of a head make no pairs"):
        commvq.check_heads(commvq.Config(), spec("keys", 15))
    with pytest.raises(CalibrationError, match="63 calibration tokens are too few for 64 entries"):
        commvq.calibrate(commvq.Config(bits=1), spec("values"), samples(63))
