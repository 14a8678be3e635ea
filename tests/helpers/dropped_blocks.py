"""Run a model as if some of its blocks were not there."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor, without: set[int] = frozenset()) -> Tensor:  # type: ignore[assignment]
    """Logits of the model, in which these blocks do nothing."""
    layers = model.base_model.layers
    hooks = [
        layers[i].register_forward_hook(lambda _, args, y: (args[0], *y[1:]) if isinstance(y, tuple) else args[0])
        for i in without
    ]
    result: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return result
