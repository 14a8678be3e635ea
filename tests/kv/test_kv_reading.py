"""Reading chosen tokens only: what each method chooses and what comes out, against slow references in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from reading_cases import WIDTH, cache, channels, chunks, normal, step
from torch import Tensor

from compress.kv.layer import KVCache
from compress.kv.sparse.reader import Tally
from compress.papers.sparse import actqkv, tidal

SIZES = [150, 1, 1, 30, 1, 1]


def attended(q: Tensor, keys: Tensor, values: Tensor, read: Tensor) -> Tensor:
    """Attention in float64 of q [H, width] over keys and values [h, n, width], to the tokens read, bool [h, n]."""
    out = []
    for head in range(q.shape[0]):
        own = head * keys.shape[0] // q.shape[0]
        places = read[own].nonzero()[:, 0]
        scores = keys[own, places].double() @ q[head].double() * WIDTH**-0.5
        out.append(scores.softmax(0) @ values[own, places].double())
    return torch.stack(out)


class Case:
    """A cache fed step by step, and for each query after the first pass what dense attention would have read."""

    def __init__(self, read: Mapping[str, Any], codec: str, heads: tuple[int, int], layer: int = 0) -> None:
        self.made = cache(read, codec, layer + 1, heads=heads)
        self.layer: Any = self.made.layers[layer]
        self.heads, self.config = heads, self.made.reading.config if self.made.reading else None
        self.data = chunks(SIZES, 2, heads)

    def run(self, chosen: Any) -> list[tuple[Tensor, Tensor]]:
        """Return outputs found and expected, [queries, H, width]; chosen(self, row, queries so far, keys, coded) gives
        the candidates that the last query reads, bool [h, coded].
        """
        pairs = []
        past: list[list[Tensor]] = [[], []]
        for q, k, v in self.data:
            stores = self.layer.stores
            coded = self.layer.candidates()
            before = [store.read() for store in stores.values()] if stores else None
            found = step(self.layer, q, k, v)
            if before is not None:
                keys, values = (torch.cat((b, x), 2) for b, x in zip(before, (k, v), strict=True))
                stored = before[0].shape[2]
                for row in range(q.shape[0]):
                    for n in range(q.shape[2]):
                        queries = torch.cat([*past[row], q[row, :, : n + 1]], 1)
                        read = torch.ones(self.heads[1], stored + n + 1, dtype=torch.bool)
                        read[:, 3 : 3 + coded] = chosen(self, row, queries, keys[row, :, 3 : 3 + coded], coded)
                        here = slice(0, stored + n + 1)
                        pairs.append(
                            (found[row, n], attended(q[row, :, n], keys[row, :, here], values[row, :, here], read))
                        )
            for row in range(q.shape[0]):
                past[row].append(q[row])
        return pairs


def best(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of scores [h, n], bool."""
    found = torch.zeros_like(scores, dtype=torch.bool)
    for head in range(len(scores)):
        for place in sorted(range(scores.shape[1]), key=lambda i: -float(scores[head, i]))[:count]:  # noqa: B023
            found[head, place] = True
    return found


def shared(q: Tensor, keys: Tensor) -> Tensor:
    """Mean over query heads of the softmax of q [H, width] over keys [h, n, width], [h, n] float64."""
    heads = []
    for own in range(keys.shape[0]):
        group = q.unflatten(0, (keys.shape[0], -1))[own].double()
        heads.append((group @ keys[own].double().T * WIDTH**-0.5).softmax(-1).mean(0))
    return torch.stack(heads)


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


def by_block(case: Case, row: int, queries: Tensor, keys: Tensor, coded: int) -> Tensor:
    """ActQKV with equal budgets."""
    size, scores = case.config.block, []
    window = queries[:, -case.config.window :].double()  # H, up to window, width
    for head in range(case.heads[1]):
        means = keys[head].double().unflatten(0, (-1, size)).mean(1)
        weights = []
        for q in window.unflatten(0, (case.heads[1], -1))[head]:
            bias = (q - q.mean(0)).norm(dim=-1)
            anchors = [i for i in range(len(q)) if bias[i] >= bias.mean() or i == len(q) - 1]
            probe = torch.stack([q[i] for i in anchors]).mean(0)
            weights.append((means @ probe * WIDTH**-0.5).softmax(0))
        scores.append(torch.stack(weights).mean(0))
    blocks = math.ceil(math.ceil(case.config.keep * coded) / size)
    return best(torch.stack(scores), blocks).repeat_interleave(size, 1)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
@pytest.mark.parametrize("codec", ["identity", "kivi", "lloyd", "gear"])
@pytest.mark.parametrize("own", [{}, {"labels": "codes"}, {"mean": "scores"}], ids=str)
def test_double_sparsity(heads: tuple[int, int], codec: str, own: dict[str, Any]) -> None:
    if own and codec != "kivi":
        pytest.skip("once is enough; only kivi stores channels")
    read = {"method": "double_sparsity", "keep": 0.2, "channels": 8, "dense_layers": 0, **own}
    for found, expected in Case(read, codec, heads).run(by_labels):
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("codec", ["identity", "kivi"])
def test_actqkv(codec: str) -> None:
    read = {"method": "actqkv", "keep": 0.3, "window": 5, "block": 32, "budget": "equal", "dense_layers": 0}
    for found, expected in Case(read, codec, (4, 2)).run(by_block):
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("heads", ["each", "all"])
@pytest.mark.parametrize("codec", ["identity", "kivi"])
def test_tidal(heads: str, codec: str) -> None:
    """Layers 0 to 4: 0 is dense, 1 and 3 choose, 2 reads what 1 chose, 4 what 3 chose."""
    read = {"method": "tidal", "keep": 0.2, "dense_layers": 1, "layers": [1, 3], "heads": heads}
    made = cache(read, codec, layers=5)
    data = [[(x[0] + i, x[1] + i / 3, x[2]) for x in chunks([150, 1, 6, 1])] for i in range(5)]
    for part in range(4):
        for i in range(5):
            layer: Any = made.layers[i]
            coded = layer.candidates()
            before = [store.read() for store in layer.stores.values()] if layer.stores else None
            q, k, v = data[i][part]
            found = step(layer, q, k, v)
            if before is None:
                continue
            keys, values = (torch.cat((b, x), 2) for b, x in zip(before, (k, v), strict=True))
            if i in (1, 3):
                chooser = keys[:, :, 3 : 3 + coded], q
            for row, n in ((row, n) for row in range(2) for n in range(q.shape[2])):
                seen = before[0].shape[2] + n + 1
                tokens = torch.ones(2, seen, dtype=torch.bool)
                if i in (2, 4):
                    scores = shared(chooser[1][row, :, n], chooser[0][row])
                    scores = scores if heads == "each" else scores.mean(0).expand_as(scores)
                    tokens[:, 3 : 3 + coded] = best(scores, math.ceil(0.2 * coded))
                expected = attended(q[row, :, n], keys[row, :, :seen], values[row, :, :seen], tokens)
                torch.testing.assert_close(found[row, n].double(), expected, atol=2e-5, rtol=0)


def test_tidal_layers_by_default() -> None:
    assert tidal.choosing(tidal.Config(), 32) == (2, 13)
    assert tidal.choosing(tidal.Config(dense_layers=5), 8) == (5,)


@pytest.mark.parametrize("codec", ["identity", "kivi", "lloyd", "gear"])
def test_selective_values_and_its_bound(codec: str) -> None:
    """What is left out is wrong by at most its weight times the largest norm, and is what the docstring says."""
    eps, made = 0.01, cache({"method": "selective_values", "eps": 0.01}, codec)
    layer: Any = made.layers[0]
    dropped = 0
    for q, k, v in chunks(SIZES):
        coded = layer.candidates()
        before = [store.read() for store in layer.stores.values()] if layer.stores else None
        found = step(layer, q, k, v)
        for row, n in [] if before is None else [(row, n) for row in range(2) for n in range(q.shape[2])]:
            assert before is not None
            keys, values = (torch.cat((b[row], x[row, :, : n + 1]), 1) for b, x in zip(before, (k, v), strict=True))
            for head in range(2):
                group = q[row, 2 * head : 2 * head + 2, n].double()
                p = (group @ keys[head].double().T * WIDTH**-0.5).softmax(-1)
                read = torch.ones(p.shape[1], dtype=torch.bool)
                read[3 : 3 + coded] = p[:, 3 : 3 + coded].amax(0) > eps
                dropped += int((~read).sum())
                own = found[row, n, 2 * head : 2 * head + 2].double()
                torch.testing.assert_close(own, (p * read) @ values[head].double(), atol=2e-5, rtol=0)
                lost = own - p @ values[head].double()
                norms = torch.cat((values[head][~read].double().norm(dim=-1), torch.zeros(1, dtype=torch.float64)))
                assert (lost.norm(dim=-1) <= (p * ~read).sum(-1) * norms.max() + 2e-5).all()
    assert dropped > 500


FULL = {
    "double_sparsity": {"keep": 1.0, "dense_layers": 0},
    "tidal": {"keep": 1.0, "dense_layers": 0},
    "actqkv": {"keep": 1.0, "dense_layers": 0},
    "selective_values": {"eps": 0.0},
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


def test_actqkv_gives_more_to_layers_that_spread_their_attention() -> None:
    """Budgets are keep x density over the mean density; here one layer's queries are three times as large."""
    read = {"method": "actqkv", "keep": 0.25, "dense_layers": 0, "window": 1, "block": 8}
    made = cache(read, "identity", layers=2)
    for q, k, v in chunks([300, 1, 1, 1], 1):
        step(made.layers[0], 3 * q, k, v)
        step(made.layers[1], q, k, v)
    densities, means = [], []
    for layer, scale in zip(made.layers, (3, 1), strict=True):
        reader: Any = layer.reader
        assert isinstance(reader, actqkv.ActQKV)
        means.append(reader.means.view()[0].double())
        weights = [
            (means[-1][head] @ (scale * q[0, 2 * head + i, 0].double()) * WIDTH**-0.5).softmax(0)
            for head in range(2)
            for i in range(2)
        ]
        mixed = [(weights[2 * head] + weights[2 * head + 1]) / 2 for head in range(2)]
        blocks = len(mixed[0])
        densities.append(sum(float((-(w * w.log()).sum()).exp()) for w in mixed) / 2 / blocks)
        assert float(reader.density) == pytest.approx(densities[-1], rel=1e-4)
    assert densities[0] < densities[1]
    for layer in made.layers:
        layer.reader.tally = Tally()
    q, k, v = chunks([300, 1, 1, 1], 1)[-1]
    for layer, scale in zip(made.layers, (3, 1), strict=True):
        step(layer, scale * q, k, v)
    read_by = [layer.reader.tally.keys for layer in made.layers]
    assert read_by[0] < read_by[1]


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
