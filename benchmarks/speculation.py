"""What drafts bring on a checkpoint: accepted length, costs and speed-up, by kind of text, beside the target alone.

    python benchmarks/speculation.py ./my-model --drafts ngram --drafts level=4 --prose held_out.txt
    python benchmarks/speculation.py ./random-model --costs

For each prompt the target alone (generate of transformers) and each method write so many tokens, one after the other,
so that a busy machine slows all alike. Times are processor time of one thread between the first new token and the last,
so that reading the prompt does not count. Kinds: code (functions of this repository, to be completed), prose (of a
text), repetitive (a text that has to be written again with a word changed, lists that go on). Each method writes once
before it is timed, and passes of up to nine tokens are run: programs are made, and its lengths are found.

c: a drafted token over a plain step; v: a pass of so many tokens over a plain step; both as the loop timed them, in
seconds of the clock. "equal texts" counts texts that are the target's own, token for token. Rows go to --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import result_file
import torch
from torch import Tensor
from transformers import DynamicCache

import compress
from compress.kv import generation, hooks
from compress.kv.cache import make_cache
from compress.model import load as lm
from compress.runtime import levels, step
from compress.speculate import cost
from compress.speculate import generation as loops
from compress.speculate.cost import MAX_LENGTH
from compress.speculate.generation import Speculation

ROOT = Path(__file__).parents[1]
FILE = ROOT / "benchmarks" / "results" / "speculation_cpu.json"
ALONE = "target alone"
TIMED = 15  # passes of each kind, where they alone are timed
COLUMNS = ["accepted length", "acceptance", "drafted rounds", "tokens a pass", "c", "v"]
COLUMNS += ["ms/token", "speed-up", "least", "most", "equal texts"]
PLANES = {"method": "quantspec", "sink": 4, "residual_length": 128}
CODE = ("compress/numerics", "compress/evaluate", "compress/storage", "compress/kv", "compress/model")
RECORDS = ("name", "size", "colour", "price"), ("small", "blue", "12"), ("large", "green", "27"), ("small", "red", "8")


@dataclass(frozen=True)
class Task:
    """How a model is to write."""

    tokens: int
    temperature: float = 0.0
    planes: bool = False  # a cache of two planes of 4 bits


class Clock:
    """A streamer that notes the processor time of the first and the last new token."""

    def __init__(self) -> None:
        self.begun = self.ended = 0.0
        self.tokens, self.is_prompt = 0, True
        self.text: list[int] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt, then new tokens."""
        now = time.process_time()
        if self.is_prompt:
            self.is_prompt = False
            return
        if not self.begun:
            self.begun = now
            return  # the first token is the prompt's
        self.ended = now
        self.tokens += value.numel()

    def end(self) -> None:
        """Do nothing: the last token was put."""

    @property
    def seconds(self) -> float:
        """Seconds of a token."""
        return (self.ended - self.begun) / max(1, self.tokens)


@dataclass
class Result:
    """One method on one kind of text."""

    seconds: list[float] = field(default_factory=list)  # of a token, by prompt
    alone: list[float] = field(default_factory=list)  # of the target alone on the same prompt
    rounds: int = 0
    accepted: int = 0
    judged: int = 0
    plain_steps: int = 0
    equal: int = 0  # texts that are the target's own

    def row(self) -> dict[str, float]:
        """Return the figures of a line of the table."""
        ratios = [b / a for a, b in zip(self.seconds, self.alone, strict=True)]
        tokens = self.rounds + self.accepted + self.plain_steps
        return {
            "tokens a pass": round(tokens / max(1, self.rounds + self.plain_steps), 2),
            "accepted length": round(1 + self.accepted / max(1, self.rounds), 2),
            "acceptance": round(self.accepted / max(1, self.judged), 3),
            "drafted rounds": round(self.rounds / max(1, self.rounds + self.plain_steps), 2),
            "ms/token": round(1000 * statistics.mean(self.seconds), 2),
            "speed-up": round(sum(self.alone) / sum(self.seconds), 3),
            "least": round(min(ratios), 2),
            "most": round(max(ratios), 2),
            "equal texts": self.equal,
            "texts": len(self.seconds),
        }


def prompts(tokenizer: Any, prose: Path, count: int, length: int) -> dict[str, list[Tensor]]:
    """Return prompts int64 [1, up to `length`] of each kind."""
    files = sorted(path for folder in CODE for path in (ROOT / folder).glob("*.py") if path.stat().st_size > 4000)
    size, starts = max(4000, 8 * length), range(0, len(files), max(1, len(files) // count))
    code = ["".join(path.read_text(encoding="utf-8") for path in files[start:])[:size] for start in starts][:count]
    text = prose.read_text(encoding="utf-8")
    parts = [text[place : place + size] for place in range(0, len(text) - size, max(1, (len(text) - size) // count))]
    repeated = [_repeated(i, code, parts, 700 * length // 160) for i in range(count)]
    texts = {"code": code, "prose": parts[:count], "repetitive": repeated}
    made = {}
    for kind, each in texts.items():
        ids = [tokenizer(part, return_tensors="pt", verbose=False)["input_ids"] for part in each]
        made[kind] = [row[:, -length:] if kind == "repetitive" else row[:, :length] for row in ids]
    return made


def _repeated(number: int, code: list[str], prose: list[str], size: int) -> str:
    """Return a text whose continuation repeats it: an edit of code or prose, or a list of records."""
    if number % 3 == 2:
        rows = [f'{{"{RECORDS[0][0]}": "item {i}", ' + _record(i) + "}" for i in range(number, number + 9)]
        return "The list of all items:\n" + ",\n".join(rows) + ",\n"
    source = code[number % len(code)] if number % 3 else prose[number % len(prose)]
    begin = source[600 : 600 + size]
    edited = begin.replace(" the ", " one ", 1)
    return f"Original:\n\n{begin}\n\nThe same text again with one word changed:\n\n{edited[:120]}"


def _record(number: int) -> str:
    row = RECORDS[1 + number % 3]
    return ", ".join(f'"{key}": "{value}"' for key, value in zip(RECORDS[0][1:], row, strict=True))


@torch.no_grad()
def warm(model: Any, ids: Tensor) -> None:
    """Run passes of all sizes that checks have, so that their programs are made."""
    cache = DynamicCache(config=model.config)
    for new in (len(ids[0]), *range(1, MAX_LENGTH + 2)):
        model(input_ids=ids[:, :new], past_key_values=cache, use_cache=True)


def write(model: Any, ids: Tensor, task: Task, speculation: Speculation | None) -> Clock:
    """Let a model write so many tokens; return when it did, and what."""
    torch.manual_seed(0)
    draw: dict[str, Any] = {"do_sample": False}
    if task.temperature:
        draw = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    if speculation is not None:
        draw["custom_generate"] = speculation
    if task.planes:
        draw["past_key_values"] = make_cache(model.config, PLANES, path="fused")
    clock: Any = Clock()
    mask = torch.ones_like(ids)
    end = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    try:
        made = model.generate(ids, attention_mask=mask, max_new_tokens=task.tokens, streamer=clock, **draw)
    finally:
        model.generation_config.eos_token_id = end
    clock.text = made[0, ids.shape[1] :].tolist()
    return clock


def measure(model: Any, texts: list[Tensor], methods: list[str], task: Task) -> dict[str, Any]:
    """Return figures of each method on texts of one kind, and of the target alone."""
    made = {method: compress.speculate.with_settings(method) for method in methods}
    results = {method: Result() for method in methods}
    for each in (None, *made.values()):
        write(model, texts[0], task, each)
    for ids in texts:
        alone = write(model, ids, task, None)
        for method, speculation in made.items():
            _add(results[method], write(model, ids, task, speculation), alone, speculation)
    mean = statistics.mean(next(iter(results.values())).alone)
    rows = {method: result.row() | costs(model, method, mean) for method, result in results.items()}
    return {ALONE: {"ms/token": round(1000 * mean, 2), "speed-up": 1.0}} | rows


def _measured(*arguments: Any) -> dict[str, Any]:
    return {"methods": measure(*arguments)}


def _add(result: Result, clock: Clock, alone: Clock, speculation: Speculation) -> None:
    facts = speculation.statistics
    result.seconds.append(clock.seconds)
    result.alone.append(alone.seconds)
    result.equal += clock.text == alone.text
    result.rounds += facts.rounds
    result.accepted += facts.accepted
    result.judged += facts.judged_tokens
    result.plain_steps += facts.plain_steps


def costs(model: Any, method: str, plain: float) -> dict[str, Any]:
    """Return c and v of a method, as its own loop timed them, over the seconds of a plain step."""
    timings = loops._memories[model][method].timings
    drafted = {
        f"{name} by {count}": round(times.median / plain, 3)
        for name, seen in timings.drafts.items()
        for count, times in sorted(seen.items())
        if times.median
    }
    checked = {rows: round(timings.checks[rows].median / plain, 2) for rows in sorted(timings.checks)}
    return {"c": drafted, "v": {rows: value for rows, value in checked.items() if value and rows > 1}}


@torch.no_grad()
def pass_costs(model: Any, ids: Tensor) -> dict[str, Any]:
    """Return milliseconds of passes behind a prompt, in turns: of 1 to 9 tokens, and of one at each lower level.

    "gains": by level ("free": a draft that costs nothing) and acceptance, the best length and what it would bring.
    """
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    passes = [(rows, None) for rows in range(1, MAX_LENGTH + 2)] + [(1, each) for each in model.levels[:-1]]
    seen: dict[Any, list[float]] = {each: [] for each in passes}
    for _ in range(TIMED + 1):
        for rows, level in passes:
            with levels.at_level(model, level):
                begun = time.thread_time()
                model(input_ids=ids[:, :rows], past_key_values=cache, use_cache=True)
                seen[rows, level].append(1000 * (time.thread_time() - begun))
            cache.crop(-rows)
    times = {each: statistics.median(taken[1:]) for each, taken in seen.items()}  # programs are made in the first
    checks = {rows: times[rows, None] / times[1, None] for rows in range(1, MAX_LENGTH + 2)}
    drafts = {f"level={each}": times[1, each] / times[1, None] for each in model.levels[:-1]}
    gains = {
        name: {alpha: cost.best_length(alpha, draft, checks.__getitem__) for alpha in (0.8, 0.9, 0.95)}
        for name, draft in {"free": 0.0, **drafts}.items()
    }
    row = {"plain_ms": times[1, None], "v": checks, "c": drafts, "gains": gains}
    print(row)
    return row


def lines(kind: str, rows: dict[str, Any]) -> list[str]:
    """Return the lines of a kind of text in Markdown."""
    return [
        f"| {kind} | {name} | " + " | ".join(str(row.get(key, "")) for key in COLUMNS) + " |"
        for name, row in rows.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafts", action="append", default=[], help="a specification; repeatable")
    parser.add_argument("--costs", action="store_true", help="time passes alone; gains are predicted")
    parser.add_argument("--prose", type=Path, default=ROOT / "tests/data/books_heldout.txt")
    parser.add_argument("--prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, action="append", help="0: greedy; repeatable; by default 0 and 1")
    parser.add_argument("--kind", action="append", choices=["code", "prose", "repetitive"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-programs", action="store_true", help="every pass by the model's own modules")
    parser.add_argument("--planes", action="store_true", help="a cache of two planes of 4 bits (quantspec)")
    parser.add_argument("--json", type=Path, default=FILE)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model: Any = lm.load_model(asked.model, asked.dtype, "cpu")
    if asked.without_programs:
        step.forget(model)
    if asked.planes:
        hooks.attach(model)
        generation.switch(model)
    kinds = prompts(lm.load_tokenizer(asked.model), asked.prose, asked.prompts, asked.prompt_tokens)
    warm(model, kinds["prose"][0])
    if asked.costs:
        identity = {"model": asked.model.name, "what": "costs", "prompt_tokens": asked.prompt_tokens}
        result_file.add(asked.json, identity, True, "costs", functools.partial(pass_costs, model, kinds["prose"][0]))
        return
    print("| text | drafts | " + " | ".join(COLUMNS) + " |\n" + "|---" * (len(COLUMNS) + 2) + "|")
    for temperature, kind in itertools.product(asked.temperature or [0.0, 1.0], asked.kind or kinds):
        task = Task(asked.new_tokens, temperature, asked.planes)
        identity = {
            "model": asked.model.name,
            "prompt_tokens": asked.prompt_tokens,
            "kind": kind,
            "threads": asked.threads,
        }
        identity |= dataclasses.asdict(task) | {"programs": not asked.without_programs}
        work = functools.partial(_measured, model, kinds[kind], asked.drafts, task)
        if row := result_file.add(asked.json, identity, True, kind, work):
            print("\n".join(lines(f"{kind}, T = {temperature:g}", row["methods"])), flush=True)


if __name__ == "__main__":
    main()
