"""Load a checkpoint through transformers as a user will, with all weights on the meta device.

`from_pretrained` itself runs: it replaces linears, renames and merges tensors, and initializes what no tensor fills, so
that a class that cannot load the checkpoint says so. No weight is kept in memory. What is only planned can be loaded
too, from the names, shapes and types of the tensors to be written.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from compress import formats
from compress.errors import CheckpointError, CompressError, UnsupportedModelError, cut, first_line
from compress.model import stored_weights
from compress.model.architectures import opener
from compress.model.load import FAILURES, load_empty, open_config
from compress.model.meta_pass import Unread, UnreadTable, WeightReadError, run_without_data
from compress.model.skeleton import Skeleton
from compress.runtime import hf
from compress.runtime.embedding import LIKE, PackedEmbedding
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from compress.types import Plan


def check_written(directory: Path) -> None:
    """Load a checkpoint from its files, as `load_model` does and by every class that its configuration names.

    Raises CheckpointError if one of them raises, or does not find a weight in its shape.
    """
    model = _load(None, directory)
    checkpoint = open_checkpoint(directory)
    stored_weights.check(model, checkpoint, stored_weights.sources(model, checkpoint))
    for kind in _named_classes(open_config(directory), type(model)):
        _load(kind, directory)


def check_planned(skeleton: Skeleton, plan: Plan) -> None:
    """Load what a run will write, by the same classes, and run it without data.

    Experts stay as they are: there may be tens of thousands of linears, all in modules of our own (runtime/experts.py).
    Draft heads are nothing of the model.
    Raises UnsupportedModelError if a class cannot load it, or reads a weight that will be packed.
    """
    layers = [layer for layer in plan.packed if not layer.spec.is_expert and layer not in plan.draft_layers]
    packed = hf.build_config({layer.spec.name: layer.stored for layer in layers}).to_dict()
    replaced = {stored.name for layer in layers for stored in skeleton.weight_sources(layer.spec)}
    tables = {f"{name}.{LIKE}": torch.empty(0, dtype=skeleton.dtype, device="meta") for name in plan.embedding_tables}
    tensors = tables | {
        f"{layer.spec.name}.{key}": torch.empty(shape, dtype=dtype, device="meta")
        for layer in layers
        for key, (shape, dtype) in formats.specs(layer.stored, layer.spec.shape).items()
    }
    for group in skeleton.sources.values():
        for stored in group:
            if stored.name not in replaced:
                tensors[stored.name] = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    causal = type(skeleton.model)
    of_model, whole = skeleton.tied_configs if plan.tables_are_shared else (skeleton.model.config, skeleton.config)
    for kind in (causal, *_named_classes(whole, causal)):
        config = copy.deepcopy(of_model if kind is causal else whole)
        config.quantization_config = packed
        try:
            model = _load(kind, config=config, state_dict=tensors, dtype=skeleton.dtype)
            if kind is causal:
                _check_forward(model)
        except CheckpointError as error:
            advice = "list what is at fault under ignore in the recipe, or give a model of another architecture"
            if kind is not causal:
                advice = f'for its text part alone, set architectures in config.json to ["{causal.__name__}"]'
            raise UnsupportedModelError(
                f"{skeleton.checkpoint.directory}: what would be written could not be loaded: {error}; {advice}"
            ) from error


def _load(kind: type[PreTrainedModel] | None, directory: Path | None = None, **options: Any) -> PreTrainedModel:
    """Return the model on the meta device; CheckpointError says in one line what goes wrong."""
    chosen: Any = kind
    try:
        chosen = kind or opener(open_config(cast(Path, directory)))
        model, info = load_empty(chosen, directory, **options)
    except (CompressError, *FAILURES) as error:
        reason = str(error) if isinstance(error, CompressError) else f"{type(error).__name__}: {first_line(error)}"
        called = "AutoConfig" if chosen is None else chosen.__name__
        raise CheckpointError(f"transformers' {called} fails ({cut(reason, 300)})") from error
    absent = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if absent:
        raise CheckpointError(
            f"transformers' {type(model).__name__} finds {len(absent)} of its weights not at all or in another shape, "
            f"first {absent[0]}"
        )
    return model


def _check_forward(model: PreTrainedModel) -> None:
    """Raise CheckpointError if the forward pass of a loaded model reads the weight of a packed linear itself."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts) or is_fused_experts(module):
            model.set_submodule(name, Unread(name, module))
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, Unread(name, module, "weight" in vars(module)))
        if isinstance(module, PackedEmbedding):
            columns, dtype = module.shape[1], module.like.dtype
            model.set_submodule(name, UnreadTable(name, columns, dtype, module.padding_idx))
    if isinstance(error := run_without_data(model), WeightReadError):
        raise CheckpointError(f"transformers' {type(model).__name__} reads the weight of {error} itself")


def _named_classes(config: PretrainedConfig, causal: type) -> Iterator[type[PreTrainedModel]]:
    """Yield the classes of transformers that the configuration names for itself, other than `causal`."""
    for name in config.architectures or ():
        kind = getattr(transformers, str(name), None)
        if not isinstance(kind, type) or not issubclass(kind, PreTrainedModel):
            continue
        if kind is not causal and kind.config_class is type(config):
            yield kind
