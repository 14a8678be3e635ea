"""Write docs/recipes.md from the comment blocks at the top of the recipes.

    python docs/generate_recipes.py

A header holds a goal, a method and what was measured (`# Goal: ...`, `# Method: ...`, `# Measured DATE on ...`). The
figures of the tables are read from the last part; a cell stays empty where the header does not state the figure.
tests/test_docs.py fails where docs/recipes.md and the recipes differ.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "recipes.md"
SMALLER_LAYERS = {"lord", "cut", "structured"}  # methods that store fewer numbers instead of fewer bits

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

All figures are of small models (most of the bundled model with 8.4M parameters). They say how methods compare, not what
a large model will lose.
"""

GROUPS = {  # heading -> columns of its table; the order of the page
    "Weights, 2 bits": "weights",
    "Weights, 3 bits": "weights",
    "Weights, 4 bits": "weights",
    "Weights, 8 bits": "weights",
    "Weights and activations": "weights",
    "Key-value cache": "cache",
    "Weights and key-value cache": "weights",
    "Bit allocation": "weights",
    "Low rank and smaller layers": "weights",
}
COLUMNS = {
    "weights": ("recipe", "bits", "KL", "perplexity", "original", "tokens", "what it is"),
    "cache": ("recipe", "bits", "context", "KL", "perplexity", "tokens", "what it is"),
}


class Header(NamedTuple):
    """The three parts of a recipe's comment block, each one line of text."""

    goal: str
    method: str
    measured: str


class Entry(NamedTuple):
    """One recipe: its name, its YAML data and its header."""

    name: str
    data: dict[str, Any]
    header: Header


def read(path: Path) -> Entry:
    """Parse a recipe; ValueError if its header lacks a part."""
    text = path.read_text(encoding="utf-8")
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# ").strip())
    joined = " ".join(comment)
    parts = re.fullmatch(r"Goal: (.+?) Method: (.+?) ((?:Measured|Not measured|Quality not measured).+)", joined)
    if parts is None:
        raise ValueError(f"{path.name}: the header needs Goal:, Method: and Measured (or Not measured), in this order")
    return Entry(path.stem, yaml.safe_load(text), Header(*parts.groups()))


def figure(pattern: str, text: str) -> str:
    """The first group of the pattern's first match, "" if there is none."""
    match = re.search(pattern, text)
    return match[1] if match else ""


def group(entry: Entry) -> str:
    """The heading under which a recipe stands."""
    data = entry.data
    quantize = data.get("quantize")
    if quantize is None:
        return "Key-value cache"
    if "allocate" in data:
        return "Bit allocation"
    if "activations" in quantize:
        return "Weights and activations"
    if "kv_cache" in data:
        return "Weights and key-value cache"
    if "lowrank" in quantize or quantize["method"] in SMALLER_LAYERS:
        return "Low rank and smaller layers"
    bits = float(figure(r"([\d.]+) stored bits per weight", entry.header.measured))
    return f"Weights, {round(bits)} bits"


def row(entry: Entry, columns: tuple[str, ...]) -> str:
    """One line of a table."""
    figures = {
        "recipe": f"[`{entry.name}`](#{anchor(entry.name)})",
        "bits": stored_bits(entry),
        "what it is": str(entry.data["description"]),
    }
    figures |= cache_figures(entry) if "context" in columns else weight_figures(entry)
    return "| " + " | ".join(figures[column] for column in columns) + " |"


def stored_bits(entry: Entry) -> str:
    """Bits per weight, or per coded number of a cache."""
    bits = figure(r"([\d.]+) (?:stored bits per weight|bits a coded number)", entry.header.measured)
    return bits or figure(r"; (\d+) bits a coded number", entry.header.method)


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


def order(entry: Entry) -> tuple[float, float]:
    """Fewer bits first, then the smaller divergence."""
    loss = figure(r"KL to the (?:original|exact cache) ([\d.]+)", entry.header.measured)
    return float(stored_bits(entry) or "inf"), float(loss or "inf")


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
    entries = [read(path) for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    lines = [TOP]
    for heading, table in GROUPS.items():
        members = sorted((entry for entry in entries if group(entry) == heading), key=order)
        columns = COLUMNS[table]
        lines += [f"## {heading}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += [row(entry, columns) for entry in members]
        lines.append("")
        for entry in members:
            lines += detail(entry)
    if lost := {entry.name for entry in entries} - set(re.findall(r"^#### (.+)$", "\n".join(lines), re.MULTILINE)):
        raise ValueError(f"no group for {', '.join(sorted(lost))}")
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
