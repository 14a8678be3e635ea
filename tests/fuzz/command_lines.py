"""Class "command line": argument vectors of all commands, with hostile values, paths, and options in odd places.

A case is {"words": [...]}, with {model}, {packed}, {text}, {place} and files that `judge` makes in {place}.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from random import Random
from typing import Any

from fuzz import directories, litter, packed, verdicts
from fuzz.sandbox import Case
from fuzz.verdicts import Verdict

SMALL = directories.SMALL
VALID: tuple[list[str], ...] = (
    *directories.COMMANDS,
    ["verify", "{packed}"],
    ["verify", "{packed}", "--json"],
    ["inspect", "{packed}"],
    ["inspect", "{packed}", "--all", "--json"],
    ["generate", "{packed}", "--prompt", "once", "--max-new-tokens", "3", "--temperature", "0.5"],
    ["generate", "{packed}", "--prompt", "once", "--max-new-tokens", "3", "--kv", "kv4"],
    ["eval", "{packed}", "--base", "{model}", "--text", "{text}", "--seq-len", "16", "--max-tokens", "64"],
    ["bench", "{packed}", "--prompt-tokens", "4", "--new-tokens", "2", "--device", "cpu"],
    [
        "kv",
        "bench",
        "{model}",
        "--kv",
        "kv4",
        "--text",
        "{text}",
        "--context",
        "64",
        "--max-tokens",
        "128",
        "--no-speed",
    ],
    [
        "allocate",
        "{model}",
        *SMALL,
        "--set",
        "allocate.target=5bpw",
        "--calib",
        "{text}",
        "--set",
        "allocate.samples=2",
        "--points",
        "2",
    ],
    ["quantize", "{model}", "--recipe", "mixed3bit", *SMALL, "--calib", "{text}", "--target", "4bpw", "--dry-run"],
    ["export", "{packed}", "--to", "dense", "--out", "{place}/out"],
    ["push", "{packed}", "me/model", "--dry-run", "--include", "README.md"],
    ["kv", "save", "{model}", "--prompt", "once", "--out", "{place}/cache.kv"],
    ["kv", "load", "{model}", "{place}/file", "--max-new-tokens", "2"],
    ["kv", "show", "{place}/file"],
    ["recipes"],
    ["recipes", "int4"],
    ["methods", "quant/gptq"],
    ["methods"],
    ["--version"],
    ["--help"],
)
PATHS = (
    *("{model}", "{packed}", "{text}", "{place}/none", "{place}/empty", "{place}/file", "{place}/link", "{place}/fifo"),
    *("{place}/readonly/out", "{place}/file/out", "{place}/dangling", "{place}/loop", "{place}/out", "{place}/ünï\n"),
    *(
        "",
        " ",
        ".",
        "..",
        "/",
        "//",
        "~",
        "-",
        "--",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/proc/self/mem",
        "/proc/x",
    ),
    *(
        "/proc/self/fd/0",
        "/sys/kernel",
        "a/b",
        "a",
        "a/b/c",
        "x" * 300,
        "x/" * 3000,
        "{place}/" + "y" * 300,
        "\udcff/\udcfe",
    ),
    *(
        "{model}/config.json",
        "{packed}/model",
        "{model}/../",
        "./{place}",
        "http://x.y/z",
        "file:///etc/passwd",
        "{model}/",
    ),
    *(
        "{place}/{place}",
        "%s",
        "{place}/mine.yaml",
        "{place}/t.jsonl",
        "{place}/t.parquet",
        "{place}/[x]",
        "{place}/\x1b[1m",
    ),
)
WORDS = (
    *(
        "0",
        "1",
        "-1",
        "2",
        "1.5",
        "1e9",
        "1e999",
        "-1e999",
        "nan",
        "inf",
        "9" * 400,
        "9" * 6000,
        "0x10",
        "1_0",
        "٣",
        "½",
    ),
    *(
        "8GiB",
        "1B",
        "0.5",
        "9e9GiB",
        "-8GiB",
        "GiB",
        "8 GiB",
        "3bpw",
        "3",
        "99bpw",
        "0bpw",
        "0.01kl",
        "1e-9bpw",
        "3.bpw",
    ),
    *("bits=3", "bits=", "=", "a=b", "bits=[", "rules.0.bits=2", "calibration={}", "bits=3=4", "bits", "ignore=['x']"),
    *(
        "int4",
        "int8",
        "kv2",
        "vq2bit",
        "INT4",
        "int5",
        "gptq",
        "own",
        "w4kv2",
        "mixed3bit",
        "cpu",
        "cuda",
        "auto",
        "cuda:9",
    ),
    *(
        "float32",
        "bfloat16",
        "int8",
        "\x1b[31m",
        "a\nb",
        "\udcff",
        "\u202e",
        "x" * 100_000,
        "[bold]",
        "[/]",
        "{",
        "%n",
        "'",
    ),
)


def prepare(folder: Path) -> None:
    """Write the two models that the words name."""
    directories.prepare(folder, "llama")
    packed.prepare(folder, "int4")


@functools.cache
def _options() -> dict[str, list[str]]:
    """Return the options of every command."""
    import typer

    from compress.cli.app import app

    found: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for group, commands in [(name, command.commands) for name, command in found.items() if name == "kv"]:
        found |= {f"{group} {name}": command for name, command in commands.items()}
    names = {
        name: [word for p in command.params for word in p.opts if word[0] == "-"] for name, command in found.items()
    }
    return {**names, "": ["--version", "--help", "--install-completion", "--show-completion"]}


def make(random: Random, folder: Path, few: bool = False) -> Case:
    prepare(folder)
    if random.random() < 0.15:
        command = random.choice([*_options(), random.choice(WORDS)])
        known = _options().get(command, [])
        return {
            "words": [*command.split(" "), *(_word(random, known) for _ in range(random.choice([0, 1, 2, 4, 8])))][:30]
        }
    words = list(random.choice(VALID))
    known = _options().get(" ".join(words[:2])) or _options().get(words[0], ["--help"])
    for _ in range(random.choice([1, 1, 2, 3])):
        at = random.randrange(len(words) + 1)
        given = [i for i, word in enumerate(words) if i and not word.startswith("--")]  # values and arguments
        roll = random.random()
        if roll < 0.7 and given:
            words[random.choice(given)] = random.choice((*PATHS, *WORDS))
        elif roll < 0.88:
            words += [random.choice(known or ["--help"]), random.choice((*PATHS, *WORDS))]
        elif roll < 0.94 and len(words) > 1:
            del words[at % len(words)]
        else:
            words.insert(at, _word(random, known))
    return {"words": words}


def _word(random: Random, known: list[str]) -> str:
    option = random.choice(known or ["--x"])
    return random.choice(
        [option, option, f"{option}={random.choice(WORDS)}", random.choice(WORDS), random.choice(PATHS)]
    )


def judge(case: Case, folder: Path, place: Path) -> Verdict:
    """Run it, in a folder with files of every kind."""
    _populate(place)
    known = {
        "model": directories.prepare(folder, "llama"),
        "packed": packed.prepare(folder, "int4"),
        "text": directories.TEXT,
        "place": place,
    }
    words = []
    for word in case["words"]:
        for name, path in known.items():
            word = word.replace(f"{{{name}}}", str(path))
        words.append(word)
    with litter.watched(place) as left:
        verdict = verdicts.command(words)
    return left(verdict)


def _populate(place: Path) -> None:
    (place / "empty").mkdir()
    (place / "readonly").mkdir(mode=0o555)
    (place / "file").write_text("x")
    (place / "mine.yaml").write_text("quantize: {method: rtn, bits: 4}\n")
    (place / "t.jsonl").write_text('{"text": "a b c"}\n' * 200)
    (place / "t.parquet").write_bytes(b"PAR1" * 10)
    (place / "link").symlink_to("empty")
    (place / "dangling").symlink_to("nowhere")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
