"""Choose the class of transformers that a model is opened with: for text alone, or for text beside images and sound."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, PretrainedConfig

from compress.model import architectures

FAMILIES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)


def opener(config: PretrainedConfig) -> Any:
    """Return the automatic class of transformers that opens a model as its configuration says.

    It is the one that knows the class named by `architectures` of the configuration; where none does, the first that
    knows this type of configuration, the text part alone before the whole model. AutoModelForCausalLM for an unknown
    configuration: its error says so. Encoder-decoders are not opened as a whole. Raises UnsupportedModelError for a
    model of another purpose.
    """
    architectures.check(config)
    families = FAMILIES[:1] if config.is_encoder_decoder else FAMILIES
    named = {getattr(transformers, str(name), None) for name in config.architectures or ()}
    classes = {family: _classes(family, config) for family in families}
    for family, known in classes.items():
        if named & known:
            return family
    return next((family for family, known in classes.items() if known), AutoModelForCausalLM)


def _classes(family: Any, config: PretrainedConfig) -> set[Any]:
    """Return the classes that an automatic class has for this type of configuration."""
    if type(config) not in family._model_mapping:
        return set()
    found = family._model_mapping[type(config)]
    return set(found) if isinstance(found, tuple) else {found}
