"""Run what a page shows from top to bottom, in a folder of the page's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from docs_lines import checks, claims, pages
from docs_lines.pages import Sample
from docs_lines.scratch import STOPPED, Result, Scratch, run
from docs_lines.table import Rule, Table

PYTHON_LIMIT = 300  # seconds
LOG = "lines.log"  # in the folder of a page: what its commands printed


class Row(NamedTuple):
    """What became of a sample."""

    sample: Sample
    outcome: str  # ran, loads (it was only read), compared (output), skipped, FAILED
    why: str = ""
    seconds: float = 0.0
    output: str = ""


def run_page(page: str, scratch: Scratch, tell: Callable[[Row], None]) -> list[Row]:
    """Run all that a page shows; a failure does not stop what comes after it."""
    rows: list[Row] = []
    samples = all_samples(page, scratch.root)
    folder = scratch.page(page) if samples else Path()
    for sample, behind in pairwise([*samples, None]):
        if sample is None or STOPPED.is_set():
            break
        shown = behind.text if behind is not None and behind.language == "text" else ""
        is_skipped = bool(rows) and rows[-1].outcome == "skipped"
        try:
            row = _run(sample, shown, folder, scratch) if sample.language != "text" else _output(sample, is_skipped)
        except RuntimeError as error:
            row = Row(sample, "FAILED", str(error).partition("\n")[0], 0, str(error))
        rows.append(row)
        tell(row)
    return rows


def _output(sample: Sample, is_skipped: bool) -> Row:
    """Account for a block of output, which was compared when the command above was run."""
    if is_skipped:
        return Row(sample, "skipped", "it is the output of a line that is not run")
    return Row(sample, "compared")


def all_samples(page: str, root: Path = pages.ROOT) -> list[Sample]:
    """Return what the blocks of a page show, and the commands within its text, from top to bottom."""
    spans = [span._replace(language="bash") for span in pages.spans(page, root) if checks.is_complete(span.text)]
    return sorted([*pages.samples(page, root), *spans], key=lambda sample: sample.line)


def command(sample: Sample, rule: Rule) -> str:
    """Return the command line of a sample as it is run: small."""
    text = sample.text
    for old, new in rule.swap.items():
        text = text.replace(old, new)
    return f"{text} {rule.add}".strip()


def _run(sample: Sample, shown: str, folder: Path, scratch: Scratch) -> Row:
    table = scratch.table
    if reason := table.reason(sample):
        return Row(sample, "skipped", reason)
    if wrong := checks.problem(sample, table):
        return Row(sample, "FAILED", wrong)
    if sample.language == "bash":
        rule = table.rule(sample)
        text = command(sample, rule)
        scratch.provide(text, folder)
        result = run(text, folder, rule.limit)
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"\n$ {text}\n{result.output}")
        return _row(sample, result, claims.broken(sample, result, folder, shown, table))
    return _run_block(sample, folder, scratch)


def _run_block(sample: Sample, folder: Path, scratch: Scratch) -> Row:
    """Write the file that a block is, or run its Python; all others were checked."""
    block = scratch.table.block(sample)
    if block.file:
        (folder / block.file).write_text(sample.text, encoding="utf-8")
    if sample.language != "python" or block.file:
        return Row(sample, "loads", block.file and f"written as {block.file}")
    source = f"{block.before}\n{sample.text}"
    for name in _quoted(source, scratch.table):
        scratch.provide(name, folder)
    (folder / "block.py").write_text(source, encoding="utf-8")
    result = run("python block.py", folder, PYTHON_LIMIT)
    return _row(sample, result, claims.broken(sample, result, folder, "", scratch.table))


def _quoted(source: str, table: Table) -> list[str]:
    """Return the things that a source names in quotes."""
    return [name for name in table.things if f'"{name}"' in source]


def _row(sample: Sample, result: Result, wrong: str) -> Row:
    return Row(sample, "FAILED" if wrong else "ran", wrong, result.seconds, result.output)
