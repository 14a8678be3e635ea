"""Write the parts of a cache into one safetensors file, and read them back, checked, part by part.

    tables                      int16 [tables, 256]: frequencies, of all coded parts
    <part>                      a raw part, or
    <part>.stream               int16: the chunks of a coded part, one after another
    <part>.chunks               int64 [chunks, 3]: words, codes beside them, crc32
    <part>.columns              int16 [3, columns]: offset, predict, table

The header's metadata has a JSON text under KEY, and under HASH the sha256 of that text and of all tensors but streams,
whose chunks have checksums of their own. So what is small is checked when the file is opened, and a chunk when it is
decoded: reading some layers, or the first tokens of each, reads no other chunks.

A file is written beside its place and renamed: it is there as a whole, or not at all.

`fingerprint` tells models apart by what is in memory, however they were loaded: a cache is worth nothing to another
model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError, OutputError, first_line
from compress.kv.saved import columns, parts
from compress.kv.saved.parts import CODED, SavedPart
from compress.numerics import rans
from compress.storage import checkpoint, json_text, paths

KEY, HASH = paths.SAVED_CACHE, f"{paths.SAVED_CACHE}_sha256"
VERSION = 1
PART = {"shape": [json_text.INTEGER], "dtype": json_text.TEXT}
OPTIONAL = (dict, type(None))
LAYOUT = {
    "version": json_text.INTEGER,
    "parts": {str: PART, "tokens": PART},
    **dict.fromkeys(("model", "tokens_sha256", "quality"), json_text.TEXT),
    "layers": [OPTIONAL],
    "codes": OPTIONAL,
    "turns": (list, type(None)),
}
# what reading something else may raise
DAMAGE: tuple[type[Exception], ...] = (ValueError, KeyError, TypeError, IndexError, OverflowError)

SAMPLED_NUMBERS = 1 << 14  # hashed at the start and at the end of each tensor
PASSING_SETTINGS = {
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "transformers_version",
    "_attn_implementation",
    "use_cache",
}

Source = Callable[[], Tensor]  # gives the tensor of a part; called twice
Span = tuple[int, int]


def write(path: Path, given: Mapping[str, tuple[SavedPart, Source]], facts: Mapping[str, Any]) -> None:
    """Write parts to a file. facts: plain data that comes back as `SavedFile.facts`.

    Tensors are made one at a time, twice: for the tables, and to be coded. Raises OutputError where it cannot be
    written.
    """
    tensors = dict(_code_parts(given))
    described = {name: each.plain() for name, (each, _) in given.items()}
    text = json.dumps({**facts, "version": VERSION, "parts": described}, sort_keys=True)
    metadata = {KEY: text, HASH: _hash(text, {n: t for n, t in tensors.items() if not n.endswith(".stream")})}
    try:
        checkpoint.write_shard(path, tensors, metadata=metadata)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(path.with_name(path.name + ".part"))
        if isinstance(error, OSError):
            raise OutputError(f"cannot write {path}: {error.strerror}; give another --out") from error
        raise


def _code_parts(given: Mapping[str, tuple[SavedPart, Source]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file by name."""
    fitted = {
        name: columns.fit_columns(each.matrix(source())) for name, (each, source) in given.items() if each.way != "raw"
    }
    none = torch.zeros(0, rans.SYMBOLS, dtype=torch.int64)
    freqs, chosen = columns.tables(torch.cat([none, *(counts for _, counts in fitted.values())]))
    yield "tables", freqs.to(torch.int16)
    table_of = dict(zip(fitted, chosen.split([len(counts) for _, counts in fitted.values()]), strict=True))
    for name, (each, source) in given.items():
        if each.way == "raw":
            yield name, source().detach().cpu().contiguous()
            continue
        columns_of = fitted[name][0]
        coding = columns.Columns(columns_of.offset, columns_of.predict, table_of[name].to(torch.int16))
        coded = columns.encode(each.matrix(source()), coding, freqs)
        stored = (coded.stream, coded.chunks, coding.to_matrix())
        yield from ((f"{name}.{end}", tensor) for end, tensor in zip(CODED, stored, strict=True))


def _hash(text: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256((text + hash_tensors(tensors)).encode()).hexdigest()


class SavedFile:
    """A file of parts, opened: `facts`, `parts` and small tensors are in memory, streams are read when they are needed.

    Raises CheckpointError for a file that is no such file, is of another version, is cut off, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        paths.check_saved_cache(path)
        metadata = checkpoint.read_metadata(path)
        if KEY not in metadata:
            raise CheckpointError(f"{path} holds no saved cache; give a file that compress kv save wrote")
        self.path, self._stored = path, checkpoint.read_header(path)
        with self.damage("its header", RuntimeError):
            self.facts = json_text.loads(metadata[KEY], is_strict=True)  # NaN is no number of a cache
            if isinstance(self.facts, dict) and self.facts.get("version") != VERSION:
                raise CheckpointError(
                    f"{path} is a saved cache of version {self.facts.get('version')!r}, this reads {VERSION}; save the "
                    "cache again with the same release of compress that loads it"
                )
            if wrong := json_text.mismatch(self.facts, LAYOUT):
                raise ValueError(wrong)
            small = {name: each.read() for name, each in self._stored.items() if not name.endswith(".stream")}
            if _hash(metadata[KEY], small) != metadata.get(HASH):
                raise ValueError("its sha256 is another")
            self.parts = {name: parts.read_part(plain) for name, plain in self.facts["parts"].items()}
            self._check(small)
        self._small = small

    def tensor(self, name: str, span: Span | None = None) -> Tensor:
        """Return a part, or the tokens of its chunks span[0] to span[1] - 1; a grid in float32, the rest in its dtype.

        Raises CheckpointError for a chunk that is damaged.
        """
        described = self.parts[name]
        if described.way == "raw":
            return self._small[name]
        first, last = span or (0, described.chunks)
        small = {end: self._small[f"{name}.{end}"] for end in ("chunks", "columns")}
        with self.damage(name, RuntimeError):
            ends = [0, *small["chunks"][:, :2].sum(1).cumsum(0).tolist()]
            stream = self._stored[f"{name}.stream"].rows(ends[first], ends[last])
            coded = parts.join_coded(
                {"stream": stream, "chunks": small["chunks"][first:last], "columns": small["columns"]}
            )
            rows = min(described.rows, columns.CHUNK * last) - columns.CHUNK * first
            matrix = columns.decode(coded, self._freqs, rows, described.kind, (0, last - first))
            tensor = described.tensor(matrix)
            if not parts.is_finite(tensor):
                raise ValueError("it has numbers that are not finite")
        return tensor

    def nbytes(self, name: str) -> int:
        """Return the bytes of a part in the file, tables not included."""
        if self.parts[name].way == "raw":
            return self._stored[name].nbytes
        return sum(self._stored[f"{name}.{end}"].nbytes for end in CODED)

    def _check(self, small: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless all tensors are there, and are what decoding relies on."""
        self._freqs = small["tables"].long()
        is_table = small["tables"].dtype == torch.int16 and small["tables"].shape[1:] == (rans.SYMBOLS,)
        if not is_table or bool((self._freqs < 0).any()):  # larger integers could add up to anything
            raise ValueError("its tables are none")
        if bool((self._freqs.sum(1) != rans.TOTAL).any()):
            raise ValueError("its tables do not add up")
        for name, described in self.parts.items():
            if described.way == "raw":
                if (small[name].dtype, tuple(small[name].shape)) != (described.dtype, described.shape):
                    raise ValueError(f"{name} has another shape or type than it says")
                if not parts.is_finite(small[name]):
                    raise ValueError(f"{name} has numbers that are not finite")
                continue
            parts.check(described, {end: small[f"{name}.{end}"] for end in CODED[1:]}, len(self._freqs))
            stream, sizes = self._stored[f"{name}.stream"], small[f"{name}.chunks"][:, :2]
            if stream.dtype != torch.int16 or stream.shape != (sum(sizes.flatten().tolist()),):
                raise ValueError(f"{name} has another length than its chunks")
        if len(self.parts["tokens"].shape) != 2:
            raise ValueError("its tokens are no rows of tokens")

    @contextmanager
    def damage(self, where: str, *more: type[Exception]) -> Iterator[None]:
        """Raise CheckpointError, which says where it is, for what is not as it was written: DAMAGE, and `more`."""
        try:
            yield
        except (*DAMAGE, *more) as error:
            raise CheckpointError(
                f"{self.path} is damaged at {where} ({first_line(error)}); copy the file again, or save the cache anew"
            ) from error


def fingerprint(model: Any) -> str:
    """Return a sha256 over the configuration of a PreTrainedModel, names, shapes and samples of all its weights.

    Samples are hashed as float32 where a weight is bfloat16 or float16, so that a checkpoint is the same model if it is
    loaded in a larger type. Packed weights are buffers, and count. So does which adapters are applied, and how much.
    """
    config = model.config.to_dict()
    plain = {key: value for key, value in config.items() if key not in PASSING_SETTINGS}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=_setting_text).encode())
    if applied := _applied_adapters(model):
        digest.update(json.dumps(applied).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        for sample in (flat[:SAMPLED_NUMBERS], flat[-SAMPLED_NUMBERS:]):
            digest.update(_tensor_bytes(sample))
    return digest.hexdigest()


def _applied_adapters(model: nn.Module) -> list[tuple[str, list[tuple[str, float]]]]:
    """Return layer -> adapters that it adds to its base, with their factors, by what PEFT's layers say of themselves.

    All adapters are among the weights of a model, whether they are applied or not. A merged one is in the base.
    """
    layers = []
    for name, module in model.named_modules():
        is_off, active = getattr(module, "disable_adapters", None), getattr(module, "active_adapters", None)
        if isinstance(is_off, bool) and isinstance(active, list):
            factors, merged = getattr(module, "scaling", None), getattr(module, "merged_adapters", [])
            factors = factors if isinstance(factors, dict) else {}
            added = [] if is_off else [each for each in active if each not in merged]
            layers.append((name, [(each, float(factors.get(each, 1.0))) for each in added]))
    return layers


def hash_tokens(tokens: Tensor) -> str:
    """Return a sha256 of token ids [B, tokens]."""
    return hashlib.sha256(f"{list(tokens.shape)}".encode() + _tensor_bytes(tokens.to(torch.int64))).hexdigest()


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """Return a sha256 of named tensors, all of their bytes; "" for none."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + _tensor_bytes(tensor))
    return digest.hexdigest() if tensors else ""


def _setting_text(value: Any) -> str:
    """Return a text for a setting that JSON does not have, the same in every process."""
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def _tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor; of short floating-point types as float32."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
