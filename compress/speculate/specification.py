"""Read what is to be drafted, `ngram+level=4,skip=even,share=0.4,length=5`, and make it for a session.

Drafts are separated by plus signs; the first that has something to say drafts a round. Of a draft's items, separated
by commas, `NAME` and `part=NAME` choose a plugin, `NAME=VALUE` a plugin and the first of its settings, and `KEY=VALUE`
sets a setting of the plugin before it. `length=N` drafts so many tokens each time in place of the best number.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import yaml

from compress import plugins
from compress.errors import RecipeError, shown
from compress.speculate.cost import MAX_LENGTH
from compress.speculate.drafting import PARTS, Draft, ModelDraft
from compress.speculate.session import Session

KIND = "speculate"
LENGTH = "length"
LEVEL = "level"  # a plugin, and its setting


@dataclass
class DraftSpecification:
    """One draft: plugins with their settings, and a length if it is fixed."""

    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> settings
    length: int | None = None

    def build(self, session: Session) -> Draft:
        """Return the draft for a session; RecipeError where the model cannot have it."""
        built = [(name, _part(name), _configure(name, given)) for name, given in self.plugins.items()]
        parts = [part for _, part, _ in built]
        if "draft" in parts and len(parts) > 1:
            names = ", ".join(self.plugins)
            raise RecipeError(
                f"speculate: {names}: a draft of its own cannot be combined by a comma; write a plus sign"
            )
        if repeated := next((part for part in parts if parts.count(part) > 1), None):
            raise RecipeError(f"speculate: {', '.join(self.plugins)}: {repeated} is given twice; give it once")
        made = [plugins.load(KIND, name).build(config, session) for name, _, config in sorted(built, key=_order)]
        return made[0] if parts == ["draft"] else ModelDraft(made)


def parse(text: str) -> list[DraftSpecification]:
    """Return the drafts that a text names; RecipeError for what it cannot mean, with the known names."""
    drafts = [_parse_draft(part.strip(), text) for part in text.split("+")]
    for draft in drafts:
        for name, given in draft.plugins.items():
            _configure(name, given)
    return drafts


def keep_below(text: str, level: int) -> str:
    """Return the drafts of a text that weights of a level still have, "": none; those by this level or more go."""
    return "+".join(part for part in text.split("+") if _is_below(part, level))


def _is_below(text: str, level: int) -> bool:
    try:
        (draft,) = parse(text)
    except RecipeError:  # nothing that could be drafted
        return False
    return LEVEL not in draft.plugins or 0 < draft.plugins[LEVEL].get(LEVEL, 0) < level


def _parse_draft(text: str, whole: str) -> DraftSpecification:
    draft, newest = DraftSpecification(), ""
    for item in text.split(","):
        key, equals, value = (each.strip() for each in item.partition("="))
        known = plugins.names(KIND)
        if not key or (equals and not value):
            raise RecipeError(f"speculate: {shown(whole)} has an empty item; write it like ngram+level=4,skip=even")
        if key == LENGTH:
            draft.length = _length(value)
        elif newest and equals and key in _settings(newest):  # a setting may have the name of a plugin
            draft.plugins[newest][key] = _read(value)
        elif key in known or (key in PARTS and value in known):
            newest = key if key in known else value
            draft.plugins[newest] = {_first_setting(newest): _read(value)} if equals and key in known else {}
        elif newest and equals:
            draft.plugins[newest][key] = _read(value)
        else:
            word = value if key in PARTS and value else key
            raise RecipeError(plugins.unknown("draft", word, known))
    if not draft.plugins:
        raise RecipeError(f"speculate: {shown(whole)} has a length and no draft; name one: {', '.join(known)}")
    return draft


def _order(built: tuple[str, str, Any]) -> int:
    return PARTS.index(built[1]) if built[1] in PARTS else -1


def _part(name: str) -> str:
    return str(plugins.constant(KIND, name, "PART"))


def _settings(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(plugins.load(KIND, name).Config)]


def _first_setting(name: str) -> str:
    settings = _settings(name)
    if not settings:
        raise RecipeError(f"speculate: {name} has no settings; write {name} alone")
    return settings[0]


def _configure(name: str, given: dict[str, Any]) -> Any:
    """Return the Config of a plugin with values; RecipeError for keys and values that it does not have."""
    config = plugins.load(KIND, name).Config()
    hints, values = plugins.hints(config), dict[str, Any]()
    for key, value in given.items():
        if key not in hints:
            raise RecipeError(plugins.unknown(f"setting of {name}", key, hints))
        values[key] = plugins.typed(value, hints[key])
        if values[key] is plugins.MISMATCH:
            raise RecipeError(f"speculate: {name}: {key} is {plugins.expected(hints[key])}, not {plugins.found(value)}")
    return plugins.replaced(config, values, f"speculate: {name}", lambda key, message: RecipeError(message))


def _read(value: str) -> Any:
    """Return a value as YAML has it; text that is no YAML as it is."""
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _length(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= MAX_LENGTH:
        raise RecipeError(f"speculate: length is from 1 to {MAX_LENGTH}, not {shown(value)}")
    return int(value)
