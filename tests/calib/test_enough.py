"""How many tokens of calibration are enough: a rule of widths, bits, methods and shares of experts."""

from __future__ import annotations

import random

import pytest

from compress.calib import enough
from compress.calib.enough import Need

DENSE = Need(width=1536, bits=4.1)


def _tokens(*needs: Need) -> int:
    return enough.choose(needs).tokens


def test_small_models_take_the_least() -> None:
    assert _tokens() == _tokens(Need(64, 4.0), DENSE) == enough.LEAST_TOKENS


def test_the_most_demanding_part_decides_in_any_order() -> None:
    needs = [Need(width, bits) for width in (256, 3072, 14336, 28672) for bits in (1.5, 2.0, 3.0, 4.1, 8.0)]
    most = max(_tokens(need) for need in needs)
    for seed in range(5):
        random.Random(seed).shuffle(needs)
        assert _tokens(*needs) == most


@pytest.mark.parametrize("width", [1, 576, 1536, 4864, 11008, 14336, 28672, 10**6])
def test_more_is_never_enough_for_less(width: int) -> None:
    base = Need(width, 4.0)
    harder = [Need(2 * width, 4.0), Need(width, 2.0), Need(width, 4.0, 3.0, "learned"), Need(width, 4.0, share=0.25)]
    for need in harder:
        assert enough.LEAST_TOKENS <= _tokens(base) <= _tokens(need)
    assert all(_tokens(need) % enough.STEP == 0 for need in harder)


def test_wide_inputs_see_a_number_of_tokens_for_each_channel() -> None:
    width = 8192
    assert _tokens(Need(width, 4.0)) == enough.TOKENS_PER_CHANNEL * width
    assert _tokens(Need(width, 2.0)) == enough.FEW_BITS_FACTOR * enough.TOKENS_PER_CHANNEL * width


def test_there_is_a_bound() -> None:
    assert _tokens(Need(10**6, 1.0, 8.0, "learned")) == enough.MOST_TOKENS
    assert _tokens(Need(10**6, 1.0, 8.0, "learned", share=0.001)) == enough.MOST_OF_EXPERTS


def test_an_expert_sees_as_many_as_a_dense_linear_or_the_bound() -> None:
    for share in (0.5, 0.25, 0.125, 0.0625, 0.01):
        tokens = _tokens(Need(2048, 4.0, share=share))
        assert tokens * share >= enough.LEAST_TOKENS or tokens == enough.MOST_OF_EXPERTS


def test_what_decided_is_said() -> None:
    assert enough.choose([DENSE, Need(64, 4.0)]).reason == "inputs of 1,536 channels"
    learned = enough.choose([DENSE, Need(64, 2.0, 4.0, "codebooks", 0.25)])
    assert (
        learned.reason
        == "inputs of 64 channels and 2 bits a weight and codebooks and experts that see 25.0% of the tokens"
    )
