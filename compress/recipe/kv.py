"""The `kv_cache` section of a recipe: YAML -> `CacheRecipe`, strictly, and back.

    kv_cache:
      method: kivi               # a file of compress/kv and the settings of its `Config`, for keys and values
      bits: 2
      sink: 4                    # which tokens stay exact: `Policy` of compress/kv/token_store.py
      residual_length: 128
      keys: {group_size: 64}     # over those; another `method` starts from its own defaults
      values: {bits: 4}
      layers:                    # over those, in this order; where several match a layer, later ones are laid over
        - {match: [0, 1], bits: 8}
        - {match: "2-5", values: {method: fp8}}
        - {match: -1, keys: {bits: 8}}         # the last layer
      skip_layers: [0, -1]       # stay exact
      exact_prefill: true        # tokens attend to others of the same forward pass exactly; false: as later steps do
      other_layers: error        # sliding, linear ... layers: error, or exact: they stay as transformers has them

Which layers a model has is known later: compress/kv/settings.py applies `table(recipe)` to them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from yaml import Node, SequenceNode

from compress import plugins
from compress.kv import settings
from compress.recipe.blocks import built, fields
from compress.recipe.blocks import method as method_of
from compress.recipe.yaml import Entries, error_at, mapping, sequence, value

if TYPE_CHECKING:
    from compress.kv.token_store import Policy

KINDS = ("keys", "values")
Other = Literal["error", "exact"]
Match = int | str  # 3, -1, or "2-5" with both ends


@dataclass(frozen=True)
class Side:
    """The keys or the values of all layers."""

    method: str
    config: Any  # the codec's Config
    policy: Policy


@dataclass(frozen=True)
class LayerRule:
    """What differs in some layers: settings for both kinds, and under "keys" and "values" those of one."""

    match: tuple[Match, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class CacheRecipe:
    """How generation stores keys and values: beside these keys those of recipe/kv_policy and of the codec."""

    keys: Side  # method and settings for the keys alone, over those of the section
    values: Side  # method and settings for the values alone, over those of the section
    layers: tuple[LayerRule, ...] = ()  # rules {match: [0, 1], ...} with what differs in some layers
    skip_layers: tuple[int, ...] = ()  # [layers] whose keys and values stay exact, by number: 0, -1
    exact_prefill: bool = True  # tokens of one forward pass attend to each other exactly; false: as later steps read
    # them
    other_layers: Other = "error"  # sliding, linear and such layers: an error, or exact: they stay as transformers has
    # them


def _policy() -> Policy:
    from compress.kv.token_store import Policy

    return Policy()


@dataclass
class _Drawn:
    """A side in the making."""

    method: str | None = None
    config: Any = None
    policy: Policy = field(default_factory=_policy)

    def over(self, entries: Entries, where: str, beside: tuple[str, ...]) -> _Drawn:
        """With the settings of a block, which may hold `beside`, too."""
        if not entries:
            return self
        method, config = self.method, self.config
        first, _ = next(iter(entries.values()))
        if "method" in entries and value(entries, "method", str) != method:
            method, config = value(entries, "method", str), method_of(entries, "kv").Config()
        own = {key: entry for key, entry in entries.items() if key not in ("method", *beside)}
        exact = {key: own.pop(key) for key in fields(self.policy) if key in own}
        if config is None and own:
            key, (at, _) = next(iter(own.items()))
            raise error_at(at, f"{where}: {key} needs a method, one of {', '.join(plugins.names('kv'))}")
        if config is not None:
            config = built(own, first, f"{where} ({method})", config, (*fields(self.policy), "method", *beside))
        return _Drawn(method, config, built(exact, first, where, self.policy))

    def side(self, kind: str, at: Node) -> Side:
        if self.method is None:
            known = ", ".join(plugins.names("kv"))
            raise error_at(at, f"kv_cache: {kind} have no method; set kv_cache.method, one of {known}")
        return Side(self.method, self.config, self.policy)


def read(at: Node, node: Node) -> CacheRecipe:
    """The section whose key stands `at`; RecipeError says what is wrong and in which line."""
    own = tuple(fields(CacheRecipe))
    entries = mapping(node, "kv_cache")
    drawn, fitting = _Drawn(), {}
    if "method" in entries:
        drawn = drawn.over({"method": entries["method"]}, "kv_cache", own)
    common = {key: entry for key, entry in entries.items() if key not in own}
    for kind in KINDS:
        block = mapping(entries[kind][1], f"kv_cache.{kind}") if kind in entries else {}
        fitting[kind] = drawn.over(common, "kv_cache", own).over(block, f"kv_cache.{kind}", ())
    keys, values = (fitting[kind].side(kind, at) for kind in KINDS)
    rules = tuple(_rule(item, fitting) for item in sequence(entries, "layers"))
    _check(keys, values, rules, at)
    return CacheRecipe(
        keys,
        values,
        rules,
        value(entries, "skip_layers", tuple[int, ...], ()),
        value(entries, "exact_prefill", bool, True),
        value(entries, "other_layers", Other, "error"),
    )


def plain(recipe: CacheRecipe) -> dict[str, Any]:
    """The section in the layout of its YAML, every default written out."""
    return {
        **{kind: settings.side(getattr(recipe, kind)) for kind in KINDS},
        "layers": [{"match": list(rule.match), **rule.settings} for rule in recipe.layers],
        "skip_layers": list(recipe.skip_layers),
        "exact_prefill": recipe.exact_prefill,
        "other_layers": recipe.other_layers,
    }


def table(recipe: CacheRecipe) -> dict[str, Any]:
    """What compress/kv/settings.py applies to the layers of a model."""
    layers = {str(match): dict(rule.settings) for rule in recipe.layers for match in rule.match}
    return {**plain(recipe), "method": recipe.keys.method, "layers": layers}


def needs(recipe: CacheRecipe) -> frozenset[str]:
    """The samples that calibration must bring; none if the codecs need none."""
    methods = {recipe.keys.method, recipe.values.method}
    for rule in recipe.layers:
        blocks = [rule.settings, *(rule.settings.get(kind, {}) for kind in KINDS)]
        methods |= {block["method"] for block in blocks if "method" in block}
    return frozenset().union(*(plugins.load("kv", method).NEEDS for method in methods))


def _rule(node: Node, sides: Mapping[str, _Drawn]) -> LayerRule:
    """An entry of `layers`, tried on what it is laid over."""
    entries = mapping(node, "an entry of kv_cache.layers")
    if "match" not in entries:
        raise error_at(node, "an entry of kv_cache.layers needs match, the layers that it is for: 3, -1 or '2-5'")
    at, matched = entries.pop("match")
    many = isinstance(matched, SequenceNode)
    found = value({"match": (at, matched)}, "match", tuple[Match, ...] if many else Match)
    listed = found if many else (found,)
    match = tuple(int(item) if re.fullmatch(r"-?\d+", str(item)) else item for item in listed)
    for item in match:
        if isinstance(item, str) and not re.fullmatch(r"-?\d+(-\d+)?", item):
            raise error_at(at, f"match {item!r} is no layer number and no span of them like '2-5'")
    if not match:
        raise error_at(at, "match is an empty list; name a layer, or remove the entry")
    where = f"kv_cache.layers, {', '.join(map(str, match))}"
    settings: dict[str, Any] = {}
    for kind in KINDS:
        common = sides[kind].over(entries, where, KINDS)
        settings |= _said(entries, common, KINDS)
        if kind in entries:
            block = mapping(entries[kind][1], f"{where}: {kind}")
            settings[kind] = _said(block, common.over(block, f"{where}: {kind}", ()), ())
    return LayerRule(match, settings)


def _said(entries: Entries, drawn: _Drawn, beside: tuple[str, ...]) -> dict[str, Any]:
    """The values of the keys that a block names."""
    known = {"method": drawn.method, **dataclasses.asdict(drawn.config), **dataclasses.asdict(drawn.policy)}
    found = {key: known[key] for key in entries if key not in beside}
    return {key: list(item) if isinstance(item, tuple) else item for key, item in found.items()}


def _check(keys: Side, values: Side, rules: tuple[LayerRule, ...], at: Node) -> None:
    if keys.policy.sink != values.policy.sink:
        raise error_at(at, "kv_cache: sink must be the same for keys and values; set it once")
    seen: set[str] = set()
    for rule in rules:
        for match in map(str, rule.match):
            if match in seen:
                raise error_at(at, f"kv_cache.layers matches {match} in two entries; write one")
            seen.add(match)
