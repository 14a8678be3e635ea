"""Check that a checkpoint holds what was computed, and that it loads.

During a run a probe, a few tokens, is passed through each block right after it was quantized, with the decoded
weights in plain linears; the hash of each output is recorded. After the save the shards must have the hashes of what
was written into them, and transformers must be able to load them. Then the checkpoint is opened as a stranger would: a
fresh module tree with packed linears is filled from the files block by block, and the same probe must give the same
hashes, bit for bit. Where stored tensors are trained after that, new hashes are taken before they are written, of the
checked files with the trained tensors in memory. `verify` repeats on any finished checkpoint what does not need the
original: file hashes, names, shapes and types against the configuration, and that every block decodes to finite
outputs. A checkpoint that was saved again by other software has no hashes; the rest is checked all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError
from compress.kv.cache import layer_types
from compress.model import architectures, blockwise, dry_load
from compress.model.blockwise import ModelArgs
from compress.model.load import open_config
from compress.model.skeleton import Skeleton
from compress.progress import Progress, silent
from compress.runtime import kv_config
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.experts import Experts
from compress.runtime.linear import PackedLinear
from compress.storage import manifest
from compress.storage.checkpoint import CONFIG, Checkpoint, open_checkpoint, sha256
from compress.storage.manifest import PAGE, RECIPE, SCORES, Manifest

PROBE_TOKENS = 64
CHECKED, NO_MANIFEST, EARLIER_SAVE = "checked", "none", "of an earlier save"  # what `verify` says of the manifest


class ProbeStart(NamedTuple):
    """A probe in front of the first block."""

    states: list[Tensor]  # [1, tokens, hidden], of each stack
    calls: ModelArgs


class Probe:
    """Fixed tokens on their way through the blocks of a model."""

    def __init__(
        self,
        skeleton: Skeleton,
        device: torch.device,
        start: ProbeStart | None = None,
        changed: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Embed the tokens; start: what goes into the blocks instead. changed: as `replay` has it."""
        self.skeleton, self.device = skeleton, device
        config = skeleton.config.get_text_config()
        length = min(PROBE_TOKENS, architectures.most_tokens(skeleton.model) or PROBE_TOKENS)
        tokens = (torch.arange(length) * 7 + 1) % config.vocab_size
        self.stream = blockwise.HiddenStates(1, None)

        def change() -> None:
            _change(skeleton, "", skeleton.model, changed or {})

        self.calls = blockwise.record_inputs(skeleton, tokens[None], 1, self.stream, device, change)
        if start is not None:
            self.calls = start.calls
            for stack, states in zip(self.calls.stacks, start.states, strict=True):
                stack.write(0, states)

    def start(self) -> ProbeStart:
        """Return what goes into the blocks, in memory of its own."""
        return ProbeStart([stack.read(0, 1).clone() for stack in self.calls.stacks], self.calls)

    def advance(self, index: int, block: nn.Module) -> str:
        """Pass through one block; return the sha256 of its output."""
        name = self.skeleton.block_prefix(index).rstrip(".")
        states = self.calls.states(index)
        call, hidden = self.calls.at(index, 0, 1), states.read(0, 1).to(self.device)
        out, beside = blockwise.run_block_fully(block, call, hidden, name, takes_overflow=True)
        states.write(0, out)
        self.calls.keep(index, 0, call, beside)
        return hashlib.sha256(out.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def self_check(
    directory: Path,
    hashes: Mapping[str, str],
    expected: list[str],
    device: torch.device,
    progress: Progress,
    start: ProbeStart | None = None,
) -> str:
    """Check a checkpoint before it is put in place; return the outcome for the report.

    Every file on disk must have the sha256 in `hashes` (file name -> that of what was written), transformers must be
    able to load it, and every block read back must give the output whose hash is in `expected`. start: what went into
    the blocks where embeddings were packed after them. Raises CheckpointError.
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
        with manifest.without_hashes():
            dry_load.check_written(directory)
    except CheckpointError as error:
        raise CheckpointError(f"self-check failed: {directory} was not put in place: {error}") from error
    for index, digest in enumerate(replay(directory, device, progress, start=start)):
        if digest != expected[index]:
            raise CheckpointError(
                f"self-check failed: block {index} read back from {directory} gives another result than the one "
                "computed; run again with --restart, and report this if it happens twice"
            )
    return "passed"


def verify(directory: Path, progress: Progress = silent) -> dict[str, Any]:
    """Check a finished checkpoint; return what was checked.

    "files": how many have the hash that was written; "tensors", "nbytes", "blocks": of the model; "manifest":
    "checked", or why there are no hashes; "unlisted": files that the manifest lacks and that loading does not read,
    but for the page and the scores that are kept beside a checkpoint.
    Without hashes all stored numbers must at least be finite. Raises CheckpointError for what is not as it should be.
    """
    listed, outcome, unlisted = Manifest.read(directory), NO_MANIFEST, list[str]()
    try:
        stored = open_checkpoint(directory)
    except CheckpointError:
        if listed is not None:
            check_hashes(listed, progress)  # names the file that was changed
        raise
    weights = {file.name for file in stored.files}
    if listed is not None and listed.is_of_earlier_save(weights):
        listed, outcome = None, EARLIER_SAVE
    if listed is not None:
        outcome, unlisted = CHECKED, check_listed(listed, weights, progress)
    else:
        check_finite(stored, progress)
    blocks = replay(directory, torch.device("cpu"), progress)
    check_cache(stored)
    counts = {"tensors": len(stored.tensors), "nbytes": stored.nbytes, "blocks": len(blocks)}
    return {"files": len(listed.files) if listed else 0, **counts, "manifest": outcome, "unlisted": unlisted}


def check_listed(listed: Manifest, weights: set[str], progress: Progress) -> list[str]:
    """Compare all files with the manifest; return those beside it that are not ours and that loading does not read.

    Raises CheckpointError for a file that is missing or changed, and for one that loading reads and that is not listed.
    """
    read, others = listed.unlisted()
    listed.check_listed({*read, *weights, CONFIG, RECIPE})
    check_hashes(listed, progress)
    return [name for name in others if name not in (PAGE, SCORES)]


def check_hashes(listed: Manifest, progress: Progress) -> None:
    """Raise CheckpointError for a listed file that is missing or changed."""
    for name in listed.files:
        listed.check_size(name)
    for number, name in enumerate(listed.files):
        progress("hashing files", number, len(listed.files))
        listed.check_hash(name)


def check_finite(stored: Checkpoint, progress: Progress) -> None:
    """Raise CheckpointError for a stored tensor with NaN or infinite numbers."""
    for number, (name, tensor) in enumerate(stored.tensors.items()):
        progress("reading tensors", number, len(stored.tensors))
        is_tiny = tensor.dtype.itemsize == 1  # float8, for which torch has no isfinite
        for part in tensor.parts() if tensor.dtype.is_floating_point else ():
            numbers = part.view(tensor.dtype)
            if not torch.isfinite(numbers.half() if is_tiny else numbers).all():
                raise CheckpointError(f"{tensor.sources[0].file}: {name} has NaN or infinite values; write it again")


def check_cache(stored: Checkpoint) -> None:
    """Raise CheckpointError for calibrated tensors of a cache that are not those that config.json speaks of."""
    section = kv_config.stored_section(stored.config)
    if section is not None:
        config = open_config(stored.directory)
        settings = kv_config.read(section, len(layer_types(config)))
        kv_config.read_static(section, stored.directory, config, settings)


def replay(
    directory: Path,
    device: torch.device,
    progress: Progress,
    changed: Mapping[str, Tensor] | None = None,
    start: ProbeStart | None = None,
) -> list[str]:
    """Fill a fresh module tree from disk, block by block, and run the probe; return a hash for each block.

    changed: tensors by their names on disk, that take the place of those there. start: what goes into the
    blocks in the place of what the embeddings on disk give.
    """
    changed = changed or {}
    skeleton = Skeleton(open_checkpoint(directory))
    _check_tables(skeleton, device)
    probe = Probe(skeleton, device, start, changed)
    hashes = []
    for index in range(len(skeleton.blocks)):
        progress("checking what was written", index, len(skeleton.blocks))
        block = skeleton.load_block(index, device)
        _change(skeleton, skeleton.block_prefix(index), block, changed)
        for name, module in list(block.named_modules()):
            if isinstance(module, PackedLinear):  # decoded, as when the block was quantized: kernels round otherwise
                block.set_submodule(name, module.to_linear(skeleton.dtype).to(device))
            if isinstance(module, Experts):  # the probe went through before it was known which blocks are pruned
                module.pruning = None
        hashes.append(probe.advance(index, block))
        skeleton.free()
    _check_beside(skeleton, device)
    return hashes


def _change(skeleton: Skeleton, prefix: str, block: nn.Module, changed: Mapping[str, Tensor]) -> None:
    """Give loaded modules those of the changed tensors that are their own, and check packed linears that get any."""
    touched = set[str]()
    loaded = [(path, p) for path, p in block.named_parameters() if not p.is_meta] if changed else []
    for path, parameter in loaded:
        stored = skeleton.sources.get(prefix + path, [])
        if len(stored) == 1 and (tensor := changed.get(stored[0].name)) is not None:
            owner, _, key = path.rpartition(".")
            value = tensor.to(parameter.device, parameter.dtype, copy=True)
            block.get_submodule(owner).register_parameter(key, nn.Parameter(value, requires_grad=False))
            touched.add(owner)
    for owner in sorted(touched):
        if isinstance(module := block.get_submodule(owner), PackedLinear):
            module.check(prefix + owner)


def _check_tables(skeleton: Skeleton, device: torch.device) -> None:
    """Check what is outside of the blocks; nothing is compiled to look some rows up in what is packed of it."""
    skeleton.check_tensors()
    if isinstance(skeleton.model.get_output_embeddings(), PackedLinear):
        skeleton.load_rest(device, with_head=True)  # which checks what it loads
        skeleton.free()
    for module in skeleton.model.modules():
        if isinstance(module, PackedEmbedding):
            module.uses_kernels = False


def _check_beside(skeleton: Skeleton, device: torch.device) -> None:
    """Check the packed linears that are beside the text model."""
    for name, module in list(skeleton.model.named_modules()):
        if isinstance(module, PackedLinear) and skeleton.is_off_text_path(name):
            skeleton.load_linear(name, device)
            module.check(name)
            skeleton.free()
