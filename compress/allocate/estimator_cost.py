"""Predict what estimators take, from timing a few passes, and choose the best that fits into a time.

What an estimator computes is counted exactly, in tokens through a block and through the output head; what these take is
timed on one block and one sample. Without a time that is asked for, DEFAULT_SECONDS are allowed.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from compress import plugins
from compress.allocate import prepare_options, table
from compress.allocate.block_scores import T2
from compress.allocate.prepare_options import Options
from compress.allocate.problem import AUTO, BEST_FIRST, FROM_BASE, KL_ONE_AT_A_TIME, KL_SHARES
from compress.allocate.table_units import TABLE_KL
from compress.calib.reference_logprobs import TOP_K, divergence, predictions
from compress.errors import BudgetError, NotMeasuredError, UnsupportedModelError
from compress.importers import open_checkpoint
from compress.model import blockwise, lm_head
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.progress import duration, note
from compress.recipe.allocation import IN_NATS
from compress.recipe.schema import KEEP, Allocation
from compress.storage import json_text
from compress.storage.checkpoint import read_json, write_text
from compress.storage.json_text import INTEGER, NUMBER, TEXT

DEFAULT_SECONDS = 30 * 60.0
FILE = "estimator.json"  # what was chosen, so that a resumed run does not time anew
LEAST_SAMPLES = 8  # below, a cheaper estimator on more text is the better one
BACKWARD = 3  # times a forward pass: forward again, gradients by states and by weights
HEAD_BACKWARD = 2  # times the head's forward pass


class Work(NamedTuple):
    """What a measurement computes, in tokens: through one block, on average, and through the output head."""

    block_tokens: float
    head_tokens: float


class Speed(NamedTuple):
    """Seconds of one token."""

    block: float
    head: float

    def seconds(self, work: Work, processes: int = 1) -> float:
        """Return the seconds of so much work, shared out among processes."""
        return (self.block * work.block_tokens + self.head * work.head_tokens) / processes


class Cost(NamedTuple):
    """An estimator on so many samples, and the seconds that it is predicted to take."""

    estimator: str
    samples: int
    seconds: float

    @property
    def text(self) -> str:
        """Say it in a few words."""
        return f"{self.estimator} on {self.samples} samples ({duration(self.seconds)})"


def work(opened: Options, estimator: str, samples: int) -> Work:
    """Count what measuring damages computes on so many samples, those of tables outside of the blocks included.

    Nothing for what is measured while options are made.
    """
    linears, tables = _linears_work(opened, estimator, samples), _tables_work(opened, samples)
    return Work(linears.block_tokens + tables.block_tokens, linears.head_tokens + tables.head_tokens)


def _tables_work(opened: Options, samples: int) -> Work:
    """Count the passes of `table_kl`: one an option of the embeddings, and one in all of a head of its own."""
    tokens, blocks = samples * opened.prepared.seq_len, len(opened.prepared.skeleton.blocks)
    passes = [len(table.layers) if "embeddings" in table.roles else 1 for table in opened.tables]
    return Work(tokens * blocks * sum(passes), tokens * sum(len(table.layers) for table in opened.tables))


def _linears_work(opened: Options, estimator: str, samples: int) -> Work:
    """Count what an estimator computes of linears."""
    groups, blocks = table.open_groups(opened), len(opened.prepared.skeleton.blocks)
    tokens = samples * opened.prepared.seq_len
    offered = [prepare_options.offered(opened, group.members) for group in groups]
    at = [group.members[0].block for group in groups]
    if estimator in (KL_ONE_AT_A_TIME, FROM_BASE, "noise"):
        is_shared = KEEP in opened.names and estimator != "noise"  # what is kept is the same model for all units
        variants = [len(T2) if estimator == "noise" else len(options) - is_shared for options in offered]
        behind = sum(count * (blocks - block) for count, block in zip(variants, at, strict=True))
        shared = sum(blocks if is_shared else block for block in set(at))  # in front of a block, and with all kept
        return Work(tokens * (behind + shared), tokens * (sum(variants) + is_shared * len(set(at))))
    changing = sum(name != KEEP for name in opened.names)
    passes = {KL_SHARES: changing, "gradient": 1, "fisher": 1}.get(estimator, 0)
    return Work(tokens * passes * blocks * (1 + BACKWARD), tokens * passes * (1 + HEAD_BACKWARD))


@torch.no_grad()
def speed(opened: Options) -> Speed:
    """Time the first block and the head, in float32 on one thread, on one sample of random tokens."""
    prepared, device = opened.prepared, torch.device(opened.asked.device)
    skeleton = Skeleton(open_checkpoint(prepared.skeleton.checkpoint.directory))
    end = blockwise.computing_in(skeleton, torch.float32)
    threads = torch.get_num_threads()
    stream = blockwise.HiddenStates(1, None)
    generator = torch.Generator().manual_seed(opened.asked.seed)
    tokens = torch.randint(skeleton.vocab_size, (1, prepared.seq_len), generator=generator)
    try:
        torch.set_num_threads(1)
        calls = blockwise.record_inputs(skeleton, tokens, 1, stream, device)
        block, hidden = skeleton.load_block(0, device), stream.read(0, 1).to(device)
        forward = _timed(lambda: blockwise.run_block(block, calls[0][1], hidden, "the first block"))
        skeleton.free()
        part = kl.slices(prepared.seq_len, skeleton.vocab_size)[0]
        lm_head.load(skeleton, device)
        rows = hidden[:, part]
        reference = predictions(lm_head.logits(skeleton, rows)[0], TOP_K)
        head = _timed(lambda: divergence(reference, slice(None), lm_head.logits(skeleton, rows)[0]))
        return Speed(forward / prepared.seq_len, head / rows.shape[1])
    finally:
        torch.set_num_threads(threads)
        stream.close()
        end()


def _timed(call: Callable[[], object]) -> float:
    """Return the seconds of the second of two calls: the first one also makes what is kept."""
    call()
    started = time.monotonic()
    call()
    return time.monotonic() - started


def costs(opened: Options, known: Speed, samples: int) -> Iterator[Cost]:
    """Yield what may take the place of `auto`, best first; on fewer samples only while that is better than the next."""
    scopes = {plugins.load("transform", step.method).SCOPE for step in opened.asked.recipe.transform}
    excluded = {getattr(opened.allocation.config, "scale", None), *(("gradient",) if "block" in scopes else ())}
    for estimator in BEST_FIRST:
        if estimator in excluded:  # taken already, or not of the weights as they are stored
            continue
        if opened.tables and estimator not in IN_NATS:  # cannot be added to the KL of tables
            continue
        count = samples
        while count:
            yield Cost(estimator, count, known.seconds(work(opened, estimator, count), opened.asked.processes))
            count = count // 2 if count // 2 >= LEAST_SAMPLES else 0


def best(opened: Options, known: Speed, samples: int, left: float) -> tuple[Cost, str]:
    """Return the best estimator that takes at most `left` seconds, else the last one, and a sentence that says why."""
    first, *others = costs(opened, known, samples)
    if first.seconds <= left:
        return first, f"damages are measured by {first.text}"
    found = next((cost for cost in others if cost.seconds <= left), [first, *others][-1])
    return found, f"damages are measured by {found.text}: {first.text} does not fit into the {duration(left)} there are"


def check(opened: Options, folder: Path) -> None:
    """Raise BudgetError for an estimator that the recipe names and that alone takes more than --budget.

    Not where the folder has what it measures.
    """
    estimator = getattr(opened.allocation.config, "estimator", AUTO)
    budget, samples = opened.asked.budget, min(opened.allocation.samples, opened.prepared.samples)
    if budget is None:
        return
    if estimator == AUTO:
        if opened.tables and not (folder / FILE).is_file():
            _check_least(opened, budget, samples)
        return
    is_linear = any(_linears_work(opened, estimator, samples)) and not _is_measured(folder, estimator, samples)
    if not is_linear and (not opened.tables or _is_measured(folder, TABLE_KL, samples)):
        return
    known = speed(opened)
    seconds = known.seconds(work(opened, estimator, samples), opened.asked.processes)
    if seconds > budget:
        other, _ = best(opened, known, samples, budget)
        raise BudgetError(
            f"estimator {estimator} of the recipe takes about {duration(seconds)}, more than --budget "
            f"{duration(budget)}; raise it, or use estimator: {other.estimator} ({duration(other.seconds)}), or auto"
        )


def _check_least(opened: Options, budget: float, samples: int) -> None:
    """Raise BudgetError where even the cheapest estimator in the unit of tables alone takes more than --budget."""
    *_, least = costs(opened, speed(opened), samples)
    if least.seconds > budget:
        raise BudgetError(
            f"the least that tables can be allocated by, {least.text}, takes more than --budget {duration(budget)}; "
            "raise it, or remove allocate.tables"
        )


def forecast(opened: Options, quantizing: float) -> str:
    """Say by what damages would be measured and how long it takes, after so many seconds of quantizing; "" for none."""
    estimator = getattr(opened.allocation.config, "estimator", None)
    samples = min(opened.allocation.samples, opened.prepared.samples)
    if estimator is None:
        return ""
    known = speed(opened)
    if estimator == AUTO:
        return best(opened, known, samples, left(opened, quantizing))[1]
    seconds = known.seconds(work(opened, estimator, samples), opened.asked.processes)
    budget = opened.asked.budget
    refused = f": more than --budget {duration(budget)}, refused" if budget is not None and seconds > budget else ""
    return f"damages are measured by {Cost(estimator, samples, seconds).text}{refused}"


def left(opened: Options, spent: float) -> float:
    """Return the seconds for measuring damages, after so many spent on quantizing all options.

    Of --budget the final run takes about an option's share of that. Without it, DEFAULT_SECONDS.
    """
    if opened.asked.budget is None:
        return DEFAULT_SECONDS
    return max(0.0, opened.asked.budget - spent * (1 + 1 / len(opened.names)))


def resolved(opened: Options, folder: Path, left: float) -> Allocation:
    """Return the allocation with an estimator in the place of `auto`: the best within `left` seconds.

    What was chosen before in this folder is kept: a run that goes on does not choose anew. Raises NotMeasuredError
    where nothing was chosen and the job may not measure.
    """
    allocation, asked = opened.allocation, opened.asked
    if getattr(allocation.config, "estimator", None) != AUTO:
        return allocation
    path, samples = folder / FILE, min(allocation.samples, opened.prepared.samples)
    wanted = {"budget": asked.budget, "of samples": samples}
    content = read_json(path) if path.is_file() else {}
    layout = {"estimator": TEXT, "samples": INTEGER, "seconds": NUMBER}
    if json_text.mismatch(content, layout) is None and all(content.get(key) == wanted[key] for key in wanted):
        chosen = Cost(content["estimator"], content["samples"], content["seconds"])
    elif getattr(allocation.config, "scale", None) != BEST_FIRST[0] and _is_measured(folder, BEST_FIRST[0], samples):
        chosen = Cost(BEST_FIRST[0], samples, 0.0)
    else:
        if not asked.measures:
            raise NotMeasuredError(f"{folder} has no damages")
        try:
            chosen, said = best(opened, speed(opened), samples, left)
        except UnsupportedModelError as error:  # its blocks are run together only
            if opened.tables:  # which cannot be measured then
                raise
            chosen, said = Cost(BEST_FIRST[-1], samples, 0.0), f"damages are by {BEST_FIRST[-1]}: {error}"
        if asked.budget is not None or chosen.estimator == BEST_FIRST[-1] or "does not fit" in said:
            note(said)
        write_text(path, json.dumps({**wanted, **chosen._asdict()}, indent=1) + "\n")
    config = dataclasses.replace(allocation.config, estimator=chosen.estimator)
    return dataclasses.replace(allocation, config=config, samples=chosen.samples)


def _is_measured(folder: Path, estimator: str, samples: int) -> bool:
    """Tell whether a folder has all damages by an estimator on so many samples."""
    path = folder / f"measured-{'gradient' if estimator == 'fisher' else estimator}.json"  # one pass gives both
    content = read_json(path) if path.is_file() else {}
    return bool(content.get("complete")) and content.get("samples") == samples
