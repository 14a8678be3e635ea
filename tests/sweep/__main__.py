"""Run the sweep: python -m sweep --out DIR [--part 0/2] [--models llama,gpt2] [--steps int8,int4] [--page FILE].

DIR/results.jsonl gets a line for each model as soon as it is done; what is in it is not run again, unless --redo is
given. Several processes can share the work: --part K/N takes every N-th model and writes results-K.jsonl. --page writes
the table of all results in DIR. The exit status is 1 where a step crashed or gave a wrong result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HARMLESS = ("ok", "refused")


def main() -> int:
    """Run what is asked for; print a line for each model."""
    parser = argparse.ArgumentParser(prog="sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", help="K/N: every N-th model, from K on")
    parser.add_argument("--models", help="separated by commas; default: all")
    parser.add_argument("--steps", help="separated by commas; default: all")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each process of a step")
    parser.add_argument("--keep", action="store_true", help="keep the models and logs")
    parser.add_argument("--redo", action="store_true", help="run again what is in the results")
    parser.add_argument("--page", type=Path, help="write the table of all results in --out to this file")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "tests/models/books-8m", help="a model directory")
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/books_calib.txt", help="calibration text")
    asked = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = run(asked)
    if asked.page is not None:
        write_page(asked.out, asked.page)
    steps = [entry for row in rows for entry in row.values() if isinstance(entry, dict)]
    return int(any(entry["outcome"] not in HARMLESS for entry in steps))


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the models that are asked for and not in the results; return the rows of those that were asked for."""
    import datasets  # noqa: F401  (imported once, before the first fork)

    import compress.api
    import compress.cli.tables
    import compress.runtime.hf  # noqa: F401
    from sweep import models, steps

    names = asked.models.split(",") if asked.models else models.names()
    number, parts = map(int, asked.part.split("/")) if asked.part else (0, 1)
    names = names[number::parts]
    chosen = tuple(asked.steps.split(",")) if asked.steps else steps.STEPS
    done = {} if asked.redo else read(asked.out)
    for name in names:
        if name in done and (done[name]["build"] != "ok" or set(chosen) <= done[name].keys()):
            continue
        work = asked.out.resolve() / "work" / re.sub(r"\W+", "_", name)
        place = steps.Place(work, asked.tokenizer.resolve(), asked.text.resolve(), asked.timeout)
        row = {**done.get(name, {}), **steps.run_row(name, chosen, place)}
        done[name] = row
        with (asked.out / (f"results-{number}.jsonl" if asked.part else "results.jsonl")).open("a") as file:
            file.write(json.dumps(row) + "\n")
        brief = " ".join(f"{step} {row[step]['outcome']}" for step in chosen if step in row)
        print(f"{name}: {brief or row['build']}, {row['seconds']} s", flush=True)
        if not asked.keep:
            shutil.rmtree(work, ignore_errors=True)
    return [done[name] for name in names]


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of all results in a folder; of several of one model the last one counts."""
    files = sorted(folder.glob("results*.jsonl"), key=lambda file: file.stat().st_mtime)
    rows = (json.loads(line) for file in files for line in file.read_text().splitlines())
    return {row["model"]: row for row in rows}


def write_page(folder: Path, page: Path) -> None:
    """Write the page of all results, in the order of the table of models."""
    import torch
    import transformers

    from sweep import models
    from sweep.page import page as text

    rows = read(folder)
    order = {name: number for number, name in enumerate(models.names())}
    listed = sorted(rows.values(), key=lambda row: order.get(row["model"], len(order)))
    page.write_text(text(listed, f"transformers {transformers.__version__}, torch {torch.__version__}."))


if __name__ == "__main__":
    sys.exit(main())
