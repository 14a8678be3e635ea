"""Run the steps of a row, each in a process of its own, and judge what came of it.

    build       a model of few layers and hidden size 128 with random weights, in bfloat16, saved with a tokenizer
    plan        compress plan --recipe int4 --json
    int8        compress quantize --recipe int8, which needs no data and is nearly lossless
    int4        compress quantize --recipe int4 with a small calibration text
    rotate      compress transform --recipe quarot4bit: a float checkpoint, whose logits must be those of the model
    quarot4bit  compress quantize --recipe quarot4bit
    kv4         compress quantize --recipe kv4, then generate behind a prompt that is longer than the exact window

After each step that writes a model, from_pretrained loads it (float32, CPU), and its logits are compared with those of
the original: error = |q - fp| / |fp - mean|. Outcomes: ok; refused (one line, which is kept); usage; crash; wrong (not
finite, or an error above the bound of the step); killed; timeout.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from compress.__main__ import main
from sweep import models
from sweep.tables import VOCABULARY

STEPS = ("plan", "int8", "int4", "rotate", "quarot4bit", "kv4")
# Of random weights; what is wired wrongly is at 1 and more. int8: 0.01 of dense models, to 0.15 where experts flip.
BOUNDS = {"int8": 0.25, "int4": 0.9, "rotate": 0.15, "quarot4bit": 0.9, "kv4": 0.5}  # rotate: bfloat16 once more
TRACE = "Traceback (most recent call last)"
SMALL = ("--set", "calibration.num_samples=4", "--set", "calibration.seq_len=32")
ADVICE = {  # what a refusal says -> the setting that it advises
    "other_layers": ["--set", "kv_cache.other_layers=exact"],
    "--dtype float32": ["--dtype", "float32"],
}
LONG = 300  # tokens of the prompt of kv4


class Place(NamedTuple):
    """Where the files are."""

    work: Path  # of the row: base, out, logs
    tokenizer: Path
    text: Path
    timeout: float  # seconds for one process

    @property
    def base(self) -> Path:
        return self.work / "base"

    @property
    def answer(self) -> Path:
        return self.work / "answer.json"


class Ended(NamedTuple):
    """How a process ended; code None: it was stopped after the timeout."""

    code: int | None
    out: str
    err: str

    @property
    def last(self) -> str:
        return (self.err.strip().splitlines() or [""])[-1][:400]


def run_row(name: str, steps: tuple[str, ...], place: Place) -> dict[str, Any]:
    """Return the row of a model: how it was built, and step -> what came of it."""
    shutil.rmtree(place.work, ignore_errors=True)
    place.work.mkdir(parents=True)
    started = time.time()
    row: dict[str, Any] = {"model": name}
    ended = in_process(place, _build, name, place)
    row["build"] = "ok" if ended.code == 0 else f"build: {ended.last or f'ended by {ended.code}'}"
    if ended.code == 0:
        row |= json.loads(place.answer.read_text())
        for step in steps:
            row[step] = run_step(name, step, place, row["linear"])
    row["seconds"] = round(time.time() - started, 1)
    return row


def run_step(name: str, step: str, place: Place, linear: int) -> dict[str, Any]:
    """Return the outcome of a step, and what goes with it: error, share of `linear` packed, what was said."""
    started, out = time.time(), place.work / "out"
    entry = _command(step, place, out)
    if entry["outcome"] == "ok" and step != "plan":
        place.answer.unlink(missing_ok=True)
        ended = in_process(place, _compare, name, step, place, out)
        if ended.code != 0:
            outcome = "crash" if TRACE in ended.err else "killed" if ended.code else "timeout"
            entry |= {"outcome": outcome, "said": f"reload: {ended.last}"}
        else:
            entry |= json.loads(place.answer.read_text())
            entry["share"] = entry.pop("packed") / max(1, linear)
    shutil.rmtree(out, ignore_errors=True)
    return {**entry, "seconds": round(time.time() - started, 1)}


def _command(step: str, place: Place, out: Path) -> dict[str, Any]:
    """Run the command line of a step; where its advice is one more setting, follow it."""
    tiny = [*SMALL, "--calib", str(place.text)]
    words = {
        "plan": ["plan", str(place.base), "--recipe", "int4", "--json"],
        "int8": ["quantize", str(place.base), "--recipe", "int8"],
        "rotate": ["transform", str(place.base), "--recipe", "quarot4bit"],
        "kv4": ["quantize", str(place.base), "--recipe", "kv4"],
    }.get(step, ["quantize", str(place.base), "--recipe", step, *tiny])
    words += [] if step == "plan" else ["--out", str(out)]
    entry = _judged(in_process(place, _main, words))
    if entry["outcome"] == "usage" and step == "rotate":
        entry = _judged(in_process(place, _main, [*words, *tiny]))
    for refused, advice in ADVICE.items():
        if entry["outcome"] == "refused" and refused in entry["said"]:
            entry = {**_judged(in_process(place, _main, [*words, *advice])), "first": f"refused: {refused}"}
    if entry["outcome"] == "refused" and "--allow-partial" in entry["said"]:
        said = entry["said"]
        entry = {**_judged(in_process(place, _main, [*words, "--allow-partial"])), "partial": said}
    return entry


def _judged(ended: Ended) -> dict[str, Any]:
    if ended.code == 0:
        return {"outcome": "ok", "said": ""}
    if ended.code is None:
        return {"outcome": "timeout", "said": ""}
    if ended.code < 0:
        return {"outcome": "killed", "said": f"signal {-ended.code}"}
    kind = "crash" if TRACE in ended.err else {1: "refused", 2: "usage"}.get(ended.code, "crash")
    return {"outcome": kind, "said": ended.last}


def in_process(place: Place, target: Callable[..., None], *args: Any) -> Ended:
    """Call a function in a forked process, so that nothing it does reaches the next one; keep what it prints."""
    out, err = place.work / "stdout.txt", place.work / "stderr.txt"
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(out, err, target, args))
    process.start()
    process.join(place.timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Ended(None, out.read_text(), f"timeout after {place.timeout:.0f} s")
    ended = Ended(process.exitcode, out.read_text(), err.read_text())
    with (place.work / "log.txt").open("a") as log:
        log.write(f"$ {target.__name__} {args}\n{ended.out}\n{ended.err}\n")
    return ended


def _in_child(out: Path, err: Path, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)  # makes a thread pool for this process
    target(*args)


def _main(words: list[str]) -> None:
    sys.argv = ["compress", *words]
    main()


def _build(name: str, place: Place) -> None:
    built = models.build(name, place.base, place.tokenizer)
    model = models.load(name, place.base)
    tensors = {"logits": logits(model)}
    place.answer.write_text(json.dumps(built._asdict()))
    save_file(tensors, place.work / "wanted.safetensors")


def _compare(name: str, step: str, place: Place, out: Path) -> None:
    """Load what was written, compare its logits, and answer with the outcome."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = models.load(name, out)
    entry: dict[str, Any] = {"warnings": sorted({str(w.message)[:150] for w in seen})[:3]}
    if step == "kv4":
        wanted, plain = generated(models.load(name, place.base))
        found, entry["cache"] = generated(model)
        entry["error"] = error_of(found[:, :2], wanted[:, :2])
        if entry["cache"] == plain:
            entry |= {"outcome": "wrong", "said": f"generate used {plain}: nothing is quantized"}
    else:
        entry["error"] = error_of(logits(model), load_file(place.work / "wanted.safetensors")["logits"])
    if not entry["error"] <= BOUNDS[step]:  # NaN too
        entry |= {"outcome": "wrong", "said": f"error {entry['error']:.3f} of logits"}
    entry["packed"] = models.packed(name, out, place.base)
    place.answer.write_text(json.dumps(entry))


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Return float32 logits [2, 48, vocabulary] of fixed tokens."""
    ids = torch.randint(5, VOCABULARY - 5, (2, 48), generator=torch.Generator().manual_seed(1))
    found: Tensor = model(input_ids=ids).logits.float()
    return found


@torch.no_grad()
def generated(model: PreTrainedModel) -> tuple[Tensor, str]:
    """Return the logits of the first tokens behind a long prompt, and the class of the cache."""
    ids = torch.randint(5, VOCABULARY - 5, (1, LONG), generator=torch.Generator().manual_seed(2))
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out: Any = model.generate(ids, output_logits=True, return_dict_in_generate=True, **settings)
    return torch.stack(out.logits, 1).float(), type(getattr(out, "past_key_values", None)).__name__


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Return the error of logits relative to their spread; NaN where they are not finite or of another shape."""
    if found.shape != wanted.shape or not torch.isfinite(found).all():
        return float("nan")
    centred = wanted - wanted.mean(-1, keepdim=True)
    return float(((found - found.mean(-1, keepdim=True)) - centred).norm() / centred.norm().clamp_min(1e-9))
