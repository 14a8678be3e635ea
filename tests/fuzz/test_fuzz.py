"""A short campaign of every class, every case that once failed, and the fuzzers themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from fuzz import campaign, guards, sandbox, values, verdicts
from fuzz.verdicts import Verdict

HERE = Path(__file__).parent
SHORT = 10  # cases
KEPT = json.loads((HERE / "regressions.json").read_text())


def fuzz(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a campaign in a process of its own, which has not been warmed by other tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])}
    command = [sys.executable, "-m", "fuzz", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_what_once_failed_and_a_short_campaign() -> None:
    """Nothing fails: each kept case is judged again, and some new ones of each class."""
    ran = fuzz("--replay", str(HERE / "regressions.json"), "--cases", str(SHORT), "--few")
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    total = next(line for line in ran.stdout.splitlines() if line.startswith("all"))
    assert int(total.split()[1]) == len(KEPT) + SHORT


# ---------------------------------------------------------------- the fuzzers themselves


def of(kind: str, place: Path) -> Verdict:
    """A judge of cases that do what they say."""
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    while kind == "hang":
        place.exists()
    if kind == "memory":
        return verdicts.attempt(lambda: bytearray(1 << 40))[0]
    if kind == "traceback":
        return verdicts.attempt(lambda: {}["x"])[0]
    return Verdict("ok")


def test_the_blame_is_on_the_right_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 1)
    kinds = ["ok", "crash", "ok", "hang", "traceback", "memory", "ok"]
    cases = iter([(number, {"kind": kind}) for number, kind in enumerate(kinds)])
    found = {n: verdict.kind for n, _, verdict in sandbox.run_all(cases, lambda c, p: of(c["kind"], p), tmp_path, 2)}
    assert [found[number] for number in range(len(kinds))] == kinds
    assert list(tmp_path.iterdir()) == []


def test_reading_behind_a_guarded_tensor_is_a_crash(tmp_path: Path) -> None:
    import ctypes

    import torch

    def judge(case: sandbox.Case, place: Path) -> Verdict:
        tensor = guards.guarded(torch.arange(5.0))
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        ctypes.string_at(tensor.data_ptr(), case["nbytes"])
        return Verdict("ok")

    assert sandbox.run_one({"nbytes": 20}, judge, tmp_path).kind == "ok"
    assert sandbox.run_one({"nbytes": 21}, judge, tmp_path).kind == "crash"


@pytest.mark.parametrize(
    ("code", "err", "kind"),
    [
        (0, "anything", "ok"),
        (1, "compress: the file is damaged\n", "refused"),
        (1, "14 linears to 4.5 bits\ncompress: the file is damaged\n", "refused"),
        (1, "compress: \x1b[31m\n", "words"),
        (1, "compress: " + "x" * verdicts.LONGEST + "\n", "words"),
        (1, "", "words"),
        (1, "UserWarning: x\ncompress: y\n", "words"),
        (1, "Traceback (most recent call last):\nKeyError: 1\n", "traceback"),
        (2, "Usage: compress verify [OPTIONS] DIR\n", "refused"),
        (3, "compress: y\n", "words"),
    ],
)
def test_judgement_of_words(code: int, err: str, kind: str) -> None:
    assert verdicts.judged(verdicts.Ran(code, "", err, "")).kind == kind


def test_changes_say_all_of_themselves() -> None:
    """A change can be kept as JSON, and does the same again."""
    document = {"a": {"b": [1, "x", None]}, "c": 2.5}
    for seed in range(200):
        change = values.change(document, Random(seed))
        again = json.loads(json.dumps(change))
        found = [json.loads(json.dumps(document)) for _ in range(2)]
        for one, edit in zip(found, (change, again), strict=True):
            if edit.get("delete"):
                values.remove(one, edit["at"])
            else:
                values.put(one, edit["at"], edit["value"])
        assert json.dumps(found[0]) == json.dumps(found[1]) != "", seed
    assert values.dumps({"a": {"$digits": 5}}) == b'{"a": 99999}'
    assert values.text_bytes(["a", ["b", 3], {"hex": "ff"}]) == b"abbb\xff"


def test_cases_depend_on_the_seed_and_the_number_only(tmp_path: Path) -> None:
    def cases(seed: int) -> list[str]:
        return [json.dumps(case) for _, case in campaign.cases(["recipe", "calibration"], 20, seed, tmp_path, few=True)]

    assert cases(1) == cases(1) != cases(2)


@pytest.mark.slow
def test_an_interrupted_campaign_prints_its_table() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])}
    words = [sys.executable, "-m", "fuzz", "--cases", "100000", "--only", "recipe", "--show-every", "0"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:  # the first table
            if line.startswith("all"):
                break
        time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert "interrupted" in err and out.startswith("class")
