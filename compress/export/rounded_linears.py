"""Tell the linears of a checkpoint by names and shapes, where no class of a model tells them, and round each by itself.

A linear is a matrix `NAME.weight`, unless its name is that of a table, a head, a router, a norm, a convolution, a part
beside the text model, a layer for further tokens, or what steers a recurrent state (`KEPT`), or it has a row for each
token. Experts in one tensor [experts, .., ..] are taken apart where shapes tell which side is that of the inputs; the
first half of a fused gate and up is the gate.

NVFP4 linears that engines multiply as one need one tensor scale. All linears beside each other that have as many inputs
share it here: more than there must be, which is never wrong and costs next to nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress import formats
from compress.errors import NumericalError, RecipeError
from compress.export.weights import StoredWeight
from compress.quant import grid_rtn, rtn
from compress.recipe import Recipe
from compress.run import report
from compress.run.job import Job
from compress.storage.checkpoint import Checkpoint, Readable
from compress.types import PackedWeight, Plan, Scheme, Stats, Stored

ADVICE = "give a scheme of --model-free, or a recipe that only rounds"
NARROW = 64  # a matrix with fewer rows or columns is none of a large product
ZEROS_IN_WORD = 8  # rows of a weight, whose zero points engines read in whole words
GROUPS = (64, 32)  # columns that share a scale where the group of the scheme divides no row
LOOKED_UP, HEAD, FURTHER_TOKENS = "a table that is looked up", "an output head", "a layer that predicts further tokens"
BESIDE_TEXT = "beside the text model"
KEPT = (  # what the name of a module has -> why it is kept
    (r"(^|\.)(mtp\w*|nextn\w*)\.", FURTHER_TOKENS),
    (r"(^|\.)\w*(visual|vision|image|audio|speech|tower|multi_modal|merger)\w*\.", BESIDE_TEXT),
    (r"(^|\.)(\w*embed\w*|wte|wpe)(\.|$)", LOOKED_UP),
    (r"(^|\.)(output|score|classifier|pooler|head|\w*_head)$", HEAD),
    (r"(^|\.)\w*router\w*(\.|$)|(^|\.)(gate|\w*expert_gate|wg)$", "it chooses experts"),
    (r"(^|\.)(in_proj_(a|b|ba)|[abfg]_proj|[fg]_[ab]_proj|dt_proj|x_proj)$", "it steers a recurrent state"),
    (r"(^|\.)\w*conv\w*(\.|$)", "a convolution"),
    (r"norm\w*$", "a norm"),
)
FUSED = (  # what engines multiply as one
    *(("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("gate_proj", "up_proj")),
    *(("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("wk", "weights_proj")),
)
HALVES = {"gate_up_proj": ("gate_proj", "up_proj")}  # fused tensor -> the names of its halves
UP, DOWN = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")  # tensors of all experts
EXPERT = re.compile(r"(^|\.)\w*experts?\.\d+\.")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Matrix(NamedTuple):
    """A weight [out, in] that may be quantized: a stored tensor, or a part of one with those of all experts."""

    stored: Readable
    shape: tuple[int, int]
    expert: int | None = None  # its number in the stored tensor [experts, .., ..]
    is_turned: bool = False  # the stored part is [in, out]
    part: tuple[int, int] = (0, 1)  # which of so many equal parts of the rows [out] it is

    def read(self) -> Tensor:
        """Return the weight [out, in] as it is stored."""
        if self.expert is None:
            return self.stored.read()
        matrix = self.stored.rows(self.expert, self.expert + 1)[0]
        return (matrix.T if self.is_turned else matrix).chunk(self.part[1])[self.part[0]].contiguous()


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


class Told(NamedTuple):
    """What the rules say of a checkpoint."""

    matrices: dict[str, Matrix]  # module -> its weight
    kept: dict[str, str]  # module, or tensor of more than one dimension -> why it stays as it is


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
        if each.lowrank is not None or each.incoherence or is_static:
            raise RecipeError(f"recipe {recipe.name!r} has lowrank, incoherence or static scales of inputs; {ADVICE}")


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


def tell(checkpoint: Checkpoint) -> Told:
    """Tell the matrices of linears from all other tensors of a checkpoint, of which only the headers are looked at."""
    matrices, kept = dict[str, Matrix](), dict[str, str]()
    for name, stored in sorted(checkpoint.tensors.items()):
        if len(stored.shape) < 2:
            continue  # norms, biases and other small tensors
        module = name.removesuffix(".weight")
        if reason := reason_of_name(module) or _reason_of_shape(module, stored, checkpoint.config):
            kept[module] = reason
        elif len(stored.shape) == 2 and module != name:
            matrices[module] = Matrix(stored, (stored.shape[0], stored.shape[1]))
        elif isinstance(parts := _experts(checkpoint, module, stored), str):
            kept[module] = parts
        else:
            matrices |= parts
    return Told(matrices, kept)


def reason_of_name(module: str) -> str | None:
    """Return why the name of a module is that of no linear to be packed, None for any other."""
    reasons = (reason for pattern, reason in KEPT if re.search(pattern, module))
    is_inner = NUMBER.search(module) is not None  # in a layer, where no head of the model is
    return next((reason for reason in reasons if not (is_inner and reason == HEAD)), None)


def _reason_of_shape(module: str, stored: Readable, config: Mapping[str, Any]) -> str | None:
    """Return why a tensor is no weight of a linear in the model's layers, None where nothing says so."""
    layers, number = _size(config, "num_hidden_layers"), re.search(r"(?:^|\.)layers\.(\d+)\.", module)
    if layers and number is not None and int(number[1]) >= layers:
        return FURTHER_TOKENS
    if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
        return f"stored as {str(stored.dtype).removeprefix('torch.')}"
    return "a row for each token" if stored.shape[0] == _size(config, "vocab_size") else None


def _size(config: Mapping[str, Any], key: str) -> int | None:
    """Return a size that a configuration names, or one of its sections, but none of a part beside the text model."""
    inner = [(name, part) for name, part in config.items() if isinstance(part, dict)]
    sections = (config, *(part for name, part in inner if reason_of_name(f"{name}.") != BESIDE_TEXT))
    return next((section[key] for section in sections if type(section.get(key)) is int), None)


def _experts(checkpoint: Checkpoint, module: str, stored: Readable) -> dict[str, Matrix] | str:
    """Return the weights of experts that lie in one tensor [experts, .., ..], or why it stays as it is."""
    parent, _, last = module.rpartition(".")
    if len(stored.shape) != 3 or "expert" not in parent or last not in (*HALVES, *UP, *DOWN):
        return "no matrix of a linear"
    if {f"{module}_bias", f"{module}.bias"} & checkpoint.tensors.keys():
        return "experts with biases: in which order their rows lie is not told"
    is_turned = _is_turned(checkpoint, parent)
    if is_turned is None:
        return "experts in one tensor: which of its sides is that of the inputs is not told"
    rows, columns = stored.shape[:0:-1] if is_turned else stored.shape[1:]
    parts = HALVES.get(last, (last,))
    shape, count = (rows // len(parts), columns), len(parts)
    return {
        f"{parent}.{expert}.{name}": Matrix(stored, shape, expert, is_turned, (index, count))
        for expert in range(stored.shape[0])
        for index, name in enumerate(parts)
    }


def _is_turned(checkpoint: Checkpoint, parent: str) -> bool | None:
    """Return whether fused experts are stored as [experts, in, out], None where shapes do not tell."""

    def shape_of(names: Iterable[str]) -> tuple[int, ...] | None:
        full = (f"{parent}.{name}{ending}" for name in names for ending in ("", ".weight"))
        return next((checkpoint.tensors[name].shape[1:] for name in full if name in checkpoint.tensors), None)

    up, down = shape_of((*HALVES, *UP)), shape_of(DOWN)
    if up is None or down is None or len(up) != 2 or len(down) != 2:
        return None
    parts, hidden = 2 if shape_of(HALVES) else 1, _size(checkpoint.config, "hidden_size")
    is_plain = up[0] == parts * down[1] and up[1] == down[0] and hidden in (None, up[1])
    is_turned = up[1] == parts * down[0] and up[0] == down[1] and hidden in (None, up[0])
    return is_turned if is_plain != is_turned else None
