"""Find names that a reader must look up: what tests/test_naming.py counts and lists.

PYTHONPATH=tests python -m helpers.names            # how many of each kind
PYTHONPATH=tests python -m helpers.names --write    # tests/names.yaml anew; only to take names out
PYTHONPATH=tests python -m helpers.names PREFIX     # those of the files whose path starts with PREFIX
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import yaml

from helpers.structure import nodes, parse

ROOT = Path(__file__).resolve().parents[2]
LISTED = ROOT / "tests" / "names.yaml"
SOURCES = sorted([*(ROOT / "compress").rglob("*.py"), *(ROOT / "calib").rglob("*.py")])
SOURCES = [path for path in SOURCES if "compress/calib/" not in str(path)]

# A comment that begins with one of these goes on with the name before it: LEAST = 8  # of them that are not copies.
CONTINUES = "above as at below between by for from if in of on once per than that to under when where which whose with"
IRREGULAR = (
    "begun born bound brought built chosen cut done drawn driven fallen fed found given gone grown heard held hidden "
    "kept known laid led left lent lost made meant met paid put read run said seen sent set shown shut sold spent "
    "split spread stood sunk taken taught thought thrown told torn turned understood woken won worn written"
)
BARE_PARTICIPLES = set(IRREGULAR.split())
NOT_PARTICIPLES = {"feed", "need", "seed", "speed", "embed", "shed", "read", "run", "set", "put", "split", "cut"}
CONTRACT_CLASSES = {"Config", "Params", "Codes", "BlockTuning"}  # which every plugin of a kind defines


def comment(line: str) -> str:
    """Return the comment at the end of a line on which a statement begins, or nothing."""
    with suppress(tokenize.TokenError):  # the statement goes on in the next line
        for token in tokenize.generate_tokens(io.StringIO(line.lstrip()).readline) if "#" in line else ():
            if token.type == tokenize.COMMENT:
                return token.string.lstrip("# ")
    return ""


def completed_constants(path: Path) -> Iterator[str]:
    """Names of constants whose comment goes on with the name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in nodes(parse(path)):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        constants = [name for name in names if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name)]
        if constants and comment(lines[node.lineno - 1]).split(" ")[0].strip(",;:") in CONTINUES.split():
            yield from constants


def functions(path: Path) -> list[str]:
    return [n.name for n in nodes(parse(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def is_participle(name: str) -> bool:
    """Whether a function's name is one bare participle, as _given and led are."""
    word = name.strip("_")
    if "_" in word or word in NOT_PARTICIPLES:
        return False
    return word in BARE_PARTICIPLES or (word.endswith("ed") and len(word) > 4)


def participles(path: Path) -> Iterator[str]:
    yield from filter(is_participle, functions(path))


def found_locals(path: Path) -> Iterator[str]:
    """Functions that have a local called `found`."""
    for node in nodes(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            if "found" in stored:
                yield node.name


def class_homes() -> dict[str, list[str]]:
    """Class name -> the files that define it, where there are several; those of contracts left out."""
    homes = defaultdict(list)
    for path in SOURCES:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and node.name not in CONTRACT_CLASSES:
                homes[node.name].append(relative(path))
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def offenders() -> dict[str, list[str]]:
    """Kind of name -> `file: name`, sorted, each once."""
    finders = {"completed constants": completed_constants, "participles": participles, "found as a local": found_locals}
    listed = {
        kind: sorted({f"{relative(path)}: {name}" for path in SOURCES for name in find(path)})
        for kind, find in finders.items()
    }
    listed["shared class names"] = sorted(f"{path}: {name}" for name, paths in class_homes().items() for path in paths)
    return listed


def share_of_participles() -> float:
    """Functions that are one bare participle, as a share of all."""
    names = [name for path in SOURCES for name in functions(path)]
    return sum(map(is_participle, names)) / len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", nargs="?", help="list those of these files")
    parser.add_argument("--write", action="store_true", help="write tests/names.yaml")
    given = parser.parse_args()
    for kind, names in offenders().items():
        shown = [name for name in names if name.startswith(given.prefix or "")]
        print(f"{kind}: {len(shown)}")
        if given.prefix:
            print(*(f"  {name}" for name in shown), sep="\n")
    print(f"functions that are one participle: {share_of_participles():.1%}")
    if given.write:
        LISTED.write_text(yaml.safe_dump(offenders(), sort_keys=False, width=120), encoding="utf-8")


if __name__ == "__main__":
    main()
