"""Keep the state of a search on disk, so that a killed one goes on.

One JSON file a search, whose name and content carry a fingerprint of all that decides the course of it: entries, bytes,
damages, budget, settings, seed and the number of sequences. A state of another search is never found, so a changed
search starts over; what the sequences and the model are is told by the folder, which belongs to one of each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.allocate.problem import Choice, Problem
from compress.allocate.surrogate import WINDOW, Observation
from compress.storage import json_text
from compress.storage.checkpoint import write_text
from compress.storage.files import read_text
from compress.storage.json_text import INTEGER, NUMBER, TEXT

VERSION = 1  # of the search and its state: another one starts over

LAYOUT: Any = {  # of a file
    **{"identity": TEXT, "start": [INTEGER], "parent": [INTEGER], "rejected": [[INTEGER]]},
    **dict.fromkeys(("generation", "idle", "tokens"), INTEGER),
    **{"scale": NUMBER, "forwards": NUMBER, "trace": [{str: NUMBER}]},
    "measured": [{"change": {str: [INTEGER]}, "difference": NUMBER, "sequences": INTEGER}],
}


@dataclass
class SearchState:
    """The state after `generation` generations. Chance is drawn anew in each, from the seed and its number."""

    start: Choice
    parent: Choice
    scale: float = 1.0  # KL for a damage of the table
    generation: int = 0
    idle: int = 0  # generations since the parent changed
    rejected: list[Choice] = field(default_factory=list)  # measured since then
    tokens: int = 0  # scored: of all candidates, whatever they share
    forwards: float = 0.0  # tokens that went through the whole model
    measured: list[Observation] = field(default_factory=list)  # the latest
    trace: list[dict[str, float]] = field(default_factory=list)

    def learn(self, measured: Sequence[Observation]) -> None:
        self.measured = [*self.measured, *measured][-WINDOW:]


def fingerprint(problem: Problem, damages: Sequence[Sequence[float]], settings: Mapping[str, Any]) -> str:
    """Return the hash of all that the course of a search depends on; settings: JSON values."""
    units = [(unit.name, unit.block, [entry.nbytes for entry in unit.entries]) for unit in problem.units]
    content = [VERSION, units, problem.budget, damages, settings]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def save(folder: Path, identity: str, state: SearchState) -> None:
    """Replace the file by one that is whole."""
    write_text(folder / f"search-{identity}.json", json.dumps({"identity": identity, **asdict(state)}))


def load(folder: Path, identity: str) -> SearchState | None:
    """Read the state of this search; None if there is none, or what is there cannot be read."""
    try:
        stored = json.loads(read_text(folder / f"search-{identity}.json"))
        if json_text.mismatch(stored, LAYOUT) or stored.pop("identity") != identity:
            return None
        stored["measured"] = [_measured(one) for one in stored["measured"]]
        stored["rejected"] = [tuple(choice) for choice in stored["rejected"]]
        return SearchState(**{**stored, "start": tuple(stored["start"]), "parent": tuple(stored["parent"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _measured(stored: Mapping[str, Any]) -> Observation:
    change = {int(unit): (old, new) for unit, (old, new) in stored["change"].items()}
    return Observation(change, stored["difference"], stored["sequences"])
