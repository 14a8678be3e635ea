"""What `compress kv-bench` shows. Formatting only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Column, Table

if TYPE_CHECKING:
    from compress.evaluate.cache import Bench, Row

QUALITY = ("recipe", "bytes/token", "slope bits", "dNLL", "95%", "KL", "top-1", "recall", "error p50", "p95")
SPEED = ("recipe", "encode us/token", "decode ms", "fused ms", "exact ms", "tok/s decode", "fused", "growing", "fixed")


def has_cache(directory: Path) -> bool:
    """Whether a checkpoint stores a cache of its own."""
    from compress.storage.checkpoint import read_config

    packed = read_config(directory).get("quantization_config")
    return isinstance(packed, dict) and packed.get("kv_cache") is not None


def lines(bench: Bench) -> list[str]:
    return [
        f"scores in {bench.dtype} on {bench.text}; bytes and speed in {bench.stored_dtype}; {bench.device}"
        + (f", {bench.threads} threads" if bench.device == "cpu" else "")
    ]


def tables(bench: Bench) -> list[Table]:
    """Quality and speed at each context length."""
    found = []
    for context in dict.fromkeys(row.context for row in bench.rows):
        rows = [row for row in bench.rows if row.context == context]
        found.append(_quality(context, rows))
        if any(row.speed is not None for row in rows):
            found.append(_speed(context, rows))
    return found


def _quality(context: int, rows: list[Row]) -> Table:
    first = rows[0]
    gain = "" if first.recall_gain is None else f", needles worth {first.recall_gain:.3f} nats a token"
    title = (
        f"{context} tokens: {first.tokens} scored, exact cache {first.exact_nll:.4f} nats a token, "
        f"{first.size.exact_per_token:,.0f} bytes{gain}"
    )
    table = _table(title, QUALITY)
    for row in rows:
        static = f" + {row.size.static / 2**20:.2f} MiB" if row.size.static else ""
        interval = "" if row.delta_interval is None else "{:+.5f} {:+.5f}".format(*row.delta_interval)
        table.add_row(
            row.recipe + (f" +{row.extra} exact" if row.extra else ""),
            f"{row.size.bytes_per_token:,.0f}{static}",
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


def _speed(context: int, rows: list[Row]) -> Table:
    table = _table(f"{context} tokens: speed of one sequence", SPEED)
    for row in rows:
        if (speed := row.speed) is None:
            continue
        table.add_row(
            row.recipe,
            f"{speed.encode_us:.1f}",
            _number(speed.read_ms, 2),
            _number(speed.attend_ms, 2),
            f"{speed.exact_attend_ms:.2f}",
            *(_number(x, 1) for x in (speed.decoded_rate, speed.fused_rate, speed.growing_rate, speed.fixed_rate)),
        )
    return table


def _table(title: str, names: tuple[str, ...]) -> Table:
    columns = [Column(name, justify="left" if name == "recipe" else "right") for name in names]
    return Table(*columns, box=None, title=title, title_justify="left", header_style="bold")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
