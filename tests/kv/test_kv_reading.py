"""Reading chosen tokens only: what each method chooses and what comes out, against slow references in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kv.layer import KVCache
from compress.kv.sparse.reader import Tally
from helpers.reading_cases import SIZES, WIDTH, Case, best, cache, channels, chunks, normal, shared, step


def rounded(keys: Tensor, bits: int) -> Tensor:
    """Min-max integers of groups of 32 tokens of a channel, keys [h, n, c]."""
    found = keys.double().clone()
    for head in range(keys.shape[0]):
        for start in range(0, keys.shape[1], 32):
            for c in range(keys.shape[2]):
                x = keys[head, start : start + 32, c]
                scale = ((x.max() - x.min()) / (2**bits - 1)).clamp(min=1e-5).half().double()
                low = x.min().half().double()
                codes = ((x.double() - low) / scale).round().clamp(0, 2**bits - 1)
                found[head, start : start + 32, c] = codes * scale + low
    return found


def by_labels(case: Case, row: int, queries: Tensor, keys: Tensor, coded: int) -> Tensor:
    own = channels(case.heads[1], case.config.channels).long()
    labels = torch.stack([keys[h][:, own[h]] for h in range(case.heads[1])])
    if case.config.labels == "store":
        labels = rounded(labels, case.config.label_bits)
    q = queries[:, -1].unflatten(0, (case.heads[1], -1))
    q = torch.stack([q[h][:, own[h]] for h in range(case.heads[1])]).flatten(0, 1)
    scores = shared(q, labels)
    if case.config.mean == "scores":
        mean = q.unflatten(0, (case.heads[1], -1)).double().mean(1)
        scores = torch.stack([labels[h].double() @ mean[h] for h in range(case.heads[1])])
    return best(scores, math.ceil(case.config.keep * coded))


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
@pytest.mark.parametrize("codec", ["identity", "kivi", "lloyd", "gear"])
@pytest.mark.parametrize("own", [{}, {"labels": "codes"}, {"mean": "scores"}], ids=str)
def test_double_sparsity(heads: tuple[int, int], codec: str, own: dict[str, Any]) -> None:
    if own and codec != "kivi":
        pytest.skip("once is enough; only kivi stores channels")
    read = {"method": "double_sparsity", "keep": 0.2, "channels": 8, "dense_layers": 0, **own}
    for found, expected in Case(read, codec, heads).run(by_labels):
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)


FULL = {
    "double_sparsity": {"keep": 1.0, "dense_layers": 0},
    "tidal": {"keep": 1.0, "dense_layers": 0},
    "actqkv": {"keep": 1.0, "dense_layers": 0},
    "quest": {"keep": 1.0, "dense_layers": 0},
    "selective_values": {"eps": 0.0},
    "loopserve": {"keep": 1.0, "alpha": 1.0},
}


@pytest.mark.parametrize("method", FULL)
@pytest.mark.parametrize("codec", ["identity", "kivi", "gear"])
def test_reading_all_is_dense_attention_bit_for_bit(method: str, codec: str) -> None:
    dense, other = (cache(read, codec, layers=2) for read in (None, {"method": method, **FULL[method]}))
    for q, k, v in chunks(SIZES):
        for i in range(2):
            assert torch.equal(step(dense.layers[i], q, k, v), step(other.layers[i], q, k, v))


PARTS = {
    "double_sparsity": {"keep": 0.2, "dense_layers": 0, "channels": 8},
    "tidal": {"keep": 0.2, "dense_layers": 0, "layers": [0]},
    "actqkv": {"keep": 0.2, "dense_layers": 0, "window": 4, "budget": "equal"},
    "quest": {"keep": 0.2, "dense_layers": 0, "page": 8},
    "selective_values": {"eps": 0.01},
}


def fed(made: KVCache, data: Any, mask: Any = None) -> Tensor:
    """The outputs of layer 1, whose layer 0 has other keys and queries, for all forward passes; a batch."""
    found = []
    for i, (q, k, v) in enumerate(data):
        own = None if mask is None else mask(i)
        step(made.layers[0], q.flip(-1), k.roll(1, -1), v, own)
        found.append(step(made.layers[1], q, k, v, own))
    return torch.cat(found, 1)


@pytest.mark.parametrize("method", PARTS)
@pytest.mark.parametrize("codec", ["identity", "kivi", "lloyd"])
def test_several_queries_read_as_one_by_one(method: str, codec: str) -> None:
    """Under a mask, and from gathered rows: 8 tokens at once or one after another, while none of them is coded."""
    read = {"method": method, **PARTS[method]}
    data = chunks([119, 8])
    single = [data[0], *(tuple(x[:, :, n : n + 1] for x in data[1]) for n in range(8))]
    found = [fed(cache(read, codec, layers=2, flush=32), each)[:, -8:] for each in (data, single)]
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("budget", ["equal", "density"])
@pytest.mark.parametrize("method", PARTS)
def test_a_row_reads_what_it_reads_alone(method: str, budget: str) -> None:
    """In a batch, with left padding beside it."""
    if budget == "density" and method != "actqkv":
        pytest.skip("only actqkv has budgets by layer")
    read = {"method": method, **PARTS[method], **({"budget": budget} if method == "actqkv" else {})}
    data, pad = chunks([150, 1, 5, 1, 1]), 32  # groups of labels and blocks begin where the pads end
    padded = [(q.clone(), k.clone(), v.clone()) for q, k, v in data]
    alone = [tuple(x[1:] for x in data[0])]
    for x, own in zip(padded[0], alone[0], strict=True):
        x[1, :, pad:] = own[0, :, : 150 - pad]
        x[1, :, :pad] = 7.0
    alone = [tuple(x[:, :, : 150 - pad] for x in alone[0]), *(tuple(x[1:] for x in part) for part in data[1:])]
    ends = torch.tensor([part[0].shape[2] for part in data]).cumsum(0)

    def mask(i: int) -> Tensor:
        tokens, n = int(ends[i]), data[i][0].shape[2]
        seen = torch.ones(2, 1, n, tokens, dtype=torch.bool).tril(tokens - n)
        seen[1, ..., :pad] = False
        return seen | torch.eye(tokens, dtype=torch.bool)[tokens - n :]  # a pad sees itself

    made = cache(read, "identity", layers=2)
    made.pads = torch.tensor([0, pad])
    found = fed(made, padded, mask)[1, 150:]
    torch.testing.assert_close(found, fed(cache(read, "identity", layers=2), alone)[0, 150 - pad :], atol=2e-5, rtol=0)


@pytest.mark.parametrize("method", PARTS)
def test_rows_of_a_batch_do_not_meet(method: str) -> None:
    read = {"method": method, **PARTS[method], **({"budget": "density"} if method == "actqkv" else {})}
    data = chunks(SIZES, 3)
    whole = fed(cache(read, "kivi", layers=2), data)
    for row in range(3):
        part = [tuple(x[row : row + 1] for x in each) for each in data]
        torch.testing.assert_close(whole[row : row + 1], fed(cache(read, "kivi", layers=2), part), atol=2e-5, rtol=0)


def test_what_is_read_is_counted() -> None:
    """Of 160 candidates the best 32; kivi's keys bring a row of scales and minima for each group that is touched."""
    made = cache({"method": "double_sparsity", "keep": 0.2, "dense_layers": 0, "channels": 8}, "kivi")
    layer: Any = made.layers[0]
    data = chunks([3 + 160 + 20, 1], 1)
    step(layer, *data[0])
    layer.commit()
    layer.reader.tally = tally = Tally()
    step(layer, *data[1])
    assert (tally.keys, tally.values, tally.stored) == (2 * 55, 2 * 55, 2 * 183)
    exact = 2 * (23 * WIDTH * 4) * 2  # bytes of sinks and tail, of both heads, keys and values
    token = WIDTH // 2  # of codes
    assert tally.dense == exact + 2 * 160 * token * 2 + 2 * 5 * WIDTH * 4 + 2 * 160 * 4
    assert tally.nbytes == exact + 2 * 32 * token * 2 + 2 * 5 * WIDTH * 4 + 2 * 32 * 4
    assert tally.extra == 2 * (160 * 4 + 5 * 8 * 4)  # labels: 8 channels of 4 bits, scales and minima of 5 groups


def test_labels_are_counted_in_bytes() -> None:
    read = {"method": "double_sparsity", "keep": 0.2, "dense_layers": 0, "channels": 8}
    dense, other = cache(None, "kivi"), cache(read, "kivi")
    for q, k, v in chunks([3 + 160 + 20, 1]):
        step(dense.layers[0], q, k, v)
        step(other.layers[0], q, k, v)
    labels = 2 * 2 * (160 * 4 + 5 * 8 * 4)
    assert other.nbytes().total - dense.nbytes().total == labels == other.nbytes().extras
    assert other.nbytes().static - dense.nbytes().static == 2 * 8 * 2


def test_label_channels_are_ranked_by_products() -> None:
    """Channel by channel and token by token, and whatever the order of the tokens."""
    from compress.kv.codec import Spec
    from compress.kv.sparse import double_sparsity

    keys, queries = normal(70, 2, 8, seed=1) * torch.arange(1, 9), normal(70, 4, 8, seed=2) * torch.arange(8, 0, -1)
    config, spec = double_sparsity.Config(channels=5), Spec("read", 0, 1, 2, 8, 2)
    found = double_sparsity.calibrate(config, spec, {"keys": keys, "queries": queries})["channels"]
    for head in range(2):
        sums = [0.0] * 8
        for token in range(70):
            for c in range(8):
                sums[c] += sum(abs(float(queries[token, 2 * head + i, c] * keys[token, head, c])) for i in range(2))
        assert found[head].tolist() == sorted(range(8), key=lambda c: -sums[c])[:5]
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    again = double_sparsity.calibrate(config, spec, {"keys": keys[order], "queries": queries[order]})["channels"]
    assert torch.equal(found, again)
