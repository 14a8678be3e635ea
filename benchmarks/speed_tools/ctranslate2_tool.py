"""A model that ctranslate2 has converted: `ctranslate2_tool.py DIR`.

The library gives no single steps: the seconds of a step are those of a longer generation less those of a shorter one.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import ctranslate2
import protocol


class CTranslate2:
    """A generator on one thread."""

    def __init__(self, directory: str) -> None:
        self.generator = ctranslate2.Generator(directory, device="cpu", inter_threads=1, intra_threads=1)
        with open(f"{directory}/vocabulary.json") as file:
            self.words = json.load(file)

    def fill(self, rows: int, context: int) -> None:
        pass

    def step(self, rows: int) -> None:
        pass

    def prompt(self, rows: int, tokens: int) -> list[list[str]]:
        draw = random.Random(0)
        return [draw.choices(self.words[10:-10], k=tokens) for _ in range(rows)]

    def prefill(self, rows: int, tokens: int) -> None:
        self.generator.forward_batch(self.prompt(rows, tokens))

    def write(self, rows: int, context: int, tokens: int) -> float:
        """Return the CPU seconds of reading a context and writing tokens."""
        prompt, begun = self.prompt(rows, context), time.process_time()
        self.generator.generate_batch(
            prompt, min_length=tokens, max_length=tokens, include_prompt_in_result=False, beam_size=1
        )
        return time.process_time() - begun


tool = CTranslate2(sys.argv[1])
steps = protocol.answer


def answer(model: protocol.Tool, question: dict[str, Any]) -> dict[str, Any]:
    if question["work"] == "prefill":
        return steps(model, question)
    rows, context, count = question["rows"], question["context"], question["tokens"]
    wall = time.perf_counter()
    spent = -tool.write(rows, context, 2) + tool.write(rows, context, count + 2)
    return {"tokens": rows * count, "cpu_s": spent, "wall_s": time.perf_counter() - wall}


protocol.answer = answer
protocol.serve(tool)
