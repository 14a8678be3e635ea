"""AdamW with 8-bit moments: its levels, the errors of coding, and steps that follow those of torch's AdamW."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from compress.tune import adamw8bit
from compress.tune.adamw8bit import BLOCK, SMALLEST, AdamW8bit, States, decode, encode, levels, state_nbytes
from compress.tune.descend import descend

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def plain_levels(is_signed: bool) -> list[float]:
    """The data type in float64, level by level."""
    found = [0.0, 1.0]
    for number in range(7):
        count = 2**number * (1 if is_signed else 2)
        width = 0.9 / count
        middles = [10.0 ** (number - 6) * (0.1 + width * (step + 0.5)) for step in range(count)]
        found += [sign * middle for middle in middles for sign in ((1, -1) if is_signed else (1,))]
    return sorted(found)


@pytest.mark.parametrize("is_signed", [True, False])
def test_levels(is_signed: bool) -> None:
    found = levels(is_signed)
    assert found.shape == (256,) and found.dtype == torch.float32 and (found[1:] > found[:-1]).all()
    torch.testing.assert_close(found.double(), torch.tensor(plain_levels(is_signed)).double(), rtol=3e-7, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_signed", [True, False])
def test_levels_are_those_of_bitsandbytes(is_signed: bool) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    from bitsandbytes.functional import create_dynamic_map

    assert torch.equal(levels(is_signed), create_dynamic_map(signed=is_signed))


def spread(numel: int, is_signed: bool) -> Tensor:
    """Numbers of all sizes, some of them 0, and the middles between levels, in blocks of different scales."""
    generator = torch.Generator().manual_seed(0)
    table = levels(is_signed)
    middles = (table[:-1] + table[1:]) / 2
    sizes = 10 ** (-9 * torch.rand(numel, generator=generator))
    values = torch.randn(numel, generator=generator) * sizes
    values[::17] = 0
    values[1000 : 1000 + len(middles)] = middles
    values = values * 10.0 ** torch.arange(numel).div(BLOCK, rounding_mode="floor").fmod(5)
    return values if is_signed else values.abs()


@pytest.mark.parametrize("is_signed", [True, False])
def test_every_number_is_coded_as_the_nearest_level(is_signed: bool) -> None:
    values = spread(4321, is_signed)
    coded = encode(values, is_signed)
    assert coded.codes.dtype == torch.uint8 and coded.codes.shape == (4321,) and coded.scales.shape == (17,)
    found, table = decode(coded, is_signed), torch.tensor(plain_levels(is_signed)).double()
    for start in range(0, 4321, BLOCK):
        block = values[start : start + BLOCK].double()
        allowed = table if is_signed else table[1:]
        best = (block[:, None] - block.abs().max() * allowed).abs().amin(1)
        error = (found[start : start + BLOCK].double() - block).abs()
        is_zero = block == 0
        assert not error[is_zero].any() and not (found[start : start + BLOCK][~is_zero] == 0).all()
        assert (error <= best + 3e-7 * (block.abs() + 1e-6 * block.abs().max()))[~is_zero].all()


@pytest.mark.parametrize(("is_signed", "bound"), [(True, 0.45 / 64), (False, 0.45 / 128)])
def test_errors_are_bounded(is_signed: bool, bound: float) -> None:
    """Of what is a tenth of the largest or more: half a step. Of a power of ten less: half of steps twice as large."""
    values = spread(1 << 14, is_signed).view(-1, BLOCK)
    found = decode(encode(values.flatten(), is_signed), is_signed).view_as(values)
    relative, error = (x / values.abs().amax(1, keepdim=True) for x in (values.abs(), (found - values).abs()))
    for power in range(7):
        here = (relative > 10.0 ** -(power + 1)) & (relative <= 10.0**-power)
        assert here.sum() > 100 and error[here].max() <= bound * (2.0**power) * 10.0**-power * 1.001
        assert error[here].max() > 0.5 * bound * (2.0**power) * 10.0**-power


def test_blocks_of_zeros_and_tiny_numbers() -> None:
    values = torch.cat([torch.zeros(BLOCK), torch.full((BLOCK,), 1e-44), torch.tensor([3.0])])
    for is_signed in (True, False):
        found = decode(encode(values, is_signed), is_signed)
        assert found.isfinite().all() and not found[:BLOCK].any() and found[-1] == 3


def test_a_second_moment_is_never_lost() -> None:
    values = torch.full((BLOCK,), 1e-20)
    values[0], values[1] = 1.0, 0.0
    found = decode(encode(values, is_signed=False), is_signed=False)
    assert found[1] == 0 and (found[2:] == levels(False)[1]).all()
    assert not decode(encode(values, is_signed=True), is_signed=True)[1:].any()


def problem(seed: int = 0) -> tuple[list[nn.Parameter], Callable[[int], float]]:
    """Two layers fitted to the outputs of two others; the first is large enough for 8-bit moments, and has a tail."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = draw(128, 50) * 10 ** (2 * torch.rand(50, generator=generator) - 1)
    first, last = draw(90, 50) / 7, draw(10, 90) / 9
    target = torch.tanh(x @ first.T) @ last.T
    parameters = [nn.Parameter(first + 0.1 * draw(90, 50)), nn.Parameter(last + 0.1 * draw(10, 90))]

    def loss(step: int) -> float:
        rows = slice(32 * (step % 4), 32 * (step % 4) + 32)
        found = torch.tanh(x[rows] @ parameters[0].T) @ parameters[1].T
        error = (found - target[rows]).square().mean()
        error.backward()
        return error.item()

    return parameters, loss


def trained(states: States, steps: int = 120) -> tuple[list[nn.Parameter], list[float]]:
    parameters, loss = problem()
    losses: list[float] = []

    def noted(step: int) -> float:
        losses.append(loss(step))
        return losses[-1]

    descend(parameters, steps, 0.01, noted, states=states)
    return parameters, losses


def test_it_follows_adamw() -> None:
    """Within 12% of the way that each tensor goes, and 5% of the loss at the end, which falls to a tenth."""
    begun = [parameter.detach().clone() for parameter in problem()[0]]
    (plain, plain_losses), (small, small_losses) = trained("32bit"), trained("8bit")
    for start, one, two in zip(begun, plain, small, strict=True):
        assert 0 < (two - one).norm() < 0.12 * (one - start).norm()
    last, small_last = sum(plain_losses[-4:]), sum(small_losses[-4:])
    assert last < 0.1 * sum(plain_losses[:4]) and abs(small_last - last) < 0.05 * last


def test_no_number_goes_further_than_with_adamw() -> None:
    """Where a second moment is lost beside a larger one, updates are up to 32 times as long."""
    gradient = 10.0 ** -torch.arange(SMALLEST).fmod(8)
    parameters = [nn.Parameter(torch.zeros(SMALLEST)) for _ in range(2)]
    optimizers = AdamW8bit(parameters[:1], 0.01), torch.optim.AdamW(parameters[1:], 0.01, weight_decay=0.0)
    for _ in range(30):
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    ours, theirs = (parameter.detach() for parameter in parameters)
    assert (theirs < -0.2).all() and (ours <= 0).all() and (ours > 1.1 * theirs).all()
    large = gradient >= 1e-3  # the root of the lowest level, and more
    assert (ours[large] < 0.6 * theirs[large]).all()


def test_small_tensors_go_as_they_do_with_torch() -> None:
    parameters, loss = problem()
    ours = [nn.Parameter(parameter.detach()[:80].clone()) for parameter in parameters]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    assert all(parameter.numel() < SMALLEST for parameter in ours)
    optimizers = AdamW8bit(ours, 0.01), torch.optim.AdamW(theirs, 0.01, weight_decay=0.0)
    for step in range(20):
        loss(step)
        for mine, other, source in zip(ours, theirs, parameters, strict=True):
            assert source.grad is not None
            mine.grad, other.grad = source.grad[:80].clone(), source.grad[:80].clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_the_same_steps_give_the_same_bytes() -> None:
    for one, two in zip(trained("8bit", 12)[0], trained("8bit", 12)[0], strict=True):
        assert torch.equal(one, two)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained("8bit", 6)[0]
    monkeypatch.setattr(adamw8bit, "CHUNK", 3 * BLOCK)
    assert all(torch.equal(one, two) for one, two in zip(whole, trained("8bit", 6)[0], strict=True))


def test_the_states_of_a_stopped_run_are_taken_up() -> None:
    def run(parameters: list[nn.Parameter], loss: Callable[[int], float], optimizer: AdamW8bit, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss(step)
            optimizer.step()

    parameters, loss = problem()
    optimizer = AdamW8bit(parameters, 0.01)
    run(parameters, loss, optimizer, range(5))
    kept = copy.deepcopy({"optimizer": optimizer.state_dict(), "values": [p.detach() for p in parameters]})
    run(parameters, loss, optimizer, range(5, 9))
    again, loss = problem()
    resumed = AdamW8bit(again, 0.01)
    resumed.load_state_dict(kept["optimizer"])
    with torch.no_grad():
        for parameter, value in zip(again, kept["values"], strict=True):
            parameter.copy_(value)
    run(again, loss, resumed, range(5, 9))
    assert all(torch.equal(one, two) for one, two in zip(parameters, again, strict=True))


@pytest.mark.parametrize("shape", [(100, 50), (9, 9), (4096,), (4095,)])
def test_what_the_states_take(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.ones(shape)
    optimizer = AdamW8bit([parameter], 0.01)
    optimizer.step()
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == state_nbytes(parameter.numel(), "8bit")
    assert state_nbytes(parameter.numel(), "32bit") == 8 * parameter.numel()
    assert state_nbytes(1 << 20, "8bit") == int(2.03125 * (1 << 20))
