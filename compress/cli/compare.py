"""Compare checkpoints and recipes: `compress bench`, `compress sampling` and `compress recommend`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import (
    DEFAULT_RESERVE,
    AsJson,
    Base,
    Bos,
    Device,
    Dtype,
    Model,
    Reserve,
    Seed,
    TextFile,
    check_base,
    check_device,
    check_paths,
    device_named,
    errors,
    keep,
    note,
    note_prefix,
    parse_nbytes,
    parse_serve,
    required_text,
)
from compress.errors import RecipeError

if TYPE_CHECKING:
    from compress.evaluate.sampling import SamplingComparison, SamplingSetting
    from compress.progress import Progress
    from compress.study.recommend import RecipeChoice, Studied, Wanted


def bench(
    model: Model,
    device: Device = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt, which is prefilled.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are decoded after it.")] = 32,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The original, timed in turns with the model.")
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Time the engine that is installed instead, with several requests at a time."),
    ] = False,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of --serve: vllm, sglang or transformers. Default: the first.")
    ] = None,
    concurrency: Annotated[str, typer.Option(metavar="1,2", help="Of --serve: requests at a time.")] = "1,2,4,8,16,32",
    as_json: AsJson = False,
) -> None:
    """Time a model: tokens per second in bfloat16, and each shape of packed layer beside a bfloat16 linear.

    With --base the original is loaded, too, and timed in turns with the model, so that a busy machine slows both.
    The rates are kept in scores.json of a checkpoint that compress wrote, for its page.
    """
    with errors():
        check_paths(model)
        check_base(model, base)
        if engine is not None and not serve:
            raise typer.BadParameter("goes with --serve; give that, too, or leave it out", param_hint="--engine")
        from compress.cli import capacity

        models = [model] if base is None else [model, base]
        if serve:
            asked = capacity.Asked(prompt_tokens, new_tokens, concurrency, device)
            return capacity.bench(models, engine, asked, as_json)
        capacity.time_model(models, device_named(device), (batch, prompt_tokens, new_tokens), as_json)


def sampling(
    model: Model,
    base: Base = None,
    text: TextFile = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable. Default: six from 0.3 to 1.2.")] = None,
    top_k: Annotated[list[int] | None, typer.Option(help="0: off. Repeatable. Default: 0 and 50.")] = None,
    top_p: Annotated[list[float] | None, typer.Option(help="1: off. Repeatable. Default: 1 and 0.9.")] = None,
    min_p: Annotated[list[float] | None, typer.Option(help="0: off. Repeatable. Default: 0 and 0.05.")] = None,
    typical_p: Annotated[list[float] | None, typer.Option(help="1: off. Repeatable. Default: off.")] = None,
    eta: Annotated[list[float] | None, typer.Option(help="0: off. Repeatable. Default: off.")] = None,
    repetition_penalty: Annotated[list[float] | None, typer.Option(help="1: off. Repeatable. Default: off.")] = None,
    beams: Annotated[list[int] | None, typer.Option(min=1, help="Of a beam search, too. Repeatable.")] = None,
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
    """Compare what two models write over temperature, filters, repetition penalty and beams; recommend a temperature.

    The result is kept in scores.json of a checkpoint that compress wrote, for the page of `compress inspect --page`.
    """
    with errors():
        if base is None:
            raise typer.BadParameter("name the uncompressed model to compare with", param_hint="--base")
        text = required_text(text)
        check_paths(model, text)
        check_base(model, base)
        from compress.cli import tables
        from compress.evaluate import sampling as measuring
        from compress.evaluate import sampling_temperature
        from compress.evaluate.reader import Execution
        from compress.run.source import resolve

        directory, original = Path(resolve(model)), Path(resolve(base))
        own = sampling_temperature.own_temperature(original)
        temperatures = sorted({*(temperature or measuring.TEMPERATURES), *([own] if write else [])})
        others = [typical_p or [], eta or [], repetition_penalty or []]
        settings = _settings(temperatures, top_k or [], top_p or [], min_p or [], others)
        if write:
            sampling_temperature.check_writable(directory)
        sizes = seq_len, max_tokens, prompts, prompt_tokens, new_tokens
        asked = measuring.SamplingRequest(text, settings, *sizes, seed, tuple(beams or ()))
        note_prefix(directory, bos)
        execution = Execution(dtype, device_named(device), bos=bos)
        with tables.progress_bar() as progress:
            comparison = measuring.measure(directory, original, asked, execution, progress)
        keep(directory, lambda record: record.add_sampling(directory, comparison.plain()))
        print(json.dumps(comparison.plain())) if as_json else _show_sampling(comparison)
        if write:
            note(sampling_temperature.write(directory, comparison.temperatures, own))


def _settings(
    temperature: list[float], top_k: list[int], top_p: list[float], min_p: list[float], others: list[list[float]]
) -> list[SamplingSetting]:
    """Return the grid; wrong usage for an impossible value."""
    from compress.evaluate import sampling as measuring

    try:
        return measuring.default_settings(temperature, top_k, top_p, min_p, others)
    except ValueError as error:
        name = str(error).partition(" ")[0].replace("_", "-")
        raise typer.BadParameter(str(error), param_hint=f"--{name}") from error


def _show_sampling(comparison: SamplingComparison) -> None:
    """Print the tables and what is recommended."""
    from compress.cli import tables
    from compress.pages import measurements as words

    names = ("filters", "T", "acceptance", "KL kept", "Jaccard", "same CDF", "same Gumbel", "entropy", "original")
    table = tables.new_table(names, f"What {comparison.tokens:,} tokens of {comparison.text} would sample")
    keys = ("acceptance", "kl_kept", "jaccard", "same_cdf", "same_gumbel", "entropy", "base_entropy")
    for row in comparison.settings:
        table.add_row(row["filters"], f"{row['temperature']:g}", *(f"{row[key]:.4f}" for key in keys))
    tables.out.print(table)
    if comparison.sampled:
        tables.out.print(_sampled_table(comparison))
    if comparison.beams:
        tables.out.print(_beams_table(comparison))
    print("Temperature at which the compressed model is closest to its original, without filters:")
    for each in comparison.plain()["temperatures"]:
        print(f"  {words.verdict(each)}")


def _beams_table(comparison: SamplingComparison) -> object:
    from compress.cli import tables

    names = ("beams", "rep-4", "distinct-2", "tokens", "nll by the original", "same tokens")
    table = tables.new_table(names, "What beam search wrote: original -> compressed; tokens until both differ")
    for row in comparison.beams:
        figures = [
            [each.repetition["4"], each.distinct["2"], each.length, each.base_nll] for each in (row.base, row.model)
        ]
        both = [f"{a:.3f} -> {b:.3f}" for a, b in zip(*figures, strict=True)]
        table.add_row(str(row.beams), *both, f"{row.same:.1f}")
    return table


def _sampled_table(comparison: SamplingComparison) -> object:
    from compress.cli import tables

    names = ("filters", "T", "rep-4", "distinct-2", "self-BLEU", "tokens", "reverse KL", "same CDF", "same Gumbel")
    table = tables.new_table(names, "What was sampled: original -> compressed; tokens until both differ")
    for row in comparison.sampled:
        pair = (row.base, row.model)
        figures = [
            [each.repetition["4"], each.distinct["2"], each.self_bleu, each.length, each.reverse_kl] for each in pair
        ]
        both = [f"{a:.3f} -> {b:.3f}" for a, b in zip(*figures, strict=True)]
        table.add_row(row.filters, f"{row.temperature:g}", *both, f"{row.same_cdf:.1f}", f"{row.same_gumbel:.1f}")
    return table


def recommend(
    model: Model,
    fits: Annotated[str, typer.Option("--fits", metavar="SIZE", help="For weights, and for the cache of --context.")],
    context: Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="Whose cache has to fit, too.")] = None,
    calib: Annotated[str | None, typer.Option(metavar="SRC", help="Calibration text, for the commands.")] = None,
    study: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A study.json of your own. Default: those that come along.")
    ] = None,
    timing: Annotated[bool, typer.Option(help="Time one block for each, to say what making it takes.")] = True,
    reserve: Reserve = DEFAULT_RESERVE,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Name three recipes that fit: with the least loss, with the best trade, and the smallest sensible one.

    Of each: the longest context and the most sequences that an engine serves beside the weights, less --reserve.

    Sizes of weights are exact, for this model; those of calibrated caches are estimates. Losses are from a study
    of another model, unless --study is of this one.
    """
    with errors():
        check_device(device)
        check_paths(model, calib)
        limit = parse_nbytes(fits, "--fits")
        memory = parse_serve(fits, reserve, device)
        from compress import recipe
        from compress.cli import tables
        from compress.run.job import Job
        from compress.study import recommend as choosing

        first = recipe.load(recipe.names()[0])
        job = Job(model, first, Path("models_out/recommended"), calib=calib, device=device_named(device))
        asked = choosing.Wanted(job, limit, context)
        studied = choosing.choose_study(job, study)
        with tables.progress_bar() as progress:
            usable, left_out = choosing.choices(asked, studied.known, progress)
            if not usable:
                raise RecipeError(choosing.none_usable(left_out))
            chosen = choosing.three(usable, limit)
            costs = _costs(asked, set(chosen.values()), progress) if timing else {}
        result = {
            "fits": limit,
            "reserve": memory.reserve,
            "context": context,
            "study": {"model": studied.known.model, "text": studied.known.text, "is_same_model": studied.is_same},
            "recommended": {
                name: _plain(asked, choice, costs.get(choice), choosing.serving(asked, choice, memory))
                for name, choice in chosen.items()
            },
            "smallest": choosing.plain(min(usable, key=lambda x: x.total)),
            "left_out": left_out,
        }
        if as_json:
            print(json.dumps(result))
        else:
            _show_recommendation(result, asked, studied)
        if not chosen:
            raise typer.Exit(1)


def _plain(asked: Wanted, choice: RecipeChoice, cost: dict[str, Any] | None, serves: dict[str, Any]) -> dict[str, Any]:
    """Return a choice as JSON values: its sizes and loss, what it costs and serves, and the command that makes it."""
    from compress.study import recommend as choosing

    command = shlex.join(choosing.command(asked, choice))
    return {**choosing.plain(choice), "cost": cost, "serves": serves, "command": command}


def _costs(asked: Wanted, chosen: set[RecipeChoice], progress: Progress) -> dict[RecipeChoice, dict[str, Any]]:
    """Return what making each choice takes; timing one that trains takes minutes."""
    costs: dict[RecipeChoice, dict[str, Any]] = {}
    for choice in chosen:
        progress(f"timing a block of {choice.recipe}", len(costs), len(chosen))
        costs[choice] = _cost(asked, choice)
    return costs


def _cost(asked: Wanted, choice: RecipeChoice) -> dict[str, Any]:
    """Return what making a choice takes, from timing one block."""
    from compress import api
    from compress.study import recommend as choosing

    planned = api.plan(dataclasses.replace(asked.job, recipe=choosing.with_cache(choice)))
    if isinstance(planned, tuple):
        return {"seconds": round(planned[2], 1), "peak": planned[1].arrangement.peak_nbytes}
    return {"seconds": round(planned.seconds, 1), "peak": None}


def _show_recommendation(result: dict[str, Any], asked: Wanted, studied: Studied) -> None:
    """Print the recommendation."""
    from compress.cli.tables import size
    from compress.study.recommend import SENSIBLE

    for name, row in _under_all_names(result["recommended"]):
        print(f"{name}: {row['recipe']}{' with the cache of ' + row['cache'] if row['cache'] else ''}")
        for line in _lines(row, asked):
            print(f"  {line}")
    if any(row["kl"] > SENSIBLE for row in result["recommended"].values()):
        print(f"what fits is expected to lose more than {SENSIBLE:g} nats a token: a smaller model may serve better")
    if not result["recommended"]:
        smallest = result["smallest"]
        print(f"nothing fits {size(asked.limit)}")
        cache = f" with the cache of {smallest['cache']}" if smallest["cache"] else ""
        print(f"  the smallest is {smallest['recipe']}{cache}: {size(smallest['total'])}; it loses {_loss(smallest)}")
    for name, reason in result["left_out"].items():
        print(f"{name} cannot be used here: {reason}")
    if result["recommended"]:
        print(
            f"{size(result['reserve'])} are kept free for activations and graphs where contexts are counted (--reserve)"
        )
    print(_origin(studied))


def _under_all_names(rows: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return each choice once, under all of its names."""
    by_choice: dict[tuple[str, str | None], tuple[list[str], dict[str, Any]]] = {}
    for name, row in rows.items():
        by_choice.setdefault((row["recipe"], row["cache"]), ([], row))[0].append(name)
    return [(" and ".join(names), row) for names, row in by_choice.values()]


def _lines(row: dict[str, Any], asked: Wanted) -> list[str]:
    """Return lines on a choice: size, loss, what it serves, cost and command."""
    from compress.cli import capacity
    from compress.cli.tables import size, time_text

    cache = f" + {size(row['cache_nbytes'])} of cache at {asked.context:,} tokens" if asked.context else ""
    total = f" = {size(row['total'])}" if cache else ""
    bound = "at most " if row["is_bound"] else ""
    lines = [
        f"{bound}{size(row['nbytes'])} of weights{cache}{total}, of {size(asked.limit)}",
        f"expected loss: {_loss(row)}",
    ]
    lines.append(capacity.serving_line(row["serves"]))
    if (cost := row["cost"]) is not None:
        peak = "" if cost["peak"] is None else f", peak memory {size(cost['peak'])}"
        lines.append(f"to make: about {time_text(cost['seconds'])}{peak}")
    return [*lines, row["command"]]


def _loss(row: dict[str, Any]) -> str:
    error = f" ± {row['se']:.2g}" if row["se"] is not None else ""
    return f"KL {row['kl']:.4f}{error} nats a token"


def _origin(studied: Studied) -> str:
    """Return in words where losses come from, and how far rankings of models agree."""
    text = f"losses were measured on {studied.known.model}, scored on {studied.known.text}"
    if studied.is_same:
        return f"{text}, which is this model"
    text += ": another model loses other amounts"
    for model, correlation, count in studied.agreements():
        text += f"; the order of {count} recipes on {model} agrees with a rank correlation of {correlation:.2f}"
    return text + "; `compress study` measures this one"
