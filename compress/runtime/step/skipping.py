"""Skip an attention, an MLP or the experts of a block whose result is zeros, because its last linear was dropped.

No family is known by name. A module that holds a dropped linear (format `zero`, without a bias) runs once as it is. If
what it returns is what that linear gave, later calls return zeros without running it. A module of experts is skipped
where the last linears of all of them were dropped; the router runs, since models return what it chose.

The cache stays as it would be: positions, masks, sliding windows and saved caches ask any layer for its tokens. So an
attention that is skipped stores zeros in the shape of its keys and values; nothing reads them. What a call does with
the cache in another way (the states of a recurrence) is not skipped, nor is training, nor what torch compiles, nor a
call that is asked for the weights of attention. Then the zeros are computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compress.runtime.experts import Experts
from compress.runtime.step.structure import gives_zeros, is_reading

MARK = "_compress_skipped"  # attribute of modules that may be skipped, and of their classes' forward functions


class Skipped:
    """What is known of a module that holds dropped linears. A copy begins anew."""

    def __init__(self) -> None:
        self.width = 0  # channels of the result; 0: the module has not run yet, or cannot be skipped
        self.others: int | None = None  # results beside the first one, all None; None: the result is no tuple
        self.stored: tuple[int, tuple[int, int], tuple[int, int]] | None = None  # layer of a cache, and heads and width
        # of its keys and values
        self.is_refused = False

    def __reduce__(self) -> Any:
        return Skipped, ()

    def forward(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what the module's own forward pass returns, without running it where that is known."""
        x = args[0] if args else kwargs.get("hidden_states")
        if self.is_refused or not isinstance(x, Tensor) or not _is_usual(module, kwargs):
            return original(module, *args, **kwargs)
        cache = next((each for each in (*args, *kwargs.values()) if hasattr(each, "get_seq_length")), None)
        if not self.width or (cache is not None and self.stored is None):
            return self._run(module, original, args, kwargs, cache)
        if cache is not None and self.stored is not None:
            layer, keys, values = self.stored
            if any(getattr(each, "is_told_of_passes", False) for each in cache.layers):  # they evict by what it reads
                return original(module, *args, **kwargs)
            cache.update(*(x.new_zeros(x.shape[0], heads, x.shape[1], width) for heads, width in (keys, values)), layer)
        y = x.new_zeros(*x.shape[:-1], self.width)
        return y if self.others is None else (y, *[None] * self.others)

    def _run(
        self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: dict[str, Any], cache: Any
    ) -> Any:
        """Run the module and see whether it may be skipped from now on."""
        given, updates = list[Tensor](), list[Any]()
        hooks = [
            child.register_forward_hook(lambda _, inputs, output: given.append(output))
            for child in module.children()
            if gives_zeros(child)
        ]
        if cache is not None:
            update = cache.update

            def record(keys: Tensor, values: Tensor, layer: int, *rest: Any, **more: Any) -> Any:
                updates.append((layer, (keys.shape[1], keys.shape[-1]), (values.shape[1], values.shape[-1])))
                return update(keys, values, layer, *rest, **more)

            cache.update = record
        try:
            result = original(module, *args, **kwargs)
        finally:
            if cache is not None:
                del cache.update
            for hook in hooks:
                hook.remove()
        first, *others = result if isinstance(result, tuple) else (result,)
        is_last = isinstance(module, Experts) or any(first is each for each in given)
        is_stored = cache is None or len(updates) == 1
        x = args[0] if args else kwargs["hidden_states"]
        self.is_refused = not (is_last and is_stored and x.shape[:-1] == first.shape[:-1] and others in ([], [None]))
        self.width, self.others = first.shape[-1], len(others) if isinstance(result, tuple) else None
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
            _let_class_ask(type(module))
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


def _let_class_ask(kind: Any) -> None:
    """Let the forward function of a class ask each module for the mark; those without it run as before."""
    original: Any = kind.forward
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        known = vars(self).get(MARK)
        return original(self, *args, **kwargs) if known is None else known.forward(self, original, args, kwargs)

    setattr(forward, MARK, True)
    kind.forward = forward
