"""A token embedding whose table stays packed in memory: a lookup decodes the rows that are asked for, and no other.

A table that is tied to the output head is stored once: the head is a PackedLinear that holds the same parameters. What
transforms (compress/formats/transforms.py) leave to run time around such a table is the head's; a row that is looked up
passes those of them that turn it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from compress import formats
from compress.errors import CheckpointError
from compress.formats import levels, transforms
from compress.kernels import dispatch
from compress.runtime.linear import PackedLinear, PackedModule, is_plain_linear
from compress.types import PackedWeight, Stored

LIKE = "like"  # an empty tensor that is stored beside the table; its type is that of the rows, and of the model
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BEFORE = "_tied_weights_keys_before"  # the attribute of a model in which what `swap` replaces is kept
PROBE = (16, 64)  # rows and columns of the table on which an embedding is tried
_PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever is set while a model is built
TRIAL_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


class Constants(NamedTuple):
    """What an embedding multiplies its rows by and adds to them."""

    by_type: Mapping[torch.dtype, tuple[float, float]]  # type of the rows -> factor, offset; buffers round to the type
    buffers: Mapping[str, Tensor]  # of the embedding, in full precision


class PackedEmbedding(PackedModule):
    """Rows of a table [num_embeddings, embedding_dim] that is stored in a format which can decode single rows.

    The rows have the type of the parameter `like`, which follows `to(dtype)`, `half()` and `float()`. It comes first:
    transformers takes the type of a model from its first floating parameter.
    """

    like: nn.Parameter
    uses_kernels = True  # False: rows are decoded by the format alone, so that nothing is compiled for a few of them

    def __init__(self, stored: Stored, original: nn.Embedding, model: nn.Module | None = None) -> None:
        """Reserve uninitialized storage for the table of `original`, on its device, with rows of its type.

        model: what `original` is a part of. Raises ValueError for a format that cannot decode single rows,
        CheckpointError for an embedding that does more than multiply and add constants.
        """
        weight, known = original.weight, constants(original, model)
        if known is None:
            raise CheckpointError(
                f"{type(original).__name__} of this version of transformers does more than look rows up, multiply and "
                "add constants; load the checkpoint with the version that it was made with"
            )
        if not formats.has_rows(stored):
            raise ValueError(f"format {stored.format!r}, or what is around it, has no rows that can be looked up")
        super().__init__(stored, (weight.shape[0], weight.shape[1]), weight.device)
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx = original.padding_idx
        self.constants = known
        vars(self)["original"] = original  # not a child; its weight is on meta, or about to be freed
        table = dict(self._parameters)
        self._parameters.clear()
        self.register_parameter(LIKE, nn.Parameter(torch.empty(0, dtype=weight.dtype, device=weight.device)))
        self._parameters.update(table)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the rows [..., embedding_dim] of token ids [...] of any integer type.

        Raises TokenIdError on a CPU for an id that the table does not have; on a GPU its row is NaN.
        """
        if self._unchecked is not None:
            self.check(self._unchecked)
        dtype = self.like.dtype
        rows = self._rows(input_ids.reshape(-1), dtype)
        if self.stored.ops:
            rows = transforms.apply_rows(rows, self.stored.ops, self.tensors)
        rows = rows.view(*input_ids.shape, self.embedding_dim)
        return _affine(rows, *self.constants.by_type[dtype])

    def _rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [n, embedding_dim] of ids [n] of the stored matrix; traced as one operator."""
        tensors: dict[str, Tensor] = {name: self.get_parameter(name) for name in self._matrix}
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return dispatch.traced_rows(ids, list(tensors.values()), self._described, dtype)
        if not self.uses_kernels:
            return formats.decode_rows(PackedWeight(Stored(self.format, self.params), tensors, self.shape), ids, dtype)
        return dispatch.rows(ids, tensors, self.format, self.params, self.shape, dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the table as it is looked up, decoded anew."""
        if formats.is_unpacked(self.stored):
            return super().dequantize(dtype)
        stored = dataclasses.replace(self.stored, ops=transforms.of_rows(self.stored.ops))
        return formats.decode(levels.view(PackedWeight(stored, self.tensors, self.shape), self.level), dtype)

    def to_embedding(self, dtype: torch.dtype) -> nn.Embedding:
        """Return the embedding that this one stands for, with the decoded table in `dtype`."""
        embedding = copy.deepcopy(cast(nn.Embedding, vars(self)["original"]).to("meta"))
        embedding.weight = nn.Parameter(self.dequantize(dtype))
        for name, value in self.constants.buffers.items():
            typed = value.to(dtype) if value.is_floating_point() else value
            setattr(embedding, name, typed.to(embedding.weight.device))
        return embedding.train(self.training)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            _refuse_weight()
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.params}"


def _refuse_weight() -> NoReturn:
    raise AttributeError(
        "the table of a PackedEmbedding stays packed and cannot be resized or trained; dequantize(dtype) decodes it"
    )


def constants(module: nn.Module, model: nn.Module | None = None) -> Constants | None:
    """Return by the type of the rows what an embedding multiplies them by and adds to them; None if it does more.

    This is found by trying it on a small table. model: what the embedding is a part of, which knows the values of
    buffers that are not loaded yet, or were rounded to the type of the model.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None
    if type(module).forward is nn.Embedding.forward and "forward" not in vars(module):
        return Constants(dict.fromkeys(DTYPES, (1.0, 0.0)), {})
    buffers = _buffers(module, model)
    if any(buffer.isnan().any() for buffer in buffers.values() if buffer.is_floating_point()):
        return None
    by_dtype = {dtype: _constants_of_type(module, buffers, dtype) for dtype in DTYPES}
    known = {dtype: pair for dtype, pair in by_dtype.items() if pair is not None}
    return Constants(known, buffers) if len(known) == len(DTYPES) else None


@torch.no_grad()
def _buffers(module: nn.Embedding, model: nn.Module | None) -> dict[str, Tensor]:
    """Return the buffers of an embedding in full precision on the CPU; NaN where a value is not known.

    transformers gives those that no checkpoint holds their values by the model's `_init_weights`.
    """
    own = {name: buffer for name, buffer in module.named_buffers() if buffer is not None}
    unknown = {name: _wide(torch.full(buffer.shape, torch.nan, **_PLAIN), buffer) for name, buffer in own.items()}
    trial = _trial(module, torch.zeros(PROBE, **_PLAIN), unknown)
    owners = [each for each in model.modules() if hasattr(each, "_init_weights")] if model is not None else []
    owner = next((each for each in reversed(owners) if any(part is module for part in each.modules())), None)
    if owner is not None and own:
        with suppress(*TRIAL_FAILURES), torch.random.fork_rng(devices=[]):
            cast(Any, owner)._init_weights(trial)
    buffers_in_full = {}
    for name, buffer in own.items():
        value = trial._buffers[name]
        is_known = value is not None and not (value.is_floating_point() and bool(value.isnan().any()))
        if is_known and buffer.is_floating_point():
            buffers_in_full[name] = cast(Tensor, value)
        else:
            buffers_in_full[name] = unknown[name] if buffer.is_meta else _wide(buffer.detach().cpu(), buffer)
    return buffers_in_full


def _wide(value: Tensor, like: Tensor) -> Tensor:
    """Return a value in float32, or in the type of a buffer that holds no fractions."""
    return value.float() if like.is_floating_point() else value.nan_to_num().to(like.dtype)


def _trial(module: nn.Embedding, table: Tensor, buffers: Mapping[str, Tensor]) -> nn.Embedding:
    """Return a copy of an embedding with another table and other values of its buffers."""
    trial = copy.copy(module)
    trial._parameters, trial._buffers = {"weight": nn.Parameter(table, requires_grad=False)}, {**buffers}
    trial.padding_idx = None
    return trial


@torch.no_grad()
def _constants_of_type(
    module: nn.Embedding, buffers: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[float, float] | None:
    """Return (factor, offset) of rows of a type; None where the result is not rows * factor + offset, bit for bit."""
    typed = {name: value.to(dtype) if value.is_floating_point() else value for name, value in buffers.items()}
    ids = torch.arange(PROBE[0], device="cpu").repeat(2, 1)
    ids[1] = ids[1].flip(0)
    table = torch.randn(PROBE, generator=torch.Generator().manual_seed(0), **_PLAIN).to(dtype)
    zeros, ones = (torch.full(PROBE, value, dtype=torch.float64, device="cpu") for value in (0.0, 1.0))
    try:
        added, both, rows = (_trial(module, each, typed)(ids) for each in (zeros, ones, table))
    except TRIAL_FAILURES:
        return None
    offset = added.flatten()[0].item()
    factor = both.flatten()[0].item() - offset
    expected = _affine(table[ids], factor, offset)
    is_same = rows.dtype == dtype and torch.equal(rows, expected) and added.unique().numel() == 1
    return (factor, offset) if is_same else None


def _affine(rows: Tensor, factor: float, offset: float) -> Tensor:
    rows = rows if factor == 1 else rows * factor
    return rows if offset == 0 else rows + offset


def swap(model: nn.Module, name: str, stored: Stored) -> bool:
    """Replace the embedding `name` of a model, and all that is tied to it, in place; False if it is no embedding.

    That may be the output head, and the embeddings of an encoder and a decoder.

    Afterwards transformers ties the stored tensors of the two in the place of their weights. Raises ValueError for a
    format that cannot be looked up in, CheckpointError where something that is no linear is tied to the embedding.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return False
    if not isinstance(module, nn.Embedding):
        return False
    tied = tied_to(model, f"{name}.weight")
    packed = PackedEmbedding(stored, module, model)
    model.set_submodule(name, packed)
    pack_tied(model, name, tied, packed)
    return True


def pack_tied(model: nn.Module, name: str, tied: Collection[str], packed: PackedModule) -> None:
    """Let linears and embeddings share what a packed module `name` stores, and transformers tie it.

    tied: names of their weights. Raises CheckpointError for what is neither.
    """
    for other in tied:
        place = other.rpartition(".")[0]
        linear = model.get_submodule(place)
        model.set_submodule(place, _share(packed, name, linear, other, model))
    if tied:
        _tie_stored(model, {f"{name}.weight", *tied}, list(packed.specs))


def _share(packed: PackedModule, name: str, tied: nn.Module, weight: str, model: nn.Module) -> PackedModule:
    """Return a module with the parameters of a packed one `name`, in the place of one that is tied by its `weight`."""
    keys = list(packed.specs)
    if isinstance(packed, PackedEmbedding) and isinstance(tied, nn.Embedding):  # of an encoder and a decoder
        shared: PackedModule = PackedEmbedding(packed.stored, tied, model)
        keys = [LIKE, *keys]
    elif is_plain_linear(tied):
        own = tied.get_parameter("weight")
        shared = PackedLinear(packed.stored, packed.shape, tied.bias is not None, own.dtype, own.device)
        shared.bias = cast(nn.Linear, tied).bias
    else:
        raise CheckpointError(f"{name} is listed as packed, but its weight is tied to {weight}, no linear's")
    for key in keys:
        shared.register_parameter(key, packed.get_parameter(key))
    return shared


def tied_to(model: nn.Module, own: str) -> list[str]:
    """Return the other names of a weight: what is the same parameter, and what transformers is going to make it."""
    weight = model.get_parameter(own)
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    pairs = getattr(model, "all_tied_weights_keys", {}).items()
    sources = {own, *(source for target, source in pairs if target == own)}
    names += [name for pair in pairs if pair[1] in sources for name in pair]
    return [name for name in dict.fromkeys(names) if name != own]


def _tie_stored(model: nn.Module, names: set[str], keys: list[str]) -> None:
    """Let transformers tie the tensors `keys` of modules where it has tied the weights `names` of these."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for table in ("_tied_weights_keys", "all_tied_weights_keys"):
            pairs = getattr(module, table, None)
            if isinstance(pairs, dict) and any({start + a, start + b} <= names for a, b in pairs.items()):
                vars(module).setdefault(BEFORE, vars(module).get("_tied_weights_keys"))
                setattr(module, table, _replace_pairs(pairs, module, start, names, keys))


def _replace_pairs(
    pairs: dict[str, str], module: nn.Module, start: str, names: set[str], keys: list[str]
) -> dict[str, str]:
    """Return pairs of tied tensors, target -> source, with those of `names` replaced by one pair for each key.

    The names begin with `start`; those of the pairs are inside `module`.
    """
    replaced = {}
    for target, source in pairs.items():
        if {start + target, start + source} <= names:
            owners = target.removesuffix("weight"), source.removesuffix("weight")
            are_looked_up = all(isinstance(module.get_submodule(each[:-1]), PackedEmbedding) for each in owners)
            own = [LIKE, *keys] if are_looked_up else keys
            replaced.update({owners[0] + key: owners[1] + key for key in own})
        else:
            replaced[target] = source
    return replaced


def restore(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace packed embeddings by those that they stand for, decoded, and tie them as before `swap`.

    With transforms around the table, what was one is a table of embeddings and another one of the head.
    """
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedEmbedding)}
    if any(module.stored.ops for module in packed.values()):
        config = cast(Any, model).config
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    for name in packed:
        model.set_submodule(name, cast(PackedEmbedding, model.get_submodule(name)).to_embedding(dtype))
    changed = [cast(Any, module) for module in model.modules() if BEFORE in vars(module)]
    for owner in changed:
        own = vars(owner).pop(BEFORE)  # None: the class says it
        vars(owner).pop("_tied_weights_keys", None)
        if own is not None:
            owner._tied_weights_keys = own
    for owner in changed:  # whose tables ask those of the modules in them
        owner.all_tied_weights_keys = owner.get_expanded_tied_weights_keys(all_submodels=True)
        owner.tie_weights()
