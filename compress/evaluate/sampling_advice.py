"""Write the recommended temperature into a checkpoint's generation_config.json.

The temperature of the original is the one in its own generation_config.json, or 1. The file is changed only where the
recommendation leaves no doubt (its interval leaves out the original's temperature) and takes LEAST_GAIN of the
divergence or more, and only where the checkpoint samples: a temperature beside do_sample false is an error to
transformers. The manifest of a packed checkpoint holds the hash and the size of the file; both are brought up to date.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.errors import CheckpointError, shown
from compress.evaluate.sampling_temperature import Recommendation
from compress.storage.checkpoint import MANIFEST, read_json, sha256, write_text

FILE = "generation_config.json"
KEY = "temperature"
DIGITS = 3  # of the temperature that is written
LEAST_GAIN = 0.01  # share of the divergence


def own_temperature(directory: Path) -> float:
    """Return the temperature that a checkpoint is made to sample at; CheckpointError for one that is none."""
    found = _read(directory).get(KEY)
    value = 1.0 if found is None else found
    if type(value) not in (int, float) or not value > 0:
        raise CheckpointError(f"{directory / FILE}: {KEY} {shown(value)} is not positive; correct it")
    return float(value)


def check_writable(directory: Path) -> None:
    """Raise CheckpointError for a checkpoint whose settings have no use for a temperature."""
    if _read(directory).get("do_sample") is not True:
        raise CheckpointError(
            f"{directory / FILE} does not sample (do_sample is not true), so a temperature in it has no effect; set "
            "do_sample there, or leave out --write and give generate() the temperature"
        )


def write(directory: Path, recommended: Sequence[Recommendation], base: float) -> str:
    """Write the best temperature for that of the base, and say what was done."""
    (found,) = [each for each in recommended if each.temperature == base]
    if not found.change or found.at_limit:
        return f"{directory / FILE} stays as it is: nothing to recommend at the original's temperature {base:g}"
    if found.kl_best > (1 - LEAST_GAIN) * found.kl:
        return (
            f"{directory / FILE} stays as it is: at {found.best:.{DIGITS}g} in place of the original's temperature "
            f"{base:g} the divergence is less than {LEAST_GAIN:.0%} smaller"
        )
    values = _read(directory)
    values[KEY] = round(found.best, DIGITS)
    write_text(directory / FILE, json.dumps(values, indent=2, sort_keys=True) + "\n")
    _relist(directory)
    return f"{directory / FILE}: temperature {values[KEY]:g} where the original has {base:g}"


def _read(directory: Path) -> dict[str, Any]:
    return read_json(directory / FILE) if (directory / FILE).is_file() else {}


def _relist(directory: Path) -> None:
    """Bring the manifest's entry of the file up to date."""
    path = directory / MANIFEST
    if not path.is_file():
        return
    values = read_json(path)
    if isinstance(values.get("files"), dict) and FILE in values["files"]:
        values["files"][FILE] = sha256(directory / FILE)
        if isinstance(values.get("sizes"), dict):
            values["sizes"][FILE] = (directory / FILE).stat().st_size
        write_text(path, json.dumps(values, indent=2) + "\n")
