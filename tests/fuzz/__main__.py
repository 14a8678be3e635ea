"""Run a campaign: python -m fuzz --cases 20000 --seed 1 -j 2 [--only packed] [--failures failures.json].

Prints the table when it ends, when it is interrupted, and now and then. The exit status is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

from fuzz import setup


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--only", action="append", help="class of cases; repeatable")
    parser.add_argument("--failures", type=Path, help="JSON file for one small case of every failure")
    parser.add_argument("--replay", type=Path, help="judge the cases of such a file first")
    parser.add_argument("--few", action="store_true", help="few base models, the classes case by case in turn")
    parser.add_argument("--show-every", type=float, default=60, help="seconds between tables")
    asked = parser.parse_args()
    with setup.workplace() as folder:
        setup.imports()
        return _campaign(asked, folder)


def _campaign(asked: argparse.Namespace, folder: Path) -> int:
    from fuzz import campaign

    tally, watch = campaign.Tally(), campaign.stopwatch()
    shown = [time.monotonic()]

    def show() -> None:
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
    return int(bool(tally.failures))


def _write(path: Path | None, tally: object) -> None:
    """Keep one case of every failure in a file."""
    from fuzz.campaign import Tally

    if path is None or not isinstance(tally, Tally):
        return
    rows = [{"case": f.case, "verdict": list(f.verdict), "count": f.count} for f in tally.failures.values()]
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
