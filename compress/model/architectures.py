"""Say what a checkpoint is that is no language model, by the classes that its configuration names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

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
