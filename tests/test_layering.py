"""Who may import whom, and what no source may contain. Reads the sources, imports none of them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from compress import plugins
from helpers import structure

ROOT = Path(__file__).parents[1]
HEAVY = {"scipy", "datasets", "pyarrow", "transformers", "triton", "llvmlite", "numba"}
LOOSE = 10  # modules beside the packages
OPENERS = {"from_pretrained", "from_config", "torch_load", "load_state_dict_from_url"}
REFUSED = {"trust_remote_code": False, "allow_pickle": False, "weights_only": True, "use_safetensors": True}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


# The packages (and the modules that lie beside them) in order: each may import those before it and itself.
ORDER = [
    *("version", "errors", "types", "plugins", "progress", "process_memory"),  # what everything may use
    *("ranks", "pages"),
    *("numerics", "formats", "kernels", "storage", "importers", "kv", "runtime", "speculate", "serving"),  # run it
    *("model", "recipe", "calib", "lowrank", "quant", "tune", "transform"),  # what makes one
    *("run", "evaluate", "allocate", "export", "api", "study", "cli"),  # who uses all this
    *("recipes", "autoload", "__init__", "__main__"),
    "papers",  # found by their files' names; nothing imports them
]

# Packages with plugins -> what these may import of ours beside what their package shares; never another plugin.
BASE = {"compress.errors", "compress.types", "compress.numerics"}
PLUGINS: dict[str, set[str]] = {
    "quant": BASE
    | {"compress.formats", "compress.papers.formats", "compress.kernels.llvm", "compress.kernels.loops"}
    | {"compress.lowrank.correct"},
    "allocate": BASE | {"compress.allocate"},
    "importers": {"compress.errors", "compress.numerics", "compress.storage"},
    "export": BASE | {"compress.formats", "compress.storage", "compress.export"},
    "formats": BASE | {"compress.formats.lowrank"},  # which any weight may have beside it
    "task": {"compress.errors", "compress.evaluate", "compress.storage"},
}

# Model types that are also words of our own or plain English.
ORDINARY = {"align", "aria", "beam", "canary", "clap", "clip", "ctrl", "encoder-decoder", "flint", "funnel", "radio"}
ORDINARY |= {"bitnet"}  # a method, too


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


def parse(name: str) -> ast.Module:
    return structure.parse(MODULES[name])


def imports(nodes: Iterable[ast.AST]) -> set[str]:
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


def ours(imported: set[str]) -> set[str]:
    return {module for module in imported if is_under(module, "compress")}


def package(name: str) -> str:
    """compress.run.job -> run, compress.types -> types, compress -> __init__."""
    return (f"{name}.__init__").split(".")[1]


def upward(name: str, imported: set[str]) -> set[str]:
    """Those of our modules that come later in the order than the module `name`."""
    place = ORDER.index(package(name))
    return {m for m in ours(imported) if package(m) != package(name) and ORDER.index(package(m)) > place}


def plugin_of(name: str) -> str | None:
    """The kind of the plugin that a module is."""
    folder, _, file = name.rpartition(".")
    for kind in plugins.KINDS:
        folders = {plugins.PACKAGES[kind], plugins.PAPERS.get(kind)}
        if folder.removeprefix("compress.") in folders and file in plugins.names(kind):
            return kind
    return None


def beyond(name: str, imported: set[str]) -> set[str]:
    """What a plugin may not import: other plugins of its kind, and what its kind has no business with."""
    kind = plugin_of(name)
    if kind not in PLUGINS:
        return set()
    folders = [f"compress.{folder}" for folder in (plugins.PACKAGES[kind], plugins.PAPERS.get(kind)) if folder]
    shared = {m for m in imported if any(is_under(m, folder) for folder in folders) and plugin_of(m) != kind}
    return {m for m in ours(imported) - shared if not any(is_under(m, allowed) for allowed in PLUGINS[kind])}


def docstrings(tree: ast.Module) -> set[int]:
    """ids of the nodes of strings that are statements of their own."""
    return {id(node.value) for node in structure.nodes(tree) if isinstance(node, ast.Expr)}


def words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and every string outside docstrings."""
    skipped = docstrings(tree)
    for node in structure.nodes(tree):
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
    lines = defaultdict(list)
    for line, text in words(tree):
        lines[text].append(line)
    found = []
    for text, places in lines.items():
        split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W", "_", text).lower()  # GptqConfig -> gptq_config
        found += [f"line {line}: {wanted[match]}" for match in pattern.findall(f"_{split}_") for line in places]
    return found


def environment_reads(tree: ast.Module) -> list[int]:
    """Lines that touch the environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}

    def touches(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in names and ast.unparse(node.value).lstrip("_") == "os"
        return isinstance(node, ast.ImportFrom) and node.module == "os" and bool(names & {a.name for a in node.names})

    return [getattr(node, "lineno", 0) for node in structure.nodes(tree) if touches(node)]


def unsafe(tree: ast.Module) -> list[str]:
    """Ways to run code that a checkpoint brings along."""
    found = sorted(module for module in imports(structure.nodes(tree)) if module.split(".")[0] in PICKLES)
    for node in structure.nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node) == "torch.load":
            found.append(f"line {node.lineno}: torch.load")
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in {a.name for a in node.names}:
            found.append(f"line {node.lineno}: torch.load")
        if isinstance(node, ast.keyword) and node.arg in REFUSED and ast.unparse(node.value) != str(REFUSED[node.arg]):
            found.append(f"line {node.lineno}: {node.arg}")
    return found


def openers(tree: ast.Module) -> list[str]:
    """line N: name, for each use of what opens a model, a configuration or a tokenizer in transformers."""
    names = {"Attribute": "attr", "Constant": "value"}  # the second: of getattr
    used = [node for node in structure.nodes(tree) if getattr(node, names.get(type(node).__name__, ""), "") in OPENERS]
    return sorted(f"line {node.lineno}: {ast.unparse(node)}" for node in used)


def unguarded(tree: ast.Module) -> list[str]:
    """Calls of `openers` that do not refuse remote code, or open weights of any kind of file."""
    found = []
    for node in structure.nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OPENERS:
            given = {word.arg or ast.unparse(word.value) for word in node.keywords}
            text = ast.unparse(node.func)
            if not given & {"trust_remote_code", "_LOCAL"}:
                found.append(f"{text}: remote code")
            if text == "AutoModelForCausalLM.from_pretrained" and "use_safetensors" not in given:
                found.append(f"{text}: pickles")
    return found


def offenders(find: Callable[[str], object], names: Iterable[str] = ()) -> dict[str, object]:
    """Module -> what is wrong with it, for those where something is."""
    return {name: wrong for name in names or MODULES if (wrong := find(name))}


@cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports."""
    return {name: (imports(structure.nodes(parse(name))) & MODULES.keys()) - {name} for name in MODULES}


def test_every_package_has_its_place() -> None:
    assert {package(name) for name in MODULES if name != "cli"} == set(ORDER)


def test_packages_import_only_those_before_them() -> None:
    found = offenders(lambda name: upward(name, graph()[name]), [name for name in MODULES if name != "cli"])
    assert found == {}


def test_plugins_do_not_know_each_other() -> None:
    assert offenders(lambda name: beyond(name, graph()[name])) == {}


def test_few_modules_lie_beside_the_packages() -> None:
    assert len(list((ROOT / "compress").glob("*.py"))) <= LOOSE


def test_imports_are_absolute() -> None:
    assert offenders(lambda name: {m for m in imports(structure.nodes(parse(name))) if m.startswith(".")}) == {}


GENERAL = [name for name in MODULES if package(name) in ("cli", "run")]


def test_no_method_names_in_the_general_modules() -> None:
    methods = set(plugins.names("quant")) - {"lossless"}  # also a quality of saved caches
    assert offenders(lambda name: mentions(parse(name), methods), GENERAL) == {}


@pytest.fixture(scope="module")
def model_types() -> set[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return {name for name in CONFIG_MAPPING_NAMES if len(name) >= 4} - ORDINARY


def test_no_model_names(model_types: set[str]) -> None:
    assert offenders(lambda name: mentions(parse(name), model_types)) == {}


LIGHT = [name for name in MODULES if package(name) in ("errors", "plugins", "autoload", "__init__", "recipe", "cli")]


def test_light_modules_import_nothing_heavy() -> None:
    assert offenders(lambda name: {m.split(".")[0] for m in imports(at_import(parse(name)))} & HEAVY, LIGHT) == {}


# The third asks only where the user keeps caches: what it finds there saves time and changes no number.
# The fourth asks whether files are to be compared with their hashes.
READS_ENVIRONMENT = (
    *("compress.autoload", "compress.__main__", "compress.kernels.llvm", "compress.storage.manifest"),
    *("compress.ranks", "compress.ranks.connected", "compress.ranks.shares"),  # what torchrun says
    *("compress.ranks.children", "compress.evaluate.serving"),  # what new processes inherit
)


def test_environment_is_read_in_few_places_only() -> None:
    assert offenders(lambda name: environment_reads(parse(name))).keys() == set(READS_ENVIRONMENT)


EVERYWHERE = [*sources(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]


def test_nothing_is_unpickled_and_no_remote_code_is_trusted() -> None:
    found = {str(path.relative_to(ROOT)): unsafe(structure.parse(path)) for path in EVERYWHERE}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


OPENS, STANDS_IN = "compress.model.load", "compress.runtime.draft_heads"  # the second: for transformers' own generate


# Benchmarks that show how these open models.
OTHER_TOOLS = {"kv_eviction.py", "lossless.py", "peers.py", "peft_example.py"}


def test_one_module_opens_models() -> None:
    assert offenders(lambda name: openers(parse(name))).keys() == {OPENS, STANDS_IN}
    benchmarks = [path for path in (ROOT / "benchmarks").glob("*.py") if openers(structure.parse(path))]
    assert {path.name for path in benchmarks} <= OTHER_TOOLS
    assert unguarded(parse(OPENS)) == []
    local = next(n for n in parse(OPENS).body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "_LOCAL")
    assert local.value is not None
    assert ast.literal_eval(local.value) == {"trust_remote_code": False, "local_files_only": True}


# The checks themselves, on sources that break the rules.


def test_the_sources_are_found() -> None:
    known = {"compress", "compress.numerics.packing", "compress.formats.int", "compress.quant.gptq", "compress.calib"}
    assert known <= MODULES.keys()


def test_check_of_the_order() -> None:
    source = "if TYPE_CHECKING:\n    from compress.{} import x"
    for name, module in (("numerics.x", "types"), ("kv.codecs.x", "kernels.cpu.int"), ("types", "types")):
        assert upward(f"compress.{name}", imports(ast.walk(ast.parse(source.format(module))))) == set()
    for name, module in (("numerics.x", "formats"), ("runtime.x", "recipe"), ("run.x", "allocate.session")):
        found = upward(f"compress.{name}", imports(ast.walk(ast.parse(source.format(module)))))
        assert found == {f"compress.{module}"}


def test_check_of_plugins() -> None:
    for module in ("quant.feedback", "formats.int", "types", "lowrank.correct"):
        assert beyond("compress.quant.gptq", {f"compress.{module}"}) == set()
    for module in ("quant.rtn", "calib.stats", "model.graph", "run.job"):
        assert beyond("compress.quant.gptq", {f"compress.{module}"}) == {f"compress.{module}"}
    assert beyond("compress.quant.feedback", {"compress.calib.stats"}) == set()


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
        "np.load(x, allow_pickle=True)",
        "f(weights_only=False)",
        "f(use_safetensors=None)",
    ):
        assert len(unsafe(ast.parse(source))) == 1, source
    for source in ("import torch", "safetensors.torch.load_file(x)", call.format(False)):
        assert unsafe(ast.parse(source)) == [], source


def test_check_of_openers() -> None:
    uses = ("AutoConfig.from_pretrained(x)", "M.from_config(c)", "f = M.from_pretrained", "getattr(M, 'from_config')")
    for source in uses:
        assert len(openers(ast.parse(source))) == 1, source
    assert openers(ast.parse("'AutoModel.from_pretrained(x)'\nload_model(x)")) == []
    call = "AutoModelForCausalLM.from_pretrained(x, {})"
    for given, count in (
        ("", 2),
        ("trust_remote_code=False", 1),
        ("use_safetensors=True, **_LOCAL", 0),
        ("**other", 2),
    ):
        assert len(unguarded(ast.parse(call.format(given)))) == count, given
