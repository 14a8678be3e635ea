"""`bench --serve`: processes, times and what is printed, with an engine that stands in for a real one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.errors import CompressError
from compress.evaluate import serving
from compress.evaluate.serving import Load, ServingSpeed
from helpers.runs import cli, one_line

# One token for each request and step; what has been asked is written beside the models.
STAND_IN = """
import json, types
from pathlib import Path

class SamplingParams:
    def __init__(self, **given): self.given = given

class LLM:
    def __init__(self, model, **given):
        self.asked, self.llm_engine, self.waiting = Path(model) / "asked.jsonl", self, {}
        self.write(given)
        if (Path(model) / "broken").exists():
            raise ValueError("no such shard\\nand more")

    def write(self, what):
        with self.asked.open("a") as file:
            print(json.dumps(what), file=file)

    def add_request(self, name, prompt, sampling):
        self.write({"prompt": prompt["prompt_token_ids"], **sampling.given})
        self.waiting[name] = [0, sampling.given["max_tokens"]]

    def has_unfinished_requests(self): return bool(self.waiting)

    def step(self):
        print("a line of the engine's own")
        outputs = []
        for name, place in list(self.waiting.items()):
            place[0] += 1
            if place[0] == place[1]: del self.waiting[name]
            output = types.SimpleNamespace(token_ids=list(range(place[0])))
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[output]))
        return outputs
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an engine, which is found before any other, and two models of no weights."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(STAND_IN)
    for name in ("packed", "plain"):
        (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    return tmp_path


def test_both_models_are_asked_the_same(engine: Path) -> None:
    load = Load(5, 3, (1, 4), cache_nbytes=77)
    assert serving.choose_engine(None) == "vllm"
    speeds = serving.measure([engine / "packed", engine / "plain"], "vllm", load)
    asked = [(engine / name / "asked.jsonl").read_text() for name in ("packed", "plain")]
    assert asked[0] == asked[1]
    first, *requests = map(json.loads, asked[0].splitlines())
    assert (first["kv_cache_memory_bytes"], first["max_model_len"], first["enable_prefix_caching"]) == (77, 8, False)
    assert len(requests) == 1 + serving.TURNS * (1 + 4)
    prompts = [tuple(each["prompt"]) for each in requests]
    assert len(set(prompts)) == len(prompts) and {len(each) for each in prompts} == {5}
    assert all(each["max_tokens"] == 3 and each["ignore_eos"] for each in requests)
    for of_model in speeds:
        assert [each.requests for each in of_model] == [1, 4]
        assert all(
            0 < each.first_token_s <= each.last_first_token_s < 3 * each.requests / each.tokens_per_s
            for each in of_model
        )


def test_rates_of_a_turn() -> None:
    speed = ServingSpeed.of_times([(0.5, 2.0), (1.0, 4.0), (3.0, 5.0)], 10)
    assert speed == ServingSpeed(3, 6.0, 1.0, 3.0)


def test_an_engine_that_ends_is_one_line(engine: Path) -> None:
    (engine / "plain/broken").touch()
    with pytest.raises(CompressError, match=r"^vllm has ended while it served .*plain: ValueError: no such shard$"):
        serving.measure([engine / "plain"], "vllm", Load(5, 3, (1,)))


def test_an_engine_that_is_not_there() -> None:
    with pytest.raises(CompressError, match="none of vllm, sglang, transformers"):
        serving.choose_engine("tgi")


def test_transformers_serves(pico_dir: Callable[..., Path]) -> None:
    """The engine that is always there, in this process."""
    turn = serving.ENGINES["transformers"](str(pico_dir("llama")), Load(5, 3, (2,)))
    times = turn([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], 3)
    assert len(times) == 2 and all(0 < first < last for first, last in times)


def test_the_command(engine: Path, pico_dir: Callable[..., Path]) -> None:
    model = str(shutil.copytree(pico_dir("llama"), engine / "model"))
    words = ["bench", model, "--serve", "--device", "cpu", "--engine", "vllm", "--new-tokens", "2"]
    folder = f"import sys; sys.path.insert(0, {str(engine)!r}); import os; os.environ['PYTHONPATH'] = {str(engine)!r}"
    shown = cli(*words, "--base", model, "--concurrency", "1,2", prepare=folder)
    assert shown.code == 0 and shown.err == "compress: vllm on cpu: prompts of 128 tokens, 2 new ones\n", shown
    assert [line.split()[0] for line in shown.out.splitlines()] == ["requests", "1", "2"] and "ratio" in shown.out
    assert "--engine tgi: it is none of vllm, sglang, transformers" in one_line(cli(*words[:-4], "--engine", "tgi"))
    assert "goes with --serve" in cli("bench", model, "--engine", "vllm").err
