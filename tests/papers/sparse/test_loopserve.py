"""LoopServe: the choice at each turn and in between, and the lines of prompts, against slow references in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.papers.sparse import loopserve
from helpers.reading_cases import WIDTH, attended, best, cache, chunks, normal, step

READ = {"method": "loopserve", "keep": 0.2, "alpha": 1.0, "every": 3, "window": 2}
SINK = 3


def wanted(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """The candidates with the most attention of queries [H, n, w] among keys [h, coded, w], bool [h, coded]."""
    scores = torch.einsum("hgnw,hkw->hgnk", queries.unflatten(0, (keys.shape[0], -1)).double(), keys.double())
    return best((scores * WIDTH**-0.5).softmax(-1).mean((1, 2)), count)


@pytest.mark.parametrize("codec", ["identity", "kivi"])
def test_tokens_are_chosen_at_each_turn_and_every_few_tokens(codec: str) -> None:
    made = cache(READ, codec)
    layer: Any = made.layers[0]
    queries, chosen, known, steps, times = torch.zeros(1, 4, 0, WIDTH), None, 0, 0, 0
    for q, k, v in chunks([150, 1, 1, 1, 1, 30, 1, 1], 1):
        coded, turn = layer.candidates(), q.shape[2] > 1
        before = [store.read() for store in layer.stores.values()] if layer.stores else None
        found = step(layer, q, k, v)
        queries = torch.cat((queries, q), 2)[:, :, -2:]
        if before is None or turn:
            chosen = None
            continue
        steps += 1
        keys, values = (torch.cat((b, x), 2) for b, x in zip(before, (k, v), strict=True))
        if chosen is None or steps == 3:
            chosen = wanted(queries[0], keys[0, :, SINK : SINK + coded], math.ceil(0.2 * coded))
            known, steps, times = coded, 0, times + 1
        read = torch.ones(2, keys.shape[2], dtype=torch.bool)
        read[:, SINK : SINK + known] = chosen  # what was coded since is read, too
        expected = attended(q[0, :, 0], keys[0], values[0], read)
        torch.testing.assert_close(found[0, 0].double(), expected, atol=2e-5, rtol=0)
    assert times == 3  # behind both turns, and once after three tokens


def test_a_later_prompt_reads_the_fewest_columns_that_hold_alpha() -> None:
    made = cache({**READ, "alpha": 0.5})
    layer: Any = made.layers[0]
    (q0, k0, v0), (q, k, v) = chunks([150, 30], 1)
    step(layer, q0, k0, v0)
    coded, before = layer.candidates(), [store.read() for store in layer.stores.values()]
    found = step(layer, q, k, v)
    keys, values = (torch.cat((b, x), 2) for b, x in zip(before, (k, v), strict=True))
    past = keys[0, :, SINK : SINK + coded].double()
    scores = torch.einsum("hgnw,hkw->hgnk", q[0, :, -2:].unflatten(0, (2, 2)).double(), past) * WIDTH**-0.5
    mass, columns = scores.softmax(-1).mean((1, 2)), torch.zeros(2, coded, dtype=torch.bool)
    for head in range(2):
        held = 0.0
        for place in mass[head].argsort(descending=True).tolist():
            if held < 0.5:
                columns[head, place] = True
                held += float(mass[head, place])
    assert 0 < columns.sum() < columns.numel() / 2
    for n in range(30):
        read = torch.ones(2, 150 + n + 1, dtype=torch.bool)
        read[:, SINK : SINK + coded] = columns
        seen = slice(0, 150 + n + 1)
        expected = attended(q[0, :, n], keys[0, :, seen], values[0, :, seen], read)
        torch.testing.assert_close(found[0, n].double(), expected, atol=2e-5, rtol=0)


def slow_lines(p: Tensor, rows: list[int], alpha: float) -> tuple[set[int], set[int]]:
    """Columns and diagonals of one head, one line after the other; p [sampled, n] float64."""
    count = p.shape[1]
    diagonals = [sum(float(p[i, r - d]) for i, r in enumerate(rows) if r >= d) for d in range(count)]
    mass = [*p.sum(0).tolist(), *diagonals]
    taken: set[int] = set()
    for line in sorted(range(2 * count), key=lambda at: -mass[at]):
        taken.add(line)
        held = sum(
            float(p[i, j]) for i, r in enumerate(rows) for j in range(r + 1) if j in taken or count + r - j in taken
        )
        if held >= alpha * float(p.sum()):
            break
    return {x for x in taken if x < count}, {x - count for x in taken if x >= count}


@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0])
def test_lines_are_those_of_the_slow_search(alpha: float) -> None:
    rows = torch.tensor([3, 7, 10, 11])
    scores = 2 * normal(2, 4, 12, seed=4)
    p = scores.masked_fill(torch.arange(12) > rows[:, None], -torch.inf).softmax(-1).double()
    columns, diagonals = loopserve.choose_lines(p, rows, alpha)
    for head in range(2):
        assert slow_lines(p[head], rows.tolist(), alpha) == (
            set(columns[head].nonzero()[:, 0].tolist()),
            set(diagonals[head].nonzero()[:, 0].tolist()),
        )


def test_a_first_prompt_is_read_along_its_lines() -> None:
    made = cache({**READ, "alpha": 0.6})
    layer: Any = made.layers[0]
    q, k, v = chunks([80], 1)[0]
    found = step(layer, q, k, v)
    mask = layer.reader.mask_first(
        (q * WIDTH**-0.5).unflatten(1, (2, 2)), k, torch.ones(1, 1, 80, 80, dtype=torch.bool).tril()
    )
    assert layer.reader.prompt_share == pytest.approx(float(mask.sum()) / (4 * 80 * 81 / 2)) and mask.sum() < 4 * 2400
    for n in (0, 41, 79):
        for head in range(4):
            own = mask[0, head, n, : n + 1][None]
            expected = attended(
                q[0, head : head + 1, n],
                k[0, head // 2 : head // 2 + 1, : n + 1],
                v[0, head // 2 : head // 2 + 1, : n + 1],
                own,
            )
            torch.testing.assert_close(found[0, n, head].double(), expected[0], atol=2e-5, rtol=0)
    whole, dense = cache(READ), cache(None)
    assert torch.equal(step(whole.layers[0], q, k, v), step(dense.layers[0], q, k, v))


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_rows_of_a_batch_do_not_meet_and_may_be_moved(alpha: float) -> None:
    read = {**READ, "alpha": alpha}
    data = chunks([150, 1, 30, 1, 1], 3)

    def run(rows: list[int], moved: list[int] | None = None) -> Tensor:
        made, found = cache(read), []
        for at, part in enumerate(data):
            if moved is not None and at == 4:
                made.reorder_cache(torch.tensor(moved))
                rows = [rows[i] for i in moved]
            found.append(step(made.layers[0], *(x[rows] for x in part)))
        return torch.cat([x[:, -1] for x in found[3:]])

    whole = run([0, 1, 2])
    for row in range(3):
        torch.testing.assert_close(whole[row::3], run([row]), atol=2e-5, rtol=0)
    torch.testing.assert_close(run([0, 1, 2], [2, 0, 1])[3:], whole[[5, 3, 4]], atol=2e-5, rtol=0)


def test_what_was_cropped_leaves_nothing() -> None:
    read, data = {**READ, "window": 1}, chunks([150, 40, 1, 1], 1)
    one, other = (cache(read, residual_length=0) for _ in range(2))
    for part in data[:2]:
        step(one.layers[0], *part)
    one.crop(-40)
    step(other.layers[0], *data[0])
    for part in data[2:]:
        torch.testing.assert_close(step(one.layers[0], *part), step(other.layers[0], *part), atol=2e-5, rtol=0)


def test_settings_that_mean_nothing_are_refused() -> None:
    for wrong in ({"alpha": 0.0}, {"keep": 0.0}, {"every": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            loopserve.Config(**wrong)  # type: ignore[arg-type]
