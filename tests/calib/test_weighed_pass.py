"""Weighing tokens in the pass that collects against a pass of its own before it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.calib import stats, token_importance
from compress.calib.stats import InputsSeenError
from compress.calib.weighed_pass import WEIGHED, WeighedPass
from compress.model.blockwise import BlockArgs, run_block
from helpers.pico import VOCAB_SIZE, build

SAMPLES, LENGTH, MINIMUM = 6, 64, 0.05
CPU = torch.device("cpu")
INPUTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
Batches = list[tuple[Tensor, BlockArgs]]


def block_and_batches(size: int) -> tuple[nn.Module, Batches]:
    """The first block of a model without weights of its own, and what it is called with, `size` samples at a time."""
    model, batches = build("llama").requires_grad_(False), Batches()
    block = model.model.layers[0]

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batches.append((args[0], BlockArgs(args[1:], kwargs)))

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    tokens = torch.randint(2, VOCAB_SIZE, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))
    for part in tokens.split(size):
        model(input_ids=part, use_cache=False)
    handle.remove()
    return block, batches


def new_sums(block: nn.Module) -> dict[str, stats.HessianSum]:
    return {name: stats.HessianSum(block.get_submodule(name).in_features, CPU) for name in INPUTS}


def collected(block: nn.Module, batches: Batches, calls: int, ends: bool) -> tuple[WeighedPass, Mapping[str, Tensor]]:
    """Weigh and collect in one pass; the Hessians."""
    sums, weighed = new_sums(block), WeighedPass(block, "block", calls, MINIMUM)
    linears = {name: block.get_submodule(name) for name in INPUTS}
    end = stats.PassEnd([*sums, WEIGHED]) if ends else None

    def collect(weights: Tensor, into: Mapping[str, Any]) -> AbstractContextManager[None]:
        return stats.collect(linears, into, LENGTH, weights, pass_end=end)

    for hidden, call in batches:
        shape = hidden.shape[0], hidden.shape[1]
        with suppress(InputsSeenError), weighed.watch(shape, CPU, sums, end, collect):
            run_block(block, call, hidden, "block")
    return weighed, {} if weighed.failed else {key: total.finish(key).hessian for key, total in sums.items()}


@torch.no_grad()
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("size", [2, SAMPLES])
def test_weights_and_sums_are_those_of_two_passes(size: int, ends: bool) -> None:
    block, batches = block_and_batches(size)
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    weights, note = token_importance.weights("attention", block, "block", lambda: batches, tokens, MINIMUM)
    assert weights is not None and note is None
    sums, start = new_sums(block), 0
    linears = {name: block.get_submodule(name) for name in INPUTS}
    for hidden, call in batches:
        with stats.collect(linears, sums, LENGTH, weights[start : start + len(hidden)]):
            run_block(block, call, hidden, "block")
        start += len(hidden)
    weighed, found = collected(block, batches, 1, ends)
    assert not weighed.failed and weighed.calls == 1
    made, note = token_importance.of_scores(torch.cat(weighed.scores), block, MINIMUM)
    assert note is None and torch.equal(made, weights) and weights.std() > 0.1
    expected = {key: total.finish(key).hessian for key, total in sums.items()}
    assert torch.equal(found[INPUTS[0]], expected[INPUTS[0]])
    for key in INPUTS:  # an attention that shares its probabilities rounds otherwise
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-4 * expected[key].max().item())


@torch.no_grad()
@pytest.mark.parametrize("calls", [2, 3])
def test_another_number_of_attentions_is_found_and_nothing_is_used(calls: int) -> None:
    block, batches = block_and_batches(3)
    weighed, found = collected(block, batches, calls, ends=True)
    assert weighed.failed and weighed.calls == 1 and not found


@torch.no_grad()
def test_attention_that_cannot_be_read_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    block, batches = block_and_batches(SAMPLES)
    refuse = partial(token_importance._plain, where="block")  # raises for a module whose file has no attention
    monkeypatch.setattr(token_importance, "_probabilities", lambda *_: refuse(nn.Linear(2, 2)))
    weighed, found = collected(block, batches, 1, ends=False)
    assert weighed.failed and not found


@torch.no_grad()
def test_shared_probabilities_give_the_output_of_torch() -> None:
    block, ((hidden, call),) = block_and_batches(SAMPLES)
    plain = run_block(block, call, hidden, "block")
    with token_importance.watched(block, "block", is_shared=True) as masses:
        shared = run_block(block, call, hidden, "block")
    assert len(masses) == 1
    torch.testing.assert_close(shared, plain, rtol=1e-4, atol=1e-5)
