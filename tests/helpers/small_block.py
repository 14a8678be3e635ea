"""A block with a norm and three linears, its batches, and its tuning: for tests of methods that tune a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress import formats
from compress.model.blockwise import BlockArgs
from helpers.pico import round_to_nearest

LINEARS = ("up", "gate", "down")
Batch = tuple[Tensor, BlockArgs, Tensor]


class SmallBlock(nn.Module):
    """Two linears behind a norm, and one that reads their product."""

    def __init__(self, has_bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32) if has_bias else nn.RMSNorm(32)
        self.up, self.gate, self.down = (nn.Linear(i, o, bias=has_bias) for i, o in ((32, 48), (32, 48), (48, 32)))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 32] -> [..., 32]."""
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


@contextmanager
def killed_behind_a_block(monkeypatch: pytest.MonkeyPatch, tuning: Any) -> Iterator[None]:
    """Kill a run when its second block is to be tuned by this BlockTuning."""
    finish, done = tuning.finish, list[int]()

    def cut(self: Any) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return finish(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tuning, "finish", cut)
        yield


def batches(block: nn.Module, count: int = 4, drift: float = 0.0) -> Callable[[], Iterator[Batch]]:
    """Batches of tokens whose channels have a mean; drift: how far the inputs are from those of the full model."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 4, 16, 32, generator=generator) + torch.randn(32, generator=generator)
    moved = x + drift * torch.randn(32, generator=generator)
    return lambda: ((hidden, BlockArgs((), {}), block(full)) for hidden, full in zip(moved, x, strict=True))


def quantized(method: ModuleType, block: nn.Module, given: Any, count: int = 4, **settings: Any) -> Any:
    """The tuning of a block with all linears rounded to 2 bits; `finish` has not been called."""
    tuning = method.BlockTuning(block, LINEARS, given, count, method.Config(**settings))
    for group in (("up", "gate"), ("down",)):
        tuning.between()
        for name in group:
            tuning.add(name, round_to_nearest(tuning.weight(name), 2, 16))
    return tuning


def plain_copy(block: nn.Module, packed: Any, changed: dict[str, Tensor]) -> nn.Module:
    """The block in float64 with decoded weights and changed vectors."""
    made = SmallBlock("up.bias" in dict(block.named_parameters()))
    made.load_state_dict(block.state_dict())
    made.double()
    with torch.no_grad():
        for name, weight in packed.items():
            made.get_submodule(name).get_parameter("weight").copy_(formats.decode(weight, torch.float32))
        for name, tensor in changed.items():
            made.get_parameter(name).copy_(tensor)
    return made


def held_error(made: nn.Module, given: Any, held_out: int, is_normed: bool = False) -> float:
    """The mean relative squared error of tokens in float64, held out; is_normed: of tokens divided by their norms."""
    error = size = 0.0
    for number, (hidden, _, target) in enumerate(given()):
        if number % held_out == 0:
            found, expected = made(hidden.double()), target.double()
            if is_normed:
                found, expected = (x / x.norm(dim=-1, keepdim=True) for x in (found, expected))
            error += ((found - expected).square().sum(-1) / expected.square().sum(-1)).sum().item()
            size += expected[..., 0].numel()
    return error / size
