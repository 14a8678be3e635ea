"""How many tokens are drafted: formulas against sums, and the policy on what is certain."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from compress.speculate import cost
from compress.speculate.length import FIRST_WAIT, LengthPolicy, PlaceAcceptance
from compress.speculate.timings import Timings


def test_expected_tokens_are_the_mean_of_a_simulation() -> None:
    generator = random.Random(0)
    for alpha, length in ((0.5, 3), (0.9, 5)):
        total = 0
        for _ in range(20_000):
            tokens = 1
            while tokens <= length and generator.random() < alpha:
                tokens += 1
            total += tokens
        assert abs(total / 20_000 - cost.expected_tokens(alpha, length)) < 0.04
    assert cost.expected_tokens(1.0, 4) == 5


@pytest.mark.parametrize(("alpha", "draft", "length"), [(0.85, 0.3, 4), (0.9, 0.3, 5), (0.9, 0.5, 3), (0.95, 0.5, 5)])
def test_best_lengths_where_checks_cost_a_step(alpha: float, draft: float, length: int) -> None:
    found, gain = cost.best_length(alpha, draft, lambda tokens: 1.0)
    assert found == length
    assert gain == max(cost.speedup(alpha, n, draft, 1.0) for n in range(1, 9))


def test_a_draft_pays_only_where_it_is_more_often_right_than_dear() -> None:
    assert cost.best_length(0.6, 0.65, lambda tokens: 1.0) == (0, 1.0)
    assert cost.best_length(0.7, 0.65, lambda tokens: 1.0)[1] > 1


def test_acceptance_from_divergence() -> None:
    for kl, alpha in ((0.0684, 0.877), (0.0133, 0.945), (0.0032, 0.973)):  # measured: 2, 3 and 4 bits below 8
        assert abs(cost.acceptance_from_kl(kl) - alpha) < 0.003
    assert cost.acceptance_from_kl(100.0) == 0 and cost.acceptance_from_kl(0) == 1


def test_predictions_by_bytes_and_by_speeds() -> None:
    assert cost.draft_cost(2.13, 8.13) == pytest.approx(0.30, abs=0.006)
    assert cost.predict(2.13, 8.13, 0.0684)[1] == pytest.approx(1.67, abs=0.05)
    assert cost.predict(4.13, 8.13, 0.0032, speeds=(3.4, 1.9))[1] == pytest.approx(1.44, abs=0.08)
    for wrong in ((0, 8, 0.1), (2, 8, 0.1, -1.0)):
        with pytest.raises(ValueError, match="positive"):
            cost.predict(*wrong)


def policy_after(rounds: list[tuple[int, int]], prior: float = 0.8) -> LengthPolicy:
    policy = LengthPolicy(prior)
    for drafted, accepted in rounds:
        policy.observe(drafted, accepted)
    return policy


def even(step: float, further: float) -> object:
    return lambda rows: step * (1 + further * (rows - 1))


def always(seconds: float) -> Callable[[int], float]:
    return lambda count: seconds


def test_nothing_is_drafted_before_a_plain_step_is_timed() -> None:
    assert LengthPolicy().choose(0.0, always(0.0), always(0.0), 8) == 0
    assert LengthPolicy().choose(1.0, always(0.0), always(1.0), 8) > 0
    assert LengthPolicy().choose(1.0, always(0.0), always(1.0), 2) == 2
    assert LengthPolicy(fixed=3).choose(0.0, always(0.0), always(0.0), 8) == 3


@pytest.mark.parametrize(("alpha", "draft"), [(0.9, 0.3), (0.7, 0.1), (0.95, 0.6)])
def test_the_length_is_the_best_one_for_a_known_acceptance(alpha: float, draft: float) -> None:
    generator, policy = random.Random(1), LengthPolicy(0.5)
    for _ in range(4000):
        accepted = 0
        while accepted < 8 and generator.random() < alpha:
            accepted += 1
        policy.observe(8, accepted)
    check = even(1.0, 0.1)
    chosen = policy.choose(1.0, always(draft), check, 8)  # type: ignore[arg-type]
    best, gain = cost.best_length(alpha, draft, check)  # type: ignore[arg-type]
    assert cost.speedup(alpha, chosen, draft, check(chosen + 1)) > gain - 0.1  # type: ignore[operator]
    assert 0 < policy.threshold <= 0.9


def test_places_have_acceptances_of_their_own() -> None:
    """The first token is always right, the second never."""
    policy = policy_after([(4, 1)] * 200)
    expected = policy.acceptance.expect_tokens(4)
    assert expected[1] == pytest.approx(2, abs=0.1) and expected[4] == pytest.approx(2, abs=0.25)
    assert policy.choose(1.0, always(0.3), always(1.0), 8) == 1


def test_a_draft_that_does_not_pay_is_tried_ever_more_seldom() -> None:
    policy, tries = policy_after([(3, 0)] * 100), []
    for step in range(500):
        count = policy.choose(1.0, always(0.5), always(1.0), 8)
        if count:
            policy.observe(count, 0)
            tries.append(step)
    assert FIRST_WAIT - 2 <= tries[0] <= FIRST_WAIT and 4 <= len(tries) <= 20
    assert sum(step >= 250 for step in tries) <= 8


def test_a_draft_that_became_good_is_found() -> None:
    policy, steps = policy_after([(3, 0)] * 100), 0
    while policy.acceptance.expect_tokens(1)[1] < 1.8 and steps < 2000:
        count = policy.choose(1.0, always(0.3), always(1.0), 8)
        if count:
            policy.observe(count, count)
        steps += 1
    assert steps < 600


def test_acceptance_forgets() -> None:
    share = PlaceAcceptance(0.5)
    for accepted in (0, 4):
        for _ in range(300):
            share.add(4, accepted)
    assert share.expect_tokens(1)[1] > 1.95 and math.isclose(share.expect_tokens(0)[0], 1.0)


def test_times_are_medians_and_interpolated() -> None:
    timings = Timings()
    assert timings.check(3) == 0 == timings.draft("a", 1)
    for rows, seconds in ((1, 1.0), (5, 2.0)):
        for noise in (50.0, 1.0, 1.0, 9.0, 1.0):  # the first makes programs
            timings.add_check(rows, seconds * noise)
    assert [timings.check(rows) for rows in (1, 3, 5, 9)] == [1.0, 1.5, 2.0, 3.0]
    timings.add_draft("a", 4, 28.0)
    assert timings.draft("a", 4) == 0
    timings.add_draft("a", 4, 1.0)
    assert timings.draft("a", 4) == timings.draft("a", 1) == 0.25
    for _ in range(2):
        timings.add_draft("a", 1, 0.5)
    assert [timings.draft("a", count) for count in (1, 2, 3, 8)] == [0.5, 0.5, 0.25, 0.25]


def test_lengths_share_what_a_draft_costs_however_long() -> None:
    """One token is 0.75 of a step, four are 0.6 each: one does not pay, four do."""
    policy = policy_after([(4, 4)] * 8 + [(4, 3)])
    assert policy.choose(1.0, lambda count: 0.55 + 0.2 / count, lambda rows: 1 + 0.12 * (rows - 1), 4) >= 3
