"""Bits of a cache within a budget: against all choices, the published greedy, and what is measured on a pico model."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from compress.errors import BudgetError
from compress.evaluate import cache_error, cache_options
from compress.evaluate.cache_scores import Candidate
from compress.kv import budget, hooks
from compress.kv.budget import Measured
from compress.kv.settings import KINDS, resolve
from pico import build

OFFERED = budget.options((2, 3, 4, 8))
RECIPE = {"method": "kivi", "group_size": 16, "residual_length": 16, "flush": 16, "sink": 2}


def units(layers: int = 3, seed: int = 0) -> list[Measured]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for layer, kind in product(range(layers), KINDS):
        scale = float(torch.rand(1, generator=generator)) + 0.05
        noise = (torch.rand(4, generator=generator) * 0.4 + 0.8).tolist()
        errors = tuple(scale * n * 4.0**-option.bits for n, option in zip(noise, OFFERED, strict=True))
        found.append(Measured(layer, kind, 1000, tuple(int(125 * (o.bits + 1)) for o in OFFERED), errors))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_within_the_budget_has_less_damage(seed: int) -> None:
    measured = units(seed=seed)
    for room in (0, 130, 700, 1500, 10**6):
        asked = budget.problem(measured, OFFERED, 6 * 375 + room)
        found = budget.choose(asked)
        assert asked.nbytes(found.choice) <= asked.budget
        choices = [c for c in product(range(4), repeat=6) if asked.nbytes(c) <= asked.budget]
        best = min(asked.damage(c, budget.MEASURED) for c in choices)
        assert best * (1 - 1e-9) <= found.damage <= 1.02 * best
        assert found.bound <= best * (1 + 1e-9)


def test_the_published_greedy() -> None:
    measured = [Measured(0, "keys", 10, (30, 40, 50, 90), (1.0, 0.0, 0.0, 0.0)), *units(1)[1:]]
    measured[1] = Measured(0, "values", 10, (30, 40, 50, 90), (0.3, 0.0, 0.0, 0.0))
    damages = [{2: 1.0, 3: 0.25, 4: 0.0625, 8: 4.0**-6}, {2: 0.3, 3: 0.075, 4: 0.01875, 8: 0.3 * 4.0**-6}]
    for room in range(0, 130, 10):
        at, left = [2, 2], room
        while True:  # gain a bit of every raise that fits, slowly
            gains = {}
            for i, b in product(range(2), (3, 4, 8)):
                if b > at[i] and 10 * (b - at[i]) <= left:
                    gains[i, b] = (damages[i][at[i]] - damages[i][b]) / (b - at[i])
            if not gains:
                break
            i, b = max(gains, key=lambda pair: gains[pair])
            left -= 10 * (b - at[i])
            at[i] = b
        asked = budget.problem(measured, OFFERED, 60 + room)
        choice = budget.raised(asked)
        assert [asked.units[i].entries[j].bits for i, j in enumerate(choice)] == at, room


def test_a_budget_below_the_fewest_bits() -> None:
    for solver in (budget.choose, budget.raised):
        with pytest.raises(BudgetError, match="the fewest bits take 2250 bytes, more than the budget of 2249"):
            solver(budget.problem(units(), OFFERED, 2249))


def test_what_is_chosen_is_what_the_cache_gets() -> None:
    asked = budget.problem(units(2), OFFERED, 0)
    choice = (0, 3, 2, 1)
    recipe = budget.laid_out({**RECIPE, "layers": {"1": {"keys": {"residual_length": 64}}}}, asked, choice, OFFERED)
    settings = resolve(recipe, 2)
    assert [[layer[kind].config.bits for kind in KINDS] for layer in settings.layers] == [[2, 8], [4, 3]]
    assert settings.layers[1]["keys"].policy.residual_length == 64
    with pytest.raises(ValueError, match="named one by one"):
        budget.laid_out({**RECIPE, "layers": {"0-1": {}}}, asked, choice, OFFERED)


def test_measured_bytes_and_errors() -> None:
    model = build("llama")
    hooks.attach(model)
    windows = torch.randint(0, 250, (2, 160), generator=torch.Generator().manual_seed(0))
    found = cache_options.measure(model, windows, RECIPE, OFFERED[:2], 1000)
    assert [(unit.layer, unit.kind) for unit in found] == [(0, "keys"), (0, "values"), (1, "keys"), (1, "values")]
    for unit in found:
        assert unit.errors[0] > 2 * unit.errors[1] > 0
        assert unit.numel == 2 * 16 * 1000
        tail = 16 + (160 - 2 - 16) % 16  # exact tokens at the end of the window
        coded = 160 - 2 - tail
        for option, nbytes in zip(OFFERED, unit.nbytes, strict=False):
            at_160 = 32 * ((2 + tail) * 4 + coded * (option.bits + 2) / 8)
            assert nbytes == at_160 + 840 * 32 * (option.bits + 2) / 8
    for layer, kind in ((0, "keys"), (1, "values")):
        expected = _alone(model, windows, layer, kind)
        unit = next(unit for unit in found if (unit.layer, unit.kind) == (layer, kind))
        assert unit.errors[0] == pytest.approx(expected, rel=1e-3)


def _alone(model: torch.nn.Module, windows: Tensor, layer: int, kind: str) -> float:
    """The same error from keys and values decoded by hand and put into transformers' cache."""
    config = model.config
    candidate = Candidate("", {**RECIPE, "bits": 2}, {})
    first, last = windows[:, : -cache_error.QUERIES], windows[:, -cache_error.QUERIES :]
    outputs = []

    def keep(module: torch.nn.Module, args: object, output: tuple[Tensor, ...]) -> None:
        outputs.append(output[0].double())

    for coded in (False, True):
        exact, other = DynamicCache(config=config), candidate.cache(config)
        with torch.no_grad():
            model(first, past_key_values=exact)
            model(first, past_key_values=other)
            if coded:  # of the first layer inputs are exact; later ones are coded from exact keys and values again
                store = candidate.cache(config).layers[layer]
                store.update(exact.layers[layer].keys, exact.layers[layer].values)
                setattr(exact.layers[layer], kind, store.stores[kind].read())
            handle = cache_error.attentions(model)[layer].register_forward_hook(keep)
            model(last, past_key_values=exact)
            handle.remove()
    plain, changed = outputs
    return float(((plain - changed).square().sum(-1) / plain.square().sum(-1)).mean())
