"""Keep rows along a token axis that grow at the end and go at the front, without copying the rest each time."""

from __future__ import annotations

from torch import Tensor

from compress.errors import CompressError

ROWS = 16  # least number of rows that memory grows by


class Buffer:
    """A tensor [B, h, rows, ...] with room for more rows: growth is geometric, so that n rows cost O(n) copies."""

    def __init__(self) -> None:
        self._data: Tensor | None = None
        self._start = 0
        self.length = 0

    def view(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows start..stop, sharing memory; never call it before the first `append`."""
        assert self._data is not None
        last = self.length if stop is None else stop
        return self._data[:, :, self._start + start : self._start + last]

    def append(self, rows: Tensor) -> None:
        """Copy the rows: no memory of the caller is kept alive. CompressError if they are of another batch."""
        count = rows.shape[2]
        if self._data is None:
            self._allocate(rows, count)
        assert self._data is not None
        if rows.shape[0] != self._data.shape[0]:
            raise CompressError(
                f"kv_cache: tokens of {rows.shape[0]} sequences after those of {self._data.shape[0]}; use a fresh cache"
            )
        end = self._start + self.length
        if end + count > self._data.shape[2]:
            self._make_room(count)
            end = self.length
        self._data[:, :, end : end + count] = rows.detach()
        self.length += count

    def drop(self, count: int) -> None:
        """Forget the first rows."""
        self._start += count
        self.length -= count

    def crop(self, count: int) -> None:
        """Forget the last rows."""
        self.length -= count

    def take(self, index: Tensor) -> None:
        """Keep these rows of the batch, by index."""
        if self._data is not None:
            self._data = self._data.index_select(0, index.to(self._data.device))

    def clear(self) -> None:
        self._data, self._start, self.length = None, 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use."""
        return 0 if self._data is None else self.view().numel() * self._data.element_size()

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of memory that it holds."""
        return 0 if self._data is None else self._data.untyped_storage().nbytes()

    def _allocate(self, like: Tensor, rows: int) -> None:
        shape = (*like.shape[:2], rows + max(ROWS, rows // 8), *like.shape[3:])
        self._data = like.new_empty(shape)

    def _make_room(self, count: int) -> None:
        """Move the rows to the front, of the same memory if half of it is free."""
        assert self._data is not None
        old, needed = self.view(), self.length + count
        if self._start < self.length or needed > self._data.shape[2]:
            self._allocate(old, needed)
        self._data[:, :, : self.length] = old
        self._start = 0
