"""Show how the divergence from the original is spread over the tokens of a text, and the tokens at its largest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, svg

COLUMNS = (
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
Lost = Mapping[str, Any]


def section(found: Sequence[Lost]) -> str:
    """Return what suites say of each text; "" for nothing."""
    return "".join(_text(lost) for lost in found)


def sentence(lost: Lost) -> str:
    """Return in a sentence how few tokens have half of the KL."""
    return f"half of the KL on {lost['text']} lies on {lost['half']:.1%} of its tokens"


def _text(lost: Lost) -> str:
    """Return chart and table of a text."""
    title = f"Share of tokens by KL on {lost['text']}"
    shares = {f"{svg.number(each['low'])} to {svg.number(each['high'])}": each for each in lost["classes"]}
    tokens = {name: 100 * each["tokens"] for name, each in shares.items()}
    said = sentence(lost)
    caption = f"{said[0].upper()}{said[1:]}. KL in nats; the outermost classes hold what lies beyond them, too."
    rows = [_row(each) for each in lost["worst"]]
    worst = html.table(f"Tokens with the largest KL on {lost['text']}", COLUMNS, rows) if rows else ""
    table = html.table(
        f"Tokens and KL by class on {lost['text']}",
        ("KL", "of tokens", "of all KL"),
        [[name, f"{each['tokens']:.2%}", f"{each['kl']:.2%}"] for name, each in shares.items()],
    )
    return (
        html.figure(svg.bars(title, tokens, svg.Axis("tokens, %")), caption)
        + html.folded("The same as a table", table)
        + (html.folded(f"The {len(rows)} tokens with the largest KL on {lost['text']}", worst) if rows else "")
    )


def _row(worst: Mapping[str, Any]) -> list[html.Cell]:
    words = {name: quoted(worst[name]) for name in ("token", "base_expected", "expected")}
    return [
        *(worst["kl"], quoted("…" + worst["before"]), words["token"]),
        *(worst["base_probability"], worst["probability"]),
        *(words["base_expected"], worst["base_confidence"], words["expected"], worst["confidence"]),
    ]


def quoted(text: str) -> str:
    """Return text in quotes, in which ends of lines and other unprintable characters can be seen."""
    seen = "".join(sign if sign.isprintable() else {"\n": "↵", "\t": "⇥"}.get(sign, "�") for sign in text)
    return f"“{seen}”"
