"""Hold the settings of eviction: the `evict` section of a compressed cache.

evict:
  method: snapkv           # a file of compress/kv/evict and the settings of its `Config`
  keep: 0.5                # the rest: `Budget`

Layers may keep different shares, each said by hand or chosen by a budget for weights and cache (docs/allocation.md):

evict: {method: snapkv, keep_by_layer: [1.0, 0.5, 0.25, 0.5]}
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, cast

from compress import plugins

Heads = Literal["equal", "shared", "ada"]
Layers = Literal["equal", "pyramid", "variance"]


@dataclass(frozen=True)
class Budget:
    """How many tokens stay, and how they are divided among layers and heads."""

    keep: float | None = None  # fraction of the tokens that stays, mean over layers and heads; this or tokens
    tokens: int | None = None  # [tokens] that stay, mean over layers and heads; this or keep
    keep_by_layer: tuple[float, ...] = ()  # fraction of the tokens that stays in each layer of the model, the first one
    # first; in place of keep and tokens
    recent: int = 64  # [tokens] newest, which always stay; so do those of kv_cache.sink
    heads: Heads = "equal"  # equal: each KV head keeps tokens of its own, as many as the others; shared: the same
    # tokens in all heads of a layer; ada: heads keep different numbers (AdaKV, arXiv 2407.11550)
    critical: bool = False  # half of the tokens by score, the others by score times the norm of what their value adds
    # to the output (CriticalKV, arXiv 2502.03805)
    layers: Layers = "equal"  # pyramid: early layers keep more (PyramidKV, arXiv 2406.02069); variance: layers of even
    # attention keep more (D2O, arXiv 2406.13035)
    merge: bool = False  # evicted keys and values are added to similar ones that stay (D2O)
    decode: bool = False  # evict while decoding, too; false: after the prompt, which is the first forward pass
    interval: int = 512  # [tokens] between two evictions while decoding

    def __post_init__(self) -> None:
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep {self.keep} is not a fraction above 0 and at most 1")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError("tokens must be 1 or more")
        if wrong := [share for share in self.keep_by_layer if not 0 < share <= 1]:
            raise ValueError(f"keep_by_layer {wrong[0]} is not a fraction above 0 and at most 1")
        named = {"keep": self.keep, "tokens": self.tokens, "keep_by_layer": self.keep_by_layer or None}
        if len(named_settings := [name for name, value in named.items() if value is not None]) > 1:
            raise ValueError(f"{named_settings[1]} and {named_settings[0]} are both set; set one of them")
        if self.recent < 1:
            raise ValueError("recent must be 1 or more: the newest token stays")
        if self.interval < 1:
            raise ValueError("interval must be 1 or more")


BUDGET_KEYS = tuple(f.name for f in dataclasses.fields(Budget))


@dataclass(frozen=True)
class Eviction:
    """A method with its settings, and how much it keeps."""

    method: str  # a file of compress/kv/evict
    config: Any  # of the method: its `Config`
    budget: Budget

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain data, with every default."""
        chosen = {key: value for key, value in plugins.plain(self.budget).items() if value not in (None, [])}
        return {"method": self.method, **plugins.plain(self.config), **chosen}

    @property
    def prunes(self) -> bool:
        """Return whether tokens are dropped within the prompt's forward pass: LazyLLM."""
        return bool(getattr(plugins.load("evict", self.method), "PRUNES", False))

    def newest(self, kept: int) -> int:
        """Return how many newest tokens stay where a head keeps so many; 0: the least there is."""
        keeps = getattr(plugins.load("evict", self.method), "keeps", lambda config, kept: 0)
        return max(self.budget.recent, keeps(self.config, kept))

    def exempts(self, layer: int) -> bool:
        """Return whether a layer of this number, counted from 0, keeps all of its tokens by `keep_by_layer`."""
        shares = self.budget.keep_by_layer
        return layer < len(shares) and shares[layer] == 1


def refusal(eviction: Eviction, coding: Any, kind: str, is_before_rope: bool) -> str | None:
    """Return why the keys or the values of a layer cannot be stored so where tokens are evicted; None: they can.

    coding: a `Coding` of compress/kv/settings.py.
    """
    budget, plugin = eviction.budget, plugins.load("kv", coding.method)
    if is_before_rope and budget.heads != "shared":
        return (
            f"{coding.method} stores keys before the rotary embedding, for which all heads must keep the same tokens; "
            "set kv_cache.evict.heads: shared, or choose keys after it"
        )
    if budget.heads == "ada" and plugin.NEEDS:
        return f"{coding.method} is calibrated for all heads together; with kv_cache.evict.heads: ada choose another"
    asks = getattr(coding.config, "needs_queries", None)
    if asks is not None and asks(kind) and (budget.decode or budget.heads == "ada"):
        return (
            f"{coding.method} with these settings reads the queries of the prompt; with kv_cache.evict.decode or "
            "heads: ada choose other settings"
        )
    refuses = getattr(plugins.load("evict", eviction.method), "refusal", None)
    return None if refuses is None else cast("str | None", refuses(eviction.config, coding))


def check(eviction: Eviction) -> None:
    """Raise ValueError, which begins with a field's name, for settings that do not go together."""
    budget = eviction.budget
    if budget.keep is None and budget.tokens is None and not budget.keep_by_layer:
        raise ValueError("keep or tokens is needed: how much stays")
    if budget.keep_by_layer and budget.layers != "equal":
        raise ValueError(f"keep_by_layer and layers: {budget.layers} both divide the tokens; set layers: equal")
    if budget.decode and getattr(plugins.load("evict", eviction.method), "PROMPT_ONLY", False):
        raise ValueError(f"decode is not possible with {eviction.method}, which judges the prompt; choose another")
    if hasattr(plugins.load("evict", eviction.method), "check"):
        plugins.load("evict", eviction.method).check(budget)
    for name, value, plain in (("heads", budget.heads, "ada"), ("layers", budget.layers, "variance")):
        if budget.decode and value == plain:
            raise ValueError(f"decode is not possible with {name}: {value}, which is decided on the prompt")
    if budget.decode and budget.merge:
        raise ValueError("decode is not possible with merge, which works on the prompt")
