"""Make calibration samples for a model of two stacks: what the encoder reads, and what the decoder writes of it.

The encoder reads windows of text, or sound. The decoder reads what the model itself writes of that, its likeliest token
each time, as it will when it is used. A window has no room for padding, which would be part of the statistics: where
the output ends early, the window's own text follows it, and behind a transcript the same transcript again.

Sound is a folder of .wav files (PCM, one or more channels, at the rate that the model reads). They are cut into pieces
as long as the model hears at a time, and its own feature extractor makes features of them.
"""

from __future__ import annotations

import hashlib
import wave
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calib.data import Calibration
from compress.errors import CalibrationError
from compress.model import inputs, load
from compress.model.architectures import Task
from compress.storage import files

WRITTEN_SHARE = 4  # a window of text is so many times as long as what the model writes of it, at most
TRANSCRIPT_LENGTH = 128  # tokens that are written of a piece of sound, at most
BATCH = 16  # samples that the model writes of side by side
SHORTEST = 0.1  # [s]; a shorter rest of a file is left out
WRITERS: tuple[Task, ...] = ("translation", "speech")
Say = Callable[[int, int], None]


def of_text(text: Calibration, directory: Path, say: Say) -> Calibration:
    """Return the windows of a text with what the model in the directory writes of each; `say`: windows done, in all."""
    windows = text.tokens
    written = write(load.load_model(directory, tasks=WRITERS), windows, say=say)
    rows = [torch.cat((each, window))[: windows.shape[1]] for each, window in zip(written, windows, strict=True)]
    note = "The decoder reads what the model itself writes of each window, and behind that the window."
    return _with_pairs(text, windows, torch.stack(rows), note)


def of_sound(folder: Path, directory: Path, samples: int, seed: int, say: Say) -> Calibration:
    """Return features of the .wav files in a folder with what the model in the directory writes of each piece."""
    extractor = load.load_feature_extractor(directory)
    count = sum(1 for _ in _pieces(folder, extractor.sampling_rate, extractor.n_samples))
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:samples]
    features = read_sound(folder, directory, chosen.tolist())
    model = load.load_model(directory, tasks=WRITERS)
    written = write(model, features, say=say)
    length = min(max(map(len, written)), model.config.max_target_positions)
    rows = [each.repeat(-(-length // len(each)))[:length] for each in written]
    available = count * inputs.frames(model.config) // 2
    bare = Calibration(torch.empty(0), folder.name, "", available)
    note = "The decoder reads what the model itself writes of each piece of sound, again and again."
    return _with_pairs(bare, features, torch.stack(rows), note)


def _with_pairs(text: Calibration, read: Tensor, tokens: Tensor, note: str) -> Calibration:
    digest = hashlib.sha256()
    for each in (read, tokens):
        digest.update(each.contiguous().numpy().tobytes())
    return replace(text, read=read, tokens=tokens, sha256=digest.hexdigest(), notes=(*text.notes, note))


@torch.no_grad()
def write(model: Any, read: Tensor, most: int | None = None, say: Say = lambda done, total: None) -> list[Tensor]:
    """Return what a model of two stacks writes of each sample, its likeliest token each time: int64 [tokens].

    read: token ids [samples, tokens] or features [samples, bins, frames]. most: tokens at most; None: a
    share of the window, or TRANSCRIPT_LENGTH. What begins and ends an output is part of it.
    """
    if most is None and inputs.reads_sound(model.config):
        most = min(TRANSCRIPT_LENGTH, model.config.max_target_positions // 2)  # Whisper begins with several tokens
    most = most or max(1, read.shape[1] // WRITTEN_SHARE)
    written: list[Tensor] = []
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [-1 if ends is None else ends])
    begin = model.generation_config.decoder_start_token_id
    for start in range(0, len(read), BATCH):
        batch = inputs.in_type(model, read[start : start + BATCH].to(model.device))
        with load.quiet():
            out = model.generate(batch, max_new_tokens=most, num_beams=1, do_sample=False).cpu()
        for row in out:
            row = row if begin is None or int(row[0]) == begin else torch.cat((torch.tensor([begin]), row))
            stops = torch.isin(row[1:], ends).nonzero()
            written.append(row[: 2 + int(stops[0])] if len(stops) else row)
        say(min(start + BATCH, len(read)), len(read))
    return written


def read_sound(folder: Path, directory: Path, chosen: Collection[int] | None = None) -> Tensor:
    """Return features float32 [pieces, bins, frames] of the .wav files in a folder, in the order of their names.

    directory: of the model whose feature extractor makes them. chosen: numbers of pieces; None: all. CalibrationError
    for a folder or a file that cannot be used.
    """
    extractor = load.load_feature_extractor(directory)
    pieces = enumerate(_pieces(folder, extractor.sampling_rate, extractor.n_samples))
    own = (piece.numpy() for number, piece in pieces if chosen is None or number in chosen)
    made = [extractor(each, sampling_rate=extractor.sampling_rate, return_tensors="pt") for each in own]
    if not made:
        raise CalibrationError(f"{folder} has no .wav file of {SHORTEST} seconds or more; give longer ones")
    return torch.cat([each["input_features"] for each in made])


def check_sound(source: str | None, directory: Path, option: str = "--calib") -> Path:
    """Return the folder of sound that a source names; CalibrationError for anything else."""
    if source is None or not Path(source).is_dir() or not any(Path(source).glob("*.wav")):
        raise CalibrationError(f"{directory} reads sound: give {option} a folder with .wav files of speech")
    return Path(source)


def _pieces(folder: Path, rate: int, longest: int) -> Iterator[Tensor]:
    """Yield the sound of files float32 [samples], in pieces of `longest` samples at most."""
    for path in sorted(folder.glob("*.wav")):
        yield from (piece for piece in _read(path, rate).split(longest) if len(piece) >= SHORTEST * rate)


def _read(path: Path, rate: int) -> Tensor:
    """Return the sound of a file as float32 [samples] between -1 and 1, the mean of its channels."""
    try:
        with files.open_regular(path) as stream, wave.open(stream) as file:
            channels, width, own_rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            raw = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise CalibrationError(f"{path} is no sound that can be read ({error}); give .wav files in PCM") from error
    if own_rate != rate:
        raise CalibrationError(
            f"{path} has {own_rate:,} samples a second, the model reads {rate:,}; convert it, for instance by "
            f"ffmpeg -i IN.wav -ar {rate} OUT.wav"
        )
    if width not in (1, 2, 4):
        raise CalibrationError(f"{path} has {8 * width} bits a sample; convert it to 16")
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
    numbers = torch.frombuffer(bytearray(raw), dtype=kind).float() if raw else torch.empty(0)
    numbers = (numbers - 128) / 128 if width == 1 else numbers / 2 ** (8 * width - 1)
    return numbers.view(-1, channels).mean(1)
