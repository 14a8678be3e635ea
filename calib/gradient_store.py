"""Keep the gradients at the outputs of linears in a folder, which every run on the same model and text reads.

    DIR/gradients.json           what they were made of, and the hash of each file that is whole; written last
    DIR/00003.safetensors        of each linear of block 3: <linear>.moment, G [out, out] float32; or, where it was
                                 given fewer tokens than it has outputs, <linear>.entries [tokens, out] float16 and
                                 <linear>.scales [tokens] float32 (compress/calib/output_gradients.py); <linear>.count
    DIR/behind-00002.safetensors while it is being made: the gradient in front of block 3, for the run that goes on
    DIR/lock                     held while it is being made

Where they cannot be had of a model, gradients.json says why, and the rest is removed: no other run tries it again.

The last block is made first. A run that goes on behind block 3 runs the text forward to block 2, and backward from
there. What is damaged, of another model or of another version is made anew.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calib.backward_pass import Begun
from compress.calib.output_gradients import GradientRows, OutputGradients
from compress.errors import CheckpointError
from compress.storage import files
from compress.storage.checkpoint import StoredTensor, read_header, read_json, sha256, write_shard, write_text
from compress.storage.workdir import check_owner, check_space, writing

OPTION = "--measurements"
VERSION = 2  # labels are drawn from one softmax, products are of another library
LOCK = "lock"


class GradientStore:
    """The gradients of a model in a folder.

    identity: JSON values that decide them. linears: of each block, the name and the number of outputs.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], linears: Sequence[Mapping[str, int]]) -> None:
        self.folder, self.linears = folder, linears
        self.identity = json.loads(json.dumps({"version": VERSION, **identity}))
        self.index = folder / "gradients.json"
        self.failure: str | None = None  # why there are none and can be none, where that is known

    @contextmanager
    def hold(self, report: Callable[[str], None] = lambda text: None) -> Iterator[None]:
        """Make the folder, and wait until no other run is making what is in it; an empty one is removed at the end.

        report: is told if there is something to wait for.
        """
        with ExitStack() as opened:
            with writing(self.folder, OPTION):
                self._take_lock(opened, report)
                kept = self._hashes()
                for left in [*self.folder.glob("*.part"), *self.folder.glob("behind-*")]:  # by a killed run
                    if left.name not in kept:
                        left.unlink(missing_ok=True)
            try:
                yield
            finally:
                if not self.index.exists():
                    with suppress(OSError):
                        (self.folder / LOCK).unlink()
                        self.folder.rmdir()

    def _take_lock(self, opened: ExitStack, report: Callable[[str], None]) -> None:
        """Lock the folder until `opened` is closed."""
        while True:  # a run that ends may remove the folder between any two steps
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            files.make_folder(self.folder)
            with suppress(FileNotFoundError), ExitStack() as attempt:
                check_owner(self.folder, OPTION)
                lock = attempt.enter_context(files.open_lock(self.folder / LOCK))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    report(f"waiting for another run, which takes output gradients in {self.folder}")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(lock.fileno()), (self.folder / LOCK).stat()):
                    opened.push(attempt.pop_all())
                    return

    def known_failure(self) -> str | None:
        """Return why an earlier run could not make them, None if it could, or if there was none."""
        failure = self._content().get("failure")
        return failure if isinstance(failure, str) else None

    def fail(self, failure: str) -> None:
        """Have it known that they cannot be made, and remove what there is."""
        write_text(self.index, json.dumps({"identity": self.identity, "failure": failure}, indent=1))
        for file in self.folder.glob("*.safetensors"):
            file.unlink(missing_ok=True)

    def remaining(self) -> int:
        """Return the number of blocks that are still to be made, the first ones; 0 if all are there."""
        hashes = self._hashes()
        blocks = len(self.linears)
        remaining = next((index for index in reversed(range(blocks)) if not self._is_whole(index, hashes)), -1) + 1
        if not remaining or remaining == blocks:
            return remaining
        behind = self._behind(remaining)
        return remaining if self._is_intact(behind, hashes) else blocks

    def check_space(self, nbytes: int) -> None:
        """Raise OutputError if the disk has no room for what is still to be written; nbytes: of all blocks."""
        if remaining := self.remaining():
            advice = f"free some space, give another {OPTION}, or set two_sided: false"
            check_space(self.folder, nbytes * remaining // len(self.linears), "output gradients need", advice)

    def resume_point(self, remaining: int, samples: slice) -> Begun | None:
        """Return where a pass goes on that has so many blocks to do, for these samples; None if it is at its start."""
        if remaining == len(self.linears):
            return None
        stored = read_header(self._behind(remaining))["gradient"]
        return Begun(remaining, stored.rows(samples.start, samples.stop))

    def add(self, index: int, tensors: Mapping[str, Tensor], gradient: Tensor) -> None:
        """Store a block, and the gradient in front of it [samples, tokens, hidden].

        tensors: `as_stored` of each linear. The block behind it has been added.
        """
        file, behind = self._file(index), self._behind(index)
        hashes = {} if index + 1 == len(self.linears) else self._hashes()
        hashes[file.name] = write_shard(file, tensors)
        if index:
            hashes[behind.name] = write_shard(behind, {"gradient": gradient})
        former = self._behind(index + 1)
        hashes.pop(former.name, None)
        write_text(self.index, json.dumps({"identity": self.identity, "files": hashes}, indent=1))
        former.unlink(missing_ok=True)

    def read(self, index: int) -> BlockReader:
        """Return the gradients of a block. Raises CheckpointError if they are damaged."""
        file = self._file(index)
        if not self._is_intact(file, self._hashes()):
            file.unlink(missing_ok=True)
            raise CheckpointError(f"{file} was damaged or gone; run the same command again to make it anew")
        return BlockReader(read_header(file))

    def _hashes(self) -> dict[str, str]:
        """Return file name -> hash of the files that are whole; {} where another model's, or nothing, is here."""
        hashes = self._content().get("files")
        if not isinstance(hashes, dict):
            return {}
        return {name: digest for name, digest in hashes.items() if isinstance(digest, str)}

    def _content(self) -> dict[str, Any]:
        """Return what the folder says of itself; {} where another model's, or nothing, is here."""
        with suppress(CheckpointError, OSError):
            stored = read_json(self.index)
            if stored.get("identity") == self.identity:
                return dict(stored)
        return {}

    def _is_whole(self, index: int, hashes: Mapping[str, str]) -> bool:
        """Return whether the file of a block is there, with all linears, by its header."""
        file = self._file(index)
        with suppress(CheckpointError, OSError):
            return file.name in hashes and {f"{name}.count" for name in self.linears[index]} <= read_header(file).keys()
        return False

    def _is_intact(self, file: Path, hashes: Mapping[str, str]) -> bool:
        """Return whether a file has the bytes that were written."""
        with suppress(OSError):
            return file.name in hashes and sha256(file) == hashes[file.name]
        return False

    def _file(self, index: int) -> Path:
        return self.folder / f"{index:05d}.safetensors"

    def _behind(self, blocks: int) -> Path:
        """Return the file with the gradient behind the first `blocks` blocks."""
        return self.folder / f"behind-{blocks:05d}.safetensors"


class BlockReader:
    """The gradients of a block's linears, which are read when they are asked for."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored

    def of(self, name: str, device: torch.device | str = "cpu") -> OutputGradients:
        """Read those of a linear."""
        count = int(self.stored[f"{name}.count"].read())
        if (moment := self.stored.get(f"{name}.moment")) is not None:
            return OutputGradients(count, moment.read().to(device))
        entries, scales = (self.stored[f"{name}.{part}"].read().to(device) for part in GradientRows._fields)
        return OutputGradients(count, GradientRows(entries, scales))


def as_stored(name: str, count: int, gradients: GradientRows | Tensor) -> dict[str, Tensor]:
    """Return the stored tensors of a linear."""
    parts = gradients._asdict() if isinstance(gradients, GradientRows) else {"moment": gradients}
    return {f"{name}.{part}": tensor for part, tensor in {"count": torch.tensor(count), **parts}.items()}


def file_nbytes(tokens: int, linears: Mapping[str, int]) -> int:
    """Return the bytes of a block's file if all these tokens reach each linear (name -> outputs)."""
    return sum(2 * tokens * width + 4 * tokens if tokens < width else 4 * width**2 for width in linears.values())
