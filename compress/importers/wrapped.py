"""Take off what a trainer's wrapper has put in front of the names of tensors: `module.model.layers.0...`.

Whether the names that are left fit the model shows where they are matched with it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from compress.errors import CheckpointError, shown
from compress.storage.checkpoint import Checkpoint, Readable

FRONT = re.compile(r"(?:(?:module|_orig_mod|_fsdp_wrapped_module|_forward_module|base_model\.model)\.)+")
WITHIN = re.compile(r"(?<=\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # of parts of a model
ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer|modules_to_save)\.")


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names that its tensors have in the model itself.

    Raises CheckpointError for one that holds an adapter which is not merged.
    """
    if adapted := sorted(filter(ADAPTER.search, checkpoint.tensors)):
        raise CheckpointError(
            f"{checkpoint.directory} holds {len(adapted)} tensors of an adapter that is not merged, first "
            f"{shown(adapted[0])}; merge it with PEFT (merge_and_unload) and save the result, or give the base model, "
            "and the adapter as --adapter"
        )
    names = plain_names(checkpoint.tensors)
    if all(name == plain for name, plain in names.items()):
        return checkpoint
    tensors: Mapping[str, Readable] = {
        plain: checkpoint.tensors[name].renamed(plain) for name, plain in sorted(names.items())
    }
    front = _front(names)
    words = f"names without {front.rstrip('.')} in front" if front else "names without those of wrappers"
    return dataclasses.replace(checkpoint, tensors=tensors, base=words)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return name -> the name without wrappers; all names stay as they are where two would be the same."""
    names = list(names)
    front = _front(names)
    plain = {name: WITHIN.sub("", name[len(front) :]) for name in names}
    return plain if len(set(plain.values())) == len(plain) else dict(zip(names, names, strict=True))


def _front(names: Iterable[str]) -> str:
    """Return the wrappers that stand in front of all names, "" if there are none."""
    found = {match[0] if (match := FRONT.match(name)) else "" for name in names}
    return found.pop() if len(found) == 1 else ""
