"""Drafts without layers: sets as text, searches that find what was planted, CLaSp's and DEL's choices, exact texts."""

from __future__ import annotations

import copy
import math
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from compress import speculate
from compress.errors import RecipeError
from compress.papers.speculate import clasp, draft_verify, dynamic_exit, swift
from compress.papers.speculate.set_search import SetSearch
from compress.runtime.bypass import bypassed, early_exit, sublayers_of
from compress.speculate.skipping import (
    even_set,
    inner_sublayers,
    likeliest,
    matching_share,
    read_set,
    write_set,
)
from helpers.pico import of_type

IDS = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(2))
GQA = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
KNOWN = tuple((block, kind) for block in range(1, 11) for kind in ("attention", "mlp"))


def deep(blocks: int = 6, name: str = "llama") -> Any:
    return of_type(name, {**GQA, "num_hidden_layers": blocks})


def test_sets_are_read_as_they_are_written() -> None:
    assert read_set("3:5-6:8a:9m") == {
        *((block, kind) for block in (3, 5, 6) for kind in ("attention", "mlp")),
        (8, "attention"),
        (9, "mlp"),
    }
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 12):
        chosen = {KNOWN[i] for i in torch.randperm(len(KNOWN), generator=generator)[:count].tolist()}
        assert read_set(write_set(chosen)) == chosen
    assert read_set("") == frozenset() and write_set(()) == ""
    for text in ("x", "3b", "3-", "-1", "3::4", "3,4"):
        with pytest.raises(ValueError, match="is no block like"):
            read_set(text)


@pytest.mark.parametrize("count", range(1, 20))
def test_even_sets_are_whole_blocks_at_even_distances(count: int) -> None:
    chosen = even_set(KNOWN, count)
    assert len(chosen) == count
    blocks = sorted({block for block, _ in chosen})
    assert len(blocks) == math.ceil(count / 2)
    gaps = [b - a for a, b in zip(blocks, blocks[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_search_finds_what_was_planted() -> None:
    """The more of the planted set, the better: Bayesian optimisation needs far fewer trials than chance would."""
    planted = frozenset(KNOWN[i] for i in (1, 2, 6, 9, 12, 13, 17))
    tried = list[frozenset[Any]]()

    def score(chosen: frozenset[Any]) -> float:
        tried.append(chosen)
        return len(chosen & planted) / len(planted)

    assert draft_verify.optimise(KNOWN, len(planted), score, 3, 80) == planted  # of 77,520 sets
    first = list(tried)
    tried.clear()
    draft_verify.optimise(KNOWN, len(planted), score, 3, 20)
    assert tried == first[:20]
    best = swift.search(KNOWN, len(planted), score, seed=3)
    assert len(best & planted) >= 5 and all(len(chosen) == len(planted) for chosen in tried)


def test_a_search_takes_what_it_is_given_and_refuses_what_is_no_choice() -> None:
    search = SetSearch(KNOWN, 4)
    search.observe(read_set("2"), 0.5)
    search.observe(read_set("3:4"), 0.25)
    assert (search.best, search.best_score, search.fruitless) == (read_set("2"), 0.5, 1)
    assert len(search.expect()) == 4
    for count in (0, 20):
        with pytest.raises(ValueError, match="not between"):
            SetSearch(KNOWN, count)


def test_scores_are_shares_of_tokens_that_a_slow_loop_finds() -> None:
    model = deep()
    chosen = read_set("2:4a")
    with bypassed(model, chosen), torch.no_grad():
        slow = [int(model(IDS[:, :i]).logits[0, -1].argmax()) for i in range(14, 24)]
    assert likeliest(model, IDS, 10, chosen).tolist() == slow
    assert matching_share(model, IDS, torch.tensor([*slow[:7], -1, -1, -1]), chosen) == pytest.approx(0.7)
    assert matching_share(model, IDS, likeliest(model, IDS, 10), frozenset()) == 1


def prepared(model: Any) -> tuple[DynamicCache, Tensor]:
    """The cache of a text, and the hidden states of its last token but those behind the last block."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        hidden = model(IDS, past_key_values=cache, output_hidden_states=True).hidden_states
    return cache, torch.stack([each[0, -1] for each in hidden[:-1]])


def slow_choice(model: Any, states: Tensor, count: int) -> frozenset[Any]:
    """CLaSp's recurrence by passes of the whole text through one block at a time, a state after the other."""
    whole = DynamicCache(config=model.config)
    with torch.no_grad():
        hidden = model(IDS, past_key_values=whole, output_hidden_states=True).hidden_states
    rotary = model.model.rotary_emb(hidden[0], torch.arange(IDS.shape[1])[None])
    mask = torch.full((IDS.shape[1],) * 2, -math.inf).triu(1)[None, None]

    def run(block: int, state: Tensor) -> Tensor:
        text = hidden[block].clone()
        text[0, -1] = state
        with torch.no_grad():
            output: Tensor = model.model.layers[block](text, attention_mask=mask, position_embeddings=rotary)
        return output[0, -1]

    table = {0: (states[0], frozenset[int]())}
    for block in range(len(states) - 1):
        following = dict[int, tuple[Tensor, frozenset[int]]]()
        for skipped in range(count + 1):
            options = list[tuple[Tensor, frozenset[int]]]()
            if skipped in table:
                options.append((run(block, table[skipped][0]), table[skipped][1]))
            if block and skipped - 1 in table:
                state, passed = table[skipped - 1]
                options.append((state, passed | {block}))
            if options:
                following[skipped] = max(
                    options, key=lambda each: float(torch.cosine_similarity(each[0], states[block + 1], 0))
                )
        table = following
    return frozenset((block, kind) for block in table[count][1] for kind in ("attention", "mlp"))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_clasp_is_its_recurrence_and_leaves_the_cache_alone(name: str, count: int) -> None:
    model = deep(7, name)
    cache, states = prepared(model)
    before = [layer.keys.clone() for layer in cache.layers]
    chosen = clasp.choose(model, cache, states, count)
    assert chosen == slow_choice(model, states, count)
    assert len(chosen) == 2 * count and chosen <= set(inner_sublayers(model))
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_clasp_chooses_among_the_best_of_all_sets() -> None:
    """Brute force over all sets of two of five inner blocks, by the cosine that the recurrence looks at."""
    model = deep(7)
    with torch.no_grad():  # blocks that differ in how much they do
        for number, block in enumerate(model.model.layers):
            for linear in (block.self_attn.o_proj, block.mlp.down_proj):
                linear.weight.mul_(0.1 if number in (2, 4) else 1.5)
    cache, states = prepared(model)
    scores = dict[frozenset[Any], float]()
    for pair in combinations(range(1, 6), 2):
        skipped = frozenset((block, kind) for block in pair for kind in ("attention", "mlp"))
        seen = list[Tensor]()
        hook = model.model.layers[-1].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0][0, -1]))
        own = copy.deepcopy(cache)
        own.crop(-1)
        with bypassed(model, skipped), torch.no_grad():
            model(IDS[:, -1:], past_key_values=own)
        hook.remove()
        scores[skipped] = float(torch.cosine_similarity(seen[0], states[-1], 0))
    assert clasp.choose(model, cache, states, 2) == max(scores, key=scores.__getitem__) == read_set("2:4")


def test_exits_write_what_the_first_blocks_write() -> None:
    model = deep()
    with torch.no_grad():
        hidden = model(IDS, output_hidden_states=True).hidden_states
    tokens = dynamic_exit.exit_tokens(model, model.model.norm, torch.stack([hidden[each][0] for each in (2, 4)]))
    for row, blocks in enumerate((2, 4)):
        with bypassed(model, early_exit(model, blocks)), torch.no_grad():
            assert torch.equal(tokens[row], model(IDS).logits[0].argmax(-1))


DRAFTS = [
    "skip=even,share=0.5",
    "sublayers=1:3a",
    "sublayers=2",
    "skip=swift,window=4,context=4",
    "skip=clasp,interval=4",
]
DRAFTS += ["skip=draft_verify,trials=4", "skip=dynamic_exit,period=1"]


@pytest.mark.parametrize("drafts", DRAFTS)
def test_texts_are_those_of_the_model_alone(drafts: str) -> None:
    model = deep()
    plain = model.generate(IDS, max_new_tokens=40, do_sample=False, eos_token_id=None)
    for _ in range(2):  # the second text begins with what was found
        own = speculate.with_settings(f"{drafts},length=3")
        written = model.generate(IDS, max_new_tokens=40, do_sample=False, eos_token_id=None, custom_generate=own)
        assert torch.equal(written, plain)
        assert own.statistics.rounds > 5


def test_searches_find_the_blocks_that_do_nothing() -> None:
    """Blocks 2, 3 and 5 of eight add next to nothing: drafts without them are accepted."""
    for drafts in ("skip=swift,share=0.5,window=16,period=1", "skip=clasp,share=0.5,interval=8"):
        model = deep(8)
        with torch.no_grad():
            for number, block in enumerate(model.model.layers):
                for linear in (block.self_attn.o_proj, block.mlp.down_proj):
                    linear.weight.mul_(1e-4 if number in (2, 3, 5) else 1.0)
        own = speculate.with_settings(f"{drafts},length=3")
        model.generate(IDS, max_new_tokens=200, do_sample=False, eos_token_id=None, custom_generate=own)
        first = own.statistics.acceptance
        model.generate(IDS, max_new_tokens=100, do_sample=False, eos_token_id=None, custom_generate=own)
        assert own.statistics.acceptance > 0.9, (drafts, first)


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ("sublayers=77", "the model has no 77"),
        ("sublayers=x", "skipped: 'x' is no block like"),
        ("skip=even,share=0.05", "is none; raise it"),
        ("skip=even,share=2", "not between 0 and 1"),
        ("skip=swift,share=0.01", "is none, or all"),
        ("skip=clasp,share=0.05", "is none, or all"),
        ("skip=dynamic_exit,spacing=30", "have no exit"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(drafts: str, message: str) -> None:
    model = deep()
    with pytest.raises(RecipeError, match=message):
        model.generate(IDS, max_new_tokens=4, do_sample=False, custom_generate=speculate.with_settings(drafts))


def test_clasp_refuses_windows() -> None:
    model = of_type("mistral", {**GQA, "num_hidden_layers": 6, "sliding_window": 16})
    assert len(sublayers_of(model)) == 12
    with pytest.raises(RecipeError, match="sliding windows"):
        model.generate(IDS, max_new_tokens=4, do_sample=False, custom_generate=speculate.with_settings("skip=clasp"))
