"""Class "recipe": recipes and --set overrides: read, written back and read again; planned; run on a small model.

A case is {"pieces": the text of the file, as `values.text_bytes` has it, "sets": overrides, "depth": read, plan, run}.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import yaml

from fuzz import directories, grammar, litter, values, verdicts
from fuzz.sandbox import Case
from fuzz.verdicts import Verdict

TRIED = 20  # numbers above are not run: a recipe may ask for work of hours
FRAGMENTS = (
    *("&a [*a]", "&a {b: *a}", "!!python/object:os.system x", "!!int x", "!x y", "%YAML 9.9\n---\n", "---\n", "...\n"),
    *(
        "? [a]\n: b\n",
        "<<: {bits: 2}",
        "{",
        "[",
        "'",
        '"',
        "\t",
        "\x00",
        "\ufeff",
        "- ",
        ": ",
        "# ",
        "|",
        ">",
        "&",
        "*a",
    ),
    *(
        "0x1F",
        "0o17",
        "017",
        "1:30",
        "1_000",
        ".inf",
        ".nan",
        "~",
        "=",
        "2026-11-22",
        "1e400",
        "- - - - -",
        "\u2028",
        "\x85",
    ),
)
SETTINGS = ("calibration.num_samples", "calibration.seq_len", "quantize.bits", "bits", "group_size", "kv_cache.bits")
KEYS = (
    "",
    "a",
    "=",
    ".",
    "rules.0.bits",
    "rules.-1.bits",
    "ignore",
    "transform.0",
    "quantize",
    "allocate.target",
    "name",
)


@functools.cache
def _built_in() -> dict[str, str]:
    from compress import recipe

    facts = r"^(?:#.*\n|(?:about|measured):\n(?: .*\n)*)"
    bare = {name: re.sub(facts, "", recipe.text(name), flags=re.MULTILINE) for name in recipe.names()}
    return {**bare, "whole": recipe.text("int2-lrec")}


def make(random: Random, folder: Path, few: bool = False) -> Case:
    directories.prepare(folder, "llama")
    roll = random.random()
    if roll < 0.35:
        document = grammar.recipe(random)
    else:
        document = yaml.safe_load(random.choice(list(_built_in().values())))
        document = json.loads(json.dumps(document, default=str))  # the date of a measurement is a string
        for _ in range(random.choice([0, 1, 1, 2])):
            edit = values.change(document, random)
            kept = values.remove if edit.get("delete") else functools.partial(values.put, value=edit.get("value"))
            document = kept(document, edit["at"])
    text = _text(document, random)
    if roll > 0.7:
        text = _changed_text(random.choice(list(_built_in().values())), random)
    depth = random.choices(["read", "plan", "run"], [90, 7, 3])[0]
    sets = [_override(random) for _ in range(random.choice([0, 0, 0, 1, 1, 2]))]
    if depth != "read":
        sets += ["calibration.num_samples=2", "calibration.seq_len=16"]
        if any(len(number) > 18 or int(number) > TRIED for number in re.findall(r"\d+", json.dumps(sets + text))):
            depth = "read" if random.random() < 0.9 else "plan"
    return {"pieces": text, "sets": sets, "depth": depth}


def _text(document: Any, random: Random) -> list[Any]:
    """Return a document as text: YAML of one of its styles, or JSON, which is YAML too."""
    raw = values.dumps(document).decode("utf-8", "surrogatepass")
    if random.random() < 0.5 and "$" not in raw and len(raw) < 20_000:
        try:
            return [yaml.safe_dump(document, default_flow_style=random.choice([None, False]), allow_unicode=True)]
        except (yaml.YAMLError, UnicodeError):
            return [raw]
    return _runs(raw)


def _runs(text: str) -> list[Any]:
    """Write long runs of one character as [character, count]."""
    pieces: list[Any] = []
    end = 0
    for match in re.finditer(r"(.)\1{50,}", text, re.DOTALL):
        pieces += [text[end : match.start()], [match[1], len(match[0])]]
        end = match.end()
    return [*pieces, text[end:]]


def _changed_text(text: str, random: Random) -> list[Any]:
    """Return a text with fragments, doubled lines, lost lines or damaged bytes."""
    roll = random.random()
    lines = text.splitlines(keepends=True)
    at = random.randrange(len(lines))
    if roll < 0.4:
        offset = random.randrange(len(text))
        return [text[:offset], random.choice(FRAGMENTS), text[offset:]]
    if roll < 0.5:
        return [
            "".join(lines[:at]),
            {"hex": random.choice(["ff", "00", "eda080", "c0af", "fffe", "0b", "e280a8"])},
            "".join(lines[at:]),
        ]
    if roll < 0.6:
        return ["".join(lines[:at] + lines[at + 1 :])]
    if roll < 0.7:
        return ["".join([*lines[: at + 1], lines[at], *lines[at + 1 :]])]
    if roll < 0.8:
        opening = random.choice(["[", "{a: ", "- ", "? ", "[[", "!a "])
        return [
            "".join(lines[:at]),
            "name: ",
            [opening, random.choice([10, 300, 5000, 50_000])],
            "\n",
            "".join(lines[at:]),
        ]
    words = text.split(" ")
    words[random.randrange(len(words))] = random.choice([*FRAGMENTS, *values.STRINGS])
    return [" ".join(words)]


def _override(random: Random) -> str:
    from compress.recipe import schema

    key = random.choice([*SETTINGS, *KEYS, *schema.TOP_KEYS])
    value = random.choice([values.hostile(random), random.choice(FRAGMENTS), random.choice(grammar.SMALL)])
    shown = value if isinstance(value, str) else values.dumps(value).decode("utf-8", "surrogatepass")
    return random.choice([f"{key}={shown}", f"{key}={shown}", f"{key}={shown}", key, shown])[:9000]


def judge(case: Case, folder: Path, place: Path) -> Verdict:
    """Read it; what is read must mean the same when it is written and read again; then plan or run it."""
    path = place / "mine.yaml"
    path.write_bytes(values.text_bytes(case["pieces"]))
    if case["depth"] == "read":
        return _read(path, case["sets"], place)
    model = directories.prepare(folder, "llama")
    words = [
        "quantize",
        str(model),
        "--recipe",
        str(path),
        "--out",
        str(place / "out"),
        "--calib",
        str(directories.TEXT),
    ]
    words += [word for text in case["sets"] for word in ("--set", text)]
    with litter.watched(place) as left:
        verdict = verdicts.command([*words, *(["--dry-run"] if case["depth"] == "plan" else [])])
    return left(verdict)


def _read(path: Path, sets: list[str], place: Path) -> Verdict:
    from compress import recipe

    verdict, loaded = verdicts.attempt(lambda: recipe.load(str(path), sets))
    if loaded is None:
        return verdict
    again = place / "again.yaml"
    verdict, _ = verdicts.attempt(lambda: again.write_bytes(recipe.dump(loaded).encode("utf-8", "surrogatepass")))
    if verdict.is_failure:
        return verdict._replace(detail=f"written, {verdict.detail}")
    verdict, second = verdicts.attempt(lambda: recipe.load(str(again)))
    if verdict.is_failure:
        return verdict
    if second is None or recipe.fingerprint(second) != recipe.fingerprint(loaded):
        return Verdict("silent", f"written and read again, it is another recipe ({verdict.detail[:150]})")
    return Verdict("ok")
