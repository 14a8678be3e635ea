"""Perplexity, KL and generation against slow obvious references, and what every bad input says."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.errors import CalibrationError, CheckpointError, NumericalError
from compress.evaluate import Comparison, Execution, Scores, evaluate, generate, scores
from compress.model import load, writing
from compress.numerics import kl
from helpers.pico import EOS_ID, VOCAB_SIZE, pico_tokenizer

HERE = Path(__file__).parents[1]
BOOKS = HERE / "models" / "books-8m"
HELDOUT = HERE / "data" / "books_heldout.txt"
SEQ_LEN = 24
WINDOWS = 7
ReadOnly = Callable[..., Path]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little more than WINDOWS windows of SEQ_LEN bytes."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(HELDOUT.read_text(encoding="utf-8")[1000 : 1000 + WINDOWS * SEQ_LEN + 5], encoding="ascii")
    return path


@pytest.fixture(scope="module")
def base(pico_dir: ReadOnly) -> Path:
    return pico_dir("llama")


@pytest.fixture(scope="module")
def other(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model with noise on every weight, little enough that most of its choices stay."""
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return saved(model, tmp_path_factory.mktemp("other") / "other")


def saved(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    pico_tokenizer().save_pretrained(directory)
    return directory


def copied(source: Path, target: Path, **config: Any) -> Path:
    """A checkpoint with some entries of config.json changed."""
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    return target


def with_value(source: Path, target: Path, value: float) -> Path:
    """A checkpoint with one weight changed."""
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.lm_head.weight[3, 5] = value
    return saved(model, target)


def compare(model: Path, base: Path, text: Path, **settings: Any) -> Comparison:
    result = evaluate(model, text, base=base, **{"seq_len": SEQ_LEN, **settings})
    assert isinstance(result, Comparison)
    return result


def log_probs(directory: Path, text: Path) -> list[list[Tensor]]:
    """float64 log-probabilities, a window and position at a time, each from a pass over just what precedes it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    ids = tokens(text)
    found = []
    for begin in range(0, WINDOWS * SEQ_LEN, SEQ_LEN):
        window = torch.tensor([ids[begin : begin + SEQ_LEN]])
        with torch.no_grad():
            found.append([model(window[:, :i]).logits[0, -1].log_softmax(-1) for i in range(1, SEQ_LEN)])
    return found


def tokens(text: Path) -> list[int]:
    return tokens_of(text.read_text())


def tokens_of(content: str) -> list[int]:
    return pico_tokenizer()(content, add_special_tokens=False)["input_ids"]


def close(found: float | None, expected: float) -> bool:
    return found == pytest.approx(expected, rel=2e-5, abs=1e-7)


# the figures


def test_figures_match_a_slow_reference(base: Path, other: Path, text: Path) -> None:
    ids, log_p, log_q = tokens(text), log_probs(base, text), log_probs(other, text)
    nll, base_nll, same = [], [], []
    kl: list[list[float]] = []
    for w in range(WINDOWS):
        kl.append([])
        for i in range(SEQ_LEN - 1):
            p, q, target = log_p[w][i], log_q[w][i], ids[w * SEQ_LEN + i + 1]
            nll.append(-float(q[target]))
            base_nll.append(-float(p[target]))
            kl[w].append(sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True)))
            same.append(int(p.argmax()) == int(q.argmax()))
    count = len(nll)
    every = sorted(value for window in kl for value in window)
    means = [sum(window) / len(window) for window in kl]
    mean = sum(means) / WINDOWS
    deviation = math.sqrt(sum((m - mean) ** 2 for m in means) / (WINDOWS - 1))

    found = compare(other, base, text)

    assert (found.tokens, found.windows, found.seq_len, found.text) == (count, WINDOWS, SEQ_LEN, "text.txt")
    assert close(found.nll, sum(nll) / count) and close(found.perplexity, math.exp(sum(nll) / count))
    assert close(found.base_perplexity, math.exp(sum(base_nll) / count))
    assert close(found.perplexity_ratio, math.exp(sum(nll) / count - sum(base_nll) / count))
    assert close(found.kl_mean, mean) and close(found.kl_se, deviation / math.sqrt(WINDOWS))
    assert mean > 0.01 and deviation > 0
    assert close(found.kl_p95, every[math.ceil(0.95 * count) - 1]) and close(found.kl_max, every[-1])
    assert close(found.kl_p99, every[math.ceil(0.99 * count) - 1])
    assert found.same_top1 == sum(same) / count and 0.2 < found.same_top1 < 1


def test_scores_alone_are_those_of_a_comparison(base: Path, other: Path, text: Path) -> None:
    alone, beside = evaluate(other, text, seq_len=SEQ_LEN), compare(other, base, text)
    assert type(alone) is Scores
    assert {**asdict(beside), **asdict(alone)} == asdict(beside)
    assert evaluate(base, text, seq_len=SEQ_LEN).perplexity == beside.base_perplexity


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_does_not_differ_from_itself(base: Path, text: Path, dtype: str) -> None:
    found = compare(base, base, text, execution=Execution(dtype))
    assert (found.kl_mean, found.kl_se, found.kl_p95, found.kl_p99, found.kl_max) == (0, 0, 0, 0, 0)
    assert found.same_top1 == 1 and found.perplexity_ratio == 1 and found.perplexity == found.base_perplexity


def test_batch_and_blocking_do_not_matter(base: Path, other: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [compare(other, base, text)]
    found += [compare(other, base, text, execution=Execution(batch=batch)) for batch in (1, 3, 100)]
    monkeypatch.setattr(kl, "LOGITS_NBYTES", 4 * VOCAB_SIZE * 5)
    found.append(compare(other, base, text))
    figures = [[value for value in asdict(each).values() if not isinstance(value, str)] for each in found]
    for row in figures[1:]:
        assert row == pytest.approx(figures[0], rel=2e-5)


def test_logits_of_a_batch_are_bounded(base: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        assert total == WINDOWS

    window_nbytes = 4 * VOCAB_SIZE * SEQ_LEN
    monkeypatch.setattr(scores, "BATCH_NBYTES", 4 * window_nbytes + 1)
    evaluate(base, text, seq_len=SEQ_LEN, progress=progress)
    compare(base, base, text, progress=progress)
    monkeypatch.setattr(scores, "BATCH_NBYTES", 1)
    evaluate(base, text, seq_len=SEQ_LEN, max_tokens=2 * SEQ_LEN, progress=lambda done, total: seen.append(done))
    monkeypatch.setattr(scores, "BATCH_NBYTES", 256 << 20)
    monkeypatch.setattr(scores, "BATCH_TOKENS", 6 * SEQ_LEN)
    evaluate(base, text, seq_len=SEQ_LEN, progress=progress)
    assert seen == [4, 7, 2, 4, 6, 7, 1, 2, 6, 7]


def test_the_first_tokens_are_scored(base: Path, text: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.txt"
    part.write_text(text.read_text()[: 3 * SEQ_LEN])
    few = evaluate(base, text, seq_len=SEQ_LEN, max_tokens=4 * SEQ_LEN - 1)
    assert few.windows == 3 and few.tokens == 3 * (SEQ_LEN - 1)
    assert few.nll == evaluate(base, part, seq_len=SEQ_LEN).nll


def test_one_window_has_no_standard_error(base: Path, other: Path, text: Path) -> None:
    found = compare(other, base, text, max_tokens=SEQ_LEN)
    assert found.kl_se is None and found.windows == 1 and found.kl_mean > 0


def test_documents_are_scored_as_they_are_calibrated_on(base: Path, text: Path, tmp_path: Path) -> None:
    rows = tmp_path / "text.jsonl"
    rows.write_text("".join(json.dumps({"text": text.read_text()}) + "\n" for _ in range(3)))
    assert (
        evaluate(base, rows, seq_len=SEQ_LEN, max_tokens=150).nll
        == evaluate(base, text, seq_len=24, max_tokens=150).nll
    )


@pytest.mark.slow
def test_the_trained_model_predicts_books() -> None:
    """16 windows; 128 of them give 47.408."""
    found = evaluate(BOOKS, HELDOUT, max_tokens=16 * 512)
    assert found.windows == 16 and found.tokens == 16 * 511
    assert found.perplexity == pytest.approx(56.852, abs=0.01)


def test_a_hopeless_model_has_infinite_perplexity(base: Path, text: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)
    found = evaluate(saved(model, tmp_path / "hopeless"), text, seq_len=SEQ_LEN)
    assert found.perplexity == math.inf and math.isfinite(found.nll)


def test_evaluation_says_nothing(base: Path, text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evaluate(base, text, seq_len=SEQ_LEN)
    assert capfd.readouterr() == ("", "")


# bad input


def fails(error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        evaluate(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_not_a_checkpoint(base: Path, text: Path, tmp_path: Path) -> None:
    for directory in (tmp_path / "absent", tmp_path, text):
        fails(CheckpointError, str(directory), directory, text, seq_len=SEQ_LEN)
        fails(CheckpointError, str(directory), base, text, base=directory, seq_len=SEQ_LEN)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_damaged_files(name: str, base: Path, text: Path, tmp_path: Path) -> None:
    damaged = copied(base, tmp_path / "damaged")
    (damaged / name).write_text("{")
    fails(CheckpointError, str(damaged), damaged, text, seq_len=SEQ_LEN)
    (damaged / name).unlink()
    fails(CheckpointError, str(damaged), damaged, text, seq_len=SEQ_LEN)


def test_an_unknown_architecture(base: Path, text: Path, tmp_path: Path) -> None:
    unknown = copied(base, tmp_path / "unknown", model_type="nobody_knows", auto_map={"AutoConfig": "code.Config"})
    fails(CheckpointError, "transformers cannot read its configuration", unknown, text, seq_len=SEQ_LEN)


def test_weights_that_are_missing_or_misshapen_are_not_made_up(
    base: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deeper = copied(base, tmp_path / "deeper", num_hidden_layers=3)
    logging.getLogger("transformers").addHandler(caplog.handler)  # its records do not reach the root logger
    fails(CheckpointError, r"lacks 9 of the model's weights.*first model\.layers\.2\.", deeper, text, seq_len=SEQ_LEN)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.messages == []  # the error says it
    wider = copied(base, tmp_path / "wider", intermediate_size=193)
    fails(CheckpointError, r"lacks 6 of the model's weights.*layers\.0\.mlp", wider, text, seq_len=SEQ_LEN)


def test_vocabularies_must_agree(base: Path, text: Path, tmp_path: Path) -> None:
    fails(CheckpointError, "books-8m and .* do not share a vocabulary", BOOKS, text, base=base, seq_len=SEQ_LEN)
    renamed = copied(base, tmp_path / "renamed")
    content = (renamed / "tokenizer.json").read_text()
    (renamed / "tokenizer.json").write_text(content.replace("<eos>", "<end>"))
    (renamed / "tokenizer_config.json").unlink()
    fails(CheckpointError, "do not share a vocabulary", base, text, base=renamed, seq_len=SEQ_LEN)
    smaller = copied(base, tmp_path / "smaller", vocab_size=50)
    fails(CheckpointError, "the tokenizer is of another model", smaller, text, seq_len=SEQ_LEN)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite(value: float, base: Path, text: Path, tmp_path: Path) -> None:
    broken = with_value(base, tmp_path / "broken", value)
    fails(NumericalError, "broken gives non-finite logits", broken, text, seq_len=SEQ_LEN)
    fails(NumericalError, "broken gives non-finite logits", base, text, base=broken, seq_len=SEQ_LEN)


def test_unusable_lengths_and_texts(base: Path, text: Path, tmp_path: Path) -> None:
    for seq_len in (1, 257):
        expected = f"windows of {seq_len} tokens cannot be scored; 2 to 256 can"
        fails(CalibrationError, expected, base, text, seq_len=seq_len)
    fails(CalibrationError, "99 tokens are less than one window of 100", base, text, seq_len=100, max_tokens=99)
    short = tmp_path / "short.txt"
    short.write_text("x" * 9)
    fails(CalibrationError, "short.txt has only 9 tokens, one window needs 10", base, short, seq_len=10)
    fails(CalibrationError, "neither a file nor a data set", base, tmp_path / "absent.txt", seq_len=10)


def test_unusable_execution(base: Path, text: Path) -> None:
    with pytest.raises(ValueError, match="batch 0 is not positive"):
        Execution(batch=0)
    with pytest.raises(ValueError, match="dtype 'float8' is not one of auto, float32"):
        evaluate(base, text, seq_len=SEQ_LEN, execution=Execution("float8"))


# generation


def slow_greedy(directory: Path, prompt: str, count: int) -> str | list[str]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:])


def test_greedy_generation_is_the_likeliest_token_each_time(tmp_path: Path) -> None:
    directory = copied(BOOKS, tmp_path / "m")
    stored = {"do_sample": True, "temperature": 2.0, "repetition_penalty": 3.0, "max_length": 5, "num_beams": 3}
    (directory / "generation_config.json").write_text(json.dumps(stored))
    prompt = "It was a dark night, and the"
    found = generate(directory, prompt, 16)
    assert found == slow_greedy(directory, prompt, 16)
    assert found.startswith(" ") and len(found.split()) > 5


def test_drawn_text_depends_on_seed_and_temperature(base: Path) -> None:
    state = torch.get_rng_state()
    first, again, other = (generate(base, "abc", 20, temperature=1.0, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert generate(base, "abc", 20, temperature=1e-4, seed=1) == generate(base, "abc", 20) != first
    assert torch.equal(torch.get_rng_state(), state)


def test_generation_stops_at_the_end_of_text(base: Path, tmp_path: Path) -> None:
    whole = generate(base, "abc", 12)
    model = load.load_model(base)
    ids = tokens_of("abc")
    drawn = writing.write(model, torch.tensor([ids]), 12, writing.Draw("base", 0.0, torch.Generator()))[0].tolist()[3:]
    assert len(drawn) == 12 and writing.end_tokens(model) == (EOS_ID,)  # writing leaves the model's settings
    stop = next(token for i, token in enumerate(drawn) if i > 3 and token not in drawn[:i])
    end = drawn.index(stop) + 1
    assert end < 12
    (copied(base, tmp_path / "m") / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, stop]}))
    stopped = generate(tmp_path / "m", "abc", 12)
    assert stopped == pico_tokenizer().decode(drawn[:end], skip_special_tokens=True) != whole


def test_bad_generation_requests(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="the prompt '' has no tokens"):
        generate(base, "")
    with pytest.raises(CheckpointError, match="is not a directory"):
        generate(tmp_path / "absent", "abc")
    with pytest.raises(CalibrationError, match="has 256 positions, 257 tokens are too many"):
        generate(base, "abc", 254)
    with pytest.raises(NumericalError, match="broken has non-finite logits at token 3"):
        generate(with_value(base, tmp_path / "broken", math.nan), "abc")
    with pytest.raises(ValueError, match="max_new_tokens 0 is not positive"):
        generate(base, "abc", 0)
    with pytest.raises(ValueError, match=r"temperature -1\.0 is negative"):
        generate(base, "abc", temperature=-1.0)
