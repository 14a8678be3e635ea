"""Load a model at a level of its weights, and change the level of a loaded one (compress/formats/levels.py).

    model = AutoModelForCausalLM.from_pretrained(directory, level=4)   # reads and keeps what is stored of that level
    model = AutoModelForCausalLM.from_pretrained(directory)            # all levels
    model.levels                                                       # (4, 8)
    model.set_level(4)                                                 # None: the whole weights
    with at_level(model, 4): ...

The keyword is taken out before transformers asks what it is, and goes into the "quantization_config" of the checkpoint
as `level`, which a config.json may have, too: a directory with the same weights is then that level. What is listed
there is what is loaded, so that saving writes a checkpoint of the level. A model that was loaded whole is saved whole,
at whatever level it computes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from compress import formats
from compress.errors import CheckpointError, shown
from compress.formats import levels as stored_levels
from compress.formats import stored
from compress.runtime.linear import PackedModule
from compress.storage.paths import METHOD
from compress.types import Stored

READ_BY_FORMAT = ("format", "params")  # keys of a listed module that differ between levels
ANY_SHAPE = (1, 1)  # names of stored tensors do not depend on it


def take_keyword() -> None:
    """Let `from_pretrained(directory, level=4)` reach the configuration of packed models; again does no harm."""
    stock: Any = PreTrainedConfig.from_dict.__func__  # type: ignore[attr-defined]
    if getattr(stock, "takes_level", False):
        return

    @functools.wraps(stock)
    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        packed = config_dict.get("quantization_config")
        if "level" in kwargs and isinstance(packed, dict) and packed.get("quant_method") == METHOD:
            config_dict = {**config_dict, "quantization_config": {**packed, "level": kwargs.pop("level")}}
        return stock(cls, config_dict, **kwargs)

    from_dict.takes_level = True  # type: ignore[attr-defined]
    PreTrainedConfig.from_dict = classmethod(from_dict)  # type: ignore[assignment,method-assign]


def choose(config: Any, level: int) -> None:
    """Make a `CompressConfig` list its modules as they are stored at a level; CheckpointError for one it does not have.

    `config.left_out` then has a pattern of the names of tensors that the level leaves out of some modules.
    """
    whole = {name: _read(config.default, entry, name) for name, entry in config.modules.items()}
    check_level(level, levels_of(whole.values()), "this checkpoint")
    chosen = {name: stored_levels.at_level(each, level) for name, each in whole.items()}
    default = {**config.default, **_table(stored_levels.at_level(_read(config.default, {}, "default"), level))}
    config.modules = dict(config.modules)  # it may be what was read from a file
    for name, each in chosen.items():
        table = _table(each)
        own = table if table["format"] != default["format"] else {"params": table["params"]}
        kept = {key: value for key, value in config.modules[name].items() if key not in READ_BY_FORMAT}
        config.modules[name] = kept | (own if table != {key: default[key] for key in READ_BY_FORMAT} else {})
    config.default = default
    gone = set[str]().union(*(_names(whole[name]) - _names(each) for name, each in chosen.items()))
    config.left_out = rf"\.({'|'.join(map(re.escape, sorted(gone)))})$" if gone else ""


def _read(default: dict[str, Any], entry: dict[str, Any], name: str) -> Stored:
    return stored.from_dict({**default, **entry}, f"quantization_config: {name}")


def _names(each: Stored) -> set[str]:
    return set(formats.get(each.format).specs(each.params, ANY_SHAPE))


def _table(each: Stored) -> dict[str, Any]:
    table = stored.to_dict(each)
    return {key: table[key] for key in READ_BY_FORMAT}


def leave_out(model: Any, pattern: str) -> None:
    """Let transformers leave tensors whose names match a pattern where they are, without a word; "": there are none."""
    if pattern:
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), pattern}


def levels_of(weights: Iterable[Stored]) -> tuple[int, ...]:
    """Return the levels that any of some stored weights has, rising."""
    return tuple(sorted({level for each in set(weights) for level in stored_levels.levels(each)}))


def check_level(level: Any, known: tuple[int, ...], whose: str) -> None:
    """Raise CheckpointError for a level that is not a known one; whose: begins the line."""
    if type(level) is int and level in known:
        return
    if not known:
        raise CheckpointError(f"{whose} has no levels, so no level {shown(level)}; leave the level out")
    raise CheckpointError(f"{whose} has the levels {', '.join(map(str, known))}, not {shown(level)}; name one of them")


def offer(model: nn.Module) -> None:
    """Give a packed model the attribute `levels` and the method `set_level`."""
    vars(model)["levels"] = levels_of(module.stored for module in _packed_modules(model))
    vars(model)["level"] = None
    vars(model)["set_level"] = MethodType(set_level, model)


def set_level(model: nn.Module, level: int | None) -> None:
    """Let a packed model compute at one of its levels, None: with all that is stored.

    Weights without this level compute at the next lower one that they have, or else at their lowest. Nothing is moved
    or decoded. Raises CheckpointError for an unknown level.
    """
    if level is not None:
        check_level(level, vars(model).get("levels", ()), f"this {type(model).__name__}")
    vars(model)["level"] = level
    for module in _packed_modules(model):
        module.set_level(level)


@contextmanager
def at_level(model: nn.Module, level: int | None) -> Iterator[None]:
    """While active, let a packed model compute at one of its levels; None: with all that is stored."""
    before: int | None = vars(model).get("level")
    set_level(model, level)
    try:
        yield
    finally:
        set_level(model, before)


def _packed_modules(model: nn.Module) -> Iterator[PackedModule]:
    """Yield the packed modules of a model; `modules()` takes three times as long."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, PackedModule):
            yield module
        elif module is not None:
            waiting += module._modules.values()
