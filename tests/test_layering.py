"""Who may import whom, and what no source may contain. Reads the sources, imports none of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from compress import plugins

ROOT = Path(__file__).parents[1]
HEAVY = {"scipy", "datasets", "pyarrow", "transformers", "triton", "llvmlite"}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def shared(kind: str) -> set[str]:
    """The files of a kind that are no plugins."""
    return {f"compress.{kind}.{p.stem}" for p in (ROOT / "compress" / kind).glob("*.py")} - {
        f"compress.{kind}.{name}" for name in plugins.names(kind)
    }


# What the modules under a prefix may import of ours; the longest prefix counts, other modules are free. A method may
# use what methods share (feedback.py), not another method.
BASE = {"compress.types", "compress.errors", "compress.packing"}
AROUND = {"compress.ops", "compress.hadamard"}  # what lies around a stored matrix
RECIPE = {"compress.errors", "compress.plugins", "compress.strict_yaml", "compress.types"}
RECIPE |= {"compress.recipe_types", "compress.recipe_blocks", "compress.overrides", "compress.recipe_kv"}
ALLOWED: dict[str, set[str]] = {
    "compress.packing": set(),
    "compress.errors": set(),
    "compress.types": set(),
    "compress.hadamard": set(),
    "compress.jit": {"compress.jit_cache"},
    "compress.jit_cache": set(),
    "compress.ops": {"compress.types", "compress.errors", "compress.hadamard"},
    "compress.autoload": {"compress.runtime"},
    "compress.plugins": {"compress.errors"},
    "compress.strict_yaml": {"compress.errors", "compress.plugins"},
    "compress.recipe_types": {"compress.types", "compress.recipe_kv"},
    "compress.recipe_blocks": {"compress.errors", "compress.plugins", "compress.strict_yaml", "compress.types"},
    "compress.overrides": RECIPE - {"compress.overrides"},
    "compress.recipe": RECIPE,
    "compress.activations": BASE,
    "compress.formats": BASE | AROUND | {"compress.formats.lowrank"},  # which any weight may have beside it
    "compress.kernels": BASE | AROUND | {"compress.formats", "compress.jit", "compress.kernels"},
    "compress.runtime": BASE
    | AROUND
    | {"compress.activations", "compress.formats", "compress.kernels", "compress.runtime", "compress.kv"},
    "compress.lowrank": BASE | {"compress.formats", "compress.linalg"},
    "compress.lowrank.correct": BASE | {"compress.formats", "compress.linalg", "compress.lowrank.factors"},
    "compress.lowrank.train": BASE
    | {"compress.calib.lm", "compress.checkpoint", "compress.formats.lowrank", "compress.runtime"},
    "compress.quant": BASE
    | {"compress.formats", "compress.linalg", "compress.hadamard", "compress.jit", "compress.lowrank.factors"}
    | shared("quant"),
    "compress.allocate": BASE | shared("allocate") | {"compress.checkpoint", "compress.output"},
}
MAY_IMPORT_PIPELINE = {"compress", "compress.cli_jobs", "compress.pipeline"}  # compress/__init__.py is the public API

# Model types that are also words of our own or plain English.
ORDINARY = {"align", "beam", "canary", "clap", "clip", "ctrl", "encoder-decoder", "flint", "funnel", "radio"}


def sources() -> list[Path]:
    """Everything that is installed or run; tests and benchmarks are looked at where it says so."""
    folders = [ROOT / name for name in ("compress", "calib", "recipes")]
    return sorted(path for folder in folders for path in folder.rglob("*.py")) + sorted(ROOT.glob("*.py"))


def module_name(path: Path) -> str:
    """compress/x.py -> compress.x, calib/x.py -> compress.calib.x, cli.py -> cli."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("calib", "recipes"):
        parts = ("compress", *parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sources()}
NAMED = pytest.mark.parametrize("name", MODULES)


def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), str(MODULES[name]))


def imports(nodes: Iterator[ast.AST]) -> set[str]:
    """Modules that the nodes import; `from a import b` gives a.b where that is a module of ours, else a."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            members = {f"{source}.{alias.name}" for alias in node.names}
            found |= {member if member in MODULES else source for member in members}
    return found


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: no function bodies, nothing under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not is_typing and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_import(child)


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def not_allowed(name: str, imported: set[str]) -> set[str]:
    """Those of our modules that the module `name` may not import."""
    prefix = max((p for p in ALLOWED if is_under(name, p)), key=len, default=None)
    ours = {module for module in imported if is_under(module, "compress") or module.startswith(".")}
    if prefix is None:
        return set()
    return {module for module in ours if not any(is_under(module, allowed) for allowed in ALLOWED[prefix])}


def docstrings(tree: ast.Module) -> set[int]:
    """ids of the nodes of strings that are statements of their own."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and every string outside docstrings."""
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield line, node.value
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            text = getattr(node, field, None)
            if isinstance(text, str):
                yield line, text


def mentions(tree: ast.Module, names: set[str]) -> list[str]:
    """line N: name, for each of `names` that is a word of an identifier or of a string outside docstrings."""
    wanted = {re.sub(r"\W", "_", name).lower(): name for name in names}
    pattern = re.compile("_(" + "|".join(map(re.escape, wanted)) + ")(?=_)")
    found = []
    for line, text in words(tree):
        split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W", "_", text).lower()  # GptqConfig -> gptq_config
        found += [f"line {line}: {wanted[match]}" for match in pattern.findall(f"_{split}_")]
    return found


def environment_reads(tree: ast.Module) -> list[int]:
    """Lines that touch the environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}

    def touches(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in names and ast.unparse(node.value).lstrip("_") == "os"
        return isinstance(node, ast.ImportFrom) and node.module == "os" and bool(names & {a.name for a in node.names})

    return [getattr(node, "lineno", 0) for node in ast.walk(tree) if touches(node)]


def unsafe(tree: ast.Module) -> list[str]:
    """Ways to run code that a checkpoint brings along."""
    found = sorted(module for module in imports(ast.walk(tree)) if module.split(".")[0] in PICKLES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            found.append(f"line {node.lineno}: torch.load")
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in {a.name for a in node.names}:
            found.append(f"line {node.lineno}: torch.load")
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            found.append(f"line {node.lineno}: trust_remote_code")
    return found


@NAMED
def test_import_direction(name: str) -> None:
    assert not_allowed(name, imports(ast.walk(parse(name)))) == set()


@NAMED
def test_imports_are_absolute(name: str) -> None:
    assert not {module for module in imports(ast.walk(parse(name))) if module.startswith(".")}


@NAMED
def test_only_the_entry_points_import_the_pipeline(name: str) -> None:
    if name not in MAY_IMPORT_PIPELINE:
        assert "compress.pipeline" not in imports(ast.walk(parse(name)))


GENERAL = ("cli", *(f"compress.{m}" for m in ("cli", "pipeline", "plan", "report")))


@pytest.mark.parametrize("name", [name for name in GENERAL if name in MODULES])
def test_no_method_names_in_the_general_modules(name: str) -> None:
    assert mentions(parse(name), set(plugins.names("quant"))) == []


@pytest.fixture(scope="module")
def model_types() -> set[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return {name for name in CONFIG_MAPPING_NAMES if len(name) >= 4} - ORDINARY


@NAMED
def test_no_model_names(name: str, model_types: set[str]) -> None:
    assert mentions(parse(name), model_types) == []


LIGHT = ("cli", *(f"compress{m}" for m in ("", ".cli", ".recipe", ".strict_yaml", ".plugins", ".autoload", ".errors")))


@pytest.mark.parametrize("name", [name for name in LIGHT if name in MODULES])
def test_light_modules_import_nothing_heavy(name: str) -> None:
    assert not {module.split(".")[0] for module in imports(at_import(parse(name)))} & HEAVY


# The third asks only where the user keeps caches: what it finds there saves time and changes no number.
READS_ENVIRONMENT = ("compress.autoload", "compress.cli", "compress.jit_cache")


@NAMED
def test_environment_is_read_in_three_places_only(name: str) -> None:
    if name not in READS_ENVIRONMENT:
        assert environment_reads(parse(name)) == []


EVERYWHERE = [*sources(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_and_no_remote_code_is_trusted(path: Path) -> None:
    assert unsafe(ast.parse(path.read_text(encoding="utf-8"))) == []


# The checks themselves, on sources that break the rules.


def test_the_sources_are_found() -> None:
    assert {"compress", "compress.packing", "compress.formats.int", "compress.quant.gptq", "compress.calib"} <= {
        *MODULES
    }


@pytest.mark.parametrize(
    ("name", "source", "bad"),
    [
        ("compress.packing", "from compress import errors", "compress.errors"),
        ("compress.formats.x", "def f():\n    from compress.formats import int", "compress.formats.int"),
        ("compress.formats.x", "import compress.runtime", "compress.runtime"),
        ("compress.runtime.x", "from compress.quant.gptq import Config", "compress.quant.gptq"),
        ("compress.runtime.x", "from compress.recipe import load", "compress.recipe"),
        ("compress.quant.x", "from compress.quant import feedback, gptq", "compress.quant.gptq"),
        ("compress.quant.x", "from compress.calib.stats import Sums", "compress.calib.stats"),
        ("compress.quant.x", "from . import feedback", "."),
    ],
)
def test_check_of_the_import_direction(name: str, source: str, bad: str) -> None:
    assert not_allowed(name, imports(ast.walk(ast.parse(source)))) == {bad}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("compress.formats.x", "import torch\nfrom compress.types import PackedWeight"),
        ("compress.runtime.x", "from compress.formats.int import decode\nfrom compress.runtime import x"),
        ("compress.quant.x", "from compress.quant import feedback\nfrom compress.formats import int"),
        ("compress.other", "from compress.quant import gptq"),
    ],
)
def test_check_of_the_import_direction_accepts(name: str, source: str) -> None:
    assert not_allowed(name, imports(ast.walk(ast.parse(source)))) == set()


MENTIONS = [
    "gptq = 1",
    "x.gptq",
    "f(gptq=1)",
    "class MyGptqRun: 0",
    "x = 'run gptq now'",
    "import a.gptq",
    "x = 'gpt_neox'",
]
OTHERS = ["'gptq: a docstring'", "def f():\n    'gptq'", "x = 1  # gptq", "gptqx = 'gptq4'", "x = 'gpt'"]


@pytest.mark.parametrize(("source", "count"), [*((s, 1) for s in MENTIONS), *((s, 0) for s in OTHERS)])
def test_check_of_mentions(source: str, count: int) -> None:
    assert len(mentions(ast.parse(source), {"gptq", "gpt-neox"})) == count


def test_check_of_imports_at_import_time() -> None:
    for source in (
        "import scipy.linalg",
        "try:\n    from scipy import x\nexcept ImportError: pass",
        "class A:\n    import scipy",
    ):
        assert imports(at_import(ast.parse(source))) & {"scipy", "scipy.linalg"}, source
    for source in ("def f():\n    import scipy", "if TYPE_CHECKING:\n    import scipy"):
        assert imports(at_import(ast.parse(source))) == set(), source


@pytest.mark.parametrize(
    "source", ["os.environ['A']", "_os.getenv('A')", "from os import environ", "os.environ.get('A')"]
)
def test_check_of_the_environment(source: str) -> None:
    assert environment_reads(ast.parse(source)) == [1]
    assert environment_reads(ast.parse("os.path.join('environ')")) == []


def test_check_of_unsafe_code() -> None:
    call = "f(trust_remote_code={})"
    for source in (
        "import pickle",
        "from dill import load",
        "torch.load(x)",
        "from torch import load",
        call.format(True),
    ):
        assert len(unsafe(ast.parse(source))) == 1, source
    for source in ("import torch", "safetensors.torch.load_file(x)", call.format(False)):
        assert unsafe(ast.parse(source)) == [], source
