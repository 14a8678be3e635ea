"""Find whether the output features of a linear stand in another order than those of the original."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LIKE = 0.5  # correlation above which an output feature is that of the original
SURE = 0.75  # correlation of an output feature with that of another place, for it to have moved there
MIN_CORRELATION_GAIN = 0.1  # what another place has to bring a feature, or a head, to count as its place
MIN_SHIFTED_ROWS = 8  # rows that move by the same distance, for it to be reported


def unit(y: Tensor) -> Tensor:
    """Return features [tokens, features] with norm 1 over tokens; those that are 0 stay so."""
    return y / y.norm(dim=0).clamp_min(1e-20)


def correlations(y: Tensor, other: Tensor) -> Tensor:
    """Return the absolute correlation (about 0) of each feature with that of the other; [tokens, features] each."""
    return (unit(y) * unit(other)).sum(0).abs()


def find_moved(y: Tensor, other: Tensor, head_dim: int) -> str:
    """Return in words which features of the original stand elsewhere; "" where they do not, or cannot be found.

    A feature has moved where its correlation is high, and clearly higher, at another place. Where features are in
    another basis, heads are looked for.
    """
    lost = int((correlations(y, other) < LIKE).sum())
    if not lost:
        return ""
    y, other = y - y.mean(0), other - other.mean(0)
    pairs = elsewhere(y, other, torch.arange(y.shape[1], device=y.device), max(2, lost / 2))
    if not pairs:
        return _moved_heads(y, other, head_dim) if 2 * lost > y.shape[1] else ""
    return describe(pairs)


def elsewhere(y: Tensor, other: Tensor, rows: Tensor, fewest: float) -> list[tuple[int, int]]:
    """Return (row, place) of the features that stand elsewhere, of those in `rows`; y, other [tokens, features].

    None where they are fewer than `fewest`, or two have one place. Both are centered over tokens.
    """
    alike = (unit(y[:, rows]).T @ unit(other)).abs()
    best, places = alike.max(1)
    sure = (best > SURE) & (best > alike.gather(1, rows[:, None])[:, 0] + MIN_CORRELATION_GAIN)
    if sure.sum() < fewest or len(places[sure].unique()) < sure.sum():
        return []
    return list(zip(rows[sure].tolist(), places[sure].tolist(), strict=True))


def _moved_heads(y: Tensor, other: Tensor, head_dim: int) -> str:
    """Return in words which heads stand elsewhere, by their Gram matrices over tokens.

    y, other [tokens, features], centered.
    """
    if y.shape[1] % head_dim or y.shape[1] == head_dim:
        return ""
    grams = [torch.stack([(h @ h.T).flatten() for h in part.split(head_dim, 1)]) for part in (y, other)]
    alike = nn.functional.normalize(grams[0]) @ nn.functional.normalize(grams[1]).T
    best, places = alike.max(1)
    heads = [(h, int(at)) for h, at in enumerate(places) if at != h and best[h] > alike[h, h] + MIN_CORRELATION_GAIN]
    if not heads or {h for h, _ in heads} != {at for _, at in heads}:
        return ""
    return "heads in another order: " + ", ".join(f"head {h} stands at {at}" for h, at in heads)


def describe(pairs: list[tuple[int, int]]) -> str:
    """Return in words which rows stand where; pairs (row of the original, where it stands now), ascending."""
    by_shift: dict[int, list[int]] = {}
    for row, place in pairs:
        by_shift.setdefault(place - row, []).append(row)
    if len(pairs) < MIN_SHIFTED_ROWS * len(by_shift):
        return f"rows in another order: {len(pairs)} of those from {pairs[0][0]} to {pairs[-1][0]}"
    runs = [(rows[0], rows[-1], shift) for shift, rows in by_shift.items() if len(rows) > 1]
    return "rows in another order: " + ", ".join(
        f"rows {a} to {b} stand at {a + shift} to {b + shift}" for a, b, shift in runs
    )
