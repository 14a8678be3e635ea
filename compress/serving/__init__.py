"""Run packed checkpoints in serving engines, by the modules that transformers runs.

These functions are the entry points of the engines' plugins (groups `vllm.general_plugins` and `sglang.srt.plugins` in
pyproject.toml). An engine calls its own in every process that it starts, before a model is built. Nothing of an engine
is imported before.
"""


def register_vllm() -> None:
    """Make vLLM know the quantization method "compress"; again does no harm."""
    from compress.serving import vllm

    vllm.register()


def register_sglang() -> None:
    """Make SGLang know the quantization method "compress"; again does no harm."""
    from compress.serving import sglang

    sglang.register()
