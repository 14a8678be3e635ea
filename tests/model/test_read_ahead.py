"""Weights of the next block are read while a GPU works on the present one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from compress.errors import CheckpointError
from compress.model import skeleton as skeletons
from compress.model.paging import ReadAhead
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import open_checkpoint

CPU = torch.device("cpu")


def test_a_gpu_finds_the_next_block_read(pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, found = (Skeleton(open_checkpoint(pico_dir("llama"))) for _ in range(2))
    load = found._load
    monkeypatch.setattr(found, "_load", lambda names, device: load(names, CPU))
    monkeypatch.setattr(skeletons, "_place_buffers", lambda block, device: None)
    found.load_block(0, torch.device("cuda"))
    prefix = found.block_prefix(1)
    expected = {x.name for name, group in found.sources.items() if name.startswith(prefix) for x in group}
    assert set(found._ahead.coming) == expected
    found.free()
    block, wanted = found.load_block(1, torch.device("cuda")), plain.load_block(1, CPU)
    assert found._ahead.coming == {}, "all were taken, and no block is behind"
    for (name, ours), theirs in zip(block.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    plain.load_block(0, CPU)
    assert plain._ahead.coming == {} and plain._ahead.thread is None, "on a CPU nothing is read ahead"


class Broken:
    """A tensor whose file has ended."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self) -> torch.Tensor:
        raise CheckpointError("x.safetensors ended within tensor 'w'; copy the file again")


def test_an_error_comes_where_the_tensor_is_asked_for() -> None:
    ahead, broken = ReadAhead(), Broken("w")
    ahead.begin([broken])  # type: ignore[list-item]
    with pytest.raises(CheckpointError, match="ended within"):
        ahead.take(broken)  # type: ignore[arg-type]


def test_what_is_not_taken_is_let_go(pico_dir: Callable[..., Path]) -> None:
    tensors = list(open_checkpoint(pico_dir("llama")).tensors.values())
    ahead = ReadAhead()

    def begun(some: Iterable[int]) -> set[str]:
        ahead.begin(tensors[i] for i in some)
        return set(ahead.coming)

    assert begun((0, 1)) == {tensors[0].name, tensors[1].name} and begun((2,)) == {tensors[2].name}
    assert torch.equal(ahead.take(tensors[0]), tensors[0].read())
    ahead.forget()
    assert ahead.coming == {}
