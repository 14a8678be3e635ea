"""Read what a decoder block is made of, by one call of it: norms, linears, attention, MLP, in the order they run.

No family is known by name. A block is read if it has the shape

    x + after(attention(before(x))), then x + after_mlp(mlp(before_mlp(x)))

where each norm may be missing. Attention makes queries, keys and values by three linears or by one whose outputs lie
behind each other, may normalize heads, turns them, and ends with one linear. An MLP that is not down(act(gate) * up)
stays a module that is called. What is read may be wrong: whoever makes a program of it compares it with the block.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compress.kernels.cpu.norm import NormKind
from compress.runtime.linear import PackedLinear, is_plain_linear

READING = "compress_reading"  # the name of our attention function, which blocks that are read are told
# What attention may be told: what is read here, and what does not change what it computes.
KNOWN = {"scaling", "softcap", "sliding_window", "dropout", "is_causal", "position_ids", "cache_position", "use_cache"}
# Norms in 16 bits give what float32 gives up to this part of it.
NORM_TOLERANCE = 0.02
LARGEST_EPS = 1e-2
CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


class UnreadableBlockError(Exception):
    """A block, or a model, is not of the shape that is read; transformers runs it."""


@dataclass(frozen=True)
class AttentionParts:
    module: nn.Module
    inputs: tuple[nn.Module, ...]  # linears of queries, keys and values, or one for all
    output: nn.Module
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    queries: int  # heads
    stored: int
    width: int  # of a head
    scale: float
    softcap: float
    window: int  # positions that a query sees; 0: all


@dataclass(frozen=True)
class GatedParts:
    inputs: tuple[nn.Module, ...]  # linears of gate and up, or one for both
    activation: str
    down: nn.Module


@dataclass(frozen=True)
class BlockParts:
    block: nn.Module
    before: nn.Module | None
    attention: AttentionParts
    after: nn.Module | None
    before_mlp: nn.Module | None
    mlp: GatedParts | nn.Module
    after_mlp: nn.Module | None

    @property
    def norms(self) -> tuple[nn.Module | None, ...]:
        return self.before, self.after, self.before_mlp, self.after_mlp


class _Event(NamedTuple):
    name: str
    module: nn.Module
    read: int  # memory of its input
    written: int  # memory of its output


class _Attended(NamedTuple):
    module: nn.Module
    query: Tensor
    key: Tensor
    told: Mapping[str, Any]
    events: int  # that were before


_reading = threading.local()  # `attend`: the attention function of the block that is read in this thread


def read(block: nn.Module, call: Callable[[nn.Module], Tensor], states: Tensor) -> BlockParts:
    """Return the parts of a block; UnreadableBlockError for other shapes.

    call(twin) runs a twin of the block on `states` [B, 1, hidden]. It shares all tensors, but is watched and told
    another attention function without other threads, which may be running the block, seeing it.
    """
    events, attended, alive = list[_Event](), list[_Attended](), list[Any]()
    twins: dict[nn.Module, nn.Module] = {}
    twin = _twin(block, twins)
    originals = {id(copied): module for module, copied in twins.items()}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        source = args[0] if args else kwargs.get("hidden_states")
        result = output[0] if isinstance(output, tuple) else output
        if isinstance(source, Tensor) and isinstance(result, Tensor):
            alive.extend((source, result))  # memory that is freed would be used again
            events.append(_Event(name, originals[id(module)], source.data_ptr(), result.data_ptr()))

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **told: Any) -> Any:
        attended.append(_Attended(originals[id(module)], query, key, told, len(events)))
        return _attend(query, key, value, told), None

    for name, module in twin.named_modules():
        if name and not isinstance(module, nn.Dropout):
            module.register_forward_hook(_with_name(record, name), with_kwargs=True)
        config = vars(module).get("config")
        if hasattr(config, "_attn_implementation"):
            vars(module)["config"] = own = copy.copy(config)
            own._attn_implementation_internal = READING
    ALL_ATTENTION_FUNCTIONS.register(READING, _attend_here)
    _reading.attend = attend
    try:
        call(twin)
    finally:
        del _reading.attend
    if len(attended) != 1:
        raise UnreadableBlockError(f"{type(block).__name__} attends {len(attended)} times")
    return _parts(block, events, attended[0], states.data_ptr())


def _with_name(record: Callable[..., None], name: str) -> Callable[..., None]:
    return lambda module, args, kwargs, output: record(name, module, args, kwargs, output)


def _twin(module: nn.Module, twins: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with the attributes of another one, and hooks and children of its own, which are twins, too."""
    if module not in twins:
        twins[module] = twin = object.__new__(type(module))
        vars(twin).update(vars(module))
        vars(twin).update({name: copy.copy(held) for name, held in vars(module).items() if name.startswith("_forward")})
        children = module._modules.items()
        vars(twin)["_modules"] = {name: None if each is None else _twin(each, twins) for name, each in children}
    return twins[module]


def is_reading() -> bool:
    """Return whether a block is being read in this thread: all of it has to run."""
    return hasattr(_reading, "attend")


def _attend_here(*args: Any, **kwargs: Any) -> Any:
    return _reading.attend(*args, **kwargs)


def _attend(query: Tensor, key: Tensor, value: Tensor, told: Mapping[str, Any]) -> Tensor:
    """Return attention without a mask, as plainly as can be: [B, n, H, width]."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.float().repeat_interleave(groups, 1) for each in (key, value))
    scaling = told.get("scaling")
    scores = query.float() @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if (cap := told.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    return (scores.softmax(-1) @ values).to(query.dtype).transpose(1, 2).contiguous()


def _parts(block: nn.Module, events: list[_Event], attended: _Attended, states: int) -> BlockParts:
    """Sort what has run into the shape that is known."""
    modules = dict(block.named_children())
    children = [event for event in events if "." not in event.name and event.name in modules]
    where = next((i for i, each in enumerate(children) if each.module is attended.module), None)
    if where is None:
        raise UnreadableBlockError(f"attention is no child of {type(block).__name__}")
    own = next(name for name, each in block.named_modules() if each is attended.module)
    before, behind = children[:where], children[where + 1 :]
    if len(before) > 1 or (before and before[0].read != states):
        raise UnreadableBlockError("more than a norm runs before attention")
    after = behind.pop(0) if behind and behind[0].read == children[where].written else None
    mlps = [i for i, each in enumerate(behind) if not is_norm(each.module)]
    if len(mlps) != 1 or mlps[0] > 1 or len(behind) - mlps[0] > 2:
        raise UnreadableBlockError("what follows attention is no norm and one MLP")
    mlp = behind[mlps[0]]
    before_mlp = behind[0] if mlps[0] else None
    after_mlp = behind[mlps[0] + 1] if len(behind) > mlps[0] + 1 else None
    norms = [None if event is None else event.module for event in (before[0] if before else None, after)]
    norms += [None if event is None else event.module for event in (before_mlp, after_mlp)]
    if any(norm is not None and not is_norm(norm) for norm in norms):
        raise UnreadableBlockError("a module beside attention and MLP is no norm")
    if before_mlp is not None and mlp.read != before_mlp.written:
        raise UnreadableBlockError("the MLP does not read its norm")
    attention = _attention(attended, [event for event in events if event.name.startswith(f"{own}.")], events)
    gated = _gate_parts(mlp, [event for event in events if event.name.startswith(f"{mlp.name}.")])
    return BlockParts(block, norms[0], attention, norms[1], norms[2], gated or mlp.module, norms[3])


def _attention(attended: _Attended, own: list[_Event], events: list[_Event]) -> AttentionParts:
    """Return the parts of an attention module, of whose own modules these have run."""
    query, key, told = attended.query, attended.key, attended.told
    if unknown := sorted(n for n, value in told.items() if n not in KNOWN and value is not None and value is not False):
        raise UnreadableBlockError(f"attention is told {', '.join(unknown)}")
    earlier = set(map(id, events[: attended.events]))
    first = [event for event in own if id(event) in earlier]
    inputs = [event for event in first if is_linear(event.module)]
    norms = [event for event in first if is_norm(event.module)]
    output = [event for event in own if id(event) not in earlier]
    queries, stored, width = query.shape[1], key.shape[1], query.shape[-1]
    sizes = [event.module.out_features for event in inputs]
    known = ([queries * width, stored * width, stored * width], [(queries + 2 * stored) * width])
    if sizes not in known or len({event.read for event in inputs}) != 1:
        raise UnreadableBlockError("queries, keys and values are not made by linears of one input")
    if len(output) != 1 or not is_linear(output[0].module) or len(first) != len(inputs) + len(norms):
        raise UnreadableBlockError("attention has other modules than linears and norms of heads")
    if len(norms) not in (0, 2) or any(weight_size(event.module) not in (None, width) for event in norms):
        raise UnreadableBlockError("norms are not those of heads of queries and keys")
    scaling, window = told.get("scaling"), told.get("sliding_window")
    return AttentionParts(
        attended.module,
        tuple(event.module for event in inputs),
        output[0].module,
        norms[0].module if norms else None,
        norms[1].module if norms else None,
        queries,
        stored,
        width,
        width**-0.5 if scaling is None else float(scaling),
        float(told.get("softcap") or 0.0),
        int(window or 0),
    )


def _gate_parts(mlp: _Event, own: list[_Event]) -> GatedParts | None:
    """Return the parts of an MLP of gate, up and down; None for any other."""
    linears = [event for event in own if is_linear(event.module)]
    others = [event for event in own if not is_linear(event.module)]
    if len(others) != 1 or len(linears) not in (2, 3) or own[-1] is not linears[-1]:
        return None
    activation, down = curve(others[0].module), linears[-1].module
    inputs = [event for event in linears[:-1] if event.read == mlp.read]
    if activation is None or len(inputs) != len(linears) - 1:
        return None
    if len(inputs) == 2:
        inputs.sort(key=lambda event: event.written != others[0].read)
    inner = cast(Any, down).in_features
    sizes = [cast(Any, each.module).out_features for each in inputs]
    if inputs[0].written != others[0].read or sizes not in ([inner, inner], [2 * inner]):
        return None
    return GatedParts(tuple(event.module for event in inputs), activation, down)


def gives_zeros(module: nn.Module) -> bool:
    """Return whether a linear was dropped, and with it what ends with it."""
    return isinstance(module, PackedLinear) and module.is_dropped


def adds_nothing(output: nn.Module, norm: nn.Module | None) -> bool:
    """Return whether what ends with a linear, and a norm behind it, gives zeros."""
    return gives_zeros(output) and getattr(norm, "bias", None) is None


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, PackedLinear) or is_plain_linear(module)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module has at most vectors for weights, like a norm, and a small number to divide by."""
    parameters = dict(module.named_parameters(recurse=False))
    if next(module.children(), None) is not None or not parameters.keys() <= {"weight", "bias"}:
        return False
    return all(each.dim() == 1 for each in parameters.values()) and bool(_small_numbers(module))


def weight_size(norm: nn.Module) -> int | None:
    weight = dict(norm.named_parameters(recurse=False)).get("weight")
    return None if weight is None else weight.numel()


def _small_numbers(norm: nn.Module) -> list[float]:
    return [value for value in vars(norm).values() if isinstance(value, float) and 0 < value <= LARGEST_EPS]


@torch.no_grad()
def norm_kind(norm: nn.Module, width: int, dtype: torch.dtype) -> NormKind:
    """Return what a norm of `width` channels computes, found by running it; UnreadableBlockError for other modules."""
    parameters = dict(norm.named_parameters(recurse=False))
    weight, bias = parameters.get("weight"), parameters.get("bias")
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0), device="cpu")
    x = (x * torch.tensor([1.0, 1.0, 1e-2, 1e-3], device="cpu")[:, None] + 0.1 * x[:, :1]).to(dtype)
    expected = norm(x).float()
    best, least = None, NORM_TOLERANCE
    for eps, offset, centred in product(_small_numbers(norm), (False, True), (False, True)):
        if weight is None and offset:
            continue
        wide = x.float() - x.float().mean(-1, keepdim=True) if centred else x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * (weight.float() + offset)
        y = y if bias is None else y + bias.float()
        error = float(((y - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        if error < least:
            types = [None if each is None else each.dtype for each in (weight, bias)]
            best, least = NormKind(eps, types[0], offset, centred, types[1]), error
    if best is not None:
        return best
    raise UnreadableBlockError(f"{type(norm).__name__} is no norm that is known")


@torch.no_grad()
def curve(module: nn.Module) -> str | None:
    """Return the name of the activation function that a module is, None for any other."""
    if next(module.parameters(), None) is not None:
        return None
    x = torch.linspace(-8, 8, 333, device="cpu")
    y = module(x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    return next((name for name, function in CURVES.items() if torch.allclose(function(x), y, atol=1e-6)), None)
