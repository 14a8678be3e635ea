"""Run what the documentation shows: python -m docs_lines [--pages FILE ...] [--jobs 2] [--work DIR].

Prints a row for each line as it is done, at the end a summary and the last lines of what failed. The exit status is 1
where anything failed. --work keeps the folders, with what the lines wrote, in DIR.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from docs_lines import pages, table
from docs_lines.runner import Row, run_page
from docs_lines.scratch import Scratch, stop

TAIL_LINES = 25  # of the output of what failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="docs_lines", description=__doc__)
    parser.add_argument("--pages", nargs="*", help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="pages at a time")
    parser.add_argument("--work", type=Path, help="a new folder that is kept")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = list(dict.fromkeys(asked.pages or pages.pages()))
    if asked.work is not None:
        return run_all(names, asked.work.resolve(), asked.jobs)
    with tempfile.TemporaryDirectory(prefix="compress-docs-", ignore_cleanup_errors=True) as folder:
        return run_all(names, Path(folder), asked.jobs)


def run_all(names: list[str], folder: Path, jobs: int) -> int:
    """Run pages side by side, and print what became of each line."""
    scratch = Scratch(folder, table.read())
    scratch.prepare()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            rows = [row for found in pool.map(lambda name: run_page(name, scratch, show), names) for row in found]
        except KeyboardInterrupt:
            stop()
            raise
    for row in rows:
        if row.outcome == "FAILED":
            print(f"\n{row.sample.place}: {row.sample.text.partition(chr(10))[0]}\n  {row.why}")
            print("".join(f"  | {line}\n" for line in row.output.splitlines()[-TAIL_LINES:]), end="")
    counts = Counter(row.outcome for row in rows)
    print(f"\n{len(rows)} lines and blocks: {', '.join(f'{counts[name]} {name}' for name in sorted(counts))}")
    return int(counts["FAILED"] > 0)


def show(row: Row) -> None:
    """Print page, line, outcome and what was run in one line."""
    done = f"{row.outcome} {row.seconds:.0f} s" if row.outcome == "ran" else row.outcome
    first = row.sample.text.partition("\n")[0]
    print(f"{row.sample.place:<32} {done:<12} {first}{f'    ({row.why})' if row.why else ''}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
