"""What processes of a run hand each other is data: it arrives as it was, and nothing else is made of it."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layering import MODULES, parse

from compress.formats.stored import Stored
from compress.ranks import Portion, wire
from compress.types import PackedWeight

CPU = torch.device("cpu")
VALUES: list[Any] = [
    *(None, True, 0, -(2**70), 0.1, 1e-310, -0.0, math.inf, "text ä\n", "", b"".decode()),
    [1, [2, (3, {4, 5})], {}],
    {"a": 1, ("b", 2): [None], 3: {"c": frozenset({"d"})}},
    *(slice(1, None, 2), slice(None), range(3, 9, 2), Path("/a/b"), torch.bfloat16, Portion(1, range(2))),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_arrive_as_they_were(value: Any) -> None:
    found = wire.decode(wire.encode(value), CPU)
    assert found == value and type(found) is type(value) and repr(found) == repr(value)


def test_tensors_arrive_bit_for_bit() -> None:
    tensors = [torch.randn(3, 5), torch.randn(4).bfloat16(), torch.tensor(7), torch.zeros(0, 2), torch.ones(3) > 0]
    tensors += [torch.randn(6, 4).t(), torch.arange(9, dtype=torch.uint8)[1::3], torch.tensor([math.nan, math.inf])]
    tensors += [torch.randn(2).to(torch.float8_e4m3fn), torch.nn.Parameter(torch.ones(2))]
    found = wire.decode(wire.encode({"x": tensors, "y": (1, tensors[0])}), CPU)
    for before, after in zip([*tensors, tensors[0]], [*found["x"], found["y"][1]], strict=True):
        assert before.dtype == after.dtype and before.shape == after.shape and after.is_contiguous()
        flat = [each.detach().contiguous().view(-1).view(torch.uint8) for each in (before, after)]
        assert torch.equal(*flat)
    weight = PackedWeight(Stored("int", {"bits": 4}), {"codes": torch.arange(6)}, (2, 3))
    again = wire.decode(wire.encode(weight), CPU)
    assert type(again) is PackedWeight and (again.stored, again.shape) == (weight.stored, weight.shape)
    assert torch.equal(again.tensors["codes"], weight.tensors["codes"])


@pytest.mark.parametrize(
    "value",
    [object(), len, print, torch.nn.Linear(1, 1), ValueError("x"), 1j, b"raw"],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="are not sent to other processes"):
        wire.encode([value])


@pytest.mark.parametrize(
    "plain",
    [
        ["object", "os", "system", "true"],
        ["object", "compress.__main__", "main"],
        ["object", "compress.ranks.wire", "sys"],
        ["object", "compress.ranks.wire", "encode", 1],
        ["object", "compress.ranks.wire", "Path", "x"],
        ["object", "compress.errors", "CompressError", "x"],
        ["object", "compress.ranks", "Ranks"],
        ["eval", "1"],
        ["dtype", "load"],
        ["tensor", "float32", [10**9], False],
        ["tensor", "float32", [-1], False],
        [],
        {"a": 1},
    ],
    ids=str,
)
def test_other_messages_are_refused(plain: Any) -> None:
    text = json.dumps(plain).encode()
    message = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError, KeyError)):
        wire.decode(message, CPU)


PICKLING = {f"{name}_object" for name in ("all_gather", "gather")}
PICKLING |= {f"{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")}


def test_no_process_unpickles() -> None:
    """The object collectives of torch.distributed are pickles."""
    for name in MODULES:
        nodes = list(ast.walk(parse(name)))
        words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not words & PICKLING, name
