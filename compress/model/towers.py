"""Find what lies outside of the blocks that text runs through: linears of towers and skipped blocks, and tables.

The tables are token embeddings and output head, which may be one, and what else is looked up and large: embeddings of
each layer, of n-grams, of how a token looks or sounds.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import NamedTuple

from torch import nn

from compress.model.skeleton import MIN_FEATURES, Skeleton
from compress.runtime import embedding
from compress.runtime.linear import is_plain_linear
from compress.storage.checkpoint import Readable
from compress.types import LinearSpec

MIN_TABLE_SHARE = 0.25  # tables of less than this share of the token embeddings (positions) stay as they are
NO_BLOCK = -1  # the number of the block of a weight in none of those that text runs through


def tower_linears(skeleton: Skeleton) -> tuple[list[LinearSpec], dict[str, str]]:
    """Return the linears in model order, and those that cannot be quantized with the reason."""
    specs: list[LinearSpec] = []
    kept: dict[str, str] = {}
    for name, module in skeleton.model.named_modules():
        if not skeleton.is_off_text_path(name) or not is_plain_linear(module):
            continue
        path, _, own = name.rpartition(".")
        parent = skeleton.model.get_submodule(path)
        if _reads_weight(parent, own):
            kept[name] = f"its weight is read by the {type(parent).__name__} around it"
        else:
            rows, columns = module.get_parameter("weight").shape
            skeleton.add(LinearSpec(name, (rows, columns), skeleton.dtype, NO_BLOCK, name), specs, kept)
    return specs, kept


def is_tower(skeleton: Skeleton, name: str) -> bool:
    """Return whether a linear of `tower_linears` is in a tower, not in a decoder block."""
    return not name.startswith(skeleton.in_blocks)


def _reads_weight(parent: nn.Module, child: str) -> bool:
    """Return whether the class of a module reads the weight of a child: nothing is run that would show it."""
    return re.search(rf"\bself\.{child}\.weight\b", inspect.getsource(type(parent))) is not None


class Table(NamedTuple):
    """A table [tokens, hidden]; of a tied one the spec has the name of the embeddings."""

    spec: LinearSpec
    roles: tuple[str, ...]  # "embeddings", "head", or both where it is tied
    names: tuple[str, ...]  # of all modules that hold it
    sources: tuple[Readable, ...]  # its weight, under every name that the checkpoint stores it by
    refused: str | None  # why it cannot be packed
    is_other: bool = False  # neither of tokens nor the head; it has the role "embeddings"


def find_tables(skeleton: Skeleton) -> list[Table]:
    """Return the tables of a model: one if embeddings and head are tied, two if not; other large ones behind them."""
    model = skeleton.model
    modules = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    roles_of: dict[int, tuple[str, ...]] = {}  # identity of a weight -> its roles
    for role, module in modules.items():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2:
            roles_of[id(weight)] = (*roles_of.get(id(weight), ()), role)
    tables = [_table(skeleton, roles, modules) for roles in roles_of.values()]
    for name, module in model.named_modules():
        is_outside = not name.startswith(skeleton.in_blocks) and not skeleton.is_off_text_path(name)
        is_other = is_outside and isinstance(module, nn.Embedding) and id(module.weight) not in roles_of
        if is_other and tables and module.weight.numel() >= MIN_TABLE_SHARE * tables[0].spec.numel:
            roles_of[id(module.weight)] = ("embeddings",)  # another module may hold it, too
            other = _table(skeleton, ("embeddings",), {"embeddings": module, "head": None})
            tables.append(other._replace(is_other=True))
    return tables


def join_tables(embeddings: Table, head: Table) -> Table:
    """Return the table that embeddings and head were before the head was untied."""
    names = (*embeddings.names, *head.names)
    spec = dataclasses.replace(embeddings.spec, parameters=tuple(f"{name}.weight" for name in names))
    refused = embeddings.refused or head.refused
    return Table(spec, (*embeddings.roles, *head.roles), names, (*embeddings.sources, *head.sources), refused)


def _table(skeleton: Skeleton, roles: tuple[str, ...], modules: dict[str, nn.Module | None]) -> Table:
    first = modules[roles[0]]
    assert first is not None, "it has a weight"
    weight, named = first.get_parameter("weight"), skeleton.model.named_parameters(remove_duplicate=False)
    weights = [name for name, parameter in named if parameter is weight]
    names = [name for name, module in skeleton.model.named_modules() if module is first]
    names += [name.removesuffix(".weight") for name in weights if name != f"{names[0]}.weight"]
    sources = tuple(stored for name in weights for stored in skeleton.sources.get(name, []))
    shape = (weight.shape[0], weight.shape[1])
    spec = LinearSpec(names[0], shape, skeleton.dtype, NO_BLOCK, names[0])
    return Table(spec, roles, tuple(names), sources, _why_refused(skeleton.model, roles, modules, names, sources))


def _why_refused(
    model: nn.Module,
    roles: tuple[str, ...],
    modules: dict[str, nn.Module | None],
    names: list[str],
    sources: tuple[Readable, ...],
) -> str | None:
    """Return why a table cannot be packed, None if it can."""
    shape = model.get_parameter(f"{names[0]}.weight").shape
    held = [model.get_submodule(name) for name in names]
    if sum(not isinstance(module, nn.Embedding) for module in held) != ("head" in roles):
        return f"shared by {', '.join(names)}"
    if any(source.shape != tuple(shape) for source in sources) or not sources:
        return "its weight is not stored as it is"
    if min(shape) < MIN_FEATURES:
        return f"narrower than {MIN_FEATURES} features"
    head, embeddings = modules["head"], modules["embeddings"]
    if "head" in roles and not (head is not None and is_plain_linear(head)):
        return "a head with a forward pass of its own"
    tables = [module for module in held if isinstance(module, nn.Embedding)]
    if "embeddings" in roles and (embeddings is None or None in [embedding.constants(each, model) for each in tables]):
        return "an embedding with a forward pass of its own"
    return None
