"""Draft heads (multi-token prediction): which tensors of a checkpoint are theirs, and a head that is opened.

A head is a layer behind the last block. From the hidden state of a token (behind the model's last norm) and the
embedding of the next token it predicts the token after that, through the model's own output head (DeepSeek-V3, arXiv
2412.19437, section 2.2). transformers' class of the model does not hold it; `MtpModel` of transformers 5.20 and later
runs the heads of those families whose head is a block like the model's own.

Checkpoints store heads as further layers, `model.layers.{L + i}` (DeepSeek-V3, GLM-4.5, Step-3.5), or below `mtp`
(Qwen3-Next, DeepSeek-V4, MiMo-V2). Their names are never changed: engines ask for them.

`MtpModel.from_pretrained`, which `generate(use_mtp=True)` calls, reads plain tensors beside a plain model. `register`
puts `open_heads` in its place for packed models; any other model is left to it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.errors import CheckpointError
from compress.runtime.linear import PackedModule
from compress.storage.checkpoint import open_checkpoint

if TYPE_CHECKING:  # this file is imported while transformers.modeling_utils may be half loaded
    from transformers import PretrainedConfig

BELOW = re.compile(r"(?:^|\.)(?:mtp\w*|nextn\w*)\.")
BEHIND = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
OWN_INDEX = re.compile(r"(?:^|\.)(?:mtp\.layers|mtp_layers|mtp)\.(\d+)\.")
PlacePacked = Callable[[nn.Module, Any], Any]  # (model, quantization_config) -> the quantizer for loading
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
PARTS_OF_MODEL = ("embed_tokens.", "shared_head.")  # the model itself holds them


def is_of_head(name: str, config: PretrainedConfig) -> bool:
    """Return whether a stored tensor, or a module, of such a model has the name of a draft head's."""
    if BELOW.search(f"{name}."):
        return True
    text, number = config.get_text_config(), BEHIND.match(f"{name}.")
    counts = (getattr(text, key, None) for key in COUNTS)
    return number is not None and any(counts) and int(number[1]) >= text.num_hidden_layers


def place(name: str, layers: int) -> tuple[int, str]:
    """Return the number of the head that a module belongs to, from 0, and the module's name within it.

    layers: blocks of the model. What lies beside the layers of a head (a norm, the joining projection) is of head 0.
    """
    if (number := BEHIND.match(f"{name}.")) is not None:
        return int(number[1]) - layers, name[number.end() :]
    number = OWN_INDEX.search(f"{name}.")
    return (int(number[1]), name[number.end() :]) if number is not None else (0, name.rpartition(".")[2])


def path_in_opened(name: str, layers: int) -> str:
    """Return where `MtpModel` has the linear of a head's block that a checkpoint calls `name`."""
    return "layers.{}.mtp_block.{}".format(*place(name, layers))


def describe(config: PretrainedConfig, names: Iterable[str]) -> None:
    """Say in a configuration in memory what `MtpModel` asks for, where the family's own keys do not; names: of heads.

    A head's block has full attention, and experts if any are stored.
    """
    text, known = config.get_text_config(), list(names)
    count = 1 + max((place(name, text.num_hidden_layers)[0] for name in known), default=0)
    is_sparse = any(".experts." in name for name in known)
    wanted = {"num_mtp_layers": count}
    kinds = {"layer_types": "full_attention", "mlp_layer_types": "sparse" if is_sparse else "dense"}
    wanted |= {f"mtp_{key}": [kind] * count for key, kind in kinds.items() if getattr(text, key, None)}  # type: ignore[misc]
    for key, value in wanted.items():
        if not isinstance(getattr(text, key, None), type(value)):
            setattr(text, key, value)


def open_heads(
    model: Any,
    tensors: Mapping[str, Any],
    packed: Any = None,
    place_packed: PlacePacked | None = None,
    device: str = "cpu",
) -> Any:
    """Return the `MtpModel` of a model, filled with the stored tensors of its heads, in eval mode on a device.

    model: its embeddings, head and rotary tables are shared. tensors: by their names on disk, read when they are
    needed. packed: the `quantization_config` that lists packed linears among them, for which `place_packed` replaces
    modules. Raises CheckpointError for heads that transformers cannot run,
    and for tensors that are missing.
    """
    try:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_layers import MtpModel
        from transformers.modeling_utils import LoadStateDictConfig

        if not hasattr(MtpModel, "forward_layer"):
            raise ImportError("one head cannot be run alone")
    except ImportError as error:
        raise CheckpointError("this transformers does not run draft heads; install 5.20 or later") from error
    layers = model.config.get_text_config().num_hidden_layers
    describe(model.config, tensors)
    own = () if packed is None else tuple(f"{name}." for name in packed.draft_heads)
    try:
        with torch.device("meta"):
            heads = MtpModel(model, model.config.get_text_config().num_mtp_layers)
        renamed = {_opened_name(name, own, layers): tensor for name, tensor in tensors.items()}
        quantizer = None
        if packed is not None and place_packed is not None:
            modules = {path_in_opened(name, layers): packed.modules[name] for name in packed.draft_heads}
            quantizer = place_packed(heads, type(packed)(default=packed.default, modules=modules))
        options = LoadStateDictConfig(
            weight_mapping=_conversions(heads, model),
            dtype=model.dtype,
            device_map={"": device},
            hf_quantizer=quantizer,
        )
        info, _ = convert_and_load_state_dict_in_model(heads, renamed, options)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(
            f"transformers cannot open the draft heads of {type(model).__name__} ({error})"
        ) from error
    missing = sorted(name for name in info.missing_keys if not name.startswith(PARTS_OF_MODEL))
    if missing or info.conversion_errors or info.mismatched_keys:
        first = [*missing, *info.conversion_errors, *info.mismatched_keys][0]
        raise CheckpointError(f"the draft heads of {type(model).__name__} lack {first}, or have it in another shape")
    for parameter in heads.layers.parameters():
        parameter.requires_grad_(False)
    for name, module in heads.layers.named_modules():
        if isinstance(module, PackedModule):
            module.check(f"layers.{name}")
    return heads.eval()


def _conversions(heads: Any, model: Any) -> list[Any]:
    """Return what transformers does to names and tensors of heads.

    A model remembers the conversions that it has used itself: of experts none, where they are packed or are read later.
    """
    used = vars(model).pop("_weight_conversions", None)
    mapping: list[Any] = heads.get_weight_conversions(model)
    if used is not None:
        model._weight_conversions = used
    return mapping


def _opened_name(name: str, packed: Iterable[str], layers: int) -> str:
    """Return the name of a packed tensor in `MtpModel`; plain ones are renamed by transformers."""
    own = next((module for module in packed if name.startswith(module)), None)
    return name if own is None else f"{path_in_opened(own[:-1], layers)}.{name.removeprefix(own)}"


def offer(model: Any, names: Collection[str], place_packed: PlacePacked) -> None:
    """Let `generate(use_mtp=True)` use the heads of a packed model that is about to be loaded; names: packed linears.

    transformers does not name what is stored of them as unexpected, at whatever depth they lie.
    """
    register(place_packed)
    if names:
        describe(model.config, names)
    starts = {match[0] for name in names if (match := BEHIND.match(f"{name}.") or BELOW.search(f"{name}."))}
    known = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*known, *map(re.escape, starts)}


def register(place_packed: PlacePacked) -> None:
    """Let `MtpModel` open the heads of packed checkpoints; again does no harm."""
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        return
    stock: Any = MtpModel.from_pretrained.__func__  # type: ignore[attr-defined]
    if getattr(stock, "opens_packed", False):
        return

    @functools.wraps(stock)
    def open_packed(cls: Any, main_model: Any, *args: Any, **options: Any) -> Any:
        packed, config = getattr(main_model.config, "quantization_config", None), main_model.config
        if not hasattr(packed, "draft_heads"):
            return stock(cls, main_model, *args, **options)
        checkpoint = open_checkpoint(Path(config.name_or_path))
        tensors = {name: stored.read() for name, stored in checkpoint.tensors.items() if is_of_head(name, config)}
        base: nn.Module = main_model.get_decoder()
        return open_heads(main_model, tensors, packed, place_packed).to(next(base.parameters()).device)

    open_packed.opens_packed = True  # type: ignore[attr-defined]
    MtpModel.from_pretrained = classmethod(open_packed)  # type: ignore[assignment]
