"""The command line: parse, call one function, print. Heavy imports stay inside the commands, so that --help is instant.

Exit codes: 0 done, 1 the user's input cannot be used, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.errors import CompressError

if TYPE_CHECKING:
    from compress.job import Job

app = typer.Typer(
    name="compress",
    help="Compress language models: quantize a Hugging Face checkpoint by a recipe, check it, score it, use it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

DEFAULT_RECIPE = "vq2bit"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory, or a hub id (owner/name).")]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint that compress wrote.")]
RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="Built-in recipe (`compress recipes`) or a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe value: bits=3. Repeatable.")
]
MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", metavar="SIZE", help="Limit for this process: 8GiB. Default: what is free."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Of the calibration sample and everything random.")]
Calib = Annotated[
    str | None,
    typer.Option(
        "--calib",
        metavar="SRC",
        help="Text: a .txt, .jsonl or .parquet file, or a data set name. Default: the model writes its own.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Default: models_out/<model>-<recipe>.")]
TextFile = Annotated[
    str | None, typer.Option("--text", metavar="FILE", help="Text to score; never the calibration text.")
]


def main() -> None:
    """Entry point of `compress`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no warning when a process forks
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    app()


@contextmanager
def _errors(resume: str = "") -> Iterator[None]:
    """The user's errors as one line, interruption as a hint; anything else is a bug and shows its traceback."""
    try:
        yield
    except CompressError as error:
        typer.echo(f"compress: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"compress: interrupted{resume}", err=True)
        raise typer.Exit(130) from None


@app.command(epilog="Example: compress quantize ./my-model --recipe int4 --calib text.txt --max-memory 8GiB")
def quantize(
    model: Model,
    recipe: RecipeName = DEFAULT_RECIPE,
    out: Out = None,
    calib: Calib = None,
    set_: Overrides = None,
    max_memory: MaxMemory = None,
    device: Device = "auto",
    seed: Seed = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output, at the end.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Forget an unfinished run and start over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a checkpoint by a recipe into a packed checkpoint. An interrupted run goes on when started again."""
    with _errors("; run the same command again to go on after the last finished block"):
        job = _job(model, recipe, out, calib, set_, max_memory, device, seed, overwrite, restart)
        if dry_run:
            _plan(job, as_json)
            return
        from rich.text import Text

        from compress import display, pipeline

        with display.progress_bar() as progress:
            report = pipeline.quantize(
                job, progress, lambda prepared: display.err.print(Text(display.plan_line(prepared)), soft_wrap=True)
            )
        if as_json:
            print(json.dumps(report))
            return
        for line in display.result_lines(report, str(job.out)):
            print(line)


@app.command(epilog="Example: compress plan ./my-model --recipe int4 --max-memory 8GiB")
def plan(
    model: Model,
    recipe: RecipeName = DEFAULT_RECIPE,
    out: Out = None,
    calib: Calib = None,
    set_: Overrides = None,
    max_memory: MaxMemory = None,
    device: Device = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Show what a run would do: bytes of every layer, exact; predicted memory; time, from timing one real block."""
    with _errors():
        _plan(_job(model, recipe, out, calib, set_, max_memory, device, seed, False, False), as_json)


@app.command("eval", epilog="Example: compress eval models_out/my-model-int4 --base ./my-model --text held_out.txt")
def evaluate(
    model: Model,
    text: TextFile = None,
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="Uncompressed model to compare with.")] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of the text, from its start.")] = 131072,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as stored.")] = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Perplexity over windows that do not overlap; against a base also KL divergence and top-1 agreement."""
    with _errors():
        import dataclasses

        from compress import display
        from compress import evaluate as evaluation
        from compress.calib.lm import DTYPES
        from compress.job import resolve

        text = text or _missing("--text", "give the text to score: a .txt, .jsonl or .parquet file")
        if dtype not in DTYPES:
            raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(DTYPES)}", param_hint="--dtype")
        against = None if base is None else resolve(base)
        execution = evaluation.Execution(dtype=dtype, device=_device(device))
        with display.progress_bar() as progress:
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
        print(json.dumps(values)) if as_json else display.out.print(display.evaluation_table(values))


@app.command(epilog='Example: compress generate models_out/my-model-int4 --prompt "Once upon a time"')
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most this many.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token each time.")] = 0.0,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Go on writing from a prompt."""
    with _errors():
        from compress import evaluate as evaluation
        from compress.job import resolve

        written = evaluation.generate(
            resolve(model), prompt, max_new_tokens, temperature=temperature, seed=seed, device=_device(device)
        )
        print(json.dumps({"prompt": prompt, "text": written}) if as_json else written)


@app.command(epilog="Example: compress inspect models_out/my-model-int4")
def inspect(
    directory: Directory,
    all_layers: Annotated[bool, typer.Option("--all", help="Every layer, not only the worst.")] = False,
    as_json: AsJson = False,
) -> None:
    """What a checkpoint stores: bits per weight by group of layers and in total, the largest errors, fallbacks."""
    with _errors():
        from compress import display
        from compress.report import load, worst

        report = load(directory)
        if as_json:
            print(json.dumps(report))
            return
        sizes = dict(report["nbytes"])
        total = sizes.pop("total")
        sizes.pop("quantized linears")
        display.out.print(display.plan_table(report["plan"], sizes, total, report["source_nbytes"], report["bpw"]))
        rows = report["layers"] if all_layers else worst(report["layers"])
        display.out.print(display.layers_table(rows, "all layers" if all_layers else "largest errors"))


@app.command(epilog="Example: compress verify models_out/my-model-int4")
def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Check a checkpoint: file hashes, names, shapes and types, and that every block loads and gives finite outputs."""
    with _errors():
        from compress import display
        from compress import verify as checks

        with display.progress_bar() as progress:
            counts = checks.verify(directory, progress)
        print(json.dumps(counts) if as_json else display.verify_line(counts, str(directory)))


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
    with _errors():
        import dataclasses

        from compress import display
        from compress.evaluate import speed
        from compress.job import resolve

        found = speed.measure(resolve(model), _device(device), batch, prompt_tokens, new_tokens)
        if as_json:
            print(json.dumps(dataclasses.asdict(found)))
            return
        for line in display.speed_lines(found):
            print(line)
        if found.layers:
            display.out.print(display.speed_table(found))


@app.command(epilog="Example: compress recipes int4 > mine.yaml")
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe's YAML.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the built-in recipes, or print one to start from."""
    with _errors():
        from compress import recipe

        if name is not None:
            print(recipe.text(name), end="")
            return
        found = {known: recipe.describe(known) for known in recipe.names()}
        _print_pairs(found, as_json)


@app.command(epilog="Example: compress methods")
def methods(as_json: AsJson = False) -> None:
    """List every method and format with its one-line description."""
    with _errors():
        from compress import plugins

        found = {
            f"{kind}/{name}": plugins.describe(kind, name) for kind in plugins.KINDS for name in plugins.names(kind)
        }
        _print_pairs(found, as_json)


def _job(
    model: str,
    recipe: str,
    out: Path | None,
    calib: str | None,
    overrides: list[str] | None,
    max_memory: str | None,
    device: str,
    seed: int,
    overwrite: bool,
    restart: bool,
) -> Job:
    """The parsed options as a job; typos in the recipe stop here, before anything heavy is imported."""
    from compress import recipe as recipes_module

    loaded = recipes_module.load(recipe, overrides or [])
    from compress.job import Job
    from compress.memory import parse_size

    try:
        limit = None if max_memory is None else parse_size(max_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-memory") from error
    name = Path(model.rstrip("/")).name or "model"
    return Job(
        model=model,
        recipe=loaded,
        out=out or Path("models_out") / re.sub(r"[^\w.-]+", "-", f"{name}-{loaded.name}"),
        calib=calib,
        max_memory=limit,
        device=_device(device),
        seed=seed,
        overwrite=overwrite,
        restart=restart,
    )


def _plan(job: Job, as_json: bool) -> None:
    import dataclasses

    from compress import display, pipeline
    from compress import job as jobs
    from compress.plan import groups

    with display.progress_bar() as progress:
        progress("reading headers", 0, 0)
        prepared = jobs.prepare(job)
        progress("timing one block", 0, 0)
        predicted = pipeline.predict_seconds(job, prepared)
    layers, sizes = prepared.plan, prepared.skeleton.other_nbytes(prepared.plan.kept_nbytes)
    source = prepared.skeleton.checkpoint.nbytes
    result: dict[str, Any] = {
        "plan": [dataclasses.asdict(group) for group in groups(layers)],
        "nbytes": {"quantized linears": layers.quantized_nbytes, **sizes, "total": layers.nbytes},
        "bpw": layers.bpw,
        "predicted_peak": prepared.arrangement.peak_nbytes,
        "predicted_seconds": round(predicted, 1),
        "kept": layers.kept,
    }
    if as_json:
        print(json.dumps(result))
        return
    display.out.print(display.plan_table(result["plan"], sizes, layers.nbytes, source, layers.bpw))
    peak = display.size(prepared.arrangement.peak_nbytes)
    print(f"predicted peak memory {peak}, time {display.seconds(predicted)}")
    for name, reason in list(layers.kept.items())[:10]:
        print(f"kept as it is: {name} ({reason})")


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is not auto, cpu or cuda", param_hint="--device")
    if name == "cuda" and not torch.cuda.is_available():
        raise CompressError("--device cuda: this machine has no usable CUDA device; use --device cpu")
    return name


def _missing(option: str, advice: str) -> str:
    raise typer.BadParameter(advice, param_hint=option)


def _print_pairs(pairs: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(pairs))
        return
    width = max(map(len, pairs), default=0)
    for name, text in pairs.items():
        sys.stdout.write(f"{name:<{width}}  {text}\n")
