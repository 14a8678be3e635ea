"""Leave out the references to code that came with a checkpoint: it is never run, and its files are not copied.

`auto_map` names classes in .py files beside a model. Where those are missing, transformers fails on the reference
although it has the class itself. So the model and the tokenizer must be of classes that transformers has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.errors import CheckpointError
from compress.model import load
from compress.storage.checkpoint import read_json

KEYS = ("auto_map", "custom_pipelines")
TOKENIZER = "tokenizer_config.json"


def without(value: Any) -> Any:
    """Return a JSON value without these references, in inner objects too."""
    if isinstance(value, dict):
        return {key: without(inner) for key, inner in value.items() if key not in KEYS}
    return [without(inner) for inner in value] if isinstance(value, list) else value


def references(value: Any) -> Iterator[str]:
    """Yield the keys of references to code in a JSON value."""
    if isinstance(value, dict):
        yield from (key for key in KEYS if key in value)
        for inner in value.values():
            yield from references(inner)


def check_tokenizer(directory: Path) -> None:
    """Raise CheckpointError for a tokenizer that only code beside it can make."""
    path = directory / TOKENIZER
    if not path.is_file() or not any(references(read_json(path))):
        return
    try:
        load.load_tokenizer(directory)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} names code of its own (auto_map), which is not run, and transformers cannot make the tokenizer "
            f"without: {error}"
        ) from error
