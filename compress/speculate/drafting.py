"""Define drafts, a few tokens that the target then checks in one pass: the contract of plugins of kind "speculate".

A plugin is one file compress/speculate/drafts/<name>.py, or compress/papers/speculate/<name>.py, that defines

1.  `Config`, a frozen dataclass: its settings. It raises ValueError for impossible ones, the field's name first.
2.  `PART`: "draft" for what drafts by itself (n-grams), else which part of a reduced model it is: "level" (bits),
    "skip" (sublayers that do not run) or "cache" (what of the cache is read).
3.  `build(config, session)`: returns a `Draft` for "draft", else a `Reduction`. RecipeError where the model cannot.

The specification `ngram+level=4,skip=even,share=0.4` (specification.py) means: n-grams first; where they have nothing
to say, the target's own model with 4 bits and without a share of its sublayers. Such a model is a `ModelDraft`; it
writes into the cache of the TARGET and takes away what it has written.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from compress.speculate.session import Session

# A reduced model has up to one of each, and they are entered in this order.
PARTS = ("level", "skip", "cache")


class Proposal(NamedTuple):
    """Drafted tokens, and the laws that they were drawn from."""

    tokens: list[int]
    probabilities: list[Tensor] | None = None  # float32 [vocab] for each token; None: chosen without chance


class Verified(NamedTuple):
    """A round: what was drafted, and what the target said of it. A plain step is a round without a draft."""

    draft: Draft | None
    proposal: Proposal
    accepted: int  # of the drafted tokens
    logits: Tensor  # of the target, float32 [drafted + 1, vocab], before processors
    hidden: tuple[Tensor, ...] | None  # [drafted + 1, width]: embeddings and each block's; None: nobody wants them


class Draft:
    """What proposes tokens. One object serves one call of generate."""

    wants_hidden = False  # Verified.hidden is filled, which costs the program of the pass; may change at any time

    prior: float | None = None  # expected acceptance of a drafted token, if it is known beforehand

    def begin(self, session: Session) -> None:
        """Take note of the prompt: the session's tokens are the prompt and the first new token."""

    def situation(self, session: Session) -> Hashable:
        """Return what the acceptance of the next draft depends on; each has a length of its own. None: no draft."""
        return "any"

    def propose(self, session: Session, count: int) -> Proposal:
        """Return up to `count` tokens that may follow the session's tokens; fewer, or none, as it likes.

        The cache must be left with the tokens that it had.
        """
        raise NotImplementedError

    def observe(self, session: Session, verified: Verified) -> None:
        """Take note of a round, of this draft or of another; the session's tokens and cache are those after it."""

    def end(self, session: Session) -> None:
        """Leave the model as it was found, also where the call of generate has failed."""


class Reduction:
    """A part of a reduced model."""

    wants_hidden = False
    prior: float | None = None  # expected acceptance of a token of the model with this reduction alone

    def begin(self, session: Session) -> None:
        """Take note of the prompt."""

    def reduce(self, session: Session) -> AbstractContextManager[Any]:
        """Return a context in which the passes of the session's model are cheaper. Entered once each round."""
        return nullcontext()

    def observe(self, session: Session, verified: Verified) -> None:
        """Take note of a round."""


class ModelDraft(Draft):
    """The target's own model, reduced, one pass for each drafted token, on the cache of the target."""

    def __init__(self, reductions: list[Reduction]) -> None:
        self.reductions = reductions
        losses = [1 - each.prior for each in reductions if each.prior is not None]  # which roughly add up
        self.prior = max(0.0, 1 - sum(losses)) if losses else None

    @property
    def wants_hidden(self) -> bool:  # type: ignore[override]
        """Whether a reduction wants the blocks' hidden states."""
        return any(each.wants_hidden for each in self.reductions)

    def begin(self, session: Session) -> None:
        """Take note of the prompt."""
        for each in self.reductions:
            each.begin(session)

    def propose(self, session: Session, count: int) -> Proposal:
        """Return up to `count` tokens; fewer where the reduced model is not sure that the last one is right."""
        tokens, laws, written, sure = list[int](), list[Tensor](), 0, 1.0
        newest = session.tokens[-1]
        with self.reduce(session):
            try:
                while len(tokens) < count:
                    logits = session.forward([newest])[0]
                    written += 1
                    newest, law = session.choose(logits, tokens)
                    tokens.append(newest)
                    if law is not None:
                        laws.append(law)
                    if newest in session.stop_tokens:
                        break
                    if session.threshold and len(tokens) < count:
                        sure *= confidence(logits, law)
                        if sure < session.threshold:
                            break
            finally:
                session.crop(written)
        return Proposal(tokens, laws if session.is_sampling else None)

    @contextmanager
    def reduce(self, session: Session) -> Iterator[None]:
        """Reduce the session's model by all reductions."""
        with ExitStack() as stack:
            for each in self.reductions:
                stack.enter_context(each.reduce(session))
            yield

    def observe(self, session: Session, verified: Verified) -> None:
        """Take note of a round."""
        for each in self.reductions:
            each.observe(session, verified)


def confidence(logits: Tensor, law: Tensor | None) -> float:
    """Return the largest probability of a law [vocab]; of that of the logits where no law is known."""
    return float(law.max()) if law is not None else float((logits.max() - logits.logsumexp(-1)).exp())
