"""The command line: parse, call one function, print. Heavy imports stay inside the commands, so that --help is instant.

Exit codes: 0 done, 1 the user's input cannot be used, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli import allocate, quantize  # noqa: F401  (their commands come first)
from compress.cli.kv import Cache, CacheCalib, cache_recipes
from compress.cli.options import AsJson, Device, Directory, Model, Seed, TextFile, app, device_named, errors, missing


def main() -> None:
    """Entry point of `compress`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no warning when a process forks
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    app()


@app.command("eval", epilog="Example: compress eval models_out/my-model-int4 --base ./my-model --text held_out.txt")
def evaluate(
    model: Model,
    text: TextFile = None,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="Uncompressed model to compare with.")] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of the text, from its start.")] = 131072,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as stored.")] = "float32",
    device: Device = "auto",
    kv: Cache = None,
    calib: CacheCalib = None,
    as_json: AsJson = False,
) -> None:
    """Perplexity over windows that do not overlap; against a base also KL divergence and top-1 agreement.

    With --kv every window is read through that cache; without --base against the uncompressed one.
    """
    with errors():
        import dataclasses

        from compress import evaluate as evaluation
        from compress.cli import tables
        from compress.model.load import DTYPES
        from compress.run.prepare import resolve

        text = text or missing("--text", "give the text to score: a .txt, .jsonl or .parquet file")
        if dtype not in DTYPES:
            raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(DTYPES)}", param_hint="--dtype")
        against = None if base is None else resolve(base)
        execution = evaluation.Execution(dtype=dtype, device=device_named(device))
        with tables.progress_bar() as progress:
            if kv is not None:
                values = _through_cache(
                    [resolve(model), *([] if against is None else [against])],
                    (kv, text, calib, max_tokens),
                    seq_len,
                    execution,
                    progress,
                )
                print(json.dumps(values)) if as_json else tables.out.print(tables.evaluation_table(values))
                return
            scores = evaluation.evaluate(
                resolve(model),
                text,
                against,
                seq_len,
                max_tokens,
                execution,
                lambda done, all: progress("scoring", done, all),
            )
        values = dataclasses.asdict(scores)
        print(json.dumps(values)) if as_json else tables.out.print(tables.evaluation_table(values))


def _through_cache(
    directories: list[Path], what: tuple[str, str, str | None, int], seq_len: int, execution: Any, progress: Any
) -> dict[str, Any]:
    """Scores through a cache; what: its recipe, the text, the text to calibrate on, most tokens."""
    import dataclasses

    from compress.evaluate import cache

    kv, text, calib, max_tokens = what
    asked = cache.Request(cache_recipes([kv]), text, calib, max_tokens=max_tokens)
    return dataclasses.asdict(cache.evaluate(directories, asked, seq_len, execution, progress))


@app.command(epilog='Example: compress generate models_out/my-model-int4 --prompt "Once upon a time"')
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most this many.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token each time.")] = 0.0,
    seed: Seed = 0,
    device: Device = "auto",
    kv: Cache = None,
    calib: CacheCalib = None,
    as_json: AsJson = False,
) -> None:
    """Go on writing from a prompt; with the checkpoint's own cache if it has one, or with that of --kv."""
    with errors():
        from compress import evaluate as evaluation
        from compress.run.prepare import resolve

        if kv is None:
            written = evaluation.generate(
                resolve(model), prompt, max_new_tokens, temperature=temperature, seed=seed, device=device_named(device)
            )
        else:
            from compress.evaluate import cache

            asked = cache.Request(cache_recipes([kv]), "", calib)
            written = cache.generate(
                resolve(model), prompt, max_new_tokens, temperature, seed, device_named(device), asked
            )
        print(json.dumps({"prompt": prompt, "text": written}) if as_json else written)


@app.command(epilog="Example: compress inspect models_out/my-model-int4")
def inspect(
    directory: Directory,
    all_layers: Annotated[bool, typer.Option("--all", help="Every layer, not only the worst.")] = False,
    as_json: AsJson = False,
) -> None:
    """What a checkpoint stores: bits per weight by group of layers and in total, the largest errors, fallbacks."""
    with errors():
        from compress.cli import tables
        from compress.run.report import load, worst

        report = load(directory)
        if as_json:
            print(json.dumps(report))
            return
        sizes = dict(report["nbytes"])
        total = sizes.pop("total")
        sizes.pop("quantized linears")
        tables.out.print(tables.plan_table(report["plan"], sizes, total, report["source_nbytes"], report["bpw"]))
        rows = report["layers"] if all_layers else worst(report["layers"])
        tables.out.print(tables.layers_table(rows, "all layers" if all_layers else "largest errors"))


@app.command(epilog="Example: compress verify models_out/my-model-int4")
def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Check a checkpoint: file hashes, names, shapes and types, and that every block loads and gives finite outputs."""
    with errors():
        from compress.cli import tables
        from compress.run import verify as checks

        with tables.progress_bar() as progress:
            counts = checks.verify(directory, progress)
        print(json.dumps(counts) if as_json else tables.verify_line(counts, str(directory)))


@app.command(epilog="Example: compress bench models_out/my-model-int4 --device cpu")
def bench(
    model: Model,
    device: Device = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of the prompt that is prefilled.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="That are decoded after it.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Tokens per second in bfloat16, and the time of each shape of packed layer beside a bfloat16 linear."""
    with errors():
        import dataclasses

        from compress.cli import tables
        from compress.evaluate import speed
        from compress.run.prepare import resolve

        found = speed.measure(resolve(model), device_named(device), batch, prompt_tokens, new_tokens)
        if as_json:
            print(json.dumps(dataclasses.asdict(found)))
            return
        for line in tables.speed_lines(found):
            print(line)
        if found.layers:
            tables.out.print(tables.speed_table(found))


@app.command(epilog="Example: compress recipes int4 > mine.yaml")
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe's YAML.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the built-in recipes, or print one to start from."""
    with errors():
        from compress import recipe

        if name is not None:
            print(recipe.text(name), end="")
            return
        found = {known: recipe.describe(known) for known in recipe.names()}
        _print_pairs(found, as_json)


@app.command(epilog="Example: compress methods")
def methods(as_json: AsJson = False) -> None:
    """List every method and format with its one-line description."""
    with errors():
        from compress import plugins

        found = {
            f"{kind}/{name}": plugins.describe(kind, name) for kind in plugins.KINDS for name in plugins.names(kind)
        }
        _print_pairs(found, as_json)


def _print_pairs(pairs: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(pairs))
        return
    width = max(map(len, pairs), default=0)
    for name, text in pairs.items():
        sys.stdout.write(f"{name:<{width}}  {text}\n")
