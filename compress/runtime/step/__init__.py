"""Run passes of a few new tokens without Python between the layers: blocks read, made programs, and checked."""

from __future__ import annotations

from torch import nn


def speed_up(model: nn.Module) -> None:
    """Let a model that was loaded run passes of few tokens on a CPU by programs, and by compiled attention.

    Its linears that are not packed are compiled for any number of tokens. What was dropped of it is skipped.
    """
    from compress.kv import plain
    from compress.runtime.plain_linear import compile_linears
    from compress.runtime.step import decode, skipping

    compile_linears(model)
    plain.attach(model)
    decode.install(model)
    skipping.install(model)


def forget(model: nn.Module) -> None:
    """Free what programs of a model hold: its modules are about to be replaced."""
    from compress.runtime.step import decode, skipping

    skipping.remove(model)
    decode.remove(model)
