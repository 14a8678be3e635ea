"""Name recipes for a model that has to fit: `compress recommend`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import (
    AsJson,
    Device,
    Model,
    app,
    check_device,
    check_paths,
    device_named,
    errors,
)
from compress.errors import RecipeError

if TYPE_CHECKING:
    from compress.progress import Progress
    from compress.study.recommend import RecipeChoice, Studied, Wanted


@app.command(epilog="Example: compress recommend ./my-model --fits 8GiB --context 32768")
def recommend(
    model: Model,
    fits: Annotated[str, typer.Option("--fits", metavar="SIZE", help="For weights, and for the cache of --context.")],
    context: Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="Whose cache has to fit, too.")] = None,
    calib: Annotated[str | None, typer.Option(metavar="SRC", help="Calibration text, for the commands.")] = None,
    study: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A study.json of your own. Default: those that come along.")
    ] = None,
    timing: Annotated[bool, typer.Option(help="Time one block for each, to say what making it takes.")] = True,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Name three recipes that fit: with the least loss, with the best trade, and the smallest sensible one.

    Sizes of weights are exact, for this model; those of calibrated caches are estimates. Losses are from a study
    of another model, unless --study is of this one.
    """
    with errors():
        check_device(device)
        check_paths(model, calib)
        limit = _size(fits)
        from compress import recipe
        from compress.cli import tables
        from compress.run.job import Job
        from compress.study import recommend as choosing

        names = recipe.names()
        job = Job(
            model, recipe.load(names[0]), Path("models_out") / "recommended", calib=calib, device=device_named(device)
        )
        asked = choosing.Wanted(job, limit, context)
        studied = choosing.choose_study(job, study)
        with tables.progress_bar() as progress:
            found, left_out = choosing.choices(asked, studied.known, progress)
            if not found:
                raise RecipeError(choosing.none_usable(left_out))
            chosen = choosing.three(found, limit)
            costs = _costs(asked, set(chosen.values()) if timing else (), progress)
        result = {
            "fits": limit,
            "context": context,
            "study": {"model": studied.known.model, "text": studied.known.text, "is_same_model": studied.is_same},
            "recommended": {
                name: {
                    **choosing.plain(choice),
                    "cost": costs.get(choice),
                    "command": shlex.join(choosing.command(asked, choice)),
                }
                for name, choice in chosen.items()
            },
            "smallest": choosing.plain(min(found, key=lambda x: x.total)),
            "left_out": left_out,
        }
        if as_json:
            print(json.dumps(result))
        else:
            _show(result, asked, studied)
        if not chosen:
            raise typer.Exit(1)


def _size(text: str) -> int:
    from compress.process_memory import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--fits") from error


def _costs(asked: Wanted, choices: Collection[RecipeChoice], progress: Progress) -> dict[RecipeChoice, dict[str, Any]]:
    """Return what making each choice takes; one that trains takes minutes to time."""
    found: dict[RecipeChoice, dict[str, Any]] = {}
    for choice in choices:
        progress(f"timing a block of {choice.recipe}", len(found), len(choices))
        found[choice] = _cost(asked, choice)
    return found


def _cost(asked: Wanted, choice: RecipeChoice) -> dict[str, Any]:
    """Return what making a choice takes, from timing one block."""
    from compress import api
    from compress.study import recommend as choosing

    planned = api.plan(dataclasses.replace(asked.job, recipe=choosing.with_cache(choice)))
    if isinstance(planned, tuple):
        return {"seconds": round(planned[2], 1), "peak": planned[1].arrangement.peak_nbytes}
    return {"seconds": round(planned.seconds, 1), "peak": None}


def _show(result: dict[str, Any], asked: Wanted, studied: Studied) -> None:
    """Print the recommendation."""
    from compress.cli.tables import size
    from compress.study.recommend import SENSIBLE

    for name, row in _merged(result["recommended"]):
        print(f"{name}: {row['recipe']}{' with the cache of ' + row['cache'] if row['cache'] else ''}")
        for said in _lines(row, asked):
            print(f"  {said}")
    if any(row["kl"] > SENSIBLE for row in result["recommended"].values()):
        print(f"what fits is expected to lose more than {SENSIBLE:g} nats a token: a smaller model may serve better")
    if not result["recommended"]:
        smallest = result["smallest"]
        print(f"nothing fits {size(asked.limit)}")
        cache = f" with the cache of {smallest['cache']}" if smallest["cache"] else ""
        print(f"  the smallest is {smallest['recipe']}{cache}: {size(smallest['total'])}; it loses {_loss(smallest)}")
    for name, reason in result["left_out"].items():
        print(f"{name} cannot be used here: {reason}")
    print(_origin(studied))


def _merged(rows: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return each choice once, under all of its names."""
    found: dict[tuple[str, str | None], tuple[list[str], dict[str, Any]]] = {}
    for name, row in rows.items():
        found.setdefault((row["recipe"], row["cache"]), ([], row))[0].append(name)
    return [(" and ".join(names), row) for names, row in found.values()]


def _lines(row: dict[str, Any], asked: Wanted) -> list[str]:
    """Say size, loss, cost and command of a choice."""
    from compress.cli.tables import size
    from compress.progress import duration

    cache = f" + {size(row['cache_nbytes'])} of cache at {asked.context:,} tokens" if asked.context else ""
    total = f" = {size(row['total'])}" if cache else ""
    bound = "at most " if row["is_bound"] else ""
    lines = [
        f"{bound}{size(row['nbytes'])} of weights{cache}{total}, of {size(asked.limit)}",
        f"expected loss: {_loss(row)}",
    ]
    if (cost := row["cost"]) is not None:
        peak = "" if cost["peak"] is None else f", peak memory {size(cost['peak'])}"
        lines.append(f"to make: about {duration(cost['seconds'])}{peak}")
    return [*lines, row["command"]]


def _loss(row: dict[str, Any]) -> str:
    error = f" ± {row['se']:.2g}" if row["se"] is not None else ""
    return f"KL {row['kl']:.4f}{error} nats a token"


def _origin(studied: Studied) -> str:
    """Say where losses come from, and how far rankings of models agree."""
    from compress.study.losses import rank_agreement

    said = f"losses were measured on {studied.known.model}, scored on {studied.known.text}"
    if studied.is_same:
        return f"{said}, which is this model"
    said += ": another model loses other amounts"
    for other in studied.others:
        agreed = rank_agreement(studied.known, other)
        if agreed is not None:
            said += (
                f"; the order of {agreed[1]} recipes on {other.model} agrees with a rank correlation of {agreed[0]:.2f}"
            )
    return said + "; `compress study` measures this one"
