"""Shares against gradients of the whole model, rounds against a divergence that does not add up."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import recipe
from compress.allocate import decision, metrics, session
from compress.allocate.methods import knapsack
from compress.allocate.problem import Choice, Problem, Unit, UnitEntry
from compress.allocate.rounds import MAX_FACTOR, rescale
from compress.allocate.sensitivity import Measurements
from compress.progress import silent
from compress.recipe.schema import Target
from compress.run.job import Job
from helpers.pico import save_pico
from helpers.runs import TEXT

RECIPE = """
calibration: {num_samples: 4, seq_len: 24}
quantize: {method: rtn, bits: 4, group_size: 32}
allocate:
  method: knapsack
  estimator: kl_shares
  samples: 2
  options: [{bits: 2}, {bits: 3}, {bits: 5}, {keep: true}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("model") / "llama")


def asked(model: Path, folder: Path, *overrides: str) -> Job:
    path = folder / "mine.yaml"
    path.write_text(RECIPE)
    return Job(str(model), recipe.load(str(path), overrides), folder / "out", calib=str(TEXT))


@pytest.fixture(scope="module")
def opened(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurements]:
    with session.open_measurements(asked(model, tmp_path_factory.mktemp("table")), silent) as found:
        yield found


def test_shares_are_those_of_the_whole_model_half_way(opened: Measurements, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = metrics.table(opened, frozenset({"kl_shares"}))
    _, variants = opened.evaluators.source()
    tokens = opened.calibration.tokens[:2]
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = whole(input_ids=tokens).logits.detach().log_softmax(-1)
    changes = {}
    for name in (name for unit in found.units for name in unit.members):
        weight = whole.get_submodule(name).weight
        changes[name] = variants.weight(name, "0", weight.detach()) - weight.detach()
        weight.data += changes[name] / 2
    after = whole(input_ids=tokens).logits.log_softmax(-1)
    (before.exp() * (before - after)).sum(-1).mean().backward()
    for unit in found.units:
        expected = sum((whole.get_submodule(name).weight.grad * changes[name]).sum().item() for name in unit.members)
        damage = {entry.option: entry.damage["kl_shares"] for entry in unit.entries}
        assert damage[found.options[0]] == pytest.approx(max(0.0, expected), rel=2e-3, abs=1e-6)
        assert damage["keep"] == 0


def test_no_share_is_nothing_where_weights_have_an_error() -> None:
    """Else the smallest option of such a unit would be as good as any, and no budget would raise it."""
    shares = {"a": 3.0, "b": -0.5, "c": 1.0, "kept": 0.0, "unknown": -1.0}
    sizes = {"a": 10.0, "b": 20.0, "c": 10.0, "kept": 0.0, "unknown": math.nan}
    raised = metrics._with_least_shares(shares, sizes)
    assert raised == {"a": 3.0, "b": pytest.approx(0.01 * 4.0 * 20 / 40), "c": 1.0, "kept": 0.0, "unknown": 0.0}
    assert metrics._with_least_shares({"a": 0.0}, {"a": 0.0}) == {"a": 0.0}


def test_a_bound_is_kept_by_units_whose_share_is_noise(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other share below 0 at every option: any bound is reached, since all can stay as they are."""
    with session.open_measurements(asked(model, tmp_path), silent) as store:
        real = store.evaluators.shares

        def noisy(*given: Any) -> dict[str, float]:
            return {name: share * (-1) ** i for i, (name, share) in enumerate(real(*given).items())}

        monkeypatch.setattr(store.evaluators, "shares", noisy)
        facts = decision.decide_target(store, store.opened.allocation, Target("0.000001kl"))
    assert facts["weights by option"]["keep"] == 1


def test_shares_add_up_to_the_divergence(opened: Measurements) -> None:
    found = metrics.table(opened, frozenset({"kl_shares"}))
    evaluator = metrics.evaluator(opened, found)
    choice = found.uniform(found.options[2])
    assert choice is not None
    kl = evaluator.divergence([choice], range(2))[0]
    assert sum(evaluator.shares(choice)) == pytest.approx(kl, rel=0.05)


def test_shares_go_on_after_the_last_finished_option(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session.open_measurements(asked(model, tmp_path), silent) as store:
        complete = metrics.table(store, frozenset({"kl_shares"}))
        path = store.database.folder / "measured-kl_shares.json"
        content = json.loads(path.read_text())
        for row in content["damages"]["kl_shares"].values():
            row[2] = 0.0
        path.write_text(json.dumps(content | {"complete": False, "options": 2}))
        calls = []
        real = store.evaluators.shares
        monkeypatch.setattr(store.evaluators, "shares", lambda *given: calls.append(given) or real(*given))
        again = metrics.table(store, frozenset({"kl_shares"}))
    assert len(calls) == 1 and again.units == complete.units


def test_rounds_stay_within_the_budget_and_are_told(opened: Measurements) -> None:
    allocation = opened.opened.allocation
    plain = decision.decide_target(opened, allocation, Target("6bpw"))
    config = dataclasses.replace(allocation.config, rounds=2)
    facts = decision.decide_target(opened, dataclasses.replace(allocation, config=config), Target("6bpw"))
    assert facts["budget"] == plain["budget"] and facts["bpw"] <= 6
    assert facts["kl"] == min(row["kl"] for row in facts["trace"]) <= facts["start_kl"]
    assert any("rounds of measuring damages anew" in note for note in facts["notes"])


class Company:
    """Units hurt more in bad company: KL is the sum of damages, plus the square of that of the units of a pair."""

    def __init__(self, damages: list[list[float]], folder: Path) -> None:
        self.damages, self.folder = damages, folder
        self.samples, self.seq_len, self.seed, self.forwards = 2, 8, 0, 0.0
        self.calls = 0

    def say(self, text: str) -> None:
        assert text

    def divergence(self, asked: Sequence[Choice], samples: Sequence[int]) -> list[float]:
        self.calls += 1
        return [sum(self._parts(choice)) for choice in asked]

    def shares(self, choice: Choice) -> list[float]:
        self.calls += 1
        return self._parts(choice)

    def _parts(self, choice: Choice) -> list[float]:
        alone = [row[at] for row, at in zip(self.damages, choice, strict=True)]
        together = alone[0] * alone[1] * 20
        return [alone[0] + together / 2, alone[1] + together / 2, *alone[2:]]


DAMAGES = [[0.5, 0.2, 0.0], [0.45, 0.2, 0.0], [0.9, 0.3, 0.0], [0.8, 0.3, 0.0]]
UNITS = tuple(
    Unit(
        f"layer.{u}",
        (f"layer.{u}",),
        0,
        8,
        tuple(UnitEntry(str(b), 10 * b, b, {"weight": d}) for b, d in zip((2, 3, 4), row, strict=True)),
    )
    for u, row in enumerate(DAMAGES)
)


def test_rounds_find_what_hurts_in_company(tmp_path: Path) -> None:
    evaluator = Company(DAMAGES, tmp_path)
    problem = Problem(UNITS, 110)
    plain = knapsack.allocate(problem, knapsack.Config(estimator="weight"))
    found = knapsack.allocate(problem, knapsack.Config(estimator="weight", rounds=3), evaluator)
    assert problem.nbytes(found.choice) <= 110
    assert evaluator.divergence([found.choice], ()) < evaluator.divergence([plain.choice], ())
    assert found.facts["kl"] == min(row["kl"] for row in found.trace) < found.facts["start_kl"]


def test_rounds_are_repeated_from_the_folder(tmp_path: Path) -> None:
    config, problem = knapsack.Config(estimator="weight", rounds=3), Problem(UNITS, 110)
    evaluator = Company(DAMAGES, tmp_path)
    first = knapsack.allocate(problem, config, evaluator)
    made, (file,) = evaluator.calls, tmp_path.iterdir()
    assert made >= 3
    assert knapsack.allocate(problem, config, evaluator) == first and evaluator.calls == made
    file.write_text("{")  # as a damaged file
    assert knapsack.allocate(problem, config, evaluator) == first and evaluator.calls == 2 * made


def test_damages_are_scaled_within_limits() -> None:
    rows = rescale([[4.0, 2.0], [4.0, 2.0], [4.0, 0.0]], (0, 0, 1), [0.4, 0.0, 0.1])
    size = (0.4 + 1e-3 * 0.5 / 3 + 0.1) / 8
    assert rows[0] == pytest.approx([0.4, 0.2])
    assert rows[1] == pytest.approx([4.0 * size / MAX_FACTOR, 2.0 * size / MAX_FACTOR])
    assert rows[2] == pytest.approx([4.0 * size, 0.0])  # nothing new is known of a unit without damage
