"""Weights from the gradients of the loss: those of torch's own backward pass, reduced, and a run that uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import api
from compress.calib import fisher
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import save_pico
from helpers.runs import RTN, contents, job, report_of

NAMES = {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"}
TOKENS = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))


def test_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    directory = save_pico("llama", tmp_path / "m")
    found = fisher.weights(Skeleton(open_checkpoint(directory)), TOKENS, NAMES)
    assert found.keys() == NAMES
    model = AutoModelForCausalLM.from_pretrained(directory)
    for name, pair in found.items():
        weight, squares = model.get_submodule(name).weight, 0.0
        for sample in TOKENS:
            logits = model(input_ids=sample[None]).logits[0, :-1]
            (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, sample[1:]), weight)
            squares = squares + gradient.double().square()
        for side, axis in ((pair.rows, 1), (pair.columns, 0)):
            wanted = squares.mean(axis).sqrt()  # type: ignore[attr-defined]
            torch.testing.assert_close(side.double(), wanted / wanted.mean(), rtol=1e-3, atol=1e-5)


def test_what_no_gradient_reaches_still_weighs() -> None:
    squares = torch.ones(3, 4)
    squares[1] = 0
    pair = fisher.reduce_squares(squares)
    assert pair.rows[1] == pytest.approx(fisher.SMALLEST * pair.rows[0].item(), rel=1e-5)
    nothing = fisher.reduce_squares(torch.zeros(3, 4))
    assert (nothing.rows == 1).all() and (nothing.columns == 1).all()


def test_a_run_with_gradients(tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "m")
    part = "quantize.method=nf", "bits=2", "calibration.num_samples=4", "calibration.seq_len=32"
    for number, metric in enumerate(("fisher", "none", "fisher")):
        setup = RTN.set(*part, f"lowrank={{rank: 4, metric: {metric}, iterations: 3}}")
        api.quantize(job(model, setup, tmp_path / f"out{number}"))
    weighted, plain, again = (contents(tmp_path / f"out{number}") for number in range(3))
    assert weighted == again
    assert weighted.keys() == plain.keys() and weighted != plain
    errors = [[row["weight_error"] for row in report_of(tmp_path / f"out{number}")["layers"]] for number in (0, 1)]
    assert sum(errors[0]) > sum(errors[1])  # the plain metric is the better one where errors are not weighted
