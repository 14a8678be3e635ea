"""Turn the tensors of a model into those that llama.cpp has: under other names, cut, in another order, computed.

Rules are data (`edits` in gguf.yaml). Of those of an architecture the first counts whose `match` is found in the name:

    match: an expression
    into: what takes its place, a name for each part; left out: the tensor keeps its name
    order: how rows are cut or reordered, a function of ORDERS
    columns: the same of columns
    axis: the dimension of the rows, 0 if left out
    turned: the last two dimensions change places first (of plain tensors; packed ones are stored as [out, in])
    value: what is computed of the numbers, a function of VALUES; packed weights have none

Packed weights are moved by whole rows, and by whole groups of columns: their codes and scales stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from compress.errors import ExportError
from compress.export.targets.gguf.settings import head_size
from compress.export.weights import IntWeight, StoredWeight
from compress.importers.source import Decoded
from compress.storage.checkpoint import Readable

Order = Callable[[PretrainedConfig, int], list[Tensor]]  # (settings, rows) -> which rows each part has
Source = Readable | StoredWeight


@dataclass(frozen=True)
class MovedWeight(StoredWeight):
    """A packed weight of which a tensor of the file has these rows and columns, in this order (None: all)."""

    order: Tensor | None = None
    columns: Tensor | None = None

    def integers(self) -> IntWeight:
        """Return codes, scales and zeros with the columns in their order, all rows as they are stored."""
        weight = super().integers()
        if self.columns is None:
            return weight
        steps = self.columns[:: weight.group_size] // weight.group_size
        groups = steps if weight.scales.shape[1] > 1 else torch.zeros(1, dtype=torch.long)
        zeros = None if weight.zeros is None else weight.zeros[:, groups]
        return replace(weight, codes=weight.codes[:, self.columns], scales=weight.scales[:, groups], zeros=zeros)

    def not_moved(self) -> str | None:
        """Return why its columns cannot be put into their order, and what to do; None if they can."""
        if self.columns is None:
            return None
        group, steps = self.stored.params.group(self.shape[1]) if self.stored.format == "int" else 0, self.columns
        blocks = steps.view(-1, group) if group and self.shape[1] % group == 0 else None
        if blocks is None or (group < self.shape[1] and bool((blocks.diff(dim=1) != 1).any())):
            return (
                f"{self.name} has its columns in another order there, by heads, which its groups do not follow; give "
                "it a rule with a method of integers (gptq, rtn) and a group_size that divides a head"
            )
        return None


def apply(
    rules: Iterable[Mapping[str, Any]], config: PretrainedConfig, named: Mapping[str, Source]
) -> dict[str, Source]:
    """Return the tensors by their names after the rules; ExportError for packed ones with no such form."""
    made: dict[str, Source] = {}
    for name, source in named.items():
        rule = next((rule for rule in rules if re.search(rule["match"], name)), None)
        made |= {name: source} if rule is None else _edit(rule, config, name, source)
    return made


def _edit(rule: Mapping[str, Any], config: PretrainedConfig, name: str, source: Source) -> dict[str, Source]:
    names = [re.sub(rule["match"], into, name) for into in rule.get("into", ["\\g<0>"])]
    rows, columns = ORDERS[rule.get("order", "kept")], ORDERS[rule.get("columns", "kept")]
    if isinstance(source, StoredWeight):
        if "value" in rule:
            raise ExportError(f"{source.name} is computed anew, which no packed weight is; leave it unquantized")
        (moved,) = columns(config, source.shape[1]) if "columns" in rule else (None,)
        orders = rows(config, source.shape[0]) if "order" in rule else [None]
        own = {field.name: getattr(source, field.name) for field in fields(StoredWeight)}
        weights = {
            new: MovedWeight(**{**own, "name": new.removesuffix(".weight")}, order=order, columns=moved)
            for new, order in zip(names, orders, strict=True)
        }
        if reason := next(iter(weights.values())).not_moved():
            raise ExportError(reason)
        return {**weights}
    axis, value = rule.get("axis", 0), VALUES[rule.get("value", "same")]

    def turn(values: Tensor) -> Tensor:
        values = value(values.transpose(-1, -2) if rule.get("turned") else values)
        (moved,) = columns(config, values.shape[-1]) if "columns" in rule else (None,)
        return values if moved is None else values[..., moved]

    whole = turn(torch.empty(source.shape, dtype=source.dtype, device="meta"))
    orders = rows(config, whole.shape[axis]) if "order" in rule else [None]
    return {new: _part(source, new, turn, order, axis, whole) for new, order in zip(names, orders, strict=True)}


def _part(
    source: Readable, name: str, turn: Callable[[Tensor], Tensor], order: Tensor | None, axis: int, whole: Tensor
) -> Decoded:
    """Return the part of a plain tensor that has these rows, made when it is read."""

    def make(values: Tensor) -> Tensor:
        return values if order is None else values.index_select(axis, order.to(values.device))

    shape = tuple(make(whole).shape)
    return Decoded(
        name, whole.dtype, shape, source.sources, lambda a, b: make(turn(source.read()))[a:b], max(1, shape[0])
    )


def _all_rows(config: PretrainedConfig, count: int) -> list[Tensor]:
    return [torch.arange(count)]


def _halves(config: PretrainedConfig, count: int) -> list[Tensor]:
    """Return the first half, and the second: gate and up."""
    return list(torch.arange(count).chunk(2))


def _alternating(config: PretrainedConfig, count: int) -> list[Tensor]:
    """Return every other row, and the others: gate and up."""
    return [torch.arange(0, count, 2), torch.arange(1, count, 2)]


def _pairs(config: PretrainedConfig, count: int) -> list[Tensor]:
    """Return the rows of queries or keys with the two halves of each rotary pair side by side."""
    return [torch.arange(count).view(-1, 2, head_size(config) // 2).transpose(1, 2).flatten()]


def _thirds(config: PretrainedConfig, count: int) -> list[Tensor]:
    """Return the rows of queries, keys and values, which a model has head by head, one behind the other."""
    return [torch.arange(count).view(config.num_attention_heads, 3, -1).transpose(0, 1).flatten()]


def _value_heads(config: PretrainedConfig, count: int) -> list[Tensor]:
    """Return the rows of value heads, which a model has key head by key head: one of each in turn."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return [torch.arange(count).view(keys, values // keys, -1).transpose(0, 1).flatten()]


def _value_heads_last(config: PretrainedConfig, count: int) -> list[Tensor]:
    """The same where the rows of queries and keys come first."""
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return [torch.cat([torch.arange(first), first + _value_heads(config, count - first)[0]])]


def _key_heads(config: PretrainedConfig, count: int) -> list[Tensor]:
    """Return the rows of queries, keys and values, and those of their gate, which a model has by key head."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    value = values // keys * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim] * 2 + [value] * 2
    query, key, value_rows, gate = torch.arange(count).view(keys, -1).split(sizes, 1)
    return [torch.cat([query.flatten(), key.flatten(), value_rows.flatten()]), gate.flatten()]


ORDERS: dict[str, Order] = {
    **{"kept": _all_rows, "halves": _halves, "alternating": _alternating, "pairs": _pairs, "thirds": _thirds},
    **{"value_heads": _value_heads, "value_heads_last": _value_heads_last, "key_heads": _key_heads},
}
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "same": lambda values: values,
    "flat": lambda values: values.squeeze(),
    "minus_exp": lambda values: -values.float().exp(),
    "plus_one": lambda values: values.float() + 1,
}
