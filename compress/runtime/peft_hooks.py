"""Let PEFT know packed linears: `get_peft_model(model, LoraConfig(target_modules="all-linear"))` works on them.

PEFT finds the layers that it wraps by their class, and has no place to register one. So two of its functions are
wrapped when it has been imported (compress/autoload.py): the one that every adapter passes on its way into a model,
and `prepare_model_for_kbit_training`, which would convert stored tensors to float32. Models without packed linears go
through both as before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners import tuners_utils
from peft.tuners.lora.config import LoraConfig
from peft.utils import other
from torch import nn

if TYPE_CHECKING:
    from compress.runtime.linear import PackedLinear

RESOLVE, PREPARE = "_maybe_include_all_linear_layers", "prepare_model_for_kbit_training"
ALL = "all-linear"


def install() -> None:
    """Wrap the functions; again does no harm."""
    resolve = getattr(tuners_utils, RESOLVE)
    if not hasattr(resolve, "__wrapped__"):
        _replace(RESOLVE, resolve, _with_packed(resolve))
        prepare = getattr(other, PREPARE)
        _replace(PREPARE, prepare, _keeping_stored(prepare))


def _replace(name: str, old: Any, new: Any) -> None:
    """Set a function wherever PEFT has imported it by now."""
    for module in [module for key, module in sys.modules.items() if key.partition(".")[0] == "peft"]:
        if vars(module).get(name) is old:
            setattr(module, name, new)


def _packed_linears(model: nn.Module) -> dict[str, PackedLinear]:
    """Return the packed linears by name; none, and nothing imported, where no packed model was loaded."""
    if "compress.runtime.linear" not in sys.modules:
        return {}
    from compress.runtime.linear import PackedLinear

    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def _with_packed(resolve: Callable[[Any, nn.Module], Any]) -> Callable[[Any, nn.Module], Any]:
    """Return `resolve`, which lists the modules of "all-linear", with packed linears but the output head."""

    @functools.wraps(resolve)
    def resolve_with_packed(peft_config: Any, model: nn.Module) -> Any:
        target_modules = getattr(peft_config, "target_modules", None)
        config = resolve(peft_config, model)
        packed = _packed_linears(model)
        if not packed:
            return config
        from compress.runtime.linear import PackedLinear
        from compress.runtime.lora import PackedLoraLinear

        if isinstance(config, LoraConfig):
            layer = functools.partial(PackedLoraLinear, dtype=_dtype(model))
            config._register_custom_module({PackedLinear: layer})  # called like a class
        if isinstance(target_modules, str) and target_modules.lower() == ALL:
            config.target_modules |= packed.keys() - _left_out(model)
        return config

    return resolve_with_packed


def _left_out(model: Any) -> set[str]:
    """Return the names of the output head, and of what already is the base of an adapter."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    named = list(model.named_modules())
    inner = (
        f"{name}.{part}"
        for name, module in named
        if isinstance(module, tuners_utils.BaseTunerLayer)
        for part, _ in module.named_modules()
    )
    return {name for name, module in named if head is not None and module is head} | set(inner)


def _keeping_stored(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return `prepare` with the stored tensors kept as they are, and gradient checkpointing as for bitsandbytes."""

    @functools.wraps(prepare)
    def prepare_around_stored(model: Any, use_gradient_checkpointing: bool = True, *values: Any, **options: Any) -> Any:
        if not _packed_linears(model):
            return prepare(model, use_gradient_checkpointing, *values, **options)
        from compress.runtime.linear import PackedModule

        modules = [module for module in model.modules() if isinstance(module, PackedModule)]
        kept = [(parameter, parameter.data) for m in modules for parameter in map(m.get_parameter, m.specs)]
        prepare(model, False, *values, **options)
        for parameter, data in kept:
            parameter.data = data
        if use_gradient_checkpointing:
            settings = values[0] if values else options.get("gradient_checkpointing_kwargs")
            if (settings or {}).get("use_reentrant", True):
                model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings or {})
        return model

    return prepare_around_stored


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the type that a model computes in, as its configuration has it."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return named if isinstance(named, torch.dtype) else torch.float32


install()
