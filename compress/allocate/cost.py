"""Predict what measuring for an allocation takes, choose the best estimator within a time, refuse what does not fit.

What an estimator computes is counted exactly, in tokens through a block and through the output head. What these take is
timed on one block and one sample (joint_kl.py), and what quantizing takes on one block (quantize_options.py). Without a
time that is asked for, DEFAULT_SECONDS are allowed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from compress.allocate import joint_kl, prepare_options, table
from compress.allocate.joint_kl import TokenPasses, TokenSeconds
from compress.allocate.kl_shares import T2
from compress.allocate.prepare_options import Options
from compress.allocate.problem import AUTO, BEST_FIRST, FROM_BASE, KL_ONE_AT_A_TIME, KL_SHARES
from compress.allocate.quantize_options import QuantizingTime, time_quantizing
from compress.allocate.table import TABLE_KL
from compress.allocate.variants import Database
from compress.errors import BudgetError, NotMeasuredError, UnsupportedModelError
from compress.process_memory import show
from compress.progress import duration, note
from compress.recipe.allocation import IN_NATS
from compress.recipe.schema import KEEP, Allocation
from compress.storage import json_text
from compress.storage.checkpoint import read_json, write_text
from compress.storage.json_text import INTEGER, NUMBER, TEXT

DEFAULT_SECONDS = 30 * 60.0
FILE = "estimator.json"  # holds what was chosen, so that a resumed run does not time anew
MIN_SAMPLES = 8  # a cheaper estimator on more text is better than a good one on less
BACKWARD = 3  # times a forward pass: forward again, gradients by states and by weights
HEAD_BACKWARD = 2  # times the head's forward pass
QUANTIZING_SHARE_OF_BUDGET = 0.75  # a suggestion leaves the rest to the estimator
MIN_SUGGESTED_SAMPLES = 8  # fewer options are a better answer than less text


class EstimatorCost(NamedTuple):
    """An estimator on so many samples, and the seconds that it is predicted to take."""

    estimator: str
    samples: int
    seconds: float

    @property
    def text(self) -> str:
        """Return the estimator with its samples and its time, in words."""
        return f"{self.estimator} on {self.samples} samples ({duration(self.seconds)})"


def check_target(opened: Options) -> None:
    """Judge the target by the sizes of the options alone, before anything is measured.

    One that no choice reaches is a BudgetError, one that is more than enough a note. What only measuring tells is left
    open: the divergence of a target in KL, shares, and the bytes of a cache beside the weights.
    """
    target = opened.allocation.target
    if target is None or target.unit == "kl" or target.is_share:
        return
    sizes = table.assemble(opened, {}, {}, 0, {})
    problem = sizes.problem(target)
    if sizes.room(target) > problem.most and opened.allocation.context is None:
        bits = 8 * (problem.most + sizes.fixed_nbytes) / sizes.numel
        nbytes = show(sizes.most_nbytes)
        note(
            f"target {target.text} is above the largest options ({bits:.3f} bpw, {nbytes} in all); every linear"
            f"{' and table' if opened.tables else ''} gets its largest"
        )


def count_passes(opened: Options, estimator: str, samples: int) -> TokenPasses:
    """Count what measuring damages computes on so many samples, those of tables outside of the blocks included.

    Nothing for what is measured while options are made.
    """
    linears, tables = _linear_passes(opened, estimator, samples), _table_passes(opened, samples)
    return TokenPasses(linears.block_tokens + tables.block_tokens, linears.head_tokens + tables.head_tokens)


def _table_passes(opened: Options, samples: int) -> TokenPasses:
    """Count the passes of `table_kl`: one an option of the embeddings, and one in all of a head of its own."""
    tokens, blocks = samples * opened.prepared.seq_len, len(opened.prepared.skeleton.blocks)
    passes = [len(table.layers) if "embeddings" in table.roles else 1 for table in opened.tables]
    return TokenPasses(tokens * blocks * sum(passes), tokens * sum(len(table.layers) for table in opened.tables))


def _linear_passes(opened: Options, estimator: str, samples: int) -> TokenPasses:
    """Count what an estimator computes of linears."""
    groups, blocks = table.open_groups(opened), len(opened.prepared.skeleton.blocks)
    tokens = samples * opened.prepared.seq_len
    offered = [prepare_options.options_of(opened, group.members) for group in groups]
    at = [group.members[0].block for group in groups]
    if estimator in (KL_ONE_AT_A_TIME, FROM_BASE, "noise"):
        is_shared = KEEP in opened.names and estimator != "noise"  # what is kept is the same model for all units
        variants = [len(T2) if estimator == "noise" else len(options) - is_shared for options in offered]
        behind = sum(count * (blocks - block) for count, block in zip(variants, at, strict=True))
        shared = sum(blocks if is_shared else block for block in set(at))  # in front of a block, and with all kept
        return TokenPasses(tokens * (behind + shared), tokens * (sum(variants) + is_shared * len(set(at))))
    changing = sum(name != KEEP for name in opened.names)
    passes = {KL_SHARES: changing, "gradient": 1, "fisher": 1}.get(estimator, 0)
    return TokenPasses(tokens * passes * blocks * (1 + BACKWARD), tokens * passes * (1 + HEAD_BACKWARD))


def time_passes(opened: Options) -> TokenSeconds:
    """Time the model's first block and its head."""
    prepared, job = opened.prepared, opened.job
    return joint_kl.time_passes(prepared.skeleton.checkpoint, prepared.seq_len, job.seed, job.device)


def rank_estimators(opened: Options, known: TokenSeconds, samples: int) -> Iterator[EstimatorCost]:
    """Yield what may take the place of `auto`, best first; on fewer samples only while that is better than the next."""
    excluded = {
        getattr(opened.allocation.config, "scale", None),
        *(("gradient",) if "block" in opened.transform_scopes else ()),
    }
    for estimator in BEST_FIRST:
        if estimator in excluded:  # taken already, or not of the weights as they are stored
            continue
        if opened.tables and estimator not in IN_NATS:  # cannot be added to the KL of tables
            continue
        count = samples
        while count:
            yield EstimatorCost(
                estimator, count, known.seconds(count_passes(opened, estimator, count), opened.job.processes)
            )
            count = count // 2 if count // 2 >= MIN_SAMPLES else 0


def best_estimator(opened: Options, known: TokenSeconds, samples: int, left: float) -> tuple[EstimatorCost, str]:
    """Return the best estimator that takes at most `left` seconds, else the last one, and a sentence that says why."""
    first, *others = rank_estimators(opened, known, samples)
    if first.seconds <= left:
        return first, f"damages are measured by {first.text}"
    cheaper = next((cost for cost in others if cost.seconds <= left), [first, *others][-1])
    return (
        cheaper,
        f"damages are measured by {cheaper.text}: {first.text} does not fit into the {duration(left)} there are",
    )


def check_time(opened: Options, folder: Path) -> None:
    """Raise BudgetError for measuring that takes more than --budget; not for what the folder has already."""
    _check_estimator(opened, folder)
    _check_quantizing(opened, folder)


def _check_estimator(opened: Options, folder: Path) -> None:
    """Raise BudgetError for an estimator that the recipe names and that alone takes more than --budget.

    Not where the folder has what it measures.
    """
    estimator = getattr(opened.allocation.config, "estimator", AUTO)
    budget, samples = opened.job.budget, min(opened.allocation.samples, opened.prepared.samples)
    if budget is None:
        return
    if estimator == AUTO:
        if opened.tables and not (folder / FILE).is_file():
            _check_least(opened, budget, samples)
        return
    is_linear = any(_linear_passes(opened, estimator, samples)) and not _is_measured(folder, estimator, samples)
    if not is_linear and (not opened.tables or _is_measured(folder, TABLE_KL, samples)):
        return
    known = time_passes(opened)
    seconds = known.seconds(count_passes(opened, estimator, samples), opened.job.processes)
    if seconds > budget:
        other, _ = best_estimator(opened, known, samples, budget)
        raise BudgetError(
            f"estimator {estimator} of the recipe takes about {duration(seconds)}, more than --budget "
            f"{duration(budget)}; raise it, or use estimator: {other.estimator} ({duration(other.seconds)}), or auto"
        )


def _check_least(opened: Options, budget: float, samples: int) -> None:
    """Raise BudgetError where even the cheapest estimator in the unit of tables alone takes more than --budget."""
    *_, least = rank_estimators(opened, time_passes(opened), samples)
    if least.seconds > budget:
        raise BudgetError(
            f"the least that tables can be allocated by, {least.text}, takes more than --budget {duration(budget)}; "
            "raise it, or remove allocate.tables"
        )


def _check_quantizing(opened: Options, folder: Path) -> None:
    """Raise BudgetError where quantizing alone takes more than --budget. Not where the folder has finished blocks."""
    if opened.job.budget is None or Database(folder).finished():
        return
    if refused := _refusal(opened, time_quantizing(opened)):
        raise BudgetError(refused)


def _refusal(opened: Options, known: QuantizingTime) -> str:
    """Return why quantizing at all options and once more at the choice does not fit into --budget; "" where it does."""
    budget, again = opened.job.budget, 1 + 1 / len(opened.names)
    seconds = again * known.seconds(opened.prepared.samples)
    if budget is None or seconds <= budget:
        return ""
    samples = known.most_samples(QUANTIZING_SHARE_OF_BUDGET * budget / again)
    less = (
        f", or use less calibration text: --set calibration.num_samples={samples}"
        if samples >= MIN_SUGGESTED_SAMPLES
        else ""
    )
    return (
        f"quantizing at all {len(opened.names)} options, and once more at what is chosen, takes about "
        f"{duration(seconds)}, more than --budget {duration(budget)}; raise it, offer fewer options{less}"
    )


def forecast(opened: Options) -> tuple[float, str]:
    """Return the seconds of quantizing at all options, and a sentence on measuring damages, or why it is refused."""
    known = time_quantizing(opened)
    seconds = known.seconds(opened.prepared.samples)
    refused = _refusal(opened, known)
    return seconds, f"refused: {refused}" if refused else _forecast_estimator(opened, seconds)


def _forecast_estimator(opened: Options, quantizing: float) -> str:
    """Return by what damages would be measured and in what time, after so many seconds of quantizing; "" for none."""
    estimator = getattr(opened.allocation.config, "estimator", None)
    samples = min(opened.allocation.samples, opened.prepared.samples)
    if estimator is None:
        return ""
    known = time_passes(opened)
    if estimator == AUTO:
        return best_estimator(opened, known, samples, seconds_left(opened, quantizing))[1]
    seconds = known.seconds(count_passes(opened, estimator, samples), opened.job.processes)
    budget = opened.job.budget
    refused = f": more than --budget {duration(budget)}, refused" if budget is not None and seconds > budget else ""
    return f"damages are measured by {EstimatorCost(estimator, samples, seconds).text}{refused}"


def seconds_left(opened: Options, spent: float) -> float:
    """Return the seconds for measuring damages, after so many spent on quantizing all options.

    Of --budget the final run takes about an option's share of that. Without it, DEFAULT_SECONDS.
    """
    if opened.job.budget is None:
        return DEFAULT_SECONDS
    return max(0.0, opened.job.budget - spent * (1 + 1 / len(opened.names)))


def resolve_estimator(opened: Options, folder: Path, left: float) -> Allocation:
    """Return the allocation with an estimator in the place of `auto`: the best within `left` seconds.

    What was chosen before in this folder is kept: a run that goes on does not choose anew. Raises NotMeasuredError
    where nothing was chosen and the job may not measure.
    """
    allocation, job = opened.allocation, opened.job
    if getattr(allocation.config, "estimator", None) != AUTO:
        return allocation
    path, samples = folder / FILE, min(allocation.samples, opened.prepared.samples)
    scale = getattr(allocation.config, "scale", None)
    of_scale = None if scale == "none" else scale  # as files of before 2026-12, which name none
    wanted = {"budget": job.budget, "of samples": samples, "scale": of_scale}
    content = read_json(path) if path.is_file() else {}
    layout = {"estimator": TEXT, "samples": INTEGER, "seconds": NUMBER}
    if json_text.mismatch(content, layout) is None and all(content.get(key) == wanted[key] for key in wanted):
        chosen = EstimatorCost(content["estimator"], content["samples"], content["seconds"])
    elif scale != BEST_FIRST[0] and _is_measured(folder, BEST_FIRST[0], samples):
        chosen = EstimatorCost(BEST_FIRST[0], samples, 0.0)
    else:
        if not job.measures:
            raise NotMeasuredError(f"{folder} has no damages")
        try:
            chosen, reason = best_estimator(opened, time_passes(opened), samples, left)
        except UnsupportedModelError as error:  # its blocks are run together only
            if opened.tables:  # which cannot be measured then
                raise
            chosen, reason = EstimatorCost(BEST_FIRST[-1], samples, 0.0), f"damages are by {BEST_FIRST[-1]}: {error}"
        if job.budget is not None or chosen.estimator == BEST_FIRST[-1] or "does not fit" in reason:
            note(reason)
        write_text(path, json.dumps({**wanted, **chosen._asdict()}, indent=1) + "\n")
    config = dataclasses.replace(allocation.config, estimator=chosen.estimator)
    return dataclasses.replace(allocation, config=config, samples=chosen.samples)


def _is_measured(folder: Path, estimator: str, samples: int) -> bool:
    """Tell whether a folder has all damages by an estimator on so many samples."""
    path = folder / f"measured-{'gradient' if estimator == 'fisher' else estimator}.json"  # one pass gives both
    content = read_json(path) if path.is_file() else {}
    return bool(content.get("complete")) and content.get("samples") == samples
