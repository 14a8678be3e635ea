"""Format what the command line shows: tables, a progress bar, one-line results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from compress.progress import duration

if TYPE_CHECKING:
    from compress.allocate.forecast import Unmeasured
    from compress.evaluate.speed import Speed
    from compress.progress import Progress
    from compress.run.job import Prepared

MAX_NAMED_TENSORS = 3
WITH_TABLES = " of linears, embeddings and head together"  # what the bits of a target count, where all are allocated
PROGRESS_LINE_SECONDS = 10.0

PIPE_WIDTH = 160  # columns where there is no terminal that has a width

WORDS = frozenset(
    ["", "layers", "layer", "shape", "method", "format", "by", "notes", "recipe", "filters", "weights", "cache"]
)  # other columns: numbers

out = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a progress callback: a bar with the time left on a terminal, else a line now and then; both on stderr."""
    if not err.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        stage = ["", 0.0]

        def update(text: str, done: float, total: float) -> None:
            if total and total != stage[1]:  # another kind of work: its own clock
                stage[1] = total
                bar.reset(task, total=total)
            bar.update(task, description=text, completed=done, total=total or None)

        yield update


class _Lines:
    """Progress as lines of a log."""

    def __init__(self) -> None:
        self.next = time.monotonic() + PROGRESS_LINE_SECONDS  # a short run says nothing but its result

    def __call__(self, text: str, done: float, total: float) -> None:
        now = time.monotonic()
        if now >= self.next:
            self.next = now + PROGRESS_LINE_SECONDS
            share = f" ({100 * done / total:.0f}%)" if total else ""
            print(f"{text}{share}", file=sys.stderr, flush=True)


def time_text(seconds: float) -> str:
    """Format seconds for people."""
    return duration(seconds)


def size(nbytes: float) -> str:
    """Format bytes for people."""
    from compress.process_memory import show

    return show(nbytes)


def new_table(names: Sequence[str], title: str | None = None) -> Table:
    """Return an empty table: words to the left, numbers to the right, names of layers in full."""
    columns = [
        Column(
            name, justify="left" if name in WORDS else "right", overflow="fold" if name[:5] == "layer" else "ellipsis"
        )
        for name in names
    ]
    return Table(*columns, box=None, title=title, title_justify="left", header_style="bold")


def columns(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of words, the last column the widest."""
    first = (Column(name, max_width=36, min_width=min(len(name), 36)) for name in names[:-1])
    table = Table(*first, Column(names[-1], overflow="fold"), box=None, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def bits(bpw: float, whole: dict[str, float] | None) -> str:
    """Return in words the bits of a packed weight, and those of a parameter of the whole model, if they are known."""
    if whole is None or not whole["parameters"]:
        return f"{bpw:.3f} bits per packed weight"
    share = f"{whole['share']:.1%} of parameters packed"
    return f"{bpw:.3f} bits per packed weight, {whole['bpw']:.3f} over the whole model ({share})"


def plan_table(rows: list[dict[str, Any]], other: dict[str, int], total: int, source: int | None, bpw: float) -> Table:
    """Return the plan as a table: a row for each group of layers, then what is copied, then the sum.

    source: bytes of the original, if they are known.
    """
    table = new_table(("layers", "count", "shape", "method", "format", "bpw", "bytes"))
    for row in rows:
        shape = f"{row['shape'][0]} x {row['shape'][1]}"
        table.add_row(
            row["pattern"],
            str(row["count"]),
            shape,
            row["method"],
            row["format"],
            f"{row['bpw']:.3f}",
            f"{row['nbytes']:,}",
        )
    for name, nbytes in other.items():
        if not nbytes:  # it is packed, or the model has none
            continue
        table.add_row(name, "", "", "", "as it is", "", f"{nbytes:,}")
    whole = size(total) if source is None else f"{size(total)} of {size(source)}"
    table.add_row("total", "", "", "", whole, f"{bpw:.3f}", f"{total:,}", style="bold")
    return table


def print_plan(prepared: Prepared) -> None:
    """Print on stderr, in one line, what a run is about to do."""
    from rich.text import Text

    err.print(Text(plan_line(prepared)), soft_wrap=True)


def plan_line(prepared: Prepared) -> str:
    """Return in words in one line what a run is about to do."""
    from compress.run import report

    plan, arrangement = prepared.plan, prepared.arrangement
    tables = f" and {len(plan.tables)} outside of the blocks" if plan.tables else ""
    packed = f"{len(plan.layers)} linears{tables} to {bits(plan.bpw, report.whole(plan))}"
    what = packed if plan.layers else "no linear is packed"
    line = (
        f"{what}, {size(plan.nbytes)} of "
        f"{_source(prepared.skeleton.checkpoint.nbytes, prepared.skeleton.checkpoint.base)}; predicted peak memory "
        f"{size(arrangement.peak_nbytes)}"
    )
    line = "; ".join((line, *prepared.messages))
    if prepared.samples:
        where = "on disk" if arrangement.spill else "in memory"
        line += f"; {prepared.samples} samples of {prepared.seq_len} tokens, {arrangement.batch} at a time, "
        return line + f"hidden states {where}"
    return line + "; the recipe needs no calibration text"


def _source(nbytes: int, base: str | None) -> str:
    """Return in words how large the original is, and how another tool has stored it."""
    return f"{size(nbytes)} (base: {base})" if base else size(nbytes)


def result_lines(report: dict[str, Any], directory: str) -> list[str]:
    """Return in words what a run has written, with predictions beside measurements."""
    used, took = report["memory"], report["seconds"]
    plain = "weights as they are, with a kv_cache" if report.get("kv_cache") else "transformed, in full precision"
    what = bits(report["bpw"], report.get("whole")) if report["layers"] else plain
    peak = "unknown" if used["measured_peak"] is None else size(used["measured_peak"])
    lines = [
        f"{directory}: {what}, {size(report['nbytes']['total'])} of "
        f"{_source(report['source_nbytes'], report['base'])}, self-check {report['self_check']}",
        f"peak memory {peak} (predicted {size(used['predicted_peak'])}"
        + (f", limit {size(used['limit'])})" if used["limit"] else ")"),
    ]
    if took["predicted_quantize"] is not None:
        lines.append(
            f"time {duration(took['total'])}; quantizing {duration(took['quantize'])} (predicted "
            f"{duration(took['predicted_quantize'])})"
        )
    if report.get("quick"):
        lines.append("made with little effort, as --quick asks for: without it less is lost")
    if unused := report.get("unused"):
        names = sorted(unused, key=lambda name: -unused[name])
        largest = [*names[:MAX_NAMED_TENSORS], *(["..."] if len(names) > MAX_NAMED_TENSORS else [])]
        lines.append(
            f"{len(unused)} stored tensors that the model does not use, {size(sum(unused.values()))}, are copied and "
            f"left out of bits over the whole model: {', '.join(largest)}"
        )
    if made := report.get("exported"):
        lines += [f"{made['out']}: {size(made['nbytes'])}", *made["notes"]]
    lines += [note for part in ("transform", "kv_cache") for note in report["notes"].get(part, [])]
    if report["resumed_blocks"]:
        lines.append(f"resumed after {report['resumed_blocks']} of {report['blocks']} blocks")
    if experts := report.get("experts"):
        pruned = [row for row in experts.values() if row["threshold"] is not None]
        share = sum(row["dropped"] for row in pruned) / len(experts)
        lines.append(
            f"experts pruned in {len(pruned)} of {len(experts)} blocks that have any: {share:.1%} of what calibration "
            "tokens were routed to is left out"
        )
    if nbytes := (report.get("kv_cache") or {}).get("size"):
        lines.append(cache_bytes_line(nbytes))
    if cache := (report.get("allocation") or {}).get("cache"):
        lines += [cache_line(cache)]
    if report["fallbacks"]:
        lines.append(f"{len(report['fallbacks'])} layers used a fallback; see report.json, or `compress inspect`")
    return lines


def cache_bytes_line(found: dict[str, Any]) -> str:
    """Return in words what a cache takes at a context, and how much of that is calibrated tensors."""
    static = ""
    if found["static"]:
        share = found["static"] / found["context"]
        static = f", {share:,.0f} of them calibrated tensors ({size(found['static'])}, once for all sequences)"
    states = ""
    if found.get("states"):
        states = f"; states: {size(found['states'])} a sequence; exact: {size(found['exact_states'])} in float32"
    return (
        f"cache: {found['bytes_per_token']:,.0f} bytes a token at {found['context']:,} tokens{static}; exact: "
        f"{found['exact_bytes_per_token']:,.0f}{states}"
    )


def cache_line(found: dict[str, Any]) -> str:
    """Return in words what a budget gave the cache."""
    bits = " and ".join(f"{kind} {bits:.2f}" for kind, bits in found["bits per element"].items())
    each = f"{found['nbytes'] / found['context']:,.0f} bytes a token, calibrated tensors included"
    window = found.get("measured at") or found["context"]
    measured = f"; errors measured at {window:,} tokens" if window < found["context"] else ""
    stored = f"; {found['tokens stored']:.0%} of its tokens stored" if "tokens stored" in found else ""
    said = f"cache of {found['context']:,} tokens: {size(found['nbytes'])} ({each}); bits an element: {bits}"
    return f"{said}{stored}{measured}"


def verify_line(found: dict[str, Any], directory: str) -> str:
    """Return in words what `compress verify` has checked, and what it could not."""
    tensors, blocks = f"{found['tensors']} tensors ({size(found['nbytes'])})", f"{found['blocks']} blocks"
    if found["manifest"] == "checked":
        beside = f"; not listed and not checked: {', '.join(found['unlisted'])}" if found["unlisted"] else ""
        return f"{directory}: {found['files']} files, {tensors} and {blocks} are as written{beside}"
    why = "there is no manifest" if found["manifest"] == "none" else f"the manifest is {found['manifest']}"
    return (
        f"{directory}: {tensors} fit the configuration, all values are finite, and {blocks} decode; hashes are not "
        f"checked, because {why}"
    )


def evaluation_table(values: dict[str, Any]) -> Table:
    """Return scores as two columns."""
    table = Table(box=None, show_header=False)
    for key, value in values.items():
        table.add_row(key.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value) or "nothing")
    return table


def layers_table(layers: list[dict[str, Any]], title: str) -> Table:
    """Return layers of a report with their errors."""
    two_sided = ["two-sided error"] if any(row.get("two_sided_error") is not None for row in layers) else []
    table = new_table(("layer", "method", "bpw", *two_sided, "output error", "weight error", "notes"), title)
    for row in layers:
        errors = [row.get("two_sided_error")] if two_sided else []
        errors.append(row["output_error"])
        table.add_row(
            row["name"],
            row["method"],
            f"{row['bpw']:.3f}",
            *("" if error is None else f"{error:.5f}" for error in errors),
            f"{row['weight_error']:.5f}",
            "; ".join(row["notes"]),
        )
    return table


def speed_lines(speed: Speed) -> list[str]:
    """Return in words on which device a model was timed, and its tokens per second."""
    threads = f", {speed.threads} threads" if speed.device == "cpu" else ""
    prefill, decode = speed.prefill_tokens_per_s, speed.decode_tokens_per_s
    base_prefill, base_decode = (
        f"; {speed.base} {rate:,.1f}, {own / rate:.2f} times" if rate is not None else ""
        for own, rate in ((prefill, speed.base_prefill_tokens_per_s), (decode, speed.base_decode_tokens_per_s))
    )
    return [
        f"{speed.device}{threads}, bfloat16, batch {speed.batch}",
        f"prefill {prefill:,.1f} tokens/s ({speed.prompt_tokens} tokens){base_prefill}",
        f"decode {decode:,.1f} tokens/s ({speed.new_tokens} tokens){base_decode}",
        f"memory copies {speed.copy_bytes_per_s / 1e9:,.1f} GB/s",
    ]


def speed_table(speed: Speed) -> Table:
    """Return a row for each shape of packed layer."""
    table = new_table(("layer", "count", "format", "bpw", "by", "time", "GB/s", "of copy rate", "x bfloat16"))
    for row in speed.layers:
        cells = (f"{row.shape[0]} x {row.shape[1]}", str(row.count), row.format, f"{row.bpw:.3f}")
        path = "kernel" if row.kernel else "decoding"
        rates = (f"{row.bytes_per_s / 1e9:.1f}", f"{row.copy_share:.0%}", f"{row.ratio:.2f}")
        table.add_row(*cells, path, f"{row.seconds * 1e6:.0f} us", *rates)
    return table


def unmeasured_lines(found: Unmeasured, command: str) -> list[str]:
    """Return in words what measuring for an allocation takes, and which size each option has when used uniformly."""
    what = f"{found.options} options x {found.linears} linears" if found.linears else "options of the cache"
    target = f"{found.target}{WITH_TABLES if found.tables else ''}"
    if found.tables:
        what += f" and {found.table_options} options of {' and '.join(found.tables)}"
    lines = [f"not measured: {what} on {found.tokens:,} calibration tokens; target {target}; measure with:"]
    lines.append(command)
    if found.linears:
        lines.append(f"time of quantizing all options: about {duration(found.seconds)}")
    if found.estimator:
        lines.append(found.estimator)
    width = max((len(row["option"]) for row in found.uniform), default=0)
    for row in found.uniform:
        where = "in all linears, tables at their largest" if found.tables else "everywhere"
        lines.append(f"{row['option']:<{width}} {where}: {row['bpw']:.3f} bpw, {row['nbytes']:,} bytes in all")
    return lines


def frontier_table(found: dict[str, Any]) -> Table:
    """Return KL against size: uniform options, allocated models, and the one with the target."""
    table = new_table(("", "bpw", "bytes", "KL", "uniform at these bytes", "ratio"))

    def add(name: str, row: dict[str, Any], style: str = "") -> None:
        uniform = row.get("kl of uniform")
        beside = (f"{uniform:.5f}", f"{row['kl'] / uniform:.2f}") if uniform else ("", "")
        table.add_row(name, f"{row['bpw']:.3f}", f"{row['nbytes']:,}", f"{row['kl']:.5f}", *beside, style=style)

    for row in found["uniform"]:
        add(row["option"], row)
    for row in found["allocated"]:
        add(found["method"], row)
    if found["chosen"] is not None:
        add(f"{found['chosen']['method']}, {found['chosen']['target']}", found["chosen"], "bold")
    return table


def allocation_lines(found: dict[str, Any]) -> list[str]:
    """Return in words on which text KL was measured, and which option each unit got."""
    lines = [f"KL to the original on {found['tokens']:,} tokens of {found['text']}"]
    if found.get("with tables"):
        lines.append("uniform: one option for all linears, with embeddings and head at their largest option")
    chosen = found["chosen"]
    if chosen is not None:
        shares = ", ".join(f"{option}: {100 * share:.0f}%" for option, share in chosen["weights by option"].items())
        target = f"{chosen['target']}{WITH_TABLES if chosen.get('with tables') else ''}"
        lines.append(f"{chosen['method']} at {target}: {shares} of the weights")
        lines += [f"  {name}: {option}" for name, option in chosen["units"].items()]
        if cache := chosen.get("cache"):
            lines.append(cache_line(cache))
            lines += [
                f"  layer {layer}: " + ", ".join(f"{k} {o}" for k, o in kinds.items())
                for layer, kinds in cache["layers"].items()
            ]
        lines += chosen["notes"]
    return lines
