"""A campaign: cases of all classes in turn, judged by children; failures made small and grouped; a table."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fuzz import command_lines, directories, edits, gguf_headers, packed, recipes, sandbox, texts
from fuzz.sandbox import Case
from fuzz.verdicts import FAILURES, PASSED, Verdict, group

CLASSES: dict[str, Any] = {
    "recipe": recipes,
    "model": directories,
    "packed": packed,
    "gguf": gguf_headers,
    "calibration": texts,
    "command line": command_lines,
}
TRIES = 12  # to make a failing case smaller


@dataclass
class Failure:
    """Failures of one cause: the shortest case, how many, and what happened."""

    kind: str
    case: Case
    verdict: Verdict
    count: int = 0


@dataclass
class Tally:
    """What has been found so far."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in CLASSES})
    failures: dict[str, Failure] = field(default_factory=dict)
    spent: Counter[str] = field(default_factory=Counter)  # milliseconds by class
    seconds: float = 0.0

    def add(self, name: str, case: Case, verdict: Verdict) -> None:
        self.counts[name][verdict.kind] += 1
        self.spent[name] += round(1000 * verdict.seconds)
        if not verdict.is_failure:
            return
        cause = f"{name}: {group(verdict)}"
        known = self.failures.setdefault(cause, Failure(name, case, verdict))
        known.count += 1
        if len(json.dumps(case)) < len(json.dumps(known.case)):
            known.case, known.verdict = case, verdict

    def table(self) -> str:
        """Return the table by class, for people."""
        shown = [*PASSED, *FAILURES]
        rows = [["class", "cases", *shown, "per s"]]
        total: Counter[str] = sum(self.counts.values(), Counter())
        for name, counts in (*self.counts.items(), ("all", total)):
            rate = counts.total() * 1000 / max(1, self.spent[name] if name != "all" else self.spent.total())
            rows.append([name, str(counts.total()), *(str(counts[kind]) for kind in shown), f"{rate:.1f}"])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([*lines, f"{self.seconds:.0f} s of CPU time in all"])


def judge(numbered: Case, place: Path, folder: Path) -> Verdict:
    """Judge a case of any class."""
    return CLASSES[numbered["class"]].judge(numbered, folder, place)


def cases(names: list[str], count: int, seed: int, folder: Path, few: bool = False) -> Iterator[tuple[int, Case]]:
    """Yield `count` numbered cases, the classes in turn; each depends on the seed and its number only."""
    for number in range(count):
        name = names[number // sandbox.BATCH % len(names)] if not few else names[number % len(names)]
        random = Random(f"{seed} {name} {number}")
        yield number, {"class": name, **CLASSES[name].make(random, folder, few)}


def prepared(numbered: Iterator[tuple[int, Case]], folder: Path) -> Iterator[tuple[int, Case]]:
    """Yield the cases, each after the models that it needs are there: children inherit them."""
    for number, case in numbered:
        directories.prepare(folder, case["base"] if case["class"] == "model" else "llama")
        if case["class"] == "packed":
            packed.prepare(folder, case["base"])
        elif case["class"] == "gguf":
            gguf_headers.prepare(folder, case["base"])
        elif case["class"] == "command line":
            command_lines.prepare(folder)
        yield number, case


def run(
    numbered: Iterator[tuple[int, Case]],
    folder: Path,
    tally: Tally,
    jobs: int = 1,
    on_case: Callable[[int, Case, Verdict], None] = lambda *_: None,
) -> None:
    """Judge the cases into the tally; failing ones are made small first."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    verdict_of = partial(judge, folder=folder)
    case: Case = {"class": next(iter(CLASSES))}
    for number, case, verdict in sandbox.run_all(prepared(numbered, folder), verdict_of, scratch, jobs):
        if verdict.is_failure and f"{case['class']}: {group(verdict)}" not in tally.failures:
            case, verdict = smaller(case, verdict, verdict_of, scratch)
        tally.add(case["class"], case, verdict)
        on_case(number, case, verdict)
    if changed := edits.changed_since_sealed(folder):
        tally.add(
            case["class"], {"class": case["class"]}, Verdict("litter", f"a source file was changed: {changed[0]}")
        )


def smaller(
    case: Case, verdict: Verdict, verdict_of: Callable[[Case, Path], Verdict], scratch: Path
) -> tuple[Case, Verdict]:
    """Leave out edits, overrides or words as long as the failure stays of one cause."""
    cause = group(verdict)
    tries = 0 if verdict.kind != "hang" else TRIES  # which take too long
    for key in ("edits", "sets", "words", "pieces"):
        at = len(case.get(key, [])) - 1
        while at >= 0 and tries < TRIES and len(case[key]) > 1:
            fewer = {**case, key: case[key][:at] + case[key][at + 1 :]}
            tries += 1
            found = sandbox.run_one(fewer, verdict_of, scratch)
            if found.is_failure and group(found) == cause:
                case, verdict = fewer, found
            at -= 1
    return case, verdict


def stopwatch() -> Callable[[], float]:
    """Return a function that says how much CPU time this process and its children have used since."""

    def used() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    start = used()
    return lambda: used() - start


def now() -> str:
    return time.strftime("%H:%M:%S")
