"""Tell by a configuration what a model is, how many tokens it reads, and which class of transformers opens it.

Language models are opened for text alone, or for text beside images and sound. What has another purpose (embeddings,
classes, scores of pairs) is opened by the class that `architectures` names; one that transformers does not have is
refused, because its head would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from compress.errors import UnsupportedModelError, shown
from compress.model import inputs
from compress.storage.checkpoint import CONFIG
from compress.storage.manifest import MODULES

OTHERS = {  # what the name of a class says of its head -> what such a model is
    r"Reward": "a reward model",
    r"For\w*Classification|Classifier": "a classifier, as reward models and rerankers are",
    r"ForQuestionAnswering|ForMultipleChoice": "a model that chooses answers",
    r"ForEmbedding|EmbeddingModel|ForRetrieval|ForTextEncoding": "an embedding model",
}
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k")
HEADS = re.compile(r"(^|\.)(score|v_head|value_head|reward_head|classifier|classification_head|qa_outputs)\.")
Task = Literal["language", "translation", "speech", "masked", "classes", "tags", "answers", "embedding"]
FAMILIES: dict[Any, Task] = {  # automatic class of transformers -> what its models are for
    AutoModelForCausalLM: "language",
    AutoModelForImageTextToText: "language",
    AutoModelForMultimodalLM: "language",
    AutoModelForSeq2SeqLM: "translation",  # of any text into another
    AutoModelForSpeechSeq2Seq: "speech",
    AutoModelForMaskedLM: "masked",
    AutoModelForSequenceClassification: "classes",  # of one class: a score, as rerankers and reward models give
    AutoModelForTokenClassification: "tags",
    AutoModelForQuestionAnswering: "answers",
    AutoModelForTextEncoding: "embedding",
    AutoModel: "embedding",  # a class without a head: what it gives are hidden states
    AutoModelForPreTraining: "embedding",  # heads of an encoder's training, which nobody uses
}
PURPOSES: dict[Task, str] = {
    "language": "text",
    "translation": "making one text from another",
    "speech": "writing down speech",
    "masked": "filling in masked words",
    "classes": "classes or scores of texts",
    "tags": "classes of words",
    "answers": "finding answers in a text",
    "embedding": "embeddings",
}
LANGUAGE: tuple[Task, ...] = ("language",)
ENCODERS: frozenset[Task] = frozenset({"masked", "classes", "tags", "answers", "embedding"})  # they write no text
UNNAMED = tuple(FAMILIES)[:3]  # those that open a model whose class is not named
UNNAMED_PAIRS = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)  # the same of two stacks
NAMES = (  # what configurations call it
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "max_sequence_length"),
    *("context_length", "n_ctx"),
)


def check(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError for an unknown class whose head is of another purpose: it would be lost."""
    file = Path(config.name_or_path or ".") / CONFIG
    for name in map(str, config.architectures or ()):
        for pattern, words in OTHERS.items():
            if re.search(pattern, name):
                raise UnsupportedModelError(
                    f"{file} says that this is a {shown(name)}: {words}; transformers has no such class that reads "
                    "text, and its head would be lost; give the model that it was made of"
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
    return (
        f"has no tensor for {name}, its output head; if that is its table of embeddings set tie_word_embeddings to "
        f"true in {CONFIG}, if it is an embedding model name its class without a head under architectures there "
        f"({_bare_name(config)}), else download it again"
    )


def _bare_name(config: PretrainedConfig) -> str:
    return next((kind.__name__ for kind in _classes(AutoModel, config)), AutoModel.__name__)


def opener(config: PretrainedConfig) -> Any:
    """Return the automatic class of transformers that opens a model as its configuration says.

    It is the first that knows the class named by `architectures` of the configuration; for a class without a head that
    stands for a language model it is that of the language model. Where none does, it is the first
    for language models that knows this type of configuration, the text part alone before the whole model, and of an
    encoder-decoder its decoder alone if that has a class. AutoModelForCausalLM for an unknown configuration: its error
    says so. Raises UnsupportedModelError for a class of another purpose that transformers does not have.
    """
    if (named := _named_family(config)) is not None:
        return (named is AutoModel and _with_table(config)) or named
    check(config)
    unnamed = UNNAMED_PAIRS if config.is_encoder_decoder else UNNAMED
    return next((family for family in unnamed if _classes(family, config)), AutoModelForCausalLM)


def _named_family(config: PretrainedConfig) -> Any:
    named = {getattr(transformers, str(name), None) for name in config.architectures or ()}
    return next((family for family in FAMILIES if named & _classes(family, config)), None)


def _with_table(config: PretrainedConfig) -> Any:
    """Return the automatic class of the language model that a class without a head stands for, None for none.

    Some language models whose output head is their table of embeddings are published so. States are what is used of a
    model that reads in both directions, and of one with a list of layers that make embeddings.
    """
    is_listed = config.name_or_path is not None and (Path(config.name_or_path) / MODULES).is_file()
    if is_listed or not config.tie_word_embeddings or getattr(config, "use_bidirectional_attention", None) is True:
        return None
    if config.is_encoder_decoder:
        families = UNNAMED_PAIRS[1:]
    else:
        families = () if _classes(AutoModelForMaskedLM, config) else UNNAMED
    return next((family for family in families if _classes(family, config)), None)


def remarks(config: PretrainedConfig) -> Iterator[str]:
    """Yield in a line each what a model is taken for that its configuration does not name."""
    if _named_family(config) is AutoModel and _with_table(config) is not None:
        kind = next(iter(config.architectures or ()))
        yield (
            f"{CONFIG} names {shown(kind)}, a class without an output head, and its table of embeddings as one "
            f"(tie_word_embeddings): read as a model for {PURPOSES[task(config)]}; one for embeddings has a {MODULES}"
        )


def task(config: PretrainedConfig) -> Task:
    """Return what a model is for; UnsupportedModelError as `opener`."""
    return FAMILIES[opener(config)]


def scores_pairs(config: PretrainedConfig) -> bool:
    """Return whether a model gives one score for a text or a pair of them, as rerankers do."""
    return task(config) == "classes" and config.num_labels == 1


def gives_states(config: PretrainedConfig) -> bool:
    """Return whether the states of the body are what a model is used for, not a prediction for each token."""
    return task(config) in ENCODERS - {"masked"}


def check_task(config: PretrainedConfig, tasks: Collection[Task]) -> None:
    """Raise UnsupportedModelError for a model that is for none of these tasks."""
    if (purpose := task(config)) not in tasks:
        file = Path(config.name_or_path or ".") / CONFIG
        kind = next(iter(config.architectures or ()), type(config).__name__)
        raise UnsupportedModelError(
            f"{file} says that this is a {shown(kind)}, a model for {PURPOSES[purpose]}; this needs a language model "
            "(`compress eval` on a text compares any two models by what they give)"
        )


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


def sound_states(model: PreTrainedModel) -> int | None:
    """Return the states that an encoder of sound makes, however long the sound is; None for any other model."""
    is_heard = inputs.has_two_stacks(model) and inputs.reads_sound(model.config)
    return inputs.frames(model.config) // 2 if is_heard else None


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


def experts_of_a_token(config: object) -> int | None:
    """Return how many experts a token gets by the configuration of a text model, None where it does not say so."""
    return next((n for key in EXPERTS_OF_A_TOKEN if isinstance(n := getattr(config, key, None), int)), None)
