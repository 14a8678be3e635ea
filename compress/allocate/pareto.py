"""Measure the Pareto front of bytes and divergence: allocated models at several budgets, beside uniform models.

Every point is a choice of the table, decoded from the database and run through the whole model; its score is
KL(original || model) on a text. Where a cheaper choice scores better than the one for a larger budget, it is taken
there, too: more bytes never cost quality.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from compress import plugins
from compress.allocate import metrics
from compress.allocate.decision import decide_target, without_search
from compress.allocate.problem import JOINT, Choice, Problem
from compress.allocate.sensitivity import Measurements
from compress.allocate.session import run_on_measurements
from compress.allocate.table import SensitivityTable
from compress.errors import BudgetError, RecipeError
from compress.progress import Progress
from compress.run.job import Job
from compress.storage.checkpoint import write_text
from compress.storage.files import replacing
from compress.storage.workdir import writing

SCORED = 16384  # tokens of a text that is given


def measure(job: Job, text: str | None, points: int, progress: Progress) -> dict[str, Any]:
    """Return the Pareto front, as JSON values; with a target also what is allocated for it, under "chosen"."""
    wanted = job.recipe.allocate
    if wanted is not None and wanted.target is None and wanted.context is not None:
        raise RecipeError("allocate: a context needs a target; give --target, a size for the weights and the cache")

    def score(store: Measurements) -> dict[str, Any]:
        return _score_front(store, text, points)

    return run_on_measurements(job, progress, score)


def _score_front(store: Measurements, text: str | None, points: int) -> dict[str, Any]:
    """Compare the choices at several budgets, those of a target, and uniform ones."""
    job = store.opened.job
    settings = store.opened.allocation
    target = settings.target
    chosen = decide_target(store, settings, target) if target is not None else None
    searches = JOINT in plugins.load("allocate", settings.method).needs(settings.config)
    plain = without_search(settings) if searches else settings
    table = metrics.table(store, plugins.load("allocate", plain.method).needs(plain.config))
    evaluator = metrics.evaluator(store, table, text, SCORED)
    choices = _choices(table, plain, points)
    uniform = {name: choice for name in table.options if (choice := table.uniform(name)) is not None}
    for_target = [_choice(table, chosen["choices"])] if chosen is not None else []
    everything = [*uniform.values(), *choices, *for_target]
    scores = evaluator.divergence(everything, range(evaluator.samples))
    rows = [_row(table, choice, kl) for choice, kl in zip(everything, scores, strict=True)]
    uniform_rows = [{"option": name, **row} for name, row in zip(uniform, rows, strict=False)]
    allocated = _monotone(rows[len(uniform) : len(uniform) + len(choices)])
    for row in [*allocated, *rows[len(rows) - len(for_target) :]]:
        row["kl of uniform"] = between(uniform_rows, row["nbytes"])
    if chosen is not None:
        nbytes = rows[-1]["nbytes"] + (chosen["cache"]["nbytes"] if "cache" in chosen else 0)
        chosen = {**chosen, **rows[-1], "nbytes": nbytes, "weights_nbytes": rows[-1]["nbytes"]}
        del chosen["choices"]
    return {
        "model": job.model_name,
        "recipe": job.recipe.name,
        "method": plain.method,
        "folder": str(store.database.folder),
        "text": text or "the calibration text",
        "tokens": evaluator.samples * evaluator.seq_len,
        "uniform": uniform_rows,
        **({"with tables": True} if store.opened.tables else {}),  # at their largest options in the uniform models
        "allocated": allocated,
        "chosen": chosen,
    }


def _choices(table: SensitivityTable, settings: Any, points: int) -> list[Choice]:
    """Return allocations for budgets that are spread evenly between the smallest and the largest."""
    module, empty = plugins.load("allocate", settings.method), Problem(table.units, 0)
    budgets = [empty.least + (empty.most - empty.least) * i // (points + 1) for i in range(1, points + 1)]
    choices = []
    for budget in budgets:
        with suppress(BudgetError):  # a method may need more than the least
            choices.append(module.allocate(Problem(table.units, budget), settings.config, None).choice)
    return choices


def _choice(table: SensitivityTable, numbers: dict[str, int]) -> Choice:
    """Return the choice in which each linear has the option of this number."""
    options = [table.options[numbers[unit.members[0]]] for unit in table.units]
    return tuple(
        next(i for i, entry in enumerate(unit.entries) if entry.option == option)
        for unit, option in zip(table.units, options, strict=True)
    )


def _row(table: SensitivityTable, choice: Choice, kl: float) -> dict[str, Any]:
    return {"bpw": table.bpw(choice), "nbytes": table.nbytes(choice), "kl": kl}


def _monotone(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows in ascending order of bytes, each with the best that its budget can have among them."""
    best: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["nbytes"], row["kl"])):
        best.append(dict(best[-1]) if best and best[-1]["kl"] < row["kl"] else dict(row))
    return best


def between(uniform: Sequence[dict[str, Any]], nbytes: int) -> float | None:
    """Interpolate log KL of uniform options linearly over bytes; None outside of their sizes."""
    ascending = sorted((row for row in uniform if row["kl"] > 0), key=lambda row: row["nbytes"])
    for low, high in zip(ascending, ascending[1:], strict=False):
        if low["nbytes"] <= nbytes <= high["nbytes"]:
            share = (nbytes - low["nbytes"]) / max(1, high["nbytes"] - low["nbytes"])
            return math.exp((1 - share) * math.log(low["kl"]) + share * math.log(high["kl"]))
    return None


def write(front: dict[str, Any], folder: Path) -> list[Path]:
    """Write frontier.png (where matplotlib is installed) and report.html; return the files."""
    image = plot(front)
    files = []
    with writing(folder, "--report"):
        folder.mkdir(parents=True, exist_ok=True)
        if image is not None:
            files.append(folder / "frontier.png")
            with replacing(files[-1]) as stream:
                stream.write(image)
        files.append(folder / "report.html")
        write_text(files[-1], page(front, image))
    return files


def plot(front: dict[str, Any]) -> bytes | None:
    """Draw KL over bytes as a PNG; None without matplotlib (`pip install compress-llm[plots]`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for rows, label, style in ((front["uniform"], "uniform", "s--"), (front["allocated"], front["method"], "o-")):
        rows = sorted((row for row in rows if row["kl"] > 0), key=lambda row: row["nbytes"])
        axes.plot([row["bpw"] for row in rows], [row["kl"] for row in rows], style, label=label)
    if front["chosen"] is not None:
        axes.plot(
            [front["chosen"]["bpw"]], [front["chosen"]["kl"]], "*", markersize=14, label=front["chosen"]["method"]
        )
    axes.set(
        yscale="log", xlabel="stored bits a weight", ylabel=f"KL, {front['tokens']:,} tokens", title=front["model"]
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


STYLE = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:2px 12px;text-align:right}"


def page(front: dict[str, Any], image: bytes | None) -> str:
    """Return an HTML page with the plot, the Pareto front, and the option of each unit."""
    title = html.escape(f"{front['model']}: {front['recipe']}")
    parts = [f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"]
    parts.append(f"<p>KL to the original, {front['tokens']:,} tokens of {html.escape(front['text'])}.</p>")
    if image is not None:
        parts.append(f'<img alt="KL over bits" src="data:image/png;base64,{base64.b64encode(image).decode()}">')
    heads = ("", "bpw", "bytes", "KL", "of uniform")
    rows = [(row["option"], *_cells(row)) for row in front["uniform"]]
    rows += [(front["method"], *_cells(row)) for row in front["allocated"]]
    if front["chosen"] is not None:
        rows.append((f"{front['chosen']['method']}, {front['chosen']['target']}", *_cells(front["chosen"])))
    parts.append(_table(heads, rows))
    if front["chosen"] is not None:
        parts.append("<h2>Which units got what</h2>")
        parts.append(_table(("unit", "option"), list(front["chosen"]["units"].items())))
    return "\n".join(parts) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    uniform = row.get("kl of uniform")
    share = f"{row['kl'] / uniform:.2f}" if uniform else ""
    return f"{row['bpw']:.3f}", f"{row['nbytes']:,}", f"{row['kl']:.5f}", share


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{html.escape(head)}</th>" for head in heads) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return "<table>" + "".join(lines) + "</table>"
