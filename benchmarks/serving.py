"""Tokens per second of vLLM on a packed checkpoint beside the same model in bfloat16, in turns.

    make vllm                                     # once: the environment
    .venv-vllm/bin/python benchmarks/serving.py   # on one thread
    .venv-vllm/bin/python benchmarks/serving.py show

A random Llama (random_llama.py) is stored in the recipe's format: rounded to nearest, or `trellis*` searched. Each
engine is a process of its own that waits for the other one to finish: they take turns request by request. A figure is
the median of `--repeats` turns; a ratio that of the ratios of neighbouring turns. Seconds are processor time: the
machine may have other work, which the load average shows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT
from random_llama import Shape, write

FILE = ROOT / "benchmarks/results/serving_cpu.json"
SHAPE = Shape(8, 1024, 2816, 16, 8, 32000)  # 160M parameters
TOKENS = 32  # that a request generates
PROMPT = 400  # tokens of a request whose prefill is timed
CASES = ("1 request", "8 requests", "prefill")
SETTINGS = ("--set", "quantize.method=rtn", "--set", "calibration.importance=none")
# Of a trellis: the least search that there is. Any window is read in the same time.
SEARCHED = (
    "quantize.state_bits=8",
    "calibration.importance=none",
    "calibration.num_samples=2",
    "calibration.seq_len=128",
)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def engine(model: str) -> None:
    """Serve turns: read the name of a case from the input, write the tokens per second of this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def run(case: str) -> float:
        is_prefill = case == "prefill"
        count = 2 if is_prefill else int(case.split(maxsplit=1)[0])
        length = PROMPT if is_prefill else 4
        prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 256 for j in range(length)]} for i in range(count)]
        sampling = SamplingParams(temperature=0, max_tokens=1 if is_prefill else TOKENS, ignore_eos=True)
        started = time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        return count * (PROMPT if is_prefill else TOKENS) / (time.process_time() - started)

    print("ready", flush=True)
    for line in sys.stdin:
        print(f"result {run(line.strip())}", flush=True)


class Engine:
    """A process that runs `engine`."""

    def __init__(self, model: Path) -> None:
        words = [sys.executable, __file__, "engine", str(model)]
        pipe = subprocess.PIPE
        environment = {**os.environ, **ENVIRONMENT}  # OpenMP reads it when torch is imported
        self.process = subprocess.Popen(
            words, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self._next("ready")

    def turn(self, case: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return float(self._next("result"))

    def _next(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"the engine has ended before {word}")


def compare(packed: Path, plain: Path, repeats: int) -> dict[str, Any]:
    """Return for each case the tokens per second of both, and the ratio."""
    engines = Engine(packed), Engine(plain)
    figures = {}
    for case in CASES:
        turns = [tuple(each.turn(case) for each in engines) for _ in range(repeats + 1)][1:]  # the first one warms up
        figures[case] = {
            "packed": statistics.median(own for own, _ in turns),
            "plain": statistics.median(other for _, other in turns),
            "ratio": statistics.median(own / other for own, other in turns),
        }
        print(case, figures[case], flush=True)
    for each in engines:
        each.process.communicate()
    return figures


def quantize(plain: Path, recipe: str) -> Path:
    """Return the checkpoint rounded to nearest, or coded by a short search of a trellis, written once."""
    out = plain.with_name(f"{plain.name}-{recipe}")
    if not out.exists():
        searched = [word for setting in SEARCHED for word in ("--set", setting)]
        settings = [*searched, "--calib", "tests/data/books_calib.txt"] if recipe.startswith("trellis") else SETTINGS
        words = ["quantize", str(plain), "--recipe", recipe, *settings, "--out", str(out)]
        subprocess.run([sys.executable, "-m", "compress", *words], check=True, cwd=ROOT)
    return out


def show() -> None:
    rows = []
    for row in result_file.read(FILE):
        load = f"{row['machine']['load_average'][0]:.1f} to {row['load_average_after'][0]:.1f}"
        for case, f in row["figures"].items():
            rows.append((row["recipe"], case, f"{f['packed']:.0f}", f"{f['plain']:.0f}", f"{f['ratio']:.2f}", load))
    names = ("recipe", "case", "tokens/s", "bfloat16", "ratio", "load")
    result_file.present("vLLM, packed and in bfloat16, one thread", names, rows, ("recipe", "case"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["run", "show", "engine"], default="run")
    parser.add_argument("model", nargs="?", help="of an engine")
    parser.add_argument("--recipes", nargs="+", default=["int4"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=ROOT / "models_out/serving")
    args = parser.parse_args()
    if args.mode == "engine":
        engine(args.model)
    elif args.mode == "show":
        show()
    else:
        plain = args.folder / "random"
        if not plain.exists():
            write(plain, SHAPE)
        for recipe in args.recipes:
            packed = quantize(plain, recipe)
            result_file.add(
                FILE, {"recipe": recipe}, True, recipe, lambda p=packed: {"figures": compare(p, plain, args.repeats)}
            )


if __name__ == "__main__":
    main()
