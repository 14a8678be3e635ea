"""Statistics of experts, summed by the process that quantizes them: the bits of one process, and held once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import ranks
from compress.calib import stats
from compress.calib.routed_sums import RoutedSum, exchange
from compress.calib.stats import HessianSum
from helpers import forked, problems

COLUMNS, CHUNK, DEVICE = 24, 4, torch.device("cpu")
KEYS = {"a": 0, "b": 1, "c": 1}  # expert -> owner
BATCHES = 5


def read(key: str, batch: int) -> tuple[Tensor, Tensor | None]:
    """What an expert reads of a batch; nothing reaches c in the first one."""
    count = {"a": 9, "b": batch, "c": 0 if batch == 0 else 5}[key]
    seed = 10 * batch + ord(key)
    weights = problems.random(count, seed=seed + 500).abs() if key == "b" else None
    return problems.inputs(max(count, 1), COLUMNS, seed)[:count].bfloat16(), weights


def in_order(batches: list[int]) -> dict[str, HessianSum]:
    sums = {key: HessianSum(COLUMNS, DEVICE) for key in KEYS}
    for batch in batches:
        for key, total in sums.items():
            inputs, weights = read(key, batch)
            total.add(inputs, CHUNK, weights)
        if batch == 0:
            stats.agree(sums, ranks.Ranks())
    return sums


def shared(folder: Path) -> None:
    with ranks.joined("cpu") as both:
        sums = {key: RoutedSum(COLUMNS, DEVICE, owner, both.rank) for key, owner in KEYS.items()}
        assert [key for key, total in sums.items() if total.total is not None] == [
            key for key, owner in KEYS.items() if owner == both.rank
        ]
        mine = range(BATCHES)[both.part(BATCHES)]
        if not both.is_main:
            stats.agree(sums, both)
        for number in range(3):  # the second process has two batches
            if number < len(mine):
                for key, total in sums.items():
                    inputs, weights = read(key, mine[number])
                    total.add(inputs, CHUNK, weights)
                if mine[number] == 0:
                    stats.agree(sums, both)
            exchange(sums, both)
        for key, total in sums.items():
            if total.total is not None:
                found = total.total.finish(key)
                save_file({"hessian": found.hessian, "count": torch.tensor(found.count)}, folder / key)


def test_owners_have_the_bits_of_one_process(tmp_path: Path) -> None:
    assert forked.together(2, lambda: shared(tmp_path)) == [0, 0]
    for key, total in in_order(list(range(BATCHES))).items():
        expected = total.finish(key)
        found = load_file(tmp_path / key)
        assert torch.equal(found["hessian"], expected.hessian) and found["count"] == expected.count > 0


@pytest.mark.parametrize("key", KEYS)
def test_one_process_hands_to_itself(key: str) -> None:
    alone, routed = HessianSum(COLUMNS, DEVICE), RoutedSum(COLUMNS, DEVICE, 0, 0)
    for batch in range(1, BATCHES):
        inputs, weights = read(key, batch)
        for total in (alone, routed):
            total.add(inputs, CHUNK, weights)
        exchange({key: routed}, ranks.Ranks())
    assert routed.total is not None and not routed.waiting
    assert torch.equal(routed.total.finish(key).hessian, alone.finish(key).hessian)
