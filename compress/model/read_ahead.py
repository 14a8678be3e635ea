"""Read the weights that a GPU will need next, in a thread, while it works on the present ones."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from compress.storage.checkpoint import Readable


class ReadAhead:
    """Tensors in pinned memory, read before they are asked for; one set of them at a time."""

    def __init__(self) -> None:
        self.thread: ThreadPoolExecutor | None = None
        self.coming: dict[str, Future[Tensor]] = {}

    def begin(self, wanted: Iterable[Readable]) -> None:
        """Begin to read these tensors; what was read before and not taken is let go."""
        self.forget()
        self.thread = self.thread or ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.coming = {stored.name: self.thread.submit(_read, stored) for stored in wanted}

    def take(self, stored: Readable) -> Tensor:
        """Return a tensor, read now if it was not read ahead. Raises CheckpointError as reading does."""
        coming = self.coming.pop(stored.name, None)
        return stored.read() if coming is None else coming.result()

    def forget(self) -> None:
        """Let go of what has been read, and read no more."""
        for coming in self.coming.values():
            coming.cancel()
        self.coming.clear()


def _read(stored: Readable) -> Tensor:
    tensor = stored.read()
    return tensor.pin_memory() if torch.cuda.is_available() else tensor
