"""Evaluate choices of a table by their joint effect on the model's predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compress import process_memory
from compress.allocate.joint_kl import JointKL
from compress.allocate.prepare_options import KEPT
from compress.allocate.problem import Choice
from compress.allocate.sensitivity import Measurements
from compress.allocate.table import TABLE_KL, SensitivityTable
from compress.allocate.variants import FIXED
from compress.errors import NotMeasuredError


class TableChoices:
    """A joint KL evaluator of choices of a table (`ChoiceEvaluator` of problem.py)."""

    def __init__(self, store: Measurements, table: SensitivityTable, joint_kl: JointKL) -> None:
        self.store, self.table, self.joint_kl = store, table, joint_kl
        self.samples, self.seq_len = joint_kl.samples, joint_kl.seq_len
        self.seed, self.folder = store.opened.asked.seed, store.database.folder
        self.fixed = {name: FIXED for name, by_option in store.opened.levels.items() if FIXED in by_option}
        self.say: Callable[[str], None] = joint_kl.say
        self.max_memory = store.opened.asked.max_memory

    @property
    def forwards(self) -> float:
        """Return the tokens that have gone through the whole model so far."""
        return self.joint_kl.forwards

    def divergence(self, choices: Sequence[Choice], samples: Sequence[int]) -> list[float]:
        """Return KL(original || choice) of each choice, nats a token; samples: numbers of calibration sequences."""
        kls = self.joint_kl.divergence([self.assignment(choice) for choice in choices], samples)
        process_memory.trim()
        process_memory.check(self.max_memory)
        return kls

    def shares(self, choice: Choice) -> list[float]:
        """Return each unit's share of KL(original || choice) on all sequences, nats a token.

        The share of a table outside of the blocks is its KL alone.
        """
        found = self.store.evaluators.shares(self.assignment(choice), self.samples)
        process_memory.trim()
        process_memory.check(self.max_memory)
        pairs = zip(self.table.units, choice, strict=True)
        return [
            unit.entries[i].damage[TABLE_KL] if unit.is_table else sum(found.get(name, 0.0) for name in unit.members)
            for unit, i in pairs
        ]

    def assignment(self, choice: Choice) -> dict[str, Any]:
        """Return linear -> variant; what is kept is left out."""
        numbers = self.table.option_numbers(choice)
        return {**self.fixed, **{name: str(n) for name, n in numbers.items() if self.table.options[n] not in KEPT}}


def evaluator(store: Measurements, table: SensitivityTable, text: str | None = None, tokens: int = 0) -> TableChoices:
    """Return an evaluator of choices on the calibration text, or on the first `tokens` tokens of another.

    Raises NotMeasuredError where the job may not measure.
    """
    if not store.opened.asked.measures:
        raise NotMeasuredError(f"{store.database.folder} does not hold this choice")
    if text is None:
        return TableChoices(store, table, store.evaluators.on_calibration(store.samples))
    return TableChoices(store, table, store.evaluators.on_text(text, tokens))
