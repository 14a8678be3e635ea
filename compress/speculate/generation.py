"""Generate with drafts inside of transformers' generate, which has prepared cache, processors and criteria.

What the loop cannot do, such as several sequences at once or a cache that cannot be cropped, is generated as always, and
a line says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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

from compress.errors import RecipeError
from compress.progress import note
from compress.speculate import specification
from compress.speculate.length import LengthPolicy
from compress.speculate.loop import Loop, Planned, Records
from compress.speculate.passes import Passes
from compress.speculate.session import Session
from compress.speculate.statistics import Statistics
from compress.speculate.stopping import Stopping
from compress.speculate.timings import Timings

CONFIG_KEY = "speculate"  # of config.json: the drafts of a checkpoint, as text
FREE_DRAFT = "ngram"  # any model can have it
# Processors that run the model, or count their calls: they would see drafted tokens.
STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


@dataclass
class Memory:
    """What earlier calls with a model have shown of one specification."""

    timings: Timings = field(default_factory=Timings)
    policies: list[dict[Any, LengthPolicy]] = field(default_factory=list)  # of each draft, by situation


_memories: WeakKeyDictionary[Any, dict[str, Memory]] = WeakKeyDictionary()


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

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        drafts: str | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Return what the model's own generate returns: tokens [1, prompt + new], or an output with them.

        drafts: a specification for this call. A streamer is given to the caller of generate, which keeps it.
        """
        streamer = streamer or self.streamer or _streamer_of_caller()
        self.statistics = Statistics()
        text = drafts or self.drafts or default_drafts(model)
        reason = _refusal(model, input_ids, logits_processor, generation_config, model_kwargs)
        call = _Call(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
        if reason:
            self.statistics.reason = reason
            note(f"speculate: {reason}; tokens are written one by one")
            return call.generate_plain(synced_gpus)
        return call.generate(text, self.statistics, self.generator)


@dataclass
class _Call:
    """The arguments of one call."""

    model: Any
    ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    kwargs: dict[str, Any]

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

    def generate(self, text: str, statistics: Statistics, generator: torch.Generator | None) -> Any:
        """Return what the loop writes with the drafts that a text names."""
        model, config = self.model, self.config
        outputs = model._prefill(self.ids, config, self.kwargs)
        kwargs = model._update_model_kwargs_for_generation(outputs, dict(self.kwargs), is_encoder_decoder=False)
        cache, logits = outputs.past_key_values, outputs.logits[0, -1:].float()
        del outputs
        stopping = Stopping(self.criteria)
        passes = Passes(model, cache, {**kwargs, "past_key_values": cache})
        session = Session(passes, self.ids, self.processors, config.do_sample, generator, stopping.end_tokens)
        session.statistics = statistics
        is_kept = config.return_dict_in_generate
        records = Records(() if is_kept and config.output_scores else None, () if is_kept and config.output_logits else None)
        drafts = plan(text, session)
        passes.begin()
        try:
            Loop(session, drafts, stopping, self.streamer, records).run(logits)
        finally:
            passes.end()
        if self.streamer is not None:
            self.streamer.end()
        sequences = session.ids.clone()
        if not is_kept:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=records.scores, logits=records.logits, past_key_values=cache
        )


def plan(text: str, session: Session) -> list[Planned]:
    """Return the drafts that a text names for a session, with what earlier calls have shown of them."""
    parsed = specification.parse(text)
    memory = _memories.setdefault(session.model, {}).setdefault(text, Memory())
    if not memory.policies:
        memory.policies = [{} for _ in parsed]
    session.timings = memory.timings
    return [
        Planned(str(place), each.build(session), each.length, policies)
        for place, (each, policies) in enumerate(zip(parsed, memory.policies, strict=True))
    ]


def default_drafts(model: Any) -> str:
    """Return the drafts that a checkpoint stores, or else n-grams, and the lowest level where it has several."""
    stored = getattr(model.config, CONFIG_KEY, None)
    if isinstance(stored, str):
        return stored
    return FREE_DRAFT


def _refusal(model: Any, ids: Tensor, processors: Any, config: Any, kwargs: Mapping[str, Any]) -> str:
    """Return why tokens cannot be drafted, "" if they can."""
    cache = kwargs.get("past_key_values")
    positions = kwargs.get("position_ids")
    reasons: dict[str, Callable[[], bool]] = {
        f"{len(ids)} sequences at once, drafts are for one": lambda: len(ids) != 1,
        "a model with an encoder": lambda: bool(model.config.is_encoder_decoder),
        "beams are not drafted for": lambda: config.num_beams != 1,
        "no cache (use_cache=False)": lambda: cache is None or not kwargs.get("use_cache"),
        f"a {type(cache).__name__} cannot take tokens back": lambda: not getattr(cache, "is_croppable", False),
        "attentions or hidden states are asked for": lambda: bool(
            config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states)
        ),
        "positions of an unusual shape": lambda: positions is not None and positions.dim() != 2,
        "a processor that keeps a state": lambda: any(isinstance(each, STATEFUL) for each in processors),
    }
    return next((reason for reason, holds in reasons.items() if holds()), "")


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
