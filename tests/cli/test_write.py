"""`compress generate`, `chat` and `serve`: what they write, and the command lines of engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compress import api, recipe
from compress.cli import write
from compress.cli.app import app
from compress.errors import CalibrationError
from compress.evaluate import generation
from compress.model import writing
from compress.model.writing import Filter
from compress.run.job import Job
from helpers.pico import save_pico

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    directory = save_pico("llama", tmp_path_factory.mktemp("chat") / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def cached(chatty: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a compressed cache."""
    out = tmp_path_factory.mktemp("cached") / "kv4"
    api.quantize(Job(str(chatty), recipe.load("kv4", ["kv_cache.residual_length=32"]), out, pack=False))
    return out


def run(*words: object, given: str = "") -> str:
    result = CliRunner().invoke(app, [*map(str, words)], input=given, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tokens_that_may_be_drawn() -> None:
    p = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.1, 0.15, 0.2, 0.5]], dtype=torch.float64)
    for tokens, count in (
        (Filter(), 5),
        (Filter(top_k=2), 2),
        (Filter(top_k=9), 5),
        (Filter(top_p=0.69), 2),
        (Filter(top_p=0.8), 3),
        (Filter(top_p=0.0), 1),
        (Filter(min_p=0.25), 3),
        (Filter(min_p=1.0), 1),
        (Filter(top_k=3, top_p=0.6), 2),  # of the three that are left, 0.85 in all
    ):
        kept = tokens.apply(p.clone())
        for row, whole in zip(kept, p, strict=True):
            likeliest = whole.argsort(descending=True)[:count]
            assert sorted(row.nonzero().flatten().tolist()) == sorted(likeliest.tolist()), tokens
            assert torch.equal(row[likeliest], whole[likeliest])


def test_text_is_told_as_it_is_written(chatty: Path) -> None:
    said, written = [], []
    for temperature, tokens in ((0.0, Filter()), (1.5, Filter(top_k=40, top_p=0.9, min_p=0.01))):
        writer = generation.open_writer(chatty, generation.Style(24, temperature, 3, tokens))
        pieces: list[str] = []
        text = writer.write(generation.prompt_ids(chatty, "Once upon"), pieces.append).text
        assert "".join(pieces) == text and len(pieces) > 3
        said.append(text)
        written.append(writer.write(generation.prompt_ids(chatty, "Once upon")).text)
    assert said == written and said[0] != said[1]
    assert run("generate", chatty, "--prompt", "Once upon", "--max-new-tokens", 24) == said[0] + "\n"


def test_a_draft_changes_no_likeliest_token(chatty: Path) -> None:
    words = ("generate", chatty, "--prompt", "Once upon", "--max-new-tokens", 16)
    assert run(*words, "--draft", chatty) == run(*words)


def test_prompts_of_a_file(chatty: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Hello"}]
    file.write_text(
        f'Once upon\n\n"Once upon"\n{{"prompt": "Once upon"}}\n{json.dumps({"messages": messages})}\n{{ so\n'
    )
    rows = list(map(json.loads, run("generate", chatty, "--prompts", file, "--max-new-tokens", 4).splitlines()))
    assert [row.get("prompt") for row in rows] == ["Once upon"] * 3 + [None, "{ so"]
    assert rows[0]["text"] == rows[1]["text"] == rows[2]["text"] and rows[3]["messages"] == messages
    chat = run("generate", chatty, "--chat", "--prompt", "Hello", "--max-new-tokens", 4)
    assert chat == rows[3]["text"] + "\n"
    file.write_text('{"text": 3}')
    with pytest.raises(CalibrationError, match="line 1 is neither a text nor"):
        generation.read_prompts(file)


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    plain = save_pico("llama", tmp_path / "plain")
    for words in (["generate", str(plain), "--chat", "--prompt", "x"], ["chat", str(plain)]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1 and "no chat template" in result.stderr


@pytest.mark.parametrize("kind", ["chatty", "cached"])
def test_a_conversation_reads_each_token_once(kind: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(kind)
    writer = generation.open_writer(directory, generation.Style(6))
    talk = generation.Conversation(writer, "Be short.")
    talk.say("Hello there")
    first = talk.stats()
    talk.say("And then")
    second = talk.stats()
    assert first["tokens"] < second["tokens"] and second["cache bytes"] > 0
    assert first["compressed cache"] == (kind == "cached")
    ids = generation.chat_ids(writer.tokenizer, talk.messages[:-1], "it")
    assert second["read"] <= len(ids)
    if kind == "chatty":
        assert talk.messages[-1]["content"] == writer.write(ids).text
    talk.reset()
    assert talk.stats()["tokens"] == 0 and len(talk.messages) == 1


def test_chat_reads_a_pipe(chatty: Path) -> None:
    given = "Hello\n/stats\n/nothing\n\n/reset\nHello\n/stats\n/quit\nnot read\n"
    out = run("chat", chatty, "--max-new-tokens", 5, "--temperature", 0, given=given)
    stats = [json.loads(line) for line in out.splitlines() if line.startswith('{"tokens"')]
    assert len(stats) == 2 and stats[0]["tokens"] == stats[1]["tokens"] > 0 and "not read" not in out
    assert not stats[0]["compressed cache"]


def test_a_chat_takes_a_cache(chatty: Path) -> None:
    """The answer is that of `generate` with the same cache, which is held from turn to turn."""
    words = ("--kv", "kv4", "--set", "residual_length=32", "--max-new-tokens", 5, "--temperature", 0)
    out = run("chat", chatty, *words, given="Hello\n/stats\nAnd then?\n/stats\n").splitlines()
    stats = [json.loads(line) for line in out if line.startswith('{"tokens"')]
    assert stats[0]["compressed cache"] and 0 < stats[0]["tokens"] < stats[1]["tokens"]
    assert out[0] == run("generate", chatty, "--chat", "--prompt", "Hello", *words).rstrip("\n")
    result = CliRunner().invoke(app, ["chat", str(chatty), "--set", "bits=3"])
    assert result.exit_code == 1 and "name one" in result.stderr


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"vllm", "llama-server"}, "vllm serve DIR --port 1"),
        ({"sglang"}, "-m sglang.launch_server --model-path DIR --port 1"),
        ({"fastapi", "uvicorn", "openai", "llama-server"}, "transformers serve DIR --port 1"),
        ({"llama-server"}, "llama-server -m DIR.gguf --port 1"),
    ],
)
def test_the_best_engine(installed: set[str], words: str, chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.setattr(write, "find_spec", lambda name: name if name in installed else None)
    lines = run("serve", chatty, "--print", "--", "--port", "1").splitlines()
    assert lines[-1].endswith(words.replace("DIR", str(chatty)))
    assert (len(lines) == 2) == (installed == {"llama-server"})


def test_no_engine(chatty: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(write, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", str(chatty)])
    assert result.exit_code == 1 and "no engine is installed; pip install vllm" in result.stderr
    monkeypatch.setattr(shutil, "which", lambda name: name)
    for engine, is_applied in (("vllm", True), ("sglang", False)):
        monkeypatch.setattr(write, "find_spec", lambda name: name)
        result = CliRunner().invoke(app, ["serve", str(cached), "--print", "--engine", engine])
        assert ("does not apply the checkpoint's kv_cache" in result.stderr) != is_applied, engine


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_drafts_of_the_model_itself(temperature: float, chatty: Path) -> None:
    words = ("generate", chatty, "--prompt", "ab ab ab ab", "--max-new-tokens", 40, "--temperature", temperature)
    result = CliRunner().invoke(app, [*map(str, words), "--speculate", "--drafts", "ngram,shortest=1,length=3"])
    assert result.exit_code == 0 and "drafted tokens accepted in" in result.stderr
    assert temperature or result.stdout == run(*words)
    row = json.loads(run(*words, "--drafts", "ngram,shortest=1,length=3", "--json"))
    assert row["text"] + "\n" == result.stdout
    assert row["drafts"]["rounds"] > 0 and 1 <= row["drafts"]["tokens"] <= 40


def test_drafts_that_cannot_be(chatty: Path) -> None:
    for words, line in (
        (["--speculate", "--drafts", "ngrams"], "did you mean 'ngram'"),
        (["--drafts", "level=4"], "has no levels"),
        (["--speculate", "--draft", str(chatty)], "goes without --draft"),
    ):
        result = CliRunner().invoke(app, ["generate", str(chatty), "--prompt", "a", *words], env={"COLUMNS": "200"})
        assert result.exit_code and line in result.stderr


def test_a_chat_with_drafts(chatty: Path) -> None:
    words = ("chat", chatty, "--max-new-tokens", 8, "--temperature", 0)
    given = "Hello\nHello\n"
    assert run(*words, "--speculate", given=given) == run(*words, given=given)
    out = run(*words, "--speculate", given="Hello\n/stats\n")
    stats = next(json.loads(line) for line in out.splitlines() if line.startswith('{"tokens"'))
    assert stats["drafts"]["tokens"] == stats["written"]


def test_a_law_is_what_tokens_are_drawn_by() -> None:
    scores, ids = torch.tensor([[0.3, -1.0, 2.0, 0.1]]), torch.tensor([[1]])
    kept = Filter(top_k=3, min_p=0.1)
    law = writing.Law("it", 0.7, torch.Generator(), tokens=kept)(ids, scores).softmax(-1)
    generator, drawn = torch.Generator().manual_seed(0), torch.zeros(4)
    draw = writing.Draw("it", 0.7, generator, tokens=kept)
    for _ in range(4000):
        drawn[int(draw(ids, scores).argmax())] += 1 / 4000
    assert law[0, 1] == 0 == drawn[1] and (law[0] - drawn).abs().max() < 0.03
