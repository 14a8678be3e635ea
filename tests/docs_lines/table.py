"""Read lines.yaml: what the lines of the pages presume, what makes them small, what they claim, what cannot be run."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from docs_lines.pages import Sample

FILE = Path(__file__).with_name("lines.yaml")


@dataclass(frozen=True)
class Rule:
    """What is done with the commands that match a pattern; the first rule that matches counts."""

    line: str = ""  # pattern: * stands for anything
    skip: str = ""  # the reason
    needs: str = ""  # a package without which it is skipped
    add: str = ""  # words behind the command
    swap: dict[str, str] = field(default_factory=dict)  # words in place of others
    limit: int = 600  # seconds
    page: str = "*"  # pattern


@dataclass(frozen=True)
class Block:
    """What is done with a block of another language than bash."""

    skip: str = ""  # the reason
    needs: str = ""  # a package without which it is skipped
    file: str = ""  # the block is written to it
    before: str = ""  # Python in front of a block of Python
    base: str = ""  # built-in recipe that a block of YAML is a change of


@dataclass(frozen=True)
class Table:
    """All of lines.yaml."""

    things: dict[str, str]  # what lines name -> the shell command that makes it
    commands: list[Rule]
    blocks: dict[str, Block]  # by Sample.block
    comments: dict[str, list[str] | str]  # comment -> what the output must show, or why there is nothing to see
    other_options: list[str]  # options in the text that belong to other programs

    def rule(self, sample: Sample) -> Rule:
        """Return the first rule that matches a command; an empty one where none does."""
        return next((rule for rule in self.commands if _matches(rule, sample)), Rule())

    def block(self, sample: Sample) -> Block:
        return self.blocks.get(sample.block, Block())

    def reason(self, sample: Sample) -> str:
        """Return why a sample is not run; empty: it is."""
        entry = self.rule(sample) if sample.language == "bash" else self.block(sample)
        is_missing = entry.needs and find_spec(entry.needs) is None
        return f"{entry.needs} is not installed" if is_missing else entry.skip

    def new_recipes(self) -> set[str]:
        """Return the names of the recipes that a page adds to the built-in ones; their methods may be new, too."""
        paths = [Path(block.file) for block in self.blocks.values() if block.file]
        return {path.stem for path in paths if path.parts[0] == "recipes"}

    def thing(self, word: str) -> str:
        """Return the name of the thing that a word of a command means, alone or behind a `=`; empty: none."""
        names = (word, word.rpartition("=")[2])
        return next((name for name in names if name in self.things), "")


def read(path: Path = FILE) -> Table:
    """Return the table; a key that is not known is a TypeError."""
    entries: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    entries["commands"] = [Rule(**entry) for entry in entries["commands"]]
    entries["blocks"] = {name: Block(**entry) for name, entry in entries["blocks"].items()}
    return Table(**entries)


def _matches(rule: Rule, sample: Sample) -> bool:
    return fnmatchcase(sample.text, rule.line.replace("[", "[[]")) and fnmatchcase(sample.page, rule.page)
