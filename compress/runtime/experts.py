"""Run the experts of a mixture-of-experts block as separate linears, so that each can be packed.

transformers holds the experts of a block in a few fused parameters (compress/runtime/expert_layouts.py). `Experts`
takes the place of such a module with children `<i>.gate_proj`, `<i>.up_proj`, `<i>.down_proj`, whose packed tensors
have these names on disk. All of them are matrices [out, in], gate and up apart, however the fused module holds them;
biases are those of the linears. What lies between up and down is computed by the fused module's own function. Experts
without a gate have no `gate_proj`, and those that are no more than a linear have `<i>.proj`.

Where `Experts.pruning` is set, a token goes without an expert that matters little to it: online dynamic pruning (ODP),
Huang et al. 2024, arXiv:2410.06270. `prune` says how; calib/expert_routing.py chooses the thresholds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.runtime import expert_layouts
from compress.runtime.expert_layouts import POST_NORM, ROUTED, SHARED, SORTED, ExpertLayout
from compress.runtime.grouped import ExpertRunner, GroupedExperts, is_static, run_in_turn
from compress.runtime.linear import PackedLinear, is_plain_linear
from compress.types import Pruning


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether the module holds the experts of a block in fused parameters, in any layout."""
    return expert_layouts.describe(module) is not None


def is_supported(module: nn.Module) -> bool:
    """Return whether a module holds fused experts in a layout that `Experts` computes."""
    return isinstance(expert_layouts.describe(module), ExpertLayout)


def layout_of(module: nn.Module) -> ExpertLayout:
    """Return the layout of a module for which `is_supported` is true."""
    layout = expert_layouts.describe(module)
    assert isinstance(layout, ExpertLayout), "the caller asks is_supported first"
    return layout


def prune(
    hidden_states: Tensor, index: Tensor, weights: Tensor, pruning: Pruning, experts: int
) -> tuple[Tensor, Tensor]:
    """Return the routing [tokens, top_k] without the pairs that are dropped: index `experts` and weight 0 there.

    A token loses the expert of its smallest weight where that is below `threshold` times its largest, and the others
    take over the share `taken` of that weight, in proportion: with 1, as published, the weights' sum stays what it was.
    Published for two experts of a token; of more than two at most one goes. Tokens with ||h||_1 of at least `protected`
    keep all, and so do those of whose experts another process computes some. What happens to a token depends on nothing
    but that token: generating gives what reading gives, whatever else is in the batch.
    """
    exact = weights.float()
    low, last = exact.min(-1, keepdim=True)
    dropped = low < pruning.threshold * exact.amax(-1, keepdim=True)  # [tokens, 1]
    dropped &= (index < experts).all(-1, keepdim=True)
    if pruning.protected is not None:
        dropped &= magnitude(hidden_states)[:, None] < pruning.protected
    gone = torch.zeros_like(index, dtype=torch.bool).scatter(-1, last, dropped)
    total = exact.sum(-1, keepdim=True)
    raised = (exact * (1 + pruning.taken * low / (total - low))).masked_fill(gone, 0).to(weights.dtype)
    return index.masked_fill(gone, experts), torch.where(dropped, raised, weights)


def magnitude(hidden_states: Tensor) -> Tensor:
    """Return ||h||_1 of each token, float32 [tokens]."""
    return hidden_states.float().abs().sum(-1)


@dataclass(frozen=True)
class ExpertTokens:
    """Which tokens an expert is given."""

    count: int  # of all tokens
    index: Tensor  # those of the expert, in its order, int64


class Experts(nn.ModuleDict):
    """Children "0", "1", ...: ModuleDict {gate_proj, up_proj, down_proj} of nn.Linear or PackedLinear.

    Beside them there may be a norm over what each expert gives. `len` counts the experts.
    """

    layout: ExpertLayout
    pruning: Pruning | None = None  # None: every token got all experts that the router chose
    _template: nn.Module  # the fused module without data

    @classmethod
    def from_fused(cls, fused: nn.Module) -> Experts:
        """Return experts whose linears are views of the parameters of `fused`, which may be on meta."""
        layout = layout_of(fused)
        experts = _KINDS[layout.call]()
        experts.layout = layout
        for i in range(layout.experts):
            linears = {}
            for part in layout.parts:
                weight = part.matrix(fused.get_parameter(part.parameter), layout.experts, i)
                bias = None if part.bias is None else part.vector(fused.get_parameter(part.bias), i)
                linears[part.projection] = _linear(weight, bias)
            experts[str(i)] = nn.ModuleDict(linears)
        if layout.has_post_norm:
            experts[POST_NORM] = fused.get_submodule(POST_NORM)
        # not registered as a child
        experts.__dict__["_template"] = _without_data(fused)
        return experts.train(fused.training)

    def __len__(self) -> int:
        return self.layout.experts

    def compute(
        self,
        number: int,
        x: Tensor,
        project: Callable[[str, Tensor], Tensor] | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Return what an expert gives for x [tokens, hidden].

        project: computes a projection of this name, in place of the expert's linears. scale [tokens, 1]: what the
        input of the last projection is multiplied with.
        """
        if project is None:
            linears = cast(nn.ModuleDict, self[str(number)])

            def project(name: str, x: Tensor) -> Tensor:
                return cast(Tensor, linears[name](x))

        *first, last = self.layout.projections
        if self.layout.gate is not None:
            x = self.layout.gate(self._template, *(project(name, x) for name in first))
        x = project(last, x if scale is None else x * scale)
        return self[POST_NORM](x) if self.layout.has_post_norm else x

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums over the experts, in the shape of hidden_states.

        hidden_states [..., hidden] of as many tokens as top_k_index and top_k_weights [tokens, top_k] have. Packed
        experts run together where they can (runtime/grouped.py). Otherwise these are the operations of the fused
        module's own loop, but gate and up are two products: equal to the bit where the matrix library sums a column
        alike for both widths, within 1e-6 of the largest value otherwise. On a GPU, where the loop is compiled or
        recorded in a graph, every expert is given all tokens.
        """
        shape, hidden_states = hidden_states.shape, hidden_states.flatten(0, -2)
        if self.pruning is not None:
            top_k_index, top_k_weights = prune(hidden_states, top_k_index, top_k_weights, self.pruning, len(self))
        routing = top_k_index, top_k_weights
        together = self._find_runner(hidden_states)
        if together is not None:
            norm = self[POST_NORM] if self.layout.has_post_norm else None
            gate = None if self.layout.gate is None else partial(self.layout.gate, self._template)
            return together.run(hidden_states, routing, gate, norm).view(shape)
        if is_static(hidden_states) and not self.layout.identities:
            return run_in_turn(hidden_states, routing, len(self), self.compute).view(shape)
        out = torch.zeros_like(hidden_states)
        for index in top_k_index.unique().tolist():
            if index >= len(self) + self.layout.identities:  # a token of another process, or a pair that is dropped
                continue
            token, position = torch.where(top_k_index == index)
            x = hidden_states[token]
            x = self.compute(index, x) if index < len(self) else x
            out.index_add_(0, token, (x * top_k_weights[token, position, None]).to(out.dtype))
        return out.view(shape)

    def _find_runner(self, x: Tensor) -> GroupedExperts | None:
        """Return what runs all experts together for such tokens; None: they are run one by one.

        What is compiled by torch uses what a call before has made.
        """
        linears = [[expert._modules[name] for name in self.layout.projections] for expert in self._experts()]
        runners: dict[tuple[int | None, ...], ExpertRunner] = self.__dict__.setdefault("_runners", {})
        levels = tuple([getattr(linear, "level", None) for each in linears for linear in each])
        known = runners.get(levels)
        if torch.compiler.is_compiling():
            usable = known is not None and known.dtype == x.dtype and not self._has_gradient(x)
            return known.together if known is not None and usable else None
        if self.layout.identities or self._has_gradient(x):
            return None
        if known is None or not known.is_current(linears, x.dtype):
            known = runners[levels] = ExpertRunner(linears, x.dtype)
        return known.together

    def _experts(self) -> Iterator[nn.Module]:
        return (self._modules[str(i)] for i in range(len(self)))

    def _has_gradient(self, x: Tensor) -> bool:
        """Tell whether a gradient reaches tokens or experts."""
        return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))

    def tokens(self, number: int, *inputs: Tensor) -> ExpertTokens:
        """Return which tokens an expert is given; inputs: those of `forward`."""
        return ExpertTokens(inputs[1].shape[0], torch.where(inputs[1] == number)[0])

    def is_partly_plain(self) -> bool:
        """Tell whether the weights of some experts are not packed."""
        names = (f"{i}.{part.projection}" for part in self.layout.parts for i in range(len(self)))
        return any(is_plain_linear(self.get_submodule(name)) for name in names)

    def fuse(self, dtype: torch.dtype) -> nn.Module:
        """Return the module that `from_fused` took, with the present weights in `dtype`; it cannot prune."""
        fused, device = _without_data(self._template), next(self.parameters(), torch.empty(0)).device
        for name, parameter in list(fused.named_parameters()):
            owner, _, key = name.rpartition(".")
            data = torch.zeros(parameter.shape, dtype=dtype, device=device)  # of identities there is nothing
            fused.get_submodule(owner).register_parameter(key, nn.Parameter(data))
        if self.layout.has_post_norm:
            fused.set_submodule(POST_NORM, copy.deepcopy(self[POST_NORM]).to(dtype))
        with torch.no_grad():
            for part in self.layout.parts:
                for i in range(len(self)):
                    linear = self.get_submodule(f"{i}.{part.projection}")
                    matrix = part.matrix(fused.get_parameter(part.parameter), len(self), i)
                    matrix.copy_(_weight(linear, dtype))
                    if part.bias is not None:
                        part.vector(fused.get_parameter(part.bias), i).copy_(cast(Tensor, linear.bias))
        return fused.train(self.training)


class SortedExperts(Experts):
    """Experts that are given rows in the order of the experts, and know neither tokens nor their weights."""

    def forward(self, rows: Tensor, sizes: list[int] | None = None) -> Tensor:  # type: ignore[override]
        """Return what the experts give for their rows, [rows, out].

        rows [rows, in]: first those of expert 0; sizes: how many rows each expert has. None: all as many, and a row of
        zeros stands for a token that does not go to this expert, which is not computed.
        """
        parts = rows.split(sizes if sizes is not None else rows.shape[0] // len(self))
        if sizes is not None or self._has_bias():
            return torch.cat([self.compute(i, part) for i, part in enumerate(parts)])
        outputs = []
        for i, part in enumerate(parts):
            chosen_tokens = part.any(-1).nonzero()[:, 0]
            outputs.append(torch.zeros_like(part).index_copy_(0, chosen_tokens, self.compute(i, part[chosen_tokens])))
        return torch.cat(outputs)

    def tokens(self, number: int, *inputs: Tensor) -> ExpertTokens:
        if len(inputs) > 1:
            raise UnsupportedModelError(
                "experts are given rows in an order of their own: which tokens they are is not known; set "
                "calibration.importance to none"
            )
        part = inputs[0].chunk(len(self))[number]
        every = torch.arange(part.shape[0], device=part.device)
        return ExpertTokens(part.shape[0], every if self._has_bias() else every[part.any(-1)])

    def _has_bias(self) -> bool:
        return any(part.bias is not None for part in self.layout.parts)


class SharedExperts(Experts):
    """Experts that are given all tokens."""

    def forward(self, hidden_states: Tensor, gammas: Tensor) -> Tensor:  # type: ignore[override]
        """Return the sum of what all experts give, in the shape of hidden_states.

        hidden_states [..., hidden]; gammas [..., experts]: how much each counts, before its last projection.
        """
        x, scales = hidden_states.flatten(0, -2), gammas.reshape(-1, len(self))
        outputs = [self.compute(i, x, scale=scales[:, i, None]).float() for i in range(len(self))]
        return torch.stack(outputs).sum(0).to(x.dtype).view(hidden_states.shape)

    def tokens(self, number: int, *inputs: Tensor) -> ExpertTokens:
        count = inputs[0].shape[:-1].numel()
        return ExpertTokens(count, torch.arange(count, device=inputs[0].device))


_KINDS: dict[str, type[Experts]] = {ROUTED: Experts, SORTED: SortedExperts, SHARED: SharedExperts}


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    return linear


def _weight(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    if isinstance(linear, PackedLinear):
        return linear.dequantize(dtype)
    return linear.get_parameter("weight").detach().to(dtype)


def _without_data(fused: nn.Module) -> nn.Module:
    """Return a copy with its parameters on meta; the model's configuration stays shared."""
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta")) for p in fused.parameters()}
    config = getattr(fused, "config", None)
    memo[id(config)] = config
    return copy.deepcopy(fused, memo)
