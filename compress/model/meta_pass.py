"""Run a model's forward pass on the meta device, without weights and data, to see what feeds what.

What was found is remembered: a plan, an allocation and a run of one process ask the same of one configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from compress.model.inputs import arguments, has_two_stacks
from compress.model.load import empty_model
from compress.runtime import expert_layouts, linears
from compress.runtime.expert_layouts import ExpertLayout
from compress.runtime.experts import is_fused_experts

PROBE_TOKENS = 8
READ = "the model's own code reads its weight"  # why a weight is kept
# what a forward pass raises that depends on data which the meta device does not have
NEEDS_DATA = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class SkippedExperts(nn.Module):
    """The place of a fused experts module in a forward pass without data, on which its routing depends."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.layout = expert_layouts.describe(real)
        self.width: int | None = None  # of the outputs; None: as wide as the inputs
        if isinstance(self.layout, ExpertLayout):
            self.width, _ = self.layout.shape(real, self.layout.parts[-1])

    def forward(self, hidden_states: Tensor, *routing: Tensor, **others: Tensor) -> Tensor:
        return hidden_states.new_empty(*hidden_states.shape[:-1], self.width or hidden_states.shape[-1])


class WeightReadError(AttributeError):
    """Stop a forward pass that reads the weight of a packed linear; asking whether there is one is no error."""


class Unread(nn.Module):
    """The place of a packed linear or of experts in a forward pass without data; it has no weight to be read.

    takes_none: who asks goes on without one.
    """

    def __init__(self, name: str, real: nn.Module, takes_none: bool = False) -> None:
        super().__init__()
        self.name, self.bias = name, getattr(real, "bias", None)
        self.in_features, self.out_features = getattr(real, "in_features", None), getattr(real, "out_features", None)
        if takes_none:
            vars(self)["weight"] = None

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise WeightReadError(self.name)
        return super().__getattr__(name)

    def forward(self, x: Tensor, *routing: Tensor) -> Tensor:
        return torch.empty_like(x) if self.out_features is None else x.new_empty(*x.shape[:-1], self.out_features)


class UnreadTable(nn.Module):
    """The place of a packed embedding in a forward pass without data."""

    def __init__(self, name: str, columns: int, dtype: torch.dtype, padding_idx: int | None) -> None:
        super().__init__()
        self.name, self.columns, self.dtype, self.padding_idx = name, columns, dtype, padding_idx

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise WeightReadError(self.name)
        return super().__getattr__(name)

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids.new_empty(*input_ids.shape, self.columns, dtype=self.dtype)


def without_experts(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model on the meta device whose forward pass needs no data."""
    with torch.device("meta"):
        model = empty_model(config, dtype).eval()
    for name, module in list(model.named_modules()):
        if is_fused_experts(module):
            model.set_submodule(name, SkippedExperts(module))
    for name, module in linears.foreign(model):
        model.set_submodule(name, linears.as_linear(module))
    return model


@dataclass(frozen=True)
class _Asked:
    """What the result of a pass depends on: equal ones give the same."""

    kind: type[PretrainedConfig]
    text: str  # of the configuration
    dtype: torch.dtype
    config: PretrainedConfig = field(compare=False)

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> _Asked:
        values = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
        return cls(type(config), json.dumps(values, sort_keys=True, default=str), dtype, config)

    def model(self) -> PreTrainedModel:
        return without_experts(self.config, self.dtype)


@dataclass(frozen=True)
class Flow:
    """What a forward pass on text goes through; empty for a model whose forward pass needs data."""

    shared: Mapping[str, str] = field(default_factory=dict)  # linear -> the first linear that reads the same tensor
    called: Set[str] = frozenset()  # names of modules


def flow(config: PretrainedConfig, dtype: torch.dtype) -> Flow:
    """Return what feeds what, by a forward pass on the meta device.

    A model whose forward pass cannot run without data has no linears that share statistics, which costs memory and time
    but changes no result.
    """
    return _flow(_Asked.of(config, dtype))


@lru_cache(maxsize=8)
def _flow(asked: _Asked) -> Flow:
    model, called = asked.model(), set[str]()
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    alive: list[Tensor] = []  # ids of freed tensors would be used again

    def record(name: str, is_linear: bool, inputs: tuple[Tensor, ...]) -> None:
        called.add(name)
        if is_linear and inputs:  # not called by keyword
            alive.append(inputs[0])
            shared[name] = first.setdefault(id(inputs[0]), name)

    for name, module in model.named_modules():
        hook = partial(record, name, isinstance(module, nn.Linear))
        module.register_forward_pre_hook(lambda _, inputs, hook=hook: hook(inputs))
    return Flow() if run_without_data(model) is not None else Flow(shared, called)


def read_weights(config: PretrainedConfig, dtype: torch.dtype, names: Iterable[str]) -> set[str]:
    """Return those of the named linears and embeddings whose weight the model's own code reads, by a meta pass.

    Such a weight cannot be packed. Linears of other blocks with the same name are taken along. What lies behind
    something that needs data is not seen.
    """
    return set(_read_weights(_Asked.of(config, dtype), tuple(names)))


@lru_cache(maxsize=8)
def _read_weights(asked: _Asked, names: Sequence[str]) -> frozenset[str]:
    model, dtype, read_names = asked.model(), asked.dtype, set[str]()
    real = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    replaced = {name: real[name] for name in names if name in real}
    for name, module in replaced.items():
        if isinstance(module, nn.Embedding):
            model.set_submodule(name, UnreadTable(name, module.embedding_dim, dtype, module.padding_idx))
        else:
            path, _, own = name.rpartition(".")
            takes_none = linears.takes_no_weight(model.get_submodule(path), own)
            model.set_submodule(name, Unread(name, module, takes_none))
    while isinstance(error := run_without_data(model), WeightReadError):
        kind = _without_numbers(str(error))
        for name in [name for name in replaced if _without_numbers(name) == kind]:
            model.set_submodule(name, replaced.pop(name))
            read_names.add(name)
    return frozenset(read_names)


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def run_without_data(model: PreTrainedModel) -> Exception | None:
    """Run the forward pass of a model on the meta device; return what stopped it, None if nothing did."""
    # with a cache, transformers does not look into the (absent) position values for packed sequences
    if has_two_stacks(model):
        return _run_two_stacks(model)
    error = _run(model, use_cache=True)
    if error is None or (text := model.config.get_text_config()) is model.config:
        return error
    return _run(model, past_key_values=DynamicCache(config=text))  # which some wrappers need for themselves


def _run_two_stacks(model: PreTrainedModel) -> Exception | None:
    """Run an encoder-decoder without a cache; of all attention only the plain one never looks into its masks."""
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        return _run(model, use_cache=False)
    finally:
        model.config._attn_implementation = before


def _run(model: PreTrainedModel, **options: Any) -> Exception | None:
    try:
        tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
        model(**arguments(model, tokens), **options)
    except NEEDS_DATA as error:
        return error
    return None
