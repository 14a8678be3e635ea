"""Trace a model as an ONNX graph by torch.onnx, and write it with its tensors in a file beside it.

Inputs are input_ids, attention_mask and position_ids (if the model takes them), and the keys and values of the tokens
before. Outputs are the logits, and the keys and values of all tokens. Names and shapes are those of onnxruntime-genai:

    input_ids, position_ids     int64 [batch, sequence]
    attention_mask              int64 [batch, past + sequence]
    past_key_values.<layer>.key, .value, present.<layer>.key, .value    [batch, heads, tokens, width]
    logits                      [batch, sequence, vocabulary]

A tensor is read from the checkpoint when it is written: memory is bounded by the largest, not by the model.
genai_config.json beside the graph tells onnxruntime-genai what inputs it has, and how tokens are drawn.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from compress.errors import ExportError, first_line
from compress.export.convert import Export
from compress.export.targets.onnx.nodes import Maker, stand_ins
from compress.model.cache_pass import CachedHeads, cached_layers
from compress.runtime import expert_layouts
from compress.runtime.expert_layouts import SORTED, ExpertLayout
from compress.runtime.experts import Experts
from compress.storage.checkpoint import read_json, write_text

FILE = "model.onnx"
DATA = "model.onnx.data"
BATCH, SEQUENCE, PAST = 2, 4, 3  # sizes of the inputs that are traced, all of which stay free in the graph
CONFIG = "genai_config.json"
GENERATION = "generation_config.json"
KIND = "decoder"  # any model that reads tokens and caches keys and values: the names of models are a closed list
KEPT = ("key", "value")


class DecodeStep(nn.Module):
    """Read tokens after those whose keys and values are given."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        past: list[tuple[Tensor, Tensor]],
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cache = DynamicCache(past)
        positions = {} if position_ids is None else {"position_ids": position_ids}
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **positions
        )
        return out.logits, [(layer.keys, layer.values) for layer in out.past_key_values.layers]


def cached_heads(export: Export) -> list[CachedHeads]:
    """Return what each layer caches; ExportError for models that cache other things than keys and values."""
    config = export.source.skeleton.config
    cached = cached_layers(config)
    layers = range(config.get_text_config().num_hidden_layers)
    if cached.own_cache or [*cached.by_layer] != [*layers]:
        raise ExportError(
            f"models of type {config.model_type} do not cache keys and values of their own in every layer, which are "
            "inputs of the ONNX graph; export to another target"
        )
    return [cached.by_layer[layer] for layer in layers]


def check(export: Export) -> None:
    """Raise ExportError for models whose graph would not be the same function, or would not be packed."""
    skeleton = export.source.skeleton
    if skeleton.text_path.towers or skeleton.text_path.skipped:
        raise ExportError("the ONNX target writes models of text alone; export a model with images to another target")
    cached_heads(export)
    packed = {weight.module.rsplit(".", 2)[0] for weight in export.held if weight.is_expert}
    for name, module in skeleton.model.named_modules():
        layout = module.layout if isinstance(module, Experts) else expert_layouts.describe(module)
        if layout is None:
            continue
        if not isinstance(layout, ExpertLayout) or layout.call == SORTED:
            raise ExportError(f"the experts of {name} cannot be traced as a graph; export to dense")
        if name not in packed:
            raise ExportError(f"the ONNX target writes no plain experts, as those of {name} are; quantize them, too")


def write(export: Export, out: Path, heads: list[CachedHeads]) -> None:
    """Write the graph and its tensors into the directory `out`; heads: what each layer caches.

    Raises ExportError for a model that torch.onnx cannot trace, and for numbers that their type does not hold.
    """
    import onnx_ir

    model, makers = stand_ins(export)
    model.set_attn_implementation("eager")  # plain operations, which every version of ONNX has
    with _quiet():
        program = _trace(model, heads, export.dtype)
        for name, value in program.model.graph.initializers.items():
            if name.removeprefix("model.") in makers:
                value.const_value = None  # zeros are not to be computed with
        program.optimize()
    for name, value in program.model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = _lazy(name, value, makers[name.removeprefix("model.")])
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # where in the sources of this machine it comes from
    onnx_ir.save(program.model, out / FILE, external_data=DATA, callback=_progress_callback(export))


def _trace(model: PreTrainedModel, heads: list[CachedHeads], dtype: torch.dtype) -> Any:
    """Return the ONNX program of one step; ExportError if there is none for sequences of all lengths."""
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    mask = torch.ones(BATCH, PAST + SEQUENCE, dtype=torch.long)
    past = [tuple(torch.zeros(BATCH, *_rows(size), dtype=dtype) for size in (each.keys, each.values)) for each in heads]
    sequence, total, cached = {0: "batch", 1: "sequence"}, {0: "batch", 1: "total"}, {0: "batch", 2: "past"}
    arguments: tuple[Any, ...] = (ids, mask, past)
    shapes: tuple[Any, ...] = (sequence, total, [(cached, cached)] * len(heads))
    names = ["input_ids", "attention_mask", *_cache_names("past_key_values", len(heads))]
    if has_positions(model):
        arguments += (torch.arange(PAST, PAST + SEQUENCE).repeat(BATCH, 1),)
        shapes += (sequence,)
        names.append("position_ids")
    try:
        with torch.no_grad():
            return torch.onnx.export(
                DecodeStep(model).eval(),
                arguments,
                dynamic_shapes=shapes,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=names,
                output_names=["logits", *_cache_names("present", len(heads))],
            )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(
            f"torch.onnx cannot write {type(model).__name__} as a graph ({first_line(error.__cause__ or error)}); "
            "export it to another target"
        ) from error


def _rows(size: tuple[int, int]) -> tuple[int, int, int]:
    return size[0], PAST, size[1]


def has_positions(model: PreTrainedModel) -> bool:
    """Return whether the model is told the positions of its tokens."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _cache_names(name: str, layers: int) -> list[str]:
    return [f"{name}.{layer}.{kept}" for layer in range(layers) for kept in KEPT]


def _lazy(name: str, value: Any, maker: Maker) -> Any:
    """Return a tensor of the graph that is made whenever it is asked for."""
    import onnx_ir

    return onnx_ir.LazyTensor(lambda: onnx_ir.tensor(maker().numpy(), name=name), value.dtype, value.shape, name=name)


def _progress_callback(export: Export) -> Any:
    def report(tensor: Any, written: Any) -> None:
        export.progress(f"writing {tensor.name}", written.index, written.total)

    return report


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch.onnx, torch.export and onnx_ir say of their own matters."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in ("torch.onnx", "onnx_ir")}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def write_genai_config(export: Export, out: Path, heads: list[CachedHeads]) -> None:
    """Write genai_config.json; leave it out where heads differ in size, of which genai knows one for all."""
    sizes = {size for each in heads for size in (each.keys, each.values)}
    if len(sizes) != 1:
        export.notes.append(f"{CONFIG} is not written: onnxruntime-genai knows no models whose heads differ in size")
        return
    ((count, width),) = sizes
    config = export.source.skeleton.config.get_text_config()
    stated = _generation(export)
    end = stated.get("eos_token_id", config.eos_token_id)
    first = end[0] if isinstance(end, list) else end
    begin, padding = (stated.get(name, getattr(config, name)) for name in ("bos_token_id", "pad_token_id"))
    length = getattr(config, "max_position_embeddings", None) or 4096
    inputs = {name: name for name in ("input_ids", "attention_mask")}
    if has_positions(export.source.skeleton.model):
        inputs["position_ids"] = "position_ids"
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": FILE,
        "head_size": width,
        "hidden_size": config.hidden_size,
        "inputs": {
            **inputs,
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": len(heads),
        "num_key_value_heads": count,
    }
    tokens = {
        "bos_token_id": first if begin is None else begin,
        "eos_token_id": end,
        "pad_token_id": first if padding is None else padding,
    }
    model = {"type": KIND, "context_length": length, "vocab_size": config.vocab_size, "decoder": decoder, **tokens}
    search: dict[str, Any] = {
        "max_length": length,
        "past_present_share_buffer": False,
        **{name: stated[name] for name in ("do_sample", "temperature", "top_k", "top_p") if name in stated},
    }
    write_text(out / CONFIG, json.dumps({"model": model, "search": search}, indent=2) + "\n")


def _generation(export: Export) -> dict[str, Any]:
    """Return what the checkpoint says of writing text, without what it leaves open."""
    file = export.source.directory / GENERATION
    if not file.is_file():
        return {}
    stated: dict[str, Any] = read_json(file)
    return {name: value for name, value in stated.items() if value is not None}
