"""From finished blocks to a checkpoint: the remaining tensors, index, configuration, self-check, report, manifest."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from compress import formats, process_memory, recipe
from compress.model.skeleton import Skeleton
from compress.progress import Progress
from compress.run import job, prepare, report, trained_factors, verify
from compress.run import kv_cache as kv_checkpoint
from compress.runtime import hf
from compress.runtime.experts import Experts
from compress.storage import checkpoint
from compress.storage.checkpoint import (
    CONFIG,
    INDEX,
    EditedTensor,
    StoredTensor,
    read_header,
    sha256,
    sync,
    write_shard,
    write_text,
)
from compress.storage.workdir import Output
from compress.tune import low_rank
from compress.types import LayerReport, PackedWeight

TIED = "tie_word_embeddings"
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

TRANSFORMED = """# {model}, transformed with compress (recipe `{recipe}`)

Transformed weights in full precision ({total}; the original: {source}): it loads like any checkpoint. What was done,
and whether it changed the function, is under `notes` in `report.json`.
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


def write_block(
    output: Output, prepared: job.Prepared, index: int, block: nn.Module, packed: dict[str, PackedWeight], edited: bool
) -> dict[str, Any]:
    """Write a block's shard: packed tensors, and the others, as they are in the block if that was `edited`.

    Returns its file and hash.
    """
    skeleton = prepared.skeleton
    contents: dict[str, Tensor | StoredTensor | EditedTensor] = dict(copied(skeleton, prepared.plan.kept_nbytes, index))
    if edited:
        contents.update(_edited(skeleton, contents, block, skeleton.block_prefix(index)))
    tensors = {f"{name}.{key}": tensor for name, w in packed.items() for key, tensor in w.tensors.items()}
    file = shard_name(index, len(skeleton.blocks))
    return {"file": file, "sha256": write_shard(output.model / file, {**contents, **tensors})}


def restore_block(
    output: Output, skeleton: Skeleton, index: int, device: torch.device, record: dict[str, Any]
) -> tuple[nn.Module, dict[str, PackedWeight], list[LayerReport]]:
    """A finished block, loaded anew with what is in its shard as it is there, and the packed weights in there."""
    on_disk = read_header(output.model / record["file"])
    reports = [report.from_dict(values) for values in record["layers"]]
    packed = {}
    for row in reports:
        tensors = {key: on_disk.pop(f"{row.name}.{key}").read() for key in formats.specs(row.stored, row.shape)}
        packed[row.name] = PackedWeight(row.stored, tensors, row.shape)
    edits, sources = skeleton.edits, skeleton.sources
    skeleton.free()
    try:
        skeleton.edits = None
        skeleton.sources = {n: [on_disk.get(source.name, source) for source in group] for n, group in sources.items()}
        block = skeleton.load_block(index, device)
    finally:
        skeleton.edits, skeleton.sources = edits, sources
    return block, packed, reports


def _edited(skeleton: Skeleton, kept: Mapping[str, Any], module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Those of the `kept` stored tensors that are other ones in the loaded module, in the type they have on disk."""
    found = {}
    for name, parameter in module.named_parameters():
        for source in skeleton.sources.get(prefix + name, []):
            if not parameter.is_meta and source.name in kept and source.shape == tuple(parameter.shape):
                changed = parameter.detach().to("cpu", torch.promote_types(source.dtype, parameter.dtype))
                if not torch.equal(source.read().to(parameter.dtype).to(changed.dtype), changed):
                    found[source.name] = changed
    for name, part in module.named_modules():
        if isinstance(part, Experts):
            state = part.fuse(skeleton.dtype).state_dict(prefix=f"{prefix}{name}.")
            stored = revert_weight_conversion(skeleton.model, state)
            found.update({key: tensor for key, tensor in stored.items() if key in kept})
    return found


def _outside(prepared: job.Prepared, device: torch.device) -> dict[str, Tensor | StoredTensor | EditedTensor]:
    """Everything outside the blocks, as the transforms have left it."""
    skeleton = prepared.skeleton
    rest: dict[str, Tensor | StoredTensor | EditedTensor] = dict(copied(skeleton, prepared.plan.kept_nbytes, None))
    if skeleton.edits is None:
        return rest
    head, change = skeleton.model.get_output_embeddings(), skeleton.edits.head()
    names = {id(p): name for name, p in skeleton.model.named_parameters(remove_duplicate=False)}
    for source in skeleton.sources.get(names.get(id(getattr(head, "weight", None)), ""), []):
        rest[source.name] = EditedTensor(source, change)
    skeleton.load_rest(device)
    rest.update(_edited(skeleton, {n: t for n, t in rest.items() if isinstance(t, StoredTensor)}, skeleton.model))
    skeleton.free()
    return rest


def finish(output: Output, facts: job.Facts, probes: list[str], started: float, progress: Progress) -> dict[str, Any]:
    """Complete the checkpoint in output.model, check it, write the report and the manifest, put it in place."""
    prepared, directory = facts.prepared, output.model
    skeleton, blocks = prepared.skeleton, len(prepared.skeleton.blocks)
    progress("writing embeddings and configuration", blocks, blocks)
    rest = _outside(prepared, torch.device(facts.job.device))
    if rest:
        write_shard(directory / shard_name(blocks, blocks), rest)
    write_index(directory)
    copy_files(skeleton.checkpoint.directory, directory)
    quantization = hf.build_config({row.name: row.stored for row in facts.layers}, facts.prunings)
    # a stated dtype: transformers would else take that of the first floating tensor, perhaps a scale
    dtype = skeleton.checkpoint.config.get("dtype") or str(skeleton.dtype).removeprefix("torch.")
    config = {**untied(skeleton), "dtype": dtype}
    if facts.layers:
        config["quantization_config"] = quantization.to_dict()
    write_text(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    write_text(directory / "recipe.yaml", recipe.dump(facts.job.recipe))
    probes = _train(output, facts, probes, progress)
    cache, cache_facts = kv_checkpoint.build(output, facts, progress)
    if cache is not None:
        config["quantization_config"] = {**quantization.to_dict(), "kv_cache": cache}
        write_text(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    outcome = verify.self_check(directory, probes, torch.device(facts.job.device), progress)
    process_memory.check(facts.job.max_memory)
    result = {**report.build(facts, time.monotonic() - started, outcome), "kv_cache": cache_facts}
    text = (README if facts.layers else TRANSFORMED).format(
        model=result["model"],
        recipe=result["recipe"],
        bpw=result["bpw"],
        total=process_memory.show(result["nbytes"]["total"]),
        source=process_memory.show(result["source_nbytes"]),
        package="compress-llm",
    )
    write_text(directory / "README.md", text)
    write_text(directory / "report.json", json.dumps(result, indent=1) + "\n")
    _write_manifest(directory, facts)
    output.publish()
    return result


def _train(output: Output, facts: job.Facts, probes: list[str], progress: Progress) -> list[str]:
    """Train the low-rank parts of the checkpoint together, if the recipe asks for it and no former run has done so.

    probes: hashes of the blocks' outputs. Training starts from what gives these; returns those with trained parts.
    """
    prepared, directory, blocks = facts.prepared, output.model, len(facts.prepared.skeleton.blocks)
    wanted = low_rank.asked({layer.spec.name: layer.scheme.lowrank for layer in prepared.plan.layers})
    if wanted is None or facts.calibration is None:
        return probes
    device = torch.device(facts.job.device)
    verify.self_check(directory, probes, device, progress)
    kept = trained_factors.kept(output)
    if kept is None:
        source, tokens = prepared.skeleton.checkpoint.directory, facts.calibration.tokens

        def say(text: str) -> None:
            progress(text, blocks, blocks)

        result, factors = low_rank.whole(directory, source, tokens, wanted, facts.job.device, say)
        kept = trained_factors.keep(output, result.note, factors)
    facts.notes["low-rank parts"] = [kept.note]
    if not kept.factors:
        return probes
    expected = verify.replay(directory, device, progress, kept.factors)
    trained_factors.put_in(output, kept)
    return expected


def untied(skeleton: Skeleton) -> dict[str, Any]:
    """config.json of the source, without tied embeddings where a transform has untied them."""
    config = dict(skeleton.checkpoint.config)
    if not skeleton.is_untied:
        return config
    parts = {key: {**part, TIED: False} for key, part in config.items() if isinstance(part, dict) and TIED in part}
    return {**config, **parts, TIED: False}


def write_index(directory: Path) -> None:
    """Write the index over all shards of a directory."""
    weight_map: dict[str, str] = {}
    size = 0
    for path in sorted(directory.glob("model-*.safetensors")):
        tensors = read_header(path)
        weight_map.update(dict.fromkeys(tensors, path.name))
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=1) + "\n")


def copy_files(source: Path, directory: Path) -> None:
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


def _write_manifest(directory: Path, facts: job.Facts) -> None:
    manifest = {
        "files": {path.name: sha256(path) for path in sorted(directory.iterdir())},
        "source": {
            "model": facts.job.model.rstrip("/").rsplit("/", 1)[-1],
            "fingerprint": prepare.fingerprint(facts.prepared.skeleton.checkpoint),
        },
        "recipe": recipe.fingerprint(facts.job.recipe),
        "seed": facts.job.seed,
        "versions": prepare.versions(),
    }
    write_text(directory / checkpoint.MANIFEST, json.dumps(manifest, indent=1) + "\n")
