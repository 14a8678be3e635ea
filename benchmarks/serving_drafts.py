"""Tokens a second of vLLM on a packed checkpoint with and without drafts, in turns, and how many of these are accepted.

    make vllm                                                      # once: the environment
    .venv-vllm/bin/python benchmarks/serving_drafts.py DIR VIEW    # on one thread; VIEW: a level of DIR as its draft
    .venv-vllm/bin/python benchmarks/serving_drafts.py show

VIEW is made by `compress export DIR --level 4 --link --out VIEW`. Beside it n-grams of the text before are a draft.
Each engine is a process of its own that waits for the others to finish. A figure is the median of `--repeats` turns;
seconds are processor time without that of the first token: the machine may have other work, which the load average
shows. Texts are continued greedily. An answer that differs from the one without drafts is told by the distance, in
nats, between the token that was written and the likeliest one where the two first differ: kernels round otherwise for
several rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT
from serving import ENVIRONMENT

FILE = ROOT / "benchmarks/results/serving_drafts_cpu.json"
TOKENS = 96  # that a request generates
PROMPT_CHARACTERS = 1200
LINE = "Item {n}: the blue box holds {n} red balls and the red box holds {n} blue balls.\n"


def texts(prose: Path) -> dict[str, str]:
    """Return what is continued, by kind."""
    code = (ROOT / "compress/serving/parts.py").read_text()
    return {
        "prose": prose.read_text()[PROMPT_CHARACTERS : 2 * PROMPT_CHARACTERS],
        "code": code[: 2 * PROMPT_CHARACTERS],
        "repetitive": "".join(LINE.format(n=n) for n in range(1, 15)),
    }


def draft_of(kind: str, count: int) -> dict[str, Any] | None:
    """Return vLLM's settings of a draft: none, n-grams of the text, or the model of a directory."""
    if kind == "none":
        return None
    if kind == "ngram":
        return {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return {"method": "draft_model", "model": kind, "num_speculative_tokens": count}


def engine(model: str, draft: str, count: int) -> None:
    """Serve turns: read a text from the input, write what was generated, and the seconds of this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        distributed_executor_backend="uni",
        enable_prefix_caching=True,  # the second time a prompt is there
        disable_log_stats=False,
        speculative_config=draft_of(draft, count),
    )

    def counts() -> dict[str, int]:
        found = [each for each in llm.get_metrics() if each.name.startswith("vllm:spec_decode_num_")]
        return {each.name.removeprefix("vllm:spec_decode_num_"): each.value for each in found if hasattr(each, "value")}

    def generate(text: str, tokens: int) -> tuple[Any, float]:
        started = time.process_time()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
        (output,) = llm.generate([text], sampling, use_tqdm=False)
        return output.outputs[0], time.process_time() - started

    def run(text: str) -> dict[str, Any]:
        _, first = generate(text, 1)  # what is not cached of the prompt, and its first token
        before = counts()
        answer, seconds = generate(text, TOKENS + 1)
        seconds -= first
        likely = [{str(key): value.logprob for key, value in each.items()} for each in answer.logprobs]
        rounds = {key: value - before.get(key, 0) for key, value in counts().items()}
        return {"seconds": seconds, "ids": list(answer.token_ids), "likely": likely, "rounds": rounds}

    print("ready", flush=True)
    for line in sys.stdin:
        print(f"result {json.dumps(run(json.loads(line)))}", flush=True)


class Engine:
    """A process that runs `engine`."""

    def __init__(self, model: Path, draft: str, count: int) -> None:
        words = [sys.executable, __file__, "engine", str(model), draft, "--count", str(count)]
        pipe = subprocess.PIPE
        environment = {**os.environ, **ENVIRONMENT}
        self.process = subprocess.Popen(
            words, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self._next("ready")

    def turn(self, text: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(text) + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self._next("result")))

    def _next(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"the engine has ended before {word}")


def gap(own: dict[str, Any], plain: dict[str, Any]) -> float:
    """Return by how much the token where two answers first differ is less likely without drafts; 0: they are equal."""
    for one, other, likely in zip(own["ids"], plain["ids"], plain["likely"], strict=True):
        if one != other:
            return float(likely[str(other)] - likely.get(str(one), float("-inf")))
    return 0.0


def compare(model: Path, drafts: dict[str, str], prose: Path, count: int, repeats: int) -> dict[str, Any]:
    """Return for each kind of text and draft: tokens a second, the ratio to none, tokens a round, and gaps."""
    engines = {name: Engine(model, draft, count) for name, draft in drafts.items()}
    figures: dict[str, Any] = {}
    for kind, text in texts(prose).items():
        turns = [{name: each.turn(text) for name, each in engines.items()} for _ in range(repeats + 1)][1:]
        for name in drafts:
            own = [turn[name] for turn in turns]
            rounds = own[0]["rounds"]
            figures[f"{kind}, {name}"] = {
                "tokens_per_second": TOKENS / statistics.median(each["seconds"] for each in own),
                "ratio": statistics.median(turn["none"]["seconds"] / turn[name]["seconds"] for turn in turns),
                "tokens_a_round": 1 + rounds["accepted_tokens"] / rounds["drafts"] if rounds.get("drafts") else None,
                "gap": gap(own[0], turns[0]["none"]),
            }
            print(kind, name, figures[f"{kind}, {name}"], flush=True)
    for each in engines.values():
        each.process.communicate()
    return figures


def show() -> None:
    rows = []
    for row in result_file.read(FILE):
        load = f"{row['machine']['load_average'][0]:.1f} to {row['load_average_after'][0]:.1f}"
        for case, f in row["figures"].items():
            taken = f"{f['tokens_a_round']:.2f}" if f["tokens_a_round"] else ""
            speed = f"{f['tokens_per_second']:.1f}"
            rows.append((row["target"], row["count"], case, speed, f"{f['ratio']:.2f}", taken, f"{f['gap']:.3f}", load))
    names = ("target", "drafted", "text, draft", "tokens/s", "ratio", "tokens a round", "gap", "load")
    result_file.present("vLLM with and without drafts, one thread", names, rows, ("target", "drafted", "text, draft"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", help="show, engine, or the target")
    parser.add_argument("drafts", nargs="*", help="directories of draft models; of an engine: its target and draft")
    parser.add_argument("--count", type=int, default=3, help="tokens drafted at a time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prose", type=Path, default=ROOT / "tests/data/books_heldout.txt")
    args = parser.parse_args()
    if args.mode == "engine":
        engine(*args.drafts, args.count)
    elif args.mode == "show":
        show()
    else:
        target = Path(args.mode)
        drafts = {"none": "none", "ngram": "ngram", **{Path(each).name: each for each in args.drafts}}
        facts = {"target": target.name, "count": args.count}

        def run() -> dict[str, Any]:
            return {"figures": compare(target, drafts, args.prose, args.count, args.repeats)}

        result_file.add(FILE, facts, True, target.name, run)


if __name__ == "__main__":
    main()
