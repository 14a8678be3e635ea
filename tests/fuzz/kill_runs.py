"""The kinds of run that are killed, and what a run leaves, so that two can be compared byte for byte."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = Path(__file__)
SMALL = ("calibration.num_samples=8", "calibration.seq_len=32")
GPTQ = (*SMALL, "group_size=32")
KVQUANT = "kv_cache={method: kvquant, keys: {bits: 3}, values: {bits: 3}, residual_length: 16}"
NARROW = (*SMALL, "kv_cache.keys.group_size=16", "kv_cache.values.group_size=16")
ALLOCATED = (
    *SMALL,
    "allocate.samples=2",
    "allocate.target=5bpw",
    "allocate.options=[{method: rtn, bits: 2}, {method: rtn, bits: 4}]",
)
SEARCHED = (*SMALL, "allocate.samples=4", "allocate.generations=3", "allocate.offspring=4", "group_size=32")
SEARCHED = (*SEARCHED, "allocate.options=[{bits: 2}, {bits: 3}, {bits: 4}]", "allocate.target=4.5bpw")
TIMES = re.compile(
    r"program_nbytes|seconds|peak|memory|resumed|\bs$|per_second"
)  # keys of what two equal runs report differently
OLD = {"old": b"old", "compress_manifest.json": b"old"}


@dataclass(frozen=True)
class Kind:
    """A command line: {model} is a model of `shape`, {out} what it writes beside which measurements may lie."""

    shape: str
    recipe: str
    sets: tuple[str, ...] = SMALL
    options: tuple[str, ...] = ()
    command: str = "quantize"
    own_text: bool = False  # the model writes its calibration text
    replaces: bool = False  # an existing output

    def words(self, models: Path, place: Path) -> list[str]:
        """Return the command line of a run in this place."""
        words = [self.command, str(models / self.shape), "--recipe", self.recipe]
        words += [word for text in self.sets for word in ("--set", text)]
        words += [] if self.own_text else ["--calib", str(TEXT)]
        words += [word.replace("{place}", str(place)) for word in self.options]
        return words if self.command == "allocate" else [*words, "--out", str(place / "out")]


MEASUREMENTS = ("--measurements", "{place}/measured")
KINDS: dict[str, Kind] = {
    "rtn": Kind("llama", "int8"),
    "gptq": Kind("llama", "int4", GPTQ),
    "trellis": Kind("llama", "vq2bit", (*SMALL, "state_bits=8")),
    "vectors": Kind("wide", "gptvq2bit", ("calibration.num_samples=4", "calibration.seq_len=32")),
    "rotated": Kind("llama", "quarot4bit"),
    "rotation searched": Kind(
        "llama", "w4a4kv4", (*SMALL, *NARROW, "transform.0.seeds=3", "transform.0.search_samples=2")
    ),
    "rotation learned": Kind("llama", "w4a4kv4", (*NARROW, "transform.0.learn=3")),
    "awq": Kind("llama", "awq4bit", GPTQ),
    "smooth": Kind("llama", "w8a8-smooth"),
    "trained": Kind("llama", "int4", (*GPTQ, "bits=2", "lowrank={rank: 4, train: 8}")),
    "blocks trained": Kind("llama", "int4", (*GPTQ, "bits=2", "lowrank={rank: 4, train_blocks: 8, train: 4}")),
    "lord": Kind("llama", "lord20"),
    "cache": Kind("llama", "int8", (*SMALL, KVQUANT)),
    "w4kv2": Kind("llama", "w4kv2", (*GPTQ, "kv_cache.residual_length=16")),
    "target correction": Kind("llama", "int4", (*GPTQ, "calibration.target_correction=0.25")),
    "importance": Kind("llama", "rsq3bit", GPTQ),
    "experts": Kind("mixtral", "moe2.5bit", (*GPTQ, "allocate.target=5bpw")),
    "measure": Kind("llama", "mixed3bit", ALLOCATED, (*MEASUREMENTS, "--measure"), "allocate"),
    "allocate": Kind("llama", "mixed3bit", ALLOCATED, (*MEASUREMENTS, "--points", "2", "--json"), "allocate"),
    "target": Kind("llama", "mixed3bit", ALLOCATED, ("--target", "5bpw", *MEASUREMENTS)),
    "search": Kind("llama", "evo3bit", SEARCHED, MEASUREMENTS),
    "processes": Kind("llama", "evo3bit", SEARCHED, (*MEASUREMENTS, "--processes", "2")),
    "own text": Kind("llama", "int4", (*GPTQ, KVQUANT), own_text=True),
    "own text, target": Kind("llama", "mixed3bit", ALLOCATED, ("--target", "5bpw", *MEASUREMENTS), own_text=True),
    "overwrite": Kind("llama", "int4", GPTQ, ("--overwrite",), replaces=True),
    "transform": Kind("llama", "quarot4bit", command="transform"),
    "little memory": Kind("llama", "int4", (*GPTQ, "calibration.num_samples=64"), ("--max-memory", "{limit}")),
}


def prepare(models: Path) -> None:
    """Write the models."""
    from helpers import pico

    wide = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    pico.save_pico("llama", models / "llama", shards=True)
    pico.save_pico("mixtral", models / "mixtral", shards=True)
    pico.save_pico("llama", models / "wide", changes=wide)


def begin(kind: Kind, place: Path) -> None:
    """Empty the place of a run; an output that is to be replaced lies there."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if kind.replaces:
        (place / "out").mkdir()
        for name, data in OLD.items():
            (place / "out" / name).write_bytes(data)


def is_done(place: Path, err: str) -> bool:
    """Return whether a run was refused because its output is in place: it had been killed right after that.

    What that run had not removed yet is removed here.
    """
    done = "out exists already" in err and (place / "out").is_dir()
    if done and not (place / "out.partial" / "model").exists():
        shutil.rmtree(place / "out.partial", ignore_errors=True)
    return done


def left(place: Path) -> dict[str, str]:
    """Return every file below a place -> the hash of what it holds but times."""
    files = [path for path in sorted(place.rglob("*")) if path.is_file() and not _is_skipped(path)]
    return {str(path.relative_to(place)): _hash(path) for path in files}


def _is_skipped(path: Path) -> bool:
    """Return whether a file holds times only, or pictures of them, or how a run was arranged."""
    return path.name in ("lock", "run.json", "frontier.png", "report.html") or path.suffix == ".pyc"


def _hash(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".json" and path.name != "config.json":
        try:
            content = json.loads(data)
        except ValueError:
            content = None
        if path.name == "compress_manifest.json" and isinstance(content, dict):
            for facts in ("files", "sizes"):  # report.json holds times
                content.get(facts, {}).pop("report.json", None)
        data = json.dumps(_timeless(content), sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def _timeless(value: Any) -> Any:
    """Return JSON without what is measured of time and memory, in keys and in notes."""
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if not TIMES.search(key)}
    if isinstance(value, list):
        return [_timeless(inner) for inner in value]
    return re.sub(r"\d+(\.\d+)? (s|seconds|[KMG]iB)\b", "", value) if isinstance(value, str) else value


def is_safe(kind: Kind, place: Path, new: dict[str, str]) -> bool:
    """Return whether a replaced output is in place, or put aside, or the new one is there."""
    if not kind.replaces:
        return True
    for folder in (place / "out", place / "out.partial" / "old"):
        if folder.is_dir() and {path.name: path.read_bytes() for path in folder.iterdir()} == OLD:
            return True
    return {name: digest for name, digest in left(place).items() if name.startswith("out/")} == {
        name: digest for name, digest in new.items() if name.startswith("out/")
    }
