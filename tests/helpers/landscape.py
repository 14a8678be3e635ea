"""A synthetic bench for searches: what choices do to the predictions, as a square of sums of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from compress.allocate.problem import KL_ONE_AT_A_TIME, Choice, Problem, Unit, UnitEntry

BITS = (2, 3, 4, 5)
KINDS = {"qkv": 3, "o": 1, "gate_up": 5, "down": 3}  # weights, in 1024


class Landscape:
    """A bench: errors of units are vectors, scaled differently on each sequence; KL is the square of their sum.

    additive: the vectors are orthogonal, so that damages add up; else they have common directions.
    """

    samples, seq_len = 24, 32

    def __init__(self, folder: Path, blocks: int = 3, additive: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        units, entries = blocks * len(KINDS), len(BITS)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        size = torch.tensor(list(KINDS.values()) * blocks, dtype=torch.float64)[:, None]
        steps = torch.tensor([4.0**-bits for bits in BITS], dtype=torch.float64)
        self.damages = random(units, 1).exp() * size * steps / 10  # [units, entries]
        width = units if additive else 16
        self.errors = torch.zeros(units, entries, width, dtype=torch.float64)
        if additive:
            self.errors += torch.eye(units, dtype=torch.float64)[:, None]
        else:
            self.errors += random(units, 1, width) + random(units, entries, width) + 2 * random(width)
        self.errors *= (self.damages.sqrt() / self.errors.norm(dim=2))[..., None]
        self.gains = (0.3 * random(self.samples, units, 1)).exp()
        self.seed, self.folder, self.forwards = seed, folder, 0.0
        self.said: list[str] = []
        self.say: Callable[[str], None] = self.said.append
        self.asked: list[tuple[list[Choice], list[int]]] = []
        self.calls_left = math.inf

    def problem(self, bits: float = 3.0) -> Problem:
        """Damages: the true ones (of each unit alone, on all sequences), and others under "wrong"."""
        alone = (self.errors * self.gains[..., None]).square().sum(3).mean(0)
        generator = torch.Generator().manual_seed(7)
        wrong = alone * torch.randn(len(alone), 1, generator=generator, dtype=torch.float64).exp()
        units = []
        for index in range(len(alone)):
            block, (kind, size) = index // len(KINDS), list(KINDS.items())[index % len(KINDS)]
            entries = tuple(
                UnitEntry(
                    f"int{b}",
                    128 * size * b,
                    b,
                    {KL_ONE_AT_A_TIME: float(alone[index, i]), "wrong": float(wrong[index, i])},
                )
                for i, b in enumerate(BITS)
            )
            units.append(Unit(f"layers.{block}.{kind}", (f"layers.{block}.{kind}",), block, 1024 * size, entries))
        return Problem(tuple(units), int(sum(unit.numel for unit in units) * bits / 8))

    def divergence(self, choices: Sequence[Choice], samples: Sequence[int]) -> list[float]:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise KeyboardInterrupt
        self.asked.append((list(choices), list(samples)))
        self.forwards += len(choices) * len(samples) * self.seq_len
        return [self.true(choice, samples) for choice in choices]

    def true(self, choice: Choice, samples: Sequence[int] | None = None) -> float:
        gains = self.gains if samples is None else self.gains[list(samples)]
        errors = self.errors[torch.arange(len(choice)), torch.tensor(choice)]
        return float((errors * gains).sum(1).square().sum(1).mean())
