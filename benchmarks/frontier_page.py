"""Write the page of benchmarks/frontier.py and its pictures from the rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OURS = "compress"
NEAR = 0.25  # bits of the linears by which a row of another tool may be smaller and still be compared
HEAD = """# Ours and other tools on one text

Recipes of compress beside other tools: the same model, the same calibration windows, the same scored windows, one
evaluator in float32. The rows are in `benchmarks/results/frontier.json`; this page is made from them.

```bash
python benchmarks/frontier.py MODEL --calib TEXT --text TEXT --peer hqq=peer/bin/python   # resumes
python benchmarks/frontier.py page
```

- **bits** are counted from what is stored: **linears**, per weight of the decoder's linears with all that belongs to
  them; **whole**, of everything that is stored, per weight of the model. Most tools leave the table of embeddings in
  16 bits, ours has 8, llama.cpp about 6: compare methods by the first, files by the second.
- **KL** is to the model as it is, in nats a token. Its standard error (s.e.) is over blocks of 64 tokens.
- **CPU s** are those of the whole process, loading included, and of an importance matrix that an earlier row made, on a
  machine with other work: good to 30%.
- **EXL3** runs on NVIDIA GPUs alone. Its rows are of our own re-implementation of its quantizer
  ([benchmarks/exl3_cpu.py](../../benchmarks/exl3_cpu.py)), which says where it differs. "Transforms of 64" pads
  nothing where a width is no multiple of 128; the tool pads, which the plain rows count.
- turbopress is its function for one matrix in our walk through the blocks. AutoRound reads windows of 512 tokens.
- llama.cpp has the importance matrix of the calibration windows. Where a width is no multiple of 256 its types fall
  back to wider ones for those linears.
"""


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write frontier.md and its pictures into a folder."""
    parts = [HEAD]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["text"]), []).append(row)
    for (model, text), group in groups.items():
        ordered = sorted(group, key=lambda row: (row["bpw"], row["kl_mean"]))
        name = re.sub(r"\W+", "-", f"frontier-{model}-{Path(text).stem}").lower()
        parts += [f"## {model}, {text}\n", facts(group[0])]
        for key, axis in (("bpw", "linears"), ("whole_bpw", "whole")):
            drawn = draw(f"KL over bits of {axis}: {model}, {text}", ordered, key)
            (folder / f"{name}-{axis}.svg").write_text(drawn, encoding="utf-8")
            parts.append(f"![KL over bits of {axis}]({name}-{axis}.svg)\n")
        parts += [table(ordered), compared(ordered)]
    (folder / "frontier.md").write_text("\n".join(part for part in parts if part), encoding="utf-8")


def facts(row: Row) -> str:
    """Return what all rows of a table have in common, and the processors they were measured on."""
    begins = f" behind {row['begins_with']}" if row["begins_with"] else ""
    features = ", ".join(row["processor_features"])
    return (
        f"Calibrated on {row['samples']} windows of {row['seq_len']} tokens of {row['calib']}. "
        f"Scored: {row['tokens']:,} tokens in {row['windows']} windows{begins}. "
        f"Perplexity of the model as it is: {row['base_perplexity']:.2f}. "
        f"Processor: {row['machine']['cpu']} ({features}).\n"
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table; a dot marks those that no other beats in bits of the linears and KL."""
    from compress.pages import scatter

    best = scatter.unbeaten(rows, lambda row: row["bpw"], lambda row: row["kl_mean"])
    names = ["", "row", "version", "linears", "whole", "KL", "s.e.", "perplexity", "same top-1", "CPU s"]
    lines = [names, ["---"] * len(names)]
    for row in rows:
        label = f"**`{row['entry']}`**" if row["tool"] == OURS else row["entry"]
        cells = ["•" if any(row is each for each in best) else "", label, row["version"]]
        cells += [f"{row['bpw']:.3f}", f"{row['whole_bpw']:.3f}", f"{row['kl_mean']:.4f}", f"{row['kl_se']:.4f}"]
        spent = max(row["cpu_s"], row["quantize_cpu_s"] or 0)
        cells += [f"{row['perplexity']:.2f}", f"{row['same_top1']:.1%}", f"{spent:.0f}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def compared(rows: Sequence[Row]) -> str:
    """Return each row of ours beside the best row of every other tool that has no more than NEAR bits fewer or more.

    The difference of their KL is paired: its standard error is that of the differences of blocks.
    """
    lines = []
    for ours in (row for row in rows if row["tool"] == OURS):
        for tool in dict.fromkeys(row["tool"] for row in rows if row["tool"] != OURS):
            near = [row for row in rows if row["tool"] == tool and abs(row["bpw"] - ours["bpw"]) <= NEAR]
            if near:
                other = min(near, key=lambda row: row["kl_mean"])
                change, error = paired_change(ours, other)
                bits = ours["bpw"] - other["bpw"]
                cells = [f"`{ours['entry']}`", other["entry"], f"{bits:+.3f}", f"{change:+.1%}", f"{error:.1%}"]
                lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return ""
    head = ["| ours | other | bits of linears | KL of ours beside it | s.e. |", "|---|---|---|---|---|"]
    return "\n".join([*head, *lines]) + "\n"


def paired_change(ours: Row, other: Row) -> tuple[float, float]:
    """Return the mean of KL(ours) - KL(other) over the KL of the other, and its standard error, over blocks."""
    pairs = zip(ours["kl_blocks"], other["kl_blocks"], strict=True)
    differences = [mine - theirs for mine, theirs in pairs]
    count, mean = len(differences), sum(differences) / len(differences)
    variance = sum((each - mean) ** 2 for each in differences) / (count - 1)
    return mean / other["kl_mean"], (variance / count) ** 0.5 / other["kl_mean"]


def draw(title: str, rows: Sequence[Row], key: str) -> str:
    """Return a picture of KL over bits that stands alone, KL on a logarithmic axis."""
    from compress.pages import scatter, svg

    best = scatter.unbeaten(rows, lambda row: row[key], lambda row: row["kl_mean"])
    groups = sorted(rows, key=lambda row: row["tool"] != OURS)
    marks = [
        scatter.Mark(row[key], row["kl_mean"], row["entry"], row["tool"], any(row is b for b in best), row["kl_se"])
        for row in groups
    ]
    drawn = scatter.scatter(title, marks, (svg.Axis("bits per weight"), svg.Axis("KL, nats a token", True)))
    return svg.with_style(drawn)
