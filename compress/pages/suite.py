"""Write the section of a page on suites of `compress eval`: what looks broken, tasks beside the original, the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from compress.pages import html, lost_tokens, svg, writing

Suites = Sequence[Mapping[str, Any]]
RIGHT = "Right answers beside the original"
LIKELIHOOD = "Likelihood of the right answers, nats a token"


def texts(suites: Suites) -> list[Mapping[str, Any]]:
    """Return the scores of texts in all suites, with their "base" and "cache"; those without a cache come first."""
    ordered = sorted(suites, key=lambda suite: bool(suite["cache"]))
    return [{**row, "base": suite["base"], "cache": suite["cache"]} for suite in ordered for row in suite["texts"]]


def alarm(suites: Suites) -> str:
    """Return what looks broken, for the head of the page; "" for nothing."""
    found = list(dict.fromkeys(finding for suite in suites for finding in suite["findings"]))
    return "".join(f'<p class="bad"><strong>Looks broken:</strong> {escape(each)}.</p>' for each in found)


def section(suites: Suites) -> str:
    """Return the section; "" without a suite."""
    return "".join(_suite(suite) for suite in suites)


def _suite(suite: Mapping[str, Any]) -> str:
    floor = suite["floor"]
    noise = (
        f"KL of {svg.number(floor['kl_mean'])} is rounding: that of {floor['path']}, over {floor['tokens']:,} tokens."
        if floor
        else ""
    )
    broken = "; ".join(suite["findings"])
    through = f", through the cache {suite['cache']}" if suite["cache"] else ""
    return html.section(
        f"Suite {suite['suite']}, beside {suite['base']}{through}",
        html.paragraph(f"Looks broken: {broken}." if broken else "No layer and no tokenizer looks broken."),
        html.paragraph(noise, "faint") if noise else "",
        html.paragraph(f"Cache {suite['cache_read']}.", "faint") if suite["cache"] else "",
        _texts(suite["texts"]),
        lost_tokens.section(suite["lost"]),
        _tasks(suite["tasks"]),
        *(html.paragraph(f"{each}.") for each in suite["remarks"]),
        *(_groups(row) for row in suite["tasks"] if row["groups"]),
        html.paragraph("What both write, greedily, behind the beginnings of texts:") if suite["written"] else "",
        writing.beside(suite["written"]),
    )


def _texts(rows: Suites) -> str:
    names = ("text", "tokens", "KL", "s.e.", "perplexity", "original", "other top-1")
    keys = ("tokens", "kl_mean", "kl_se", "perplexity", "base_perplexity")
    shown = [
        [
            row["text"] + html.begun(row.get("begins_with", "")),
            *(row[key] for key in keys),
            f"{1 - row['same_top1']:.1%}",
        ]
        for row in rows
    ]
    return html.table("Divergence and perplexity by text", names, shown) if shown else ""


def _tasks(rows: Suites) -> str:
    if not rows:
        return ""
    names = "task", "items", "right", "original", "difference, 95%", "lost", "gained", "McNemar p", "answers changed"
    shown = [[row["task"], row["items"], *_shares(row)] for row in rows]
    known = [row for row in rows if row["nll"] is not None]
    losses = [[row["task"], row["nll"], row["paired"]["base_nll"], nll_difference(row["paired"])] for row in known]
    said = (
        "Right: share of items. Lost and gained: items that only the original, or only the compressed model has right. "
        "Where the interval holds 0 no difference was found: the true one may lie anywhere in it."
    )
    return (
        html.paragraph(said)
        + html.table(RIGHT, names, shown)
        + (html.table(LIKELIHOOD, ("task", "NLL", "original", "difference, 95%"), losses) if losses else "")
    )


def _shares(row: Mapping[str, Any]) -> list[html.Cell]:
    paired = row["paired"]
    return [
        *(f"{row['accuracy']:.1%}", f"{paired['base_accuracy']:.1%}", difference(paired)),
        *(paired["lost"], paired["gained"], paired["p_value"], f"{paired['all_flips']:.1%}"),
    ]


def _groups(row: Mapping[str, Any]) -> str:
    names = (row["by"], "items", "right", "original", "NLL", "original")
    shown = [
        [
            *(each["value"], each["items"], f"{each['accuracy']:.1%}", f"{each['base_accuracy']:.1%}"),
            *(each["nll"], each["base_nll"]),
        ]
        for each in row["groups"]
    ]
    return html.table(f"{row['task']} by {row['by']}", names, shown)


def difference(paired: Mapping[str, Any]) -> str:
    """Return the difference of the shares of right items with its interval."""
    return f"{paired['difference']:+.1%} ({paired['difference_low']:+.1%} to {paired['difference_high']:+.1%})"


def nll_difference(paired: Mapping[str, Any]) -> str | None:
    """Return the difference of the likelihood of right answers with its interval; None where it is not known."""
    value, low, high = (paired[key] for key in ("nll_difference", "nll_low", "nll_high"))
    if value is None:
        return None
    return f"{value:+.3f}" if low is None or high is None else f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
