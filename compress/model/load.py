"""Open configurations, tokenizers and whole models, always in the same safe way.

Nothing else in this package calls `from_pretrained` or `from_config` of transformers. Here they run no code that comes
with a checkpoint, read weights from safetensors files only, and never ask the hub. Evaluation, generation and
self-generated calibration text need the whole model in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer, GenerationConfig
from transformers.integrations import accelerate as placing
from transformers.utils import logging

from compress.errors import CheckpointError, first_line, shown
from compress.importers import open_checkpoint
from compress.model import architectures, pairs, stored_weights
from compress.model.architectures import LANGUAGE, Task, opener
from compress.runtime import hf
from compress.storage import manifest
from compress.storage.checkpoint import MANIFEST, Checkpoint, Readable, read_config

DTYPES = ("auto", "float32", "float16", "bfloat16")
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
FAILURES = (  # what transformers raises for a damaged checkpoint
    *(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError, ImportError),
    *(AssertionError, StrictDataclassError, SafetensorError),
)


def open_config(directory: Path, gguf_file: str | None = None) -> transformers.PretrainedConfig:
    """Return the configuration of the whole model; errors are those of transformers.

    gguf_file: a file in the directory whose metadata is the configuration, in the place of config.json.
    """
    config: transformers.PretrainedConfig = AutoConfig.from_pretrained(directory, gguf_file=gguf_file, **_LOCAL)
    return config


def plain_config(directory: Path) -> transformers.PretrainedConfig:
    """Return the configuration of the whole model as if it were not quantized; errors are those of transformers."""
    config = open_config(directory)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def empty_model(config: transformers.PretrainedConfig, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Return a language model without weights from a checkpoint; errors are those of transformers."""
    model: transformers.PreTrainedModel = opener(config).from_config(config, dtype=dtype, trust_remote_code=False)
    return model


@contextmanager
def without_weights() -> Iterator[None]:
    """Put the parameters of modules that are built meanwhile on the meta device; buffers keep their values."""
    register = torch.nn.Module.register_parameter

    def register_empty(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            empty = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
            empty.__dict__.update(parameter.__dict__)  # marks that transformers has put on it
            parameter = empty
        register(module, name, parameter)

    setattr(torch.nn.Module, register.__name__, register_empty)
    try:
        yield
    finally:
        setattr(torch.nn.Module, register.__name__, register)


def load_config(directory: Path) -> transformers.PretrainedConfig:
    """Return the configuration of the text model; its vocab_size is the number of token ids that the model knows."""
    return whole_config(directory).get_text_config()


def whole_config(directory: Path) -> transformers.PretrainedConfig:
    """Return the configuration of the whole model."""
    open_checkpoint(directory)  # sizes are compared with what is stored before anything is built by them
    try:
        return open_config(directory)
    except FAILURES as error:
        raise CheckpointError(
            f"{directory}: transformers cannot read its configuration ({first_line(error)})"
        ) from error


def separator(directory: Path, config: transformers.PretrainedConfig) -> int | None:
    """Return the token that ends the first text of a pair, for a model that tells the two apart; None for any other."""
    if getattr(config, "type_vocab_size", 0) < 2 or not architectures.scores_pairs(config):
        return None
    try:
        between = pairs.around_pair(load_tokenizer(directory)).between
    except CheckpointError:
        return None
    return between[0] if between else None


def load_tokenizer(directory: Path) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer in a checkpoint directory."""
    read_config(directory)
    try:
        with quiet(), _bare_errors():
            tokenizer = AutoTokenizer.from_pretrained(directory, **_LOCAL)
    except FAILURES as error:
        raise CheckpointError(f"{directory} has no readable tokenizer ({first_line(error)})") from error
    if type(tokenizer.model_max_length) not in (int, float):
        raise CheckpointError(
            f"{directory}: model_max_length {shown(tokenizer.model_max_length)} of the tokenizer is no number; correct "
            "it in tokenizer_config.json"
        )
    return tokenizer


def load_feature_extractor(directory: Path) -> Any:
    """Return what makes features of sound for the model in a checkpoint directory."""
    try:
        with quiet():
            return AutoFeatureExtractor.from_pretrained(directory, **_LOCAL)
    except FAILURES as error:
        raise CheckpointError(f"{directory} has no readable feature extractor ({first_line(error)})") from error


def gguf_tokenizer(directory: Path, file: str) -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer that the metadata of a GGUF file in the directory describes; errors as transformers has."""
    with quiet(), _bare_errors():
        tokenizer: transformers.PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, gguf_file=file, **_LOCAL
        )
    return tokenizer


def load_model(
    directory: Path,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    device_map: str | dict[str, Any] | None = None,
    verify: bool = False,
    tasks: Collection[Task] | None = LANGUAGE,
) -> transformers.PreTrainedModel:
    """Return the model, packed or plain, in eval mode; dtype "auto" is that of the checkpoint.

    tasks: what it may be for, None for anything; UnsupportedModelError for a model of another purpose.

    device_map, if any, takes the place of device, as in `from_pretrained`. verify: compare the hash of every file with
    the manifest. What another tool has quantized is decoded. Raise CheckpointError for a checkpoint that does not hold
    every weight: transformers would fill in random ones. A plain one must hold nothing else either, because what
    transformers leaves out may be the scales of the rest.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(directory)  # files, index and headers are whole, or one clear line
    _check_files(checkpoint, verify)
    try:
        with quiet():
            if tasks is not None:
                architectures.check_task(open_config(directory), tasks)
            options: dict[str, Any] = {"dtype": dtype, "device_map": device_map, "ignore_mismatched_sizes": True}
            if checkpoint.base:
                loaded = _load_decoded(checkpoint, options)
            else:
                loaded = _load(opener(open_config(directory)), directory, options)
    except FAILURES as error:
        raise CheckpointError(f"{directory}: transformers cannot load it ({first_line(error)})") from error
    model, info = loaded
    absent = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if absent and all(architectures.is_head(model, name) for name in absent):
        raise CheckpointError(f"{directory} {architectures.without_head(model.config, absent[0])}")
    if absent:
        raise CheckpointError(
            f"{directory} lacks {len(absent)} of the model's weights, or has them in another shape, first {absent[0]}; "
            "its configuration and weights do not belong together"
        )
    if not checkpoint.config.get("quantization_config"):
        stored_weights.check(model, checkpoint, stored_weights.sources(model, checkpoint))
    if device_map is None:
        cast(torch.nn.Module, model).to(device)
    return model


class _Slice:
    """Stand for a tensor in a state dict, to be read when transformers comes to it."""

    def __init__(self, tensor: Readable) -> None:
        self.tensor, self.dtype = tensor, tensor.dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor.read()[index]


def _load_decoded(
    checkpoint: Checkpoint, options: Mapping[str, Any]
) -> tuple[transformers.PreTrainedModel, dict[str, Any]]:
    """Run `from_pretrained` on tensors that are decoded when it comes to them, and on the other files beside them."""
    directory, config = checkpoint.directory, plain_config(checkpoint.directory)
    with torch.device("meta"):
        kind = type(empty_model(copy.deepcopy(config), torch.float32))  # which writes the type into it
    tensors = {name: _Slice(tensor) for name, tensor in checkpoint.tensors.items()}
    model, info = _load(kind, None, {"config": config, "state_dict": tensors, **options})
    model.name_or_path = model.config.name_or_path = str(directory)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, **_LOCAL)
    return model, info


def _check_files(checkpoint: Checkpoint, verify: bool) -> None:
    """Raise CheckpointError for weights that are not those of the manifest.

    The quantizer of packed checkpoints (runtime/hf.py) compares them with the manifest, too, unless `verify` asks for
    more than it does.
    """
    directory = checkpoint.directory
    packed = checkpoint.config.get("quantization_config")
    is_ours = isinstance(packed, dict) and packed.get("quant_method") == hf.METHOD
    if verify or (not is_ours and (directory / MANIFEST).is_file()):
        weights = {file.name for file in checkpoint.files}
        manifest.check_loaded(directory, weights, verify or manifest.is_asked())


def load_empty(
    kind: Any, directory: Path | None = None, **options: Any
) -> tuple[transformers.PreTrainedModel, dict[str, Any]]:
    """Run `from_pretrained` of a class of transformers with weights on the meta device.

    Return the model and what transformers says of the loading; errors are those of transformers. Without a directory
    the options are `config` and `state_dict`.
    """
    with quiet(), _without_accelerate():
        return _load(kind, directory, {"device_map": "meta", **options})


@contextmanager
def _without_accelerate() -> Iterator[None]:
    """Let transformers load onto one device where accelerate is not installed: it asks for it, and does not use it."""
    if placing.is_accelerate_available():
        yield
        return
    asks = placing.is_accelerate_available
    setattr(placing, asks.__name__, lambda: True)
    try:
        yield
    finally:
        setattr(placing, asks.__name__, asks)


def _load(
    kind: Any, directory: Path | None, options: Mapping[str, Any]
) -> tuple[transformers.PreTrainedModel, dict[str, Any]]:
    """Run `from_pretrained` of a class of transformers; return what was loaded how."""
    loaded = kind.from_pretrained(directory, output_loading_info=True, use_safetensors=True, **options, **_LOCAL)
    return cast(tuple[transformers.PreTrainedModel, dict[str, Any]], loaded)


@contextmanager
def no_bars() -> Iterator[None]:
    """Silence progress bars of transformers and the hub, and leave the settings of both as they were."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    is_hub_quiet = are_progress_bars_disabled()
    logging.disable_progress_bar()  # the hub's too
    try:
        yield
    finally:
        logging.enable_progress_bar()
        if is_hub_quiet:
            disable_progress_bars()


@contextmanager
def _bare_errors() -> Iterator[None]:
    """Turn the errors of the tokenizers library, which have no type of their own, into ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception:
            raise
        raise ValueError(first_line(error)) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and load reports of transformers, and leave its settings as they were."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        logging.set_verbosity(verbosity)
