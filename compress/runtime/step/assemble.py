"""Make programs of blocks that were read: compiled calls, and modules that are called between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.kernels import llvm
from compress.kernels.calls import ActivationRows, CompiledCall
from compress.kernels.cpu import attention
from compress.kernels.cpu.attention_tables import SHARES, HeadSizes
from compress.kernels.cpu.gate import Add, Gate
from compress.kernels.cpu.norm import Norm
from compress.kernels.cpu.program import Program
from compress.kernels.cpu.rotary import HeadKinds, SplitHeads
from compress.runtime.step.linears import linear_calls
from compress.runtime.step.memory import Memory
from compress.runtime.step.structure import (
    AttentionParts,
    BlockParts,
    GatedParts,
    UnreadableBlockError,
    adds_nothing,
    norm_kind,
)

# Whether threads share attention is decided for a context of this length.
USUAL_TOKENS = 1024
Turns = tuple[Tensor, Tensor] | None  # cos and sin [1 or rows, turned]; None: there is no rotary embedding


class Assembly:
    """Calls of blocks, in order, made for the memory that they work in."""

    def __init__(self, memory: Memory, hidden: int) -> None:
        self.memory, self.hidden = memory, hidden
        self.parts: list[CompiledCall | Callable[[], None]] = []
        self.compiled, self.linears = 0, 0  # linears: those that are compiled, and all
        self.heads: list[HeadSizes] = []
        self.spaces: list[tuple[int, int]] = []  # of calls of attention: number in `parts`, argument
        self.states = memory.tensor("states", hidden)

    def extend(self, other: Assembly) -> None:
        """Add what another assembly of the same memory holds."""
        self.spaces += [(len(self.parts) + number, argument) for number, argument in other.spaces]
        self.parts += other.parts
        self.heads += other.heads
        self.compiled += other.compiled
        self.linears += other.linears

    def add_attention(self, parts: BlockParts, layer: int, turns: Turns, turned: int) -> None:
        """Add the attention of a block, with its norms.

        layer: the row of its cache in the tables; turned: channels of a head that are turned. Attention that was
        dropped is left out where it adds nothing; of its keys and values the cache shows zeros.
        """
        if adds_nothing(parts.attention.output, parts.after):
            return
        source = self._norm(parts.before, self.states, "normed")
        self._attention(parts.attention, source, layer, turns, turned)
        self._add(self._norm(parts.after, self.memory.tensor("out", self.hidden), "normed"))

    def add_mlp(self, parts: BlockParts) -> None:
        """Add the MLP of a block, with its norms; one that was dropped is left out where it adds nothing."""
        if isinstance(parts.mlp, GatedParts) and adds_nothing(parts.mlp.down, parts.after_mlp):
            return
        source = self._norm(parts.before_mlp, self.states, "normed")
        if isinstance(parts.mlp, GatedParts):
            self._gate(parts.mlp, source)
        else:
            self._module(parts.mlp, source)
        self._add(self._norm(parts.after_mlp, self.memory.tensor("out", self.hidden), "normed"))

    def add_norm(self, norm: nn.Module) -> Tensor:
        """Add the norm behind the blocks, and return where its result lies."""
        return self._norm(norm, self.states, "normed")

    def finish(self, threads: int) -> Steps:
        """Return all that was added, to be run by so many threads."""
        return Steps(self, threads)

    def _norm(self, norm: nn.Module | None, source: Tensor, name: str) -> Tensor:
        if norm is None:
            return source
        kind, dtype = norm_kind(norm, source.shape[1], self.memory.dtype), self.memory.dtype
        target = self.memory.tensor(name, source.shape[1])
        weights = [_address(norm, each) for each in ("weight", "bias")]
        sizes = self.memory.rows, source.shape[1]
        self.parts.append(
            CompiledCall(llvm.function(Norm, kind, dtype), (source.data_ptr(), *weights, target.data_ptr(), *sizes))
        )
        return target

    def _linear(self, linears: Sequence[Any], source: Tensor, name: str) -> Tensor:
        """Add linears whose outputs lie behind each other in the tensor of a name."""
        memory, width = self.memory, sum(each.out_features for each in linears)
        target = memory.tensor(name, width)
        rows = ActivationRows(memory.rows, memory.dtype, source.data_ptr(), target.data_ptr(), width)
        calls = linear_calls(linears, rows, memory.take, memory.new == 1)
        memory.release()
        self.linears += len(linears)
        if calls is not None:
            self.compiled += len(linears)
            self.parts += calls
            return target

        def call() -> None:
            x, first = memory.by_sequence(source), 0
            for each in linears:
                target[:, first : first + each.out_features] = each(x).flatten(0, 1)
                first += each.out_features

        self.parts.append(call)
        return target

    def _attention(self, parts: AttentionParts, source: Tensor, layer: int, turns: Turns, turned: int) -> None:
        memory, dtype = self.memory, self.memory.dtype
        mixed = self._linear(parts.inputs, source, "heads")
        size = parts.queries * parts.width
        q, out = memory.tensor("queries", size), memory.tensor("attended", size)
        norms = [None if n is None else norm_kind(n, parts.width, dtype) for n in (parts.query_norm, parts.key_norm)]
        kinds = HeadKinds(parts.queries, parts.stored, parts.width, turned, *norms)
        tables = memory.states[layer].data_ptr(), memory.caches[layer].data_ptr()
        weights = [0 if n is None else _address(n, "weight") for n in (parts.query_norm, parts.key_norm)]
        turning, step = (0, 0), 0
        if turns is not None and turned:
            turning, step = (turns[0].data_ptr(), turns[1].data_ptr()), turned if turns[0].shape[0] > 1 else 0
        places = (*tables, mixed.data_ptr(), *turning, *weights, q.data_ptr())
        self.parts.append(
            CompiledCall(llvm.function(SplitHeads, kinds, dtype), (*places, memory.rows, mixed.shape[1], step))
        )
        heads = HeadSizes(parts.queries, parts.stored, parts.width, parts.width, parts.scale, parts.softcap)
        if not attention.supports(heads, dtype, dtype):
            raise UnreadableBlockError(f"heads of {parts.width} channels are not attended to here")
        attend, combine = attention.functions(heads, dtype, dtype, dtype)
        read = 2 * memory.batch * parts.stored * parts.width * USUAL_TOKENS
        least = max(1, SHARES * attention.THREAD // read)
        self.spaces += [(len(self.parts), 3), (len(self.parts) + 1, 2)]
        strides = memory.new * size, parts.width, size
        self.parts.append(CompiledCall(attend, (*tables, q.data_ptr(), 0, 0, SHARES, *strides), SHARES, least, 4))
        self.parts.append(CompiledCall(combine, (*tables, 0, out.data_ptr(), 0, SHARES)))
        self.heads.append(heads)
        self._linear((parts.output,), out, "out")

    def _gate(self, parts: GatedParts, source: Tensor) -> None:
        opened = self._linear(parts.inputs, source, "gates")
        width = opened.shape[1] // 2
        inner = self.memory.tensor("inner", width)
        up = opened.data_ptr() + width * opened.element_size()
        gate = llvm.function(Gate, parts.activation, self.memory.dtype)
        places = opened.data_ptr(), up, inner.data_ptr()
        self.parts.append(CompiledCall(gate, (*places, self.memory.rows, width, opened.shape[1])))
        self._linear((parts.down,), inner, "out")

    def _module(self, module: nn.Module, source: Tensor) -> None:
        target = self.memory.tensor("out", self.hidden)

        def call() -> None:
            result = module(self.memory.by_sequence(source))
            target.copy_((result[0] if isinstance(result, tuple) else result).view_as(target))

        self.parts.append(call)

    def _add(self, source: Tensor) -> None:
        add, width = llvm.function(Add, self.memory.dtype, self.memory.dtype), self.hidden
        self.parts.append(
            CompiledCall(add, (self.states.data_ptr(), source.data_ptr(), self.memory.rows, *[width] * 3))
        )


class Steps:
    """Programs and modules that run one after the other."""

    def __init__(self, assembly: Assembly, threads: int) -> None:
        self.memory, self._heads = assembly.memory, set(assembly.heads)
        self.parts: list[Callable[[], None]] = []
        self._spaces: list[tuple[Program, int, int]] = []
        self._space = 0  # the address that they are told
        spaces, calls = dict(assembly.spaces), list[CompiledCall]()
        wanted: list[tuple[int, int]] = []

        def close() -> None:
            if calls:
                program = Program(calls, threads)
                self.parts.append(program.run)
                self._spaces.extend((program, *each) for each in wanted)
                calls.clear()
                wanted.clear()

        for number, part in enumerate(assembly.parts):
            if isinstance(part, CompiledCall):
                if number in spaces:
                    wanted.append((len(calls), spaces[number]))
                calls.append(part)
            else:
                close()
                self.parts.append(part)
        close()

    def reserve(self, tokens: int) -> None:
        """Make room for attention to so many tokens of each sequence."""
        memory = self.memory
        size = max((attention.space_size(heads, memory.batch, memory.new, tokens) for heads in self._heads), default=0)
        if memory.space.numel() < size:
            memory.space = torch.empty(size, dtype=torch.float32, device="cpu")
        if self._space != memory.space.data_ptr():  # another program of this memory may have made it
            self._space = memory.space.data_ptr()
            for program, record, argument in self._spaces:
                program.set_argument(record, argument, self._space)

    def run(self) -> None:
        for part in self.parts:
            part()


def _address(norm: nn.Module, name: str) -> int:
    parameter = dict(norm.named_parameters(recurse=False)).get(name)
    return 0 if parameter is None else parameter.data_ptr()
