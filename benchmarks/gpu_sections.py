"""The cases of every section of gpu.py: on a GPU at real sizes, on a CPU tiny ones by the same code."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_child import Case, Row, SkippedError
from gpu_kernels import ENTRIES, TIMED, TIMED_ROWS, kernels
from measure import ROOT

SAME_KL = 0.1  # of KL divergence: how far two devices may be apart, whose sums are rounded differently
SAME_ERROR = 0.1  # of a linear's relative output error, which depends on the damping: the text has few different bytes
TOKENS = {"cuda": [32768, 131072], "cpu": [1024]}
LEAST_S = {"cuda": 0.1, "cpu": 0.02}  # for each kind of product that is timed


def folder() -> Path:
    """Return the folder for models of this run."""
    return Path(os.environ["COMPRESS_GPU_FOLDER"])


# Tests with the mark `gpu`.


def tests(device: str) -> list[Case]:
    """One case for all by pytest, where that is installed, else one for each."""
    import bare_tests

    if importlib.util.find_spec("pytest") is not None:
        return [Case("pytest -m gpu", by_pytest, 240)]

    def one(test: Callable[[], None]) -> Row:
        test()
        return {}

    return [Case(name, functools.partial(one, test)) for name, test in bare_tests.collected()]


def by_pytest() -> Row:
    import bare_tests

    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-rfEs",
        "-o",
        "filterwarnings=default",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, *map(str, bare_tests.files())], capture_output=True, text=True, cwd=ROOT, check=False
    )
    last = (done.stdout + done.stderr).strip().splitlines()[-12:]
    found = {
        state: int(count)
        for count, state in re.findall(r"(\d+) (passed|failed|skipped|error)", last[-1] if last else "")
    }
    if set(found) == {"skipped"}:
        raise SkippedError(f"{found['skipped']} tests, all: " + "; ".join(last[:-1])[-200:])
    assert done.returncode == 0, "\n".join(last)
    return found


# Quantization on the device and on the CPU.


def model(device: str) -> list[Case]:
    """The bundled model by several recipes."""
    small = ("calibration.num_samples=32", "calibration.seq_len=256")
    asked: list[tuple[str, Sequence[str]]] = [
        ("int4", small),
        ("vq2bit", (*small, "state_bits=8")),
        ("e8p2bit", small),
        ("gptvq2bit", small),
        ("vptq2bit", small),
    ]
    if device == "cpu":
        tiny = ("calibration.num_samples=2", "calibration.seq_len=32", "embeddings={keep: true}", "head={keep: true}")
        asked = [("int4", tiny)]
    return [Case(f"books-8m {name}", functools.partial(both, device, name, given), 110) for name, given in asked]


def both(device: str, recipe: str, settings: Sequence[str]) -> Row:
    """Quantize on the device and on the CPU and score each on its own: as far from the original within noise."""
    import torch

    from compress import evaluate

    original, text = ROOT / "tests/models/books-8m", ROOT / "tests/data/books_heldout.txt"
    windows: dict[str, Any] = {"seq_len": 128, "max_tokens": 8192 if device == "cuda" else 256}
    found: Row = {}
    for where in (device, "cpu"):
        out = folder() / f"{recipe}-{where}{'' if where in found else '-1'}"
        seconds = quantized(original, recipe, settings, where, out)
        scores: Any = evaluate.evaluate(
            out, text, original, **windows, execution=evaluate.scores.Execution(device=where)
        )
        found[where] = {"kl": scores.kl_mean, "kl_se": scores.kl_se, **seconds}
        if where == "cuda":
            fast = evaluate.scores.Execution("bfloat16", "cuda")
            found["kl_bfloat16"] = evaluate.evaluate(out, text, original, **windows, execution=fast).kl_mean  # type: ignore[attr-defined]
            torch.cuda.empty_cache()
    ratio = found[device]["kl"] / found["cpu"]["kl"]
    assert abs(ratio - 1) <= SAME_KL, f"KL differs: {found}"
    return {**found, "kl_ratio": ratio}


def quantized(source: Path, recipe: str, settings: Sequence[str], device: str, out: Path) -> Row:
    """Quantize a checkpoint; return seconds and the peak of the device's memory."""
    import torch

    import compress
    from compress import recipe as recipes

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    calib = str(ROOT / "tests/data/books_calib.txt")
    job = compress.Job(
        str(source), recipes.load(recipe, settings), out, calib=calib, device=device, overwrite=True, restart=True,
        allow_partial=True,
    )  # fmt: skip
    report = compress.quantize(job)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    errors = {row["name"]: row["output_error"] for row in report["layers"]}
    return {
        "seconds": report["seconds"]["quantize"],
        "device_nbytes": peak,
        "errors": errors if len(errors) < 9 else {},
    }


BLOCKS: dict[str, dict[str, dict[str, int]]] = {
    "cuda": {
        "1.1B": {},
        "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8},
    },
    "cpu": {"tiny": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}},
}


def blocks(device: str) -> list[Case]:
    """One random block of each shape, whole on the device, one of its linears on the CPU."""
    few = ("calibration.num_samples=16", "calibration.seq_len=256", "calibration.importance=none")
    asked = [("int4", ()), ("vq2bit", ("state_bits=10",)), ("e8p2bit", ()), ("gptvq2bit", ())]
    if device == "cpu":
        few = ("calibration.num_samples=2", "calibration.seq_len=32", "calibration.importance=none")
        asked = [("int4", ()), ("vq2bit", ("state_bits=6",))]
    cases = [
        Case(f"{shape} block {recipe}", functools.partial(block, device, shape, recipe, (*few, *settings)), 100)
        for shape in BLOCKS[device]
        for recipe, settings in asked
    ]
    if device == "cuda":  # the search as it is shipped, on the device alone
        cases += [
            Case(f"{s} block trellis", functools.partial(block, device, s, "vq2bit", few, False), 100)
            for s in BLOCKS[device]
        ]
    return cases


def block(device: str, shape: str, recipe: str, settings: Sequence[str], compares: bool = True) -> Row:
    """Quantize a block on the device; compare the output error of its keys' linear with that on the CPU."""
    import random_llama

    of_shape = random_llama.Shape(**{"num_hidden_layers": 1, "vocab_size": 512, **BLOCKS[device][shape]})
    source = folder() / f"{shape}-{os.getpid()}"
    if not source.exists():
        random_llama.write(source, of_shape)
    keep = ("embeddings={keep: true}", "head={keep: true}")
    found: Row = {
        device: quantized(source, recipe, (*settings, *keep), device, folder() / f"{shape}-{os.getpid()}-out")
    }
    if compares:
        others = "ignore=[lm_head, '*mlp*', '*q_proj', '*v_proj', '*o_proj']"
        out = folder() / f"{shape}-{os.getpid()}-cpu"
        found["on the CPU"] = quantized(source, recipe, (*settings, *keep, others), "cpu", out)
        ((name, error),) = found["on the CPU"]["errors"].items()
        found["ratio"] = found[device]["errors"][name] / error
        assert abs(found["ratio"] - 1) <= SAME_ERROR, f"output errors differ: {found}"
    return found


# Times.


def speed(device: str) -> list[Case]:
    """Products with packed weights beside bfloat16."""
    return [
        Case(f"{entry} {shape[0]} x {shape[1]}", functools.partial(timed, device, entry, shape))
        for shape in TIMED[device]
        for entry in (ENTRIES if device == "cuda" else ["int4"])
    ]


def timed(device: str, entry: str, shape: tuple[int, int]) -> Row:
    import kernels as table

    return {"rows": [asdict(row) for row in table.time_rows(entry, shape, TIMED_ROWS[device], device, copied(device))]}


@functools.cache
def copied(device: str) -> float:
    """Return the bytes a second of a copy; from then on little time is taken for each product."""
    from compress.evaluate import speed

    rate = speed.copy_rate(device)
    speed.MIN_SECONDS_PER_KIND = LEAST_S[device]
    return rate


def attention(device: str) -> list[Case]:
    """One step over coded caches beside a bfloat16 cache."""
    methods = [("kivi", 4), ("kivi", 2), ("lloyd", 4), ("lloyd", 3), ("kivi", 8)] if device == "cuda" else [("kivi", 4)]
    return [
        Case(f"{method} {bits}, {tokens} tokens", functools.partial(timed_step, device, method, bits, tokens))
        for tokens in TOKENS[device]
        for method, bits in methods
    ]


def timed_step(device: str, method: str, bits: int, tokens: int) -> Row:
    import kv_attention

    copied(device)
    return {"row": asdict(kv_attention.time_row(method, bits, tokens, device))}


SECTIONS: dict[str, Callable[[str], list[Case]]] = {
    "kernels": kernels, "tests": tests, "model": model, "blocks": blocks, "speed": speed, "attention": attention,
}  # fmt: skip
