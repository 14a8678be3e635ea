"""What drafts bring on a checkpoint: accepted length, costs and speed-up, by kind of text, beside the target alone.

    python benchmarks/speculation.py ./my-model --drafts ngram --drafts level=4 --prose held_out.txt

For each prompt the target alone (generate of transformers) and each method write so many tokens, one after the other,
so that a busy machine slows all alike. Times are processor time of one thread between the first new token and the last,
so that reading the prompt does not count. Kinds: code (functions of this repository, to be completed), prose (of a
text), repetitive (a text that has to be written again with a word changed, lists that go on). Each method writes once
before it is timed: programs are made, and its lengths are found.

c: a drafted token over a plain step; v: a pass of 2, 4 and 6 tokens over a plain step; both as the loop timed them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compress
from compress.model import load as lm
from compress.runtime import step
from compress.speculate.generation import Speculation

ROOT = Path(__file__).parents[1]
ALONE = "target alone"
ROWS = (2, 4, 6)  # of passes whose times are shown
CODE = ("compress/numerics", "compress/evaluate", "compress/storage", "compress/kv", "compress/model")
RECORDS = ("name", "size", "colour", "price"), ("small", "blue", "12"), ("large", "green", "27"), ("small", "red", "8")


class Clock:
    """A streamer that notes the processor time of the first and the last new token."""

    def __init__(self) -> None:
        self.begun = self.ended = 0.0
        self.tokens, self.is_prompt = 0, True

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
        }


def prompts(tokenizer: Any, prose: Path, count: int, length: int) -> dict[str, list[Tensor]]:
    """Return prompts int64 [1, up to `length`] of each kind."""
    files = sorted(path for folder in CODE for path in (ROOT / folder).glob("*.py") if path.stat().st_size > 4000)
    code = [path.read_text(encoding="utf-8") for path in files[:: max(1, len(files) // count)]][:count]
    text = prose.read_text(encoding="utf-8")
    parts = [text[place : place + 4000] for place in range(0, len(text) - 4000, max(1, (len(text) - 4000) // count))]
    texts = {"code": code, "prose": parts[:count], "repetitive": [_repeated(i, code, parts) for i in range(count)]}
    made = {}
    for kind, each in texts.items():
        ids = [tokenizer(part, return_tensors="pt", verbose=False)["input_ids"] for part in each]
        made[kind] = [row[:, -length:] if kind == "repetitive" else row[:, :length] for row in ids]
    return made


def _repeated(number: int, code: list[str], prose: list[str]) -> str:
    """Return a text whose continuation repeats it: an edit of code or prose, or a list of records."""
    if number % 3 == 2:
        rows = [f'{{"{RECORDS[0][0]}": "item {i}", ' + _record(i) + "}" for i in range(number, number + 9)]
        return "The list of all items:\n" + ",\n".join(rows) + ",\n"
    source = code[number % len(code)] if number % 3 else prose[number % len(prose)]
    begin = source[600:1300]
    edited = begin.replace(" the ", " one ", 1)
    return f"Original:\n\n{begin}\n\nThe same text again with one word changed:\n\n{edited[:120]}"


def _record(number: int) -> str:
    row = RECORDS[1 + number % 3]
    return ", ".join(f'"{key}": "{value}"' for key, value in zip(RECORDS[0][1:], row, strict=True))


def write(model: Any, ids: Tensor, count: int, temperature: float, speculation: Speculation | None) -> Clock:
    """Let a model write so many tokens; return when it did."""
    torch.manual_seed(0)
    draw: dict[str, Any] = {"do_sample": False}
    if temperature:
        draw = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    more = {} if speculation is None else {"custom_generate": speculation}
    clock: Any = Clock()
    mask = torch.ones_like(ids)
    end = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    try:
        model.generate(ids, attention_mask=mask, max_new_tokens=count, streamer=clock, pad_token_id=0, **draw, **more)
    finally:
        model.generation_config.eos_token_id = end
    return clock


def measure(
    model: Any, kinds: dict[str, list[Tensor]], methods: list[str], count: int, temperature: float
) -> dict[str, dict[str, Any]]:
    """Return figures by kind and method."""
    made = {method: compress.speculate.with_settings(method) for method in methods}
    table: dict[str, dict[str, Any]] = {}
    for kind, texts in kinds.items():
        results = {method: Result() for method in methods}
        for each in (None, *made.values()):
            write(model, texts[0], count, temperature, each)
        for ids in texts:
            alone = write(model, ids, count, temperature, None).seconds
            for method, speculation in made.items():
                _add(results[method], write(model, ids, count, temperature, speculation), alone, speculation)
        table[kind] = {method: result.row() for method, result in results.items()}
        mean = statistics.mean(next(iter(results.values())).alone)
        table[kind][ALONE] = {"ms/token": round(1000 * mean, 2), "speed-up": 1.0}
        print(json.dumps({kind: table[kind]}), file=sys.stderr, flush=True)
    return table


def _add(result: Result, clock: Clock, alone: float, speculation: Speculation) -> None:
    facts = speculation.statistics
    result.seconds.append(clock.seconds)
    result.alone.append(alone)
    result.rounds += facts.rounds
    result.accepted += facts.accepted
    result.judged += facts.judged
    result.plain_steps += facts.plain_steps


def costs(model: Any, methods: list[str]) -> dict[str, dict[str, float]]:
    """Return c and v of each method, as its own loop timed them."""
    from compress.speculate import generation

    figures: dict[str, dict[str, float]] = {}
    for method in methods:
        timings = generation._memories[model][method].timings
        plain = timings.check(1)
        if not plain:
            continue
        names = {f"c {name}": timings.draft(name) / plain for name in timings.drafts}
        seen = {f"v {rows}": timings.checks[rows].median / plain for rows in ROWS if rows in timings.checks}
        figures[method] = {"ms": 1000 * plain} | names | seen
        figures[method] = {key: round(value, 3) for key, value in figures[method].items()}
    return figures


def lines(table: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table in Markdown."""
    columns = ["accepted length", "acceptance", "drafted rounds", "tokens a pass"]
    columns += ["ms/token", "speed-up", "least", "most"]
    shown = ["| text | drafts | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for kind, rows in table.items():
        for method, row in rows.items():
            shown.append(f"| {kind} | {method} | " + " | ".join(str(row.get(key, "")) for key in columns) + " |")
    return shown


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafts", action="append", required=True, help="a specification; repeatable")
    parser.add_argument("--prose", type=Path, default=ROOT / "tests/data/books_heldout.txt")
    parser.add_argument("--prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, action="append", help="0: greedy; repeatable; by default 0 and 1")
    parser.add_argument("--kind", action="append", choices=["code", "prose", "repetitive"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-programs", action="store_true", help="every pass by the model's own modules")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model: Any = lm.load_model(asked.model, asked.dtype, "cpu")
    if asked.without_programs:
        step.forget(model)
    kinds = prompts(lm.load_tokenizer(asked.model), asked.prose, asked.prompts, asked.prompt_tokens)
    kinds = {kind: kinds[kind] for kind in asked.kind or kinds}
    figures: dict[str, Any] = {}
    for temperature in asked.temperature or [0.0, 1.0]:
        table = measure(model, kinds, asked.drafts, asked.new_tokens, temperature)
        figures[f"temperature {temperature:g}"] = {"table": table, "costs": costs(model, asked.drafts)}
        print(f"\ntemperature {temperature:g}, {asked.model}, {asked.threads} threads\n")
        print("\n".join(lines(table)))
        for method, row in figures[f"temperature {temperature:g}"]["costs"].items():
            print(method, row)
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
