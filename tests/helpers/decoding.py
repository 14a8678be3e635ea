"""Small models that decode by programs, and comparisons of what they give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.runtime.step import decode
from helpers.pico import PICO

RATIO = 1e-4  # of logits in float32: sums in another order


def tokens(rows: int, count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 250, (rows, count), generator=torch.Generator().manual_seed(seed))


def ready(name: str = "llama") -> PreTrainedModel:
    model = PICO[name]()
    config: Any = model.generation_config
    config.eos_token_id, config.pad_token_id = None, 0
    return model


def step_of(model: nn.Module) -> decode.StepState:
    (step,) = (vars(each)[decode.MARK] for each in model.modules() if decode.MARK in vars(each))
    return step


def assert_close(got: Tensor, expected: Tensor, ratio: float = RATIO) -> None:
    assert float((got - expected).norm()) <= ratio * float(expected.norm())
