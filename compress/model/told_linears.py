"""Tell the linears of a checkpoint by names and shapes, where no class of a model tells them.

A linear is a matrix `NAME.weight`, unless its name is that of a table, a head, a router, a norm, a convolution, a part
beside the text model, a layer for further tokens, or what steers a recurrent state (`KEPT`), or it has a row for each
token. Experts in one tensor [experts, .., ..] are taken apart where shapes tell which side is that of the inputs; the
first half of a fused gate and up is the gate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from compress.storage.checkpoint import Checkpoint, Readable

LOOKED_UP, HEAD, FURTHER_TOKENS = "a table that is looked up", "an output head", "a layer that predicts further tokens"
BESIDE_TEXT = "beside the text model"
Rules = Sequence[tuple[str, str]]  # what the name of a module has -> why it is kept
KEPT: Rules = (
    (r"(^|\.)(mtp\w*|nextn\w*)\.", FURTHER_TOKENS),
    (r"(^|\.)\w*(visual|vision|image|audio|speech|tower|multi_modal|merger)\w*\.", BESIDE_TEXT),
    (r"(^|\.)(\w*embed\w*|wte|wpe)(\.|$)", LOOKED_UP),
    (r"(^|\.)(output|score|classifier|pooler|head|\w*_head)$", HEAD),
    (r"(^|\.)\w*router\w*(\.|$)|(^|\.)(gate|\w*expert_gate|wg)$", "it chooses experts"),
    (r"(^|\.)(in_proj_(a|b|ba)|[abfg]_proj|[fg]_[ab]_proj|dt_proj|x_proj)$", "it steers a recurrent state"),
    (r"(^|\.)\w*conv\w*(\.|$)", "a convolution"),
    (r"norm\w*$", "a norm"),
)
OF_HEADS: Rules = (  # the same of draft heads
    (r"(^|\.)(eh_proj|fc|[eh]_proj|input_proj)$", "it joins an embedding and a hidden state"),
    (r"(^|\.)shared_head\.\w+$", HEAD),
    (r"(^|\.)(indexer|compressor)\.", "it chooses tokens"),
    *KEPT[1:],
)
HALVES = {"gate_up_proj": ("gate_proj", "up_proj")}  # fused tensor -> the names of its halves
UP, DOWN = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")  # tensors of all experts
EXPERT = re.compile(r"(^|\.)\w*experts?\.\d+\.")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Matrix(NamedTuple):
    """A weight [out, in] that may be quantized: a stored tensor, or a part of one with those of all experts."""

    stored: Readable
    shape: tuple[int, int]
    expert: int | None = None  # its number in the stored tensor [experts, .., ..]
    is_turned: bool = False  # the stored part is [in, out]
    part: tuple[int, int] = (0, 1)  # which of so many equal parts of the rows [out] it is

    def read(self) -> Tensor:
        """Return the weight [out, in] as it is stored."""
        if self.expert is None:
            return self.stored.read()
        matrix = self.stored.rows(self.expert, self.expert + 1)[0]
        return (matrix.T if self.is_turned else matrix).chunk(self.part[1])[self.part[0]].contiguous()


class Told(NamedTuple):
    """What the rules say of a checkpoint."""

    matrices: dict[str, Matrix]  # module -> its weight
    kept: dict[str, str]  # module, or tensor of more than one dimension -> why it stays as it is


def tell(checkpoint: Checkpoint, rules: Rules = KEPT) -> Told:
    """Tell the matrices of linears from all other tensors of a checkpoint, of which only the headers are looked at."""
    matrices, kept = dict[str, Matrix](), dict[str, str]()
    for name, stored in sorted(checkpoint.tensors.items()):
        if len(stored.shape) < 2:
            continue  # norms, biases and other small tensors
        module = name.removesuffix(".weight")
        if reason := reason_of_name(module, rules) or _reason_of_shape(module, stored, checkpoint.config, rules):
            kept[module] = reason
        elif len(stored.shape) == 2 and module != name:
            matrices[module] = Matrix(stored, (stored.shape[0], stored.shape[1]))
        elif isinstance(parts := _experts(checkpoint, module, stored), str):
            kept[module] = parts
        else:
            matrices |= parts
    return Told(matrices, kept)


def reason_of_name(module: str, rules: Rules = KEPT) -> str | None:
    """Return why the name of a module is that of no linear to be packed, None for any other."""
    reasons = (reason for pattern, reason in rules if re.search(pattern, module))
    is_inner = NUMBER.search(module) is not None  # in a layer, where no head of the model is
    return next((reason for reason in reasons if not (is_inner and reason == HEAD and rules is KEPT)), None)


def _reason_of_shape(module: str, stored: Readable, config: Mapping[str, Any], rules: Rules) -> str | None:
    """Return why a tensor is no weight of a linear in the model's layers, None where nothing says so."""
    if rules is KEPT and is_further(module, config):
        return FURTHER_TOKENS
    if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
        return f"stored as {str(stored.dtype).removeprefix('torch.')}"
    return "a row for each token" if stored.shape[0] == _size(config, "vocab_size") else None


def start_of_head(name: str) -> str | None:
    """Return what the names of all modules of a draft head begin with, of the name of one of its tensors."""
    start = re.match(KEPT[0][0].replace("(^|\\.)", r"(?:.*?\.)??"), name) or re.match(r".*?(^|\.)layers\.\d+\.", name)
    return None if start is None else start[0]


def is_further(module: str, config: Mapping[str, Any]) -> bool:
    """Return whether a module is of a layer that predicts further tokens: by its name, or behind the last block."""
    layers, number = _size(config, "num_hidden_layers"), re.search(r"(?:^|\.)layers\.(\d+)\.", module)
    is_behind = layers is not None and number is not None and int(number[1]) >= layers
    return is_behind or re.search(KEPT[0][0], f"{module}.") is not None


def _size(config: Mapping[str, Any], key: str) -> int | None:
    """Return a size that a configuration names, or one of its sections, but none of a part beside the text model."""
    inner = [(name, part) for name, part in config.items() if isinstance(part, dict)]
    sections = (config, *(part for name, part in inner if reason_of_name(f"{name}.") != BESIDE_TEXT))
    return next((section[key] for section in sections if type(section.get(key)) is int), None)


def _experts(checkpoint: Checkpoint, module: str, stored: Readable) -> dict[str, Matrix] | str:
    """Return the weights of experts that lie in one tensor [experts, .., ..], or why it stays as it is."""
    parent, _, last = module.rpartition(".")
    if len(stored.shape) != 3 or "expert" not in parent or last not in (*HALVES, *UP, *DOWN):
        return "no matrix of a linear"
    if {f"{module}_bias", f"{module}.bias"} & checkpoint.tensors.keys():
        return "experts with biases: in which order their rows lie is not told"
    is_turned = _is_turned(checkpoint, parent)
    if is_turned is None:
        return "experts in one tensor: which of its sides is that of the inputs is not told"
    rows, columns = stored.shape[:0:-1] if is_turned else stored.shape[1:]
    parts = HALVES.get(last, (last,))
    shape, count = (rows // len(parts), columns), len(parts)
    return {
        f"{parent}.{expert}.{name}": Matrix(stored, shape, expert, is_turned, (index, count))
        for expert in range(stored.shape[0])
        for index, name in enumerate(parts)
    }


def _is_turned(checkpoint: Checkpoint, parent: str) -> bool | None:
    """Return whether fused experts are stored as [experts, in, out], None where shapes do not tell."""

    def shape_of(names: Iterable[str]) -> tuple[int, ...] | None:
        full = (f"{parent}.{name}{ending}" for name in names for ending in ("", ".weight"))
        return next((checkpoint.tensors[name].shape[1:] for name in full if name in checkpoint.tensors), None)

    up, down = shape_of((*HALVES, *UP)), shape_of(DOWN)
    if up is None or down is None or len(up) != 2 or len(down) != 2:
        return None
    parts, hidden = 2 if shape_of(HALVES) else 1, _size(checkpoint.config, "hidden_size")
    is_plain = up[0] == parts * down[1] and up[1] == down[0] and hidden in (None, up[1])
    is_turned = up[1] == parts * down[0] and up[0] == down[1] and hidden in (None, up[0])
    return is_turned if is_plain != is_turned else None
