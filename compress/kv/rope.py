"""Keep the rotary embedding of cached tokens, for codecs that store keys before it.

One `Rope` for all layers of a cache that are turned alike. It keeps what is least of

    positions   int32 for each token, where the model's own module makes the same rows of cos and sin from the position
                alone: found out with the first tokens, and bit for bit with all that follow
    rows        the first half of the columns of cos and sin as the model computed them

Scaled embeddings that change with the length of the text are no functions of the position, so their rows are kept.
Left padding makes positions a matter of the batch; a batch without it keeps one row. Only the half-split form (channel
j turns with j + width / 2, in the first channels) is known, whose rows have two equal halves; others are refused.

Compiled readers are given half rows (`halves`). Fused attention reads them in each step: from its first step on, rows
are kept beside positions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.kv.buffer import Buffer

FAR_POSITION = 1 << 22


class Rope:
    def __init__(self) -> None:
        self._rows = Buffer()  # [B or 1, 2 (cos, sin), tokens, rotary width / 2], in the type of the model
        self._positions = Buffer()  # int32 [B or 1, 1, tokens]
        self._source: nn.Module | None = None  # of rows, by positions; None: rows are kept
        self._like = torch.empty(0)  # of the type and on the device of the rows
        self._announced: tuple[Tensor, list[nn.Module]] | None = None

    def __len__(self) -> int:
        return self._positions.length if self._source is not None else self._rows.length

    def announce(self, positions: Tensor, sources: Iterable[nn.Module]) -> None:
        """positions [B or 1, n] of the tokens that `append` is given next, and modules that may have made its rows."""
        self._announced = positions, list(sources)

    def append(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin [B or 1, n, rotary width] of the next tokens. CompressError for a form that is not known."""
        check(cos)
        announced, self._announced = self._announced, None
        positions = announced[0].int() if announced and announced[0].shape[-1:] == cos.shape[1:2] else None
        if not len(self) and announced and positions is not None:
            self._like = cos.new_empty(0)
            self._source = next((copy.deepcopy(s) for s in announced[1] if _makes(s, positions, cos, sin)), None)
        if self._source is not None:
            if positions is not None and _same(_call(self._source, cos, positions), (cos, sin)):
                _extend(self._positions, positions[:, None])
                return
            self._keep_rows()
        _extend(self._rows, _half(cos, sin))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return cos and sin [B or 1, 2, stop - start, rotary width] of tokens."""
        if stop > len(self):
            raise CompressError(
                "kv_cache: keys before RoPE need compress.kv.hooks.attach(model) before the first token, and a model "
                "with a rotary embedding; else choose keys after RoPE (rope: post), or another method for keys"
            )
        if self._source is not None:
            return torch.stack(self._make_rows(start, stop), 1)
        rows = self._rows.view(start, stop)
        return torch.cat((rows, rows), -1)

    def halves(self, start: int, stop: int, keep: bool) -> Tensor:
        """Return the first half of the columns of cos and sin [B or 1, 2, stop - start, rotary width / 2].

        keep: hold them, because they are needed again.
        """
        if self._source is not None and not keep:
            return _half(*self._make_rows(start, stop))
        if self._rows.length < stop and self._source is not None:
            _extend(self._rows, _half(*self._make_rows(self._rows.length, len(self))))
        return self._rows.view(start, stop)

    def select(self, index: Tensor) -> None:
        for buffer in (self._rows, self._positions):
            if buffer.length and buffer.view().shape[0] > 1:
                buffer.take(index)

    def crop(self, count: int) -> None:
        left = max(len(self) - count, 0)
        for buffer in (self._rows, self._positions):
            buffer.crop(max(buffer.length - left, 0))

    def tensors(self) -> dict[str, Tensor]:
        """Return what it holds: "rows", or "positions" with the last "row" that they stand for; nothing if empty."""
        if not len(self):
            return {}
        if self._source is None:
            return {"rows": self._rows.view()}
        return {"positions": self._positions.view(), "row": torch.stack(self._make_rows(len(self) - 1, len(self)), 1)}

    def refill(self, tensors: Mapping[str, Tensor], modules: Iterable[nn.Module]) -> None:
        """Fill an empty one with what `tensors` returned. CompressError if no module of the model makes its rows."""
        if "rows" in tensors:
            _extend(self._rows, tensors["rows"])
        if "positions" not in tensors:
            return
        positions, row = tensors["positions"][:, 0], tensors["row"]
        for module in modules:
            cos, sin = _call(module, row.new_empty(0), positions)
            if torch.allclose(torch.stack((cos, sin), 1)[:, :, -1:].float(), row.float(), atol=1e-2):
                self.announce(positions, [module])
                self.append(cos, sin)
                return
        raise CompressError("kv_cache: no rotary embedding of this model makes the rows of the saved cache")

    def clear(self) -> None:
        self._rows.clear()
        self._positions.clear()
        self._source, self._announced = None, None

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._positions.nbytes

    @property
    def allocated_nbytes(self) -> int:
        return self._rows.allocated_nbytes + self._positions.allocated_nbytes

    def _keep_rows(self) -> None:
        """Keep rows from now on, and of the tokens so far."""
        rows = self._make_rows(0, len(self))
        self.clear()
        _extend(self._rows, _half(*rows))

    def _make_rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        assert self._source is not None
        return _call(self._source, self._like, self._positions.view(start, stop)[:, 0])


def check(cos: Tensor) -> None:
    """CompressError unless rows [..., rotary width] are of the half-split form."""
    half = cos.shape[-1] // 2
    if not torch.equal(cos[..., :half], cos[..., half:]):  # e.g. of neighbours that turn together
        raise CompressError(
            "kv_cache: the rotary embedding of this model is not of the half-split form that codecs of keys before "
            "RoPE know; choose keys after RoPE (rope: post), or another method for keys"
        )


def _half(cos: Tensor, sin: Tensor) -> Tensor:
    """cos, sin [B or 1, n, rotary width] -> [B or 1, 2, n, rotary width / 2]."""
    return torch.stack((cos, sin), 1)[..., : cos.shape[-1] // 2]


def sources(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that make cos and sin of (something of the type wanted, positions [B, n])."""
    makers = []
    for module in model.modules():
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            needed = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
            if len(needed) == 2 and all(p.kind == p.POSITIONAL_OR_KEYWORD for p in needed):
                makers.append(module)
    return makers


def _call(source: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        cos, sin = source(like, positions.long())
    return cos, sin


def _makes(source: nn.Module, positions: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether a module makes these rows, whatever the other positions are; leave its state as it is."""
    source = copy.deepcopy(source)
    if not _same(_call(source, cos, positions), (cos, sin)):
        return False
    far = torch.full_like(positions[:, :1], FAR_POSITION)
    among = _call(source, cos, torch.cat((positions, far), 1))
    return _same([rows[:, :-1] for rows in among], (cos, sin))


def _same(rows: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Bit for bit; one may be of one row for all sequences."""
    for one, other in zip(rows, expected, strict=True):
        if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype or not bool((one == other).all()):
            return False
    return True


def _extend(buffer: Buffer, rows: Tensor) -> None:
    """rows [B or 1, ...]: one for all that are alike, as long as all are."""
    if (rows == rows[:1]).all():
        rows = rows[:1]
    if buffer.length:
        batch = buffer.view().shape[0]
        if batch < rows.shape[0]:
            buffer.take(torch.zeros(rows.shape[0], dtype=torch.long))
        rows = rows.expand(max(batch, rows.shape[0]), *rows.shape[1:])
    buffer.append(rows)
