"""Copy rows between memory of different strides, on a CPU."""

from __future__ import annotations

import torch

from compress.kernels.cpu.emitter import LANES, Writer


class CopyRows(Writer):
    """Writes rows of x, contiguous, to out, whose rows are `stride` numbers apart."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("copy", "x out", "rows width stride", dtype)
        x, out = self.pointers
        rows, width, stride = self.integers
        kind = {torch.float32: self.float, torch.float16: self.half, torch.bfloat16: self.short}[dtype]
        b = self.b
        with self.loop(rows) as row:
            source, target = b.mul(row, width), b.mul(row, stride)

            def write(first: object, rest: object) -> None:
                value = self.load_some(x, b.add(source, first), kind, LANES, rest)
                self.store_some(value, out, b.add(target, first), rest)

            self.in_chunks(width, LANES, write)
        b.ret_void()
