"""Write the results as a page: a summary, and a table with one row a model."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from sweep.steps import STEPS

LEAST = 0.95  # share of the linear weights from which a model counts as packed as a whole

HEAD = """# Models

Which architectures compress handles, by trying. `make sweep` builds a tiny random model of every class for causal
language models that transformers can build, and of vision-language models, runs the command line on it, loads the
result with `from_pretrained`, and compares the logits. [tests/sweep](../tests/sweep/steps.py) says what each step does.

A number is the error of the logits against the unquantized model, relative to their spread. The weights are random, so
it shows that everything is wired correctly; it says nothing about quality on a real model. "packed" is the share of the
linear weights (experts included; no embeddings, output head and routers) that `int8` stores in packed form.
"""


def page(rows: list[dict[str, Any]], versions: str) -> str:
    """Return the page in Markdown."""
    return f"{HEAD}\n{versions}\n\n## Summary\n\n{summary(rows)}\n\n## All models\n\n{table(rows)}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return what came of each step, and which models are packed in part."""
    built = [row for row in rows if row["build"] == "ok"]
    lines = [f"{len(rows)} models, of which transformers builds {len(built)} from a small configuration.", ""]
    kinds = sorted({entry["outcome"] for row in built for entry in _entries(row)}, key=_rank)
    lines += [f"| step | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for step in _steps(rows):
        counts = Counter(row[step]["outcome"] for row in built if step in row)
        lines.append(f"| {step} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
    partial = sorted((share, row["model"]) for row in built if (share := _share(row)) is not None and share < LEAST)
    named = ", ".join(f"{name} {share:.0%}" for share, name in partial)
    lines += ["", f"Less than {LEAST:.0%} of the linear weights are packed of: {named or 'none'}."]
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Return one row a model."""
    steps = _steps(rows)
    lines = [f"| model | class | packed | {' | '.join(steps)} | what was said |", "|---" * (len(steps) + 4) + "|"]
    for row in rows:
        if row["build"] != "ok":
            lines.append(f"| {row['model']} | | | {' | ' * (len(steps) - 1)} | {_short(row['build'])} |")
            continue
        share = _share(row)
        packed = "" if share is None else f"{share:.1%}"
        said = sorted({text for entry in _entries(row) for key in ("partial", "said") if (text := entry.get(key))})
        cells = " | ".join(_cell(row.get(step)) for step in steps)
        lines.append(f"| {row['model']} | {row['kind']} | {packed} | {cells} | {_short(' / '.join(said))} |")
    return "\n".join(lines) + "\n"


def _steps(rows: list[dict[str, Any]]) -> list[str]:
    """Return the steps that were run."""
    return [step for step in STEPS if any(step in row for row in rows)]


def _entries(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row[step] for step in STEPS if step in row]


def _rank(kind: str) -> tuple[bool, bool, str]:
    return kind != "ok", kind != "refused", kind


def _share(row: dict[str, Any]) -> float | None:
    return next((row[step]["share"] for step in ("int8", "int4") if "share" in row.get(step, {})), None)


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return ""
    if entry["outcome"] != "ok":
        return f"**{entry['outcome']}**"
    return f"{entry['error']:.3f}" if "error" in entry else "ok"


def _short(text: str) -> str:
    """Return text for a cell: one line, without paths and what Markdown reads as its own."""
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", " ".join(text.split()))
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)*", "", text)
    return re.sub(r"([|*<>_\[\]])", r"\\\1", text.replace("compress: ", ""))[:400]
