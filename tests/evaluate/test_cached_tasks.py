"""Tasks through a compressed cache: what token-by-token decoding behind the context reads, in any batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from compress import api
from compress.evaluate import Execution, answers, cache_scores, suite
from compress.evaluate.cache_candidates import open_reader
from compress.evaluate.items import Item, Material, Outcome, Task
from compress.evaluate.reader import Reader
from compress.evaluate.suite import SuiteRequest
from compress.kv.settings import cache_settings
from compress.progress import silent
from helpers.runs import TEXT, Setup, cli, job

HELD_OUT = TEXT.with_name("books_heldout.txt")
PLAIN = {"method": "kivi", "bits": 2, "group_size": 8, "residual_length": 8, "flush": 8, "sink": 2}
COARSE = cache_settings(PLAIN)
INEXACT = dataclasses.replace(COARSE, exact_prefill=False)
CONTEXTS = ((7, 44), (8, 44), (9, 28), (10, 1))  # seed and tokens; nothing is coded while an answer is read
STAYS = 8  # tokens that COARSE keeps exact


@pytest.fixture(scope="module")
def base(pico_dir: Callable[..., Path]) -> Path:
    return pico_dir("llama")


@pytest.fixture(scope="module", params=[COARSE, INEXACT], ids=["exact prefill", "inexact prefill"])
def opened(base: Path, request: pytest.FixtureRequest) -> Reader:
    """A model that reads and writes through a coarse cache."""
    return open_reader(base, Execution(), {"coarse": request.param}, None, silent)


@pytest.fixture(scope="module")
def material() -> Material:
    return Material(lambda text: [], lambda ids: " ".join(map(str, ids)), (), 256, 256, torch.zeros(0, 8).long())


def task(way: Any) -> Task:
    """Items with contexts of several lengths and answers of several lengths, as tokens."""

    def drawn(seed: int, count: int) -> tuple[int, ...]:
        return tuple(torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())

    said = [tuple(drawn(100 * seed + k, 1 + 2 * k) for k in range(3)) for seed, _ in CONTEXTS]
    return Task(
        "t", way, [Item(str(seed), drawn(seed, n), own, 2) for (seed, n), own in zip(CONTEXTS, said, strict=True)]
    )


@torch.no_grad()
def log_likelihoods(reader: Reader, item: Item) -> list[float]:
    """Float64 log-likelihood of each answer: the context less its last token in one pass, then token by token."""
    assert reader.cache is not None
    model, found = reader.model, []
    for answer in item.answers:
        whole, own, total = [*item.context, *answer], reader.cache.as_generated(model.config), 0.0
        first = len(item.context) - 1
        if first:
            model(input_ids=torch.tensor([whole[:first]]), past_key_values=own, use_cache=True)
        for place in range(first, len(whole) - 1):
            logits = model(input_ids=torch.tensor([[whole[place]]]), past_key_values=own, use_cache=True).logits
            total += float(logits[0, -1].double().log_softmax(-1)[whole[place + 1]])  # type: ignore[call-overload]
        found.append(total)
    return found


def figures(outcomes: list[Outcome]) -> list[tuple[Any, ...]]:
    return [(o.name, o.right, o.chosen, pytest.approx(o.nll, rel=1e-4)) for o in outcomes]


def test_answers_are_those_of_decoding_token_by_token(opened: Reader, material: Material) -> None:
    asked = task("likelihood")
    assert max(len(answer) for item in asked.items for answer in item.answers) <= STAYS
    plain = answers.score(Reader(opened.model), asked, material)
    for item, outcome, exact in zip(asked.items, answers.score(opened, asked, material), plain, strict=True):
        expected = log_likelihoods(opened, item)
        assert outcome.chosen == str(expected.index(max(expected)))
        assert outcome.nll == pytest.approx(-expected[2] / len(item.answers[2]), rel=1e-4)
        if len(item.context) > STAYS:
            assert outcome.nll != pytest.approx(exact.nll, rel=1e-4)  # 2 bits are to be seen


@pytest.mark.parametrize("way", ["likelihood", "greedy"])
def test_an_exact_cache_and_batches_change_nothing(opened: Reader, material: Material, way: str) -> None:
    plain = answers.score(Reader(opened.model), task(way), material)
    exact: Any = SimpleNamespace(as_generated=lambda config: DynamicCache(config=config))
    through = answers.score(Reader(opened.model, exact), task(way), material)
    assert figures(through) == figures(plain)
    coded = answers.score(opened, task(way), material)
    assert figures(answers.score(opened, task(way), material, batch_tokens=1)) == figures(coded)


def test_a_suite_through_a_cache(base: Path) -> None:
    """Texts are scored as `compress eval --kv` scores them, tasks as here, and both say which cache it was."""
    caches = {"coarse": COARSE}
    asked = SuiteRequest("quick", (str(HELD_OUT),), seq_len=128, max_tokens=256, kv=caches)
    found, plain = (suite.run(base, base, each, Execution()) for each in (asked, SuiteRequest("quick", *rest(asked))))
    scored, read = cache_scores.evaluate([base], str(HELD_OUT), caches, None, (128, 256), Execution())
    assert found.texts == (scored,) and scored.kl_mean > 0 and plain.texts[0].kl_mean == 0
    assert (found.cache, found.cache_read, plain.cache) == ("coarse", read.text, "")
    assert [each.task for each in found.tasks] == [each.task for each in plain.tasks]
    assert all(each.paired and each.paired.nll_difference == 0 for each in plain.tasks)
    assert any(each.paired and each.paired.nll_difference for each in found.tasks)


def rest(asked: SuiteRequest) -> tuple[Any, ...]:
    return asked.texts, asked.tasks, asked.seq_len, asked.max_tokens


def test_the_original_reads_an_exact_cache(base: Path, tmp_path: Path) -> None:
    """Also where the checkpoint is its own original, and stores the compressed cache that is measured."""
    api.quantize(dataclasses.replace(job(base, Setup(str(coarse(tmp_path))), tmp_path / "own"), pack=False))
    asked = SuiteRequest("quick", (str(HELD_OUT),), seq_len=128, max_tokens=256, kv={})
    own, beside = (suite.run(tmp_path / "own", each, asked, Execution()) for each in (tmp_path / "own", base))
    assert own.texts == beside.texts and own.texts[0].kl_mean > 0
    assert own.written == beside.written and any(row["base"] != row["model"] for row in own.written)
    assert [each.paired for each in own.tasks] == [each.paired for each in beside.tasks]


def coarse(folder: Path) -> Path:
    """A recipe of COARSE."""
    path = folder / "coarse.yaml"
    path.write_text(json.dumps({"kv_cache": PLAIN}))
    return path


def test_tasks_that_a_cache_keeps_exact_are_named(base: Path) -> None:
    """Contexts of up to sink, residual_length and flush together are whole behind it."""
    name, contexts = "arithmetic", {}
    for residual in (8, 64):
        settings = cache_settings({**PLAIN, "residual_length": residual})
        found = suite.run(base, base, SuiteRequest(None, (), (name,), kv={"held": settings}), Execution())
        contexts[residual] = found.remarks, found.tasks[0].paired
    assert contexts[8][0] == () and contexts[8][1].nll_difference != 0
    (said,) = contexts[64][0]
    assert said.startswith("arithmetic: contexts of at most 74 tokens, which the cache held keeps exact")
    assert contexts[64][1].nll_difference == pytest.approx(0, abs=1e-5)


def test_the_command(base: Path, tmp_path: Path) -> None:
    """The model beside itself, without --base; a checkpoint without a cache of its own is refused."""
    words = ("--suite", "quick", "--text", str(HELD_OUT), "--seq-len", "128", "--max-tokens", "256")
    done = cli("eval", str(base), *words, "--kv", str(coarse(tmp_path)), "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["cache"] == "coarse" and found["base"] == base.name and found["findings"] == []
    assert found["texts"][0]["kl_mean"] > 1e-4
    done = cli("eval", str(base), "--task", "arithmetic", "--kv", "own")
    assert done.code == 1 and "stores no cache of its own" in done.err
    done = cli("eval", str(base), "--base", str(base), "--task", "arithmetic", "--calib", str(HELD_OUT))
    assert done.code == 2 and "goes with --kv" in " ".join(done.err.split())
