"""Generate with drafts inside of transformers' generate, which has prepared cache, processors and criteria.

What the loop cannot do, such as several sequences at once or a cache that cannot be cropped, is generated as always,
and a line says why.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from compress.errors import RecipeError, first_line, shown
from compress.progress import note
from compress.speculate import specification
from compress.speculate.default import CONFIG_KEY
from compress.speculate.length import LengthPolicy
from compress.speculate.loop import Loop, Planned, Records
from compress.speculate.passes import Passes
from compress.speculate.session import Session
from compress.speculate.statistics import Statistics
from compress.speculate.stopping import Stopping
from compress.speculate.timings import Timings

# The drafts of a checkpoint stand under this key of config.json, as text.
FREE_DRAFT, LEVEL_DRAFT = "ngram", "level"  # the first for any model
# Processors that run the model, or count their calls: they would see drafted tokens.
STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


@dataclass
class DraftMemory:
    """What earlier calls with a model have shown of one specification."""

    timings: Timings = field(default_factory=Timings)
    policies: list[dict[Any, LengthPolicy]] = field(default_factory=list)  # of each draft, by situation


_memories: WeakKeyDictionary[Any, dict[str, DraftMemory]] = WeakKeyDictionary()


class Speculation:
    """What `generate(custom_generate=...)` takes: drafts by a specification, statistics of the last call."""

    def __init__(
        self,
        drafts: str | None = None,
        generator: torch.Generator | None = None,
        streamer: Any = None,
    ) -> None:
        """drafts: a specification, None for what the checkpoint stores or has. RecipeError for what it cannot mean."""
        if drafts is not None:
            specification.parse(drafts)
        self.drafts, self.generator, self.streamer = drafts, generator, streamer
        self.statistics = Statistics()

    def __call__(self, model: Any, input_ids: Tensor, drafts: str | None = None, **given: Any) -> Any:
        """Return what the model's own generate returns: tokens [1, prompt + new], or an output with them.

        drafts: a specification for this call. given: what transformers has prepared, and arguments of the model.
        """
        streamer = given.pop("streamer", None) or self.streamer or _streamer_of_caller()
        synced_gpus = given.pop("synced_gpus", False)
        processors, criteria = given.pop("logits_processor"), given.pop("stopping_criteria")
        call = _GenerateCall(model, input_ids, processors, criteria, given.pop("generation_config"), streamer, given)
        self.statistics = Statistics()
        if reason := call.refusal():
            self.statistics.reason = reason
            note(f"speculate: {reason}; tokens are written one by one")
            return call.generate_plain(synced_gpus)
        return call.generate(drafts or self.drafts, self.statistics, self.generator)


@dataclass
class _GenerateCall:
    """The arguments of one call."""

    model: Any
    ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    kwargs: dict[str, Any]

    def refusal(self) -> str:
        """Return why tokens cannot be drafted, "" if they can."""
        cache, positions = self.kwargs.get("past_key_values"), self.kwargs.get("position_ids")
        is_shown = self.config.output_attentions or self.config.output_hidden_states
        reasons: dict[str, bool] = {
            f"{len(self.ids)} sequences at once, drafts are for one": len(self.ids) != 1,
            "a model with an encoder": bool(self.model.config.is_encoder_decoder),
            "beams are not drafted for": (self.config.num_beams or 1) != 1,
            "no cache (use_cache=False)": cache is None or not self.kwargs.get("use_cache"),
            f"a {type(cache).__name__} cannot take tokens back": not getattr(cache, "is_croppable", False),
            "attentions or hidden states are asked for": bool(self.config.return_dict_in_generate and is_shown),
            "positions of an unusual shape": positions is not None and positions.dim() != 2,
            "a processor that keeps a state": any(isinstance(each, STATEFUL) for each in self.processors),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def generate_plain(self, synced_gpus: bool) -> Any:
        """Return what transformers generates."""
        return self.model._sample(
            self.ids,
            self.processors,
            self.criteria,
            self.config,
            synced_gpus=synced_gpus,
            streamer=self.streamer,
            **self.kwargs,
        )

    def generate(self, text: str | None, statistics: Statistics, generator: torch.Generator | None) -> Any:
        """Return what the loop writes with the drafts that a text names, None: with those of the checkpoint."""
        model, config = self.model, self.config
        read = model._prefill(self.ids, config, self.kwargs)
        kwargs = model._update_model_kwargs_for_generation(read, dict(self.kwargs), is_encoder_decoder=False)
        cache, logits = read.past_key_values, read.logits[0, -1:].float()
        del read
        stopping = Stopping(self.criteria)
        passes = Passes(model, cache, {**kwargs, "past_key_values": cache})
        session = Session(passes, self.ids, self.processors, config.do_sample, generator)
        session.stop_tokens, session.statistics = stopping.end_tokens, statistics
        is_kept = config.return_dict_in_generate
        wanted = [() if is_kept and each else None for each in (config.output_scores, config.output_logits)]
        records = Records(*wanted)
        drafts = _own_plan(session) if text is None else plan(text, session)
        passes.begin()
        try:
            Loop(session, drafts, stopping, self.streamer, records).run(logits)
        finally:
            passes.end()
        if self.streamer is not None:
            self.streamer.end()
        outputs: Any = {"sequences": session.ids.clone(), "past_key_values": cache}
        if not is_kept:
            return outputs["sequences"]
        outputs |= {"scores": records.scores, "logits": records.logits}
        return GenerateDecoderOnlyOutput(**outputs)


def plan(text: str, session: Session) -> list[Planned]:
    """Return the drafts that a text names for a session, with what earlier calls have shown of them."""
    parsed = specification.parse(text)
    memory = _memories.setdefault(session.model, {}).setdefault(text, DraftMemory())
    if not memory.policies:
        memory.policies = [{} for _ in parsed]
    session.timings = memory.timings
    return [
        Planned(str(place), each.build(session), each.length, policies)
        for place, (each, policies) in enumerate(zip(parsed, memory.policies, strict=True))
    ]


def _own_plan(session: Session) -> list[Planned]:
    """Return the drafts of a checkpoint; n-grams, and a line, where it cannot have them as it was loaded."""
    text = default_drafts(session.model)
    try:
        return plan(text, session)
    except RecipeError as error:
        note(f"speculate: {shown(text)} of config.json cannot be drafted ({first_line(error)}); {FREE_DRAFT} is")
        return plan(FREE_DRAFT, session)


def default_drafts(model: Any) -> str:
    """Return the drafts that a checkpoint stores, or else n-grams, and the lowest level where it has levels."""
    stored = getattr(model.config, CONFIG_KEY, None)
    if isinstance(stored, str):
        return stored
    return f"{FREE_DRAFT}+{LEVEL_DRAFT}" if len(getattr(model, "levels", ())) > 1 else FREE_DRAFT


def _streamer_of_caller() -> Any:
    """Return the streamer that generate was given: transformers 5.23 does not hand it to a custom_generate.

    It puts the prompt into the streamer, so that a reader would wait for ever.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return frame.f_locals.get("streamer")
        frame = frame.f_back  # type: ignore[assignment]
    return None
