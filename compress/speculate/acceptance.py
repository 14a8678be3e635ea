"""Which drafted tokens stay, so that the text has exactly the target's law (arXiv 2211.17192, 2302.01318).

With p the target's law and q the draft's, both after all processors, a drafted token x stays with probability
min(1, p(x) / q(x)). At the first that does not, the next token is drawn from the rest (p - q)^+; if all stay, from p. A
token that was chosen without chance has q(x) = 1. Without sampling a drafted token stays while it is the likeliest.

Where p and q are equal in numbers, a token may be rejected by rounding alone, and there is no rest to draw from: then
the token is drawn from p.

The target's rows go through the processors one after the other, each with the tokens before it, and none behind the
first rejection: as often, and with the same tokens, as in plain generation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.speculate.drafting import Proposal
from compress.speculate.session import Session

# A rest of probability below this is rounding.
LEAST_REST = 1e-12


def judge(session: Session, proposal: Proposal, logits: Tensor) -> tuple[int, int, list[Tensor]]:
    """Return how many drafted tokens stay, the token behind them, and the scores [vocab] of all these tokens.

    logits: of the target, float32 [drafted + 1, vocab], behind the newest token and each drafted one.
    """
    if session.is_sampling:
        return _judge_laws(session, proposal, logits)
    if not session.processors:
        return _judge_plain(proposal, logits)
    drafted, scores = proposal.tokens, list[Tensor]()
    for count in range(len(drafted) + 1):
        scores.append(session.scores(logits[count], drafted[:count]))
        best = int(scores[-1].argmax())
        if count == len(drafted) or drafted[count] != best:
            break
    return count, best, scores


def _judge_plain(proposal: Proposal, logits: Tensor) -> tuple[int, int, list[Tensor]]:
    """Judge by the likeliest tokens of logits as they are."""
    best, drafted = logits.argmax(-1).tolist(), proposal.tokens
    count = next((i for i, token in enumerate(drafted) if token != best[i]), len(drafted))
    return count, best[count], list(logits[: count + 1].unbind())


def _judge_laws(session: Session, proposal: Proposal, logits: Tensor) -> tuple[int, int, list[Tensor]]:
    drafted, scores = proposal.tokens, list[Tensor]()
    for count, token in enumerate(drafted):
        scores.append(session.scores(logits[count], drafted[:count]))
        p = scores[-1].softmax(-1)
        q = None if proposal.probabilities is None else proposal.probabilities[count]
        share = float(p[token]) / (1.0 if q is None else float(q[token]))
        if not session.uniform() < share:  # not a number: rejected, and `draw` says so
            return count, session.draw(_rest(p, q, token)), scores
    scores.append(session.scores(logits[-1], drafted))
    return len(drafted), session.draw(scores[-1].softmax(-1)), scores


def _rest(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """Return what the target's law has beyond the draft's, [vocab], not normed."""
    if q is None:
        rest = p.clone()
        rest[token] = 0.0
    else:
        rest = torch.clamp_min(p - q, 0.0)
    return rest if float(rest.sum()) > LEAST_REST else p
