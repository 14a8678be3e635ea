"""The documentation: what is generated is up to date, what is named exists, and the tutorial's code runs."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compress import plugins, recipe
from compress.cli.app import FORMER_WORDS, app
from compress.recipe import catalogue, sources
from helpers import problems
from helpers.fake_methods import install

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
README_BYTES = 9000
TUTORIAL = ROOT / "docs" / "adding_a_method.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
RECIPES = {path.stem for path in (ROOT / "recipes").rglob("*.yaml")}
SOURCE_PATH = re.compile(r"(?<![\w/.-])((?:compress|calib|recipes|tests|docs|benchmarks)/[\w/.-]*\.(?:py|yaml|md))\b")
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    """The text without fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Targets of links, but for those to other sites."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """What a link to a heading of the page is called."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_recipes(text: str) -> list[str]:
    """Names in code style in the first column of tables that start with `recipe`, without their settings."""
    names, in_table = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            in_table = False
            continue
        first = line.split("|")[1].strip()
        in_table = in_table or first.startswith("recipe")
        if in_table:
            names += [name.partition(":")[0] for name in re.findall(r"`([^`]+)`", first)]
    return names


def named_recipes(text: str) -> set[str]:
    """Every recipe that a page names: in tables, in commands, as a file."""
    commands = set(re.findall(r"--(?:recipe|kv)[ =]([a-z][\w.-]*)", text)) - {"own"}  # the cache of a checkpoint
    files = re.findall(r"\brecipes/(?:papers/)?([\w.-]+)\.yaml", text)
    return {*table_recipes(text), *commands, *files}


def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) <= README_BYTES


def test_the_page_of_recipes_is_up_to_date() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_recipes.py"))
    written = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert written == generator["page"](), "run: python docs/generate_recipes.py"
    drawn = (ROOT / "docs" / "results" / "recipes.svg").read_text(encoding="utf-8")
    assert drawn == generator["picture"](), "run: python docs/generate_recipes.py"


@PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


@PAGE
def test_commands_have_their_present_names(page: Path) -> None:
    if page.name != "CHANGELOG.md":
        text = page.read_text(encoding="utf-8")
        assert re.findall(rf"`?compress ({'|'.join(FORMER_WORDS)})\b|`(kv-bench)`", text) == []


@PAGE
def test_recipes_that_are_named_exist(page: Path) -> None:
    own = set(re.findall(r"^## .*`recipes/([\w.-]+)\.yaml`$", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named_recipes(page.read_text(encoding="utf-8")) - RECIPES - own == set()


@PAGE
def test_sources_that_are_named_exist(page: Path) -> None:
    """Paths from the root, but for those of the tutorial's method, NAME and FORMAT."""
    if page.name != "CHANGELOG.md":
        text = page.read_text(encoding="utf-8")
        named = set(SOURCE_PATH.findall(text))
        own = re.compile(r"weighted|NAME|FORMAT")
        assert [name for name in sorted(named) if not (own.search(name) or (ROOT / name).exists())] == []


def test_the_index_of_results_has_every_page() -> None:
    folder = ROOT / "docs" / "results"
    linked = set(links((folder / "README.md").read_text(encoding="utf-8")))
    assert {path.name for path in folder.glob("*.md")} - linked == {"README.md"}


def test_the_readme_has_a_table_of_recipes() -> None:
    assert {"int4", "vq2bit"} <= set(table_recipes(README.read_text(encoding="utf-8")))


def test_the_figures_of_the_readme_are_those_of_the_recipes() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| [^|]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README.read_text(), re.M)
    assert len(rows) >= 8
    for name, bits, loss, perplexity in rows:
        run = catalogue.entry(name).measured[0]
        assert (run.bpw, run.kl, run.perplexity, run.tokens) == (bits, loss, perplexity, "65408"), name


def is_new(method: str) -> bool:
    """Whether recipes name a method, and none of them is measured yet: such a one has no row to write."""
    entries = [entry for entry in catalogue.entries() if f"method: {method}\n" in recipe.text(entry.name)]
    return bool(entries) and not any(entry.measured for entry in entries)


@pytest.mark.parametrize("kind", ["quant", "transform", "allocate", "kv"])
def test_the_readme_lists_every_method_of_the_core(kind: str) -> None:
    methods = README.read_text(encoding="utf-8").partition("## Methods")[2].partition("## Limits")[0]
    core = {name for name in plugins.names(kind) if not plugins.is_paper(kind, name)}
    assert {name for name in core - set(re.findall(r"`(\w+)`", methods)) if not is_new(name)} == set()


def test_the_readme_counts_the_models_of_the_sweep() -> None:
    built, taken = re.search(r"Of the (\d+) causal .* that were tried, (\d+) go in", README.read_text()).groups()  # type: ignore[union-attr]
    sweep = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert f"of which transformers builds {built} from" in sweep and f"| int4 | {taken} |" in sweep


@PAGE
def test_no_absolute_paths(page: Path) -> None:
    assert re.findall(r"(?<![\w.~/])/(?:home|root|tmp|work|usr|opt)/\S*", page.read_text(encoding="utf-8")) == []


def tutorial(language: str) -> list[str]:
    """The tutorial's blocks of code."""
    return re.findall(rf"^```{language}\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("package", "needs", "bits"),
    [
        ("compress.quant", "frozenset()", "\n  bits: 3"),
        ("compress.papers.quant", "frozenset()", "\n  bits: 5"),
        ("compress.quant", 'frozenset({"hessian"})', ""),
        ("compress.papers.quant", 'frozenset({"hessian"})', "\n  bits: 3"),
    ],
)
def test_what_the_tutorial_adds_is_listed_before_it_is_measured(
    package: str, needs: str, bits: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A method with or without data and its recipe, as the page says: in `compress recipes` and in the page of them."""
    method = tutorial("python")[0].replace('frozenset({"hessian"})', needs)
    install(monkeypatch, tmp_path / "methods", package, weighted_rtn=method)
    folder = shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    text = tutorial("yaml")[0].partition("measured:")[0].replace("\n  bits: 3", bits)
    (folder / "weighted3bit.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sources, "files", lambda package: folder)
    listed = json.loads(CliRunner().invoke(app, ["recipes", "--json"], catch_exceptions=False).stdout)["weighted3bit"]
    planned = {"\n  bits: 3": (3.125, "Weights, 3 bits"), "\n  bits: 5": (5.125, "Weights, 4 bits")}
    assert (listed["bits"], listed["purpose"]) == planned.get(bits, (4.125, "Weights, 4 bits"))
    assert not listed["measured"]
    assert listed["calibration"] == (needs != "frozenset()") and listed["cost"] in ("data-free", "one pass")
    shown = CliRunner().invoke(app, ["recipes"], catch_exceptions=False)
    assert shown.exit_code == 0 and "weighted3bit" in shown.stdout
    page = runpy.run_path(str(ROOT / "docs" / "generate_recipes.py"))["page"]()
    assert "- Quality not measured.\n" in page and "[`weighted3bit`]" in page


def test_the_method_of_the_tutorial_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    method, test = tutorial("python")
    install(monkeypatch, tmp_path, weighted_rtn=method)
    (tmp_path / "weighted3bit.yaml").write_text(tutorial("yaml")[0], encoding="utf-8")
    module = plugins.load("quant", "weighted_rtn")
    scheme = recipe.load(str(tmp_path / "weighted3bit.yaml")).quantize
    assert scheme.method == "weighted_rtn" and isinstance(scheme.config, module.Config)

    weight, stats = problems.random(32, 256), problems.stats(problems.inputs(512, 256))
    packed = module.quantize(weight, stats, scheme.config).weight
    assert packed.params == module.plan_params(scheme.config, (32, 256))
    error = problems.decoded(packed) - weight.double()
    assert error.square().sum() < 0.1 * weight.double().square().sum()
    assert torch.isfinite(error).all()

    (tmp_path / "test_tutorial.py").write_text(test, encoding="utf-8")
    names = runpy.run_path(str(tmp_path / "test_tutorial.py"))
    names["test_codes_are_the_nearest_levels"]()
    names["test_it_loses_less_than_round_to_nearest"](3)
