"""Class "model": a model directory that is to be quantized, planned or run: configuration, index, tensors, tokenizer.

A case is {"base": NAME, "edits": [...], "words": [...]}, a command line with {model}, {text} and {place} in it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from random import Random

from fuzz import edits, litter, verdicts
from fuzz.sandbox import Case
from fuzz.verdicts import Verdict

BASES = ("llama", "llama_tied", "mixtral", "gpt_neox", "qwen3", "gemma2")
SMALL = ["--set", "calibration.num_samples=4", "--set", "calibration.seq_len=32"]
OUT = ["--out", "{place}/out"]
COMMANDS: tuple[list[str], ...] = (
    ["quantize", "{model}", "--recipe", "int8", *OUT],
    ["quantize", "{model}", "--recipe", "int8", *OUT, "--overwrite"],
    ["quantize", "{model}", "--recipe", "int4", *SMALL, "--set", "group_size=32", "--calib", "{text}", *OUT],
    ["quantize", "{model}", "--recipe", "w4kv2", *SMALL, "--set", "group_size=32", "--calib", "{text}", *OUT],
    ["quantize", "{model}", "--recipe", "quarot4bit", *SMALL, "--calib", "{text}", *OUT, "--max-memory", "3GiB"],
    ["plan", "{model}", "--recipe", "int4", *SMALL],
    ["transform", "{model}", "--recipe", "quarot4bit", *SMALL, *OUT],
    ["generate", "{model}", "--prompt", "once", "--max-new-tokens", "4"],
    ["eval", "{model}", "--text", "{text}", "--seq-len", "32", "--max-tokens", "64"],
    [
        "allocate",
        "--measure",
        "{model}",
        "--recipe",
        "mixed3bit",
        *SMALL,
        "--calib",
        "{text}",
        "--set",
        "allocate.samples=2",
    ],
    ["verify", "{model}"],
    ["inspect", "{model}"],
)
TEXT = Path(__file__)


def prepare(folder: Path, name: str) -> Path:
    """Return a checkpoint of several shards, written the first time."""
    return _prepared(folder, name)


@functools.cache
def _prepared(folder: Path, name: str) -> Path:
    from helpers import pico

    return edits.sealed(pico.save_pico(name, folder / f"base-{name}", shards=True))


def make(random: Random, folder: Path, few: bool = False) -> Case:
    name = random.choice(BASES[: 1 if few else None])
    directory = prepare(folder, name)
    names = sorted(path.name for path in directory.iterdir())
    often = [n for n in names if n.endswith(".safetensors") or n in ("config.json", "model.safetensors.index.json")] * 3
    changes = [edits.random_edit(directory, random, names + often) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    return {"base": name, "edits": changes, "words": random.choice(COMMANDS)}


def judge(case: Case, folder: Path, place: Path) -> Verdict:
    """Run the command; what is refused leaves nothing behind and changes nothing."""
    directory = edits.linked(_prepared(folder, case["base"]), place / "model")
    edits.apply(directory, case["edits"])
    if "--overwrite" in case["words"]:
        (place / "out").mkdir()
        (place / "out" / edits.MANIFEST).write_text("{}")
        (place / "out" / "precious").write_text("kept")
    known = {"model": str(directory), "text": str(TEXT), "place": str(place)}
    with litter.watched(place) as left:
        verdict = verdicts.command([word.format(**known) for word in case["words"]])
    return left(verdict)
