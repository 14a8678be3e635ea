"""Check what the pages show without running it: commands, options, recipes, their settings, files, JSON."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml

from compress import recipe
from compress.cli.app import app
from compress.cli.options import cache_recipes
from compress.errors import RecipeError
from docs_lines.pages import LANGUAGES, ROOT, Sample
from docs_lines.table import Rule, Table

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or that of the copy that typer has
OPTION = re.compile(r"(--[a-z][\w-]*)")
DECLARED = re.compile(r'add_argument\(\s*(?:"-\w", )?"(--[a-z][\w-]*)"')
SCRIPTS = ("benchmarks", "tests", "docs")


def problem(sample: Sample, table: Table) -> str:
    """Return what is wrong with a sample in one line; empty: nothing."""
    check = CHECKS.get(sample.language)
    if check is None:
        return f"the block says {sample.language or 'no language'}; known are {', '.join(sorted(LANGUAGES))}"
    try:
        check(sample, table)
    except (UsageError, RecipeError, ValueError, SyntaxError, OSError, yaml.YAMLError) as error:
        return error.format_message() if isinstance(error, UsageError) else str(error)
    return ""


def options(words: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return the command of the words behind `compress`, and the values that it would be called with."""
    command = commands()
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            raise ValueError(f"there is no command {' '.join(['compress', *words[:1]])}")
        command, words = command.commands[words[0]], words[1:]
    with command.make_context(command.name, list(words)) as context:
        return command, context.params


@cache
def commands() -> Any:
    """Return the command line as a tree of commands."""
    return typer.main.get_command(app)


def is_complete(text: str) -> bool:
    """Whether text in code style is a command that can be run, not only the name of one."""
    if re.match(r"python \S+\.py", text):
        return True
    if not text.startswith("compress "):
        return False
    try:
        options(words_of(text)[1:])
    except (UsageError, ValueError):
        return False
    return True


def words_of(text: str) -> list[str]:
    """Return the words of a command line without variables in front, and without where its output goes."""
    words = shlex.split(text)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words[: words.index(">")] if ">" in words else words


def outputs(text: str) -> list[str]:
    """Return the paths that a command line is told to write."""
    words = shlex.split(text)
    return [path for option, path in zip(words, words[1:], strict=False) if option in ("--out", ">")]


def _command(sample: Sample, table: Table) -> None:
    words = words_of(sample.text)
    programs = [word for word in words[:1] if word in PROGRAMS or word.endswith("/python")]
    if programs:
        PROGRAMS.get(programs[0], _python)(words[1:], table)
    elif table.rule(sample) == Rule():
        raise ValueError(f"lines.yaml does not say what to do with {words[0]}")
    if sample.comment and not table.reason(sample) and sample.comment not in table.comments:
        raise ValueError(f"lines.yaml does not say what the comment claims: {sample.comment}")


def _compress(words: list[str], table: Table) -> None:
    _, values = options(words)
    overrides = values.get("overrides") or []
    if values.get("kv"):
        cache_recipes([values["kv"]] if isinstance(values["kv"], str) else list(values["kv"]), overrides)
    elif (name := values.get("recipe")) and not name.endswith(".yaml") and name not in table.new_recipes():
        recipe.load(name, overrides)
    for pattern in ",".join(values.get("recipes") or []).split(","):
        if not matching([*recipe.names(), ""], pattern):
            raise ValueError(f"no recipe matches {pattern}")


def _sets(words: list[str]) -> list[str]:
    """Return the values of all --set."""
    return [value for option, value in zip(words, words[1:], strict=False) if option == "--set"]


def _make(words: list[str], table: Table) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        variable = word.partition("=")[0] if "=" in word else ""
        if not re.search(rf"^{re.escape(variable)} \?=" if variable else rf"^{re.escape(word)}:", makefile, re.M):
            raise ValueError(f"the Makefile has no {word}")


def _python(words: list[str], table: Table) -> None:
    """Check a script of ours, or `-m PACKAGE` of tests/; its options must stand in its sources."""
    if words[0] == "-c":
        return None
    if words[:2] == ["-m", "compress"]:
        return _compress(words[2:], table)
    folder = ROOT / "tests" / words[1] if words[0] == "-m" else ROOT / words[0]
    if words[0] == "-m" and not folder.exists():
        return None
    paths = folder.glob("*.py") if folder.is_dir() else (folder, *folder.parent.glob("measure.py"))
    source = "".join(path.read_text(encoding="utf-8") for path in paths)
    for word in words:
        if word.startswith("--") and f'"{word}"' not in source:
            raise ValueError(f"{words[0]} has no option {word}")
    return None


def _torchrun(words: list[str], table: Table) -> None:
    if "..." in words:
        return
    if "--no-python" in words:
        program, *rest = words[words.index("--no-python") + 1 :]
        PROGRAMS[program](rest, table)
    else:
        _python(words[words.index("-m") :], table)


def _pip(words: list[str], table: Table) -> None:
    """Check that our package has the extras that are installed with it."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"compress-llm\[([\w-]+)\]", " ".join(words)):
        if not re.search(rf"^{extra} = \[", declared, re.M):
            raise ValueError(f"compress-llm has no extra {extra}")


PROGRAMS: dict[str, Callable[[list[str], Table], None]] = {
    "compress": _compress,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "torchrun": _torchrun,
}


def _recipe(sample: Sample, table: Table) -> None:
    """Load a recipe, or the base that it changes with its change, as strictly as any; not one of a method to come."""
    block = table.block(sample)
    if Path(block.file).stem in table.new_recipes():
        return
    above = f"extends: {block.base}\n" if block.base else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "block.yaml"
        path.write_text(above + sample.text, encoding="utf-8")
        recipe.load(str(path))


def _json(sample: Sample, table: Table) -> None:
    for line in sample.text.splitlines():
        json.loads(line)


def _source(sample: Sample, table: Table) -> None:
    ast.parse(sample.text)


def _nothing(sample: Sample, table: Table) -> None:
    """Let output pass: only the command above can tell."""


def _span(sample: Sample, table: Table) -> None:
    """Check commands and options that the text names in passing."""
    if re.match(r"compress [a-z]", sample.text) and "/" not in sample.text.split()[0]:
        words = shlex.split(sample.text.replace("...", ""))
        command = commands()
        names = iter(words[1:])
        while hasattr(command, "commands"):
            name = next(names, "")
            if name not in command.commands:
                raise ValueError(f"there is no command {' '.join(words[:3])}")
            command = command.commands[name]
        _known(OPTION.findall(sample.text), {option for each in command.params for option in each.opts})
    elif sample.text.startswith("--"):
        _known(OPTION.findall(sample.text)[:1], all_options() | set(table.other_options))
        for override in _sets(shlex.split(sample.text)):
            _override(override)
    elif sample.text.startswith("python ") and sample.text.split()[1].endswith(".py"):
        _python(shlex.split(sample.text)[1:], table)
    elif sample.text.startswith("make "):
        _make([word for word in shlex.split(sample.text)[1:] if "..." not in word], table)


def _known(named: Iterable[str], known: set[str]) -> None:
    for option in named:
        if option not in known:
            raise ValueError(f"there is no option {option}")


def _override(override: str) -> None:
    """Check that some built-in recipe takes an override; `KEY=VALUE` stands for any."""
    if override == override.upper() or override.lower().startswith("key="):
        return
    for name in recipe.names():
        try:
            recipe.load(name, [override])
        except RecipeError:
            continue
        return
    raise ValueError(f"no recipe takes --set {override}")


@cache
def all_options() -> set[str]:
    """Return the options of all commands and of all scripts."""
    sources = [path for folder in SCRIPTS for path in (ROOT / folder).rglob("*.py")]
    found = {name for path in sources for name in DECLARED.findall(path.read_text(encoding="utf-8"))}
    return found | set(_options_below(commands()))


def _options_below(command: Any) -> Iterator[str]:
    for below in getattr(command, "commands", {}).values():
        yield from _options_below(below)
    yield from (name for each in command.params for name in (*each.opts, *each.secondary_opts))


CHECKS: dict[str, Callable[[Sample, Table], None]] = {
    "bash": _command,
    "yaml": _recipe,
    "json": _json,
    "python": _source,
    "text": _nothing,
    "span": _span,
}
