"""What engines are compared on with transformers: models, prompts, and the errors of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from helpers import runs

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # the engines' attention knows these
SMALL = (*runs.SMALL, "group_size=32")
PROMPTS = [[5, 9, 200, 31], list(range(60, 90)), [7]]
TOKENS = 12  # that are written
MIXED = (  # of the linears of fused layers: two formats, one of them rotated, other bits, one not packed
    *SMALL,
    "rules=[{match: '*.k_proj', method: e8p, bits: 2}, {match: '*.v_proj', keep: true}, {match: '*.up_proj', bits: 3}]",
)
Answers = list[dict[str, Any]]  # ids that were written, and the log probabilities of the likeliest ones at each


@torch.no_grad()
def errors_of(
    directory: Path,
    answers: Answers,
    change: Callable[[Any], None] = lambda model: None,
    inputs: Sequence[dict[str, torch.Tensor]] = (),
    is_greedy: bool = True,
) -> list[float]:
    """Errors of log probabilities, in float32; greedy tokens must be those of transformers.

    inputs: what the model is given beside the tokens of each prompt.
    """
    from compress.model.load import load_model

    model = load_model(directory, dtype=torch.float32).eval()
    change(model)
    errors = []
    for ids, answer, more in zip([a["prompt"] for a in answers], answers, inputs or [{}] * len(answers), strict=True):
        whole = torch.tensor([ids + answer["ids"]])
        known = model(whole, **more).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
        assert not is_greedy or known.argmax(-1).tolist() == answer["ids"]
        for row, told in zip(known, answer["logprobs"], strict=True):
            errors += [abs(float(row[int(token)]) - value) for token, value in told.items()]
    return errors


def check(directory: Path, answers: Answers, *changes_and_inputs: Any) -> None:
    """Greedy tokens equal to those of transformers, log probabilities within 1e-5, all in float32."""
    assert max(errors_of(directory, answers, *changes_and_inputs)) < 1e-5
