"""Saved caches that were made to mislead, with hashes that are right: each is refused before compiled code reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress.errors import CheckpointError, CompressError, NumericalError, UnsupportedModelError
from compress.kv import attention, generation
from compress.kv.cache import make_cache
from compress.kv.layer import CodedLayer
from compress.kv.saved import checked, coded, file, load_cache, parts, raw_nbytes, save_cache
from compress.kv.saved.parts import SavedPart
from compress.kv.token_store import Store
from compress.storage import checkpoint, json_text
from helpers.kv_cases import CASES, HEADS, QUERIES, WIDTH, Case, normal
from helpers.pico import build, of_type

TOKENS = 300
KIVI = {"method": "kivi", "bits": 4, "group_size": 32, "sink": 2, "residual_length": 32}
LLOYD = {"method": "lloyd", "bits": 3, "sink": 2, "residual_length": 32, "keys": {"rope": "pre"}}

Facts, Tensors = dict[str, Any], dict[str, Tensor]
Change = Callable[[Facts, Tensors], None]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = build("llama", {"head_dim": 32, "max_position_embeddings": 2048})
    generation.attach(made, KIVI)
    attention.register()
    return made


def tokens(count: int = TOKENS) -> Tensor:
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def saved(model: PreTrainedModel, path: Path, settings: dict[str, Any] | None, count: int = TOKENS) -> Path:
    """A file of coded keys and values, or of rounded ones."""
    cache: Any = DynamicCache(config=model.config) if settings is None else make_cache(model.config, settings)
    model(input_ids=tokens(count), past_key_values=cache, use_cache=True)
    save_cache(cache, path, model, tokens(count))
    return path


def forge(path: Path, change: Change) -> None:
    """Change facts and tensors of a file, and write it with hashes that are right."""
    facts = json_text.loads(checkpoint.read_metadata(path)[file.KEY])
    tensors = {name: stored.read() for name, stored in checkpoint.read_header(path).items()}
    change(facts, tensors)
    text = file.json.dumps(facts, sort_keys=True)
    small = {name: tensor for name, tensor in tensors.items() if not name.endswith(".stream")}
    checkpoint.write_shard(path, tensors, metadata={file.KEY: text, file.HASH: file._hash(text, small)})


def put(name: str, tensor: Tensor) -> Change:
    """A part with other numbers, as they are."""

    def change(facts: Facts, tensors: Tensors) -> None:
        for held in [x for x in tensors if x == name or x.removeprefix(f"{name}.") in file.CODED]:
            del tensors[held]
        tensors[name] = tensor
        facts["parts"][name] = SavedPart("raw", tuple(tensor.shape), tensor.dtype).plain()

    return change


def say(*keys: str | int, value: Any) -> Change:
    """Another fact."""

    def change(facts: Facts, tensors: Tensors) -> None:
        inner: Any = facts
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


def tables(facts: Facts, tensors: Tensors) -> None:
    """Sums of int64 that are 4,096 once they have overflowed."""
    wide = torch.zeros(len(tensors["tables"]), 256, dtype=torch.int64)
    wide[:, :4] = torch.tensor([4096, 2**63 - 1, 2**63 - 1, 2])
    tensors["tables"] = wide


def sizes(facts: Facts, tensors: Tensors) -> None:
    """Lengths of chunks whose sum is right once it has overflowed."""
    tensors["1.keys.chunks"][:, 0] += torch.tensor([2**62, 2**62])
    tensors["1.keys.chunks"][:, 1] += torch.tensor([2**62, 2**62])


def heads_of_the_queries(facts: Facts, tensors: Tensors) -> None:
    facts["layers"][0]["keys"]["shape"][1] = 4


def no_positions(facts: Facts, tensors: Tensors) -> None:
    for name in ("positions", "row"):
        del facts["parts"][f"rope.{name}"]


PLAIN: dict[str, Change] = {
    "tables": tables,
    "sizes": sizes,
    "no layers": say("layers", value="none"),
    "no tokens": say("parts", value={}),
    "tokens": put("tokens", torch.zeros(300, dtype=torch.int32)),
    "batch": put("tokens", torch.zeros(2, 300, dtype=torch.int32)),
    "a layer of nothing": say("layers", 0, value={}),
    "seen": say("layers", 0, "seen", value=7),
    "turns": say("turns", value=None),
    "sink": put("0.keys.sink", torch.zeros(1, 2, 3, 32)),
    "basis": put("1.values.basis", torch.zeros(1, 4, 4, dtype=torch.int8)),
    "integers": put("1.values", torch.zeros(1, 2, 300, 32, dtype=torch.int64)),
    "shorter values": put("1.values", torch.zeros(1, 2, 299, 32)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_forged_keys_and_values_are_refused(name: str, model: PreTrainedModel, tmp_path: Path) -> None:
    path = saved(model, tmp_path / "x.kv", None)
    forge(path, PLAIN[name])
    with pytest.raises(CheckpointError, match="x.kv is damaged at") as caught:
        load_cache(model, path)
    assert "\n" not in str(caught.value)


CODED: dict[str, Change] = {
    "narrow scales": put("0.keys.fields.scales", torch.zeros(1, 2, 8, 16, dtype=torch.float16)),
    "few scales": put("0.keys.fields.scales", torch.zeros(1, 2, 7, 32, dtype=torch.float16)),
    "scales of one head": put("0.keys.fields.scales", torch.zeros(1, 1, 8, 32, dtype=torch.float16)),
    "another type": put("0.values.fields.scales", torch.zeros(1, 2, 256, 1, dtype=torch.float64)),
    "a short tail": put("0.values.tail", torch.zeros(1, 2, 1, 32)),
    "what no codec has": put("1.keys.fields.others", torch.zeros(1, 2, 256, 32)),
    "more than there is": say("layers", 0, "keys", "coded", value=288),
    "parts of groups": say("layers", 1, "keys", "coded", value=255),
    "runs": say("layers", 1, "keys", "runs", value=[256]),
    "heads": heads_of_the_queries,
    "type": say("layers", 0, "keys", "dtype", value="I64"),
    "seen": say("layers", 0, "seen", value=301),
    "pads": put("pads", torch.tensor([301])),
    "order": put("0.keys.order", torch.tensor([[0, 0, 1]])),
    "no settings": say("codes", "codings", value=[]),
    "settings of more": say("codes", "codings", 0, "evict", value={"method": "knorm", "keep": 0.5}),
    "wide turns": put("rope.rows", torch.zeros(1, 2, 300, 32)),
    "few turns": put("rope.rows", torch.zeros(1, 2, 20, 16)),
    "flat turns": put("rope.positions", torch.zeros(300, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", CODED)
def test_forged_codes_are_refused(name: str, model: PreTrainedModel, tmp_path: Path) -> None:
    path = saved(model, tmp_path / "x.kv", LLOYD if "turns" in name else KIVI)
    if name in ("wide turns", "few turns"):
        forge(path, no_positions)
    forge(path, CODED[name])
    with pytest.raises(CheckpointError, match="x.kv is damaged at") as caught:
        load_cache(model, path)
    assert "\n" not in str(caught.value)


def test_facts_are_checked_where_they_are_shown(model: PreTrainedModel, tmp_path: Path) -> None:
    path = saved(model, tmp_path / "x.kv", KIVI)
    forge(path, say("layers", 0, value={"kind": "codes"}))
    with pytest.raises(CheckpointError, match="damaged at its layers"):
        raw_nbytes(file.SavedFile(path))


@pytest.mark.parametrize("settings", [None, KIVI], ids=["rounded", "coded"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_short_prompt_is_no_forgery(
    settings: dict[str, Any] | None, count: int, model: PreTrainedModel, tmp_path: Path
) -> None:
    loaded: Any = load_cache(model, saved(model, tmp_path / "x.kv", settings, count), tokens(count))
    assert loaded.get_seq_length() == count


def test_heads_that_the_configuration_does_not_tell_are_found(tmp_path: Path) -> None:
    falcon = of_type("falcon", {"multi_query": True, "new_decoder_architecture": False})
    assert checked.heads_of(falcon, 2) == [{"keys": (1, 16), "values": (1, 16)}] * 2
    forge(saved(falcon, tmp_path / "x.kv", {**KIVI, "group_size": 16}), heads_of_the_queries)
    with pytest.raises(CheckpointError, match="its keys have the shape"):
        load_cache(falcon, tmp_path / "x.kv")


@pytest.mark.parametrize("budget", ["equal", "ada"])
def test_a_cache_that_evicts_is_not_saved(budget: str, model: PreTrainedModel, tmp_path: Path) -> None:
    evict = {"method": "knorm", "keep": 0.3, "recent": 8, "heads": budget}
    with pytest.raises(UnsupportedModelError, match="layer 0 of the cache evicts tokens"):
        saved(model, tmp_path / "x.kv", {**KIVI, "evict": evict})
    assert list(tmp_path.iterdir()) == []


def numbers(facts: Facts, path: Path) -> list[Change]:
    """Return changes of every number that is not whole, in tensors and in facts, to what is not finite."""
    opened, changes = file.SavedFile(path), list[Change]()
    for bad in (float("nan"), float("inf"), -float("inf")):
        for name, part in opened.parts.items():
            if part.way == "grid":
                changes += [say("parts", name, "step", value=bad)]
            elif part.dtype.is_floating_point and 0 not in part.shape:
                tensor = opened.tensor(name).clone()
                tensor[(-1,) * tensor.dim()] = bad
                changes.append(put(name, tensor))
        changes += [say("turns", index, value=bad) for index in range(len(facts["turns"] or ()))]
    return changes


@pytest.mark.parametrize("settings", [None, KIVI, LLOYD], ids=["rounded", "kivi", "lloyd"])
def test_numbers_that_are_not_finite_are_refused(
    settings: dict[str, Any] | None, model: PreTrainedModel, tmp_path: Path
) -> None:
    path = saved(model, tmp_path / "x.kv", settings)
    whole = path.read_bytes()
    changes = numbers(file.SavedFile(path).facts, path)
    assert len(changes) >= 18
    for change in changes:
        path.write_bytes(whole)
        forge(path, change)
        with pytest.raises(CheckpointError, match="x.kv is damaged at") as caught:
            load_cache(model, path)
        assert "\n" not in str(caught.value)


def test_coded_numbers_that_are_not_finite_are_not_saved_and_not_loaded(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only decoding shows them."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens(), past_key_values=cache, use_cache=True)
    layer: Any = cache.layers[1]
    layer.values[0, 1, 250, 3] = float("inf")
    with pytest.raises(NumericalError, match="are not finite"):
        save_cache(cache, tmp_path / "x.kv", model, tokens(), "lossless")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(parts, "check_finite", lambda tensor: tensor)
    save_cache(cache, tmp_path / "x.kv", model, tokens(), "lossless")
    assert file.SavedFile(tmp_path / "x.kv").parts["1.values"].way == "bytes"
    with pytest.raises(CheckpointError, match=r"is damaged at 1.values \(it has numbers that are not finite\)"):
        load_cache(model, tmp_path / "x.kv")


def filled(case: Case) -> CodedLayer:
    """A layer of two padded sequences whose first tokens were chosen by queries."""
    cache = case.cache("fused")
    cache.pads = torch.tensor([0, 5])
    layer: Any = cache.layers[0]
    places = (torch.arange(250) - cache.pads[:, None]).clamp(min=0)
    angle = places[..., None] * torch.logspace(0, -2, WIDTH // 2).repeat(2)
    layer.turns = angle.cos(), angle.sin()
    layer.update(normal(2, HEADS, 250, WIDTH, seed=1), normal(2, HEADS, 250, WIDTH, seed=2))
    layer.commit(normal(2, QUERIES, 250, WIDTH))
    return layer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_tensor_of_each_codec_is_compared(case: Case) -> None:
    layer = filled(case)
    known = coded.layer_facts(0, layer)
    assert known is not None
    for kind, store in layer.stores.items():
        held, empty = coded._store_tensors(store), Store(store.codec, store.policy, store.rope)

        def check(tensors: Tensors) -> None:
            checked.check_store(empty, tensors, known[kind], 2, layer.seen)  # noqa: B023

        check(held)
        for name, tensor in held.items():
            narrow = tensor.narrow(-1, 0, tensor.shape[-1] - 1)
            for other in ({name: narrow}, {name: tensor.to(torch.complex64)}):
                with pytest.raises(ValueError, match=" is .*, expected|expected here"):
                    check({**held, **other})
            with pytest.raises(ValueError, match="missing|tokens that it says|expected here"):
                check({key: value for key, value in held.items() if key != name})


def test_a_compress_error_is_one_line_whatever_is_forged(model: PreTrainedModel, tmp_path: Path) -> None:
    """Settings that no recipe may have are refused as those of a recipe are."""
    path = saved(model, tmp_path / "x.kv", KIVI)
    forge(path, say("codes", "codings", 0, "keys", "bits", value=99))
    with pytest.raises(CompressError, match="bits 99") as caught:
        load_cache(model, path)
    assert "\n" not in str(caught.value)
