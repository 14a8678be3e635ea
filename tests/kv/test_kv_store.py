"""The store of coded keys and values: segments, operations against encoding from scratch, bytes, runs, settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import plugins
from compress.errors import CompressError, RecipeError
from compress.kv.buffer import Buffer
from compress.kv.codec import Block, Codec, Field, Spec, rotate, unrotate
from compress.kv.codecs.packed import PackedCodes
from compress.kv.rope import Rope
from compress.kv.settings import Policy, cache_settings
from compress.kv.token_store import Store

HEADS, WIDTH = 2, 16


def store(method: str = "kivi", kind: Any = "keys", policy: Policy | None = None, **settings: Any) -> Store:
    plugin = plugins.load("kv", method)
    spec = Spec(kind, 0, 1, HEADS, WIDTH, 2)
    return Store(plugin.build(plugin.Config(**settings), spec, {}), policy or Policy(2, 8, flush=1))


def states(tokens: int, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, HEADS, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def fed(x: Tensor, chunks: list[int], **how: Any) -> Store:
    made = store(**how)
    for part in x.split(chunks, 2):
        made.append(part)
    return made


KIVI = {"method": "kivi", "bits": 4, "group_size": 8}


class Ranks(Codec):
    """A row for each run, one for each four tokens, and a state: the mean of what was encoded first."""

    granularity = 4
    fields = {"exact": Field("codes"), "means": Field("scales", 4), "run": Field("extras", 0)}

    def begin(self, x: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        return {"mean": x.mean(2, keepdim=True)}

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        means = x.unflatten(2, (-1, 4)).mean(3)
        run = x.mean((1, 2))[:, None, None]
        return {"exact": x - state["mean"] - run, "means": means, "run": run}

    def decode(self, block: Block) -> Tensor:
        assert block["run"].shape[2] == 1
        torch.testing.assert_close(block["means"].shape[2] * 4, block["exact"].shape[2])
        return block["exact"] + block["mean"] + block["run"]


def test_buffer_grows_in_linear_time() -> None:
    buffer, data = Buffer(), torch.arange(3000.0).view(1, 1, 3000, 1)
    moves, last = 0, 0
    for i in range(3000):
        buffer.append(data[:, :, i : i + 1])
        moves += buffer.allocated_nbytes != last
        last = buffer.allocated_nbytes
    assert torch.equal(buffer.view(), data)
    assert moves < 60
    assert buffer.nbytes == 12000 <= buffer.allocated_nbytes <= 1.2 * 12000
    assert torch.equal(buffer.view(10, 20), data[:, :, 10:20])


def test_buffer_as_a_window_stays_small() -> None:
    buffer, data = Buffer(), torch.arange(1000.0).view(1, 1, 1000, 1)
    buffer.append(data[:, :, :40])
    for i in range(40, 1000):
        buffer.append(data[:, :, i : i + 1])
        buffer.drop(1)
        assert torch.equal(buffer.view().flatten(), data[0, 0, i - 39 : i + 1, 0])
    assert buffer.allocated_nbytes <= 4 * 120
    buffer.crop(5)
    buffer.take(torch.tensor([0, 0]))
    assert buffer.view().shape == (2, 1, 35, 1)
    with pytest.raises(CompressError, match="tokens of 1 sequences after those of 2; use a fresh cache"):
        buffer.append(data[:, :, :1])


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("channels", [10, 16, 80])
def test_codes_are_stored_without_waste(bits: int, channels: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, 5, channels), dtype=torch.uint8)
    packing = PackedCodes(channels, bits)
    rows = packing.pack(codes)
    assert rows.keys() == packing.fields.keys()
    assert all(row.is_contiguous() and row.shape[:3] == (2, 3, 5) for row in rows.values())
    assert torch.equal(packing.unpack(rows), codes)
    if channels == 80:
        assert sum(row.numel() * 2 for row in rows.values()) == codes.numel() * bits / 8


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_segments_do_not_depend_on_the_chunks(kind: str) -> None:
    x = states(61)
    whole = fed(x, [61], kind=kind, **KIVI)
    assert (whole.sink.length, whole.coded, whole.tail.length) == ((2, 48, 11) if kind == "keys" else (2, 51, 8))
    for chunks in ([1] * 61, [5, 1, 1, 30, 24], [2, 59], [40, 21]):
        other = fed(x, chunks, kind=kind, **KIVI)
        assert torch.equal(other.read(), whole.read())
        assert other.nbytes()[:-1] == whole.nbytes()[:-1]
    read = whole.read()
    assert torch.equal(read[:, :, :2], x[:, :, :2])
    assert torch.equal(read[:, :, -8:], x[:, :, -8:])
    assert 0 < (read - x).abs().max() < 0.35
    assert torch.equal(whole.read(x[:, :, :3]), torch.cat((read, x[:, :, :3]), 2))


def test_tokens_are_coded_in_flushes() -> None:
    made, lengths = store(kind="values", policy=Policy(0, 8, flush=12), **KIVI), set()
    for token in states(50).split(1, 2):
        made.append(token)
        assert made.coded % 12 == 0
        lengths.add(made.tail.length)
    assert lengths == set(range(1, 20))
    assert store(policy=Policy(flush=12), **KIVI).flush == 16


def test_coded_tokens_are_never_coded_again() -> None:
    x = states(400, batch=1)
    made = store(**KIVI)
    first = None
    for token in x.split(1, 2):
        made.append(token)
        if made.coded == 8 and first is None:
            first = {name: buffer.view().clone() for name, buffer in made.fields.items()}
    assert first is not None
    for name, rows in first.items():
        assert torch.equal(made.fields[name].view(0, rows.shape[2]), rows)
    assert made.nbytes().allocated < 1.5 * made.nbytes().total + 4096


@pytest.mark.parametrize("method", ["identity", "fp8", "kivi"])
def test_batch_operations_are_those_of_the_rows(method: str) -> None:
    settings = KIVI if method == "kivi" else {"method": method}
    x = states(45, batch=3)
    index = torch.tensor([2, 0, 0, 1])
    made = fed(x, [30, 15], **settings)
    made.select(index)
    made.append(x[index, :, :20])
    again = fed(torch.cat((x, x[:, :, :20]), 2)[index], [30, 15, 20], **settings)
    assert torch.equal(made.read(), again.read())
    assert made.nbytes()[:-1] == again.nbytes()[:-1]


@pytest.mark.parametrize("count", [0, 3, 11, 12, 19, 27, 58, 60, 61])
def test_crop(count: int) -> None:
    x = states(61)
    made = fed(x, [61], **KIVI)
    before = made.read()
    made.crop(count)
    assert len(made) == 61 - count
    if count < 61:
        assert torch.equal(made.read(), before[:, :, : 61 - count])
    made.append(x[:, :, 61 - count :])
    assert len(made) == 61
    again = fed(torch.cat((before[:, :, : 61 - count], x[:, :, 61 - count :]), 2), [61], **KIVI)
    assert (made.read() - again.read()).abs().max() < 0.35
    if count <= 11:  # within the tail: as if nothing had been there
        assert torch.equal(made.read(), before)


def test_runs_and_state() -> None:
    x = states(50)
    made = Store(Ranks(Spec("keys", 0, 1, HEADS, WIDTH, 2)), Policy(1, 3, flush=1))
    for part in x.split([20, 1, 20, 9], 2):
        made.append(part)
    assert made.runs == [16, 20, 8]
    torch.testing.assert_close(made.read(), x)
    q = torch.randn(2, HEADS, 3, WIDTH)
    scores = torch.empty(2, HEADS, 3, 50)
    made.scores(q, scores)
    torch.testing.assert_close(scores, q @ x.transpose(-1, -2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made.mix(scores), scores @ x, atol=1e-3, rtol=1e-4)
    made.select(torch.tensor([1, 0]))
    made.crop(15)
    assert made.runs == [16]
    torch.testing.assert_close(made.read(), x.flip(0)[:, :, :35])
    parts = made.nbytes()
    assert parts.extras == 2 * WIDTH * 4
    assert parts.state == 2 * HEADS * WIDTH * 4


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bytes_are_those_of_the_formula(bits: int) -> None:
    tokens, group = 2 + 512 + 8, 16
    for kind in ("keys", "values"):
        parts = fed(states(tokens), [tokens], kind=kind, method="kivi", bits=bits, group_size=group).nbytes()
        numel = 2 * HEADS * WIDTH
        assert (parts.codes + parts.scales) * 8 / (numel * 512) == bits + 32 / group
        assert (parts.sink, parts.tail, parts.extras, parts.static) == (numel * 2 * 4, numel * 8 * 4, 0, 0)
        assert parts.total == sum(parts[:6]) <= parts.allocated


def test_left_padding() -> None:
    x = states(64, batch=3)
    pads = torch.tensor([0, 5, 9])
    junk = x.clone()
    for row, count in enumerate(pads):
        junk[row, :, :count] = 1e4
    made = store(**KIVI)
    made.append(junk[:, :, :40], pads)
    for part in junk[:, :, 40:].split(1, 2):
        made.append(part)
    read = made.read()
    for row, count in enumerate(pads.tolist()):
        real = slice(count, None)
        assert torch.equal(read[row, :, count : count + 2], x[row, :, count : count + 2])
        assert (read - x)[row, :, real].abs().max() < 0.35
        alone = fed(x[row : row + 1, :, real], [64 - count], **KIVI)
        if not count:
            assert torch.equal(alone.read()[0], read[row])
    index = torch.tensor([2, 1])
    made.select(index)
    assert torch.equal(made.read(), read[index])
    with pytest.raises(CompressError, match="padding"):
        made.crop(60)


def test_rope() -> None:
    angles = torch.arange(40.0)[None, :, None] * torch.tensor([0.5, 0.1, 0.02]).repeat(2)
    cos, sin = 1.3 * angles.cos(), 1.3 * angles.sin()
    x = states(40, batch=1)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    pairs = torch.complex(x[..., :3], x[..., 3:6]).to(torch.complex128) * 1.3 * torch.exp(1j * angles[..., :3].double())
    torch.testing.assert_close(turned[..., :3], pairs.real.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(unrotate(turned, cos, sin), x, atol=1e-6, rtol=1e-5)
    rope = Rope()
    rope.append(cos.expand(2, -1, -1)[:, :30], sin.expand(2, -1, -1)[:, :30])
    assert rope.rows(3, 5)[:, 0].shape == (1, 2, 6)
    rope.append(torch.stack((cos[0, 30:], cos[0, :10])), torch.stack((sin[0, 30:], sin[0, :10])))
    rope.select(torch.tensor([1, 0]))
    assert torch.equal(rope.rows(29, 31)[:, 1], torch.stack((sin[0, [29, 0]], sin[0, [29, 30]])))
    with pytest.raises(CompressError, match="attach"):
        rope.rows(0, 41)


def test_keys_before_rope() -> None:
    class Pre(Ranks):
        rope = "pre"

        def encode(self, x: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
            seen.append(x.clone())
            return super().encode(x, state)

    seen: list[Tensor] = []
    angles = torch.arange(40.0)[None, :, None] * torch.tensor([0.5, 0.1]).repeat(2)
    x, rope = states(40), Rope()
    rope.append(angles.cos(), angles.sin())
    made = Store(Pre(Spec("keys", 0, 1, HEADS, WIDTH, 2)), Policy(2, 4, flush=1), rope)
    turned = rotate(x, angles.cos(), angles.sin())
    made.append(turned)
    torch.testing.assert_close(seen[0], x[:, :, 2:34], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made.read(), turned, atol=1e-5, rtol=1e-5)
    with pytest.raises(CompressError, match="attach"):
        Store(made.codec, Policy()).append(states(200))


def test_settings() -> None:
    recipe = {
        "method": "kivi",
        "bits": 2,
        "group_size": 16,
        "sink": 1,
        "keys": {"residual_length": 7},
        "values": {"bits": 4},
        "layers": {"0-1": {"bits": 8}, "-1": {"values": {"method": "fp8"}}},
        "skip_layers": [2],
    }
    found = cache_settings(recipe).by_layer(4)
    assert [layer["keys"].method for layer in found] == ["kivi", "kivi", "identity", "kivi"]
    assert [layer["values"].method for layer in found] == ["kivi", "kivi", "identity", "fp8"]
    assert (found[0]["keys"].config.bits, found[0]["values"].config.bits) == (8, 8)
    assert (found[3]["keys"].config.bits, found[3]["keys"].config.group_size) == (2, 16)
    assert found[0]["keys"].policy == Policy(1, 7)
    assert found[0]["values"].policy == Policy(1, 128)
    assert found[2]["keys"].policy == Policy(0, 0, 1)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({}, "kv_cache: keys have no method; set kv_cache.method, one of"),
        ({"method": "kivvi"}, "did you mean 'kivi'"),
        ({"method": "kivi", "bit": 2}, "did you mean 'bits'"),
        ({"method": "kivi", "bits": 9}, "bits 9"),
        ({"method": "kivi", "bits": "2"}, "bits must be an integer, found the text '2'"),
        ({"method": "kivi", "sink": -1}, "0 or more"),
        ({"method": "kivi", "keys": {"sink": 1}}, "sink must be the same"),
        ({"method": "kivi", "layers": {"5": {}}}, "no layer 5"),
        ({"method": "kivi", "layers": {"2-1": {}}}, "'2-1' names no layer; give the first one first"),
        ({"method": "kivi", "skip_layers": ["x"]}, "skip_layers must be an integer, found the text 'x'"),
        ({"method": "kivi", "skip_layers": [1.5]}, r"skip_layers must be an integer, found 1.5 \(float\)"),
        ({"method": "kivi", "skip_layers": 1}, r"skip_layers must be a list, found 1 \(int\)"),
        ({"method": "kivi", "values": 3}, "must be keys with values"),
        ({"method": "kivi", "other_layers": "keep"}, "other_layers"),
        ({"method": "kivi", "exact_prefill": 1}, "true or false"),
    ],
)
def test_bad_settings(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        cache_settings(recipe).by_layer(4)


LLOYD = {"method": "lloyd", "bits": 2, "rope": "post", "policy": Policy(4, 8, flush=1)}


@pytest.mark.parametrize("real", [0, 1, 4, 5])
@pytest.mark.parametrize("chunks", [[12, *[1] * 28], [12, 2, 26], [6, 6, 28]])
def test_a_short_row_of_a_padded_batch_is_coded_as_alone(real: int, chunks: list[int]) -> None:
    """Its first real tokens are the sink, and no pad is, however few they are."""
    x, pads = states(40), torch.tensor([0, 12 - real])
    if chunks[0] == 6:  # what a chunk of a prompt shows
        pads = pads.clamp(max=6)
    first, padded, alone = int(pads[1]), store(**LLOYD), store(**LLOYD)
    for part in x.split(chunks, 2):
        padded.append(part, pads)
    for part in x[1:, :, first:].split(1, 2):
        alone.append(part)
    found = padded.read()
    assert torch.equal(found[1, :, first:], alone.read()[0])
    assert torch.equal(found[1, :, first : first + 4], x[1, :, first : first + 4])
    assert torch.equal(found[0], fed(x[:1], [1] * 40, **LLOYD).read()[0])
    assert padded.coded and not padded.waits


def test_a_batch_that_waits_for_real_tokens_is_selected_cropped_and_cleared() -> None:
    x, pads = states(40), torch.tensor([0, 10])
    padded, plain = store(**LLOYD), store(**LLOYD)
    padded.append(x[:, :, :12], pads)
    assert padded.waits and torch.equal(padded.read(), x[:, :, :12])
    padded.crop(1)
    swap = torch.tensor([1, 0])
    padded.select(swap)
    padded.append(x[swap, :, 11:], pads[swap])
    plain.append(x[swap], pads[swap])
    assert torch.equal(padded.read(), plain.read())
    padded.clear()
    assert not padded.waits and not len(padded)
