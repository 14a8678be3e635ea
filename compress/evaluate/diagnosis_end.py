"""Compare what lies behind the blocks of a compressed model, the last norm and the output head, with the original.

Both models run once; behind the last block the compressed one goes on with the original's hidden states, in its own
basis. So its logits differ by what the last norm and the head do alone. Logits are compared without their mean over the
vocabulary, which no probability depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LIKE = 0.5  # correlation above which a logit is that of the original
SURE, MORE = 0.75, 0.1  # correlation with the logit of another token, and by how much it is higher, of a row that moved
MOST = 8192  # rows that are looked for elsewhere, at most


@dataclass(frozen=True)
class End:
    """How logits differ from the original's, on the same hidden states behind the last block."""

    ratio: float  # norm of a token's logits, to the original's; median over tokens
    norm_ratio: float | None  # the same of what the head takes; None in another basis
    unlike: float  # 1 - mean correlation of logits over tokens, weighted by their energy
    moved: tuple[tuple[int, int], ...] = ()  # rows of the original's head, and where they stand


@torch.no_grad()
def compare(pair: tuple[Any, Any], blocks: tuple[nn.Module, nn.Module], tokens: Tensor, rotation: Tensor | None) -> End:
    """Compare the ends of (original, model); blocks: their last ones; tokens int64 [samples, seq_len].

    rotation [width, width]: what turns hidden states of the original into those of the model; None: nothing.
    """
    found, behind = [], list[Tensor]()

    def keep(_: nn.Module, args: Any, out: Any) -> None:
        behind.append(out[0] if isinstance(out, tuple) else out)

    def lend(_: nn.Module, args: Any, out: Any) -> Any:
        plain = out[0] if isinstance(out, tuple) else out
        hidden = behind[0].float() if rotation is None else behind[0].float() @ rotation
        hidden = hidden.to(plain)
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    for model, block, hook in zip(pair, blocks, (keep, lend), strict=True):
        taken = list[Tensor]()
        handles = [block.register_forward_hook(hook)]
        if (head := model.get_output_embeddings()) is not None:
            handles.append(head.register_forward_pre_hook(lambda _, args, to=taken: to.append(args[0])))
        try:
            logits = model(input_ids=tokens.to(model.device), use_cache=False).logits.float().flatten(0, -2).cpu()
        finally:
            for handle in handles:
                handle.remove()
        found.append((logits, taken[0].float().flatten(0, -2).cpu() if taken else None))
    (logits, x), (others, x_other) = found
    count = min(logits.shape[1], others.shape[1])
    logits, others = (each[:, :count] - each[:, :count].mean(1, keepdim=True) for each in (logits, others))
    return End(
        _ratio(logits, others),
        None if rotation is not None or x is None or x_other is None else _ratio(x, x_other),
        1 - float((_energy(logits) * _alike(logits, others)).sum()),
        _moved(logits, others),
    )


def _ratio(own: Tensor, other: Tensor) -> float:
    return float((other.norm(dim=1).clamp_min(1e-20) / own.norm(dim=1).clamp_min(1e-20)).median())


def _energy(logits: Tensor) -> Tensor:
    return logits.square().sum(0) / logits.square().sum().clamp_min(1e-30)


def _alike(own: Tensor, other: Tensor) -> Tensor:
    """Return the correlation (about 0) of each column with that of the other; [tokens, columns] each."""
    return (nn.functional.normalize(own, dim=0) * nn.functional.normalize(other, dim=0)).sum(0)


def _moved(logits: Tensor, others: Tensor) -> tuple[tuple[int, int], ...]:
    """Return (row, place) of rows of the head that stand at other places; none where most cannot be found."""
    lost = (_alike(logits, others) < LIKE).nonzero()[:, 0]
    if not 2 <= len(lost) <= MOST:
        return ()
    own, other = (nn.functional.normalize(each[:, lost], dim=0) for each in (logits, others))
    alike = own.T @ other
    found, places = alike.max(1)
    rows = ((found > SURE) & (found > alike.diagonal() + MORE)).nonzero()[:, 0]
    if len(rows) < max(2, len(lost) / 2):
        return ()
    return tuple(zip(lost[rows].tolist(), lost[places[rows]].tolist(), strict=True))
