"""Skip an attention, an MLP or the experts of a block whose result is zeros, because its last linear was dropped.

No family is known by name. A module that holds a dropped linear (format `zero`, without a bias) runs once as it is. If
what it returns is what that linear gave, later calls return zeros without running it. A module of experts is skipped
where the last linears of all of them were dropped; the router runs, since models return what it chose.

An attention that is skipped stores zeros in the cache (compress/runtime/zeros.py); nothing reads them. What a call
does with the cache in another way (the states of a recurrence) is not skipped, nor is training, nor what torch
compiles, nor a call that is asked for the weights of attention. Then the zeros are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compress.runtime import zeros
from compress.runtime.experts import Experts
from compress.runtime.step.structure import gives_zeros, is_reading
from compress.runtime.zeros import ResultShape, StoredShape

MARK = "_compress_skipped"  # attribute of modules that may be skipped, and of their classes' forward functions


class Skipped:
    """What is known of a module that holds dropped linears. A copy begins anew."""

    def __init__(self) -> None:
        self.result: ResultShape | None = None  # None: the module has not run yet
        self.stored: StoredShape | None = None
        self.is_refused = False

    def __reduce__(self) -> Any:
        return Skipped, ()

    def forward(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the module's own forward pass returns, without running it where that is known."""
        x = zeros.states_of(args, kwargs)
        if self.is_refused or not isinstance(x, Tensor) or not _is_usual(module, kwargs):
            return original(module, *args, **kwargs)
        cache = zeros.cache_of(args, kwargs)
        if self.result is None or (cache is not None and self.stored is None):
            return self._run(module, original, args, kwargs, cache)
        if cache is not None and self.stored is not None:
            if zeros.evicts(cache):
                return original(module, *args, **kwargs)
            self.stored.append(cache, x)
        return self.result.zeros(x)

    def _run(
        self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: dict[str, Any], cache: Any
    ) -> Any:
        """Run the module and see whether it may be skipped from now on."""
        given = list[Tensor]()
        hooks = [
            child.register_forward_hook(lambda _, inputs, output: given.append(output))
            for child in module.children()
            if gives_zeros(child)
        ]
        try:
            with zeros.recorded_updates(cache) as updates:
                result = original(module, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        first, others = zeros.first_and_others(result)
        is_last = isinstance(module, Experts) or any(first is each for each in given)
        is_stored = cache is None or len(updates) == 1
        is_shaped = zeros.states_of(args, kwargs).shape[:-1] == first.shape[:-1] and others in ((), (None,))
        self.is_refused = not (is_last and is_stored and is_shaped)
        self.result = zeros.shape_of(result)
        self.stored = updates[0] if updates else None
        return result


def _is_usual(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether nothing but the result of a call is wanted."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    is_seen = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
    gives_weights = is_seen and hasattr(module, "layer_idx")  # those of attention, which somebody may look at
    return not (module.training or is_traced or gives_weights or is_reading())


def install(model: nn.Module) -> None:
    """Let a model skip what only gives zeros; again does no harm."""
    for module in list(model.modules()):
        if _may_be_skipped(module):
            zeros.let_class_ask(type(module), MARK)
            vars(module).setdefault(MARK, Skipped())


def remove(model: nn.Module) -> None:
    """Let a model run everything: what was dropped is about to become plain."""
    for module in model.modules():
        vars(module).pop(MARK, None)


def _may_be_skipped(module: nn.Module) -> bool:
    if isinstance(module, Experts):
        last = module.layout.projections[-1]
        is_plain = not module.layout.has_post_norm and not module.layout.identities
        return is_plain and all(gives_zeros(module.get_submodule(f"{i}.{last}")) for i in range(len(module)))
    return not isinstance(module, nn.ModuleDict | nn.ModuleList) and any(map(gives_zeros, module.children()))
