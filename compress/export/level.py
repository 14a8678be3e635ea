"""Write a level of a packed checkpoint (compress/formats/levels.py) as a checkpoint of its own.

Tensors are copied byte by byte: the 4-bit level of 4 + 4 bits is what the recipe `int4` would have stored with these
codes. The report stays behind, whose figures are those of the whole.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compress.export.place import ExportPlace
from compress.model.skeleton import Skeleton
from compress.progress import Progress, silent
from compress.run import companion_files, source
from compress.runtime import kv_config
from compress.runtime.hf import CompressConfig
from compress.speculate import specification
from compress.speculate.default import CONFIG_KEY
from compress.storage import files, json_text, manifest
from compress.storage.checkpoint import CONFIG, MANIFEST, SINGLE, Readable, open_checkpoint, write_shard, write_text
from compress.storage.workdir import check_space


def export(directory: Path, level: int, out: Path, overwrite: bool = False, progress: Progress = silent) -> int:
    """Write a level of a checkpoint of ours to a directory `out`, whole or not at all; return its bytes.

    Raises CheckpointError for a level that the checkpoint does not have, OutputError for what is in the way.
    """
    with ExportPlace(out, "", overwrite) as place:
        skeleton = Skeleton(open_checkpoint(source.resolve(str(directory), level=level)))
        skeleton.check_tensors()
        checkpoint = skeleton.checkpoint
        check_space(out.parent, checkpoint.nbytes)
        place.new.mkdir()
        _write_tensors(checkpoint.tensors.values(), place.new, progress)
        packed = CompressConfig.read(checkpoint.config["quantization_config"]).to_dict()
        config = json_text.add_notice({**with_drafts_below(checkpoint.config, level), "quantization_config": packed})
        write_text(place.new / CONFIG, json.dumps(config, indent=2) + "\n")
        companion_files.copy_files(directory, place.new)
        for name in (manifest.RECIPE, kv_config.FILE):
            if (directory / name).is_file():
                files.copy(directory / name, place.new / name)
        if (place.new / manifest.RECIPE).is_file():  # which a manifest is to list
            listed = {**manifest.entries(place.new), "level": level}
            write_text(place.new / MANIFEST, json.dumps(listed, indent=1) + "\n")
        place.publish()
    return checkpoint.nbytes


def with_drafts_below(config: dict[str, Any], level: int) -> dict[str, Any]:
    """Return a config.json whose stored drafts are those that weights of this level still have."""
    kept = specification.keep_below(str(config.get(CONFIG_KEY, "")), level)
    others = {key: value for key, value in config.items() if key != CONFIG_KEY}
    return {**others, CONFIG_KEY: kept} if kept else others


def _write_tensors(tensors: Iterable[Readable], directory: Path, progress: Progress) -> None:
    """Write tensors into as many files as they came from, and the index of several."""
    by_file: dict[Path, dict[str, Readable]] = defaultdict(dict)
    for tensor in tensors:
        by_file[tensor.sources[0].file][tensor.name] = tensor
    for number, file in enumerate(sorted(by_file)):
        progress("writing weights", number, len(by_file))
        name = SINGLE if len(by_file) == 1 else f"model-{number + 1:05}-of-{len(by_file):05}.safetensors"
        write_shard(directory / name, by_file[file])
    if len(by_file) > 1:
        companion_files.write_index(directory)
