"""Say how pages of an engine hold the cache of a layer (compress/kv/pages.py), and which settings they can hold.

    codings, line = servable(settings, layer_count)       line: what is served in place of the settings, if they are not
    held = for_layer(codings[index], specs, static)       None where the layer stays exact
    pages = Pages(held.keys.codes, held.values.codes, tokens)

A method that pages can hold has `page_coding(config, spec, static)` in its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from compress import plugins
from compress.kv import static as calibrated
from compress.kv.codec import Spec
from compress.kv.codecs import per_token
from compress.kv.pages import PagedCodes
from compress.kv.settings import EXACT, KINDS, CacheSettings, Coding, Codings, Policy

NO_EXACT = Policy(sink=0, residual_length=0, flush=1)


class PagedLayer(NamedTuple):
    """How pages hold a layer."""

    keys: PagedCodes
    values: PagedCodes


def for_layer(
    codings: Mapping[str, Coding], specs: Mapping[str, Spec], static: Mapping[str, Tensor]
) -> PagedLayer | None:
    """Return how pages hold the keys and values of a layer, of all its KV heads; None where both stay exact.

    codings: those of the layer, as `servable` gives them; specs: the places of its keys and values; static: calibrated
    tensors of the checkpoint by full name, {} without any. RecipeError where codes do not fit the heads.
    """
    if all(coding.method == EXACT for coding in codings.values()):
        return None
    held = []
    for kind in KINDS:
        plugin = plugins.load("kv", codings[kind].method)
        own = calibrated.of(static, specs[kind]) if plugin.NEEDS else {}
        held.append(plugin.page_coding(codings[kind].config, specs[kind], own))
    return PagedLayer(*held)


def servable(settings: CacheSettings, layer_count: int) -> tuple[Codings, str | None]:
    """Return codings by layer that pages can hold, the settings' own or the nearest, and a line if they differ."""
    layers: list[dict[str, Coding]] = []
    left_out = [f"kv_cache.{key}" for key in ("evict", "read") if getattr(settings, key) is not None]
    lines = [f"{' and '.join(left_out)}: pages hold all tokens and attention reads all; left out"] if left_out else []
    replaced = None
    for index, layer in enumerate(settings.by_layer(layer_count)):
        codings: dict[str, Coding] = {}
        is_exact = all(coding.method == EXACT for coding in layer.values())
        for kind, coding in layer.items():
            codings[kind], reason = (coding, None) if is_exact else _nearest(coding)
            if reason is not None and replaced is None:
                replaced = f"kv_cache: layer {index}, {kind}: {reason}; served as {_words(codings[kind])}"
        layers.append(codings)
    lines += [] if replaced is None else [replaced]
    return tuple(layers), "; ".join(lines) or None


def are_alone(codings: Codings) -> bool:
    """Return whether no token of any coded layer is exact or depends on others, as in pages."""
    coded = [coding for layer in codings for coding in layer.values() if coding.method != EXACT]
    return bool(coded) and all(coding.policy == NO_EXACT and _nearest(coding)[1] is None for coding in coded)


def _nearest(coding: Coding) -> tuple[Coding, str | None]:
    """Return what pages can hold, and why the coding is not that."""
    plugin = plugins.load("kv", coding.method)
    if hasattr(plugin, "page_coding"):
        exact = [name for name in ("sink", "residual_length") if getattr(coding.policy, name)]
        kept = " and ".join(f"{name} {getattr(coding.policy, name)}" for name in exact)
        return replace(coding, policy=NO_EXACT), f"pages keep no token exact ({kept})" if exact else None
    bits = getattr(coding.config, "bits", 8)
    bits = next(width for width in (2, 3, 4, 5, 6, 8) if width >= min(8, bits))
    nearest = Coding("per_token", per_token.Config(bits, levels="lloyd" if bits < 4 else "uniform"), NO_EXACT)
    return nearest, f"pages hold tokens coded alone, after the rotary embedding, and {coding.method} is not that"


def _words(coding: Coding) -> str:
    config = coding.config
    return f"method: {coding.method}, bits: {config.bits:g}, levels: {config.levels}, sink: 0, residual_length: 0"
