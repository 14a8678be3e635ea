"""Write the page of a packed checkpoint from its report.json, its recipe, and scores where there are some.

What is not known is left out: a checkpoint that was never scored has no loss, and its page says how to get one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from compress import process_memory
from compress.pages import html, measurements, suite, svg
from compress.progress import duration

BLOCK = re.compile(r"^(?P<front>.*?\.)?(?P<block>\d+)\.(?P<path>.+)$")
EXPERT = re.compile(r"\.\d+\.")  # its number
SUSPECT = 4.0  # times the median of their like
Name = TypeVar("Name")
WORST = 10  # layers
# Reasons that are spelled out above a long table.
MAX_REASONS = 5
MOST = 2000  # layers that a page lists, and keeps as data
Report = Mapping[str, Any]


def page(report: Report, recipe: str, scores: Mapping[str, Any] | None = None) -> str:
    """Return the page as HTML. report: report.json; recipe: the text of recipe.yaml; scores: scores.json.

    A report that is "incomplete", made from headers, gives a page of sizes.
    """
    scores = {name: rows for name, rows in (scores or {}).items() if rows}
    if "incomplete" in report:
        data = {"report": {**report, "layers": report.get("layers", ())[:MOST]}, "scores": scores}
        missing = html.paragraph(report["incomplete"], "faint")
        return html.page(
            "A compressed checkpoint", _headline(report, scores) + missing, [_loss(scores), _sizes(report)], data
        )
    data = {"report": {**report, "layers": _layers_to_list(report["layers"])}, "scores": scores}
    title = f"{report['model']}, compressed with {report['recipe']}"
    sections = [
        _loss(scores),
        suite.section(scores.get("suites", ())),
        measurements.among_recipes(scores.get("studies", ()), report["nbytes"]["total"], _text_scores(scores)),
        _layers(report["layers"]),
        _worst(report["layers"]),
        _sizes(report),
        _remarks(report),
        _calibration(report),
        _cost(report, bool(scores.get("speed"))),
        measurements.speed(scores.get("speed", ())),
        measurements.sampling(scores.get("sampling", ())),
        html.section("What both write", suite.writings(scores.get("generations", ()))),
        html.section("Recipe", html.fold("Every setting", html.keep_lines(recipe))),
        _everything(report["layers"]),
    ]
    return html.page(title, _headline(report, scores), sections, data)


def _headline(report: Report, scores: Mapping[str, Any]) -> str:
    """Return the most asked figures: whole bits, size, speed, loss."""
    whole, total = report.get("whole") or {}, report["nbytes"]["total"]
    figures = [(f"{whole.get('bpw', report['bpw']):.2f}", "bits per weight, whole model")]
    if whole and abs(whole["bpw"] - report["bpw"]) >= 0.005:
        figures.append((f"{report['bpw']:.2f}", "bits per packed weight"))
    if (source := report["source_nbytes"]) is not None:
        figures.append((process_memory.show(total), f"of {process_memory.show(source)}"))
        figures.append((f"{source / max(1, total):.1f}×", "smaller"))
    else:
        figures.append((process_memory.show(total), "stored"))
    figures += measurements.speed_headline(scores.get("speed", ()))
    measured = _text_scores(scores)
    for row in measured[:1]:
        error = f" ± {svg.number(row['kl_se'])}" if row.get("kl_se") else ""
        through, base = (
            (f", through the cache {row['cache']}", row["base"]) if row.get("cache") else ("", "the original")
        )
        figures.append((svg.number(row["kl_mean"]), f"KL to {base}{error}, nats a token{through}"))
        figures.append((f"{row['perplexity']:.2f}", f"perplexity ({row['base_perplexity']:.2f} of {base})"))
        figures.append((f"{row['same_top1']:.1%}", "same most likely token"))
    how = "compress inspect DIR --page --base ORIGINAL --text FILE measures the loss and adds it here."
    missing = "" if measured else html.paragraph(f"Not scored yet: {how}", "faint")
    return html.facts(figures) + missing + suite.alarm(scores.get("suites", ()))


def _text_scores(scores: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return scores of texts, those that are not of suites first."""
    return [*scores.get("texts", ()), *suite.texts(scores.get("suites", ()))]


def _loss(scores: Mapping[str, Any]) -> str:
    """Return the section of what was lost, by text."""
    names = ("text", "tokens", "KL", "s.e.", "95%", "99%", "largest", "perplexity", "original", "same top-1")
    keys = ("tokens", "kl_mean", "kl_se", "kl_p95", "kl_p99", "kl_max", "perplexity", "base_perplexity")
    rows = [
        [
            row["text"] + html.after_name(row.get("begins_with", "")),
            *(row.get(key) for key in keys),
            f"{row['same_top1']:.1%}",
        ]
        for row in scores.get("texts", ())
    ]
    if not rows:
        return ""
    return html.section(
        "What was lost",
        html.paragraph(
            "KL is the divergence of the predictions from those of the original, in nats a token; 0 is no loss. "
            "The percentiles are over tokens."
        ),
        html.table("Divergence and perplexity by text", names, rows),
    )


def _grid(layers: Sequence[Report]) -> tuple[list[str], list[str], dict[tuple[int, int], list[Report]]]:
    """Return the blocks, the linears of a block, and the layers in each cell: several are those of experts."""
    cells: dict[tuple[str, str], list[Report]] = {}
    for layer in layers:
        if (match := BLOCK.match(layer["name"])) is not None:
            cells.setdefault((match["block"], EXPERT.sub(".*.", match["path"])), []).append(layer)
    rows = sorted({block for block, _ in cells}, key=int)
    columns = list(dict.fromkeys(path for _, path in cells))
    places = {(rows.index(block), columns.index(path)): members for (block, path), members in cells.items()}
    return rows, columns, places


def _layers(layers: Sequence[Report]) -> str:
    """Return the heat maps of errors and bits by block and linear."""
    rows, columns, places = _grid(layers)
    if not places:
        return ""
    short = [column.rpartition(".")[2] for column in columns]
    labels = [f"block {row}" for row in rows]
    errors = _means(places, "output_error")
    kind = "output" if errors else "weight"
    errors, bits = errors or _means(places, "weight_error"), _means(places, "bpw")
    means = (
        " Cells of experts show the mean over them."
        if any(len(layers_of_cell) > 1 for layers_of_cell in places.values())
        else ""
    )
    parts = [
        html.figure(
            svg.heat_map(f"Relative squared error of each linear's {kind}", labels, short, errors),
            f"Relative squared error of each linear's {kind} on the calibration text, when it was quantized. "
            f"Point at a cell for its value; the table at the end has all.{means}",
        )
    ]
    if max(bits.values()) - min(bits.values()) > 0.05:
        parts.append(
            html.figure(svg.heat_map("Bits per weight of each linear", labels, short, bits), "Bits per stored weight.")
        )
    else:
        parts.append(
            html.paragraph(f"All linears of the blocks have {svg.number(min(bits.values()))} bits per weight.")
        )
    return html.section("Errors and bits by layer", *parts)


def _means(places: Mapping[tuple[int, int], Sequence[Report]], key: str) -> dict[tuple[int, int], float]:
    """Return the mean of a figure over the layers of each cell that have it."""
    known = {
        place: [layer[key] for layer in layers_of_cell if layer[key] is not None]
        for place, layers_of_cell in places.items()
    }
    return {place: sum(values) / len(values) for place, values in known.items() if values}


def suspects(layers: Sequence[Report]) -> list[tuple[str, float]]:
    """Return layers whose error is far above that of the same linear in other blocks: (name, times the median)."""
    _, columns, places = _grid(layers)
    far: list[tuple[str, float]] = []
    for column in range(len(columns)):
        alike = [layer for (_, at), layers in places.items() if at == column for layer in layers]
        measured = [layer for layer in alike if layer["output_error"] is not None]  # of experts without tokens: none
        alike = measured or alike
        far += far_above({layer["name"]: _error(layer) for layer in alike}).items()
    return sorted(far, key=lambda pair: -pair[1])


def _error(layer: Report) -> float:
    return float(layer["weight_error"] if layer["output_error"] is None else layer["output_error"])


def _worst(layers: Sequence[Report]) -> str:
    """Return the layers with the largest errors, and those that differ from their like."""
    if not layers:
        return ""
    ranked = sorted(layers, key=_error, reverse=True)[:WORST]
    far = suspects(layers)
    named = "; ".join(f"{name} ({times:.1f} times)" for name, times in far[:WORST])
    return html.section(
        "Worst layers",
        html.figure(
            svg.bars("Layers with the largest errors", {x["name"]: _error(x) for x in ranked}, svg.Axis("error")),
            "Relative squared error, of the output where it was measured, else of the weight.",
        ),
        html.paragraph(f"More than {SUSPECT:.0f} times the median error of the same linear: {named}.") if far else "",
    )


def _sizes(report: Report) -> str:
    """Return where the bytes are."""
    sizes = {name: size for name, size in report["nbytes"].items() if name != "total" and size}
    mib = {name: size / 2**20 for name, size in sizes.items()}
    rows = [
        [x["pattern"], x["count"], "×".join(map(str, x["shape"])), x["format"], x["bpw"], x["nbytes"]]
        for x in report["plan"]
    ]
    return html.section(
        "Where the bytes are",
        html.figure(svg.bars("Stored bytes", mib, svg.Axis("MiB")), "Everything that is stored, in MiB."),
        html.table("Groups of layers", ("layers", "count", "shape", "format", "bits", "bytes"), rows),
    )


def _remarks(report: Report) -> str:
    """Return what was not packed or fell back to another method, and remarks."""
    kept = [[name, said] for name, said in report["kept"].items()]
    fell, notes = ([[name, "; ".join(said)] for name, said in report[key].items()] for key in ("fallbacks", "notes"))
    return html.section(
        "What was kept, and remarks",
        _reasons("Not quantized", kept),
        _reasons("Fell back to another method", fell),
        html.fold(f"{len(notes)} remarks", html.table("Remarks", ("where", "what"), notes)) if notes else "",
    )


def _reasons(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table of (layer, reason); of many rows folded, under how often each reason was given."""
    table = html.table(title, ("layer", "reason"), rows) if rows else ""
    if len(rows) <= WORST:
        return table
    counts = Counter(reason for _, reason in rows).most_common()
    said = "; ".join(f"{reason} ({count:,})" for reason, count in counts[:MAX_REASONS])
    more = f"; {len(counts) - MAX_REASONS:,} more reasons" if len(counts) > MAX_REASONS else ""
    return html.paragraph(f"{title}: {said}{more}.") + html.fold(f"All {len(rows):,}", table)


def _calibration(report: Report) -> str:
    """Return the facts of the calibration text."""
    calibration = report.get("calibration")
    if not calibration:
        return html.section("Calibration", html.paragraph("None: the recipe needs no text."))
    source = "text that the model wrote itself" if calibration.get("self_generated") else calibration["source"]
    count, length = calibration["num_samples"], calibration["seq_len"]
    remarks = "".join(html.paragraph(note, "faint") for note in calibration["notes"])
    begun = html.after_name(calibration.get("begins_with", ""))
    share = f"{count * length:,} of {calibration['tokens_available']:,}"
    said = f"{count:,} samples of {length:,} tokens{begun} ({share}): {source}."
    return html.section("Calibration", html.paragraph(said), remarks)


def _cost(report: Report, is_timed: bool) -> str:
    """Return time and memory beside what was predicted."""
    seconds, memory = report["seconds"], report["memory"]
    rows: list[list[html.Cell]] = []
    if (predicted := seconds.get("predicted_quantize")) is not None:
        rows.append(["quantizing", duration(seconds["quantize"]), duration(predicted)])
    rows.append(["in all", duration(seconds["total"]), None])
    if memory.get("measured_peak"):
        shown = [process_memory.show(memory[key]) for key in ("measured_peak", "predicted_peak")]
        rows.append(["largest memory", *shown])
    how = "Speed was not timed: compress bench DIR --base ORIGINAL adds tokens a second to this page."
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return html.section(
        "Time and memory",
        html.table("Measured and predicted", ("", "measured", "predicted"), rows),
        html.paragraph(f"On {report['device']}, with {versions}. Self-check: {report['self_check']}.", "faint"),
        "" if is_timed else html.paragraph(how, "faint"),
    )


def _layers_to_list(layers: Sequence[Report]) -> Sequence[Report]:
    """Return all layers, or those with the largest errors where there are more than MOST, in their order."""
    if len(layers) <= MOST:
        return layers
    worst = sorted(range(len(layers)), key=lambda at: -_error(layers[at]))[:MOST]
    return [layers[at] for at in sorted(worst)]


def _everything(layers: Sequence[Report]) -> str:
    """Return the table of all layers."""
    names = ("layer", "shape", "method", "format", "bits", "weight error", "output error", "seconds")
    rows = [
        [
            x["name"],
            "×".join(map(str, x["shape"])),
            x["method"],
            x["format"],
            x["bpw"],
            x["weight_error"],
            x["output_error"],
            x["seconds"],
        ]
        for x in _layers_to_list(layers)
    ]
    said = f"{len(rows):,} of {len(layers):,} layers, those with the largest errors; report.json has all"
    said = said if len(rows) < len(layers) else f"{len(rows)} layers"
    return html.section("All layers", html.fold(said, html.table("All layers", names, rows)))


def far_above(values: Mapping[Name, float], times: float = SUSPECT) -> dict[Name, float]:
    """Return those values that are more than `times` the median, as multiples of it; none where the median is 0."""
    middle = median(values)
    return {name: value / middle for name, value in values.items() if middle > 0 and value > times * middle}


def median(values: Mapping[Name, float]) -> float:
    """Return the median, the upper one of two; 0 without values."""
    ordered = sorted(values.values())
    return ordered[len(ordered) // 2] if ordered else 0.0
