"""Write the page of a checkpoint, report.html, from the facts that lie beside it: report, recipe and scores.

What a page is to show more is measured beside the original first, and kept in scores.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import first_line
from compress.evaluate import record
from compress.evaluate.generation import generate
from compress.evaluate.scores import Comparison, Execution, evaluate
from compress.pages import checkpoint
from compress.progress import Progress, note
from compress.run import report
from compress.storage.checkpoint import write_text
from compress.storage.files import read_text
from compress.storage.manifest import PAGE, RECIPE


@dataclass(frozen=True)
class Wanted:
    """What is to be measured for a page beside the original."""

    texts: tuple[str, ...]  # to score
    prompts: tuple[str, ...]  # that both models continue
    seq_len: int  # tokens of a window
    max_tokens: int  # of each text
    max_new_tokens: int  # behind a prompt


def write(directory: Path) -> Path:
    """Write the page of a checkpoint and return its path. Raises CheckpointError for damaged facts."""
    facts, scores = report.load(directory, report.PAGE_KEYS), record.load(directory)
    recipe = directory / RECIPE
    settings = read_text(recipe, errors="replace") if recipe.is_file() else ""
    path = directory / PAGE
    write_text(path, checkpoint.page(facts, settings, scores))
    return path


def refresh(directory: Path) -> None:
    """Write the page anew if there is one, after scores were added; what goes wrong is a note, the scores are kept."""
    if not (directory / PAGE).is_file():
        return
    try:
        write(directory)
    except Exception as error:  # noqa: BLE001  (a page is no reason to lose a finished measurement)
        note(
            f"{directory / PAGE} is not up to date ({first_line(error)}); compress inspect {directory} --page tries it "
            "again"
        )


def measure(directory: Path, base: Path, wanted: Wanted, execution: Execution, progress: Progress) -> None:
    """Score texts and continue prompts with a checkpoint and its original, and keep the results."""
    scores = [_compare(directory, base, text, wanted, execution, progress) for text in wanted.texts]
    written = []
    for prompt in wanted.prompts:
        progress("writing", 0, 1)
        by_base, by_model = (
            generate(each, prompt, wanted.max_new_tokens, dtype=execution.dtype, device=execution.device)
            for each in (base, directory)
        )
        written.append({"prompt": prompt, "base": by_base, "model": by_model})
    record.add(directory, scores, written)


def _compare(
    directory: Path, base: Path, text: str, wanted: Wanted, execution: Execution, progress: Progress
) -> Comparison:
    def report_windows(done: int, total: int) -> None:
        progress(f"scoring {Path(text).name}", done, total)

    scores = evaluate(directory, text, base, wanted.seq_len, wanted.max_tokens, execution, report_windows)
    assert isinstance(scores, Comparison)
    return scores


def add_studies(directory: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Keep the recipes of a study, which the page shows the checkpoint among, if there are any."""
    if points:
        record.add_studies(directory, points)
