"""Write docs/recipes.md from the comment blocks at the top of the recipes.

    python docs/generate_recipes.py

A header holds a goal, a method and what was measured (`# Goal: ...`, `# Method: ...`, `# Measured DATE on ...`). The
figures of the tables are read from the last part; a cell stays empty where the header does not state the figure.
The groups are those of `compress recipes`
(compress/recipe/catalogue.py). tests/test_docs.py fails where docs/recipes.md and the recipes differ.
"""

from __future__ import annotations

import re
from pathlib import Path

from compress.recipe.catalogue import COSTS, Entry, by_purpose, figure

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "recipes.md"
CACHES = "Key-value cache"

TOP = """# Recipes

This page is generated from the headers of `recipes/*.yaml` by `python docs/generate_recipes.py`.

A recipe is one YAML file. `compress recipes` lists them. `compress recipes NAME > mine.yaml` gives one to start from.
`--set key=value` changes one value of a recipe for one run.

How to read the tables:

- **bits** are stored bits per quantized weight, everything included. For caches they are stored bits per coded number.
- **KL** is the divergence to the original model over the whole vocabulary. For caches it is the divergence to the exact
  cache at the context of the row. The bundled model was trained on 512 tokens.
- **perplexity** of an unchanged model depends on how many tokens are scored, so it stands beside the result. For caches
  it is the factor by which the perplexity changes.
- **tokens** were scored. Rows with different numbers of tokens cannot be compared.
- **cost** is the most expensive thing that a recipe asks for: {costs}.

All figures are of small models (most of the bundled model with 8.4M parameters). They say how methods compare, not what
a large model will lose.
"""

COLUMNS = {
    "weights": ("recipe", "bits", "KL", "perplexity", "original", "tokens", "cost", "what it is"),
    "cache": ("recipe", "bits", "context", "KL", "perplexity", "tokens", "cost", "what it is"),
}


def row(entry: Entry, columns: tuple[str, ...]) -> str:
    """One line of a table."""
    figures = {
        "recipe": f"[`{entry.name}`](#{anchor(entry.name)})",
        "bits": entry.bits,
        "cost": entry.cost,
        "what it is": entry.description,
    }
    figures |= cache_figures(entry) if "context" in columns else weight_figures(entry)
    return "| " + " | ".join(figures[column] for column in columns) + " |"


def weight_figures(entry: Entry) -> dict[str, str]:
    """Loss of a model, on how many tokens, and the perplexity of the original on the same tokens."""
    measured = entry.header.measured
    perplexity = re.search(r"perplexity ([\d.]+) \(original ([\d.]+)\)", measured)
    return {
        "KL": figure(r"KL to the original ([\d.]+)", measured),
        "perplexity": perplexity[1] if perplexity else "",
        "original": perplexity[2] if perplexity else "",
        "tokens": figure(r"scored (?:through the cache )?on (\d+) tokens", measured),
    }


def cache_figures(entry: Entry) -> dict[str, str]:
    """Loss of a cache at 1,024 tokens, or at 2,048 where the header has no figure at 1,024."""
    measured = entry.header.measured
    patterns = {
        "1024": r"at 1024 tokens.*?KL to the exact cache ([\d.]+), perplexity x ([\d.]+).*?\((\d+) tokens",
        "2048": r"at 2048.*?KL ([\d.e-]+), perplexity x ([\d.]+) \((\d+) tokens",
    }
    for context, pattern in patterns.items():
        if match := re.search(pattern, measured):
            return {"context": context, "KL": match[1], "perplexity": f"x {match[2]}", "tokens": match[3]}
    return dict.fromkeys(("context", "KL", "perplexity", "tokens"), "")


def anchor(name: str) -> str:
    """The link target of a heading."""
    return re.sub(r"[^\w-]", "", name.lower())


def detail(entry: Entry) -> list[str]:
    """The section of one recipe."""
    header = entry.header
    return [
        f"#### {entry.name}",
        "",
        f"[recipes/{entry.name}.yaml](../recipes/{entry.name}.yaml)",
        "",
        f"- Goal: {header.goal}",
        f"- Method: {header.method}",
        f"- {header.measured}",
        "",
    ]


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


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
