"""Tell by a configuration what a model is, how many tokens it reads, and which class of transformers opens it.

That class is for text alone, or for text beside images and sound. A checkpoint of no language model is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PretrainedConfig,
    PreTrainedModel,
)

from compress.errors import UnsupportedModelError, shown
from compress.storage.checkpoint import CONFIG

OTHERS = {  # what the name of a class says of its head -> what such a model is
    r"Reward": "a reward model",
    r"For\w*Classification|Classifier": "a classifier, as reward models and rerankers are",
    r"ForQuestionAnswering|ForMultipleChoice": "a model that chooses answers",
    r"ForEmbedding|EmbeddingModel|ForRetrieval|ForTextEncoding": "an embedding model",
}
HEADS = re.compile(r"(^|\.)(score|v_head|value_head|reward_head|classifier|classification_head|qa_outputs)\.")
BARE = re.compile(r"(?<!LMHead)Model$")  # a class without a head: what it gives are hidden states
NAMES = (  # what configurations call it
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "max_sequence_length"),
    *("context_length", "n_ctx"),
)


def check(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError for a class whose head is of another purpose: it would be lost."""
    file = Path(config.name_or_path or ".") / CONFIG
    for name in map(str, config.architectures or ()):
        for pattern, words in OTHERS.items():
            if re.search(pattern, name):
                raise UnsupportedModelError(
                    f"{file} says that this is a {shown(name)}: {words}; only language models are "
                    "read, and its head would be lost; give the language model that it was made of"
                )


def heads(names: Iterable[str]) -> str | None:
    """Return the first of these names of tensors that is of a head of another purpose, None without one."""
    return next((name for name in sorted(names) if HEADS.search(name)), None)


def is_head(model: PreTrainedModel, name: str) -> bool:
    """Return whether this is the name of a parameter of the output head."""
    head = model.get_output_embeddings()
    return head is not None and any(model.get_parameter(name) is parameter for parameter in head.parameters())


def without_head(config: PretrainedConfig, name: str) -> str:
    """Return why a checkpoint may have no output head of this name, and what to do; it goes on after a directory."""
    bare = next((each for each in map(str, config.architectures or ()) if BARE.search(each)), None)
    if bare is not None:
        return (
            f"has no {name}: its {CONFIG} says that it is a {shown(bare)}, a model without an output head, as "
            "embedding models are; such a model is read where its head is its table of embeddings "
            "(tie_word_embeddings); give the language model that it was made of"
        )
    return (
        f"has no tensor for {name}, its output head; if that is its table of embeddings set tie_word_embeddings to "
        f"true in {CONFIG}, else download it again"
    )


FAMILIES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
TWO_STACKS: tuple[Any, ...] = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)  # of an encoder and a decoder


def opener(config: PretrainedConfig) -> Any:
    """Return the automatic class of transformers that opens a model as its configuration says.

    It is the one that knows the class named by `architectures` of the configuration; where none does, the first that
    knows this type of configuration, the text part alone before the whole model. AutoModelForCausalLM for an unknown
    configuration: its error says so. An encoder-decoder is opened as a whole. Raises UnsupportedModelError for a
    model of another purpose.
    """
    check(config)
    families = (*TWO_STACKS, FAMILIES[0]) if config.is_encoder_decoder else FAMILIES
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
    known = family._model_mapping[type(config)]
    return set(known) if isinstance(known, tuple) else {known}


def max_positions(config: transformers.PretrainedConfig) -> int | None:
    """Return the longest sequence that a model is made for, if its configuration (of the text model) says so."""
    values = [getattr(config, name, None) for name in NAMES]
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def beyond(config: transformers.PretrainedConfig, context: int) -> str | None:
    """Return a line for a context that is longer than what a model is made for, None for any other."""
    longest = max_positions(config.get_text_config())
    if longest is None or context <= longest:
        return None
    return f"a context of {context:,} tokens is longer than the {longest:,} positions that the model is made for"


def most_tokens(model: transformers.PreTrainedModel) -> int | None:
    """Return the tokens that a model reads at most, if that is known; the model may be on the meta device.

    Positions that begin behind that of the padding leave fewer than the configuration says.
    """
    longest = max_positions(model.config.get_text_config())
    tokens = model.get_input_embeddings()
    for module in model.modules() if longest is not None else ():
        if isinstance(module, nn.Embedding) and module is not tokens and module.num_embeddings == longest:
            return longest if module.padding_idx is None else longest - module.padding_idx - 1
    return longest
