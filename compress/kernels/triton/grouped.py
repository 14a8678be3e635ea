"""Multiply rows of activations with the `int` weights of experts on a GPU, each row with those of its own expert.

The layout is that of vLLM's moe_align_block_size (Kwon et al. 2023, arXiv:2309.06180, and its code): pairs of a row and
an expert are sorted by expert, and each expert's are filled up to whole blocks, of which a program multiplies one. The
grid has as many blocks as there can be; those behind the last return. All of it is sizes that are known before the ids
are, so that a CUDA graph holds it. The kernel is in `_grouped.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.formats.int import Params, padded_shape
from compress.kernels.grouped import Experts
from compress.kernels.triton import _grouped, _int, products
from compress.kernels.triton import int as single

BLOCKS = (8, 16, 32)  # rows of activations that a program multiplies


def prepare(experts: Experts, dtype: torch.dtype) -> IntExperts | None:
    """Return the weights of experts stacked, if all are `int` codes of one shape that tensor cores can read."""
    kinds = {(weight.format, weight.params, weight.shape) for each in experts for weight in each}
    if len(kinds) > 1:
        return None
    ((format, params, shape),) = kinds
    fits = format == "int" and single.prepare({}, params, shape) is not None
    return IntExperts(experts, params, shape) if fits else None


class IntExperts:
    """Weights of experts: of each one or several that read the same inputs, all of one shape."""

    def __init__(self, experts: Experts, params: Params, shape: tuple[int, int]) -> None:
        self.params, self.shape, self.count, self.parts = params, shape, len(experts), len(experts[0])
        self.width = self.parts * shape[0]
        self.tensors = {
            name: torch.stack([each[part].tensors[name] for part in range(self.parts) for each in experts])
            for name in experts[0][0].tensors
        }  # [parts * experts, ...]
        self.stacks = [
            {name: stack[part * self.count :][: self.count] for name, stack in self.tensors.items()}
            for part in range(self.parts)
        ]
        self.device = products.properties(next(iter(self.tensors.values())).device)

    def block(self, pairs: int) -> int:
        """Return the rows of activations that a program multiplies, where so many pairs are spread among experts."""
        most = max(single.configurations(self.params.bits, self.device.major))
        return next(rows for rows in BLOCKS if rows >= min(pairs / self.count, most, BLOCKS[-1]))

    def route(self, ids: Tensor) -> list[Tensor]:
        """Return the pairs in blocks, int32 [blocks, rows], and the expert of each block, int32 [blocks].

        A place without a pair holds the number of pairs, a block without an expert the number of experts.
        """
        pairs, rows = ids.shape[0], self.block(ids.shape[0])
        blocks = min(pairs, self.count + pairs // rows)
        # A number in `where`, or put in a place, would be copied from the host, which a graph being captured refuses.
        keys, order = ids.masked_fill((ids < 0) | (ids > self.count), self.count).sort(stable=True)
        numbers = torch.arange(self.count + 1, device=ids.device)
        ends = torch.searchsorted(keys, numbers, right=True)  # in `order`
        starts = torch.nn.functional.pad(ends[:-1], (1, 0))
        filled = ((ends - starts)[:-1] + rows - 1) // rows
        last = filled.cumsum(0)  # blocks up to an expert's last
        places = torch.arange(pairs, device=ids.device) - starts[keys]
        own = (last - filled)[keys.clamp(max=self.count - 1)] * rows + places
        own = own.masked_fill(keys == self.count, blocks * rows)  # behind the last, and dropped
        slots = torch.full((blocks * rows + 1,), pairs, dtype=torch.int32, device=ids.device)
        slots = slots.scatter(0, own, order.int())[: blocks * rows]
        owners = torch.searchsorted(last, torch.arange(blocks, device=ids.device), right=True)
        return [slots.view(blocks, rows), owners.int()]

    def product(self, x: Tensor, ids: Tensor, route: list[Tensor]) -> Tensor:
        """See `kernels.grouped.ExpertKernel`; launches kernels only."""
        params, shape, (slots, owners) = self.params, self.shape, route
        wide = x if x.dtype in (torch.float16, torch.bfloat16) else x.half()
        stored_rows, columns = padded_shape(params, shape)
        if columns > shape[1]:
            wide = torch.nn.functional.pad(wide, (0, columns - shape[1]))
        pairs, (blocks, rows) = ids.shape[0], slots.shape
        out = x.new_zeros(pairs, self.width)
        config = self.config(rows, blocks)
        tiles, narrow = params.split(columns)
        scales = self.tensors["scales"]
        _grouped.multiply[-(-stored_rows // config.block_n), blocks, self.parts](
            wide, *single.planes(self.tensors, params), scales, self.tensors.get("zeros", scales), slots, owners, out,
            pairs, pairs // x.shape[0], self.count, shape[0], stored_rows, tiles, self.width,
            **self.constants(config, rows), NARROW=narrow, BF16=wide.dtype == torch.bfloat16, USE_ASM=_int.COMPILED,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return out

    def config(self, rows: int, blocks: int) -> single.Config:
        """Return the first configuration for blocks of so many rows that gives every multiprocessor its programs."""
        params, device = self.params, self.device
        stored_rows, _ = padded_shape(params, self.shape)
        for config in single.configurations(params.bits, device.major)[rows]:
            config = single.fit(config, params.bits, rows, single.most_words(params), device.shared)
            programs = -(-stored_rows // config.block_n) * blocks * self.parts
            if programs * 3 >= device.multiprocessors * config.programs * 2:
                break
        return config

    def constants(self, config: single.Config, rows: int) -> dict[str, Any]:
        """Return the constants of the kernel that depend on the weights and the launch."""
        return {
            **single.layout(self.params),
            "BLOCK_N": config.block_n,
            "BLOCK_M": rows,
            "BLOCK_WORDS": config.block_words,
        }
