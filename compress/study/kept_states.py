"""Score a cell beside the original, which runs once for each text and not beside every cell.

Its predictions over the whole vocabulary are too large to keep, its last hidden states are not: hidden size numbers a
token, in the type of the scores. The first cell that reads a text runs the original, and writes down the states that
its output head is given. Every other cell turns them into logits with the head alone: the model's own forward pass does
that, with what lies under the head replaced by what gives the kept states, so that whatever a family does to logits
(scales, caps, a bias) is done. The products are the same ones, batch by batch, so that logits are equal to the bit.
With the first batch that is checked before anything is kept: a model whose logits do not come out equal, or whose head
is given something else beside the states, keeps none, and runs beside every cell.

    DIR/states/N-HASH.safetensors

N is the place of the text in the study, whose model, texts, windows and type are one (run.json). HASH tells how the
text is read: as whole windows, or in which chunks beside a compressed cache; and how many windows at a time. Its
tensors [windows, positions, hidden size] are the states of each forward pass, in order. The metadata has a hash of all
of them, and one of the tokens of each pass.

Not done: states are in memory until all are there, and are read from the file one pass at a time. The original is
loaded whole, and all but its head is dropped. Tasks need no states: its answers are kept (compress/study/tasks.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.calib.documents import source_name
from compress.errors import CheckpointError, OutputError
from compress.evaluate import cache_scores, scores
from compress.evaluate.cache_candidates import open_reader
from compress.evaluate.reader import Execution, Reader, readings
from compress.evaluate.reader import load_model as load_for_caches
from compress.model import load as lm
from compress.run.source import resolve
from compress.storage.checkpoint import read_header, read_metadata, write_shard
from compress.storage.files import make_folder
from compress.storage.workdir import writing
from compress.study.grid import Settings

FOLDER = "states"
STATES_SHA256, TOKENS_SHA256 = "states_sha256", "tokens_sha256"  # names in a file's metadata


def score(study: Path, settings: Settings, number: int, checkpoint: Path, has_cache: bool) -> dict[str, Any]:
    """Return the scores of a cell's checkpoint on the text of this number: JSON values of a `scores.Comparison`.

    study: the folder of the study. has_cache: through the cache that the checkpoint stores, beside the original with
    the exact one; with "cache_read". Raises CompressError; OutputError for kept states that are damaged.
    """
    text, base = settings.texts[number], resolve(settings.model)
    execution = Execution(settings.dtype, settings.device, bos=settings.bos)
    cut = scores.text_windows([checkpoint, base], text, settings.window, settings.max_tokens, settings.bos)
    windows = cut.tokens
    if not has_cache:
        models = [lm.load_model(each, execution.dtype, execution.device) for each in (checkpoint, base)]
        pair = [Reader(model, name=each.name) for model, each in zip(models, (checkpoint, base), strict=True)]
        batch = scores.windows_at_a_time(pair, windows.shape[1])
        with keep_states(models[1], study / FOLDER / _file_name(number, [], batch), windows.numel()):
            columns = torch.cat([scores.positions(pair, part) for part in windows.split(batch)], 1)
        figures = columns.view(len(columns), len(windows), -1)[..., cut.prefix.unscored :]
        return dataclasses.asdict(scores.summary(figures, source_name(text), windows.shape[1], cut.prefix.text))
    reader, original = open_reader(checkpoint, execution, {}, None), load_for_caches(base, execution)
    cache = reader.cache
    assert cache is not None
    chunks = cache_scores.chunks_of(reader.model.config, [cache], windows.shape[1])
    batch = cache_scores.windows_at_a_time(reader.model, [cache], windows.shape[1])
    with keep_states(original, study / FOLDER / _file_name(number, chunks, batch), windows.numel()):
        compared = cache_scores.compare_text(reader, original, cut, source_name(text))
    return {**dataclasses.asdict(compared), "cache_read": readings(reader.model, cache).text}


def _file_name(number: int, chunks: Sequence[tuple[int, int]], batch: int) -> str:
    """Return the name of a text's file for a way of reading it; chunks: none for whole windows."""
    return f"{number}-{hashlib.sha256(json.dumps([chunks, batch]).encode()).hexdigest()[:10]}.safetensors"


@contextmanager
def keep_states(model: Any, file: Path, positions: int) -> Iterator[None]:
    """While active, let a model with an output head give the logits of the kept states; keep them if there are none.

    positions: of all forward passes together; where there are more (a text that is read anew at some length), none are
    kept. Raises OutputError for a file that is damaged, or of other tokens.
    """
    name = getattr(model, "base_model_prefix", "")
    if not isinstance(getattr(model, name or "_", None), nn.Module):
        yield
        return
    if file.is_file():
        setattr(model, name, _GivenStates(file, *_read(file)))
        yield
        return
    recorder = _StateRecorder(model, name)
    with recorder.attach_hooks():
        yield
    if recorder.is_exact and sum(states.shape[:2].numel() for states in recorder.states.values()) == positions:
        with writing(file.parent):
            make_folder(file.parent)
            metadata = {STATES_SHA256: _hash(recorder.states), TOKENS_SHA256: json.dumps(recorder.tokens)}
            write_shard(file, recorder.states, metadata=metadata)


class _StateRecorder:
    """Writes down what the body of a model gives its head, and tries whether the head alone gives equal logits."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name, self.body = model, name, getattr(model, name)
        self.states: dict[str, Tensor] = {}  # number of a forward pass -> [windows, positions, hidden size]
        self.tokens: list[str] = []  # hashes of the tokens of each pass
        self.is_exact: bool | None = None  # None: not tried yet

    @contextmanager
    def attach_hooks(self) -> Iterator[None]:
        """While active, look at every forward pass."""
        handles = [
            self.body.register_forward_hook(self._note, with_kwargs=True),
            self.model.register_forward_hook(self._try, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        if self.is_exact is not False:
            self.states[f"{len(self.tokens):06d}"] = output[0].detach().cpu().contiguous()
            self.tokens.append(_hash_tokens(args, kwargs))

    def _try(self, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        if self.is_exact is not None:
            return
        self.is_exact = False  # until it is known, also in the pass below
        setattr(self.model, self.name, _GivenStates(None, self.states, self.tokens))
        try:
            self.is_exact = torch.equal(self.model(*args, **kwargs).logits, output.logits)
        except lm.FAILURES:
            pass
        finally:
            setattr(self.model, self.name, self.body)
        if not self.is_exact:
            self.states.clear()


class _GivenStates(nn.Module):
    """Stands under a head in the place of a model's body, and gives the states of each forward pass in turn."""

    def __init__(self, file: Path | None, states: Mapping[str, Any], tokens: Sequence[str]) -> None:
        super().__init__()
        self.file, self.states, self.tokens, self.passes = file, states, tokens, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        number, self.passes = self.passes, self.passes + 1
        if number >= len(self.tokens) or self.tokens[number] != _hash_tokens(args, kwargs):
            raise OutputError(f"{self.file} has states of other tokens; delete it, and the original runs again")
        states, device = self.states[f"{number:06d}"], _tokens(args, kwargs).device
        return _BodyOutput((states if isinstance(states, Tensor) else states.read()).to(device))


class _BodyOutput:
    """What a model's body returns, by name and by place; all but the last hidden states is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def _read(file: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Return the states of each pass, to be read when they are needed, and the hashes of its tokens."""
    try:
        stored, metadata = read_header(file), read_metadata(file)
        tokens = json.loads(metadata[TOKENS_SHA256])
        names = [f"{number:06d}" for number in range(len(tokens))]
        is_whole = sorted(stored) == names and _hash({name: stored[name] for name in names}) == metadata[STATES_SHA256]
    except (CheckpointError, KeyError, TypeError, ValueError, OSError):
        is_whole = False
    if not is_whole:
        raise OutputError(f"{file} is damaged; delete it, and the original runs again")
    return stored, tokens


def _hash(states: Mapping[str, Any]) -> str:
    """Return a hash of names and bytes of tensors, or of stored ones, one after the other."""
    digest = hashlib.sha256()
    for name, tensor in states.items():
        values = tensor if isinstance(tensor, Tensor) else tensor.read()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(cast(Any, values.contiguous().view(torch.uint8).numpy()))
    return digest.hexdigest()


def _hash_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    tokens = _tokens(args, kwargs).cpu()
    return hashlib.sha256(json.dumps(tokens.tolist()).encode()).hexdigest()


def _tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the tokens int64 [windows, positions] that a body is called with."""
    tokens: Tensor = args[0] if args else kwargs["input_ids"]
    return tokens
