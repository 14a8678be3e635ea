"""Let vLLM serve packed checkpoints: the entry point of its plugins (group `vllm.general_plugins`).

vLLM calls `register` in every process that it starts (server, engine core, workers), before a model is built. Nothing
of vLLM is imported before.
"""

from __future__ import annotations


def register() -> None:
    """Make vLLM know the quantization method "compress"; again does no harm."""
    from compress.serving import vllm_config, vllm_tables

    vllm_config.register()
    vllm_tables.register()
