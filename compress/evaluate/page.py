"""Write the page of a checkpoint, report.html, from the facts that lie beside it: report, recipe and scores."""

from __future__ import annotations

from pathlib import Path

from compress.errors import first_line
from compress.evaluate import record
from compress.pages import checkpoint
from compress.progress import note
from compress.run import report
from compress.storage.checkpoint import write_text
from compress.storage.files import read_text
from compress.storage.manifest import PAGE, RECIPE


def write(directory: Path) -> Path:
    """Write the page of a checkpoint and return its path. Raises CheckpointError for damaged facts."""
    found, scores = report.load(directory, report.PAGE_KEYS), record.load(directory)
    recipe = directory / RECIPE
    settings = read_text(recipe, errors="replace") if recipe.is_file() else ""
    path = directory / PAGE
    write_text(path, checkpoint.page(found, settings, scores))
    return path


def refresh(directory: Path) -> None:
    """Write the page anew if there is one, after scores were added; what goes wrong is a note, the scores are kept."""
    if not (directory / PAGE).is_file():
        return
    try:
        write(directory)
    except Exception as error:  # noqa: BLE001  (a page is no reason to lose a finished measurement)
        note(f"{directory / PAGE} is not up to date ({first_line(error)}); compress report {directory} tries it again")
