"""Read what the pages of the documentation show: command lines, Python, recipes, JSON, output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {"bash", "python", "yaml", "json", "text"}  # text: what the command above prints
COMMENTED = re.compile(r"""((?:[^'"]|"[^"]*"|'[^']*')*?)\s+#\s+(.*)""")  # a # in quotes begins no comment
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


class Sample(NamedTuple):
    """Something that a page shows: one command line with its comment, or a whole block of another language."""

    page: str
    line: int
    language: str
    text: str
    comment: str = ""
    block: str = ""  # page, language and number: "docs/tuning.md yaml 1"

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages(root: Path = ROOT) -> list[str]:
    """Return the names of all pages, in the order in which a stranger reads them."""
    folders = [root / "docs", root / "benchmarks"]
    found = [path.relative_to(root).as_posix() for folder in folders for path in sorted(folder.rglob("*.md"))]
    return ["README.md", "CONTRIBUTING.md", *found]


def samples(page: str, root: Path = ROOT) -> list[Sample]:
    """Return what the code blocks of a page show, from top to bottom."""
    counts: dict[str, int] = {}
    found: list[Sample] = []
    for line, language, text in _blocks((root / page).read_text(encoding="utf-8")):
        counts[language] = counts.get(language, 0) + 1
        block = f"{page} {language} {counts[language]}"
        if language == "bash":
            found += [Sample(page, line + at, language, *words, block) for at, *words in _commands(text)]
        else:
            found.append(Sample(page, line, language, text, "", block))
    return found


def spans(page: str, root: Path = ROOT) -> list[Sample]:
    """Return what stands in code style within the text of a page."""
    text = (root / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", lambda found: "\n" * found.group().count("\n"), text, flags=re.M | re.S)
    return [
        Sample(page, prose.count("\n", 0, found.start()) + 1, "span", " ".join(found.group(1).split()))
        for found in SPAN.finditer(prose)
    ]


def _blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Give the number of the first line, the language and the text of each fenced block."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        yield text.count("\n", 0, found.start()) + 2, found.group(1), found.group(2)


def _commands(text: str) -> Iterator[tuple[int, str, str]]:
    """Give the offset of the line, the command and the comment of each command line; a backslash continues a line."""
    lines = iter(enumerate(text.splitlines()))
    for start, line in lines:
        while line.endswith("\\"):
            line = f"{line[:-1].rstrip()} {next(lines)[1].strip()}"
        if not line.strip() or line.startswith("#"):
            continue
        commented = COMMENTED.fullmatch(line)
        command, comment = commented.groups() if commented else (line, "")
        yield start, command.strip(), comment
