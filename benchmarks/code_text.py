"""Write two texts of Python sources that the standard library ships: some modules to calibrate on, others to score.

    python benchmarks/code_text.py --out texts        # texts/code_calib.txt and texts/code_heldout.txt

Modules are shared out by a hash of their names: no module is in both. The texts depend on the Python version, which is
printed. Whether generated programs still pass tests (HumanEval) is for lm-evaluation-harness: `compress eval --tasks
humaneval`; it runs programs that a model writes.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sysconfig
from pathlib import Path

MAX_BYTES = 1_500_000  # of a text


def split_modules(folder: Path) -> dict[str, list[Path]]:
    """Return the modules beside each other in a folder and its packages, in two halves by a hash of their names."""
    halves: dict[str, list[Path]] = {"calib": [], "heldout": []}
    skipped = ("test", "site-packages", "idlelib", "lib2to3", "encodings", "__pycache__")
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not any(part.startswith(skipped) for part in name.parts):
            first = hashlib.sha256(name.as_posix().encode()).digest()[0]
            halves["calib" if first % 2 else "heldout"].append(path)
    return halves


def join_sources(paths: list[Path]) -> str:
    """Return sources one after the other in the order of their hashes, no more than MAX_BYTES of them."""
    ordered = sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest())
    parts, size = [], 0
    for path in ordered:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if size + len(text) > MAX_BYTES:
            break
        parts.append(text)
        size += len(text)
    return "\n\n".join(parts)


def main() -> None:
    """Write both texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for half, paths in split_modules(Path(sysconfig.get_paths()["stdlib"])).items():
        text = join_sources(paths)
        (out / f"code_{half}.txt").write_text(text, encoding="utf-8")
        print(f"code_{half}.txt: {len(text)} characters of Python {platform.python_version()}")


if __name__ == "__main__":
    main()
