"""Round each linear by itself that names and shapes tell (compress/model/told_linears.py), as engines read it.

NVFP4 linears that engines multiply as one need one tensor scale. All linears beside each other that have as many inputs
share it here: more than there must be, which is never wrong and costs next to nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress import formats
from compress.errors import NumericalError, RecipeError
from compress.export.weights import StoredWeight
from compress.model.told_linears import EXPERT, Matrix
from compress.quant import grid_rtn, rtn
from compress.recipe import Recipe
from compress.run import report
from compress.run.job import Job
from compress.types import PackedWeight, Plan, Scheme, Stats, Stored

ADVICE = "give a scheme of --model-free, or a recipe that only rounds"
NARROW = 64  # a matrix with fewer rows or columns is none of a large product
ZEROS_IN_WORD = 8  # rows of a weight, whose zero points engines read in whole words
GROUPS = (64, 32)  # columns that share a scale where the group of the scheme divides no row
FUSED = (  # what engines multiply as one
    *(("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("gate_proj", "up_proj")),
    *(("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("wk", "weights_proj")),
)


@dataclass
class Run:
    """What is asked for, and what has come of it."""

    job: Job
    errors: dict[str, float] = field(default_factory=dict)  # weight -> |W - Q|^2 / |W|^2
    sharing: dict[tuple[str, int], list[Matrix]] = field(default_factory=dict)  # parent and inputs -> its linears
    largest: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # the same -> the largest of their weights


@dataclass(frozen=True)
class RoundedWeight(StoredWeight):
    """A weight that is rounded when it is read; its three last fields are always given."""

    matrix: Matrix | None = None
    scheme: Scheme | None = None
    run: Run | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what will be stored."""
        return formats.nbytes(self.stored, self.shape)

    def read(self) -> PackedWeight:
        """Round the weight; NumericalError for one that is not finite, or of which nothing would be left."""
        assert self.matrix is not None and self.scheme is not None and self.run is not None
        weight, config, job = self.matrix.read().to(self.run.job.device), self.scheme.config, self.run.job
        if not weight.isfinite().all():
            raise NumericalError(f"the weight of {self.name} has NaN or infinite values; repair the checkpoint")
        if isinstance(config, rtn.Config):
            quantized = rtn.quantize(weight, None, config, scale_dtype=self.stored.params.scale_dtype)
        else:
            quantized = grid_rtn.quantize(weight, self._largest() if self.stored.params.tensor_scale else None, config)
        error = report.errors(weight, quantized.weight, None).relative
        if error >= report.LOST_WEIGHT_ERROR and not job.allow_partial:
            raise NumericalError(
                f"nothing is left of {self.name} (relative error {error:.2f}); name it in --set ignore=[...], or go "
                "on with --allow-partial"
            )
        self.run.errors[self.name] = error
        tensors = {key: tensor.cpu() for key, tensor in quantized.weight.tensors.items()}
        return PackedWeight(self.stored, tensors, self.shape)

    def _largest(self) -> Stats:
        """Return the largest of all weights that have the same tensor scale."""
        assert self.run is not None
        key = self.name.rpartition(".")[0], self.shape[1]
        if key not in self.run.largest:
            tops = [torch.stack(torch.aminmax(each.read())).abs().max().float() for each in self.run.sharing[key]]
            self.run.largest[key] = torch.stack(tops).amax()
        largest = self.run.largest[key].to(self.run.job.device)
        return Stats(largest.new_empty(0, 0), 0, largest_weight=largest)


def check(recipe: Recipe) -> None:
    """Raise RecipeError for a recipe that does more than to round: that needs data, or the class of the model."""
    parts: dict[str, Any] = {"transform": recipe.transform, "tune": recipe.tune, "allocate": recipe.allocate}
    parts |= {"kv_cache": recipe.kv_cache, "experts": recipe.pruning, "towers": recipe.towers}
    parts |= {"accept": recipe.accept}
    if wrong := [name for name, part in parts.items() if part]:
        raise RecipeError(f"recipe {recipe.name!r} has {wrong[0]}, which needs the class of the model; {ADVICE}")
    for each in (recipe.quantize, *(rule.scheme for rule in recipe.rules if rule.scheme is not None)):
        is_static = each.activations is not None and each.activations.scale == "tensor"
        if not isinstance(each.config, rtn.Config | grid_rtn.Config):
            raise RecipeError(f"recipe {recipe.name!r} has the method {each.method}, which needs data; {ADVICE}")
        if each.lowrank is not None or each.incoherence or is_static or each.nested:
            extras = "lowrank, incoherence, nested or static scales of inputs"
            raise RecipeError(f"recipe {recipe.name!r} has {extras}; {ADVICE}")


def choose(scheme: Scheme | None, shape: tuple[int, int], scale_dtype: str) -> tuple[Scheme, Stored] | str:
    """Return how a weight [out, in] is rounded and stored, or why it stays as it is."""
    if scheme is None:
        return Plan.CHOSEN
    config, columns = scheme.config, shape[1]
    if min(shape) < NARROW:
        return f"narrower than {NARROW} features"
    if isinstance(config, rtn.Config):
        sizes = [size for size in (config.group_size, *GROUPS) if size == -1 or columns % size == 0]
        if not sizes:
            return f"its {columns} inputs are no whole groups of {GROUPS[-1]}"
        scheme = dataclasses.replace(scheme, config=dataclasses.replace(config, group_size=sizes[0]))
        params = rtn.plan_params(scheme.config, shape, scale_dtype)
        return scheme, Stored(rtn.FORMAT, params, activations=scheme.activations)
    stored = Stored(grid_rtn.FORMAT, grid_rtn.plan_params(config, shape), activations=scheme.activations)
    size = stored.params.block_columns
    return f"its {columns} inputs are no whole blocks of {size}" if size > 0 and columns % size else (scheme, stored)


def settle_zero_points(
    chosen: Mapping[str, tuple[Scheme, Stored]], shapes: Mapping[str, tuple[int, int]], scale_dtype: str
) -> tuple[dict[str, tuple[Scheme, Stored]], str | None]:
    """Return how weights are rounded so that readers open them, and the reason where zero points had to go.

    With zero points all weights need one number of bits and one group, and none may be an expert: they all take the
    smallest group of any, down to 64. Else all are symmetric.
    """
    plain = {name: each for name, (each, _) in chosen.items() if isinstance(each.config, rtn.Config)}
    if all(each.config.symmetric for each in plain.values()):
        return dict(chosen), None
    sizes = {name: each.config.group_size for name, each in plain.items()}
    whole = {name for name, size in sizes.items() if size in (-1, shapes[name][1])}  # to readers of another kind
    if whole != sizes.keys():
        sizes |= {name: next(size for size in GROUPS if size < shapes[name][1]) for name in whole}
    least = min(sizes, key=lambda name: sizes[name])
    experts, odd = [n for n in chosen if EXPERT.search(n)], [n for n in chosen if shapes[n][0] % ZEROS_IN_WORD]
    reason = None
    if experts:
        reason = f"transformers does not open {experts[0]}, an expert, with them"
    elif odd:
        reason = f"the {shapes[odd[0]][0]} rows of {odd[0]} are no whole words of them"
    elif len({(each.config.bits, each.config.symmetric) for each in plain.values()}) > 1 or len(plain) < len(chosen):
        reason = "readers open them only if all weights are alike"
    elif any(each.config.group_size != sizes[least] for each in plain.values()) and (
        sizes[least] < GROUPS[0] or any(shapes[name][1] % sizes[least] for name in plain)
    ):
        reason = f"readers open them only if all weights are alike, and {least} has groups of {sizes[least]}"
    changes: dict[str, Any] = {"group_size": sizes[least]} if reason is None else {"symmetric": True}
    settled = dict(chosen)
    for name, scheme in plain.items():
        config = dataclasses.replace(scheme.config, **changes)
        params = rtn.plan_params(config, shapes[name], scale_dtype)
        stored = dataclasses.replace(chosen[name][1], params=params)
        settled[name] = dataclasses.replace(scheme, config=config), stored
    return settled, reason


def fused_groups(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the modules that engines multiply as one, where there are several, in the order of `FUSED`."""
    known = set(names)
    for name in sorted(known):
        parent, dot, last = name.rpartition(".")
        for members in FUSED:
            group = [f"{parent}{dot}{each}" for each in members if f"{parent}{dot}{each}" in known]
            if last in members and len(group) > 1 and name == group[0]:
                yield group
