"""What models sample: draws with equal random numbers, figures of texts against loops, the command and its page."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from compress.cli.app import app
from compress.evaluate import record, sampling, sampling_runs, sampling_temperature
from compress.evaluate.reader import Reader
from compress.evaluate.sampling_distributions import SamplingSetting, dense, filtered_law, order, penalize
from compress.evaluate.sampling_temperature import TemperatureAdvice
from compress.pages import measurements as page
from helpers.pico import pico_tokenizer

HELDOUT = Path(__file__).parents[1] / "data" / "books_heldout.txt"


def bleu(own: list[int], others: list[list[int]]) -> float:
    """BLEU-4 by its definition."""
    logs = []
    for n in range(1, 5):
        grams = [tuple(own[i : i + n]) for i in range(len(own) - n + 1)]
        theirs = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in others]
        if grams:
            hits = sum(min(grams.count(g), max(text.count(g) for text in theirs)) for g in set(grams))
            logs.append(math.log((hits or 0.1) / len(grams)))
    closest = sorted((abs(len(text) - len(own)), len(text)) for text in others)[0][1]
    return min(1.0, math.exp(1 - closest / len(own))) * math.exp(sum(logs) / len(logs))


def test_figures_of_texts() -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(4, (int(length),), generator=generator).tolist() for length in (9, 12, 3, 1, 9)]
    found = sampling_runs.self_bleu(texts)
    assert found == pytest.approx(sum(bleu(t, texts[:i] + texts[i + 1 :]) for i, t in enumerate(texts)) / 5, rel=1e-12)
    for n in (1, 2, 3):
        grams = [[tuple(t[i : i + n]) for i in range(len(t) - n + 1)] for t in texts]
        every = [g for each in grams for g in each]
        assert sampling_runs.distinct(texts, n) == pytest.approx(len(set(every)) / len(every))
        shares = [1 - len(set(each)) / len(each) for each in grams if each]
        assert sampling_runs.repetition(texts, n) == pytest.approx(sum(shares) / len(shares))
    assert sampling_runs.self_bleu([[1, 2, 3, 4], [1, 2, 3, 4]]) == pytest.approx(1)
    assert (
        sampling_runs.self_bleu([[1, 2]]) == sampling_runs.distinct([[]], 1) == sampling_runs.repetition([[1]], 2) == 0
    )


@pytest.mark.parametrize("half", [0, 1])
def test_draws_follow_the_filtered_law(half: int) -> None:
    """Both couplings draw from the same law; the rows have the same logits."""
    rows, setting = 3000, SamplingSetting(0.8, top_k=3)
    logits = torch.tensor([0.3, 1.0, -0.5, 0.9, 0.1]).expand(2 * rows, 5)
    drawn = sampling_runs.CoupledDraw("m", [setting], 2 * rows, 7)(torch.zeros(2 * rows, 1), logits).argmax(-1)
    counts = torch.bincount(drawn[half * rows : (half + 1) * rows], minlength=5).double() / rows
    law = torch.tensor([0.3, 1.0, -torch.inf, 0.9, -torch.inf]).div(0.8).softmax(-1).double()
    assert float((counts - law).abs().max()) < 4.5 * math.sqrt(0.25 / rows) and counts[2] == counts[4] == 0


def test_draws_do_not_depend_on_the_number_of_rows_or_on_filters() -> None:
    """A row has its own numbers; a filter that keeps everything changes none of them."""
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(1))
    draws = [sampling_runs.CoupledDraw("m", [SamplingSetting(1.0, top_k=k)], 4, 3) for k in (0, 11)]
    for _ in range(5):
        assert torch.equal(*(draw(torch.zeros(4, 1), logits) for draw in draws))
    again = sampling_runs.CoupledDraw("m", [SamplingSetting(1.0)], 4, 4)
    assert again.generators[0].initial_seed() != draws[0].generators[0].initial_seed()


@pytest.fixture(scope="module")
def models(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that is sharper than its base by a factor of 1.25, with some noise, and the base."""
    base = pico_dir("llama")
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.25)
        noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(5))
        model.lm_head.weight.add_(noise, alpha=0.004)
    directory = tmp_path_factory.mktemp("model") / "sharp"
    model.save_pretrained(directory)
    pico_tokenizer().save_pretrained(directory)
    return directory, base


@pytest.fixture(scope="module")
def loaded(models: tuple[Path, Path]) -> list[Reader]:
    return [Reader(AutoModelForCausalLM.from_pretrained(each).eval(), name=each.name) for each in models]


def test_reverse_kl_is_the_mean_of_its_samples(loaded: list[Reader]) -> None:
    prompts = torch.arange(6).view(3, 2)
    (found,) = sampling_runs.continue_prompts(loaded, prompts, 30, (256,), [SamplingSetting(0.9, top_p=0.8)], 0)
    own = found.model
    assert own.reverse_kl_se is not None
    assert abs(own.base_nll - own.entropy - own.reverse_kl) < 0.15 * own.base_nll  # the estimate from 180 tokens
    assert own.reverse_kl > 0 and found.base.reverse_kl > 0  # of the base: what the filter cuts off
    (same,) = sampling_runs.continue_prompts([loaded[1], loaded[1]], prompts, 12, (), [SamplingSetting(1.0)], 0)
    assert same.same_cdf == same.same_gumbel == same.model.length == 12
    assert same.model.reverse_kl == pytest.approx(0, abs=1e-9) and same.model == same.base


SOME = [
    SamplingSetting(0.7),
    SamplingSetting(1.1, top_k=5),
    SamplingSetting(1.0, top_p=0.9),
    SamplingSetting(1.3, min_p=0.05),
    SamplingSetting(1.1, typical_p=0.7),
    SamplingSetting(0.9, eta=0.02, repetition_penalty=1.4),
]


def one_by_one(
    models: list[Reader], prompts: torch.Tensor, stop: int, setting: SamplingSetting
) -> list[list[list[int]]]:
    """What each model writes, a row and a token at a time, without a cache; rows of uniform numbers first."""
    texts = []
    for model in (reader.model for reader in models):
        rows = []
        for row, prompt in enumerate(prompts.repeat(2, 1)):
            numbers, ids = sampling_runs._generator(3, row), prompt.tolist()
            while len(ids) < len(prompt) + 14 and ids[-1] != stop:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1:]
                logits = penalize(logits, torch.tensor([ids]), setting.repetition_penalty)
                log_probs = dense(filtered_law(order(logits), setting), logits.shape[1]).log_probs[0]
                if row < len(prompts):
                    uniform = float(torch.rand(1, dtype=torch.float64, generator=numbers))
                    ids.append(int((log_probs.exp().cumsum(0) <= uniform).sum()))
                else:
                    noise = torch.rand(len(log_probs), dtype=torch.float64, generator=numbers)
                    ids.append(int((log_probs - (-noise.log()).log()).argmax()))
            rows.append(ids[len(prompt) :])
        texts.append(rows)
    return texts


def sums(own: Any, base: Any, prompt: list[int], tokens: list[int], setting: SamplingSetting) -> list[float]:
    """Entropy, negative log-likelihood by the base, and reverse KL of a continuation, position by position."""
    found = [0.0, 0.0, 0.0]
    for i, token in enumerate(tokens):
        with torch.no_grad():
            each = [model(input_ids=torch.tensor([prompt + tokens[:i]])).logits[0, -1:] for model in (own, base)]
        own_logits = penalize(each[0], torch.tensor([prompt + tokens[:i]]), setting.repetition_penalty)
        q = dense(filtered_law(order(own_logits), setting), each[0].shape[1]).log_probs[0].exp().tolist()
        p = (each[1][0].double() / setting.temperature).softmax(-1).tolist()
        found[0] -= sum(x * math.log(x) for x in q if x)
        found[1] -= math.log(p[token])
        found[2] += sum(x * math.log(x / y) for x, y in zip(q, p, strict=True) if x)
    return found


def test_rows_of_all_settings_are_written_as_one_by_one(loaded: list[Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings together, one after the other, and token by token write the same and read the same."""
    prompts, stop = torch.arange(9).view(3, 3), 198
    seen: list[Any] = []
    compared = sampling_runs._compare
    monkeypatch.setattr(sampling_runs, "_compare", lambda *given: (seen.append(given[2]), compared(*given))[1])
    together = sampling_runs.continue_prompts(loaded, prompts, 14, (stop,), SOME, 3)
    expected = [one_by_one(loaded, prompts, stop, setting) for setting in SOME]
    assert seen == expected and any(len(row) < 14 for each in expected for row in each[0])
    for found, setting, (texts, _) in zip(together, SOME, expected, strict=True):
        start = prompts.repeat(2, 1).tolist()
        rows = [sums(*(reader.model for reader in loaded), *each, setting) for each in zip(start, texts, strict=True)]
        means = [sum(column) / sum(map(len, texts)) for column in zip(*rows, strict=True)]
        own = found.model
        assert [own.entropy, own.base_nll, own.reverse_kl] == pytest.approx(means, rel=1e-4, abs=1e-6)
    monkeypatch.setattr(sampling_runs, "WRITING_NBYTES", 1)
    for found, alone in zip(
        together, sampling_runs.continue_prompts(loaded, prompts, 14, (stop,), SOME, 3), strict=True
    ):
        assert (found.same_cdf, found.same_gumbel, found.filters) == (alone.same_cdf, alone.same_gumbel, alone.filters)
        for a, b in ((found.model, alone.model), (found.base, alone.base)):
            assert dataclasses.astuple(a)[:5] == dataclasses.astuple(b)[:5]
            assert a.reverse_kl == pytest.approx(b.reverse_kl, rel=1e-5, abs=1e-9)


def beam_search(model: Any, prompt: list[int], new_tokens: int, beams: int) -> list[int]:
    """The continuation that is found, by a list of texts and their log-probabilities."""
    kept = [(0.0, list[int]())]
    for _ in range(new_tokens):
        longer = []
        for score, tokens in kept:
            with torch.no_grad():
                log_probs = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].log_softmax(-1).tolist()
            longer += [(score + value, [*tokens, token]) for token, value in enumerate(log_probs)]
        kept = sorted(longer, reverse=True)[:beams]
    return kept[0][1]


def test_beams_are_those_of_a_plain_search(loaded: list[Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = torch.arange(9).view(3, 3)
    seen: list[Any] = []
    described = sampling_runs._describe
    monkeypatch.setattr(sampling_runs, "_describe", lambda *given: (seen.append(given[2]), described(*given))[1])
    found = sampling_runs.search_beams(loaded, prompts, 5, (), (1, 3))
    expected = [
        [[beam_search(reader.model, prompt, 5, beams) for prompt in prompts.tolist()] for reader in reversed(loaded)]
        for beams in (1, 3)
    ]
    assert seen == [texts for both in expected for texts in both]
    for each, (base, model) in zip(found, expected, strict=True):
        same = [next((i for i in range(5) if a[i] != b[i]), 5) for a, b in zip(base, model, strict=True)]
        assert each.same == pytest.approx(sum(same) / 3) and each.model.length == 5


def test_command_takes_decoding_strategies(models: tuple[Path, Path]) -> None:
    words = ["sampling", models[0], "--base", models[1], "--text", HELDOUT, "--seq-len", 32, "--max-tokens", 96]
    words += ["--temperature", 1, "--typical-p", 1, "--typical-p", 0.9, "--eta", 0.01, "--repetition-penalty", 1.2]
    words += ["--beams", 1, "--beams", 2, "--prompts", 2, "--prompt-tokens", 4, "--new-tokens", 4, "--device", "cpu"]
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["filters"] for row in found["settings"]] == [
        "eta 0.01, repetition-penalty 1.2",
        "typical-p 0.9, eta 0.01, repetition-penalty 1.2",
    ]
    assert [row["beams"] for row in found["beams"]] == [1, 2]
    refused = run(*words, "--eta", 2)
    assert refused.exit_code == 2 and "eta 2 is not 0 to 1" in refused.output
    assert "What beam search wrote" in run(*words).output


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_command_keeps_writes_and_shows(models: tuple[Path, Path], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(models[0], directory)
    own = sampling_temperature.GENERATION_CONFIG
    settings = json.loads((directory / own).read_text())
    (directory / record.REPORT).write_text("{}")
    (directory / "compress_manifest.json").write_text(json.dumps({"files": {own: "0" * 64}, "sizes": {own: 1}}))
    words = ["sampling", directory, "--base", models[1], "--text", HELDOUT, "--seq-len", 32, "--max-tokens", 640]
    words += ["--temperature", 0.7, "--top-k", 0, "--top-p", 0.9, "--top-p", 1, "--min-p", 0, "--prompts", 2]
    words += ["--prompt-tokens", 4, "--new-tokens", 6, "--write", "--device", "cpu"]
    refused = run(*words)
    assert refused.exit_code == 1 and "does not sample" in refused.output
    (directory / own).write_text(json.dumps({**settings, "do_sample": True}))
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "reverse KL" in done.output and "At 1: use 1.2" in done.output
    written = json.loads((directory / own).read_text())
    kept = record.load(directory)["sampling"]
    (at_one,) = [row for row in kept[0]["temperatures"] if row["temperature"] == 1]
    assert written == {**settings, "do_sample": True, "temperature": round(at_one["best"], 3)}
    assert 1.1 < written["temperature"] < 1.4 and at_one["change"]
    listed = json.loads((directory / "compress_manifest.json").read_text())
    assert listed["files"][own] != "0" * 64 and listed["sizes"][own] == (directory / own).stat().st_size
    assert [row["filters"] for row in kept[0]["settings"]] == ["top-p 0.9"] * 2 + ["none"] * 2
    shown = page.sampling(kept)
    assert shown.count("<svg") == 2 and f"use {at_one['best']:.3f}" in shown and page.sampling([]) == ""
    again = json.loads(run(*words[:-3], "--device", "cpu", "--json").stdout)
    assert (
        len(record.load(directory)["sampling"]) == 1
        and again["settings"] == record.load(directory)["sampling"][0]["settings"]
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--top-p", 0), 2, "top_p 0 is not above 0"),
        (("--temperature", -1), 2, "temperature -1 is not positive"),
        (("--prompt-tokens", 64, "--seq-len", 64), 1, "prompts of 64 tokens do not fit"),
        (("--seq-len", 4096), 1, "cannot be scored; 2 to 256 can"),
    ],
)
def test_bad_input(models: tuple[Path, Path], words: tuple[Any, ...], code: int, said: str) -> None:
    result = run("sampling", models[1], "--base", models[1], "--text", HELDOUT, *words)
    assert result.exit_code == code and said in " ".join(result.output.replace("│", " ").split())


def test_settings_that_are_sampled() -> None:
    settings = sampling.default_settings((1.0, 0.5), (0, 5), (1.0,), (0.0, 0.1))
    assert [(s.temperature, s.filters) for s in sampling.sampled_settings(settings)] == [
        *((0.5, "none"), (1.0, "none"), (0.5, "top-k 5, min-p 0.1"), (1.0, "top-k 5, min-p 0.1"))
    ]


def test_a_gain_of_less_than_a_percent_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / sampling_temperature.GENERATION_CONFIG
    file.write_text('{"do_sample": true}')
    for kl_best, changed in ((0.0995, False), (0.098, True)):
        found = TemperatureAdvice(1.0, 0.97, 0.96, 0.98, 0.1, kl_best, at_limit=False, change=True)
        said = sampling_temperature.write(tmp_path, [found], 1.0)
        assert ("stays as it is" in said) is not changed and ("temperature" in json.loads(file.read_text())) is changed
