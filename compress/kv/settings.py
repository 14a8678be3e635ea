"""Read and write the settings of a compressed cache: the `kv_cache` section of a recipe and of config.json.

    method: kivi               # a file of compress/kv/codecs and the settings of its `Config`, for keys and values
    bits: 2
    sink: 4                    # which tokens stay exact: `Policy`
    residual_length: 128
    keys: {group_size: 64}     # over those; another `method` starts from its own defaults
    values: {bits: 4}
    layers:                    # over those, in this order; where several match a layer, later ones are laid over
      - {match: [0, 1], bits: 8}
      - {match: "2-5", values: {method: fp8}}
      - {match: -1, keys: {bits: 8}}         # the last layer
    skip_layers: [0, -1]       # stay exact
    exact_prefill: true        # tokens attend to others of the same forward pass exactly; false: as later steps do
    evict: {method: snapkv, keep: 0.5}   # half of the tokens are forgotten, the others coded: compress/kv/evict
    other_layers: exact        # sliding, linear ... layers stay as transformers has them; error: they are refused
    read: {method: double_sparsity, keep: 0.0625}   # a file of compress/kv/sparse: which stored tokens attention reads
    states: 12                 # [bits] of the states of linear attention and Mamba (compress/kv/states.py)

With `states`, `method` may be left out: keys and values then stay exact.

`cache_settings` checks this, as plain data, and makes the `CacheSettings` that every part of the program uses. `layers`
may be a mapping, too: {"2-5": {...}}. A model's number of layers is known later: `CacheSettings.by_layer` takes it.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin

from compress import plugins
from compress.errors import RecipeError, shown
from compress.kv.evict.settings import BUDGET_KEYS, Budget, Eviction
from compress.kv.evict.settings import check as check_eviction

KINDS = ("keys", "values")
EXACT = "identity"  # codec of layers that are skipped
OtherLayers = Literal["error", "exact"]
Match = int | str  # a layer: 3, -1, "3"; or a span with both ends: "2-5"
ErrorAt = Callable[[tuple[str | int, ...], str], RecipeError]  # of the keys and indices that lead to a value, a message


@dataclass(frozen=True)
class Policy:
    """Tokens that stay exact; keys and values may differ in all but `sink`.

    A prompt in chunks that divide `flush` and `residual_length` is read like one that came token by token.
    """

    sink: int = 4  # [tokens] at the start that stay exact
    residual_length: int = 128  # [tokens] at the end that stay exact: at least so many, at most flush - 1 more
    flush: int = 32  # [tokens] coded at a time, rounded up to whole groups of the codec

    def __post_init__(self) -> None:
        if self.sink < 0 or self.residual_length < 0 or self.flush < 1:
            raise ValueError("sink and residual_length are 0 or more tokens, flush 1 or more")


POLICY_KEYS = tuple(f.name for f in dataclasses.fields(Policy))


class _SectionBlock(NamedTuple):
    """A part of the section: its keys and values, its name in messages, and what makes an error of one of its keys."""

    settings: Mapping[str, Any]
    where: str
    error: ErrorAt

    def inner(self, key: str | int, settings: Any, where: str) -> _SectionBlock:
        """Return the block under a key; RecipeError unless it is one."""
        if not isinstance(settings, Mapping):
            raise self.error((key,), f"{where} must be keys with values, found {plugins.found(settings)}")
        return _SectionBlock(settings, where, lambda path, message: self.error((key, *path), message))

    def without(self, keys: Collection[str]) -> _SectionBlock:
        """Return the block without some of its keys."""
        return self._replace(settings={key: value for key, value in self.settings.items() if key not in keys})

    def value(self, key: str, hint: Any, default: Any) -> Any:
        """Return the value of a key as the type `hint`, the default without one."""
        if key not in self.settings:
            return default
        given = self.settings[key]
        value = plugins.typed(given, hint)
        if value is not plugins.MISMATCH:
            return value
        if get_origin(hint) is tuple and isinstance(given, list | tuple):  # one of the items is at fault
            hint = get_args(hint)[0]
            given = next(item for item in given if plugins.typed(item, hint) is plugins.MISMATCH)
        message = f"{self.where}: {key} must be {plugins.expected(hint)}, found {plugins.found(given)}"
        raise self.error((key,), message)


@dataclass(frozen=True)
class Coding:
    """How the keys or the values of a layer are stored."""

    method: str
    config: Any  # of the method: its `Config`
    policy: Policy

    def over(self, settings: Mapping[str, Any]) -> Coding:
        """Return this with other settings laid over; another method starts from its own defaults."""
        return _laid_over(self, _SectionBlock(settings, "kv_cache", _error))

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain data, with every default."""
        return {"method": self.method, **plugins.plain(self.config), **dataclasses.asdict(self.policy)}


Codings = tuple[dict[str, Coding], ...]  # for each layer of a model: "keys" and "values"


@dataclass(frozen=True)
class Reading:
    """Which of the stored tokens attention reads: a method of compress/kv/sparse and its settings."""

    method: str
    config: Any  # of the method: its `Config`

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain data, with every default."""
        return {"method": self.method, **plugins.plain(self.config)}


@dataclass(frozen=True)
class LayerRule:
    """Settings of some layers: those of both kinds, and under "keys" and "values" those of one."""

    match: tuple[Match, ...]
    settings: Mapping[str, Any]

    def laid_over(self, coding: Coding, kind: str) -> Coding:
        """Return the coding of `kind` with this rule's settings laid over."""
        common = {key: value for key, value in self.settings.items() if key not in KINDS}
        return coding.over(common).over(self.settings.get(kind, {}))


@dataclass(frozen=True)
class CacheSettings:
    """How generation stores keys and values: beside these keys those of recipe/kv_policy and of the codec.

    It is not known yet how many layers the model has.
    """

    keys: Coding  # method and settings for the keys alone, over those of the section
    values: Coding  # method and settings for the values alone, over those of the section
    layers: tuple[LayerRule, ...] = ()  # rules {match: [0, 1], ...} with what differs in some layers
    skip_layers: tuple[int, ...] = ()  # [layers] whose keys and values stay exact, by number: 0, -1
    exact_prefill: bool = True  # tokens of one forward pass attend to each other exactly; false: as later steps read
    # them
    other_layers: OtherLayers = "exact"  # sliding, linear and such layers: exact: they stay as transformers has them,
    # where others are coded; or error
    evict: Eviction | None = None  # which tokens are forgotten, {method: ..., keep: ...}; null: none
    read: Reading | None = None  # which stored tokens attention reads, {method: ..., keep: ...}; null: all
    states: Literal[12] | None = None  # [bits] of states of linear attention and Mamba; null: as transformers has them

    def of(self, kind: str) -> Coding:
        """Return the coding of "keys" or "values" where no rule of `layers` matches."""
        return self.keys if kind == "keys" else self.values

    def by_layer(self, count: int) -> Codings:
        """Return the codings of a model with so many layers; RecipeError for a layer that it does not have."""
        skipped = {_layer(index, count, "skip_layers") for index in self.skip_layers}
        spans = [(_span(str(match), count), rule) for rule in self.layers for match in rule.match]
        layers = []
        for index in range(count):
            codings = {kind: self.of(kind) for kind in KINDS}
            for rule in [rule for span, rule in spans if index in span]:
                codings = {kind: rule.laid_over(coding, kind) for kind, coding in codings.items()}
            layers.append(dict.fromkeys(KINDS, exact()) if index in skipped else codings)
            _check_sinks(layers[-1], _error)
        return tuple(layers)

    def plain(self) -> dict[str, Any]:
        """Return the section as plain data, every default written out; `cache_settings` reads it back."""
        return {
            **{kind: self.of(kind).plain() for kind in KINDS},
            "layers": [{"match": list(rule.match), **rule.settings} for rule in self.layers],
            "skip_layers": list(self.skip_layers),
            "exact_prefill": self.exact_prefill,
            "other_layers": self.other_layers,
            **({"evict": self.evict.plain()} if self.evict is not None else {}),
            **({} if self.read is None else {"read": self.read.plain()}),
            **({} if self.states is None else {"states": self.states}),
        }

    def needs(self) -> frozenset[str]:
        """Return the samples that calibration must bring; none if no codec is calibrated."""
        blocks = [block for rule in self.layers for block in (rule.settings, *map(rule.settings.get, KINDS)) if block]
        methods = {self.keys.method, self.values.method, *(block["method"] for block in blocks if "method" in block)}
        read = [] if self.read is None else [plugins.load("read", self.read.method).NEEDS]
        return frozenset().union(*(plugins.load("kv", method).NEEDS for method in methods), *read)


SECTION_KEYS = tuple(f.name for f in dataclasses.fields(CacheSettings))


def _error(path: tuple[str | int, ...], message: str) -> RecipeError:
    return RecipeError(message)


def cache_settings(section: CacheSettings | Mapping[str, Any], error: ErrorAt = _error) -> CacheSettings:
    """Return the settings that plain data stands for; `error` makes a RecipeError with the place of a key.

    Settings that were read before are returned as they are.
    """
    if isinstance(section, CacheSettings):
        return section
    whole = _SectionBlock(section, "kv_cache", error)
    common = whole.without(SECTION_KEYS)
    states = whole.value("states", Literal[12] | None, None)
    codings = {}
    for kind in KINDS:
        coding = exact() if states and not section.keys() & {"method", kind} else Coding("", None, Policy())
        coding = _laid_over(coding, common, SECTION_KEYS)
        if kind in section:
            coding = _laid_over(coding, whole.inner(kind, section[kind], f"kv_cache.{kind}"))
        if not coding.method:
            known = ", ".join(plugins.names("kv"))
            raise error((), f"kv_cache: {kind} have no method; set kv_cache.method, one of {known}")
        codings[kind] = coding
    rules = _rules(whole, codings)
    _check_sinks(codings, error)
    counts = Counter(str(match) for rule in rules for match in rule.match)
    if repeated := [match for match, count in counts.items() if count > 1]:
        raise error((), f"kv_cache.layers matches {repeated[0]} in two entries; write one")
    eviction = _eviction(whole)
    reading = None if section.get("read") is None else _reading(whole.inner("read", section["read"], "kv_cache.read"))
    if eviction is not None and reading is not None:
        raise error(("read",), "kv_cache: evict and read do not go together; remove one")
    return CacheSettings(
        codings["keys"],
        codings["values"],
        rules,
        whole.value("skip_layers", tuple[int, ...], ()),
        whole.value("exact_prefill", bool, True),
        whole.value("other_layers", OtherLayers, "exact"),
        eviction,
        reading,
        states,
    )


def _eviction(whole: _SectionBlock) -> Eviction | None:
    """Return the settings of `evict`; None without it."""
    section = whole.settings.get("evict")
    if section is None:
        return None
    block = whole.inner("evict", section, "kv_cache.evict")
    method = block.value("method", str, "")
    if not method:
        raise block.error((), f"kv_cache.evict has no method; set one of {', '.join(plugins.names('evict'))}")
    try:
        plugin = plugins.load("evict", method)
    except RecipeError as error:
        raise block.error(("method",), str(error)) from error
    method_block = block.without(("method", *BUDGET_KEYS))._replace(where=f"kv_cache.evict ({method})")
    config = _replace_fields(plugin.Config(), method_block, ("method", *BUDGET_KEYS))
    budget = block.without([key for key in block.settings if key not in BUDGET_KEYS])
    eviction = Eviction(method, config, _replace_fields(Budget(**getattr(plugin, "DEFAULTS", {})), budget))
    try:
        check_eviction(eviction)
    except ValueError as error:
        key = str(error).partition(" ")[0]
        raise block.error((key,) if key in section else (), f"kv_cache.evict: {error}") from error
    if not whole.value("exact_prefill", bool, True):
        raise block.error((), "kv_cache.evict needs exact_prefill: true; tokens are chosen after the prompt")
    return eviction


def _reading(block: _SectionBlock) -> Reading:
    """Return the settings of `read`."""
    method = block.value("method", str, "")
    try:
        config = plugins.load("read", method).Config()
    except RecipeError as error:
        raise block.error(("method",) if method else (), f"{block.where}: {error}") from error
    settings = block.without(["method"])._replace(where=f"{block.where} ({method})")
    return Reading(method, _replace_fields(config, settings))


def exact(sink: int = 0) -> Coding:
    """Return the coding of what stays as it is."""
    return Coding(EXACT, plugins.load("kv", EXACT).Config(), Policy(sink=sink, residual_length=0, flush=1))


def reading_layers(codings: Codings) -> list[int]:
    """Return the layers that may choose which tokens they read: all but those that stay as they are as a whole."""
    return [index for index, layer in enumerate(codings) if any(coding != exact() for coding in layer.values())]


def _laid_over(coding: Coding, block: _SectionBlock, beside: Collection[str] = ()) -> Coding:
    """Return the coding with the settings of a block; `beside`: what else may stand there, for messages."""
    where, method, config = block.where, coding.method, coding.config
    named = block.value("method", str, method)
    if named != method:
        try:
            method, config = named, plugins.load("kv", named).Config()
        except RecipeError as error:
            raise block.error(("method",), str(error)) from error
    method_block = block.without((*POLICY_KEYS, "method"))
    if config is None and method_block.settings:
        key = next(iter(method_block.settings))
        raise block.error((key,), f"{where}: {key} needs a method, one of {', '.join(plugins.names('kv'))}")
    if config is not None:
        config = _replace_fields(
            config, method_block._replace(where=f"{where} ({method})"), ("method", *POLICY_KEYS, *beside)
        )
    policy = block.without([key for key in block.settings if key not in POLICY_KEYS])
    return Coding(method, config, _replace_fields(coding.policy, policy))


def _replace_fields(base: Any, block: _SectionBlock, beside: Collection[str] = ()) -> Any:
    """Return the dataclass instance with the values of a block, of exactly the types of its fields."""
    hints = plugins.hints(base)
    for key in block.settings:
        if key not in hints:
            raise block.error((key,), f"{block.where}: {plugins.unknown('key', key, (*beside, *hints))}")
    values = {key: block.value(key, hints[key], None) for key in block.settings}

    def error(key: str, message: str) -> RecipeError:
        return block.error((key if key in values else next(iter(values)),), message)

    return plugins.replaced(base, values, block.where, error)


def _rules(whole: _SectionBlock, codings: Mapping[str, Coding]) -> tuple[LayerRule, ...]:
    """Return the rules of `layers`, each tried on the codings that it is laid over."""
    layers = whole.settings.get("layers", [])
    if isinstance(layers, Mapping):
        listed = whole.inner("layers", layers, "kv_cache.layers")
        entries = [(listed.inner(key, entry, f"kv_cache.layers, {key}"), (key,)) for key, entry in layers.items()]
        return tuple(_rule(block, match, codings) for block, match in entries)
    if not isinstance(layers, list | tuple):
        raise whole.error(("layers",), f"kv_cache.layers must be a list, found {plugins.found(layers)}")
    listed = _SectionBlock({}, "kv_cache.layers", lambda path, message: whole.error(("layers", *path), message))
    rules = []
    for index, entry in enumerate(layers):
        block = listed.inner(index, entry, "an entry of kv_cache.layers")
        if "match" not in entry:
            raise block.error((), f"{block.where} needs match, the layers that it is for: 3, -1 or '2-5'")
        is_list = isinstance(entry["match"], list | tuple)
        match = block.value("match", tuple[Match, ...] if is_list else Match, ())
        match = match if is_list else (match,)
        block = block.without(["match"])._replace(where=f"kv_cache.layers, {', '.join(map(str, match))}")
        rules.append(_rule(block, match, codings))
    return tuple(rules)


def _rule(block: _SectionBlock, match: tuple[Match, ...], codings: Mapping[str, Coding]) -> LayerRule:
    if not match:
        raise block.error(("match",), "match is an empty list; name a layer, or remove the entry")
    for layer in match:
        if not re.fullmatch(r"-?[0-9]{1,6}(-[0-9]{1,6})?", str(layer)):
            raise block.error(("match",), f"match {shown(layer)} is no layer number and no span of them like '2-5'")
    common, settings = block.without(KINDS), dict[str, Any]()
    for kind in KINDS:
        coding = _laid_over(codings[kind], common, KINDS)
        settings |= _named_values(common, coding)
        if kind in block.settings:
            inner = block.inner(kind, block.settings[kind], f"{block.where}: {kind}")
            settings[kind] = _named_values(inner, _laid_over(coding, inner))
    numbers = tuple(int(layer) if re.fullmatch(r"-?\d+", str(layer)) else layer for layer in match)
    return LayerRule(numbers, settings)


def _named_values(block: _SectionBlock, coding: Coding) -> dict[str, Any]:
    """Return the values of the keys that a block names, as they were understood."""
    known = coding.plain()
    return {key: known[key] for key in block.settings}


def _check_sinks(codings: Mapping[str, Coding], error: ErrorAt) -> None:
    if codings["keys"].policy.sink != codings["values"].policy.sink:
        raise error((), "kv_cache: sink must be the same for keys and values; set it once")


def _span(text: str, count: int) -> range:
    """Return the layers that "3", "-1" or "0-3" (both ends count) names."""
    first, dash, last = text.rpartition("-")
    if not (dash and first):
        first = last = text
    span = range(_layer(first, count, "layers"), _layer(last, count, "layers") + 1)
    if not span:
        raise RecipeError(f"kv_cache.layers: {shown(text)} names no layer; give the first one first")
    return span


def _layer(index: int | str, count: int, where: str) -> int:
    """Return a layer's number counted from the first; RecipeError if the model has no such layer."""
    if not -count <= int(index) < count:
        raise RecipeError(f"kv_cache.{where}: there is no layer {index}, the model has {count}")
    return int(index) % count
