"""A newcomer follows docs/adding_a_method.md to the letter: a method without data that is not measured yet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("compress", "calib", "recipes", "docs", "benchmarks", "tests")
STRUCTURE = ("test_size", "test_docstrings", "test_layering", "test_plugins", "test_docs", "recipe/test_keys")


def blocks(language: str) -> list[str]:
    """The code of the guide."""
    text = (ROOT / "docs" / "adding_a_method.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def without_data(method: str) -> str:
    """The method of the guide, which asks for no statistics: all columns count alike."""
    method = method.replace('frozenset({"hessian"})', "frozenset()").replace("    assert stats is not None\n", "")
    method = method.replace("_importance(stats, config)", "torch.ones(shape[1]), ()")
    return method[: method.index("\n\ndef _importance")]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "recipes"), [("quant", "recipes"), ("papers/quant", "recipes/papers")])
def test_a_new_method_leaves_all_tests_of_structure_green(package: str, recipes: str, tmp_path: Path) -> None:
    for folder in COPIED:
        hidden = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=hidden)
    for file in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(file, tmp_path)
    (tmp_path / "compress" / package / "weighted_rtn.py").write_text(without_data(blocks("python")[0]))
    recipe = blocks("yaml")[0].partition("measured:")[0].replace("compress/quant", f"compress/{package}")
    (tmp_path / recipes / "weighted3bit.yaml").write_text(recipe)

    def run(*words: str) -> str:
        place = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
        result = subprocess.run([sys.executable, *words], **place, capture_output=True, text=True, check=False)  # type: ignore[call-overload]
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout

    run("docs/generate_recipes.py")
    listed = run("-m", "compress", "recipes", "--all")
    assert re.search(r"^weighted3bit +weights, 3 bits +3\.125 +data-free ", listed, re.MULTILINE)
    run("-m", "pytest", "-q", *(f"tests/{name}.py" for name in STRUCTURE), "-k", "not tutorial")
    run("-m", "pytest", "-q", "tests/quant/test_low_bit.py", "-k", "weighted3bit and llama")
