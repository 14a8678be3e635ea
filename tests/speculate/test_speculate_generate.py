"""generate of transformers with drafts: the same text, ends, outputs and caches as without them, on whole models."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, TextIteratorStreamer

import compress
from compress.errors import NumericalError, RecipeError
from compress.kv import generation as kv_generation
from compress.speculate import generation
from compress.speculate.drafting import ModelDraft, Reduction
from compress.speculate.generation import Speculation
from compress.speculate.session import Session
from helpers.pico import EOS_ID, PICO, pico_tokenizer

TIE = 1e-3  # of logits, within which either token is the likeliest


class Noisy(Reduction):
    """A reduction for tests: the head's rows are changed a little, so that some drafts are rejected."""

    def __init__(self, size: float) -> None:
        self.size = size

    @contextmanager
    def reduce(self, session: Session) -> Iterator[None]:
        head: Any = session.model.get_output_embeddings()
        kept = head.weight.data
        noise = torch.randn(kept.shape, generator=torch.Generator().manual_seed(0)) * self.size * kept.std()
        head.weight.data = kept + noise
        try:
            yield
        finally:
            head.weight.data = kept


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model drafts for itself with noise, four tokens each time, whatever the specification is."""

    def plan(text: str, session: Session) -> Any:
        return [generation.Planned("noisy", ModelDraft([Noisy(0.3)]), 4)]

    monkeypatch.setattr(generation, "plan", plan)


def prompt(count: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(0, 200, (1, count), generator=torch.Generator().manual_seed(seed))


def check_greedy(model: Any, text: Tensor, begin: int) -> None:
    """Each token behind the prompt is the likeliest, up to ties."""
    with torch.no_grad():
        logits = model(text).logits[0, begin - 1 : -1].float()
    chosen = logits.gather(1, text[0, begin:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < TIE


def both(model: Any, ids: Tensor, **kw: Any) -> tuple[Any, Any, Speculation]:
    own = compress.speculate.with_settings("ngram")
    return model.generate(ids, **kw), model.generate(ids, custom_generate=own, **kw), own


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3_moe", "gpt_neox", "opt"])
def test_greedy_text_is_that_of_plain_steps(name: str) -> None:
    """Sliding windows of 32 tokens are crossed in the prompt, or while writing."""
    model = PICO[name]()
    for count in (9, 30, 60):
        ids = prompt(count)
        text, drafted, own = both(model, ids, max_new_tokens=40, do_sample=False, eos_token_id=None)
        check_greedy(model, drafted, count)
        assert torch.equal(text, drafted)
        assert own.statistics.tokens == 40 and own.statistics.accepted > 0
        assert name != "llama" or own.statistics.accepted < own.statistics.drafted


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 17])
def test_no_token_more_than_asked_for(count: int) -> None:
    text, drafted, _ = both(PICO["llama"](), prompt(), max_new_tokens=count, do_sample=False, eos_token_id=None)
    assert drafted.shape == (1, 9 + count) and torch.equal(text, drafted)


@pytest.mark.usefixtures("noisy")
def test_a_text_ends_at_any_accepted_token() -> None:
    model = PICO["llama"]()
    whole = model.generate(prompt(), max_new_tokens=30, do_sample=False, eos_token_id=None)[0, 9:].tolist()
    for place in range(1, 14):
        end = whole[place]
        text, drafted, own = both(model, prompt(), max_new_tokens=30, do_sample=False, eos_token_id=[end, EOS_ID])
        assert torch.equal(text, drafted) and int(drafted[0, -1]) == end
        assert own.statistics.tokens == whole.index(end) + 1


class AfterTokens(StoppingCriteria):
    """Stops behind a number of tokens; takes note of what it was asked."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, list[int]()

    def __call__(self, input_ids: Tensor, scores: Any, **kw: Any) -> Tensor:
        self.seen.append(input_ids.shape[1])
        return torch.full((1,), input_ids.shape[1] >= self.count)


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("count", [10, 13, 16])
def test_other_criteria_are_asked_behind_each_token(count: int) -> None:
    criterion = AfterTokens(count)
    drafted = PICO["llama"]().generate(
        prompt(),
        max_new_tokens=30,
        eos_token_id=None,
        stopping_criteria=[criterion],
        custom_generate=compress.speculate,
    )
    assert drafted.shape[1] == count and criterion.seen == list(range(10, count + 1))


@pytest.mark.usefixtures("noisy")
def test_a_criterion_may_return_a_plain_bool() -> None:
    settings: Any = {"max_new_tokens": 30, "eos_token_id": None, "custom_generate": compress.speculate}
    criteria: Any = [lambda ids, scores, **kw: ids.shape[1] >= 13]
    assert PICO["llama"]().generate(prompt(), stopping_criteria=criteria, **settings).shape[1] == 13


@pytest.mark.usefixtures("noisy")
def test_probabilities_without_a_sum_are_an_error() -> None:
    def forbid(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf if ids.shape[1] > 12 else 0.0)

    processors: Any = [forbid]
    with pytest.raises(NumericalError, match="probabilities of a token are not finite"):
        PICO["llama"]().generate(
            prompt(),
            max_new_tokens=8,
            do_sample=True,
            eos_token_id=None,
            logits_processor=processors,
            custom_generate=compress.speculate,
        )


@pytest.mark.usefixtures("noisy")
def test_outputs_hold_scores_logits_and_a_cache_without_the_last_token() -> None:
    ask: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain, drafted, _ = both(
        PICO["llama"](), prompt(), max_new_tokens=20, do_sample=False, eos_token_id=None, repetition_penalty=1.5, **ask
    )
    assert torch.equal(plain.sequences, drafted.sequences)
    for kind in ("scores", "logits"):
        assert len(drafted[kind]) == 20
        torch.testing.assert_close(torch.cat(drafted[kind]), torch.cat(plain[kind]), atol=1e-4, rtol=1e-4)
    cache = drafted.past_key_values
    assert cache.get_seq_length() == drafted.sequences.shape[1] - 1
    for own, other in zip(cache.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_cache_goes_on_from_turn_to_turn(name: str) -> None:
    model = PICO[name]()
    first = model.generate(
        prompt(),
        max_new_tokens=40,
        eos_token_id=None,
        return_dict_in_generate=True,
        custom_generate=compress.speculate,
    )
    assert not any(getattr(layer, "record_past", False) for layer in first.past_key_values.layers)
    ids = torch.cat([first.sequences, prompt(5, 1)], 1)
    again = model.generate(
        ids,
        max_new_tokens=20,
        eos_token_id=None,
        past_key_values=first.past_key_values,
        custom_generate=compress.speculate,
    )
    assert torch.equal(again, model.generate(ids, max_new_tokens=20, eos_token_id=None))


@pytest.mark.usefixtures("noisy")
def test_padding_at_the_left() -> None:
    model, ids = PICO["llama"](), prompt()
    padded = torch.cat([torch.full((1, 4), EOS_ID), ids], 1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)], 1)
    kw: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
    own = compress.speculate.with_settings()
    drafted = model.generate(padded, attention_mask=mask, custom_generate=own, **kw)
    assert torch.equal(drafted, model.generate(padded, attention_mask=mask, **kw)) and own.statistics.rounds > 0
    assert torch.equal(drafted[:, 4:], model.generate(ids, **kw))


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("path", ["decode", "fused"])
def test_compressed_caches_hold_what_they_hold_without_drafts(path: str) -> None:
    model = PICO["llama"]()
    kv_generation.attach(model, {"method": "kivi", "bits": 4, "group_size": 16, "residual_length": 0}, path=path)
    ask: dict[str, Any] = {"return_dict_in_generate": True, "do_sample": False, "eos_token_id": None}
    plain, drafted, own = both(model, prompt(30), max_new_tokens=50, **ask)
    assert own.statistics.rounds > 0
    cache = drafted.past_key_values
    assert not cache.holds and cache.nbytes().total == plain.past_key_values.nbytes().total
    assert cache.get_seq_length() == drafted.sequences.shape[1] - 1


class Pieces:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens, self.has_ended = list[int](), False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.usefixtures("noisy")
def test_streamers_are_given_the_prompt_and_each_token_once() -> None:
    model, kw = PICO["llama"](), {"max_new_tokens": 20, "eos_token_id": None}
    for given in (True, False):
        pieces: Any = Pieces()
        own = compress.speculate.with_settings(None, streamer=None if given else pieces)
        more = {"streamer": pieces} if given else {}
        text = model.generate(prompt(), custom_generate=own, **more, **kw)[0].tolist()
        assert pieces.tokens == (text if given else text[9:]) and pieces.has_ended


def test_streamers_of_transformers_end() -> None:
    streamer = TextIteratorStreamer(pico_tokenizer(), skip_prompt=True, timeout=5)
    PICO["llama"]().generate(prompt(), max_new_tokens=8, streamer=streamer, custom_generate=compress.speculate)
    assert isinstance("".join(streamer), str)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"num_return_sequences": 2, "do_sample": True}, "2 sequences at once"),
    "no cache": ({"use_cache": False}, "no cache"),
    "static": ({"cache_implementation": "static"}, "a StaticCache cannot take tokens back"),
    "hidden": ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states are asked for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drafted_for_is_generated_as_always(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kw, line = REFUSED[name]
    own = compress.speculate.with_settings("ngram")
    with caplog.at_level(logging.WARNING):
        torch.manual_seed(0)
        made = PICO["llama"]().generate(prompt(), max_new_tokens=5, custom_generate=own, **kw)
    torch.manual_seed(0)
    plain = PICO["llama"]().generate(prompt(), max_new_tokens=5, **kw)
    made, plain = (each if isinstance(each, Tensor) else each.sequences for each in (made, plain))
    assert torch.equal(made, plain)
    assert line in caplog.text and line in own.statistics.text()


def test_the_package_is_called_with_the_checkpoints_own_drafts() -> None:
    model = PICO["llama"]()
    assert generation.default_drafts(model) == "ngram"
    model.config.speculate = "ngram,length=2"
    assert generation.default_drafts(model) == "ngram,length=2"
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])
    text = model.generate(ids, max_new_tokens=12, eos_token_id=None, custom_generate=compress.speculate, drafts="ngram")
    assert torch.equal(text, model.generate(ids, max_new_tokens=12, eos_token_id=None))


def test_a_stored_draft_that_cannot_be_gives_way_to_ngrams(caplog: pytest.LogCaptureFixture) -> None:
    """A level of a checkpoint is loaded with the configuration of the whole."""
    model = PICO["llama"]()
    model.config.speculate = "level=4"
    with caplog.at_level(logging.WARNING):
        text = model.generate(prompt(), max_new_tokens=6, eos_token_id=None, custom_generate=compress.speculate)
    assert text.shape == (1, 15) and "'level=4' of config.json cannot be drafted (level: " in caplog.text
    with pytest.raises(RecipeError, match="has no levels"):
        model.generate(prompt(), max_new_tokens=6, custom_generate=compress.speculate, drafts="level=4")


def test_times_and_acceptance_are_kept_for_later_calls() -> None:
    model: nn.Module = PICO["llama"]()
    kw: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, "custom_generate": compress.speculate}
    model.generate(prompt(), **kw)  # type: ignore[operator]
    memory = generation._memories[model]["ngram"]
    assert memory.timings.check(1) > 0
    seen = memory.timings.checks[1].seen
    model.generate(prompt(), **kw)  # type: ignore[operator]
    assert generation._memories[model]["ngram"].timings.checks[1].seen > seen
