"""Take a model's configuration, tokenizer and the names of its weights from a GGUF file, by the rules of transformers.

transformers leaves out how positions are stretched and how wide some heads and experts are. That is taken from the
file here, or the file is refused.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from compress import process_memory
from compress.errors import CheckpointError, UnsupportedModelError, first_line, shown
from compress.importers import gguf_blocks, gguf_header
from compress.importers.gguf import MAP, check_metadata, check_sizes, values
from compress.importers.gguf_header import FACTOR, FREQUENCIES, HEAD, KIND, ORIGINAL_LENGTH, SETTINGS, Bands, GgufHeader
from compress.model.load import FAILURES, empty_model, gguf_tokenizer, open_config, without_weights
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import CONFIG, write_text

LEFT_OUT = (  # keys whose settings transformers would leave at their defaults
    *("attention.key_length", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
)
PATH_KEYS = ("_name_or_path", "_model_name_or_path")  # another process has the directory under another name
TEXT_HEAD, LIST_HEAD = struct.Struct("<Q"), struct.Struct("<IQ")  # length; type and number of entries
STRETCHED = "full_attention"  # the layers whose positions are stretched, where others see a window


def write_directory(file: Path, directory: Path) -> None:
    """Write the configuration and the tokenizer of a GGUF file into a directory that has it (or a link to it) already.

    With them comes what says which tensors make which weight (compress/importers/gguf.py). Raises CheckpointError, and
    UnsupportedModelError for an architecture that transformers does not read from such files.
    """
    header = gguf_header.read_all(file)
    check_metadata(header, file)
    with _one_line(file, header), _quick_reader():
        config = open_config(directory, gguf_file=file.name)
        for key, name in ((key, SETTINGS[key]) for key in LEFT_OUT):
            if (width := header.metadata.get(f"{header.architecture}.{key}")) is not None and hasattr(config, name):
                setattr(config, name, width)
        unused = _stretch(file, header, config)
        if HEAD in header.tensors and HEAD not in gguf_header.read(file).tensors:
            config.tie_word_embeddings = False  # transformers looks into the first part of a split file only
        config.dtype = dtype(header)
        check_sizes(header, config.to_dict(), file)
        with without_weights():
            model = empty_model(config, config.dtype)
        config.architectures = [type(model).__name__]
        weights = _weights(model, header)
        gguf_tokenizer(directory, file.name).save_pretrained(directory)
    facts, settings = (json.loads(config.to_json_string(use_diff=short)) for short in (True, False))
    for key in PATH_KEYS:
        facts.pop(key, None)
        settings.pop(key, None)
    write_text(directory / CONFIG, json.dumps(facts, indent=2) + "\n")
    made_of = {"file": file.name, "settings": settings, "weights": weights, "unused": unused}
    write_text(directory / MAP, json.dumps(made_of))
    process_memory.trim()  # a vocabulary takes several hundred bytes a token while it is read


def place_of(skeleton: Skeleton, linear: str) -> tuple[str, int] | None:
    """Return the tensor of a GGUF file that holds a linear of a model, and the number of its expert there, or 0.

    Names are those that the package gguf has for the architecture, or for most others where it has another name there;
    None for a linear that has none.
    """
    numbers = re.findall(r"\.experts\.(\d+)\.", linear)
    block = re.search(r"\.(\d+)\.", linear)
    plain = re.sub(r"\.experts\.\d+\.", ".experts.", linear)
    plain = plain if block is None else plain.replace(block[0], ".0.", 1)
    name = _gguf_name(str(skeleton.config.model_type).replace("_", ""), plain)
    if name is None:
        return None
    name = name if block is None else name.replace(".0.", block[0], 1)
    return f"{name}.weight", int(numbers[0]) if numbers else 0


@functools.cache
def _gguf_name(kind: str, linear: str) -> str | None:
    """Return the name of a linear of the first block, by the name of the architecture there."""
    own = [arch for arch, name in architectures().items() if name == kind]
    given = [name for arch in own or architectures() if (name := _name_map(arch).get_name(linear)) is not None]
    return collections.Counter(given).most_common(1)[0][0] if given else None


def architectures() -> dict[Any, str]:
    """Return the architectures of the package gguf, with their names; CheckpointError where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            "for the names that linears have in GGUF files install the package gguf: pip install 'compress-llm[gguf]'"
        ) from error
    return dict(gguf.MODEL_ARCH_NAMES)


@functools.cache
def _name_map(arch: Any) -> Any:
    import gguf

    return gguf.get_tensor_name_map(arch, 1)


def dtype(header: GgufHeader) -> torch.dtype:
    """Return the type of the model: of most values if all are stored as numbers, bfloat16 if some are in blocks."""
    sizes: dict[torch.dtype, int] = {}
    for entry in header.tensors.values():
        plain = gguf_blocks.PLAIN.get(entry.type)
        if plain is None:
            return torch.bfloat16
        sizes[plain] = sizes.get(plain, 0) + math.prod(entry.shape)
    return max(sizes, key=lambda each: sizes[each], default=torch.float32)


def _weights(model: transformers.PreTrainedModel, header: GgufHeader) -> dict[str, dict[str, Any]]:
    """Return weight -> its shape and the names of the tensors that make it."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    named = get_gguf_hf_weights_map(model, processor)
    state = model.state_dict()
    weights: dict[str, dict[str, Any]] = {}
    for tensor in header.tensors:
        name = named.get(tensor, named.get(tensor.removesuffix(".weight")))  # experts have no .weight there
        if name is not None:
            made = weights.setdefault(name, {"shape": list(state[name].shape), "from": []})
            made["from"].append(tensor)
    return weights


def _stretch(file: Path, header: GgufHeader, config: transformers.PretrainedConfig) -> list[str]:
    """Write into the configuration how the file stretches positions; return the tensors that say so and nothing else.

    Raises UnsupportedModelError for a way that is not known.
    """
    text = config.get_text_config()
    known = getattr(text, "rope_parameters", None) or {}
    is_nested = any(isinstance(each, dict) for each in known.values())  # by kind of layer; only one is stretched
    own = known.get(STRETCHED, {}) if is_nested else known
    if FREQUENCIES in header.tensors:
        added, unused = _stretched_by_tensor(file, header, own), [FREQUENCIES]
    else:
        added, unused = _stretched_by_factor(file, header, own), []
    if added:
        text.rope_parameters = {**known, STRETCHED: {**own, **added}} if is_nested else {**known, **added}
    return unused


def _stretched_by_factor(file: Path, header: GgufHeader, known: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a file's metadata gives, {} if positions are as they are or transformers has read it."""
    prefix = f"{header.architecture}."
    kind, factor = header.metadata.get(prefix + KIND, "none"), header.metadata.get(prefix + FACTOR)
    if kind == "none" or known.get("rope_type", "default") != "default":
        return {}
    original = header.metadata.get(prefix + ORIGINAL_LENGTH)
    if kind == "linear" and factor:
        return {"rope_type": kind, "factor": factor}
    if kind == "yarn" and factor and original:
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModelError(f"{file} stretches positions in a way that is not known ({shown(kind)}); not read")


def _stretched_by_tensor(file: Path, header: GgufHeader, known: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that give the divisors of the rotary frequencies in a file, computed anew and compared."""
    divisors = values(header.tensors[FREQUENCIES]).tolist()
    bands = Bands(max(divisors))
    expected = bands.divisors(float(known.get("rope_theta", 10000.0)), len(divisors))
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)):
        raise UnsupportedModelError(f"{file} stretches positions in a way that is not known ({FREQUENCIES}); not read")
    return {"rope_type": "llama3", **bands._asdict()}


@contextmanager
def _one_line(file: Path, header: GgufHeader) -> Iterator[None]:
    """Turn what is raised for metadata that transformers cannot read into one clear line."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise CheckpointError(f"to read {file} install the package gguf: pip install 'compress-llm[gguf]'") from error
    try:
        yield
    except FAILURES as error:
        raise UnsupportedModelError(
            f"{file}: GGUF files of architecture {shown(header.architecture)} with these settings are not read "
            f"({first_line(error)}); give the checkpoint that it was made of"
        ) from error


@contextmanager
def _quick_reader() -> Iterator[None]:
    """Let the package gguf read lists, such as a vocabulary, in one pass over their bytes, and each file once.

    It makes several numpy arrays for each of several hundred thousand tokens else, and transformers asks twice.
    """
    import gguf

    plain: Any = gguf.GGUFReader

    class QuickReader(plain):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            kinds = gguf.GGUFValueType
            head = memoryview(self.data)[orig_offs : orig_offs + LIST_HEAD.size]
            if raw_type != kinds.ARRAY or self.byte_order != "I" or len(head) < LIST_HEAD.size:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = LIST_HEAD.unpack(head)
            if kind == kinds.STRING:
                entries, end = _texts(memoryview(self.data), orig_offs + LIST_HEAD.size, count)
            elif kind in self.gguf_scalar_to_np:
                numbers = self._get(orig_offs + LIST_HEAD.size, self.gguf_scalar_to_np[kind], count)
                entries, end = list(numbers[:, None]), orig_offs + LIST_HEAD.size + numbers.nbytes
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [kinds.ARRAY, *([kinds(kind)] if count else [])]
            return end - orig_offs, entries, list(range(len(entries))), types

    setattr(gguf, plain.__name__, functools.cache(QuickReader))
    try:
        yield
    finally:
        setattr(gguf, plain.__name__, plain)


def _texts(raw: memoryview, start: int, count: int) -> tuple[list[bytes], int]:
    """Return a list of texts, each behind its length, and where it ends; ValueError where the bytes end first."""
    texts, at, size = list[bytes](), start, len(raw)
    for _ in range(count):
        (length,) = TEXT_HEAD.unpack_from(raw, at)
        at += TEXT_HEAD.size + length
        if at > size:
            raise ValueError(f"a text of {length} bytes, behind which the file ends")
        texts.append(bytes(raw[at - length : at]))
    return texts, at
