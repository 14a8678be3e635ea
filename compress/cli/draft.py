"""Choose the draft of a checkpoint: `compress draft`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from compress.cli.options import (
    AsJson,
    Bos,
    Device,
    Dtype,
    Model,
    Seed,
    TextFile,
    check_paths,
    device_named,
    errors,
    note,
    note_prefix,
    required_text,
)
from compress.cli.tables import new_table

if TYPE_CHECKING:
    from compress.evaluate.drafts import DraftChoice

COLUMNS = ("level", "without", "KL", "alpha", "1 - .47 sqrt(KL)", "top-1", "bytes read", "length", "speed-up")
MAX_SHOWN = 60  # characters of a set


def draft(
    model: Model,
    text: TextFile = None,
    share: Annotated[
        list[float] | None,
        typer.Option(min=0, max=0.9, help="Of the inner attentions and MLPs to pass over; repeatable. 0: none."),
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="NAME", help="How they are chosen: greedy, swift, draft_verify.")
    ] = "greedy",
    seq_len: Annotated[int, typer.Option(min=16, help="Tokens of a window.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=16, help="Tokens of the text to measure drafts on.")] = 4096,
    choice_tokens: Annotated[int, typer.Option(min=16, help="Tokens before them to choose on.")] = 1024,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Store nothing.")] = False,
    bos: Bos = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find the draft that a checkpoint makes for itself at least cost: a level, attentions and MLPs left out, or both.

    The best one by predicted speed-up is stored in config.json, where compress generate --speculate finds it.
    """
    with errors():
        text = required_text(text)
        check_paths(model, text)
        from compress.cli import tables
        from compress.evaluate import drafts
        from compress.evaluate.reader import Execution
        from compress.run.source import resolve
        from compress.speculate import default

        directory = resolve(model)
        shares = tuple(share) if share else drafts.DraftRequest.shares
        asked = drafts.DraftRequest(text, shares, by, seq_len, choice_tokens, max_tokens, seed)
        if not (is_stored := not dry_run and default.can_store(directory)) and not dry_run:
            note(f"nothing is stored: {directory} is no checkpoint that compress wrote")
        note_prefix(directory, bos)
        with tables.progress_bar() as progress:
            result = drafts.choose(directory, asked, Execution(dtype, device_named(device), bos=bos), progress)
        if is_stored:
            default.store(directory, result.best)
        if as_json:
            print(json.dumps(result.plain() | {"stored": is_stored}))
            return
        tables.out.print(_table(result))
        print(_verdict(result, is_stored))


def _verdict(result: DraftChoice, is_stored: bool) -> str:
    if not result.best:
        stored = "; no draft is stored" if is_stored else ""
        return f"no draft pays by the bytes that it reads{stored}; n-grams of the text cost nothing"
    where = "stored in config.json" if is_stored else "not stored"
    return f"best: --speculate {result.best}, {where}; chosen on {result.chosen_on:,} other tokens of the text"


def _table(result: DraftChoice) -> Table:
    table = new_table(COLUMNS, f"Drafts, measured on {result.tokens:,} tokens")
    for row in result.rows:
        without = row.sublayers or "-"
        table.add_row(
            "all" if row.level is None else str(row.level),
            without if len(without) <= MAX_SHOWN else f"{without[:MAX_SHOWN]}... ({row.count})",
            f"{row.kl:.4f}",
            f"{row.acceptance:.3f}",
            f"{row.fitted:.3f}",
            f"{row.same_top1:.1%}",
            f"{row.bytes_share:.1%}",
            str(row.length or "-"),
            f"{row.speedup:.2f}",
        )
    return table
