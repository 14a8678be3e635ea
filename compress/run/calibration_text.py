"""Take the calibration text of a job, from its source or written by the model itself."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path

from compress import process_memory
from compress.calib import data as calib_data
from compress.calib import pairs
from compress.calib.data import Calibration
from compress.calib.documents import documents
from compress.errors import BudgetError, CalibrationError, NotMeasuredError
from compress.model import fingerprint, inputs, load
from compress.progress import Progress, note
from compress.recipe.schema import AUTO
from compress.run.job import Job, Prepared

WRITING = "writing what the decoder reads"


def check(job: Job) -> None:
    """Raise CalibrationError for a file whose first text cannot be read, before anything else is done."""
    source = job.calib
    if source is not None and os.path.isfile(source) and Path(source).suffix.lower() != ".parquet":
        next(documents(source, chat=lambda messages, where: where), None)


def check_stacks(job: Job, prepared: Prepared) -> None:
    """Raise CalibrationError where an encoder is to read what is not there, BudgetError for too little memory."""
    if not prepared.samples or prepared.skeleton.second is None:
        return
    directory, room = prepared.skeleton.checkpoint.directory, job.max_memory
    if room is not None and (need := process_memory.resident() + prepared.skeleton.checkpoint.nbytes) > room:
        raise BudgetError(
            f"what the decoder reads is written by the whole model: at least {process_memory.show(need)}, more "
            f"than --max-memory {process_memory.show(room)}; raise it, or use a recipe without data, such as int8"
        )
    if inputs.reads_sound(prepared.skeleton.config):
        pairs.check_sound(job.calib, directory)
    elif job.calib is None:
        raise CalibrationError(
            f"{directory} has an encoder, which reads a text before anything is written; give --calib a file"
        )


def calibration(job: Job, prepared: Prepared, progress: Progress, cache: Path | None = None) -> Calibration | None:
    """Return the calibration tokens, with the copies that the recipe asks for; None if the recipe needs none.

    Text that the model writes itself is kept in the folder `cache`, and taken from there by the next run that asks for
    the same.
    """
    if not prepared.samples:
        return None
    copies, checkpoint = job.recipe.calibration.rolled, prepared.skeleton.checkpoint
    samples, seq_len = prepared.samples // copies, prepared.seq_len
    has_two_stacks = prepared.skeleton.second is not None
    if has_two_stacks and inputs.reads_sound(prepared.skeleton.config):
        folder = pairs.check_sound(job.calib, checkpoint.directory)
        text = pairs.of_sound(folder, checkpoint.directory, samples, job.seed, partial(progress, WRITING))
        if (heard := len(text.tokens)) < samples:
            say_fewer(heard, samples, text.tokens_available)
    elif job.calib is not None:
        progress("reading calibration text", 0, 0)
        vocabulary = prepared.skeleton.config.get_text_config().vocab_size
        tokenizer = load.load_tokenizer(checkpoint.directory)
        text = calib_data.calibration(job.calib, tokenizer, samples, seq_len, job.seed, vocabulary, prepared.prefix)
        if len(text.tokens) < samples:
            say_fewer(len(text.tokens), samples, text.tokens_available)
        if has_two_stacks:
            text = pairs.of_text(text, checkpoint.directory, partial(progress, WRITING))
    else:
        text = _self_generated(job, dataclasses.replace(prepared, samples=samples), progress, cache)
    return calib_data.expand_copies(text, copies) if copies > 1 else text


def say_fewer(samples: int, asked: int, tokens: int) -> None:
    """Tell the user that the calibration text, of so many tokens, has fewer samples than were asked for."""
    note(f"calibration: {samples} of {asked} samples; the text has only {tokens:,} tokens")


def _self_generated(job: Job, prepared: Prepared, progress: Progress, cache: Path | None) -> Calibration:
    """Take the text that the model writes from the cache, or let it write."""
    checkpoint, bos = prepared.skeleton.checkpoint, job.recipe.calibration.bos
    begun = calib_data.self_prefix(checkpoint.directory, bos)
    request = {
        "source": calib_data.SELF_SOURCE,
        "model": fingerprint.fingerprint(checkpoint),
        "seed": job.seed,
        "num_samples": prepared.samples,
        "seq_len": prepared.seq_len,
        "software versions": fingerprint.versions(),
        **({"begins with": list(begun.tokens)} if begun.tokens else {}),
    }
    if cache is not None and (known := calib_data.restore(cache, request, begun)) is not None:
        return known
    if not job.measures:
        raise NotMeasuredError("the calibration text is not written yet")
    progress("loading the model to write calibration text", 0, 0)
    if job.max_memory is not None:
        free = max(0, job.max_memory - process_memory.resident())
    else:
        free = int(0.8 * process_memory.available())
    written = calib_data.self_generated(
        checkpoint.directory,
        prepared.samples,
        prepared.seq_len,
        job.seed,
        free,
        lambda done, total: progress("generating calibration text", done, total),
        bos,
    )
    if cache is not None:
        calib_data.store(cache, request, written)
    return written


def add_notes(calibration: Calibration, job: Job, prepared: Prepared) -> Calibration:
    """Add notes of what a run does otherwise than asked for."""
    notes = list(calibration.notes)
    if prepared.text_choice:
        notes.append(f"{prepared.text_choice[0].upper()}{prepared.text_choice[1:]}.")
    if (seq_len := job.recipe.calibration.seq_len) != AUTO and seq_len > prepared.seq_len:
        notes.append(
            f"Samples have {prepared.seq_len} tokens instead of {seq_len}: the model knows no longer positions."
        )
    is_corrected = job.pack and job.recipe.calibration.target_correction > 0
    if is_corrected and any(layer.spec.is_expert for layer in prepared.plan.layers):
        notes.append(
            "Experts are calibrated on their own inputs alone: full-precision routing sends them other tokens."
        )
    return dataclasses.replace(calibration, notes=tuple(notes))
