"""The cache of a checkpoint: settings in config.json, calibrated tensors in a file of their own.

    "quantization_config": {..., "kv_cache": {
        "version": 1,
        "method": "kivi", "keys": {...}, "values": {...},       every setting, so that later defaults change nothing
        "layers": {"0": {"keys": {...}, "values": {...}}},      layers that differ
        "exact_prefill": true, "other_layers": "error",
        "read": {"method": "double_sparsity", ...},             only where attention chooses the tokens that it reads
        "states": 12,                                           only where states of recurrences are coded
        "static": {"file": "kv_cache.safetensors", "sha256": "..."}     only where a codec is calibrated
    }}

The file's hash is in the configuration: a file of another model, of another run, cut short or damaged is refused when
the model is loaded, and never read as numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

from torch import Tensor
from transformers.utils import cached_file

from compress.errors import CheckpointError, shown
from compress.kv import generation
from compress.kv import static as calibrated
from compress.kv.cache import coded_layers, layer_types
from compress.kv.settings import KINDS, CacheSettings, cache_settings
from compress.kv.static import head_shape, states_heads
from compress.storage.checkpoint import CONFIG, read_header, sha256, write_shard

FILE = "kv_cache.safetensors"
LAYOUT_VERSION = 1
SNAPSHOTS = "snapshots"  # folder of the hub's cache that holds the files of commits


def plain_section(settings: CacheSettings, layer_count: int) -> dict[str, Any]:
    """Return the settings as config.json stores them: those of the most common layer, and the other layers."""
    layers = [{kind: codings[kind].plain() for kind in KINDS} for codings in settings.by_layer(layer_count)]
    counts = Counter(map(repr, layers))
    common = max(layers, key=lambda layer: counts[repr(layer)])  # the first of the most common
    return {
        "version": LAYOUT_VERSION,
        "method": common["keys"]["method"],
        **common,
        "layers": {str(index): layer for index, layer in enumerate(layers) if layer != common},
        "exact_prefill": settings.exact_prefill,
        "other_layers": settings.other_layers,
        **({"evict": settings.evict.plain()} if settings.evict is not None else {}),
        **({} if settings.read is None else {"read": settings.read.plain()}),
        **({} if settings.states is None else {"states": settings.states}),
    }


def stored_section(config: Mapping[str, Any]) -> Any:
    """Return the section of a config.json, None without one."""
    packed = config.get("quantization_config")
    return packed.get("kv_cache") if isinstance(packed, Mapping) else None


def write(directory: Path, settings: CacheSettings, layer_count: int, static: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write calibrated tensors to their file and return the section for config.json."""
    section = plain_section(settings, layer_count)
    if static:
        section["static"] = {"file": FILE, "sha256": write_shard(directory / FILE, static)}
    return section


def read(section: Mapping[str, Any], layer_count: int) -> CacheSettings:
    """Return the settings of a section, checked for a model of so many layers."""
    if not isinstance(section, Mapping):
        raise CheckpointError("quantization_config: kv_cache is not a table; write the checkpoint again")
    if section.get("version") != LAYOUT_VERSION:
        raise CheckpointError(
            f"quantization_config: kv_cache has version {shown(section.get('version'))}, this compress reads "
            f"{LAYOUT_VERSION}; upgrade compress"
        )
    settings = cache_settings({key: value for key, value in section.items() if key not in ("version", "static")})
    settings.by_layer(layer_count)
    return settings


def read_static(section: Mapping[str, Any], directory: Path, config: Any, settings: CacheSettings) -> dict[str, Tensor]:
    """Return the calibrated tensors of a checkpoint: what was written with it, and what its codecs read.

    config: of the model. Where it does not tell the shape of the keys, shapes and values are checked when the first
    keys come (compress/kv/cache.py `build`). Raises CheckpointError.
    """
    said = section.get("static")
    codings, is_certain = coded_layers(config, settings), states_heads(config)
    heads = head_shape(config) if is_certain else (1, 1, 1)  # of which only names are taken
    if said is None:
        with _refuse_damage(directory / CONFIG):
            calibrated.check_names(codings, heads, {}, is_certain, settings.read)
        return {}
    if not isinstance(said, Mapping) or said.get("file") != FILE or not isinstance(said.get("sha256"), str):
        raise CheckpointError(f"quantization_config: kv_cache.static names no {FILE} and its hash; download it again")
    path = directory / FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, which kv_cache needs; download or write the checkpoint again")
    if sha256(path) != said["sha256"]:
        raise CheckpointError(
            f"{path} is not the file that was written with this checkpoint (of another model, cut short or damaged); "
            "download or write the checkpoint again"
        )
    with _refuse_damage(path):
        stored = read_header(path)
        calibrated.check_names(codings, heads, stored, is_certain, settings.read)
        static = {name: tensor.read() for name, tensor in stored.items()}
        if is_certain:
            calibrated.check_all(codings, heads, static, settings.read)
    return static


@contextmanager
def _refuse_damage(path: Path) -> Iterator[None]:
    """Turn what is wrong with calibrated tensors into a CheckpointError of the file that holds or needs them."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{path}: kv_cache: {error}; download or write the checkpoint again") from error


def use(model: Any, section: Mapping[str, Any], directory: Path | None) -> None:
    """Let `generate` of a loaded model use the cache of its checkpoint."""
    if not hasattr(model, "_prepare_cache_for_generation"):
        return  # a bare body
    settings = read(section, len(layer_types(model.config)))
    where = directory or Path(model.name_or_path)
    if section.get("static") is not None and not (where / FILE).is_file():
        where = fetch(model, where, FILE) or where
    static = read_static(section, where, model.config, settings)
    generation.attach(model, settings, static)
    if static:
        model.save_pretrained = MethodType(partial(_save, static), model)


def fetch(model: Any, directory: Path, file: str) -> Path | None:
    """Return the folder of a file in the hub's cache, into which from_pretrained fetches nothing but weights.

    directory: where these are, <cache>/<repository>/snapshots/<commit>/<folder>, so that the file comes from the same
    cache, commit and folder; without such, from the default cache and the commit of the configuration.
    """
    download_options: dict[str, Any] = {"revision": getattr(model.config, "_commit_hash", None)}
    parts = directory.parts
    if SNAPSHOTS in parts[2:-1]:
        at = max(i for i, part in enumerate(parts[:-1]) if part == SNAPSHOTS)
        folder = "/".join(parts[at + 2 :])
        download_options = {"cache_dir": str(Path(*parts[: at - 1])), "revision": parts[at + 1], "subfolder": folder}
    path = cached_file(
        model.name_or_path,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **download_options,
    )
    return None if path is None else Path(path).parent


def _save(static: Mapping[str, Tensor], model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of the class's save_pretrained: with the calibrated tensors that the configuration speaks of."""
    saved = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    write_shard(Path(save_directory) / FILE, static)
    return saved
