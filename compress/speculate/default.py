"""The default draft of a checkpoint: a specification in its config.json."""

from __future__ import annotations

import json
from pathlib import Path

from compress.errors import CheckpointError
from compress.storage import manifest
from compress.storage.checkpoint import read_json
from compress.storage.paths import CONFIG

CONFIG_KEY = "speculate"  # a specification of drafts, in config.json


def can_store(directory: Path) -> bool:
    """Return whether compress wrote a checkpoint, whose configuration it may change."""
    return (directory / manifest.MANIFEST).is_file()


def store(directory: Path, specification: str) -> None:
    """Write a checkpoint's default draft into its config.json, "": none; CheckpointError where compress wrote none.

    Nothing else changes; the manifest has the new hash.
    """
    if not can_store(directory):
        raise CheckpointError(f"{directory} is no checkpoint that compress wrote; give the draft to --speculate")
    values = read_json(directory / CONFIG)
    if specification:
        values[CONFIG_KEY] = f"ngram+{specification}"
    elif CONFIG_KEY not in values:
        return
    else:
        del values[CONFIG_KEY]
    manifest.replace(directory, CONFIG, json.dumps(values, indent=2) + "\n")
