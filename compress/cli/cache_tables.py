"""Format what `compress kv-bench` shows: quality, needles and speed of caches at each context length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from compress.cli.tables import titled

if TYPE_CHECKING:
    from compress.evaluate.cache import Bench, Row

QUALITY = ("recipe", "bytes/token", "static", "slope bits", "dNLL", "95%", "KL", "top-1", "recall", "error p50", "p95")
TIMES = ("recipe", "encode us/token", "decode ms", "fused ms", "exact ms")
SPEED = (*TIMES, "tok/s decode", "tok/s fused", "tok/s growing", "tok/s fixed")
NEEDLES = ("recipe", "bytes/token", "right", "+-", "dNLL", "+-")


def lines(bench: Bench) -> list[str]:
    """Say in which precision, on which text and device caches were scored and timed, and how each is read."""
    on = f"{bench.device}, {bench.threads} threads" if bench.device == "cpu" else bench.device
    first = f"scores in {bench.dtype} on {bench.text}; bytes and speed in {bench.stored_dtype}; {on}"
    return [first, *(f"{recipe}, {read.text}" for recipe, read in bench.readings.items())]


def tables(bench: Bench) -> list[Table]:
    """Return quality, needles and speed at each context length."""
    shown = []
    for context in dict.fromkeys(row.context for row in bench.rows):
        rows = [row for row in bench.rows if row.context == context]
        shown.append(_quality(context, rows))
        if any(row.needles is not None for row in rows):
            shown.append(_needles(context, rows))
        if any(row.speed is not None for row in rows):
            shown.append(_speed(context, rows))
    return shown


def _quality(context: int, rows: list[Row]) -> Table:
    first = rows[0]
    gain = "" if first.recall_gain is None else f", repeated passages worth {first.recall_gain:.3f} nats a token"
    title = (
        f"{context} tokens: {first.tokens} scored, exact cache {first.exact_nll:.4f} nats a token, "
        f"{first.size.exact_per_token:,.0f} bytes{gain}; bytes of one sequence of {context} tokens, static included"
    )
    table = titled(QUALITY, title)
    for row in rows:
        interval = "" if row.delta_interval is None else "{:+.5f} {:+.5f}".format(*row.delta_interval)
        table.add_row(
            row.recipe + (f" +{row.extra} exact" if row.extra else ""),
            f"{row.size.bytes_per_token:,.0f}",
            f"{row.size.static / 2**20:.2f} MiB" if row.size.static else "",
            f"{row.size.bits_per_element:.3f}",
            f"{row.delta_nll:+.5f}",
            interval,
            f"{row.kl:.2e}",
            f"{row.same_top1:.1%}",
            "" if row.recalled is None else f"{row.recalled:.1%}",
            f"{row.error_p50:.2e}",
            f"{row.error_p95:.2e}",
        )
    return table


def _needles(context: int, rows: list[Row]) -> Table:
    """Return shares of right answers, in all and by depth, and nats a token above the exact cache."""
    measured = [(row, row.needles) for row in rows if row.needles is not None]
    first = measured[0][1]
    depths = tuple(f"at {score.depth:.0%}" for score in first.depths)
    missed = f", {first.asked - first.kept} that it does not find are left out" if first.kept < first.asked else ""
    nll = "" if first.exact_nll is None else f" ({first.exact_nll:.4f} nats a token)"
    title = f"{context} tokens: the exact cache finds {first.kept} of {first.asked} needles{nll}{missed}"
    table = titled((*NEEDLES, *depths), title)
    for row, found in measured:
        by_depth = ("" if score.right is None else f"{score.right:.0%}" for score in found.depths)
        cells = (share(found.right), share(found.right_se), signed(found.nll), number(found.nll_se, 4))
        table.add_row(row.recipe, f"{row.size.bytes_per_token:,.0f}", *cells, *by_depth)
    return table


def _speed(context: int, rows: list[Row]) -> Table:
    table = titled(SPEED, f"{context} tokens: speed of one sequence")
    for row in rows:
        if (speed := row.speed) is None:
            continue
        table.add_row(
            row.recipe,
            f"{speed.encode_us:.1f}",
            number(speed.read_ms, 2),
            number(speed.attend_ms, 2),
            f"{speed.exact_attend_ms:.2f}",
            *(number(x, 1) for x in (speed.decoded_rate, speed.fused_rate, speed.growing_rate, speed.fixed_rate)),
        )
    return table


def number(value: float | None, digits: int) -> str:
    """Return a number with so many digits behind the point, "" for none."""
    return "" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """Return a share in percent, "" for none."""
    return "" if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    """Return a difference with its sign, "" for none."""
    return "" if value is None else f"{value:+.4f}"
