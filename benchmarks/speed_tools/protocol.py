"""Answer questions about speed: a process of one tool reads a question a line and prints what the work took.

A question is {"work": "decode" or "prefill", "context": tokens in the cache of each sequence, "rows": sequences,
"tokens": steps of decoding, or tokens of the prompt}. An answer is {"tokens", "cpu_s", "wall_s"}: tokens of all
sequences, and the seconds of the whole process. The first line that is printed, before any question, is
{"cpu_s", "rss_bytes"}: what the process took until the model was loaded.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any, Protocol


class Tool(Protocol):
    """A loaded model."""

    def fill(self, rows: int, context: int) -> None:
        """Have `context` tokens of each of `rows` sequences in the cache, those of former questions forgotten."""

    def step(self, rows: int) -> None:
        """Write the likeliest next token of each sequence."""

    def prefill(self, rows: int, tokens: int) -> None:
        """Read a prompt of so many tokens in each sequence, from an empty cache, and give the last one's logits."""


def answer(tool: Tool, question: dict[str, Any]) -> dict[str, Any]:
    """Do the work of a question and return what it took."""
    rows, count = question["rows"], question["tokens"]
    if question["work"] == "decode":
        tool.fill(rows, question["context"])
        for _ in range(2):  # what is only made for a new cache is not timed
            tool.step(rows)
    cpu, wall = time.process_time(), time.perf_counter()
    if question["work"] == "decode":
        for _ in range(count):
            tool.step(rows)
    else:
        tool.prefill(rows, count)
    return {
        "tokens": rows * count,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
    }


def serve(tool: Tool) -> None:
    """Answer the questions on standard input until it ends."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say({"cpu_s": time.process_time(), "rss_bytes": peak})
    for line in sys.stdin:
        say(answer(tool, json.loads(line)))


def say(value: dict[str, Any]) -> None:
    sys.__stdout__.write(json.dumps(value) + "\n")
    sys.__stdout__.flush()
