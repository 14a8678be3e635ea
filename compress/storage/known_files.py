"""Know the files of a model that go along into what is made of it, and to the hub: by name, and from its own folder.

What else lies beside a model may be anybody's: keys, logs, data. The names are those that transformers' tokenizers and
processors save, those of licenses, and those that this package writes.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

from compress.storage.manifest import MANIFEST, PAGE, RECIPE, SCORES
from compress.storage.paths import CONFIG, EXPORTED

COPIED = (
    *("tokenizer*", "vocab*", "merges*", "added_tokens.json", "special_tokens_map.json", "chat_template*"),
    *("generation_config.json", "*processor_config.json", "feature_extractor*_config.json"),
    *("audio_tokenizer_config.json", "*.tokenizer"),
    *("spiece.model", "sentencepiece*.model", "spm*.model", "bpe.model", "source.spm", "target.spm"),
    *("*.tiktoken", "tekken.json", "bpe.codes", "dict.txt", "emoji.json", "normalizer.json", "entity_vocab.json"),
    *("target_vocab.json", "byte_maps.json", "word_shape.json", "word_pronunciation.json"),
)
LEGAL_PATTERNS = (
    "license*",
    "licence*",
    "model_license*",
    "use_policy*",
    "notice*",
    "copying*",
)  # and the same in capitals
CARD, REPORT = "README.md", "report.json"
WRITTEN_PATTERNS = (
    CONFIG,
    "*.safetensors",
    "*.safetensors.index.json",
    MANIFEST,
    RECIPE,
    REPORT,
    CARD,
)  # a run writes these
WEIGHTS = (".safetensors", ".index.json", ".gguf", ".onnx", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz")
CODE = (".py", ".pkl", ".pickle", ".sh")
# Files that say how the model was stored, or what was measured of it: a run writes its own, or none.
OF_SOURCE = {CONFIG, MANIFEST, RECIPE, REPORT, CARD, PAGE, SCORES, EXPORTED}
OF_SOURCE |= {"quantize_config.json", "quant_config.json", "hf_quant_config.json"}
HUB_FILE = re.compile(r"(.*/models--[^/]+)/snapshots/[^/]+")  # the folder of a model in the hub's cache


def is_copied(name: str) -> bool:
    """Return whether a file beside a model has the name of one that belongs to it, and holds no weights and no code."""
    if name.lower().endswith((*WEIGHTS, *CODE)):
        return False
    is_legal = any(fnmatchcase(name.lower(), pattern) for pattern in LEGAL_PATTERNS)
    return is_legal or any(fnmatchcase(name, pattern) for pattern in COPIED)


def is_of_source(name: str) -> bool:
    """Return whether a file holds a model's weights, or what a run writes anew: nobody misses it in a copy."""
    return name.startswith(".") or name in OF_SOURCE or name.lower().endswith(WEIGHTS)


def is_published(name: str) -> bool:
    """Return whether a file of a finished checkpoint has the name of one that belongs to it."""
    return is_copied(name) or any(fnmatchcase(name, pattern) for pattern in WRITTEN_PATTERNS)


def is_inside(path: Path) -> bool:
    """Return whether a path is a regular file of its own folder, or a link to one.

    A file in the hub's cache is a link into the blobs of the same model, which belong to it.
    """
    if not os.path.isfile(path):
        return False
    folder, real = path.parent.resolve(), path.resolve()
    cached = HUB_FILE.fullmatch(str(folder))
    return real.parent == folder or (cached is not None and str(real.parent) == f"{cached[1]}/blobs")
