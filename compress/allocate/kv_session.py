"""One budget for the weights and for the cache of a context: how the cache's share is found and spent.

Each layer's keys and each layer's values are units with an option for each number of bits, beside the units of weights;
damages of both are divergences in nats a token (compress/allocate/kv_budget.py, `swap`), so that one knapsack divides
the budget. What the cache takes by it is taken off the budget, and the recipe's own allocator spends the rest on
weights. A recipe without `quantize` leaves the weights as they are and has all the rest for the cache.

Both are measured on the original model: what the loss of one adds to that of the other is left out. The whole model is
loaded to measure a cache, in float32 for the divergence, and a measurement that is killed starts over. Half of the
calibration text calibrates codecs, the other half is scored. Bytes are those of tensors in use; memory grows by up to
an eighth more, so that n tokens cost O(n) copies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compress import process_memory
from compress.allocate import kv_budget, kv_options
from compress.allocate.kv_budget import Measured
from compress.allocate.problem import Choice, Problem, Unit
from compress.allocate.solver import damages_of, solve
from compress.errors import BudgetError, NotMeasuredError, RecipeError
from compress.evaluate import cache, cache_candidates
from compress.evaluate.scores import Execution
from compress.kernels import llvm
from compress.kv.generation import check_length
from compress.kv.settings import EXACT, KINDS, CacheSettings
from compress.model import load
from compress.process_memory import show
from compress.progress import Progress
from compress.recipe.schema import Allocation, CacheEstimator
from compress.run import identity, prepare
from compress.run import kv_cache as kv_checkpoint
from compress.run.job import Job
from compress.storage.checkpoint import open_checkpoint, read_json, write_text

BITS = (1, 2, 3, 4, 6, 8)  # offered where a recipe lists none
CALIBRATED = 32  # samples, at most
SCORED = 8192  # tokens, at most


@dataclass(frozen=True)
class Offer:
    """What the cache of a recipe may take."""

    options: tuple[kv_budget.Option, ...]
    costs: kv_options.Costs
    context: int
    layers: int  # of the model

    @property
    def units(self) -> tuple[Unit, ...]:
        return kv_budget.units(self.costs.units, self.options)


def options(settings: CacheSettings, bits: Sequence[float]) -> tuple[kv_budget.Option, ...]:
    """Those that the methods of the cache take, for keys and for values."""
    if bits and len(set(bits)) < max(2, len(bits)):
        raise RecipeError(f"allocate.cache_bits: {list(bits)} are not two or more different numbers; offer others")
    found = []
    for wanted in (int(b) if float(b).is_integer() else b for b in bits or BITS):
        try:
            for coding in (settings.keys, settings.values):
                dataclasses.replace(coding.config, bits=wanted)
        except (TypeError, ValueError) as error:  # no such setting, or not this number
            if bits:
                raise RecipeError(f"allocate.cache_bits: {wanted:g} bits: {error}; offer others") from error
            continue
        found.append(wanted)
    if len(found) < 2:
        methods = " and ".join(dict.fromkeys((settings.keys.method, settings.values.method)))
        raise RecipeError(f"kv_cache: {methods} has no bits to choose; use a method that has, such as kivi")
    return kv_budget.options(found)


def offer(asked: Job, allocation: Allocation, tokens: Tensor, folder: Path, progress: Progress) -> Offer:
    """Measured, or read from the folder. tokens int64 [samples, seq_len], of calibration."""
    settings, context = asked.recipe.kv_cache, allocation.context
    assert settings is not None and context is not None, "the recipe was checked"
    directory = prepare.resolve(asked.model)
    config = load.load_config(directory)
    check_length(config, context)
    codings = kv_checkpoint.check(config, settings)
    if all(coding.method == EXACT for layer in codings for coding in layer.values()):
        raise RecipeError("kv_cache: skip_layers leaves no layer to code; name fewer, or give no context")
    offered = options(settings, allocation.cache_bits)
    said = {
        "model": identity.fingerprint(open_checkpoint(directory)),
        "kv_cache": settings.plain(),
        "options": [option.bits for option in offered],
        "context": context,
        "text": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "processor": sorted(llvm.features()) if llvm.available() else [],  # compiled readers keep tensors of their own
        "software versions": identity.versions(),
    }
    path = folder / f"cache-{hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if not path.is_file() and not asked.measures:
        raise NotMeasuredError(f"{folder} has nothing of this cache")
    if not path.is_file():
        costs = _measured(asked, directory, settings, (offered, context), tokens, progress)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({**said, "costs": dataclasses.asdict(costs)}, indent=1) + "\n")
    found = read_json(path)["costs"]
    units = tuple(
        Measured(u["layer"], u["kind"], u["numel"], tuple(u["nbytes"]), tuple(u["errors"]), tuple(u["kls"]))
        for u in found.pop("units")
    )
    return Offer(offered, kv_options.Costs(units, **found), context, len(codings))


def _measured(
    asked: Job,
    directory: Path,
    settings: CacheSettings,
    wanted: tuple[Sequence[kv_budget.Option], int],
    tokens: Tensor,
    progress: Progress,
) -> kv_options.Costs:
    offered, context = wanted
    whole = 4 * sum(math.prod(stored.shape) for stored in open_checkpoint(directory).tensors.values())
    if asked.max_memory is not None and process_memory.resident() + whole > asked.max_memory:
        raise BudgetError(
            f"measuring a cache takes the whole model in float32, {show(whole)}, more than --max-memory leaves; raise "
            "it, or give the bits of the cache in the recipe"
        )
    half = min(CALIBRATED, max(1, len(tokens) // 2))
    samples, scored = tokens[:half], tokens[half:] if len(tokens) > half else tokens
    scored = scored[: max(1, SCORED // tokens.shape[1])]
    progress("measuring the bytes of caches", 0, 0)
    stored = cache_candidates.load_model(directory, Execution("auto", asked.device))
    candidates = kv_options.offered(stored, settings, offered, samples)
    sizes = kv_options.sized(stored, scored[:1], candidates, context)
    del stored
    model = cache_candidates.load_model(directory, Execution("float32", asked.device))
    candidates = kv_options.offered(model, settings, offered, samples)
    say = cache.counter(progress, "measuring the divergence of caches", len(scored))
    costs = kv_options.measure(model, scored, candidates, sizes, say)
    process_memory.check(asked.max_memory)
    return costs


def divided(
    found: Offer, weights: Sequence[Unit], room: int, estimator: CacheEstimator = kv_budget.SWAP
) -> tuple[int, Choice]:
    """Bytes for the cache, everything included, and its choice: `room` bytes are for it and for these units.

    What the cache gets is decided by divergences; with another estimator that is spent anew among layers and kinds.
    Raises BudgetError where the smallest options do not fit.
    """
    units = found.units
    asked = Problem((*weights, *units), room - found.costs.fixed_nbytes)
    if asked.budget < asked.least:
        least = sum(min(e.nbytes for e in unit.entries) for unit in units) + found.costs.fixed_nbytes
        raise BudgetError(
            f"the target leaves {show(max(0, room))} for quantized weights and the cache, whose smallest options take "
            f"{show(asked.least + found.costs.fixed_nbytes)}, {show(least)} of it the cache of {found.context} tokens; "
            "raise the target, shorten the context, or offer smaller options"
        )
    choice = solve(asked, damages_of(asked, kv_budget.SWAP)).choice[len(weights) :]
    share = Problem(units, Problem(units, 0).nbytes(choice))
    if estimator == kv_budget.RULE:
        choice = kv_budget.raised(share)
    elif estimator == kv_budget.MEASURED:
        choice = kv_budget.choose(share).choice
    return Problem(units, 0).nbytes(choice) + found.costs.fixed_nbytes, choice


def described(found: Offer, choice: Choice) -> dict[str, Any]:
    """The facts of a choice, as JSON values."""
    chosen, entries = kv_budget.chosen(found.units, choice), found.units
    taken = [unit.entries[i] for unit, i in zip(entries, choice, strict=True)]
    mean = {
        kind: sum(e.nbytes for e, u in zip(taken, entries, strict=True) if u.name.endswith(kind))
        * 8
        / sum(u.numel for u in entries if u.name.endswith(kind))
        for kind in KINDS
    }
    return {
        "context": found.context,
        "nbytes": sum(entry.nbytes for entry in taken) + found.costs.fixed_nbytes,
        "bits per element": mean,
        "divergence": sum(entry.damage[kv_budget.SWAP] for entry in taken),
        "tokens": found.costs.tokens,
        "layers": {str(layer): dict(kinds) for layer, kinds in chosen.items()},
        "layers of the model": found.layers,
    }


def applied(settings: CacheSettings, facts: Mapping[str, Any], offered: Sequence[kv_budget.Option]) -> CacheSettings:
    """The settings with what `described` says."""
    chosen = {int(layer): kinds for layer, kinds in facts["layers"].items()}
    return kv_budget.laid_out(settings, chosen, facts["layers of the model"], offered)
