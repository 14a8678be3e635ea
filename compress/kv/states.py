"""Keep the states of linear attention and of state space models (Mamba) as integers of 12 bits.

    cache = make_cache(model.config, {"states": 12})        # beside a method for keys and values, or alone

Such a layer has no keys and values of tokens but a state [B, heads, ..., rows, columns] that every token changes, so
that errors of rounding are carried on. A state x is stored as int8 codes q with an int4 residual r and a float32 scale
s of each row, the largest size in it / 127: x = s (q + r / 16). SGLang rounds states of stored prefixes to int8 like
that; the residual is what makes it good enough for every token: a random gated delta rule of 64 x 64 has 0.22 of
bfloat16's error, and 3.5 times bfloat16's error with int8 alone (benchmarks/kv_states.py).

Where we differ: 16 q + r is one rounding to 12 bits, not two, so that no residual is cut at the end of its range; and
rows lie along the last axis in all models. For the delta rule these are the value channels of a key channel. For
Mamba they are the state's numbers of a channel: channels differ in size more than these do. The scale is float32: where
a state only decays, its codes then stay as they are.

transformers hands a state to the model in `get_recurrent_state`. Some layers give another one back in
`update_recurrent_state`, some change it in place and say nothing. So what was handed out is coded anew before anything
else looks at the codes: at most one layer's state is in floating point between passes. States of less than three axes
are no sums over tokens; they and the states of convolutions stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionLayer

from compress.errors import CompressError

StateBits = Literal[8, 12]  # 8 has no residual: for prefixes that are stored once
LARGEST = 127  # code of the largest number of a row
RESIDUAL_STEPS = 16  # steps of the residual are one of the codes


def is_matrix(state: Tensor) -> bool:
    """Return whether a state [B, ...] is coded: it has rows and columns."""
    return state.dim() > 2


class StateCodes:
    """A state as codes int8 [..., rows, columns], residuals, two a byte, and scales float32 [..., rows, 1].

    It has the methods that transformers' layers call of a state: index_select, zero_, to.
    """

    def __init__(self, state: Tensor, bits: StateBits = 12) -> None:
        self.dtype, self.bits = state.dtype, bits
        self._lent: Tensor | None = None
        self._encode(state)

    def _encode(self, state: Tensor) -> None:
        x = state.detach().float()
        self.scales = x.abs().amax(-1, keepdim=True) / LARGEST
        steps = torch.where(self.scales == 0, 1, self.scales)
        self.residuals: Tensor | None = None
        if self.bits == 8:
            self.codes = (x / steps).round().to(torch.int8)
            return
        codes = (x / steps * RESIDUAL_STEPS).round().to(torch.int16)
        high = (codes + RESIDUAL_STEPS // 2) >> 4
        self.codes = high.to(torch.int8)
        low = F.pad(codes - high * RESIDUAL_STEPS + RESIDUAL_STEPS // 2, (0, codes.shape[-1] % 2)).to(torch.uint8)
        first, second = low.chunk(2, -1)
        self.residuals = first | second << 4

    @classmethod
    def of_parts(cls, parts: dict[str, Tensor], dtype: torch.dtype) -> StateCodes:
        """Return the state whose `parts` these are."""
        state = cls.__new__(cls)
        state.dtype, state._lent = dtype, None
        state.codes, state.scales, state.residuals = parts["codes"], parts["scales"], parts.get("residuals")
        state.bits = 8 if state.residuals is None else 12
        return state

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that are stored."""
        self.settle()
        residuals = {} if self.residuals is None else {"residuals": self.residuals}
        return {"codes": self.codes, **residuals, "scales": self.scales}

    def decode(self) -> Tensor:
        """Return the state in the type that the model gave it."""
        self.settle()
        codes = self.codes.float()
        if self.residuals is not None:
            low = torch.cat((self.residuals & RESIDUAL_STEPS - 1, self.residuals >> 4), -1)[..., : codes.shape[-1]]
            codes += (low.float() - RESIDUAL_STEPS // 2) / RESIDUAL_STEPS
        return (codes * self.scales).to(self.dtype)

    def lend(self) -> Tensor:
        """Return the state to somebody who may change it in place; the next look at the codes codes it anew."""
        self._lent = self.decode()
        return self._lent

    def settle(self) -> None:
        """Code anew what was lent."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self._encode(lent)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are stored."""
        return sum(x.numel() * x.element_size() for x in self.parts().values())

    def index_select(self, axis: int, index: Tensor) -> StateCodes:
        """Return the state with these rows of the batch."""
        index = index.to(self.device)
        return self.of_parts({name: x.index_select(axis, index) for name, x in self.parts().items()}, self.dtype)

    def zero_(self) -> StateCodes:
        """Forget everything, in place."""
        self._lent = None
        for tensor in self.parts().values():
            tensor.zero_()
        return self

    def to(self, *args: Any, **kwargs: Any) -> StateCodes:
        """Return the state on another device."""
        return self.of_parts({name: x.to(*args, **kwargs) for name, x in self.parts().items()}, self.dtype)


class CodedStates(LinearAttentionLayer):
    """What a layer with coded states does otherwise; `coded_layer` puts it before a layer of transformers."""

    is_compileable = False
    _layer_type = None  # a subclass with a type takes its place for all models

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store the state; return it as the next token will see it."""
        if not is_matrix(recurrent_states):
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        state: Any = StateCodes(recurrent_states)
        if self.device is None:
            self.dtype, self.device = state.dtype, state.device
        self.recurrent_states[state_idx] = state
        self.is_recurrent_states_initialized[state_idx] = True
        return state.decode()

    @property
    def coded_states(self) -> dict[int, StateCodes]:
        """Return the states that are codes, by number."""
        states: dict[int, Any] = self.recurrent_states
        return {i: x for i, x in states.items() if isinstance(x, StateCodes)}

    def reset(self) -> None:
        """Forget everything, also how many sequences there were."""
        super().reset()
        for number in range(self.number_of_states):
            self.conv_states[number] = self.recurrent_states[number] = None
            self.is_conv_states_initialized[number] = self.is_recurrent_states_initialized[number] = False

    def offload(self) -> None:
        raise CompressError("kv_cache: a coded cache cannot be offloaded; make it without offloading")

    prefetch = offload

    @property
    def batch_size(self) -> int:
        """Return the number of sequences; -1 before there are any."""
        states = [x for each in (self.conv_states, self.recurrent_states) for x in each.values() if x is not None]
        return len(states[0]) if states else -1

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._take(torch.arange(max(0, self.batch_size)).repeat_interleave(repeats))
        if getattr(super(), "batch_repeat_interleave", None):
            super().batch_repeat_interleave(repeats)  # type: ignore[misc]

    def batch_select_indices(self, indices: Tensor) -> None:
        self._take(torch.arange(max(0, self.batch_size))[indices.cpu()])
        if getattr(super(), "batch_select_indices", None):
            super().batch_select_indices(indices)  # type: ignore[misc]

    def _take(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        for states in (self.conv_states, self.recurrent_states):
            states |= {i: x.index_select(0, rows.to(x.device)) for i, x in states.items() if x is not None}


@cache
def coded_layer(layer: type[LinearAttentionLayer]) -> type[LinearAttentionLayer]:
    """Return the class of a layer of transformers with coded states."""
    return type(f"Coded{layer.__name__}", (CodedStates, layer), {"_layer_type": None})
