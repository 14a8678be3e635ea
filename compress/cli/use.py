"""Use caches of models: `compress kv bench`, `kv save`, `kv load` and `kv show`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from compress.cli.options import (
    OWN_CACHE,
    AsJson,
    Bos,
    CacheCalib,
    CacheSet,
    Device,
    Dtype,
    Model,
    Seed,
    TextFile,
    cache_recipes,
    check_model,
    check_paths,
    device_named,
    errors,
    note,
    note_prefix,
    recipes_with_cache,
    required_text,
)
from compress.cli.tables import new_table
from compress.errors import CalibrationError, first_line
from compress.storage import paths

if TYPE_CHECKING:
    from compress.evaluate.cache import Bench, CacheRow

QUALITY = ("recipe", "bytes/token", "static", "slope bits", "dNLL", "95%", "KL", "top-1", "recall", "error p50", "p95")
TIMES = ("recipe", "encode us/token", "decode ms", "fused ms", "exact ms")
SPEED = (*TIMES, "tok/s decode", "tok/s fused", "tok/s growing", "tok/s fixed")
NEEDLES = ("recipe", "bytes/token", "right", "+-", "dNLL", "+-")

kv = typer.Typer(
    help="Compare compressed caches; save the cache of a prompt, and go on from it later.",
    no_args_is_help=True,
    add_completion=False,
)

Quality = Literal["high", "standard", "small", "lossless"]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A cache that compress kv save wrote.")]


def _has_cache(directory: Path) -> bool:
    """Tell whether a checkpoint stores settings of a cache."""
    from compress.runtime import kv_config
    from compress.storage.checkpoint import read_config

    return kv_config.stored_section(read_config(directory)) is not None


@kv.command("bench", epilog="Example: compress kv bench ./my-model --kv kv4 --kv kv2 --text held_out.txt")
def bench(
    model: Model,
    recipes: Annotated[
        list[str] | None,
        typer.Option("--kv", metavar="RECIPE", help="Recipe with kv_cache; repeatable. Default: own, or all that fit."),
    ] = None,
    overrides: CacheSet = None,
    text: TextFile = None,
    context: Annotated[
        list[int] | None,
        typer.Option("--context", min=64, help="Tokens of a context; repeatable. Default: three that fit."),
    ] = None,
    calib: CacheCalib = None,
    max_tokens: Annotated[int, typer.Option(min=128, help="Tokens of the text to score at each context.")] = 16384,
    needles: Annotated[
        int, typer.Option(min=0, help="Long texts with five sentences to find again, for each context; 0: none.")
    ] = 4,
    equal_bytes: Annotated[bool, typer.Option(help="Also compare at equal bytes.")] = True,
    speed: Annotated[bool, typer.Option(help="Also time them.")] = True,
    bos: Bos = "auto",
    dtype: Dtype = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare compressed caches with the uncompressed one: loss, recall, needles, errors of attention, bytes, speed."""
    with errors():
        text = required_text(text)
        check_paths(model, text, calib)
        caches = cache_recipes(recipes or [], overrides) if recipes or overrides else None
        from compress.cli import tables
        from compress.evaluate import cache
        from compress.evaluate.reader import Execution
        from compress.run.source import resolve

        directory = resolve(model)
        if caches is None:
            caches = cache_recipes([OWN_CACHE] if _has_cache(directory) else recipes_with_cache(only=True))
        left_out = None if recipes else note  # recipes that were not named
        asked = cache.BenchRequest(
            caches, text, calib, tuple(context or ()), max_tokens, equal_bytes, speed, needles, left_out
        )
        note_prefix(directory, bos)
        with tables.progress_bar() as progress:
            result = cache.bench(directory, asked, Execution(dtype, device_named(device), bos=bos), progress)
        if as_json:
            print(json.dumps(dataclasses.asdict(result)))
            return
        for line in _bench_lines(result):
            print(line)
        for table in _bench_tables(result):
            tables.out.print(table)


@kv.command(epilog="Example: compress kv save ./my-model --prompt-file manual.txt --out manual.kv")
def save(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write, replaced when complete.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to read.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the text to read.")] = None,
    quality: Annotated[
        Quality, typer.Option(help="Of keys and values; a checkpoint with a cache of its own keeps every bit.")
    ] = "standard",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that kv save did not write.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Let a model read a prompt, and save the cache that it computes.

    A file of an earlier kv save is replaced, any other only with --overwrite.
    """
    with errors():
        text = _prompt_text(prompt, prompt_file)
        check_model(model)
        paths.check_writable(out.parent, "--out")
        if out.is_dir():
            raise typer.BadParameter(f"{out} is a directory; give a file", param_hint="--out")
        sources = [path for path in (paths.local_model(model), prompt_file) if path is not None]
        paths.check_saved_cache_out(out, overwrite, sources)
        from compress.evaluate import saved_cache
        from compress.run.source import resolve

        _print_saved(saved_cache.save(resolve(model), text, out, quality, device_named(device)), out, as_json)


@kv.command(epilog='Example: compress kv load ./my-model manual.kv --prompt "How is it reset?"')
def load(
    model: Model,
    file: File,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text that follows the saved prompt; may be none.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token each time.")] = 0.0,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Load the cache of a prompt, and let the model go on from there."""
    with errors():
        check_model(model)
        paths.check_saved_cache(file)
        from compress.evaluate import saved_cache
        from compress.run.source import resolve

        draw = (temperature, seed)
        written = saved_cache.write_on(resolve(model), file, prompt, max_new_tokens, draw, device_named(device))
        print(json.dumps({"prompt": prompt, "text": written}) if as_json else written)


@kv.command(epilog="Example: compress kv show manual.kv")
def show(file: File, as_json: AsJson = False) -> None:
    """Show what a saved cache holds: tokens, bytes, quality. Hashes of what is small are checked."""
    with errors():
        paths.check_saved_cache(file)
        from compress.evaluate import saved_cache

        _print_saved(saved_cache.describe(file), file, as_json)


def _print_saved(saved: object, path: Path, as_json: bool) -> None:
    """Print what a file holds, a `Saved`."""
    facts = {"file": str(path), **dataclasses.asdict(saved)}  # type: ignore[call-overload]
    if as_json:
        print(json.dumps(facts))
        return
    share = facts["nbytes"] / max(1, facts["raw_nbytes"])
    print(
        f"{path}: {facts['tokens']:,} tokens, {facts['nbytes'] / 2**20:.2f} MiB, {share:.1%} of keys and values as the "
        f"model computes them, quality {facts['quality']}"
    )


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the text of one of the two options."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give --prompt or --prompt-file, one of them", param_hint="--prompt")
    if prompt_file is None:
        assert prompt is not None
        return prompt
    paths.check_text(str(prompt_file))
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CalibrationError(f"cannot read {prompt_file} ({first_line(error)}); give a text in UTF-8") from error


def _bench_lines(result: Bench) -> list[str]:
    """Return lines: precision, text and device of scores and times, and how each cache is read."""
    on = f"{result.device}, {result.threads} threads" if result.device == "cpu" else result.device
    first = f"scores in {result.dtype} on {result.text}; bytes and speed in {result.stored_dtype}; {on}"
    return [first, *(f"{recipe}, {read.text}" for recipe, read in result.readings.items())]


def _bench_tables(result: Bench) -> list[Table]:
    """Return quality, needles and speed at each context length."""
    shown = []
    for context in dict.fromkeys(row.context for row in result.rows):
        rows = [row for row in result.rows if row.context == context]
        shown.append(_quality(context, rows))
        if any(row.needles is not None for row in rows):
            shown.append(_needles(context, rows))
        if any(row.speed is not None for row in rows):
            shown.append(_speed(context, rows))
    return shown


def _quality(context: int, rows: list[CacheRow]) -> Table:
    first = rows[0]
    gain = "" if first.recall_gain is None else f", repeated passages worth {first.recall_gain:.3f} nats a token"
    title = (
        f"{context} tokens: {first.tokens} scored, exact cache {first.exact_nll:.4f} nats a token, "
        f"{first.size.exact_per_token:,.0f} bytes{gain}; bytes of one sequence of {context} tokens, static included"
    )
    table = new_table(QUALITY, title)
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


def _needles(context: int, rows: list[CacheRow]) -> Table:
    """Return shares of right answers, in all and by depth, and nats a token above the exact cache."""
    measured = [(row, row.needles) for row in rows if row.needles is not None]
    first = measured[0][1]
    depths = tuple(f"at {score.depth:.0%}" for score in first.depths)
    missed = f", {first.asked - first.kept} that it does not find are left out" if first.kept < first.asked else ""
    nll = "" if first.exact_nll is None else f" ({first.exact_nll:.4f} nats a token)"
    title = f"{context} tokens: the exact cache finds {first.kept} of {first.asked} needles{nll}{missed}"
    table = new_table((*NEEDLES, *depths), title)
    for row, score in measured:
        by_depth = ("" if each.right is None else f"{each.right:.0%}" for each in score.depths)
        cells = (_percent(score.right), _percent(score.right_se), _with_sign(score.nll), _number(score.nll_se, 4))
        table.add_row(row.recipe, f"{row.size.bytes_per_token:,.0f}", *cells, *by_depth)
    return table


def _speed(context: int, rows: list[CacheRow]) -> Table:
    table = new_table(SPEED, f"{context} tokens: speed of one sequence")
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


def _number(value: float | None, digits: int) -> str:
    """Return a number with so many digits behind the point, "" for none."""
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    """Return a share in percent, "" for none."""
    return "" if value is None else f"{value:.1%}"


def _with_sign(value: float | None) -> str:
    """Return a difference with its sign, "" for none."""
    return "" if value is None else f"{value:+.4f}"
