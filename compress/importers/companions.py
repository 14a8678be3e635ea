"""Notice the files beside a model's weights that change what the weights mean, or are another set of them.

Each is used (the settings of older quantizers), an error (an adapter, what cannot be read), or named as left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compress.errors import CheckpointError, cut, one_line, shown
from compress.storage import manifest, paths
from compress.storage.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, read_json
from compress.storage.files import read_text

OLD_SETTINGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # file of older versions of a tool -> tool
TOKENIZER, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
LEFT_OUT = {  # pattern of a name -> what the file or folder (with a / behind) is; the first one counts
    "adapter_model.*": "an adapter without its settings",
    **dict.fromkeys(map("*{}".format, manifest.WEIGHTS), "other copies of weights"),
    **dict.fromkeys(("*.pkl", "original/", "onnx/", "openvino/", "gguf/", "params.json"), "other copies of weights"),
    "*.safetensors": "weights that are not of this model's index",
    "*.index.json": "an index of other weights",
    **dict.fromkeys(("*.py", "custom_generate/"), "code, which is not run"),
    "*kv_cache_scales*": "scales of another tool's cache",
    "additional_chat_templates/": "more chat templates",
}
NAMED = 8  # files in a note on those that are left out
ADVICE = "merge the adapter, or move it to a directory of its own and give it as --adapter"


def check(directory: Path) -> None:
    """Raise CheckpointError for a directory whose files say that its weights are not all there is."""
    if not (directory / paths.ADAPTER_CONFIG).is_file():
        return
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} is an adapter and no model; give the model, and this as --adapter")
    raise CheckpointError(
        f"{directory} has {paths.ADAPTER_CONFIG}, so its weights are not those of its index; {ADVICE}"
    )


def check_plain(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for what stands beside a checkpoint whose configuration speaks of no quantization."""
    directory = checkpoint.directory
    if checkpoint.config.get("transformers_weights") is not None:
        raise CheckpointError(
            f"{directory} has transformers_weights, so its weights are not those of its index; remove that key from "
            f"{CONFIG}"
        )
    if checkpoint.files and all(file.name.startswith("consolidated") for file in checkpoint.files):
        raise CheckpointError(
            f"{directory} has its weights in {checkpoint.files[0].name} only, under names of their publisher; give the "
            f"checkpoint with {SINGLE} or {INDEX}"
        )


def settings(directory: Path) -> dict[str, Any] | None:
    """Return what a tool has written beside a model in the place of quantization_config."""
    for name, method in OLD_SETTINGS.items():
        if (directory / name).is_file():
            return {"quant_method": method, **read_json(directory / name)}
    if (directory / paths.MODELOPT_SETTINGS).is_file():
        quantization = read_json(directory / paths.MODELOPT_SETTINGS).get("quantization")
        return {**(quantization if isinstance(quantization, dict) else {}), "quant_method": "modelopt"}
    return None


def notes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield in a line each what lies beside a model and is not used, and what is used in the place of what."""
    directory, used = checkpoint.directory, {file.name for file in checkpoint.files}
    names_by_use: dict[str, list[str]] = {}
    for path in sorted(directory.iterdir()):
        name = f"{path.name}/" if path.is_dir() else path.name
        words = reason(name)
        is_index = name == INDEX and not (directory / SINGLE).is_file()
        if words is not None and name not in used and not is_index:
            names_by_use.setdefault(words, []).append(name)
    yield from lines(directory, names_by_use)
    if "auto_map" in checkpoint.config:
        yield f"{CONFIG} names code of its own (auto_map), which is not run; the model is that of transformers"
    tokenizer = read_json(directory / TOKENIZER) if (directory / TOKENIZER).is_file() else {}
    is_read = (directory / TEMPLATE).is_file() and os.access(directory / TEMPLATE, os.R_OK)
    if is_read and tokenizer.get("chat_template"):
        text = read_text(directory / TEMPLATE, errors="replace")
        if text.rstrip("\n") != str(tokenizer["chat_template"]).rstrip("\n"):
            yield f"the chat template is that of {TEMPLATE}; the one in {TOKENIZER} differs and is not used"
    if beyond := _tokens_beyond(directory, tokenizer, checkpoint.config):
        yield (
            f"the tokenizer has {len(beyond)} tokens that the model has no rows for, first {shown(beyond[0])}; text "
            "with them cannot be read"
        )


def reason(name: str) -> str | None:
    """Return what a file or folder (with a / behind) beside a model's weights is, None where the name does not say."""
    return next((words for pattern, words in LEFT_OUT.items() if fnmatchcase(name, pattern)), None)


def lines(directory: Path, left_out: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield in a line each what is left out of a directory; left_out: why -> names of files."""
    for words, names in left_out.items():
        listed = ", ".join(cut(one_line(name)) for name in names[:NAMED])
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        yield f"left out of {directory.absolute().name}: {listed}{more} ({words})"


def _tokens_beyond(directory: Path, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the added tokens whose numbers the model's table does not have."""
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    if type(size) is not int:
        return []
    file = directory / "added_tokens.json"
    numbers: dict[str, Any] = dict(read_json(file)) if file.is_file() else {}
    decoder = tokenizer.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        content = token.get("content") if isinstance(token, dict) else token
        if number.isdecimal() and len(number) < 20:
            numbers[str(content)] = int(number)
    return sorted(name for name, number in numbers.items() if type(number) is int and number >= size)
