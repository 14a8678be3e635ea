"""The loop of generate with drafts: draft, check by one pass of the target, keep what its law allows, crop the rest."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.speculate.acceptance import judge
from compress.speculate.cost import MAX_LENGTH
from compress.speculate.drafting import Draft, Proposal, Verified
from compress.speculate.length import LengthPolicy
from compress.speculate.session import Session
from compress.speculate.stopping import Stopping

NOTHING = Proposal([])


@dataclass
class Planned:
    """A draft with the lengths that it has in each situation."""

    name: str
    draft: Draft
    fixed: int | None = None
    policies: dict[Hashable, LengthPolicy] = field(default_factory=dict)

    def policy(self, situation: Hashable) -> LengthPolicy:
        """Return what is known of a situation."""
        if situation not in self.policies:
            self.policies[situation] = LengthPolicy(self.draft.prior, self.fixed)
        return self.policies[situation]


@dataclass
class Records:
    """What transformers returns beside tokens where it is asked to: [1, vocab] for each new token."""

    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None

    def add(self, scores: list[Tensor], logits: Tensor, count: int) -> None:
        """Take note of `count` tokens of a pass: scores after processors, and logits."""
        if self.scores is not None:
            self.scores += tuple(each.unsqueeze(0).clone() for each in scores[:count])
        if self.logits is not None:
            self.logits += tuple(each.unsqueeze(0).clone() for each in logits[:count])


class Loop:
    """One call of generate, behind its prompt."""

    def __init__(
        self, session: Session, drafts: list[Planned], stopping: Stopping, streamer: Any = None, records: Any = None
    ) -> None:
        self.session, self.drafts, self.stopping, self.streamer = session, drafts, stopping, streamer
        self.records: Records = records or Records()
        self.is_finished = False

    def run(self, logits: Tensor) -> None:
        """Write until a criterion holds. logits: [1, vocab], of the prompt's last token."""
        session, statistics = self.session, self.session.statistics
        begun = time.perf_counter()
        _, token, scores = judge(session, NOTHING, logits)
        self._accept([token], scores, logits)
        try:
            for each in self.drafts:
                each.draft.begin(session)
            while not self.is_finished:
                self._round()
        finally:
            for each in self.drafts:
                each.draft.end(session)
        statistics.seconds += time.perf_counter() - begun
        statistics.plain_seconds = session.timings.check(1)

    def _round(self) -> None:
        session, statistics, timings = self.session, self.session.statistics, self.session.timings
        begun = time.perf_counter()
        planned, proposal, policy = self._propose()
        drafted = len(proposal.tokens)
        midway = time.perf_counter()
        tokens, hidden = [session.tokens[-1], *proposal.tokens], None
        if any(each.draft.wants_hidden for each in self.drafts):
            logits, hidden = session.forward_hidden(tokens)
        else:
            logits = session.forward(tokens)
        accepted, token, scores = judge(session, proposal, logits)
        written = self._accept([*proposal.tokens[:accepted], token], scores, logits)
        session.passes.end_round(drafted + 1 - written)
        ended = time.perf_counter()
        counts = timings.add_check(drafted + 1, ended - midway)
        statistics.add_round(drafted, accepted)
        statistics.check_seconds += ended - midway
        if planned is not None and policy is not None and drafted:
            counts = timings.add_draft(planned.name, drafted, midway - begun) and counts
            statistics.draft_seconds += midway - begun
            policy.observe(drafted, accepted)
        if counts:
            statistics.timed_tokens += written
            statistics.timed_seconds += ended - begun
        verified = Verified(planned.draft if planned and drafted else None, proposal, accepted, logits, hidden)
        for each in self.drafts:
            each.draft.observe(session, verified)

    def _propose(self) -> tuple[Planned | None, Proposal, LengthPolicy | None]:
        """Return the first draft that pays, what it says, and its policy; no draft for a plain step."""
        session, timings = self.session, self.session.timings
        most = min(MAX_LENGTH, self.stopping.room(session) - 1)
        if most < 1:
            return None, NOTHING, None
        for planned in self.drafts:
            situation = planned.draft.situation(session)
            if situation is None:
                continue
            policy = planned.policy(situation)
            count = policy.choose(timings.check(1), partial(timings.draft, planned.name), timings.check, most)
            if count:
                session.threshold = policy.threshold
                proposal = planned.draft.propose(session, count)
                if proposal.tokens:
                    return planned, proposal, policy
        return None, NOTHING, None

    def _accept(self, tokens: list[int], scores: list[Tensor], logits: Tensor) -> int:
        """Add tokens until a criterion holds; return how many were added."""
        session, count = self.session, 0
        for count, token in enumerate(tokens, 1):
            session.append([token])
            self.records.add(scores[count - 1 : count], logits[count - 1 : count], 1)
            if self.stopping.holds(session, self.records.scores):
                self.is_finished = True
                break
        session.statistics.tokens += count
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens[:count]))
        return count
