"""Tell models, and the software that numbers depend on, apart."""

from __future__ import annotations

import hashlib
import json

import safetensors
import torch
import transformers

from compress.storage.checkpoint import Checkpoint
from compress.storage.files import open_regular
from compress.version import __version__

SAMPLED = 1 << 20  # bytes hashed at the start, middle and end of each shard to tell models apart


def versions() -> dict[str, str]:
    """Return the versions of this software and of the libraries that numbers depend on."""
    return {
        "compress": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a sha256 over the configuration, all headers, and samples of each shard's bytes; not whole terabytes."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    if checkpoint.base_settings:
        digest.update(json.dumps(checkpoint.base_settings, sort_keys=True).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        for stored in tensor.sources:
            digest.update(f"{name} {stored.dtype} {stored.shape} {stored.offset}".encode())
    for file in checkpoint.files:
        size = file.stat().st_size
        with open_regular(file) as stream:
            for start in sorted({0, max(0, size // 2), max(0, size - SAMPLED)}):
                stream.seek(start)
                digest.update(stream.read(SAMPLED))
    return digest.hexdigest()
