"""A token embedding whose table stays packed in memory: a lookup decodes the rows that are asked for, and no other.

A table that is tied to the output head is stored once: the head is a PackedLinear that holds the same parameters. What
transforms (compress/formats/transforms.py) leave to run time around such a table is the head's; a row that is looked up
passes those of them that turn it.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from compress import formats
from compress.errors import CheckpointError
from compress.formats import transforms
from compress.kernels import dispatch
from compress.runtime.linear import PackedLinear, is_plain_linear
from compress.runtime.packed import PackedModule
from compress.types import PackedWeight, Stored

LIKE = "like"  # an empty tensor that is stored beside the table; its type is that of the rows, and of the model
SCALED = "embed_scale"  # the attribute of an embedding whose rows are multiplied by a number
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BEFORE = "_tied_weights_keys_before"  # the attribute of a model in which what `swap` replaces is kept
PROBE = (8, 4)  # rows and columns of the table on which an embedding is tried


class PackedEmbedding(PackedModule):
    """Rows of a table [num_embeddings, embedding_dim] that is stored in a format which can decode single rows.

    The rows have the type of the parameter `like`, which follows `to(dtype)`, `half()` and `float()`. It comes first:
    transformers takes the type of a model from its first floating parameter.
    """

    like: nn.Parameter
    uses_kernels = True  # False: rows are decoded by the format alone, so that nothing is compiled for a few of them

    def __init__(self, stored: Stored, original: nn.Embedding) -> None:
        """Reserve uninitialized storage for the table of `original`, on its device, with rows of its type.

        Raises ValueError for a format that cannot decode single rows.
        """
        weight = original.weight
        if not formats.has_rows(stored):
            raise ValueError(f"format {stored.format!r}, or what is around it, has no rows that can be looked up")
        super().__init__(stored, (weight.shape[0], weight.shape[1]), weight.device)
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx = original.padding_idx
        self.factors = _factors(original)
        self._matrix = list(formats.get(stored.format).specs(stored.params, self.shape))  # tensors of the table alone
        self._described = dispatch.described(stored.format, stored.params, self.shape)
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
        return rows if self.factors is None else rows * self.factors[dtype]

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
        stored = dataclasses.replace(self.stored, ops=transforms.of_rows(self.stored.ops))
        return formats.decode(PackedWeight(stored, self.tensors, self.shape), dtype)

    def to_embedding(self, dtype: torch.dtype) -> nn.Embedding:
        """Return the embedding that this one stands for, with the decoded table in `dtype`."""
        embedding = copy.deepcopy(cast(nn.Embedding, vars(self)["original"]).to("meta"))
        embedding.weight = nn.Parameter(self.dequantize(dtype))
        for name, buffer in embedding.named_buffers():
            value = _scale(embedding) if name == SCALED else None
            assert value is not None, f"{name} of {type(embedding).__name__} is not known"
            setattr(embedding, name, torch.full_like(buffer, value, device=embedding.weight.device))
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


def _scale(module: nn.Embedding) -> float | None:
    """Return the number that an embedding multiplies its rows by; None if there is none that can be read."""
    value = getattr(module, SCALED, None)
    if isinstance(value, Tensor):
        known = getattr(module, f"scalar_{SCALED}", None)
        value = known if known is not None or value.is_meta else value.item()
    return float(value) if isinstance(value, int | float) else None


def _factors(module: nn.Embedding) -> dict[torch.dtype, float] | None:
    """Return by type of the rows what they are multiplied by: a buffer is rounded to that type, a number is not."""
    scale = _scale(module)
    if scale is None:
        return None
    is_buffer = isinstance(getattr(module, SCALED), Tensor)
    return {dtype: torch.tensor(scale, device="cpu").to(dtype).item() if is_buffer else scale for dtype in DTYPES}


@torch.no_grad()
def is_supported(module: nn.Module) -> bool:
    """Return whether an embedding does no more than look rows up and multiply them by a number; buffers have values."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    if type(module).forward is nn.Embedding.forward:
        return True
    trial = copy.copy(module)
    table = torch.randn(PROBE, generator=torch.Generator().manual_seed(0))
    trial._parameters, trial.padding_idx = {"weight": nn.Parameter(table)}, None
    factors = _factors(module)
    try:
        rows = trial(torch.arange(PROBE[0]))
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        return False
    return factors is not None and torch.equal(rows, table * factors[table.dtype])


def swap(model: nn.Module, name: str, stored: Stored) -> bool:
    """Replace the embedding `name` of a model, and a head that is tied to it, in place; False if it is no embedding.

    Afterwards transformers ties the stored tensors of the two in the place of their weights. Raises ValueError for a
    format that cannot be looked up in, CheckpointError where something that is no linear is tied to the embedding.
    """
    module = dict(model.named_modules()).get(name)
    if not isinstance(module, nn.Embedding):
        return False
    own = f"{name}.weight"
    tied = _tied_to(model, own)
    packed = PackedEmbedding(stored, module)
    model.set_submodule(name, packed)
    for other in tied:
        linear = model.get_submodule(other.rpartition(".")[0])
        if not is_plain_linear(linear):
            raise CheckpointError(f"{name} is listed as packed, but tied to {other}, which is no linear's")
        head = PackedLinear(stored, packed.shape, linear.bias is not None, module.weight.dtype, module.weight.device)
        head.bias = cast(nn.Linear, linear).bias
        for key in packed.specs:
            head.register_parameter(key, packed.get_parameter(key))
        model.set_submodule(other.rpartition(".")[0], head)
    if tied:
        _tie_stored(model, {own, *tied}, list(packed.specs))
    return True


def _tied_to(model: nn.Module, own: str) -> list[str]:
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
                setattr(module, table, _replaced(pairs, start, names, keys))


def _replaced(pairs: dict[str, str], start: str, names: set[str], keys: list[str]) -> dict[str, str]:
    """Return pairs of tied tensors, target -> source, with those of `names` replaced by one pair for each key."""
    replaced = {}
    for target, source in pairs.items():
        if {start + target, start + source} <= names:
            owners = target.removesuffix("weight"), source.removesuffix("weight")
            replaced.update({owners[0] + key: owners[1] + key for key in keys})
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
    for module in model.modules() if packed else ():
        if BEFORE in vars(module):
            own = vars(module).pop(BEFORE)  # None: the class says it
            vars(module).pop("_tied_weights_keys", None)
            owner = cast(Any, module)
            if own is not None:
                owner._tied_weights_keys = own
            owner.all_tied_weights_keys = owner.get_expanded_tied_weights_keys(all_submodels=True)
            owner.tie_weights()
