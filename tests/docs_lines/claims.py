"""Compare what a line did with what the page says that it does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docs_lines import checks
from docs_lines.pages import Sample
from docs_lines.scratch import Result
from docs_lines.table import Table

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|\bN\b")
WRONG = re.compile(
    r"^Traceback \(most recent call last\)"
    r"|^(?!.*site-packages.*(?:Future|Deprecation)).*?\b(\w+Warning:)",  # what other packages will change is theirs
    re.M,
)
WRITES = re.compile(r"\bwrites (\S+)")
RESULTS = re.compile(r"\bresults/\w+\.json")


def broken(sample: Sample, result: Result, folder: Path, shown: str, table: Table) -> str:
    """Return the first claim that a command did not keep; empty: it kept all. `shown`: its output on the page."""
    return next(_broken(sample, result, folder, shown, table), "")


def _broken(sample: Sample, result: Result, folder: Path, shown: str, table: Table) -> Iterator[str]:
    if result.status is None:
        yield f"it was not done after {result.seconds:.0f} s"
    if result.status:
        yield f"exit status {result.status}"
    if found := WRONG.search(result.output):
        yield f"it prints {found.group(1) or found.group()}"
    results = [f"benchmarks/{path}" for path in RESULTS.findall(sample.comment)]
    for path in (*checks.outputs(sample.text), *WRITES.findall(sample.comment), *results):
        if not (folder / path).exists():
            yield f"{path} was not written"
    claims = table.comments.get(sample.comment, []) if sample.comment else []
    for claim in claims if isinstance(claims, list) else []:
        if not re.search(claim, result.output, re.M):
            yield f"its output has no {claim!r}, but the page says: {sample.comment}"
    for line in shown.splitlines():
        if not shape(line).search(result.output):
            yield f"it does not print: {line}"


def shape(line: str) -> re.Pattern[str]:
    """Return a pattern for a line of output: other numbers, and other spaces, are the same."""
    words = [r"[\d.,e+-]+".join(re.escape(text) for text in NUMBER.split(word)) for word in line.split()]
    return re.compile(r"\s+".join(words))
