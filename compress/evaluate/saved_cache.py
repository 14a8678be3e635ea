"""Save the cache of a prompt that a model has read, and let a model go on from a saved one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache

from compress.evaluate.generation import prompt_ids
from compress.evaluate.reader import Reader, fill
from compress.kv import generation
from compress.kv.cache import layer_types, make_cache
from compress.kv.saved import check_layers, load_cache, raw_nbytes, save_cache, token_ids
from compress.kv.saved.file import SavedFile
from compress.model import load as lm
from compress.model import writing
from compress.runtime import kv_config
from compress.storage.checkpoint import read_config

CHUNK_TOKENS = 1024  # tokens of a prompt at a time: bounds activations


@dataclass(frozen=True)
class Saved:
    """What a file holds."""

    tokens: int
    nbytes: int  # of the file
    raw_nbytes: int  # of keys and values as the model computed them
    quality: str
    seconds: float | None = None  # to compute the prompt and to save it


def describe(path: Path) -> Saved:
    """Return what a file holds; its small parts are checked. Raises CheckpointError for one that is none."""
    return _facts_of(SavedFile(path))


def _facts_of(file: SavedFile, seconds: float | None = None) -> Saved:
    tokens = file.parts["tokens"].shape
    return Saved(tokens[0] * tokens[1], file.path.stat().st_size, raw_nbytes(file), file.facts["quality"], seconds)


def save(directory: Path, prompt: str, out: Path, quality: str, device: str = "cpu") -> Saved:
    """Let a model read a prompt and save its cache: the checkpoint's own if it has one, else keys and values.

    quality: a key of `compress.kv.saved.NOISE`. Raises CalibrationError for a prompt without tokens, CompressError for
    one that is too long, UnsupportedModelError for a cache that cannot be saved, all before the model is loaded.
    """
    ids = torch.tensor([prompt_ids(directory, prompt)])
    config = lm.load_config(directory)
    generation.check_length(config, ids.shape[1])
    check_layers(_empty(directory, config))
    model = lm.load_model(directory, "auto", device)
    began = time.perf_counter()
    cache: Any = generation.fresh(model) if hasattr(model, "kv_cache") else Reader(model).new_cache()
    with torch.no_grad():
        text = ids.to(model.device)
        for start in range(0, text.shape[1], CHUNK_TOKENS):
            fill(model, text[:, : start + CHUNK_TOKENS], cache, start)
    file = save_cache(cache, out, model, ids, quality, {"model_name": directory.name})
    return _facts_of(file, time.perf_counter() - began)


def _empty(directory: Path, config: Any) -> Cache:
    """Return a cache of the kind that a checkpoint makes, of a model that is not loaded."""
    section = kv_config.stored_section(read_config(directory))
    if section is None:
        return DynamicCache(config=config)
    return make_cache(config, kv_config.read(section, len(layer_types(config))))


def write_on(
    directory: Path,
    path: Path,
    prompt: str,
    max_new_tokens: int,
    draw: tuple[float, int] = (0.0, 0),
    device: str = "cpu",
) -> str:
    """Return what a model writes after a saved prompt and `prompt`, which may be empty.

    draw: temperature and seed. Raises CheckpointError for a file that is damaged or of another model.
    """
    file = SavedFile(path)
    ids, more = token_ids(file), prompt_ids(directory, prompt, is_first=False) if prompt else []
    model = lm.load_model(directory, "auto", device)
    cache = cast(Any, load_cache(model, file))
    if not more:
        cache.crop(-1)  # the last token goes through the model again: what it says of the next one was not saved
    start = torch.cat((ids, torch.tensor([more], dtype=torch.int64)), 1)
    temperature, seed = draw
    drawn = writing.Draw(directory.name, temperature, torch.Generator().manual_seed(seed))
    stop = writing.end_tokens(model)
    written = writing.write(model, start, max_new_tokens, drawn, stop, past_key_values=cache)[0].tolist()
    tokenizer = lm.load_tokenizer(directory)
    whole, before = (cast(str, tokenizer.decode(part, skip_special_tokens=True)) for part in (written, start[0]))
    return whole.removeprefix(before)
