"""Divide what is read of a long past between compiled code, which takes whole blocks, and plain code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.kernels import dispatch, kv_contract
from compress.kernels.kv_contract import Rotary
from compress.kv.codec import ALL, Block, Codec, Spec

AT_ONCE = 2048  # tokens that are written
NO_TURNS = Rotary(0, *(torch.empty(1, 1, 0, device="cpu") for _ in range(2)))


def can_turn(rotary: int) -> bool:
    """Return whether compiled code can turn so many channels: half of them must be whole pieces."""
    return rotary % (2 * kv_contract.PIECE) == 0


def whole_tokens(codes: Tensor, reach: int) -> int:
    """Return how many of the first tokens compiled code may read, which reads `reach` bytes of a row of codes [B, 1, n,
    bytes], so that it may read some of those that follow.
    """
    more = -(-max(0, reach - codes.shape[3]) // max(1, codes.shape[3]))
    return max(0, codes.shape[2] - more) // kv_contract.BLOCK * kv_contract.BLOCK


def turns(codec: Codec, block: Block, whole: int) -> tuple[int, Rotary]:
    """Return how many of the first tokens, `whole` at most, compiled code can turn, or need not, and their rotary
    embedding.
    """
    if codec.rope == "post":
        return whole, NO_TURNS
    halves = block.get("halves")
    if halves is None or halves.dtype not in kv_contract.DTYPES or not can_turn(2 * halves.shape[-1]):
        return 0, NO_TURNS
    return whole, Rotary(2 * halves.shape[-1], halves[:, 0], halves[:, 1])


def rest(codec: Codec, block: Block, first: int) -> Iterator[tuple[slice, Block]]:
    """Yield the tokens from `first` on, as plain code reads them."""
    for start in range(first, block["codes"].shape[2], codec.block):
        tokens = slice(start, start + codec.block)
        rows = {name: block[name][:, :, tokens] for name in codec.fields}
        rows |= {name: block[name][:, tokens] for name in ("cos", "sin") if name in block}
        if "halves" in block:
            both = torch.cat((block["halves"][:, :, tokens],) * 2, -1)
            rows |= {"cos": both[:, 0], "sin": both[:, 1]}
        yield tokens, rows


class Compiled(Codec):
    """Base of codecs with a row of codes of all heads for each token, `codes` [B, 1, n, bytes], which kernels read.

    reader, writer: the names of these kernels (compress/kernels/kv_contract.py), which read rows and write them out.
    """

    def __init__(self, spec: Spec, static: Mapping[str, Tensor], reader: str, writer: str) -> None:
        super().__init__(spec, static)
        self.rope = "pre" if spec.kind == "keys" else "post"
        self.reader, self.writer = reader, writer
        self._made: dict[int, Any] = {}

    def is_read_by(self, kernel: Any) -> bool:
        """Return whether a kernel can read or write the rows."""
        raise NotImplementedError

    def reach(self) -> int:
        """Return how many bytes of a row the kernels read."""
        raise NotImplementedError

    def laid_out(self, kernel: Any, rotary: int) -> Any:
        """Return the calibrated tensors as the kernel reads them, where `rotary` channels of a head turn."""
        raise NotImplementedError

    def stored(self, block: Block, count: int) -> Any:
        """Return the rows of the first `count` tokens as a kernel takes them."""
        raise NotImplementedError

    def operands(self, block: Block, count: int, made: Any) -> tuple[Any, ...]:
        """Return what a kernel takes between the queries and the rotary embedding; made: what `laid_out` returned."""
        return self.stored(block, count), made

    def at_once(self, rows: Tensor) -> int:
        return ALL if self._reader(rows) is not None else self.block

    def write_scores(self, query: Tensor, block: Block, out: Tensor) -> None:
        kernel = self._reader(query, block)
        whole, given = self._given(kernel, block)
        if whole:
            kernel.scores(query, *given, out[..., :whole])
        for tokens, part in rest(self, block, whole):
            out[..., tokens] = self.scores(query, part)

    def write_at_once(self, out: Tensor) -> int:
        return AT_ONCE if self._writer(out) is not None else self.block

    def write(self, block: Block, out: Tensor) -> None:
        kernel = self._writer(out)
        whole, given = self._given(kernel, block)
        if whole:
            kernel.write(*given, out[:, :, :whole])
        for tokens, part in rest(self, block, whole):
            out[:, :, tokens] = self.dense(part)

    def _given(self, kernel: Any, block: Block) -> tuple[int, tuple[Any, ...]]:
        """Return how many of the first tokens a kernel (None: there is none) reads, and what it takes to read them."""
        whole, turned = (0, NO_TURNS) if kernel is None else turns(self, block, self._whole(block))
        if not whole:
            return 0, ()
        return whole, (*self.operands(block, whole, self._transform(kernel, turned.width)), turned)

    def _reader(self, rows: Tensor, block: Block | None = None) -> Any:
        """Return the kernel that reads the codes (of a block) for these queries or probabilities, None if none does."""
        codes = None if block is None else block["codes"].shape[2] * len(rows) * self.spec.heads * self.spec.width
        return self._kernel(self.reader, rows) if kv_contract.is_worthwhile(rows, codes) else None

    def _writer(self, out: Tensor) -> Any:
        is_large = out.dtype in kv_contract.DTYPES and out.numel() > kv_contract.SMALL
        return self._kernel(self.writer, out) if is_large else None

    def _kernel(self, name: str, like: Tensor) -> Any:
        kernel = dispatch.kv(like.device, name)
        return kernel if kernel is not None and self.is_read_by(kernel) else None

    def _whole(self, block: Block) -> int:
        """Return how many of the first tokens compiled code may read."""
        return whole_tokens(block["codes"], self.reach())

    def _transform(self, kernel: Any, rotary: int) -> Any:
        """Return what `laid_out` does, made once, whose memory counts as static."""
        if rotary not in self._made:
            self._made[rotary] = self.laid_out(kernel, rotary)
            self.static[f"turned{rotary}"] = self._made[rotary].back
        return self._made[rotary]
