"""Print what an engine can serve: by arithmetic for `plan --serve` and `recommend`, measured for `bench --serve`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from compress.cli import tables
from compress.cli.options import device_named, keep, note

if TYPE_CHECKING:
    from compress.evaluate.serving import ServingSpeed
    from compress.run.capacity import ServingMemory
    from compress.run.job import Job, Prepared


def plan_serving(job: Job, memory: ServingMemory, as_json: bool) -> None:
    """Print what an engine can serve of a job's model in a memory."""
    from compress.run import plan_serving as planning

    result = planning.of_job(job, memory)
    if as_json:
        print(json.dumps(result))
        return
    tables.out.print(capacity_table(result))
    for line in capacity_lines(result):
        print(line)


def cache_bytes(job: Job, prepared: Prepared) -> dict[str, Any] | None:
    """Return what the recipe's cache takes; None without one, and for one that is still to be calibrated."""
    from compress.run import kv_cache

    settings = job.recipe.kv_cache
    if settings is None or settings.needs() or (job.recipe.packs and not job.pack):
        return None
    skeleton = prepared.skeleton
    return kv_cache.bytes_at_context(skeleton.config, settings, {}, skeleton.dtype).plain()


def capacity_table(found: dict[str, Any]) -> object:
    """Return what serves in a memory: a row for each pair of weights and cache."""
    each = " a device" if found["devices"] > 1 else ""
    contexts = list(found["choices"][0]["batch"])
    heads = [f"weights{each}", f"left{each}", f"bytes a token{each}", "longest"]
    table = tables.new_table(("weights", "cache", *heads, *(f"sequences of {int(n):,}" for n in contexts)))
    for row in found["choices"]:
        parts = [tables.size(row["weights_nbytes"]), tables.size(row["room_nbytes"]), f"{row['bytes_per_token']:,.0f}"]
        table.add_row(row["weights"], row["cache"], *parts, longest(row), *(sequences(row, n) for n in contexts))
    return table


def longest(row: dict[str, Any]) -> str:
    """Return in words the longest context of one sequence."""
    if not row["context"]:
        return "does not fit"
    from compress.run.capacity import UNLIMITED

    if row["context"] == UNLIMITED:
        return "any length"
    return f"{row['context']:,}{' (all)' if row['is_all_positions'] else ''}"


def sequences(row: dict[str, Any], tokens: str) -> str:
    """Return in words how many sequences of so many tokens there may be at a time."""
    count = row["batch"][tokens]
    return "too long" if count is None else f"{count:,}"


def serving_line(row: dict[str, Any]) -> str:
    """Return in words what an engine serves."""
    from compress.run.capacity import UNLIMITED

    if "reason" in row:
        return f"serves: {row['reason']}"
    if not row["context"]:
        return "serves: nothing beside the weights, less what is kept free"
    counts = [
        f"{sequences(row, tokens)} of {int(tokens):,} tokens" for tokens, n in row["batch"].items() if n is not None
    ]
    many = f"; at a time {', or '.join(counts)}" if counts else ""
    length = longest(row) if row["context"] == UNLIMITED else f"{row['context']:,} tokens"
    whole = " (all positions)" if row["is_all_positions"] else ""
    return f"serves: one sequence of {length}{whole}{many}"


def capacity_lines(found: dict[str, Any]) -> list[str]:
    """Return in words what a table of `capacity_table` was counted with."""
    many = f"{found['devices']} devices of " if found["devices"] > 1 else ""
    usual = min(4096, found["positions"] or 4096)
    lines = [
        f"{many}{tables.size(found['nbytes'])}, {tables.size(found['reserve'])} of it{' each' if many else ''} "
        "kept free for activations and graphs (--reserve); copies of weights that an engine makes are not counted",
        f"bytes a token: those of a sequence of {usual:,} tokens, divided by these",
    ]
    if not found["has_weights"]:
        lines.append("there are no weights: sizes are those of config.json, in bfloat16")
    if found["positions"] is not None:
        lines.append(f"the model has {found['positions']:,} positions: no sequence is longer")
    for name, row in {row["cache"]: row for row in found["choices"]}.items():
        kept = f"in blocks of {row['block']} tokens, as engines have them"
        if row["block"] == 1:
            kept = "in transformers, not in blocks: it keeps exact tokens, or evicts; the most while it grows"
        static = (
            f"; {tables.size(row['static_nbytes'])} of static tensors, once for all sequences"
            if row["static_nbytes"]
            else ""
        )
        lines.append(f"cache {name}: {kept}{static}")
    for name, row in {row["weights"]: row for row in found["choices"]}.items():
        if row["whole"]:
            reasons = "; ".join(f"{tables.size(nbytes)} of {reason}" for reason, nbytes in row["whole"].items())
            lines.append(f"weights {name}: whole on every device are {reasons}")
    return lines


class Asked(NamedTuple):
    """What `bench --serve` is asked, as options give it."""

    prompt_tokens: int
    new_tokens: int
    concurrency: str  # numbers with commas
    device: str


def bench(models: list[str], engine: str | None, asked: Asked, as_json: bool) -> None:
    """Print what an engine reaches with a model, and with its original where there are two."""
    numbers = [each.strip() for each in asked.concurrency.split(",")]
    if not all(each.isdecimal() and int(each) for each in numbers):
        reason = f"{asked.concurrency!r} are no positive whole numbers such as 1,2,4"
        raise typer.BadParameter(reason, param_hint="--concurrency")
    from compress.evaluate import serving
    from compress.run import plan_serving as planning
    from compress.run.source import resolve

    chosen, device = serving.choose_engine(engine), device_named(asked.device)
    directories, most = [resolve(model) for model in models], max(map(int, numbers))
    load = serving.Load(asked.prompt_tokens, asked.new_tokens, tuple(map(int, numbers)), device)
    if device == "cpu":  # an engine would take most of the memory for keys and values
        load = load._replace(cache_nbytes=max(planning.cache_nbytes(each, load.length, most) for each in directories))
    note(f"{chosen} on {device}: prompts of {load.prompt_tokens} tokens, {load.new_tokens} new ones")
    speeds = serving.measure(directories, chosen, load)
    rows = [[each._asdict() for each in of_model] for of_model in speeds]
    if as_json:
        named = {"model": rows[0], **({"base": rows[1]} if len(rows) > 1 else {})}
        print(json.dumps({"engine": chosen, "device": device, **asked._asdict(), **named}))
        return
    tables.out.print(_serving_table(directories, speeds))


def time_model(models: list[str], device: str, sizes: tuple[int, int, int], as_json: bool) -> None:
    """Print how fast a model is, beside its original where there are two; sizes: batch, prompt and new tokens."""
    from compress.evaluate import speed
    from compress.run.source import resolve

    directory, *bases = [resolve(model) for model in models]
    rates = speed.measure(directory, device, *sizes, *bases)
    keep(directory, lambda record: record.add_speed(directory, rates.plain()))
    if as_json:
        print(json.dumps(dataclasses.asdict(rates)))
        return
    for line in tables.speed_lines(rates):
        print(line)
    if rates.layers:
        tables.out.print(tables.speed_table(rates))


def _serving_table(directories: list[Path], speeds: list[list[ServingSpeed]]) -> object:
    """Return a row for each number of requests; two models stand side by side."""
    columns = [
        f"{each.name} {what}" for each in directories for what in ("tokens/s", "first token", "last first token")
    ]
    table = tables.new_table(("requests", *columns, *(["ratio"] if len(speeds) > 1 else [])))
    for of_models in zip(*speeds, strict=True):
        cells = [
            cell
            for each in of_models
            for cell in (f"{each.tokens_per_s:,.1f}", f"{each.first_token_s:.3f} s", f"{each.last_first_token_s:.3f} s")
        ]
        ratio = [f"{of_models[0].tokens_per_s / each.tokens_per_s:.2f}" for each in of_models[1:]]
        table.add_row(str(of_models[0].requests), *cells, *ratio)
    return table
