"""Planted defects are named, and sound models are left alone: in codes, in another basis, with moved scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress import api
from compress.errors import UnsupportedModelError
from compress.evaluate import diagnosis, findings
from compress.evaluate.diagnosis import BlockFacts, Facts, LinearFacts
from compress.model import load
from helpers.pico import build, save
from helpers.runs import KEEP_TABLES, SMALL, Setup, job

BLOCKS = 5
TOKENS = torch.randint(256, (4, 96), generator=torch.Generator().manual_seed(0))
Q, V, O, DOWN = "self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"


@pytest.fixture(scope="module")
def base() -> Any:
    return build("llama", {"num_hidden_layers": BLOCKS})


def rounded(base: Any, bits: int) -> Any:
    """A copy whose linears are rounded to nearest, 32 weights a scale."""
    model = copy.deepcopy(base)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                groups = weight.unflatten(1, (-1, 32))
                low = groups.amin(-1, keepdim=True)
                step = (groups.amax(-1, keepdim=True) - low) / (2**bits - 1)
                weight.copy_((((groups - low) / step).round() * step + low).flatten(1))
    return model


def found(base: Any, model: Any) -> list[str]:
    return findings.sentences(diagnosis.compare(base, model, TOKENS))


def doubled(weight: Tensor) -> Tensor:
    return 2 * weight


def halved(weight: Tensor) -> Tensor:
    return weight / 2


def swapped(weight: Tensor) -> Tensor:  # the first two heads
    return torch.cat([weight[16:32], weight[:16], weight[32:]])


def shuffled(weight: Tensor) -> Tensor:  # rows of the first head
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    return torch.cat([weight[:16][order], weight[16:]])


def columns_swapped(weight: Tensor) -> Tensor:
    return torch.cat([weight[:, 32:], weight[:, :32]], 1)


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_sound_models_are_left_alone(base: Any, bits: int) -> None:
    assert found(base, rounded(base, bits)) == []


DEFECTS = [
    (0, Q, doubled, "puts out 2.0 times what the original does"),
    (3, V, doubled, "puts out 2.0 times what the original does"),
    (4, DOWN, doubled, "puts out 2.0 times what the original does"),
    (2, "mlp.up_proj", halved, "puts out 0.5 times what the original does"),
    (3, Q, swapped, "has rows in another order: rows 0 to 15 stand at 16 to 31, rows 16 to 31 stand at 0 to 15"),
    (1, V, swapped, "has rows in another order: rows 0 to 15 stand at 16 to 31, rows 16 to 31 stand at 0 to 15"),
    (3, O, swapped, "has rows in another order: rows 0 to 15 stand at 16 to 31, rows 16 to 31 stand at 0 to 15"),
    (3, "self_attn.k_proj", shuffled, "has rows in another order: "),
    (2, O, columns_swapped, "puts out something else than the original: correlation"),
]


@pytest.mark.parametrize(("block", "path", "change", "said"), DEFECTS)
def test_a_planted_defect_is_named(
    base: Any, block: int, path: str, change: Callable[[Tensor], Tensor], said: str
) -> None:
    model = rounded(base, 4)
    with torch.no_grad():
        weight = model.get_parameter(f"model.layers.{block}.{path}.weight")
        weight.copy_(change(weight).clone())
    (sentence,) = found(base, model)
    assert sentence.startswith(f"model.layers.{block}.{path} {said}")


def first_swapped(weight: Tensor) -> Tensor:
    return torch.cat([weight[40:80], weight[:40], weight[80:]])


TAIL = [
    ("lm_head", doubled, "lm_head puts out 2.0 times what the original does"),
    ("lm_head", halved, "lm_head puts out 0.5 times what the original does"),
    ("lm_head", first_swapped, "lm_head has rows in another order: rows 0 to 39 stand at 40 to 79, rows 40 to 79 "),
    ("lm_head", lambda weight: weight.flip(1), "lm_head puts out something else than the original: correlation "),
    ("model.norm", doubled, "model.norm puts out 2.0 times what the original does"),
    ("model.norm", torch.zeros_like, "model.norm puts out something else than the original: correlation 0.00"),
]


@pytest.mark.parametrize(("name", "change", "said"), TAIL)
def test_a_broken_head_or_last_norm_is_named(
    base: Any, name: str, change: Callable[[Tensor], Tensor], said: str
) -> None:
    model = rounded(base, 4)
    with torch.no_grad():
        weight = model.get_parameter(f"{name}.weight")
        weight.copy_(change(weight).clone())
    (sentence,) = found(base, model)
    assert sentence.startswith(said)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A mixture of experts, and where it lies in 4 bits."""
    base, folder = build("qwen3_moe", {"num_hidden_layers": 3}), tmp_path_factory.mktemp("mixture")
    setup = Setup("int4", (*KEEP_TABLES, *SMALL, "group_size=16"))
    api.quantize(job(save(base, folder / "model"), setup, folder / "out"))
    return base, folder / "out"


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("down_proj", doubled, "puts out 2.0 times what the original does"),
        ("gate_proj", halved, "puts out 0.5 times what the original does"),
        ("up_proj", lambda weight: weight.flip(0), "has rows in another order: "),
        ("down_proj", lambda weight: weight.flip(1), "puts out something else than the original: correlation 0."),
    ],
)
def test_one_broken_expert_is_named(
    mixture: tuple[Any, Path], part: str, change: Callable[[Tensor], Tensor], said: str
) -> None:
    base, model = mixture[0], load.load_model(mixture[1], "float32")
    assert found(base, model) == []
    linear = model.get_submodule(f"model.layers.1.mlp.experts.5.{part}")
    weight = linear.dequantize(torch.float32)
    broken = nn.Linear(*weight.T.shape, bias=False)
    broken.weight = nn.Parameter(change(weight).clone(), requires_grad=False)
    model.set_submodule(f"model.layers.1.mlp.experts.5.{part}", broken)
    (sentence,) = found(base, model)
    assert sentence.startswith(f"model.layers.1.mlp.experts.5.{part} {said}")


def test_other_embeddings_are_named(base: Any) -> None:
    model = copy.deepcopy(base)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.copy_(table[torch.randperm(len(table), generator=torch.Generator().manual_seed(2))].clone())
    (sentence,) = found(base, model)
    assert sentence.startswith("the embeddings are not the original's, nor a rotation of them")


@pytest.mark.parametrize("name", ["quarot4bit", "awq4bit"])
def test_transformed_models(base: Any, name: str, tmp_path: Path) -> None:
    """A rotated model is compared in its own basis, and moved scales are no defect; a defect of it is found."""
    source = save(base, tmp_path / "model")
    api.quantize(job(source, Setup(name, (*KEEP_TABLES, *SMALL)), tmp_path / "out"))
    model = load.load_model(tmp_path / "out", "float32")
    facts = diagnosis.compare(base, model, TOKENS)
    assert facts.is_rotated == (name == "quarot4bit")
    assert findings.sentences(facts) == []
    assert max(block.error for block in facts.blocks) < 0.3
    hook = model.get_submodule(f"model.layers.3.{V}").register_forward_hook(
        lambda _, args, out: torch.cat([out[..., 16:], out[..., :16]], -1)
    )
    (sentence,) = found(base, model)
    assert sentence.startswith(f"model.layers.3.{V} has ") and "in another order" in sentence
    hook.remove()
    for part in ("lm_head", "model.norm", f"model.layers.0.{Q}"):
        hook = model.get_submodule(part).register_forward_hook(lambda _, args, out: 2 * out)
        assert found(base, model) == [f"{part} puts out 2.0 times what the original does"]
        hook.remove()


def test_models_of_another_depth_are_refused(base: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="the models have 5 and 2 decoder blocks"):
        diagnosis.compare(base, build("llama"), TOKENS)


@pytest.mark.parametrize(("count", "far"), [(4, 2), (2, 0), (2, 1)])
def test_a_block_without_a_culprit_is_named(count: int, far: int) -> None:
    """What is usual is what the other blocks have, of two blocks, too."""
    linear = LinearFacts("a.0.q", "q", 0, 1.0, 1.0, 0.01, 0.0, "")
    blocks = [BlockFacts(f"a.{i}", 0.9 if i == far else 0.01, (linear,)) for i in range(count)]
    (sentence,) = findings.sentences(Facts(0.0, False, tuple(blocks)))
    assert sentence.startswith(
        f"a.{far} adds to the hidden states what the original does not: relative squared error 0.9, 0.01 in other"
    )


def test_a_model_of_one_block_has_no_other_to_compare_with() -> None:
    linear = LinearFacts("a.0.q", "q", 0, 1.0, 1.0, 0.01, 0.0, "")
    assert findings.sentences(Facts(0.0, False, (BlockFacts("a.0", 0.9, (linear,)),))) == []


def test_doubled_scales_of_one_of_two_blocks() -> None:
    """Behind a linear that is named, what a linear puts out is taken over what it takes."""
    names = {"down": (2.0, 2.0), "o": (6.0, 2.0)}
    blocks = []
    for number in range(2):
        is_far = number == 1
        linears = [
            LinearFacts(f"a.{number}.{path}", path, number, *(values if is_far else (1.0, 1.0)), 0.01, 0.0, "")
            for path, values in names.items()
        ]
        blocks.append(BlockFacts(f"a.{number}", 0.4 if is_far else 0.009, tuple(linears)))
    assert findings.sentences(Facts(0.0, False, tuple(blocks))) == [
        f"a.1.{path} puts out 2.0 times what the original does" for path in names
    ]
