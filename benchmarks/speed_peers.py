"""Measure tokens per CPU second of checkpoints beside other tools', side by side in one run, on one thread.

    python benchmarks/speed_peers.py \\
        --ours int4=models_out/model-int4 --torch bfloat16=model --llama-cpp Q4_0=model-Q4_0.gguf \\
        --pair int4/Q4_0 --out benchmarks/results/speed_peers.json

Each tool is a process of its own that holds its model (benchmarks/speed_tools/); they take turns in every measurement,
so that other work on the machine meets all alike. A figure is the median of the turns, with the least and the most
beside it. llama.cpp needs llama-cpp-python, whose build must be for this processor (LLAMA_CPP_LIB_PATH names one);
ctranslate2 needs a model that its converter wrote; onnxruntime reads what `compress export --to onnx` writes.
--peer-python names the interpreter that has these packages, which need not be the one of compress.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure import ROOT, machine

TOOLS = ROOT / "benchmarks" / "speed_tools"
SCRIPTS = {
    "ours": "ours.py",
    "torch": "ours.py",
    "llama_cpp": "llama_cpp_tool.py",
    "ctranslate2": "ctranslate2_tool.py",
    "onnxruntime": "onnxruntime_tool.py",
}
PEERS = ("llama_cpp", "ctranslate2", "onnxruntime")
WORK: dict[str, dict[str, Any]] = {
    "decode 128": {"work": "decode", "context": 128, "rows": 1, "tokens": 32},
    "decode 2048": {"work": "decode", "context": 2048, "rows": 1, "tokens": 16},
    "decode 128, 8 sequences": {"work": "decode", "context": 128, "rows": 8, "tokens": 12},
    "prefill 512": {"work": "prefill", "context": 0, "rows": 1, "tokens": 512},
}


class Figure(NamedTuple):
    """Tokens per CPU second of a tool in a piece of work: of the median, the slowest and the fastest turn."""

    median: float
    least: float
    most: float


class Candidate:
    """A running process of a tool that holds a model."""

    def __init__(self, name: str, command: Sequence[str | Path], env: dict[str, str]) -> None:
        self.name = name
        one = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        self.process = subprocess.Popen(
            [*map(str, command)],
            env=os.environ | one | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.loaded = self._read()

    def ask(self, question: dict[str, Any]) -> float:
        """Return the tokens per CPU second of some work."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return float(answer["tokens"] / answer["cpu_s"])

    def close(self) -> int:
        """End the process; return the most memory that it had, bytes."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        _, _, used = os.wait4(self.process.pid, 0)
        self.process.returncode = 0
        return used.ru_maxrss * 1024

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended; run its command alone to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(arguments: argparse.Namespace) -> list[Candidate]:
    """Start the processes that the command line names."""
    candidates = []
    for tool, script in SCRIPTS.items():
        for text in getattr(arguments, tool):
            name, _, path = text.partition("=")
            if not path:
                raise SystemExit(f"--{tool.replace('_', '-')} {text}: write NAME=PATH")
            python = arguments.peer_python if tool in PEERS else sys.executable
            options = ["--dtype", name] if tool == "torch" else []
            if tool not in PEERS and arguments.avx2:
                options.append("--avx2")
            candidates.append(Candidate(name, [python, TOOLS / script, path, *options], {}))
    return candidates


def measure(candidates: Sequence[Candidate], work: Sequence[str], turns: int) -> dict[str, dict[str, Figure]]:
    """Return figures by work and name; the candidates take turns."""
    figures: dict[str, dict[str, Figure]] = {}
    for name in work:
        speeds: dict[str, list[float]] = {each.name: [] for each in candidates}
        for turn in range(turns):
            for each in candidates if turn % 2 == 0 else reversed(candidates):
                speeds[each.name].append(each.ask(WORK[name]))
        figures[name] = {
            each: Figure(statistics.median(values), min(values), max(values)) for each, values in speeds.items()
        }
        print(name, {each: round(figure.median, 2) for each, figure in figures[name].items()}, file=sys.stderr)
    return figures


def ratios(figures: dict[str, dict[str, Figure]], pairs: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return by pair "OURS/PEER" and work how many times as fast the first is, by medians."""
    by_pair: dict[str, dict[str, float]] = {}
    for pair in pairs:
        ours, _, peer = pair.partition("/")
        by_pair[pair] = {work: row[ours].median / row[peer].median for work, row in figures.items()}
    return by_pair


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for tool in SCRIPTS:
        option = f"--{tool.replace('_', '-')}"
        parser.add_argument(option, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--pair", action="append", default=[], metavar="OURS/PEER", help="a ratio to print")
    parser.add_argument("--work", action="append", choices=list(WORK), help="default: all")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--avx2", action="store_true", help="ours and torch as without AVX-512; build peers alike")
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse()
    candidates = start(arguments)
    figures = measure(candidates, arguments.work or list(WORK), arguments.turns)
    peaks = {each.name: each.close() for each in candidates}
    result = {
        "machine": machine(),
        "avx2_only": arguments.avx2,
        "turns": arguments.turns,
        "tokens_per_cpu_second": {
            work: {name: figure._asdict() for name, figure in row.items()} for work, row in figures.items()
        },
        "ratios": ratios(figures, arguments.pair),
        "loading": {each.name: {**each.loaded, "peak_rss_bytes": peaks[each.name]} for each in candidates},
    }
    print(json.dumps(result["ratios"], indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
