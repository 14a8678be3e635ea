"""What bytes buy: the divergence of allocated models at several budgets, beside models that are the same everywhere.

Every point is a choice of the table, its levels decoded from the database and run through the whole model; what is
scored is KL(original || model) on a text. Where a cheaper choice scores better than the one for a larger budget, it is
taken there too: more bytes never cost quality.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from compress import plugins
from compress.allocate import session
from compress.allocate.problem import Choice, Problem
from compress.allocate.session import JOINT
from compress.allocate.table import Table
from compress.errors import BudgetError, RecipeError
from compress.progress import Progress
from compress.run.job import Job
from compress.storage.checkpoint import write_text
from compress.storage.workdir import writing

SCORED = 16384  # tokens of a text that is given


def measure(asked: Job, text: str | None, points: int, progress: Progress) -> dict[str, Any]:
    """The frontier, as JSON values; with a target in the recipe also what is allocated for it, under "chosen"."""
    with session.session(asked, progress) as opened:
        settings = opened.opened.allocation
        target = settings.target
        if target is None and settings.context is not None:
            raise RecipeError("allocate: a context needs a target; give --target, a size for the weights and the cache")
        chosen = session.decision(opened, settings, target) if target is not None else None
        method = (
            settings.method if JOINT not in plugins.load("allocate", settings.method).needs(settings.config) else None
        )
        plain = settings if method else _knapsack(settings)
        found = opened.table(plugins.load("allocate", plain.method).needs(plain.config))
        bench = opened.bench(found) if text is None else opened.bench(found, text, SCORED)
        choices = _choices(found, plain, points)
        uniform = {name: choice for name in found.options if (choice := found.uniform(name)) is not None}
        asked_for = [_choice(found, chosen["choices"])] if chosen is not None else []
        everything = [*uniform.values(), *choices, *asked_for]
        scores = bench.divergence(everything, range(bench.samples))
        rows = [_row(found, choice, kl) for choice, kl in zip(everything, scores, strict=True)]
    alike = [{"option": name, **row} for name, row in zip(uniform, rows, strict=False)]
    allocated = _monotone(rows[len(alike) : len(alike) + len(choices)])
    for row in [*allocated, *rows[len(rows) - len(asked_for) :]]:
        row["kl of uniform"] = between(alike, row["nbytes"])
    if chosen is not None:
        nbytes = rows[-1]["nbytes"] + (chosen["cache"]["nbytes"] if "cache" in chosen else 0)
        chosen = {**chosen, **rows[-1], "nbytes": nbytes, "weights_nbytes": rows[-1]["nbytes"]}
        del chosen["choices"]
    return {
        "model": asked.model.rstrip("/").rsplit("/", 1)[-1],
        "recipe": asked.recipe.name,
        "method": plain.method,
        "folder": str(opened.database.folder),
        "text": text or "the calibration text",
        "tokens": bench.tokens,
        "uniform": alike,
        "allocated": allocated,
        "chosen": chosen,
    }


def _knapsack(settings: Any) -> Any:
    """Where the recipe's own method searches: a search for every point would take too long."""
    return dataclasses.replace(settings, method="knapsack", config=plugins.load("allocate", "knapsack").Config())


def _choices(found: Table, settings: Any, points: int) -> list[Choice]:
    """Allocations for budgets that are spread evenly between the smallest and the largest."""
    module, empty = plugins.load("allocate", settings.method), Problem(found.units, 0)
    budgets = [empty.least + (empty.most - empty.least) * i // (points + 1) for i in range(1, points + 1)]
    choices = []
    for budget in budgets:
        with suppress(BudgetError):  # a method may need more than the least
            choices.append(module.allocate(Problem(found.units, budget), settings.config, None).choice)
    return choices


def _choice(found: Table, levels: dict[str, int]) -> Choice:
    wanted = [found.options[levels[unit.members[0]]] for unit in found.units]
    return tuple(
        next(i for i, entry in enumerate(unit.entries) if entry.option == option)
        for unit, option in zip(found.units, wanted, strict=True)
    )


def _row(found: Table, choice: Choice, kl: float) -> dict[str, Any]:
    return {"bpw": found.bpw(choice), "nbytes": found.nbytes(choice), "kl": kl}


def _monotone(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in ascending order of bytes, each with the best that its budget can have among them."""
    best: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["nbytes"], row["kl"])):
        best.append(dict(best[-1]) if best and best[-1]["kl"] < row["kl"] else dict(row))
    return best


def between(alike: Sequence[dict[str, Any]], nbytes: int) -> float | None:
    """KL of uniform options at this size: between two of them a straight line of log KL over bytes; None outside."""
    ascending = sorted((row for row in alike if row["kl"] > 0), key=lambda row: row["nbytes"])
    for low, high in zip(ascending, ascending[1:], strict=False):
        if low["nbytes"] <= nbytes <= high["nbytes"]:
            share = (nbytes - low["nbytes"]) / max(1, high["nbytes"] - low["nbytes"])
            return math.exp((1 - share) * math.log(low["kl"]) + share * math.log(high["kl"]))
    return None


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """frontier.png (where matplotlib is installed) and report.html; the files written."""
    image = plot(found)
    files = []
    with writing(folder, "--report"):
        folder.mkdir(parents=True, exist_ok=True)
        if image is not None:
            files.append(folder / "frontier.png")
            files[-1].write_bytes(image)
        files.append(folder / "report.html")
        write_text(files[-1], page(found, image))
    return files


def plot(found: dict[str, Any]) -> bytes | None:
    """A PNG of KL over bytes; None without matplotlib (`pip install compress-llm[plots]`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for rows, label, style in ((found["uniform"], "uniform", "s--"), (found["allocated"], found["method"], "o-")):
        rows = sorted((row for row in rows if row["kl"] > 0), key=lambda row: row["nbytes"])
        axes.plot([row["bpw"] for row in rows], [row["kl"] for row in rows], style, label=label)
    if found["chosen"] is not None:
        axes.plot(
            [found["chosen"]["bpw"]], [found["chosen"]["kl"]], "*", markersize=14, label=found["chosen"]["method"]
        )
    axes.set(
        yscale="log", xlabel="stored bits a weight", ylabel=f"KL, {found['tokens']:,} tokens", title=found["model"]
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


STYLE = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:2px 12px;text-align:right}"


def page(found: dict[str, Any], image: bytes | None) -> str:
    """A page of its own: the plot, the frontier, and which units got what."""
    title = html.escape(f"{found['model']}: {found['recipe']}")
    parts = [f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"]
    parts.append(f"<p>KL to the original, {found['tokens']:,} tokens of {html.escape(found['text'])}.</p>")
    if image is not None:
        parts.append(f'<img alt="KL over bits" src="data:image/png;base64,{base64.b64encode(image).decode()}">')
    heads = ("", "bpw", "bytes", "KL", "of uniform")
    rows = [(row["option"], *_cells(row)) for row in found["uniform"]]
    rows += [(found["method"], *_cells(row)) for row in found["allocated"]]
    if found["chosen"] is not None:
        rows.append((f"{found['chosen']['method']}, {found['chosen']['target']}", *_cells(found["chosen"])))
    parts.append(_table(heads, rows))
    if found["chosen"] is not None:
        parts.append("<h2>Which units got what</h2>")
        parts.append(_table(("unit", "option"), list(found["chosen"]["units"].items())))
    return "\n".join(parts) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    uniform = row.get("kl of uniform")
    share = f"{row['kl'] / uniform:.2f}" if uniform else ""
    return f"{row['bpw']:.3f}", f"{row['nbytes']:,}", f"{row['kl']:.5f}", share


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{html.escape(head)}</th>" for head in heads) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return "<table>" + "".join(lines) + "</table>"
