"""Score a model, let it write, and time it: `compress eval`, `compress generate` and `compress bench`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli import harness
from compress.cli.evaluation_options import Base, Bos, note_prefix
from compress.cli.kept import keep
from compress.cli.kv import Cache, CacheCalib, CacheSet, cache_recipes
from compress.cli.options import (
    Adapter,
    AsJson,
    Device,
    Dtype,
    Model,
    Seed,
    app,
    check_adapter,
    check_base,
    check_paths,
    device_named,
    errors,
    note,
    text_given,
)
from compress.cli.suites import Asked, Choices, Suite, Tasks, Texts, one_text
from compress.cli.suites import run as run_suite

if TYPE_CHECKING:
    from compress.evaluate.cache_reading import Readings
    from compress.kv.settings import CacheSettings

WindowTokens = Annotated[int | None, typer.Option(min=2, help="Tokens of a window. Default: 512; quick: 256.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=2, help="Tokens of a text to score. Default: 131072; quick: 4096; full: 65536.")
]


@app.command("eval", epilog="Example: compress eval models_out/my-model-int4 --base ./my-model --text held_out.txt")
def evaluate(
    model: Model,
    texts: Texts = None,
    base: Base = None,
    suite: Suite = None,
    task: Tasks = None,
    choices: Choices = None,
    tasks: harness.HarnessTasks = None,
    limit: harness.HarnessLimit = None,
    seq_len: WindowTokens = None,
    max_tokens: MaxTokens = None,
    bos: Bos = "auto",
    dtype: Dtype = "float32",
    device: Device = "auto",
    kv: Cache = None,
    overrides: CacheSet = None,
    calib: CacheCalib = None,
    adapter: Adapter = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on text: perplexity over disjoint windows; against a base also KL divergence and top-1 agreement.

    With --adapter the LoRA is merged into the base that a model is compared with (without --base into MODEL).
    With --kv texts and tasks are read through that cache; without --base against the uncompressed one.

    With --suite, --task, --choices or --tasks both models answer tasks, too; a suite names what looks broken in MODEL.
    """
    with errors():
        asked = Asked(suite, task or (), choices, texts or (), seq_len, max_tokens)
        if tasks is not None:
            _check_alone(asked, {"--kv": kv, "--set": overrides, "--calib": calib, "--adapter": adapter})
            return harness.run(model, base, tasks, limit, (dtype, device_named(device), bos), as_json)
        caches = cache_recipes([kv] if kv else [], overrides) if kv or overrides else None
        if asked.is_any:
            _check_suite(caches, calib, adapter)
            asked = dataclasses.replace(asked, kv=caches, calib=calib)
            return run_suite(model, base, asked, (dtype, device_named(device), bos), as_json)
        text, seq_len, max_tokens = text_given(one_text(asked.texts)), seq_len or 512, max_tokens or 131_072
        check_paths(model, text, calib)
        check_base(model, base)
        check_adapter(adapter)
        from compress import evaluate as evaluation
        from compress.cli import tables
        from compress.evaluate import cache
        from compress.run.source import resolve

        execution = evaluation.Execution(dtype, device_named(device), bos=bos)
        against = None if base is None else resolve(base, adapter)
        directory, read = resolve(model, adapter if base is None else None), None
        note_prefix(directory, bos)
        with tables.progress_bar() as progress:
            if caches is None:
                say = partial(progress, "scoring")
                scores = evaluation.evaluate(directory, text, against, seq_len, max_tokens, execution, say)
            else:
                request = cache.Request(caches, text, calib, max_tokens=max_tokens)
                directories = [directory, *([] if against is None else [against])]
                scores, read = cache.evaluate(directories, request, seq_len, execution, progress)
        _show(dataclasses.asdict(scores), read, as_json)


def _check_alone(asked: Asked, others: dict[str, Any]) -> None:
    """Refuse options that would have no effect beside --tasks; wrong usage."""
    if asked.is_any:
        raise typer.BadParameter("runs alone; leave out --suite, --task and --choices", param_hint="--tasks")
    for option, value in others.items():
        if value:
            raise typer.BadParameter("has no effect on --tasks; leave it out", param_hint=option)


def _check_suite(caches: Mapping[str, CacheSettings] | None, calib: str | None, adapter: Path | None) -> None:
    """Refuse options that would have no effect beside --suite and --task; wrong usage."""
    if adapter:
        raise typer.BadParameter("goes with --text, not with tasks or a suite; leave it out", param_hint="--adapter")
    if calib and caches is None:
        raise typer.BadParameter("goes with --kv; leave it out", param_hint="--calib")


def _show(values: dict[str, Any], read: Readings | None, as_json: bool) -> None:
    """Print scores, and how a compressed cache was read."""
    from compress.cli import tables

    if as_json:
        print(json.dumps({**values, **({} if read is None else {"cache": read.plain()})}))
        return
    tables.out.print(tables.evaluation_table(values))
    if read is not None:
        print(f"cache {read.text}")


@app.command(epilog='Example: compress generate models_out/my-model-int4 --prompt "Once upon a time"')
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write, at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling; 0: the most likely token each time.")] = 0.0,
    seed: Seed = 0,
    device: Device = "auto",
    kv: Cache = None,
    overrides: CacheSet = None,
    calib: CacheCalib = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, with the cache that the checkpoint stores, if any, or with that of --kv."""
    with errors():
        check_paths(model, calib)
        caches = cache_recipes([kv] if kv else [], overrides) if kv or overrides else None
        from compress.evaluate import cache as measuring
        from compress.evaluate import generation
        from compress.run.source import resolve

        if caches is None:
            written = generation.written(
                resolve(model), prompt, max_new_tokens, temperature, seed, "auto", device_named(device)
            )
        else:
            asked = measuring.Request(caches, "", calib)
            written = measuring.generate(
                resolve(model), prompt, max_new_tokens, temperature, seed, device_named(device), asked
            )
        if as_json:
            cache = {} if written.cache is None else {"cache": dataclasses.asdict(written.cache)}
            print(json.dumps({"prompt": prompt, "text": written.text, **cache}))
            return
        print(written.text)
        if written.cache is not None:
            note(f"cache: {written.cache.text}")


@app.command(epilog="Example: compress bench models_out/my-model-int4 --base ./my-model --device cpu")
def bench(
    model: Model,
    device: Device = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt, which is prefilled.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are decoded after it.")] = 32,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The original, timed in turns with the model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time a model: tokens per second in bfloat16, and each shape of packed layer beside a bfloat16 linear.

    With --base the original is loaded, too, and timed in turns with the model, so that a busy machine slows both.
    The rates are kept in scores.json of a checkpoint that compress wrote, for its page.
    """
    with errors():
        check_paths(model)
        check_base(model, base)
        from compress.cli import tables
        from compress.evaluate import record, speed
        from compress.run.source import resolve

        directory = resolve(model)
        against = None if base is None else resolve(base)
        found = speed.measure(directory, device_named(device), batch, prompt_tokens, new_tokens, against)
        keep(directory, lambda: record.add_speed(directory, found.plain()))
        if as_json:
            print(json.dumps(dataclasses.asdict(found)))
            return
        for line in tables.speed_lines(found):
            print(line)
        if found.layers:
            tables.out.print(tables.speed_table(found))
