"""Run a campaign: python -m fuzz --cases 20000 --seed 1 -j 2 [--only packed] [--failures failures.json].

    python -m fuzz --replay failures.json --keep tests/fuzz/regressions.json      cases that pass now are kept

Prints the table when it ends, when it is interrupted, and now and then. The exit status is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz import setup

if TYPE_CHECKING:
    from fuzz.verdicts import Verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--only", action="append", help="class of cases; repeatable")
    parser.add_argument("--failures", type=Path, help="JSON file for one small case of every failure")
    parser.add_argument("--replay", type=Path, help="judge the cases of such a file first")
    parser.add_argument("--keep", type=Path, help="add the cases of --replay that pass to this file")
    parser.add_argument("--few", action="store_true", help="few base models, the classes case by case in turn")
    parser.add_argument("--show-every", type=float, default=60, help="seconds between tables")
    asked = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with setup.workplace() as folder:
        setup.imports()
        return _campaign(asked, folder)


def _campaign(asked: argparse.Namespace, folder: Path) -> int:
    from fuzz import campaign

    tally, watch = campaign.Tally(), campaign.stopwatch()
    shown = [time.monotonic()]

    mended: list[dict[str, Any]] = []

    def show(number: int, case: dict[str, Any], verdict: Verdict) -> None:
        if number < 0 and not verdict.is_failure:
            mended.append(case)
        if time.monotonic() - shown[0] > asked.show_every:
            shown[0], tally.seconds = time.monotonic(), watch()
            print(f"{campaign.now()}\n{tally.table()}", file=sys.stderr, flush=True)
            _write(asked.failures, tally)

    kept = [row["case"] for row in json.loads(asked.replay.read_text())] if asked.replay else []
    made = campaign.cases(asked.only or list(campaign.CLASSES), asked.cases, asked.seed, folder, asked.few)
    numbered = itertools.chain(enumerate(kept, -len(kept)), made)
    try:
        campaign.run(numbered, folder, tally, asked.jobs, show)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    tally.seconds = watch()
    print(tally.table())
    for failure in sorted(tally.failures.values(), key=lambda each: (each.kind, -each.count)):
        print(f"\n{failure.kind}, {failure.count} times: {failure.verdict.kind}: {failure.verdict.detail}")
        print(f"  {json.dumps(failure.case)[:600]}")
    _write(asked.failures, tally)
    if asked.keep:
        _keep(asked.keep, mended)
    return int(bool(tally.failures))


def _keep(path: Path, mended: list[dict[str, Any]]) -> None:
    """Add cases to a file of cases that must pass, unless they are there."""
    rows = json.loads(path.read_text()) if path.exists() else []
    known = [row["case"] for row in rows]
    rows += [{"case": case} for case in mended if case not in known]
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def _write(path: Path | None, tally: object) -> None:
    """Keep one case of every failure in a file."""
    from fuzz.campaign import Tally

    if path is None or not isinstance(tally, Tally):
        return
    rows = [{"case": f.case, "verdict": list(f.verdict[:2]), "count": f.count} for f in tally.failures.values()]
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
