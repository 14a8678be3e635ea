"""Learned rotations: the step on the orthogonal matrices, the rounded model against the search's, the same function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress import api
from compress.errors import BudgetError, CalibrationError, CompressError, RecipeError
from compress.papers.transform import learned_rotation, rotation_search, spin
from compress.transform.bases import Basis, Orthogonal
from helpers.pico import build
from helpers.problems import random
from helpers.rotations import CPU, open_bench
from helpers.runs import GPTQ, RTN, Setup, job

TOKENS = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(1))
INPUTS = RTN.set("bits=8", "activations={bits: 3}")  # what is rounded without data: nearly nothing but the inputs


def orthogonal(size: int, seed: int) -> Tensor:
    """Random, float32; of determinant 1, so that steps can lead from one to the other."""
    q = torch.linalg.qr(random(size, size, seed=seed).double()).Q
    q[:, 0] *= torch.linalg.det(q).sign()
    return q.float()


def departure(matrix: Tensor) -> float:
    return (matrix.double() @ matrix.double().T - torch.eye(matrix.shape[0], dtype=torch.float64)).abs().max().item()


# ---------------------------------------------------------------- the step


def test_steps_stay_orthogonal_and_find_a_rotation() -> None:
    """min |Q A - B|^2 where B is a rotated A: the loss falls to nothing, 300 steps leave no error behind."""
    a, target = random(16, 40), orthogonal(16, 1)
    matrix = nn.Parameter(orthogonal(16, 2))
    losses = []
    for step in range(300):
        loss = (matrix @ a - target @ a).square().mean()
        loss.backward()
        losses.append(loss.item())
        learned_rotation.cayley_step(matrix, 1.5 * (1 - step / 300))
        assert matrix.grad is None and departure(matrix.detach()) < 1e-5
    assert losses[0] > 1 and losses[-1] < 1e-6
    assert all(after < before for before, after in zip(losses, losses[1:100], strict=False))


def test_a_small_step_is_the_gradient_on_the_manifold() -> None:
    """Against autograd through the matrix exponential: the same tangent, in the direction that lessens the loss."""
    matrix, weight = nn.Parameter(orthogonal(8, 3)), random(8, 8, seed=4)
    (matrix * weight).sum().backward()
    before = matrix.detach().clone()
    learned_rotation.cayley_step(matrix, 1e-3)
    moved = ((matrix.detach() - before) / 1e-3).double()
    x, g = before.double(), weight.double()
    u = g @ x.T - x @ g.T  # the canonical gradient is u X, of the released step half of it on each side
    assert torch.allclose(moved / moved.norm(), -(u @ x) / (u @ x).norm(), atol=0.02)


def test_the_vector_of_ones_is_left_alone() -> None:
    ones = torch.ones(16)
    matrix = nn.Parameter(Basis(16, 3, keep_mean=True).dense(16).float())
    start = matrix.detach().clone()
    for seed in range(20):
        (matrix * random(16, 16, seed=seed)).sum().backward()
        learned_rotation.cayley_step(matrix, 1.5, keep_mean=True)
    assert torch.allclose(matrix @ ones, ones, atol=1e-5) and departure(matrix.detach()) < 1e-5
    assert (matrix - start).norm() > 1


# ---------------------------------------------------------------- the rounded model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", ("bits=3", "group_size=32")),
        ("llama", ("bits=3", "group_size=32", "incoherence=true")),
        ("gpt_neox", ("bits=3", "group_size=16", "symmetric=false")),
        ("phi3", ("bits=3",)),
        ("mixtral", ("bits=3", "activations={bits: 4, scale: tensor}")),
    ],
)
def test_rounding_in_a_basis_is_the_rotated_model_rounded(
    name: str, changes: tuple[str, ...], pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Nothing is merged here, all is there: both must give the same KL but for numbers that fall to the other side."""
    setup = RTN.set("activations={bits: 5, clip: 0.9}", *changes)
    rotation, given = open_bench(pico_dir(name), tmp_path, setup, spin.Config(learn=1), TOKENS)
    rotation.begin(CPU)
    layers = rotation_search.roundings(given.plan, 0, CPU)
    (expected,) = rotation_search.search(rotation, given._replace(batch=1), layers)
    rotation.draw(0)
    parameters = learned_rotation._parameters(rotation, CPU)
    with (
        learned_rotation._load(rotation, TOKENS, given) as model,
        learned_rotation._round_in_learned_bases(rotation, parameters, layers, model),
    ):
        found = model.divergence(range(4)).mean().item()
    assert found == pytest.approx(expected, rel=0.05) and expected > 0.01
    assert model.skeleton.edits is rotation and all(p.is_meta for p in model.skeleton.model.parameters())
    assert not any("forward" in vars(module) for module in model.skeleton.model.modules())


# ---------------------------------------------------------------- in a run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_tied", "gpt_neox", "mixtral"])
def test_the_same_function_in_a_learned_basis(
    name: str, pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged and loaded by transformers alone; the basis has been learned, not just drawn."""
    monkeypatch.setattr(learned_rotation, "is_better", lambda *_: True)
    sizes = ("calibration.num_samples=2", "calibration.seq_len=24")
    for steps in (5, 0):
        setup = INPUTS.set(f"transform=[{{method: spin, learn: {steps}}}]", *sizes)
        asked = dataclasses.replace(job(pico_dir(name), setup, tmp_path / str(steps)), pack=False)
        report = api.quantize(asked)
        notes = [note for note in report["notes"].get("transform", []) if "unties" not in note]
        assert len(notes) == (steps > 0)
        for note in notes:
            assert note.startswith("rotations learned in 5 steps: KL ") and "not used" not in note
    paths = (pico_dir(name), tmp_path / "5", tmp_path / "0")
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(path) for path in paths]
    source, learned, drawn = models
    with torch.no_grad():
        x, y = source(TOKENS).logits, learned(TOKENS).logits
    assert (x - y).norm() < 1e-4 * x.norm()
    a, b = learned.get_input_embeddings().weight, drawn.get_input_embeddings().weight
    assert (a - b).norm() > 1e-3 * b.norm()


@pytest.mark.slow
def test_learning_finds_a_basis_without_outliers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the identity, on a model whose stream has large channels; merged, the search finds the same."""
    source = build("llama")
    with torch.no_grad():
        source.get_input_embeddings().weight[:, [5, 40]] *= 12
    source.save_pretrained(tmp_path / "model")
    setup = RTN.set("bits=8", "activations={bits: 4}")
    rotation, given = open_bench(tmp_path / "model", tmp_path / "work", setup, spin.Config(learn=10), TOKENS)
    rotation.begin(CPU)
    rotation.use(Orthogonal(), {0: Orthogonal(), 1: Orthogonal()})
    matrices, note = learned_rotation.learn(rotation, given)
    before, after = (float(word) for word in note.split("KL ")[1].split(" on ")[0].split(" -> "))
    assert after < 0.8 * before
    assert matrices.keys() == {"residual", "0", "1"} and all(departure(m) < 1e-12 for m in matrices.values())
    bases = {name: Orthogonal(matrix) for name, matrix in matrices.items()}
    monkeypatch.setattr(rotation, "draw", lambda _: rotation.use(bases["residual"], {0: bases["0"], 1: bases["1"]}))
    layers = rotation_search.roundings(given.plan, 0, CPU)
    (merged,) = rotation_search.search(rotation, given, layers)
    assert merged == pytest.approx(after, rel=0.1)


@pytest.mark.parametrize(
    ("setup", "changes", "error", "message"),
    [
        (INPUTS, {"tokens": None}, CalibrationError, "without a calibration text; set `learn: 0`"),
        (INPUTS, {"max_memory": 1}, BudgetError, "gradients, .* of memory, and 0 B are free; set `learn: 0`"),
        (GPTQ, {}, RecipeError, "rounds no inputs, and no weights without data.*set `learn: 0`"),
    ],
)
def test_refusals(
    setup: Setup,
    changes: dict[str, Any],
    error: type[CompressError],
    message: str,
    pico_dir: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """In one line, before anything is learned."""
    rotation, given = open_bench(pico_dir("llama"), tmp_path, setup, spin.Config(learn=5), TOKENS)
    with pytest.raises(error, match=message) as caught:
        rotation.choose(given._replace(**changes))
    assert "\n" not in str(caught.value)
