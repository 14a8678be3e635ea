"""Let SGLang serve packed checkpoints: the entry point of its plugins (group `sglang.srt.plugins`).

SGLang calls `register` in every process that it starts, before a model is built. Nothing of SGLang is imported before.
"""

from __future__ import annotations


def register() -> None:
    """Make SGLang know the quantization method "compress"; again does no harm."""
    from compress.serving import sglang_config

    sglang_config.register()
