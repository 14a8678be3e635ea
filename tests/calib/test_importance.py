"""Token importance: against materialized attention in float64, whatever the batch; the model itself stays as it is."""

from __future__ import annotations

import copy
import hashlib
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compress.calib import token_importance
from compress.calib.data import Calibration, expand_copies, roll_windows
from compress.calib.token_importance import AUTO_SCORE, SCORES_OF, Probabilities, effective, mass, weights
from compress.errors import UnsupportedModelError
from compress.model.blockwise import BlockArgs, BlockInputs, run_block
from compress.recipe import schema
from helpers import problems
from helpers.pico import VOCAB_SIZE, build

SAMPLES, LENGTH = 5, 48  # more tokens than the sliding windows of 32
SEEN = ["llama", "qwen3", "mistral", "gemma2", "phi3", "gpt_neox", "opt", "mixtral", "gpt_oss"]


def sinks_model() -> PreTrainedModel:
    """Attention sinks, every other block with a sliding window."""
    config = CONFIG_MAPPING["gpt_oss"](
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=32,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    """Those that were built; the parameters need no gradients."""
    return {}


def built(models: dict[str, PreTrainedModel], name: str) -> PreTrainedModel:
    if name not in models:
        models[name] = (sinks_model() if name == "gpt_oss" else build(name)).requires_grad_(False)
    return models[name]


def text(samples: int = SAMPLES) -> Tensor:
    return torch.randint(2, VOCAB_SIZE, (samples, LENGTH), generator=torch.Generator().manual_seed(3))


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=lambda m: len(list(m.modules())))


def received(model: PreTrainedModel, index: int, tokens: Tensor, size: int = SAMPLES) -> BlockInputs:
    """What a block is called with, `size` samples at a time."""
    batches: list[tuple[Tensor, BlockArgs]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batches.append((args[0], BlockArgs(args[1:], kwargs)))

    handle = blocks(model)[index].register_forward_pre_hook(note, with_kwargs=True)
    for part in tokens.split(size):
        model(input_ids=part, use_cache=False)
    handle.remove()
    return lambda: batches


def materialized(model: PreTrainedModel, index: int, tokens: Tensor) -> Tensor:
    """Column sums [samples, tokens] of the probabilities that the model's own plain attention returns, in float64."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # grouped products are not there in float64
    found: list[Tensor] = []

    def note(_: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, tuple) and isinstance(out[1], Tensor) and out[1].dim() == 4:
            found.append(out[1].double().sum((1, 2)))

    for module in blocks(model)[index].modules():
        module.register_forward_hook(note)
    model(input_ids=tokens, use_cache=False)
    assert len(found) == 1
    return found[0]


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("scores", [token_importance.SCORES, 4 * LENGTH * 7])  # in the second case chunks of seven rows
@pytest.mark.parametrize("name", SEEN)
def test_attention_received_is_that_of_the_model(
    models: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch, name: str, scores: int, index: int
) -> None:
    monkeypatch.setattr(token_importance, "SCORES", scores)
    model, tokens = built(models, name), text()
    got = SCORES_OF["attention"](blocks(model)[index], "block", received(model, index, tokens), tokens)
    expected = materialized(model, index, tokens)
    assert got.shape == (SAMPLES, LENGTH) and got.dtype == torch.float32
    assert (got - expected).abs().max() < 1e-5 * expected.max()
    if name != "gpt_oss":  # where a query may also attend to nothing
        torch.testing.assert_close(got.sum(1), torch.full((SAMPLES,), 4.0 * LENGTH))


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_outputs_and_the_table_of_attention_functions_stay_as_they_are(implementation: str) -> None:
    model, tokens = build("llama"), text()
    model.set_attn_implementation(implementation)
    block, batches = blocks(model)[0], received(model, 0, tokens)
    before = dict(ALL_ATTENTION_FUNCTIONS)
    (hidden, call), *_ = batches()
    plain = run_block(block, call, hidden, "block")
    with token_importance.watched(block, "block") as masses:
        assert model.config._attn_implementation == implementation
        assert torch.equal(run_block(block, call, hidden, "block"), plain) and len(masses) == 1
        model(input_ids=tokens, use_cache=False)
    assert len(masses) == 2  # the attention of the other block goes by
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    with pytest.raises(KeyError), token_importance.watched(block, "block"):
        raise KeyError
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    run_block(block, call, hidden, "block")
    assert len(masses) == 2


@pytest.fixture
def other_function() -> Iterator[list[str]]:
    """A function of somebody else's in the place of sdpa, and what it was called for."""
    calls: list[str] = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module).__name__)
        return sdpa(module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    yield calls
    del ALL_ATTENTION_FUNCTIONS["sdpa"]


@torch.no_grad()
def test_a_replaced_attention_function_is_called_and_put_back(other_function: list[str]) -> None:
    model, tokens = build("llama"), text()
    mine = ALL_ATTENTION_FUNCTIONS["sdpa"]
    batches = received(model, 0, tokens)
    other_function.clear()
    SCORES_OF["attention"](blocks(model)[0], "block", batches, tokens)
    assert len(other_function) == 1 and ALL_ATTENTION_FUNCTIONS["sdpa"] is mine


@torch.no_grad()
def test_attention_that_cannot_be_seen_is_refused() -> None:
    config = CONFIG_MAPPING["bloom"](vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4)
    model, tokens = AutoModelForCausalLM.from_config(config).eval(), text()
    arguments = (blocks(model)[1], "h.1", received(model, 1, tokens), tokens)
    with pytest.raises(
        UnsupportedModelError, match=r"no attention of h\.1 goes through .* none or one of first_tokens"
    ):
        weights("attention", *arguments, 0.005)
    found, note = weights("auto", *arguments, 0.005)
    assert found is None and note is not None and note.startswith("its tokens count alike: no attention of h.1 goes")
    for name in list(SCORES_OF)[1:]:
        assert weights(name, *arguments, 0.5)[0].shape == tokens.shape


@torch.no_grad()
def test_auto_is_attention_where_it_can_be_seen() -> None:
    model, tokens = build("llama"), text()
    arguments = (blocks(model)[0], "block", received(model, 0, tokens), tokens, 0.005)
    (found, _), (wanted, _) = (weights(name, *arguments) for name in ("auto", "attention"))
    assert found is not None and wanted is not None and torch.equal(found, wanted)


@torch.no_grad()
def test_masks_that_cannot_be_read_are_refused() -> None:
    model, tokens = build("llama"), text()
    (hidden, call), *_ = received(model, 0, tokens)()
    odd = BlockArgs(call.args, {**call.kwargs, "attention_mask": torch.ones(SAMPLES, LENGTH)})
    with pytest.raises(UnsupportedModelError, match="mask of block is not a tensor of 4 dimensions"):
        weights("attention", blocks(model)[0], "block", lambda: [(hidden, odd)], tokens, 0.005)


# ---------------------------------------------------------------- column sums


def reference(query: Tensor, key: Tensor, how: Probabilities, allowed: Tensor) -> Tensor:
    """[batch, keys] by the book; allowed: bool [batch or 1, heads or 1, queries, keys]."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.double() @ key.transpose(2, 3) * how.scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores + (how.bias.double() if how.bias is not None else 0)
    exponentials = scores.exp() * allowed
    total = exponentials.sum(-1, keepdim=True)
    if how.sinks is not None:
        total = total + how.sinks.double().exp().view(1, -1, 1, 1)
    return (exponentials / total).sum((1, 2))


def variants() -> dict[str, tuple[Probabilities, Tensor]]:
    """How probabilities are made of 13 queries and keys of 3 samples with 4 heads, and what each query may see."""
    row, column = torch.arange(13)[:, None], torch.arange(13)
    causal = (column <= row).expand(1, 1, 13, 13)
    window = causal & (column > row - 5)
    seen = (problems.random(3, 4, 13, 13) > 0) | torch.eye(13, dtype=torch.bool)
    never = torch.finfo(torch.bfloat16).min
    added = torch.zeros(13, 13, dtype=torch.bfloat16).masked_fill(~causal[0, 0], never).expand(3, 1, 13, 13)
    bias = problems.random(1, 4, 13, 13, seed=2)
    return {
        "causal": (Probabilities(0.3), causal),
        "all": (Probabilities(0.3, causal=False), torch.ones_like(causal)),
        "window": (Probabilities(0.3, window=5), window),
        "bool mask": (Probabilities(0.3, mask=seen), seen),
        "one mask for all": (Probabilities(0.3, mask=window), window),
        "added mask": (Probabilities(0.3, mask=added), causal),
        "longer mask": (Probabilities(0.3, mask=nn.functional.pad(window, (0, 3))), window),
        "softcap": (Probabilities(2.0, softcap=1.5), causal),
        "sinks": (Probabilities(0.3, sinks=problems.random(4)), causal),
        "bias": (Probabilities(0.3, bias=bias), causal),
        "everything": (Probabilities(1.0, mask=added, softcap=3.0, sinks=problems.random(4), bias=bias), causal),
    }


@pytest.mark.parametrize("scores", [token_importance.SCORES, 4 * 13 * 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", variants())
def test_column_sums(monkeypatch: pytest.MonkeyPatch, variant: str, dtype: torch.dtype, scores: int) -> None:
    monkeypatch.setattr(token_importance, "SCORES", scores)
    query, key = problems.random(3, 4, 13, 8).to(dtype), problems.random(3, 2, 13, 8, seed=1).to(dtype)
    how, allowed = variants()[variant]
    got, expected = mass(query, key, how), reference(query, key, how, allowed)
    assert got.dtype == torch.float32 and (got - expected).abs().max() < 1e-5 * expected.max()


def test_column_sums_of_a_sequence_do_not_depend_on_the_others() -> None:
    query, key = problems.random(6, 4, 40, 8), problems.random(6, 2, 40, 8, seed=1)
    whole = mass(query, key, Probabilities(0.3))
    for sizes in ([1] * 6, [2, 4]):
        parts = [mass(q, k, Probabilities(0.3)) for q, k in zip(query.split(sizes), key.split(sizes), strict=True)]
        assert torch.equal(torch.cat(parts), whole)


# ---------------------------------------------------------------- weights


def test_recipes_know_the_scores() -> None:
    assert typing.get_args(schema.Importance) == ("none", AUTO_SCORE, *SCORES_OF)


@torch.no_grad()
@pytest.mark.parametrize("name", SCORES_OF)
def test_weights_run_from_the_minimum_to_one_and_have_mean_one(models: dict[str, PreTrainedModel], name: str) -> None:
    model, tokens = built(models, "llama"), text()
    block, batches = blocks(model)[1], received(model, 1, tokens)
    got, note = weights(name, block, "block", batches, tokens, 0.2)
    assert got.shape == tokens.shape and got.dtype == torch.float32 and note is None
    torch.testing.assert_close(got.mean(1), torch.ones(SAMPLES))
    torch.testing.assert_close(got.amin(1) / got.amax(1), torch.full((SAMPLES,), 0.2))
    scores = SCORES_OF[name](block, "block", batches, tokens).double()
    lowest, highest = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    mapped = 0.2 + 0.8 * (scores - lowest) / (highest - lowest)
    torch.testing.assert_close(got, (mapped / mapped.mean(1, keepdim=True)).float())


@torch.no_grad()
@pytest.mark.parametrize("name", SCORES_OF)
def test_weights_do_not_depend_on_the_batches(models: dict[str, PreTrainedModel], name: str) -> None:
    model, tokens = built(models, "llama"), text()
    block = blocks(model)[1]
    whole, _ = weights(name, block, "block", received(model, 1, tokens), tokens, 0.05)
    for size in (1, 2):
        split, _ = weights(name, block, "block", received(model, 1, tokens, size), tokens, 0.05)
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_batches_behind_the_first_end_at_the_attention() -> None:
    model, tokens, called = build("llama"), text(), list[int]()
    block = blocks(model)[0]
    block.get_submodule("mlp").register_forward_hook(lambda *_: called.append(1))
    batches = received(model, 0, tokens, 1)
    called.clear()
    token_importance.attention(block, "block", batches, tokens)
    assert len(called) == 1 and SAMPLES > 1


@torch.no_grad()
def test_scores_of_the_other_heuristics(models: dict[str, PreTrainedModel]) -> None:
    model, tokens = built(models, "llama"), text()
    block, batches = blocks(model)[1], received(model, 1, tokens)
    (hidden, call), *_ = batches()
    found = {name: score(block, "block", batches, tokens) for name, score in list(SCORES_OF.items())[1:]}
    assert found["first_tokens"].tolist() == [[1.0] * 6 + [0.0] * 42] * SAMPLES
    torch.testing.assert_close(found["activation_norm"], hidden.square().sum(-1).sqrt())
    change = block(hidden, *call.args, **call.kwargs) - hidden
    torch.testing.assert_close(found["input_output_difference"], -change.square().sum(-1).sqrt())
    assert found["token_rarity"].tolist() == [[-(tokens == t).sum().item() for t in row] for row in tokens]
    distance = torch.cdist(hidden.double(), hidden.double()).square().mean(2)
    constant = distance - found["token_similarity"]
    assert (constant - constant.mean(1, keepdim=True)).abs().max() < 1e-4 * distance.max()


def scored(
    monkeypatch: pytest.MonkeyPatch, scores: Tensor, minimum: float, columns: int, skip_first: bool = False
) -> Any:
    """Weights of tokens with these scores in a block whose widest linear has so many inputs."""
    monkeypatch.setitem(SCORES_OF, "given", lambda *_: scores)
    block = nn.Sequential(nn.Linear(16, columns), nn.Linear(columns, 16))
    return weights("given", block, "block", list, torch.zeros(scores.shape, dtype=torch.long), minimum, skip_first)


def test_equal_scores_are_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.stack([torch.full((8,), 3.0), torch.arange(8.0)])
    got, note = scored(monkeypatch, scores, 0.1, 16)
    assert note is None and torch.equal(got[0], torch.ones(8)) and got[1].unique().numel() == 8


def test_the_first_token_may_be_left_out_of_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.tensor([[100.0, 1.0, 2.0, 3.0]])
    kept, _ = scored(monkeypatch, scores, 0.5, 16)
    left_out, _ = scored(monkeypatch, scores, 0.5, 16, skip_first=True)
    raw = torch.tensor([[1.0, 0.5, 0.5 + 0.5 / 99, 0.5 + 1 / 99]])
    torch.testing.assert_close(kept, raw / raw.mean())
    raw = torch.tensor([[1.0, 0.5, 0.75, 1.0]])
    torch.testing.assert_close(left_out, raw / raw.mean())
    one, _ = scored(monkeypatch, torch.tensor([[5.0]]), 0.5, 8, skip_first=True)
    assert one.item() == 1


def test_effective_number_of_tokens() -> None:
    assert effective(torch.ones(7)) == pytest.approx(7) and effective(torch.tensor([3.0, 0.0])) == pytest.approx(1)
    assert effective(torch.tensor([1.0, 2.0])) == pytest.approx(9 / 5)


def test_too_few_effective_tokens_raise_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of each sequence has nearly all of the score; 2 * 64 tokens, a linear of 800 inputs: 100 are needed."""
    scores = problems.random(2, 64).abs()
    scores[:, 0] = 1000
    unguarded, note = scored(monkeypatch, scores, 0.005, 16)
    assert note is None and 2 < effective(unguarded) < 20
    got, note = scored(monkeypatch, scores, 0.005, 800)
    assert effective(got.double()) == pytest.approx(100, rel=1e-5)
    torch.testing.assert_close(got.mean(1), torch.ones(2))
    raised = (got.amin(1) / got.amax(1)).mean().item()
    assert 0.005 < raised < 1 and note is not None
    assert f"only {effective(unguarded):.0f} tokens would count for 800 inputs" in note
    assert f"importance_min raised from 0.005 to {raised:.2g}" in note


def test_fewer_tokens_than_are_needed_count_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    got, note = scored(monkeypatch, problems.random(2, 8), 0.005, 1000)
    assert torch.equal(got, torch.ones(2, 8)) and note is not None and "from 0.005 to 1" in note


# ---------------------------------------------------------------- rolled copies


def test_rolled_copies() -> None:
    tokens = torch.stack([torch.arange(8), torch.arange(10, 18)])
    got = roll_windows(tokens, 4)
    assert got.shape == (8, 8) and got.dtype == torch.int64
    for sample in range(2):
        for k in range(4):
            assert torch.equal(got[4 * sample + k], torch.roll(tokens[sample], 2 * k))
    assert torch.equal(roll_windows(tokens, 1), tokens)


def test_expanded_calibration_names_its_own_tokens() -> None:
    tokens = torch.arange(16).view(2, 8)
    given = Calibration(tokens, "text", "0" * 64, 100, notes=("A note.",))
    got = expand_copies(given, 2)
    assert torch.equal(got.tokens, roll_windows(tokens, 2)) and got.facts()["num_samples"] == 4
    assert got.sha256 == hashlib.sha256(got.tokens.numpy().tobytes()).hexdigest()
    assert (got.source, got.notes) == (given.source, given.notes)


def test_rolled_copies_of_an_odd_length() -> None:
    got = roll_windows(torch.arange(7)[None], 3)
    assert got.tolist() == [[0, 1, 2, 3, 4, 5, 6], [5, 6, 0, 1, 2, 3, 4], [3, 4, 5, 6, 0, 1, 2]]
