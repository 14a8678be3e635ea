"""Write a cache at several levels, in pieces of tokens, and read pieces of any level.

    manifest.json        sizes and hashes of all other files, and what the model and the prompt are
    common.safetensors   the tokens, the first SINKS of all layers as they are, and bases that all levels share
    LEVEL.safetensors    tables, columns and places of chunks of one level
    LEVEL.NUMBER         a piece: the streams of its tokens, for keys and values of all layers one after another

A piece begins at a chunk of compress/kv/saved/columns.py, so that any level of it is decoded alone. Files are read by
`fetch`, a function from a name to bytes: of a folder, or of a server.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from compress.errors import CheckpointError, CompressError, OutputError, UnsupportedModelError, first_line
from compress.kv.codec import rotate
from compress.kv.saved import EARLY_FACTOR, EARLY_SHARE, LATE_FACTOR, columns, file, parts, plain
from compress.kv.settings import KINDS
from compress.numerics import rans
from compress.papers.streaming.controller import PieceSizes
from compress.storage import checkpoint, files, json_text
from compress.storage.checkpoint import write_text

VERSION = 1
MANIFEST, COMMON, TABLES = "manifest.json", "common", "tables"
# Squared error relative to the variance of a tensor, the finest level first.
LEVELS: Mapping[str, float] = {"fine": 1e-3, "medium": 3.4e-3, "coarse": 1.2e-2, "coarsest": 4e-2}
PIECE_TOKENS = 512
FILE = {"nbytes": json_text.INTEGER, "sha256": json_text.TEXT}
LEVEL_LAYOUT = {
    "name": json_text.TEXT,
    **FILE,
    "noise": json_text.NUMBER,
    "pieces": [FILE],
    "parts": {str: file.PART},
    "turned": [(bool,)],
}
LAYOUT = {
    **{"version": json_text.INTEGER, "tokens": json_text.INTEGER, "piece_tokens": json_text.INTEGER},
    **{"model": json_text.TEXT, "tokens_sha256": json_text.TEXT, "common": FILE, "levels": [LEVEL_LAYOUT]},
}

Fetch = Callable[[str], bytes]  # the content of a file, by its name
States = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [1, h, tokens, width]


@torch.no_grad()
def write_levels(
    cache: DynamicCache,
    folder: Path,
    model: nn.Module,
    tokens: Tensor,
    levels: Mapping[str, float] = LEVELS,
    piece_tokens: int = PIECE_TOKENS,
) -> None:
    """Write the cache of tokens int64 [1, n] into a folder that is not there yet, at each level: name -> noise.

    piece_tokens: a multiple of columns.CHUNK. Raises UnsupportedModelError for layers that are not full attention,
    OutputError for a folder that cannot be made, CompressError for tokens that are not those of the cache.
    """
    seen = cache.get_seq_length()
    fits = piece_tokens >= 1 and not piece_tokens % columns.CHUNK and levels
    if tokens.shape != (1, seen) or seen <= plain.SINKS or not fits:
        raise CompressError(
            f"levels need a cache of more than {plain.SINKS} tokens, its token ids [1, tokens], and pieces of a "
            f"multiple of {columns.CHUNK}; found {seen} tokens, ids {list(tokens.shape)} and pieces of {piece_tokens}"
        )
    if any(fact is None or fact["kind"] != plain.FULL for fact in plain.facts(cache)):
        raise UnsupportedModelError("levels of a cache need full attention in all layers; use compress kv save")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"cannot make {folder}: {error.strerror}; name a folder that is not there") from error
    with TemporaryDirectory(dir=folder) as temporary:
        coded = {
            name: _code(cache, Path(temporary) / f"{at}.kv", model, noise)
            for at, (name, noise) in enumerate(levels.items())
        }
        shared = _find_shared(cache, [own.head for own in coded.values()])
        shared["tokens"] = tokens.to(torch.int32).cpu()
        entries = []
        for name, own in coded.items():
            pieces = [_put(folder / f"{name}.{at}", piece) for at, piece in enumerate(own.pieces(piece_tokens))]
            head = {key: x for key, x in own.head.items() if key not in shared}
            facts = {
                **{"name": name, "noise": float(levels[name]), "turned": own.turned},
                "pieces": pieces,
                "parts": {key: part.plain() for key, part in own.parts.items()},
            }
            entries.append({**facts, **_put(folder / f"{name}.safetensors", save(head))})
        manifest = {
            **{"version": VERSION, "tokens": seen, "piece_tokens": piece_tokens, "levels": entries},
            **{"model": file.fingerprint(model), "tokens_sha256": file.hash_tokens(tokens)},
            "common": _put(folder / f"{COMMON}.safetensors", save(shared)),
        }
    write_text(folder / MANIFEST, json.dumps(manifest))


def _find_shared(cache: DynamicCache, heads: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors that all levels have alike, and the first tokens of all layers."""
    first, *others = heads
    shared = {
        name: x
        for name, x in first.items()
        if name != TABLES and all(name in own and torch.equal(own[name], x) for own in others)
    }
    for index, layer in enumerate(cache.layers):
        for kind in KINDS:
            shared[f"{index}.{kind}.sink"] = getattr(layer, kind)[:, :, : plain.SINKS].cpu().contiguous()
    return shared


@dataclass(frozen=True)
class _CodedLevel:
    """A level as compress/kv/saved writes it."""

    streams: Mapping[str, checkpoint.StoredTensor]
    head: Mapping[str, Tensor]  # all small tensors
    parts: Mapping[str, parts.SavedPart]
    turned: list[bool]

    def pieces(self, piece_tokens: int) -> Iterator[bytes]:
        """Yield the bytes of each piece."""
        names = [name for name, part in self.parts.items() if part.way == "grid"]
        ends = {name: [0, *self.head[f"{name}.chunks"][:, :2].sum(1).cumsum(0).tolist()] for name in names}
        step = piece_tokens // columns.CHUNK
        for first in range(0, len(ends[names[0]]) - 1, step):
            streams = []
            for name in names:
                own = ends[name]
                last = min(first + step, len(own) - 1)
                streams.append(self.streams[f"{name}.stream"].rows(own[first], own[last]))
            yield torch.cat(streams).numpy().tobytes()


def _code(cache: DynamicCache, path: Path, model: nn.Module, noise: float) -> _CodedLevel:
    """Code all layers with this noise, less in the first third, into a file."""
    both, count = plain.turns(model, cache.get_seq_length()), len(cache.layers)
    given, turned = dict[str, tuple[parts.SavedPart, file.Source]](), list[bool]()
    for index, layer in enumerate(cache.layers):
        factor = (EARLY_FACTOR if index < EARLY_SHARE * count else 1.0) * LATE_FACTOR
        facts, own = plain.layer_parts(index, layer, noise * factor, both)
        turned.append(bool(facts["turned"]))
        given |= {name: part for name, part in own if not name.endswith(".sink")}
    file.write(path, given, {})
    tensors = checkpoint.read_header(path)
    streams = {name: x for name, x in tensors.items() if name.endswith(".stream")}
    head = {name: x.read() for name, x in tensors.items() if name not in streams}
    return _CodedLevel(streams, head, {name: part for name, (part, _) in given.items()}, turned)


def _put(path: Path, content: bytes) -> dict[str, Any]:
    with files.open_new(path) as stream:
        stream.write(content)
    return {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def fetch_from(folder: Path) -> Fetch:
    """Return what reads files of a folder by name; OSError becomes CheckpointError."""

    def fetch(name: str) -> bytes:
        try:
            with files.open_regular(folder / name) as stream:
                return stream.read()
        except OSError as error:
            raise CheckpointError(
                f"{folder / name} cannot be read ({error.strerror}); write the levels again"
            ) from error

    return fetch


class LevelledCache:
    """The pieces of a cache at several levels, read through `fetch`.

    Raises CheckpointError for files that are damaged, of another version, another model or another prompt.
    """

    def __init__(self, fetch: Fetch, model: Any) -> None:
        self.fetch, self.model = fetch, model
        try:
            self.manifest = json_text.loads(fetch(MANIFEST), is_strict=True)
            if wrong := json_text.mismatch(self.manifest, LAYOUT):
                raise ValueError(wrong)
            if self.manifest["version"] != VERSION:
                raise ValueError(f"version {self.manifest['version']}, this reads {VERSION}")
            self.levels = {level["name"]: level for level in self.manifest["levels"]}
            if not self.levels or any(len(x["pieces"]) != self.pieces for x in self.levels.values()):
                raise ValueError("its levels do not have the pieces of the tokens")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{MANIFEST} of the levels is damaged ({first_line(error)}); write them again"
            ) from error
        if self.manifest["model"] != file.fingerprint(model):
            raise CheckpointError("the levels are of the cache of another model; load that one, or write them anew")
        self._heads: dict[str, dict[str, Tensor]] = {}

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.manifest["tokens"])

    @property
    def pieces(self) -> int:
        """Pieces of each level; the first SINKS tokens are in none."""
        size = self.manifest["piece_tokens"]
        if size < 1 or size % columns.CHUNK or self.tokens <= plain.SINKS:
            raise ValueError(f"pieces of {size} of {self.tokens} tokens")
        return math.ceil((self.tokens - plain.SINKS) / size)

    def span(self, piece: int) -> tuple[int, int]:
        """Return the first token of a piece and the one behind its last."""
        size = self.manifest["piece_tokens"]
        return plain.SINKS + piece * size, min(plain.SINKS + (piece + 1) * size, self.tokens)

    @cached_property
    def sizes(self) -> PieceSizes:
        """Bytes and tokens of all that can be sent."""
        spans = [self.span(piece) for piece in range(self.pieces)]
        return PieceSizes(
            [stop - start for start, stop in spans],
            {name: [piece["nbytes"] for piece in level["pieces"]] for name, level in self.levels.items()},
            {name: level["nbytes"] for name, level in self.levels.items()},
            self.manifest["common"]["nbytes"],
        )

    @cached_property
    def common(self) -> dict[str, Tensor]:
        """What all levels share."""
        return self._load(COMMON, self.manifest["common"])

    @property
    def token_ids(self) -> Tensor:
        """The prompt, int64 [1, tokens]."""
        ids = self.common["tokens"].long()
        if file.hash_tokens(ids) != self.manifest["tokens_sha256"] or ids.shape != (1, self.tokens):
            raise CheckpointError("the tokens of the levels are others than they were written with; write them again")
        return ids

    def sinks(self) -> States:
        """Return the first SINKS tokens of all layers as they are."""
        count = len(next(iter(self.levels.values()))["turned"])
        try:
            return [(self.common[f"{i}.keys.sink"], self.common[f"{i}.values.sink"]) for i in range(count)]
        except KeyError as error:
            raise CheckpointError(f"{COMMON}.safetensors lacks {first_line(error)}; write the levels again") from error

    def head(self, level: str) -> dict[str, Tensor]:
        """Return the small tensors of a level, fetched once."""
        if level not in self._heads:
            self._heads[level] = {**self._load(level, self.levels[level]), **self.common}
        return self._heads[level]

    def decode(self, level: str, piece: int, content: bytes) -> States:
        """Return keys and values of a piece in the type that they were written from."""
        facts, head = self.levels[level], self.head(level)
        start, stop = self.span(piece)
        try:
            if hashlib.sha256(content).hexdigest() != facts["pieces"][piece]["sha256"]:
                raise ValueError("its sha256 is another")
            stream, states_of = torch.frombuffer(bytearray(content), dtype=torch.int16), []
            for index, turned in enumerate(facts["turned"]):
                both = []
                for kind in KINDS:
                    x, stream = self._decode_part(facts, head, f"{index}.{kind}", (start, stop), stream)
                    if kind == "keys" and turned:
                        cos, sin = self._turns
                        x = rotate(x, cos[:, start:stop], sin[:, start:stop])
                    both.append(x.to(self.common[f"{index}.{kind}.sink"].dtype))
                states_of.append((both[0], both[1]))
            if len(stream):
                raise ValueError("it is longer than its chunks")
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"piece {level}.{piece} is damaged ({first_line(error)}); write the levels again"
            ) from error
        return states_of

    @cached_property
    def _turns(self) -> plain.Turns:
        both = plain.turns(self.model, self.tokens)
        if both is None:
            raise ValueError("the model has no rotary embedding that is known")
        return both

    def _decode_part(
        self, facts: Mapping[str, Any], head: Mapping[str, Tensor], name: str, span: tuple[int, int], stream: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys or values of some tokens of a layer, and what follows them in the stream."""
        part = parts.read_part(facts["parts"][name])
        small = {end: head[f"{name}.{end}"] for end in parts.CODED[1:]}
        freqs = head[TABLES].long()
        if freqs.shape[1:] != (rans.SYMBOLS,) or bool((freqs < 0).any()) or bool((freqs.sum(1) != rans.TOTAL).any()):
            raise ValueError("its tables do not add up")
        parts.check(part, small, len(freqs))
        first, last = (span[0] - plain.SINKS) // columns.CHUNK, -(-(span[1] - plain.SINKS) // columns.CHUNK)
        words = int(small["chunks"][first:last, :2].sum())
        own = {"stream": stream[:words], "chunks": small["chunks"][first:last], "columns": small["columns"]}
        matrix = columns.decode(parts.join_coded(own), freqs, span[1] - span[0], part.kind, (0, last - first))
        x = part.tensor(matrix)
        if (vectors := head.get(f"{name}.basis")) is not None:
            x = plain.from_basis(x, vectors)
        if not parts.is_finite(x):
            raise ValueError(f"{name} has numbers that are not finite")
        return x, stream[words:]

    def _load(self, name: str, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        content = self.fetch(f"{name}.safetensors")
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{name}.safetensors of the levels has another sha256; write the levels again")
        return load(content)
