"""Store the keys or the values of one layer: sink | coded tokens | exact tail.

The first `sink` tokens stay exact for good. Later ones enter the tail and leave it in whole groups of the codec, oldest
first, as soon as `residual_length` newer tokens stay behind; what is coded is never coded again. Memory grows
geometrically, so that a long generation costs time in proportion to its length, reading aside.

Left padding: where the number of pads of each row is known, the first real tokens are the sink, and pads are coded as
copies of the next real token, so that no group sees them. Storage order then differs from token order in the first
columns; `columns` says how. Where a row of the first chunk has no more real tokens than the sink takes, all tokens stay
exact until those that follow have given every row more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from compress.errors import CompressError, NumericalError
from compress.kv.buffer import Buffer
from compress.kv.codec import Block, Codec, unrotate
from compress.kv.rope import Rope
from compress.kv.settings import Policy

ENCODE_TOKENS = 4096  # encoded at a time, rounded to the codec's granularity: bounds the float32 temporaries


class Bytes(NamedTuple):
    """Bytes of the tensors in use by part; `allocated` is what the memory behind them takes, growth room included."""

    sink: int = 0
    codes: int = 0
    scales: int = 0
    extras: int = 0
    tail: int = 0
    state: int = 0  # of sequences: what `begin` returned, rotary rows, orders of padded rows
    exact: int = 0  # of layers that stay as transformers keeps them
    static: int = 0  # calibrated tensors, whatever the length
    allocated: int = 0  # static not included

    @property
    def total(self) -> int:
        """In use, without static."""
        return sum(self) - self.static - self.allocated

    def __add__(self, other: object) -> Bytes:
        assert isinstance(other, Bytes)
        return Bytes(*(a + b for a, b in zip(self, other, strict=True)))


class Store:
    """Keys or values of one layer, [B, h, tokens, width]."""

    def __init__(self, codec: Codec, policy: Policy, rope: Rope | None = None) -> None:
        self.codec, self.policy, self.rope = codec, policy, rope
        self.reader = codec  # reads what `codec` has stored: itself, or its `upper` for drafts
        self.flush = -(-policy.flush // codec.granularity) * codec.granularity
        self.sink, self.tail = Buffer(), Buffer()
        self.fields = {name: Buffer() for name in codec.fields}
        self.state: dict[str, Tensor] = {}
        self.runs: list[int] = []  # tokens encoded together, kept where a field has a row for each
        self.coded = 0
        self.columns: Tensor | None = None  # int64 [B, c]: the column that stands at each of the first c places
        self.source: Tensor | None = None  # int64 [B, c]: the same, but for pads the column that they are copies of
        self.fetch: Callable[[Tensor], Block] | None = None  # brings rows of chosen tokens [B, h, k] from slower memory
        self.waits = False  # for rows that do not have a sink of real tokens yet; all is in the tail
        self._has_runs = any(field.tokens == 0 for field in codec.fields.values())

    def __len__(self) -> int:
        return self.sink.length + self.coded + self.tail.length

    @property
    def batch(self) -> int:
        return self._sample().shape[0] if len(self) else 0

    @property
    def keeps_halves(self) -> bool:
        """True if fused attention keeps rotary rows beside positions where there is much to read, for compiled code."""
        query = torch.empty(1, 1, 1, self.codec.spec.width, device=self._sample().device)
        return self.codec.rope == "pre" and self.codec.at_once(query) > self.codec.block

    def append(self, x: Tensor, pads: Tensor | None = None, queries: Tensor | None = None, holds: bool = False) -> None:
        """x [B, h, n, width]; pads int [B], with each chunk: how many first columns of each row are padding.

        holds: nothing is coded before `settle`.
        """
        if not x.shape[2]:
            return
        if pads is not None and (self.waits or not len(self)):
            if self.tail.length:
                x = torch.cat((self.tail.view(), x), 2)
                self.tail.drop(self.tail.length)
            most = int(pads.max())
            self.waits = most > 0 and x.shape[2] <= most + self.policy.sink
            if self.waits:
                self.tail.append(x)
                return
            if queries is not None:  # those of pads do not count
                column = torch.arange(x.shape[2] - queries.shape[2], x.shape[2], device=queries.device)
                queries = queries * (column >= pads.to(queries.device)[:, None])[:, None, :, None]
            x = self._in_front(x, pads, most)
        if not self.coded and not self.tail.length and self.sink.length < self.policy.sink:
            missing = self.policy.sink - self.sink.length
            self.sink.append(x[:, :, :missing])
            x = x[:, :, missing:]
        if holds and (self.coded or not self.codec.needs_queries):
            self.tail.append(x)
        else:
            self._add(x, queries)

    def settle(self) -> None:
        """Code what has stayed in the tail beyond the newest tokens."""
        if self.tail.length and not self.waits:
            self._add(self.tail.view(0, 0), None)

    def _add(self, x: Tensor, queries: Tensor | None) -> None:
        """Append to the tail, and code its oldest tokens."""
        over = max(0, self.tail.length + x.shape[2] - self.policy.residual_length)
        count = over // self.flush * self.flush
        if count <= self.tail.length:
            self.tail.append(x)
            self._encode(self.tail.view(0, count), queries)
            self.tail.drop(count)
        else:
            whole = torch.cat((self.tail.view(), x), 2) if self.tail.length else x
            self._encode(whole[:, :, :count], queries)
            self.tail.drop(self.tail.length)
            self.tail.append(whole[:, :, count:])

    def blocks(self, step: int) -> Iterator[tuple[slice, Block]]:
        """Yield coded tokens, counted from the first one, and their fields: about `step` at a time."""
        step = max(1, step // self.codec.granularity) * self.codec.granularity
        first = 0
        for run, length in enumerate(self.runs if self._has_runs else [self.coded]):
            for start in range(first, first + length, step):
                stop = min(start + step, first + length)
                yield slice(start, stop), self._block(start, stop, run)
            first += length

    def read(self, new: Tensor | None = None) -> Tensor:
        """Return all tokens in token order, then those of `new`: [B, h, tokens, width] in the model's type."""
        if new is not None and not len(self):
            return new
        sample = self._sample() if new is None else new
        count = len(self) + (0 if new is None else new.shape[2])
        out = sample.new_empty(*sample.shape[:2], count, self.codec.spec.width, dtype=self.codec.spec.dtype)
        first, last = self.sink.length, len(self)
        if first:
            out[:, :, :first] = self.sink.view()
        coded = out[:, :, first : first + self.coded]
        for tokens, block in self._read_blocks(self.reader.write_at_once(coded), False):
            self.reader.write(block, coded[:, :, tokens])
        if self.tail.length:
            out[:, :, last - self.tail.length : last] = self.tail.view()
        if new is not None:
            out[:, :, last:] = new
        if self.columns is not None:
            places = self.columns.argsort(-1)
            out[:, :, : places.shape[1]] = _gather(out, places)
        return out

    def read_span(self, start: int, stop: int) -> Tensor:
        """Return tokens start..stop [B, h, stop - start, width]; CompressError where left padding was moved."""
        if self.columns is not None:
            raise CompressError("kv_cache: a part of a padded batch cannot be read; read all of it")
        first, last, unit = self.sink.length, self.sink.length + self.coded, self.codec.granularity
        parts = [self.sink.view(start, min(stop, first))] if start < first else []
        if start < last and stop > first:
            low, high = max(start - first, 0), min(stop, last) - first
            begin, end = low // unit * unit, -(-high // unit) * unit
            pieces = [
                self.codec.dense(block)[:, :, max(begin - tokens.start, 0) : end - tokens.start]
                for tokens, block in self.blocks(self.codec.block)
                if tokens.start < end and tokens.stop > begin
            ]
            parts.append(torch.cat(pieces, 2)[:, :, low - begin : high - begin].to(self.codec.spec.dtype))
        if stop > last:
            parts.append(self.tail.view(max(start - last, 0), stop - last))
        return torch.cat(parts, 2)

    def scores(self, q: Tensor, out: Tensor) -> None:
        """q [B, h, m, width] float32; out [B, h, m, tokens] gets its products with all keys, in storage order."""
        first, last = self.sink.length, len(self)
        if first:
            out[..., :first] = q @ self.sink.view().float().transpose(-1, -2)
        if self.coded:
            query, coded = self.reader.query(q, self.state), out[..., first : first + self.coded]
            step = self.reader.at_once(query)
            for tokens, block in self._read_blocks(step, True):
                self.reader.write_scores(query, block, coded[..., tokens])
        if self.tail.length:
            out[..., last - self.tail.length :] = q @ self.tail.view().float().transpose(-1, -2)

    def mix(self, p: Tensor) -> Tensor:
        """p [B, h, m, tokens] float32 in storage order -> the sum of all values [B, h, m, width], weighted by p."""
        first, last = self.sink.length, len(self)
        total = p.new_zeros(*p.shape[:3], self.codec.spec.width)
        if first:
            total += p[..., :first] @ self.sink.view().float()
        if self.coded:
            coded, mixed = p[..., first : first + self.coded], None
            for tokens, block in self.blocks(self.reader.at_once(p)):
                piece = self.reader.mix(coded[..., tokens], block)
                mixed = piece if mixed is None else mixed + piece
            assert mixed is not None
            total += self.reader.output(mixed, coded.sum(-1, keepdim=True), self.state)
        if self.tail.length:
            total += p[..., last - self.tail.length :] @ self.tail.view().float()
        return total

    def crop(self, count: int) -> None:
        """Forget the last tokens. Of a group that is cut, what stays is decoded into the tail: nothing exact is lost,
        but what was coded is coded again later.
        """
        if self.columns is not None and len(self) - count < self.columns.shape[1]:
            raise CompressError("kv_cache: cannot crop into the padding of a padded batch; use a fresh cache")
        tail = min(count, self.tail.length)
        self.tail.crop(tail)
        coded = min(count - tail, self.coded)
        if coded:
            self._uncode(self.coded - coded)
        self.sink.crop(min(count - tail - coded, self.sink.length))

    def select(self, index: Tensor) -> None:
        """Rows of the batch by index [n] int64; a row may come more than once."""
        for buffer in (self.sink, self.tail, *self.fields.values()):
            buffer.take(index)
        self.state = {name: tensor.index_select(0, index.to(tensor.device)) for name, tensor in self.state.items()}
        if self.columns is not None and self.source is not None:
            self.columns, self.source = self.columns[index], self.source[index]

    def clear(self) -> None:
        for buffer in (self.sink, self.tail, *self.fields.values()):
            buffer.clear()
        self.state, self.runs, self.coded, self.waits = {}, [], 0, False
        self.columns = self.source = None

    def nbytes(self) -> Bytes:
        parts = dict.fromkeys(("codes", "scales", "extras"), 0)
        for name, field in self.codec.fields.items():
            parts[field.part] += self.fields[name].nbytes
        state = [*self.state.values(), *(order for order in (self.columns, self.source) if order is not None)]
        state_nbytes = sum(t.numel() * t.element_size() for t in state)
        buffers = (self.sink, self.tail, *self.fields.values())
        static = sum(t.numel() * t.element_size() for t in self.codec.static.values())
        return Bytes(
            **parts,
            sink=self.sink.nbytes,
            tail=self.tail.nbytes,
            state=state_nbytes,
            static=static,
            allocated=state_nbytes + sum(buffer.allocated_nbytes for buffer in buffers),
        )

    def _encode(self, x: Tensor, queries: Tensor | None) -> None:
        """x [B, h, n, width], whole groups, n may be 0."""
        step = max(1, ENCODE_TOKENS // self.codec.granularity) * self.codec.granularity
        for start in range(0, x.shape[2], step):
            piece = x[:, :, start : start + step]
            piece = piece if piece.dtype == torch.float64 else piece.float()
            turns = self._turns(self.coded, self.coded + piece.shape[2])
            if turns:
                piece = unrotate(piece, turns["cos"], turns["sin"])
            if not self.coded:
                self.state = self.codec.begin(piece, queries)
            rows = self._encode_rows(piece, turns)
            for name, buffer in self.fields.items():
                buffer.append(rows[name])
            if self._has_runs:
                self.runs.append(piece.shape[2])
            self.coded += piece.shape[2]

    def _encode_rows(self, x: Tensor, turns: Block) -> Block:
        """Return the rows of tokens x; NumericalError where finite tokens have scales that their type does not hold."""
        try:
            rows = self.codec.encode(x, {**self.state, **turns})
            is_held = all(torch.isfinite(row.float()).all() for row in rows.values() if row.is_floating_point())
        except torch.linalg.LinAlgError:
            if not torch.isfinite(x).all():
                raise
        else:
            if is_held or not torch.isfinite(x).all():
                return rows
        raise NumericalError(
            f"{self.codec.spec.where}: numbers up to {float(x.abs().max()):.2g} are beyond the 16-bit scales of this "
            "cache; leave the layer exact with kv_cache.skip_layers, or set kv_cache.method: identity"
        )

    def _uncode(self, left: int) -> None:
        """Keep `left` of the coded tokens; the tail is empty."""
        whole, run = left // self.codec.granularity * self.codec.granularity, 0
        if self._has_runs:
            ends = [0, *accumulate(self.runs)]
            run = max(i for i, end in enumerate(ends) if end <= left)
            whole = ends[run]
        stop = self.runs[run] + whole if self._has_runs and whole < left else whole + self.codec.granularity
        cut = self.codec.dense(self._block(whole, stop, run))[:, :, : left - whole] if left > whole else None
        for name, field in self.codec.fields.items():
            buffer = self.fields[name]
            buffer.crop(buffer.length - (whole // field.tokens if field.tokens else run))
        del self.runs[run:]
        self.coded = whole
        if cut is not None:
            self.tail.append(cut.to(self.codec.spec.dtype))

    def _turns(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return cos and sin of coded tokens, where the codec is pre-RoPE."""
        if self.codec.rope == "post":
            return {}
        if self.rope is None:
            raise CompressError(
                f"{self.codec.spec.where}: this codec stores keys before RoPE; call kv.hooks.attach(model)"
            )
        both = self._rotary(start, stop, self.rope.rows)
        return {"cos": both[:, 0], "sin": both[:, 1]}

    def _read_blocks(self, step: int, keep: bool) -> Iterator[tuple[slice, Block]]:
        """`blocks`; a codec that is pre-RoPE and reads more than its `block` at once has compiled code, which is given
        `halves` (see compress/kv/rope.py; keep: in each step) in place of cos and sin.
        """
        if self.codec.rope == "post" or step <= self.codec.block:
            yield from self.blocks(step)
            return
        for start in range(0, self.coded, step):
            stop = min(start + step, self.coded)
            assert self.rope is not None, "keys before RoPE were coded with it"
            halves = self._rotary(start, stop, partial(self.rope.halves, keep=keep))
            yield slice(start, stop), {**self.state, **self._rows_of(start, stop, 0), "halves": halves}

    def _rotary(self, start: int, stop: int, rows: Callable[[int, int], Tensor]) -> Tensor:
        """Return rows(first, last) [B or 1, 2, n, ...] of coded tokens; pads have those of what they are copies of."""
        first, last = self.sink.length + start, self.sink.length + stop
        turns = rows(first, last)
        if self.source is None or first >= self.source.shape[1]:
            return turns
        moved = self.source[:, first:last]
        head = _gather(rows(0, self.source.shape[1] + 1).expand(len(moved), -1, -1, -1), moved)
        return torch.cat((head, turns.expand(len(moved), -1, -1, -1)[:, :, moved.shape[1] :]), 2)

    def _block(self, start: int, stop: int, run: int) -> Block:
        return {**self.state, **self._turns(start, stop), **self._rows_of(start, stop, run)}

    def _rows_of(self, start: int, stop: int, run: int) -> dict[str, Tensor]:
        """Return the rows of all fields of coded tokens."""
        rows = {}
        for name, field in self.codec.fields.items():
            ends = (start // field.tokens, -(-stop // field.tokens)) if field.tokens else (run, run + 1)
            rows[name] = self.fields[name].view(*ends)
        return rows

    def _in_front(self, x: Tensor, pads: Tensor, most: int) -> Tensor:
        """Move the first real tokens of each row before its pads, which become copies of the next one."""
        sink = self.policy.sink
        if not most:
            return x
        place = torch.arange(most + sink, device=x.device)[None]
        pads = pads.to(x.device)[:, None]
        moved = torch.where(place < sink, place + pads, place - sink)
        self.columns = torch.where(place < sink + pads, moved, place)
        is_pad = (place >= sink) & (place < sink + pads)
        self.source = torch.where(is_pad, pads + sink, self.columns)
        return torch.cat((_gather(x, self.source), x[:, :, most + sink :]), 2)

    def _sample(self) -> Tensor:
        """Return any stored tensor [B, h, ...], for its device."""
        return next(b.view() for b in (self.sink, self.tail, *self.fields.values()) if b.length)


def _gather(x: Tensor, columns: Tensor) -> Tensor:
    """x [B, h, n, width], columns [B, c] -> [B, h, c, width]."""
    return x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
