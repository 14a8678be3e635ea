"""Kill runs of every kind at every stage, resume them, and compare what they write with an uninterrupted run.

    python -m fuzz.kills --kills 200 --seed 1 -j 2 [--only gptq] [--failures kills.json]

A trial is a run that is killed or struck by a fault, once or several times, and then let finish. Prints a table by kind
when it ends or is interrupted. The exit status is 1 where bytes differ, a run cannot be resumed, or says more than one
line.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from fuzz import faults, kill_runs, setup, verdicts
from fuzz.faults import Fault
from fuzz.kill_runs import KINDS, Kind

LIMIT = 300  # seconds of a run
SHOW_EVERY = 30  # seconds
COLUMNS = ("trials", "kills", "faults", "too late", "different", "not resumed", "words", "lost", "orphans")


class Ended(NamedTuple):
    """How a run ended: exit code (negative: a signal), stderr, seconds, calls of probes, processes that it left."""

    code: int
    err: str
    seconds: float
    counts: dict[str, int]
    orphans: int


@dataclass
class Reference:
    """An uninterrupted run."""

    files: dict[str, str]
    seconds: float
    counts: dict[str, int]
    nbytes: list[int]  # sizes of its files


@dataclass
class Campaign:
    """Trials of all kinds and what came of them."""

    folder: Path
    models: Path
    references: dict[str, Reference] = field(default_factory=dict)
    tables: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def refer(self, name: str) -> Reference:
        """Return the uninterrupted run of a kind, made the first time; two must be equal."""
        if name not in self.references:
            kind, place = KINDS[name], self.folder / "reference" / "run"
            found = []
            for counting in (True, False):
                kill_runs.begin(kind, place)
                ended = run(kind, self.models, place, None if counting else {"at": "none"})
                if ended.code:
                    raise RuntimeError(f"{name}: the uninterrupted run ends with {ended.code}: {ended.err[-500:]}")
                found.append((ended, kill_runs.left(place)))
            if found[0][1] != found[1][1]:
                changed = _differing(found[0][1], found[1][1])
                raise RuntimeError(f"{name}: two uninterrupted runs differ in {', '.join(changed)}")
            sizes = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
            self.references[name] = Reference(found[0][1], found[1][0].seconds, found[0][0].counts, sizes)
        return self.references[name]

    def trial(self, name: str, struck: list[Fault]) -> None:
        """Run with each fault in turn, then to the end, and compare."""
        kind, reference, tally = KINDS[name], self.refer(name), self.tables.setdefault(name, Counter())
        place = self.folder / "trial" / "run"
        kill_runs.begin(kind, place)
        tally["trials"] += 1
        problems: list[str] = []
        for fault in [*struck, None]:
            ended = run(kind, self.models, place, fault or {"at": "none"})
            problems += _problems(ended, fault)
            if not kill_runs.is_safe(kind, place, reference.files):
                problems.append("lost: the former output")
            tally["orphans"] += ended.orphans
            if ended.code == 0:
                tally["too late"] += fault is not None
                break
            tally["kills" if fault and fault["how"] in faults.SIGNALS else "faults"] += 1
            if ended.code == 1 and kill_runs.is_done(place, ended.err):  # killed when the output was in place
                tally["too late"] += 1
                problems = [problem for problem in problems if not problem.startswith("not resumed")]
                break
        complete = not any(problem.startswith("not resumed") for problem in problems)
        if complete and (changed := _differing(reference.files, kill_runs.left(place))):
            problems.append(f"different: {', '.join(changed[:5])}")
        for problem in problems:
            tally[problem.partition(":")[0]] += 1
            self.failures.append({"kind": name, "faults": struck, "problem": problem})
            print(f"{name}: {problem[:500]}\n  {json.dumps(struck)}", file=sys.stderr)
        shutil.rmtree(place.parent, ignore_errors=True)

    def struck(self) -> int:
        """Return how often runs were killed, or struck by a fault."""
        return sum(table["kills"] + table["faults"] for table in self.tables.values())

    def table(self) -> str:
        """Return the table by kind."""
        rows = [[name, *(str(counts[column]) for column in COLUMNS)] for name, counts in sorted(self.tables.items())]
        total: Counter[str] = sum(self.tables.values(), Counter())
        rows = [["kind", *COLUMNS], *rows, ["all", *(str(total[column]) for column in COLUMNS)]]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def _differing(first: dict[str, str], second: dict[str, str]) -> list[str]:
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def _problems(ended: Ended, fault: Fault | None) -> list[str]:
    """Return what is wrong with the end of a process that was struck by a fault, or by none."""
    lines = [line for line in ended.err.splitlines() if line]
    if fault is None:
        return [f"not resumed: exit code {ended.code}: {lines[-1][:300] if lines else ''}"] if ended.code else []
    if "Traceback" in ended.err:
        return [f"words: {fault['how']}: a traceback: {lines[-1][:300]}"]
    if fault["how"] == "SIGKILL" or ended.code == 0:
        return []
    if ended.code < 0:
        return [f"words: {fault['how']}: it dies without a word ({ended.code})"]
    verdict = verdicts.message(lines[-1] if lines else "")
    return [f"words: {fault['how']}: exit code {ended.code}, {verdict.detail}"] if verdict.is_failure else []


def run(kind: Kind, models: Path, place: Path, fault: Fault | None) -> Ended:
    """Run in a forked process; fault None: count the calls of all probes. Ends signals of "time" from here."""
    readable, writable = os.pipe()
    err = place.parent / "err"
    started = time.monotonic()
    process = os.fork()
    if process == 0:
        try:
            os.close(readable)
            _child(kind, models, place, fault, err, writable)
        finally:
            os._exit(99)
    os.close(writable)
    timed = fault is not None and fault["at"] == "time"
    if fault is not None and timed:
        select.select([readable], [], [], fault["seconds"])
        os.kill(process, getattr(signal, fault["how"]))
    said = b""
    while select.select([readable], [], [], LIMIT)[0] and (data := os.read(readable, 1 << 16)):
        said += data
    os.close(readable)
    code = _wait(process)
    seconds = time.monotonic() - started
    orphans = _end_group(process)
    return Ended(code, err.read_text(errors="replace"), seconds, json.loads(said or b"{}"), orphans)


def _wait(process: int) -> int:
    for _ in range(200):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(process, signal.SIGABRT)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _end_group(group: int) -> int:
    """End what the process has started and left behind; return how many there were after a moment."""
    for _ in range(400):
        alive = _members(group)
        if not alive:
            return 0
        time.sleep(0.05)
    for process in alive:
        os.kill(process, signal.SIGKILL)
    return len(alive)


def _members(group: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(own) == group and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def _child(kind: Kind, models: Path, place: Path, fault: Fault | None, err: Path, pipe: int) -> None:
    """Run the command line; write the numbers of calls of probes into the pipe."""
    os.setpgid(0, 0)
    os.set_inheritable(pipe, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    for number, path in ((0, os.devnull), (1, os.devnull), (2, str(err))):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(place)
    import torch

    torch.set_num_threads(1)
    from compress import process_memory
    from compress.__main__ import main

    process_memory.reset_peak()
    limit = f"{(process_memory.resident() >> 26 << 6) + 416}MiB"  # little more than it needs, the same each time
    words = [word.replace("{limit}", limit) for word in kind.words(models, place)]
    sys.argv = ["compress", *words]
    faults.install(fault)
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 (what a user would see)
        import traceback

        traceback.print_exc()
        code = 98
    sys.setprofile(None)
    os.write(pipe, json.dumps(faults.counts).encode())
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def random_fault(random: Random, reference: Reference) -> Fault:
    """Draw where and how a run is ended."""
    how = random.choices(faults.SIGNALS, [6, 2, 2])[0]
    at = random.choice(["time", "line", "line", "late line", "probe", "probe", "failure", "size"])
    if at == "time":
        return {"how": how, "at": "time", "seconds": round(random.uniform(0, reference.seconds), 4)}
    if at in ("line", "late line"):
        last = reference.counts["line"]
        return {"how": how, "at": "line", "call": random.randint(1 if at == "line" else last * 3 // 4, last)}
    if at == "size":
        return {"how": "EFBIG", "at": "size", "nbytes": random.randrange(1, max(2, *reference.nbytes))}
    names = [name for name in (faults.FAILING if at == "failure" else faults.PROBES) if reference.counts.get(name)]
    name = random.choice(names)
    call = random.randint(1, reference.counts[name])
    return {"how": random.choice(faults.ERRORS) if at == "failure" else how, "at": name, "call": call}


def trials(names: list[str], seed: int) -> Any:
    """Yield (kind, random) as long as there are kinds, these in turn."""
    number = 0
    while names:
        for name in names:
            yield name, Random(f"{seed} {name} {number}")
        number += 1


def work(campaign: Campaign, names: list[str], kills: int, seed: int) -> None:
    """Kill `kills` times in all, or until it is interrupted."""
    shown = time.monotonic()
    try:
        for name, random in trials(names, seed):
            if time.monotonic() - shown > SHOW_EVERY:
                shown = time.monotonic()
                print(f"{campaign.struck()} of {kills} kills, {len(campaign.failures)} failures", file=sys.stderr)
            if campaign.struck() >= kills or not names:
                break
            try:
                reference = campaign.refer(name)
            except RuntimeError as error:
                names.remove(name)
                campaign.tables[name] = Counter({"not resumed": 1})
                campaign.failures.append({"kind": name, "faults": [], "problem": str(error)})
                print(error, file=sys.stderr)
                continue
            campaign.trial(name, [random_fault(random, reference) for _ in range(random.choice([1, 1, 1, 2, 3]))])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted", file=sys.stderr)


def side_by_side(folder: Path, names: list[str], asked: argparse.Namespace) -> Campaign:
    """Share the kinds out to processes; return what all have found."""
    jobs: dict[int, int] = {}  # process -> the pipe that it reports to
    for job in range(asked.jobs):
        readable, writable = os.pipe()
        if (process := os.fork()) == 0:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)
            campaign = Campaign(folder / f"job-{job}", folder / "models")
            work(campaign, names[job :: asked.jobs], asked.kills // asked.jobs, asked.seed)
            with os.fdopen(writable, "w") as stream:
                json.dump([campaign.tables, campaign.failures], stream)
            os._exit(0)
        os.close(writable)
        jobs[process] = readable

    def interrupt(number: int, frame: object) -> None:
        for process in jobs:
            os.kill(process, signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    whole = Campaign(folder, folder / "models")
    for readable in jobs.values():
        with os.fdopen(readable) as stream:
            tables, failures = json.loads(stream.read() or "[{}, []]")
        whole.tables |= {name: Counter(counts) for name, counts in tables.items()}
        whole.failures += failures
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--only", action="append", help="kind of run; repeatable")
    parser.add_argument("--failures", type=Path, help="JSON file for what failed")
    asked = parser.parse_args()
    with setup.workplace() as folder:
        setup.imports()
        kill_runs.prepare(folder / "models")
        campaign = side_by_side(folder, asked.only or list(KINDS), asked)
        print(campaign.table())
        for failure in campaign.failures:
            print(f"\n{failure['kind']}: {failure['problem']}\n  {json.dumps(failure['faults'])}")
        if asked.failures:
            asked.failures.write_text(json.dumps(campaign.failures, indent=1) + "\n")
        bad = ("different", "not resumed", "words", "lost", "orphans")
        return int(any(table[column] for table in campaign.tables.values() for column in bad))


if __name__ == "__main__":
    sys.exit(main())
