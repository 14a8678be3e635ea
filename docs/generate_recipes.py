"""Write docs/recipes.md from what the recipes state about themselves.

    python docs/generate_recipes.py

The sections `about` and `measured` of a recipe (compress/recipe/facts.py) hold all words and figures; a cell stays
empty where nothing was measured. The groups are those of `compress recipes` (compress/recipe/catalogue.py).
tests/test_docs.py fails where docs/recipes.md and the recipes differ.
"""

from __future__ import annotations

import re
from pathlib import Path

from compress.pages import scatter, svg
from compress.recipe.catalogue import COSTS, ListedRecipe, by_purpose
from compress.recipe.facts import Measurement

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "recipes.md"
PICTURE = ROOT / "docs" / "results" / "recipes.svg"
DRAWN = ("tests/models/books-8m", "65408")  # model and tokens of the rows that are drawn
CACHES = "Key-value cache"
CONTEXTS = ("1024", "2048")
FIGURES = {
    "context": "at a context of {} tokens",
    "past": "with {} or more of past",
    "bits": "{} bits a coded number",
    "bpw": "{} stored bits per weight",
    "whole_bpw": "{} over the whole model",
    "bytes_per_token": "{} bytes a token",
    "exact_bytes_per_token": "(exact {})",
    "static_bytes_per_token": "{} of static tensors",
    "kl": "KL {}",
    "se": "(standard error {})",
    "perplexity": "perplexity {}",
    "original": "(original {})",
    "perplexity_ratio": "perplexity x {}",
    "same_token": "same most likely token {}%",
    "gain_kept": "{}% of the gain from repeated passages kept",
    "needles": "{} needles found",
    "seconds": "{} s",
    "cpu_seconds": "{} s of CPU",
}

TOP = """# Recipes

This page is generated from `about` and `measured` of `recipes/` by `python docs/generate_recipes.py`.

A recipe is one YAML file. `compress recipes` lists them. `compress recipes NAME > mine.yaml` gives one to start from.
`--set key=value` changes one value of a recipe for one run.

How to read the tables:

- **bits** are stored bits per quantized weight, everything included; where nothing was measured, those planned for
  a weight of 4096 x 4096. For caches they are stored bits per coded number.
- **KL** is the divergence to the original model over the whole vocabulary. For caches it is the divergence to the exact
  cache at the context of the row. The bundled model was trained on 512 tokens.
- **perplexity** of an unchanged model depends on how many tokens are scored, so it stands beside the result. For caches
  it is the factor by which the perplexity changes.
- **tokens** were scored. Rows with different numbers of tokens cannot be compared.
- **cost** is the most expensive thing that a recipe asks for: {costs}.

All figures are of small models (most of the bundled model with 8.4M parameters). They say how methods compare, not what
a large model will lose.

![KL over bits of the quantized weights](results/recipes.svg)

The picture has the rows of weights of the bundled model with 65,408 tokens, whose inputs and caches stay as they are.
Published methods that are not on the frontier have another color.
"""

COLUMNS = {
    "weights": ("recipe", "bits", "KL", "perplexity", "original", "tokens", "cost", "what it is"),
    "cache": ("recipe", "bits", "context", "KL", "perplexity", "tokens", "cost", "what it is"),
}


def row(entry: ListedRecipe, columns: tuple[str, ...]) -> str:
    """One line of a table."""
    figures = {
        "recipe": f"[`{entry.name}`](#{anchor(entry.name)})",
        "bits": entry.bits,
        "cost": entry.cost,
        "what it is": entry.description,
    }
    figures |= cache_figures(entry) if "context" in columns else weight_figures(entry)
    return "| " + " | ".join(figures[column] for column in columns) + " |"


def weight_figures(entry: ListedRecipe) -> dict[str, str]:
    """Loss of a model, on how many tokens, and the perplexity of the original on the same tokens."""
    run = entry.measured[0] if entry.measured else Measurement()
    return {"KL": run.kl, "perplexity": run.perplexity, "original": run.original, "tokens": run.tokens}


def cache_figures(entry: ListedRecipe) -> dict[str, str]:
    """Loss of a cache at 1,024 tokens, or at 2,048 where nothing was measured at 1,024."""
    by_context = {run.context: run for run in entry.measured}
    run = next((by_context[context] for context in CONTEXTS if context in by_context), Measurement())
    ratio = f"x {run.perplexity_ratio}" if run.perplexity_ratio else ""
    return {"context": run.context, "KL": run.kl, "perplexity": ratio, "tokens": run.tokens}


def anchor(name: str) -> str:
    """The link target of a heading."""
    return re.sub(r"[^\w-]", "", name.lower())


def detail(entry: ListedRecipe) -> list[str]:
    """The section of one recipe."""
    about = entry.about
    file = f"recipes/{'papers/' if entry.is_paper else ''}{entry.name}.yaml"
    texts = {"Goal": about.goal, "Method": about.method, "Notes": about.notes}
    return [
        f"#### {entry.name}",
        "",
        f"[{file}](../{file})",
        "",
        *(f"- {title}: {text}" for title, text in texts.items() if text),
        *(map(sentence, entry.measured) if entry.measured else ["- Quality not measured."]),
        "",
    ]


def sentence(run: Measurement) -> str:
    """What was measured in one run, as a line of a list."""
    begin = f"- Measured {run.date} on {run.model}"
    begin += f", calibrated on {run.calibration}" if run.calibration else ""
    scored = f"{run.tokens} tokens of {run.text}" + (f" in {run.dtype}" if run.dtype else "")
    begin += f", scored on {scored}" if run.text else ""
    figures = [words.format(value) for key, words in FIGURES.items() if (value := getattr(run, key))]
    return f"{begin}: {', '.join(figures)}.".replace(", (", " (") + (f" {run.notes}" if run.notes else "")


def page() -> str:
    """The whole of docs/recipes.md."""
    lines = [TOP.format(costs="; ".join(f"{name} {what}" for name, what in COSTS.items()))]
    for purpose, members in by_purpose().items():
        columns = COLUMNS["cache" if purpose == CACHES else "weights"]
        lines += [f"## {purpose}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += [row(entry, columns) for entry in members]
        lines.append("")
        for entry in members:
            lines += detail(entry)
    return "\n".join(lines).rstrip("\n") + "\n"


def picture() -> str:
    """KL over bits of all measured recipes for weights."""
    rows = [
        (entry, run)
        for purpose, members in by_purpose().items()
        for entry in (() if purpose == CACHES else members)
        for run in entry.measured[:1]
        if (run.model, run.tokens) == DRAWN and run.bpw and run.kl
    ]
    best = scatter.unbeaten(rows, lambda row: float(row[1].bpw), lambda row: float(row[1].kl))
    marks = [
        scatter.Mark(
            float(run.bpw),
            float(run.kl),
            entry.name,
            "papers" if entry.is_paper else "recipes",
            (entry, run) in best,
            float(run.se or 0),
        )
        for entry, run in sorted(rows, key=lambda row: row[0].is_paper)
    ]
    axes = svg.Axis("bits per quantized weight"), svg.Axis("KL, nats a token", True)
    return svg.with_style(scatter.scatter("KL over bits: recipes on the bundled model", marks, axes))


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    TARGET.write_text(page(), encoding="utf-8")
