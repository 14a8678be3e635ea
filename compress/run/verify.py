"""Check that a checkpoint holds what was computed, and that it loads.

During a run a probe, a few tokens, is passed through each block right after it was quantized, with the decoded
weights in plain linears; the hash of each output is recorded. After the save the shards must have the hashes of what
was written into them, and transformers must be able to load them. Then the checkpoint is opened as a stranger would: a
fresh module tree with packed linears is filled from the files block by block, and the same probe must give the same
hashes, bit for bit. Where low-rank parts are trained after that, new hashes are taken before they are written, of the
checked files with the trained parts in memory. `verify` repeats on any finished checkpoint what does not need the
original: file hashes, names, shapes and types against the configuration, and that every block decodes to finite
outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError
from compress.model import blockwise, dry_load
from compress.model.skeleton import Skeleton
from compress.progress import Progress, silent
from compress.runtime.experts import Experts
from compress.runtime.linear import PackedLinear
from compress.storage import checkpoint
from compress.storage.checkpoint import open_checkpoint, read_json, sha256

PROBE_TOKENS = 64


class Probe:
    """Fixed tokens on their way through the blocks of a model."""

    def __init__(self, skeleton: Skeleton, device: torch.device) -> None:
        self.skeleton, self.device = skeleton, device
        config = skeleton.config.get_text_config()
        length = min(PROBE_TOKENS, getattr(config, "max_position_embeddings", None) or PROBE_TOKENS)
        tokens = (torch.arange(length) * 7 + 1) % config.vocab_size
        self.stream = blockwise.HiddenStates(1, None)
        self.calls = blockwise.record_inputs(skeleton, tokens[None], 1, self.stream, device)

    def advance(self, index: int, block: nn.Module) -> str:
        """Pass through one block; return the sha256 of its output."""
        name = self.skeleton.block_prefix(index).rstrip(".")
        out = blockwise.run_block(block, self.calls[index][1], self.stream.read(0, 1).to(self.device), name)
        self.stream.write(0, out)
        return hashlib.sha256(out.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def self_check(
    directory: Path, hashes: Mapping[str, str], expected: list[str], device: torch.device, progress: Progress
) -> str:
    """Check a checkpoint before it is put in place; return the outcome for the report.

    Every file on disk must have the sha256 in `hashes` (file name -> that of what was written), transformers must be
    able to load it, and every block read back must give the output whose hash is in `expected`. Raises CheckpointError.
    """
    for number, (name, digest) in enumerate(hashes.items()):
        progress("hashing files", number, len(hashes))
        if sha256(directory / name) != digest:
            raise CheckpointError(
                f"self-check failed: {directory / name} does not hold what was written into it; the disk or the memory "
                "is at fault; run the same command again, which replaces what is damaged"
            )
    progress("loading with transformers", 0, 0)
    try:
        dry_load.check_written(directory)
    except CheckpointError as error:
        raise CheckpointError(f"self-check failed: {directory} was not put in place: {error}") from error
    for index, digest in enumerate(replay(directory, device, progress)):
        if digest != expected[index]:
            raise CheckpointError(
                f"self-check failed: block {index} read back from {directory} gives another result than the one "
                "computed; run again with --restart, and report this if it happens twice"
            )
    return "passed"


def verify(directory: Path, progress: Progress = silent) -> dict[str, int]:
    """Check a finished checkpoint; return counts. Raises CheckpointError at the first thing that is wrong."""
    if not (directory / checkpoint.MANIFEST).is_file():
        raise CheckpointError(
            f"{directory} has no {checkpoint.MANIFEST}; only checkpoints that compress wrote can be verified"
        )
    files = read_json(directory / checkpoint.MANIFEST).get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(
            f"{directory / checkpoint.MANIFEST} lists no files; download or write the checkpoint again"
        )
    for number, (name, expected) in enumerate(files.items()):
        progress("hashing files", number, len(files))
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError(f"{path} is missing; download or write the checkpoint again")
        if sha256(path) != expected:
            raise CheckpointError(f"{path} is not the file that was written; download or write the checkpoint again")
    blocks = replay(directory, torch.device("cpu"), progress)
    stored = open_checkpoint(directory)
    return {"files": len(files), "tensors": len(stored.tensors), "nbytes": stored.nbytes, "blocks": len(blocks)}


def replay(
    directory: Path, device: torch.device, progress: Progress, changed: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Fill a fresh module tree from disk, block by block, and run the probe; return a hash for each block.

    changed: stored tensors of packed linears, by name, that take the place of those on disk.
    """
    changed = changed or {}
    skeleton = Skeleton(open_checkpoint(directory))
    skeleton.check_tensors()
    probe = Probe(skeleton, device)
    hashes = []
    for index in range(len(skeleton.blocks)):
        progress("checking what was written", index, len(skeleton.blocks))
        block = skeleton.load_block(index, device)
        for name, module in list(block.named_modules()):
            if isinstance(module, PackedLinear):  # decoded, as when the block was quantized: kernels round otherwise
                full = f"{skeleton.block_prefix(index)}{name}"
                for key in module.specs:
                    if (tensor := changed.get(f"{full}.{key}")) is not None:
                        setattr(module, key, nn.Parameter(tensor.to(device), requires_grad=False))
                        module.check(full)
                block.set_submodule(name, module.to_linear(skeleton.dtype))
            if isinstance(module, Experts):  # the probe went through before it was known which blocks are pruned
                module.pruning = None
        hashes.append(probe.advance(index, block))
        skeleton.free()
    return hashes
