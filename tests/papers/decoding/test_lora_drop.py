"""LoRA-Drop: decoding step by step against texts read at once, the cache, the fit against plain least squares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from compress.errors import UnsupportedModelError
from compress.papers.decoding import lora_drop
from compress.papers.decoding.lora_drop import BlockCorrection, Corrections, FitSettings, TeacherForced
from compress.papers.decoding.lora_drop_training import TrainSettings, rate, train
from helpers.pico import PICO

PROMPT, HIDDEN = 5, 64
IDS = torch.randint(0, 256, (1, 18), generator=torch.Generator().manual_seed(1))


def corrections(period: int, reuse: Any, scale: float = 0.05) -> Corrections:
    generator = torch.Generator().manual_seed(2)
    pair = (scale * torch.randn(shape, generator=generator) for shape in ((3, HIDDEN), (HIDDEN, 3)))
    return Corrections({1: BlockCorrection(*pair)}, period, reuse)


def stepwise(model: Any, ids: Tensor) -> tuple[Tensor, DynamicCache]:
    """Logits behind each token from the last of the prompt on, and the cache."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        rows = [model(input_ids=ids[:, :PROMPT], past_key_values=cache, use_cache=True).logits[:, -1:]]
        rows += [
            model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits
            for i in range(PROMPT, ids.shape[1])
        ]
    return torch.cat(rows, 1), cache


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("reuse", ["state", "update", "nothing"])
def test_texts_read_at_once_are_what_decoding_reads(name: str, reuse: str) -> None:
    model = PICO[name]()
    whole = model(input_ids=IDS).logits
    for period in (1, 3, 4):
        chosen = corrections(period, reuse)
        with lora_drop.decoding(model, chosen):
            found, cache = stepwise(model, IDS)
        expected = TeacherForced(model, chosen, PROMPT).logits(IDS)
        assert torch.allclose(found, expected[:, PROMPT - 1 :], atol=2e-5)
        assert torch.equal(expected, whole) or period > 1
        decoded = IDS.shape[1] - PROMPT
        assert [cache.get_seq_length(i) for i in range(2)] == [IDS.shape[1], PROMPT + decoded // period]
    assert torch.equal(model(input_ids=IDS).logits, whole), "something was left in the model"


def test_a_step_is_the_formula() -> None:
    """output = anchor + B A x, with the output of the last refresh."""
    model, chosen = PICO["llama"](), corrections(2, "state")
    inputs, outputs = list[Tensor](), list[Tensor]()
    lora_drop.blocks_in(model)  # which runs the model

    def note(_: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        outputs.append(output)

    handle = model.model.layers[1].register_forward_hook(note, with_kwargs=True)
    with lora_drop.decoding(model, chosen):
        stepwise(model, IDS)
    handle.remove()
    a, b = chosen.blocks[1]
    for number in range(1, len(inputs), 2):  # the prompt is number 0
        expected = outputs[number - 1][:, -1:] + inputs[number] @ (b @ a).T
        assert torch.allclose(outputs[number], expected, atol=1e-5)


@pytest.mark.parametrize("rank", [2, HIDDEN])
def test_a_correction_is_the_least_squares_of_its_rank(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, HIDDEN, generator=generator).double() * torch.linspace(0.1, 3, HIDDEN)
    y = x @ torch.randn(HIDDEN, HIDDEN, generator=generator).double() + torch.randn(300, HIDDEN, generator=generator)
    found = lora_drop.regress(x, y, rank)
    gram = x.T @ x
    gram += lora_drop.RIDGE_SHARE * gram.diagonal().mean() * torch.eye(HIDDEN)
    whole = torch.linalg.solve(gram, x.T @ y).T
    left, size, right = torch.linalg.svd(whole @ torch.linalg.cholesky(gram), full_matrices=False)
    best = (left[:, :rank] * size[:rank]) @ right[:rank] @ torch.linalg.inv(torch.linalg.cholesky(gram))
    assert torch.allclose((found.b @ found.a).double(), best, atol=1e-4)


@pytest.mark.parametrize("reuse", ["state", "update", "nothing"])
def test_fitted_corrections_bring_blocks_nearer(reuse: Any) -> None:
    model = PICO["llama"]()
    tokens = torch.randint(0, 256, (24, 32), generator=torch.Generator().manual_seed(3))
    settings = FitSettings(period=3, rank=16, reuse=reuse, prompt=PROMPT)
    whole = model(input_ids=tokens).logits
    fitted = lora_drop.fit(model, tokens, [1], settings)
    nothing = lora_drop.without_correction(model, [1], 3, reuse)
    errors = [(TeacherForced(model, c, PROMPT).logits(tokens) - whole).square().mean() for c in (fitted, nothing)]
    assert errors[0] < 0.85 * errors[1]
    assert fitted.blocks[1].a.shape == (16, HIDDEN) and fitted.period == 3
    assert torch.equal(model(input_ids=tokens).logits, whole)


@pytest.mark.parametrize("model_rate", [0.0, 1e-3])
def test_training_lowers_the_loss_of_decoding(model_rate: float) -> None:
    """Its first loss is that of decoding step by step without a correction; weights change where they are trained."""
    model = PICO["llama"]()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    settings = FitSettings(period=3, rank=4, prompt=PROMPT)
    with lora_drop.decoding(model, lora_drop.without_correction(model, [1], 3)):
        steps, _ = stepwise(model, IDS)
    with torch.no_grad():
        prompt = model(input_ids=IDS[:, : PROMPT - 1]).logits
    logits = torch.cat((prompt, steps), 1)[0, :-1].double()
    expected = -logits.log_softmax(-1).gather(1, IDS[0, 1:, None]).mean()
    chosen, losses = train(model, IDS, [1], settings, TrainSettings(40, 1, 1e-2, model_rate))
    assert losses[0] == pytest.approx(float(expected), abs=1e-5)
    assert losses[-1] < losses[0] - 0.1
    is_same = all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert is_same == (model_rate == 0)
    found = TeacherForced(model, chosen, PROMPT).logits(IDS)[0, :-1]
    assert float(torch.nn.functional.cross_entropy(found, IDS[0, 1:])) < losses[0] - 0.1


@pytest.mark.parametrize("reuse", ["state", "update", "nothing"])
def test_gradients_go_through_anchors(reuse: Any) -> None:
    """Against differences of the loss along the gradient, of a correction's B and of a weight in the block before."""
    model, chosen = PICO["llama"]().double(), corrections(3, reuse)
    pair = BlockCorrection(*(x.double().requires_grad_() for x in chosen.blocks[1]))
    reader = TeacherForced(model, Corrections({1: pair}, 3, reuse), PROMPT)
    weight = lora_drop.blocks_in(model)[0].mlp.down_proj.weight.requires_grad_()

    def loss() -> Tensor:
        return torch.nn.functional.cross_entropy(reader.read(IDS)[0, :-1], IDS[0, 1:])

    loss().backward()
    for tensor in (pair.b, weight):
        assert tensor.grad is not None
        norm, step, ends = float(tensor.grad.norm()), 1e-2, []
        with torch.no_grad():
            for sign in (1, -1):
                tensor += sign * step * tensor.grad / norm
                ends.append(float(loss()))
                tensor -= sign * step * tensor.grad / norm
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norm, rel=1e-3)


def test_training_leaves_no_trace_beside_the_weights() -> None:
    model, settings = PICO["llama"](), FitSettings(period=3, rank=4, prompt=PROMPT)
    for x in model.parameters():
        x.requires_grad_(x.dim() == 1)
    for blocks, message in (([1], None), ([0], "block 0 always runs")):
        if message is None:
            train(model, IDS, blocks, settings, TrainSettings(2, 1))
        else:
            with pytest.raises(ValueError, match=message):
                train(model, IDS, blocks, settings, TrainSettings(2, 1))
        assert all(x.requires_grad == (x.dim() == 1) and x.grad is None for x in model.parameters())
    chosen, losses = train(model, IDS, [], FitSettings(1), TrainSettings(2, 1, 0.0, 1e-3))
    assert not chosen.blocks and losses[1] < losses[0]
    for tokens, asked, changed, message in (
        (IDS[:0], settings, model, "there is no text"),
        (IDS[:, :PROMPT], settings, model, "no token is left out"),
        (IDS, FitSettings(period=1), model, "no token is left out"),
        (IDS, settings, PICO["llama"]().bfloat16(), "load the model in float32"),
    ):
        with pytest.raises(ValueError, match=message):
            train(changed, tokens, [1], asked, TrainSettings(2, 1))
    with pytest.raises(ValueError, match="nothing would be trained"):
        train(model, IDS, [], settings, TrainSettings(model_rate=0.0))
    with pytest.raises(ValueError, match="must be 1 or more"):
        TrainSettings(batch=0)


def test_rates_of_the_schedule() -> None:
    assert [rate(step, 40) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert rate(21, 40) == pytest.approx(0.5) and 0 < rate(39, 40) < 0.01


def test_generate_runs_inside() -> None:
    model = PICO["llama"]()
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS, **arguments)
    with lora_drop.decoding(model, corrections(1, "state")):
        assert torch.equal(model.generate(IDS, **arguments), plain)
    with lora_drop.decoding(model, corrections(4, "state", scale=1.0)):
        assert not torch.equal(model.generate(IDS, **arguments), plain)
    assert torch.equal(model.generate(IDS, **arguments), plain)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_text_of_one_token_begins_anew(name: str) -> None:
    """Also behind another text: nothing of that is used, and all blocks cache the first token."""
    model, chosen = PICO[name](), corrections(4, "state", scale=1.0)

    def read() -> tuple[Tensor, list[int]]:
        cache = DynamicCache(config=model.config)
        rows = [model(input_ids=IDS[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(3)]
        return torch.cat(rows, 1), [cache.get_seq_length(i) for i in range(2)]

    with lora_drop.decoding(model, chosen):
        alone = read()
    with lora_drop.decoding(model, chosen):
        stepwise(model, IDS[:, 4:14])
        behind = read()
    assert torch.equal(alone[0], behind[0]) and alone[1] == behind[1] == [3, 1]
    assert torch.allclose(alone[0], TeacherForced(model, chosen, 1).logits(IDS[:, :3]), atol=2e-5)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="period 0"):
        Corrections({}, 0)
    with pytest.raises(ValueError, match="block 0"):
        Corrections({0: BlockCorrection(torch.zeros(1, 2), torch.zeros(2, 1))}, 2)
    model = PICO["llama"]()
    with lora_drop.decoding(model, corrections(2, "state")), pytest.raises(UnsupportedModelError, match="one sequence"):
        model(input_ids=IDS.repeat(2, 1))
    with pytest.raises(ValueError, match="prompt 0"):
        TeacherForced(model, corrections(2, "state"), 0).logits(IDS)
    with lora_drop.decoding(model, corrections(4, "state")):
        _, cache = stepwise(model, IDS)
        with pytest.raises(UnsupportedModelError, match="no prompt behind"):
            model(input_ids=IDS, past_key_values=cache, use_cache=True)
    assert lora_drop.published_blocks(9) == (1, 2, 3, 5, 6, 7)
