"""Train a model and its corrections to decode without some blocks between refreshes (LoRA-Drop, arXiv 2601.02569).

The loss is that of language modelling over texts that are read as decoding would read them: blocks that are left out
give the state of the last refresh and their correction there (`lora_drop.TeacherForced`), and the gradient goes through
both. As in the released code the model's own weights are trained along with the corrections, by AdamW with a warmup
over a twentieth of the steps and a cosine to 0.

    corrections = train(model, tokens, lora_drop.published_blocks(30), lora_drop.FitSettings(period=4), TrainSettings())

Where we differ: left-out blocks see keys and values of the prompt and of refreshed tokens alone, as in decoding, where
the released training lets them see all earlier tokens. Texts begin with a prompt that the whole model reads, there
refreshes count from the first token. B A has no factor (there alpha / rank, half), and A begins as normal numbers of
standard deviation A_SCALE, not as uniform ones. The released recipe takes six billion tokens at a rate of 1e-5, in
batches of 16 texts of 4,096 tokens, in bfloat16; the defaults here are for hundreds of steps of a float32 model.

What it does not do: resume; several devices; mixed precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compress.papers.decoding.lora_drop import (
    BlockCorrection,
    Corrections,
    FitSettings,
    TeacherForced,
    check_texts,
    hidden_size,
)

WARMUP_SHARE = 0.05  # [share of the steps] in which the rate rises
A_SCALE = 0.02  # standard deviation of A before training
CLIP_NORM = 1.0  # largest norm of the gradient


@dataclass(frozen=True)
class TrainSettings:
    """How a model and its corrections are trained."""

    steps: int = 200
    batch: int = 4  # [texts] of a step
    learning_rate: float = 1e-4  # of the corrections
    model_rate: float = 1e-4  # of the model's weights; 0: they stay
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.batch) < 1:
            raise ValueError(f"steps {self.steps} and batch {self.batch} must be 1 or more")


def train(
    model: Any, tokens: Tensor, blocks: Sequence[int], settings: FitSettings, training: TrainSettings
) -> tuple[Corrections, list[float]]:
    """Train a float32 model in place, and corrections of some blocks; return these and the loss of each step in nats.

    tokens: int64 [samples, length], drawn without repetition until all were seen. settings: which tokens are left out,
    and the rank of the corrections. blocks: none, to train the model alone. ValueError for texts of which no token is
    left out, and for a model of another type.
    """
    check_texts(tokens, settings if blocks else None)
    hidden, device = hidden_size(model), next(model.parameters()).device
    if any(x.dtype != torch.float32 for x in model.parameters()):
        raise ValueError("steps of this size are lost in 16 bits; load the model in float32 to train it")
    if not blocks and training.model_rate == 0:
        raise ValueError("nothing would be trained; name blocks, or set model_rate")
    generator = torch.Generator().manual_seed(training.seed)
    made = {
        number: BlockCorrection(
            (A_SCALE * torch.randn(settings.rank, hidden, generator=generator)).to(device).requires_grad_(),
            torch.zeros(hidden, settings.rank, device=device, requires_grad=True),
        )
        for number in blocks
    }
    groups: list[dict[str, Any]] = [
        {"params": [x for each in made.values() for x in each], "lr": training.learning_rate}
    ]
    corrections = Corrections(made, settings.period, settings.reuse)
    if training.model_rate > 0:
        groups.append({"params": list(model.parameters()), "lr": training.model_rate})
    needed = {x: x.requires_grad for x in model.parameters()}
    try:
        model.requires_grad_(training.model_rate > 0)
        reader = TeacherForced(model, corrections, settings.prompt)
        losses = _descend(reader, groups, tokens.to(device), training, generator)
    finally:
        for x, was_needed in needed.items():
            x.requires_grad_(was_needed).grad = None
    trained = {number: BlockCorrection(each.a.detach(), each.b.detach()) for number, each in made.items()}
    return Corrections(trained, settings.period, settings.reuse), losses


def _descend(
    reader: TeacherForced,
    groups: list[dict[str, Any]],
    tokens: Tensor,
    training: TrainSettings,
    generator: torch.Generator,
) -> list[float]:
    """Train the parameters of the groups; return the loss of each step."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, training.steps))
    losses = []
    order = torch.empty(0, dtype=torch.long)
    for _ in range(training.steps):
        while len(order) < training.batch:
            order = torch.cat((order, torch.randperm(len(tokens), generator=generator)))
        ids, order = tokens[order[: training.batch]], order[training.batch :]
        loss = functional.cross_entropy(reader.read(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([x for group in groups for x in group["params"]], CLIP_NORM)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def rate(step: int, steps: int) -> float:
    """Return the share of the learning rate that a step has: a line up, then a cosine down."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
