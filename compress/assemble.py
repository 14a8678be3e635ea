"""From finished blocks to a checkpoint: the remaining tensors, index, configuration, self-check, report, manifest."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from compress import formats, job, memory, recipe, report, verify
from compress.checkpoint import CONFIG, INDEX, StoredTensor, read_header, sha256, sync, write_shard, write_text
from compress.model import Skeleton
from compress.output import Output
from compress.progress import Progress
from compress.runtime import hf
from compress.types import LayerReport, Stored

COPIED_LIMIT = 64 << 20  # bytes; larger files beside a model are not its configuration
NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".py", ".pkl", ".md"}

README = """# {model}, quantized with compress (recipe `{recipe}`)

{bpw:.3f} stored bits per quantized weight, {total} in all (the original: {source}). The weights are packed; a plain
transformers load without the compress package would not understand them. Install `{package}`, then:

```python
import compress  # registers the format; not needed where torch loads installed backends by itself
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
```

`recipe.yaml` is the recipe with every default, `report.json` what happened, `compress verify DIR` checks the files.
"""


def shard_name(index: int, blocks: int) -> str:
    """File of block `index`; index == blocks is the file of everything outside the blocks."""
    return f"model-{index + 1:05d}-of-{blocks + 1:05d}.safetensors"


def copied(skeleton: Skeleton, kept: dict[str, int], index: int | None) -> dict[str, StoredTensor]:
    """The stored tensors among `kept` that belong to block `index` (None: to no block), to be copied unchanged."""
    prefixes = [skeleton.block_prefix(i) for i in range(len(skeleton.blocks))] if index is None else []
    found = {}
    for name, sources in skeleton.sources.items():
        inside = name.startswith(skeleton.block_prefix(index)) if index is not None else False
        outside = index is None and not name.startswith(tuple(prefixes))
        if inside or outside:
            found.update({stored.name: stored for stored in sources if stored.name in kept})
    return found


def finish(
    output: Output, facts: report.Facts, probes: list[str], started: float, progress: Progress
) -> dict[str, Any]:
    """Complete the checkpoint in output.model, check it, write the report and the manifest, put it in place."""
    prepared, directory = facts.prepared, output.model
    skeleton, blocks = prepared.skeleton, len(prepared.skeleton.blocks)
    progress("writing embeddings and configuration", blocks, blocks)
    rest = copied(skeleton, prepared.plan.kept_nbytes, None)
    if rest:
        write_shard(directory / shard_name(blocks, blocks), rest)
    _write_index(directory)
    _copy_files(skeleton.checkpoint.directory, directory)
    quantization = hf.build_config({row.name: stored(row) for row in facts.layers})
    # a stated dtype: transformers would else take that of the first floating tensor, perhaps a scale
    dtype = skeleton.checkpoint.config.get("dtype") or str(skeleton.dtype).removeprefix("torch.")
    config = {**skeleton.checkpoint.config, "dtype": dtype, "quantization_config": quantization.to_dict()}
    write_text(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    write_text(directory / "recipe.yaml", recipe.dump(facts.job.recipe))
    verify.self_check(directory, probes, torch.device(facts.job.device), progress)
    memory.check(facts.job.max_memory)
    result = report.build(facts, time.monotonic() - started)
    text = README.format(
        model=result["model"],
        recipe=result["recipe"],
        bpw=result["bpw"],
        total=memory.show(result["nbytes"]["total"]),
        source=memory.show(result["source_nbytes"]),
        package="compress-llm",
    )
    write_text(directory / "README.md", text)
    write_text(directory / "report.json", json.dumps(result, indent=1) + "\n")
    _write_manifest(directory, facts)
    output.publish()
    return result


def stored(row: LayerReport) -> Stored:
    """How a reported layer is stored."""
    return Stored(row.format, formats.params_from_dict(row.format, row.params), row.ops)


def _write_index(directory: Path) -> None:
    weight_map: dict[str, str] = {}
    size = 0
    for path in sorted(directory.glob("*.safetensors")):
        tensors = read_header(path)
        weight_map.update(dict.fromkeys(tensors, path.name))
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=1) + "\n")


def _copy_files(source: Path, directory: Path) -> None:
    """Tokenizer, generation settings and other small files of the source that hold no weights and no code."""
    for path in sorted(source.iterdir()):
        name = path.name
        if not path.is_file() or name.startswith(".") or name in (CONFIG, INDEX) or name.endswith(".index.json"):
            continue
        if path.suffix in NOT_COPIED or path.stat().st_size > COPIED_LIMIT:
            continue
        shutil.copyfile(path, directory / name)
        with (directory / name).open("r+b") as stream:
            sync(stream)


def _write_manifest(directory: Path, facts: report.Facts) -> None:
    manifest = {
        "files": {path.name: sha256(path) for path in sorted(directory.iterdir())},
        "source": {
            "model": facts.job.model.rstrip("/").rsplit("/", 1)[-1],
            "fingerprint": job.fingerprint(facts.prepared.skeleton.checkpoint),
        },
        "recipe": recipe.fingerprint(facts.job.recipe),
        "seed": facts.job.seed,
        "versions": job.versions(),
    }
    write_text(directory / verify.MANIFEST, json.dumps(manifest, indent=1) + "\n")
