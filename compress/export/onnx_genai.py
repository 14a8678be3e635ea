"""Write genai_config.json, which tells onnxruntime-genai what inputs a graph of ours has, and how tokens are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress.export.convert import Export
from compress.export.onnx_graph import FILE, has_positions
from compress.model.cache_pass import CachedHeads
from compress.storage.checkpoint import read_json, write_text

CONFIG = "genai_config.json"
GENERATION = "generation_config.json"
KIND = "decoder"  # any model that reads tokens and caches keys and values: the names of models are a closed list


def write(export: Export, out: Path, heads: list[CachedHeads]) -> None:
    """Write the file, unless heads differ between layers, or between keys and values: genai knows one size for all."""
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
