"""What the documentation shows is parsed, loaded and accounted for; running it is `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs_lines import checks, claims, pages, runner, table
from docs_lines.pages import Sample
from docs_lines.scratch import Result, Scratch, run

TABLE = table.read()
PAGES = pages.pages()
SAMPLES = [sample for page in PAGES for sample in runner.all_samples(page)]
COMMANDS = [sample for sample in SAMPLES if sample.language == "bash"]
DONE = Result(0, "wrote 12 files, 3.5 MiB\nKL 0.0012\n", 1.0)

PAGE = """text `compress plan`

```bash
# only a comment
echo "one # two"   # prints one
COMPRESS=1 compress quantize m \\
    --set bits=3
```

```yaml
kv_cache: {method: kivi}
```
"""


def sample(text: str, comment: str = "", language: str = "bash") -> Sample:
    return Sample("page.md", 1, language, text, comment, f"page.md {language} 1")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_is_right(page: str) -> None:
    shown = [*runner.all_samples(page), *pages.spans(page)]
    assert {f"{each.place}: {each.text}": wrong for each in shown if (wrong := checks.problem(each, TABLE))} == {}


@pytest.mark.parametrize("page", PAGES)
def test_no_command_stands_in_an_indented_block(page: str) -> None:
    text = (pages.ROOT / page).read_text(encoding="utf-8")
    fenced = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    assert re.findall(r"^ {4,}(?:compress|python|make|pip|torchrun) .*", fenced, re.M) == []


def test_every_rule_is_of_use() -> None:
    used = [TABLE.rule(command) for command in COMMANDS]
    assert [rule.line for rule in TABLE.commands if rule not in used] == []
    swaps = [(command.text, old) for command in COMMANDS for old in TABLE.rule(command).swap]
    assert [(text, old) for text, old in swaps if old not in text] == []


def test_every_other_entry_of_the_table_is_of_use() -> None:
    spans = [span for page in PAGES for span in pages.spans(page)]
    befores = [block.before for block in TABLE.blocks.values()]
    texts = "\n".join([*(each.text for each in SAMPLES), *befores, *TABLE.things.values()])
    assert set(TABLE.blocks) <= {each.block for each in SAMPLES}
    assert set(TABLE.comments) <= {command.comment for command in COMMANDS if not TABLE.reason(command)}
    assert [name for name in TABLE.things if name not in texts] == []
    assert set(TABLE.other_options) <= {option for span in spans for option in checks.OPTION.findall(span.text)}
    assert not set(TABLE.other_options) & checks.all_options()


def test_pages_are_read(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    first, second, third = pages.samples("page.md", tmp_path)
    assert (first.line, first.text, first.comment) == (5, 'echo "one # two"', "prints one")
    assert (second.line, second.text) == (6, "COMPRESS=1 compress quantize m --set bits=3")
    assert (third.line, third.block) == (11, "page.md yaml 1")
    assert [(span.line, span.text) for span in pages.spans("page.md", tmp_path)] == [(1, "compress plan")]


@pytest.mark.parametrize(
    ("text", "language", "message"),
    [
        ("compress quantise ./model", "bash", "there is no command compress quantise"),
        ("compress quantize ./model --bit 3", "bash", "No such option"),
        ("compress quantize", "bash", "Missing argument"),
        ("compress plan ./model --recipe int5", "bash", "unknown recipe 'int5'"),
        ("compress plan ./model --recipe int4 --set bit=3", "bash", "unknown key 'bit'"),
        ("compress eval ./model --kv kv2 --set bit=3", "bash", "unknown key 'bit'"),
        ("compress study ./model --recipes int4,nothing* --text t --out o", "bash", "no recipe matches nothing*"),
        ("torchrun -m compress plan ./model --recipe int5", "bash", "unknown recipe 'int5'"),
        ("python benchmarks/kernels.py --shape 1x1", "bash", "has no option --shape"),
        ("python benchmarks/nothing.py", "bash", "No such file"),
        ("make nothing", "bash", "the Makefile has no nothing"),
        ("pip install 'compress-llm[ggml]'", "bash", "compress-llm has no extra ggml"),
        ("frobnicate", "bash", "lines.yaml does not say what to do with frobnicate"),
        ("quantize: {method: gptq, bit: 4}", "yaml", "unknown key 'bit'"),
        ("{question: 1}", "json", "Expecting property name"),
        ("import = 1", "python", "invalid syntax"),
        ("anything", "", "the block says no language"),
        ("compress kv shown", "span", "there is no command compress kv shown"),
        ("compress eval --tsk", "span", "there is no option --tsk"),
        ("--nothing", "span", "there is no option --nothing"),
        ("--set bit=3", "span", "no recipe takes --set bit=3"),
    ],
)
def test_what_is_wrong_is_found(text: str, language: str, message: str) -> None:
    assert message in checks.problem(sample(text, language=language), TABLE)


def test_a_comment_that_the_table_does_not_know_is_found() -> None:
    assert "comment claims: new" in checks.problem(sample("compress methods", "new"), TABLE)


@pytest.mark.parametrize(
    ("text", "comment", "shown", "result", "broken"),
    [
        ("x", "", "wrote 7 files, 120 MiB", DONE, ""),
        ("x", "", "wrote N files", DONE, ""),
        ("x", "", "read 7 files", DONE, "it does not print: read 7 files"),
        ("x", "", "", Result(1, "", 1.0), "exit status 1"),
        ("x", "", "", Result(None, "", 9.0), "it was not done after 9 s"),
        ("x", "", "", Result(0, "a.py:1: FutureWarning: soon", 1.0), "it prints FutureWarning:"),
        ("x", "", "", Result(0, "/site-packages/a.py:1: FutureWarning: soon", 1.0), ""),
        ("x --out there", "", "", DONE, ""),
        ("x --out nowhere", "", "", DONE, "nowhere was not written"),
        ("x > nowhere", "", "", DONE, "nowhere was not written"),
        ("x", "writes nowhere", "", DONE, "nowhere was not written"),
        ("x", "the loss", "", DONE, ""),
        ("x", "the sizes", "", DONE, "its output has no 'TiB', but the page says: the sizes"),
    ],
)
def test_claims(text: str, comment: str, shown: str, result: Result, broken: str, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    claimed = table.Table({}, [], {}, {"the loss": [r"KL [\d.]+"], "the sizes": ["MiB", "TiB"]}, [])
    assert claims.broken(sample(text, comment), result, tmp_path, shown, claimed) == broken


def test_lines_are_run_in_their_order_with_what_they_presume(tmp_path: Path) -> None:
    rules = [table.Rule("cat *", add="second"), table.Rule("rm *", skip="it would be gone"), table.Rule("*")]
    things = {"./first": "echo 1 > first", "second": "cat first ./first > second"}
    scratch = Scratch(tmp_path / "work", table.Table(things, rules, {}, {}, []), tmp_path / "root")
    scratch.root.mkdir()
    page = "```bash\ncat ./first\nrm second\nexit 3\n```\n\n```text\n4\n```\n"
    (scratch.root / "page.md").write_text(page, encoding="utf-8")
    scratch.prepare()
    rows = runner.run_page("page.md", scratch, lambda row: None)
    assert [row.outcome for row in rows] == ["ran", "skipped", "FAILED", "compared"]
    assert [row.output for row in rows] == ["1\n1\n1\n", "", "", ""]
    assert [row.why for row in rows] == ["", "it would be gone", "exit status 3", ""]


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    assert run("sleep 60 & sleep 60", tmp_path, 0.2).status is None
