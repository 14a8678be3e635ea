"""rANS: the plain and the compiled form against one symbol at a time, the entropy, and damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.loops import rans as compiled
from compress.numerics import rans

needs_compiler = pytest.mark.skipif(not compiled.available(), reason="nothing is compiled on this machine")
FORMS: list[Any] = [rans, pytest.param(compiled, marks=needs_compiler)]


def sample(streams: int, count: int, columns: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols uint8 [streams, count] of normal distributions, three tables, and their frequencies."""
    generator = torch.Generator().manual_seed(count)
    contexts = torch.arange(columns) % 3
    of = contexts[torch.arange(count) % columns]
    noise = torch.randn(streams, count, generator=generator) * torch.tensor([1.0, 6.0, 25.0])[of]
    symbols = (noise + 128).round().clamp(0, 255).to(torch.uint8)
    counts = torch.bincount((of * 256 + symbols.long()).flatten(), minlength=3 * 256).reshape(3, 256)
    return symbols, contexts, rans.frequencies(counts)


def slow(symbols: list[int], contexts: list[int], freqs: list[list[int]]) -> list[int]:
    """The words of one stream, unsigned, by the definition."""
    states, words = [1 << 16] * 32, []
    for i in reversed(range(len(symbols))):
        table, symbol = freqs[contexts[i % len(contexts)]], symbols[i]
        freq, first, x = table[symbol], sum(table[:symbol]), states[i % 32]
        if x >= freq * 2**20:
            words.append(x % 2**16)
            x //= 2**16
        states[i % 32] = x // freq * 2**12 + first + x % freq
    return [half for x in states for half in (x % 2**16, x // 2**16)] + words[::-1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 500])
def test_streams_are_those_of_the_definition(form: Any, count: int) -> None:
    symbols, contexts, freqs = sample(2, count)
    streams = form.encode(symbols, contexts, freqs)
    for stream, row in zip(streams, symbols, strict=True):
        expected = slow(row.tolist(), contexts.tolist(), freqs.tolist())
        assert [word % 2**16 for word in stream.tolist()] == expected
    assert torch.equal(form.decode(streams, contexts, freqs, count), symbols)


@pytest.mark.parametrize("form", FORMS)
def test_bits_are_the_entropy(form: Any) -> None:
    symbols, contexts, freqs = sample(1, 21_000)
    of = contexts[torch.arange(21_000) % 7]
    counts = torch.bincount(of * 256 + symbols[0].long(), minlength=768).reshape(3, 256).double()
    shares = counts / counts.sum(1, keepdim=True)
    entropy = -(counts * shares.clamp(min=1e-30).log2()).sum().item() / 8
    nbytes = 2 * len(form.encode(symbols, contexts, freqs)[0])
    assert entropy < nbytes < 1.01 * entropy + 64


def test_frequencies() -> None:
    counts = torch.zeros(4, 256, dtype=torch.int64)
    counts[0, 5] = 10**6
    counts[1] = 1
    counts[1, 0] = 10**6  # 255 rare ones take more than their share
    counts[2, :3] = torch.tensor([1, 1, 1])
    freqs = rans.frequencies(counts)
    assert freqs.sum(1).tolist() == [4096] * 4
    assert torch.equal(freqs[:3] > 0, counts[:3] > 0)
    assert freqs[0, 5] == 4096 and freqs[1, 0] == 4096 - 255 and sorted(freqs[2, :3].tolist()) == [1365, 1365, 1366]
    assert freqs[3].tolist() == [16] * 256


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "damage", [lambda s: s[:-1], lambda s: s[:10], lambda s: torch.cat((s, s[-1:])), lambda s: s + 1]
)
def test_damage_is_found(form: Any, damage: Callable[[Tensor], Tensor]) -> None:
    symbols, contexts, freqs = sample(1, 300)
    stream = form.encode(symbols, contexts, freqs)[0]
    with pytest.raises(ValueError, match="does not end where it should"):
        form.decode([damage(stream)], contexts, freqs, 300)
