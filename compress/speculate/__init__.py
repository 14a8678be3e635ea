"""Generate faster with drafts that a model makes for itself: one pass checks several tokens, the law stays the same.

    model.generate(**inputs, max_new_tokens=200, custom_generate=compress.speculate)
    model.generate(**inputs, custom_generate=compress.speculate, drafts="ngram+level=4")
    own = compress.speculate.with_settings("level=4,skip=even")
    model.generate(**inputs, custom_generate=own); print(own.statistics.text())

The package can be called, as transformers calls a `custom_generate`. drafting.py is the contract of drafts, session.py
what they see; specification.py reads the text above; generation.py is what transformers calls, loop.py the rounds;
acceptance.py judges drafted tokens, length.py says how many are drafted, by cost.py, timings.py and what was accepted.
docs/speculation.md says what pays when.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.speculate.generation import Speculation


def with_settings(drafts: str | None = None, **settings: Any) -> Speculation:
    """Return what generate takes for `custom_generate`, with drafts by a specification.

    settings: `generator` of torch for sampling, `streamer`. RecipeError for a text that means no draft.
    """
    from compress.speculate.generation import Speculation  # plugins are listed without torch

    return Speculation(drafts, **settings)


class _CallablePackage(ModuleType):
    """This package, as a function that generates with the default drafts."""

    def __call__(self, model: Any, input_ids: Any, drafts: str | None = None, **given: Any) -> Any:
        """Return what the model's own generate returns."""
        return with_settings(drafts)(model, input_ids, **given)


sys.modules[__name__].__class__ = _CallablePackage
