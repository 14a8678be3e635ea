"""Compare what a compressed model and its original sample: `compress sampling`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.evaluation_options import Base, Bos, note_prefix
from compress.cli.kept import keep
from compress.cli.options import (
    AsJson,
    Device,
    Dtype,
    Model,
    Seed,
    TextFile,
    app,
    check_base,
    check_paths,
    device_named,
    errors,
    note,
    text_given,
)

if TYPE_CHECKING:
    from compress.evaluate.sampling import Found
    from compress.evaluate.sampling_filters import Setting


@app.command(epilog="Example: compress sampling models_out/my-model-int4 --base ./my-model --text held_out.txt")
def sampling(
    model: Model,
    base: Base = None,
    text: TextFile = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable. Default: six from 0.3 to 1.2.")] = None,
    top_k: Annotated[list[int] | None, typer.Option(help="0: off. Repeatable. Default: 0 and 50.")] = None,
    top_p: Annotated[list[float] | None, typer.Option(help="1: off. Repeatable. Default: 1 and 0.9.")] = None,
    min_p: Annotated[list[float] | None, typer.Option(help="0: off. Repeatable. Default: 0 and 0.05.")] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to compare on.")] = 8192,
    prompts: Annotated[int, typer.Option(min=0, help="Prompts that both continue; 0: none.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that follow a prompt.")] = 64,
    seed: Seed = 0,
    write: Annotated[
        bool, typer.Option("--write", help="Write a recommended temperature into generation_config.json.")
    ] = False,
    bos: Bos = "auto",
    dtype: Dtype = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare what two models sample, over temperature, top-k, top-p and min-p; recommend a temperature.

    The result is kept in scores.json of a checkpoint that compress wrote, for the page of `compress report`.
    """
    with errors():
        if base is None:
            raise typer.BadParameter("name the uncompressed model to compare with", param_hint="--base")
        text = text_given(text)
        check_paths(model, text)
        check_base(model, base)
        from compress.cli import tables
        from compress.evaluate import record, sampling_advice
        from compress.evaluate import sampling as measuring
        from compress.evaluate.scores import Execution
        from compress.run.source import resolve

        directory, original = Path(resolve(model)), Path(resolve(base))
        own = sampling_advice.own_temperature(original)
        temperatures = sorted({*(temperature or measuring.TEMPERATURES), *([own] if write else [])})
        settings = _settings(temperatures, top_k or [], top_p or [], min_p or [])
        if write:
            sampling_advice.check_writable(directory)
        asked = measuring.Request(text, settings, seq_len, max_tokens, prompts, prompt_tokens, new_tokens, seed)
        note_prefix(directory, bos)
        execution = Execution(dtype, device_named(device), bos=bos)
        with tables.progress_bar() as progress:
            found = measuring.measure(directory, original, asked, execution, progress)
        keep(directory, lambda: record.add_sampling(directory, found.plain()))
        print(json.dumps(found.plain())) if as_json else _show(found)
        if write:
            note(sampling_advice.write(directory, found.temperatures, own))


def _settings(temperature: list[float], top_k: list[int], top_p: list[float], min_p: list[float]) -> list[Setting]:
    """Return the grid; wrong usage for an impossible value."""
    from compress.evaluate import sampling as measuring

    try:
        return measuring.default_settings(temperature, top_k, top_p, min_p)
    except ValueError as error:
        name = str(error).partition(" ")[0].replace("_", "-")
        raise typer.BadParameter(str(error), param_hint=f"--{name}") from error


def _show(found: Found) -> None:
    """Print the tables and what is recommended."""
    from compress.cli import tables
    from compress.pages import measurements as words

    names = ("filters", "T", "acceptance", "KL kept", "Jaccard", "same CDF", "same Gumbel", "entropy", "original")
    table = tables.titled(names, f"What {found.tokens:,} tokens of {found.text} would sample")
    keys = ("acceptance", "kl_kept", "jaccard", "same_cdf", "same_gumbel", "entropy", "base_entropy")
    for row in found.settings:
        table.add_row(row["filters"], f"{row['temperature']:g}", *(f"{row[key]:.4f}" for key in keys))
    tables.out.print(table)
    if found.sampled:
        tables.out.print(_sampled_table(found))
    print("Temperature at which the compressed model is closest to its original, without filters:")
    for each in found.plain()["temperatures"]:
        print(f"  {words.verdict(each)}")


def _sampled_table(found: Found) -> object:
    from compress.cli import tables

    names = ("filters", "T", "rep-4", "distinct-2", "self-BLEU", "tokens", "reverse KL", "same CDF", "same Gumbel")
    table = tables.titled(names, "What was sampled: original -> compressed; tokens until both differ")
    for row in found.sampled:
        pair = (row.base, row.model)
        figures = [
            [each.repetition["4"], each.distinct["2"], each.self_bleu, each.length, each.reverse_kl] for each in pair
        ]
        both = [f"{a:.3f} -> {b:.3f}" for a, b in zip(*figures, strict=True)]
        table.add_row(row.filters, f"{row.temperature:g}", *both, f"{row.same_cdf:.1f}", f"{row.same_gumbel:.1f}")
    return table
