"""Write the section of a page on suites of `compress eval`.

It shows what looks broken, tasks beside the original, the floor of rounding, how the divergence is spread over the
tokens of a text, and what both models write behind the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, svg

Suites = Sequence[Mapping[str, Any]]
Lost = Mapping[str, Any]
RIGHT = "Right answers beside the original"
LIKELIHOOD = "Likelihood of the right answers, nats a token"
LOST_COLUMNS = (
    "KL",
    "behind",
    "the text has",
    "original: p",
    "compressed: p",
    "original expects",
    "p",
    "compressed expects",
    "p",
)


def texts(suites: Suites) -> list[Mapping[str, Any]]:
    """Return the scores of texts in all suites, with their "base" and "cache"; those without a cache come first."""
    ordered = sorted(suites, key=lambda suite: bool(suite["cache"]))
    return [{**row, "base": suite["base"], "cache": suite["cache"]} for suite in ordered for row in suite["texts"]]


def alarm(suites: Suites) -> str:
    """Return what looks broken, for the head of the page; "" for nothing."""
    findings = dict.fromkeys(finding for suite in suites for finding in suite["findings"])
    return "".join(map(html.alarm, findings))


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
        lost_tokens(suite["lost"]),
        _tasks(suite["tasks"]),
        *(html.paragraph(f"{each}.") for each in suite["remarks"]),
        *(_groups(row) for row in suite["tasks"] if row["groups"]),
        html.paragraph("What both write, greedily, behind the beginnings of texts:") if suite["written"] else "",
        writings(suite["written"]),
    )


def _texts(rows: Suites) -> str:
    names = ("text", "tokens", "KL", "s.e.", "perplexity", "original", "other top-1")
    keys = ("tokens", "kl_mean", "kl_se", "perplexity", "base_perplexity")
    shown = [
        [
            row["text"] + html.after_name(row.get("begins_with", "")),
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


def lost_tokens(losses: Sequence[Lost]) -> str:
    """Return what suites say of each text; "" for nothing."""
    return "".join(_lost_in_text(lost) for lost in losses)


def half_of_loss(lost: Lost) -> str:
    """Return in a sentence how few tokens have half of the KL."""
    return f"half of the KL on {lost['text']} lies on {lost['half']:.1%} of its tokens"


def _lost_in_text(lost: Lost) -> str:
    """Return chart and table of a text."""
    title = f"Share of tokens by KL on {lost['text']}"
    shares = {f"{svg.number(each['low'])} to {svg.number(each['high'])}": each for each in lost["classes"]}
    tokens = {name: 100 * each["tokens"] for name, each in shares.items()}
    said = half_of_loss(lost)
    caption = f"{said[0].upper()}{said[1:]}. KL in nats; the outermost classes hold what lies beyond them, too."
    rows = [_lost_token(each) for each in lost["worst"]]
    worst = html.table(f"Tokens with the largest KL on {lost['text']}", LOST_COLUMNS, rows) if rows else ""
    table = html.table(
        f"Tokens and KL by class on {lost['text']}",
        ("KL", "of tokens", "of all KL"),
        [[name, f"{each['tokens']:.2%}", f"{each['kl']:.2%}"] for name, each in shares.items()],
    )
    return (
        html.figure(svg.bars(title, tokens, svg.Axis("tokens, %")), caption)
        + html.fold("The same as a table", table)
        + (html.fold(f"The {len(rows)} tokens with the largest KL on {lost['text']}", worst) if rows else "")
    )


def _lost_token(worst: Mapping[str, Any]) -> list[html.Cell]:
    words = {name: quote(worst[name]) for name in ("token", "base_expected", "expected")}
    return [
        *(worst["kl"], quote("…" + worst["before"]), words["token"]),
        *(worst["base_probability"], worst["probability"]),
        *(words["base_expected"], worst["base_confidence"], words["expected"], worst["confidence"]),
    ]


def quote(text: str) -> str:
    """Return text in quotes, in which ends of lines and other unprintable characters can be seen."""
    seen = "".join(sign if sign.isprintable() else {"\n": "↵", "\t": "⇥"}.get(sign, "�") for sign in text)
    return f"“{seen}”"


def writings(rows: Sequence[Mapping[str, str]]) -> str:
    """Return prompts with what the original and the compressed model write, side by side; "" for none."""
    return "".join(html.side_by_side(row["prompt"], row["base"], row["model"]) for row in rows)
