"""Calibrated tensors of every codec: from a file or a caller, they are what the codec reads, or one clear line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from compress import plugins
from compress.errors import CheckpointError, RecipeError
from compress.kv.cache import make_cache
from compress.kv.codec import Spec
from compress.kv.settings import KINDS, cache_settings
from compress.runtime import kv_config
from helpers.kv_cases import CASES, HEADS, QUERIES, WIDTH, Case, normal, refusal

CALIBRATED = [case for case in CASES if plugins.load("kv", case.method).NEEDS]
every_case = pytest.mark.parametrize("case", CALIBRATED, ids=str)


def model(**changes: Any) -> LlamaConfig:
    sizes = {"num_attention_heads": QUERIES, "num_key_value_heads": HEADS, "hidden_size": QUERIES * WIDTH}
    return LlamaConfig(**{"num_hidden_layers": 1, **sizes, **changes})


def read(case: Case, folder: Path, static: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    """What loading makes of a checkpoint with these tensors, whose hash is right."""
    config, settings = model(**changes), cache_settings(case.recipe)
    section = kv_config.write(folder, settings, config.num_hidden_layers, static)
    return kv_config.read_static(section, folder, config, settings)


def refused(case: Case, folder: Path, static: dict[str, Tensor], name: str) -> str:
    """The line about a tensor of this name, which is the same when a caller brings the tensors."""
    with pytest.raises(CheckpointError) as caught:
        read(case, folder, static)
    line = str(caught.value)
    file = kv_config.FILE if static else "config.json"
    assert line.startswith(f"{folder / file}: kv_cache: {name} ") and "\n" not in line
    assert line.endswith("; download or write the checkpoint again")
    return line


def misshapen(tensor: Tensor) -> Iterator[Tensor]:
    """Each dimension one longer, one shorter and of length 1, a dimension more, and one less."""
    for axis, size in enumerate(tensor.shape):
        yield from (tensor.narrow(axis, 0, length).contiguous() for length in {1, size - 1} - {size})
        yield torch.cat((tensor, tensor.narrow(axis, 0, 1)), axis)
    yield tensor[None].contiguous()
    yield tensor[0].clone()


def test_every_calibrated_codec_says_what_it_stores() -> None:
    needing = {name for name in plugins.names("kv") if plugins.load("kv", name).NEEDS}
    assert {case.method for case in CALIBRATED} == needing
    for name in needing:
        assert hasattr(plugins.load("kv", name), "specs") and hasattr(plugins.load("kv", name), "calibrate")


@every_case
def test_what_is_calibrated_is_what_is_specified(case: Case, tmp_path: Path) -> None:
    static = read(case, tmp_path, case.static())
    assert static.keys() == case.static().keys()
    assert all(torch.equal(tensor, case.static()[name]) for name, tensor in static.items())


@every_case
def test_names_types_and_shapes(case: Case, tmp_path: Path) -> None:
    static = case.static()
    for name, tensor in static.items():
        assert "is missing" in refused(case, tmp_path, {n: t for n, t in static.items() if n != name}, name)
        for dtype in (torch.float64, torch.int64, torch.bfloat16):
            assert "expected" in refused(case, tmp_path, {**static, name: tensor.to(dtype)}, name)
        for changed in misshapen(tensor):
            assert "expected" in refused(case, tmp_path, {**static, name: changed}, name)
            _, _, kind, short = name.split(".")
            spec = Spec(kind, 0, 1, HEADS, WIDTH, QUERIES // HEADS)  # type: ignore[arg-type]
            own = {n.removeprefix(f"layers.0.{kind}."): t for n, t in static.items() if f".{kind}." in n}
            assert f", but {short} is " in refusal(case.method, spec, {**own, short: changed}, **case.settings)
    for extra in ("layers.0.keys.spare", "layers.1.keys.mean", "layers.0.queries.mean", "layers.x.keys.mean", "mean"):
        assert "is not expected" in refused(case, tmp_path, {**static, extra: torch.zeros(1)}, extra)


@every_case
def test_numbers_that_are_not_finite(case: Case, tmp_path: Path) -> None:
    for name, tensor in case.static().items():
        for bad in (torch.nan, torch.inf) if tensor.is_floating_point() else ():
            changed = tensor.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[-1] = bad
            assert "not finite" in refused(case, tmp_path, {**case.static(), name: changed}, name)


@every_case
def test_any_integers_are_refused_or_read(case: Case, tmp_path: Path) -> None:
    """No other error: a codec that takes such integers works with them."""
    x = normal(1, HEADS, 64, WIDTH)
    for name, tensor in case.static().items():
        for value in (
            () if tensor.is_floating_point() else (torch.iinfo(tensor.dtype).min, 1, torch.iinfo(tensor.dtype).max)
        ):
            static = {**case.static(), name: torch.full_like(tensor, value)}
            try:
                read(case, tmp_path, static)
            except CheckpointError:
                refused(case, tmp_path, static, name)
            else:
                cache = make_cache(model(), case.recipe, static)
                for kind in KINDS:
                    codec = cache.codec(0, kind, x)
                    if codec.rope == "post":
                        assert codec.decode(codec.encode(x, {})).isfinite().all()


def changed(tensor: Tensor, values: dict[int, float]) -> Tensor:
    found = tensor.clone(memory_format=torch.contiguous_format)
    for index, value in values.items():
        found.view(-1)[index] = value
    return found


@pytest.mark.parametrize(
    ("method", "name", "values", "message"),
    [
        ("rotatekv", "keys.order", {3: 32}, "holds 32, which is not between 0 and 31"),
        ("rotatekv", "keys.order", {0: -1}, "holds -1, "),
        ("pca", "keys.bits", {0: 8}, "holds 8, which is not between 0 and 7"),
        ("pca", "values.bits", {0: 255}, "holds 255, "),
        ("pca", "keys.bits", dict.fromkeys(range(32), 7), "sum to 224, more than the 64 of the settings"),
        ("pca", "keys.variances", {0: 0.0}, "holds 0, which is not above 0"),
        ("kvquant", "keys.levels", {0: 60000.0}, "is not in ascending order"),
        ("kvquant", "keys.scales", {5: -1.0}, "holds -1, which is not above 0"),
    ],
)
def test_values(method: str, name: str, values: dict[int, float], message: str, tmp_path: Path) -> None:
    case, full = next(case for case in CALIBRATED if case.method == method), f"layers.0.{name}"
    static = {**case.static(), full: changed(case.static()[full], values)}
    assert message in refused(case, tmp_path, static, full)
    kind, short = name.split(".")
    spec = Spec(kind, 0, 1, HEADS, WIDTH, QUERIES // HEADS)  # type: ignore[arg-type]
    own = {n.removeprefix(f"layers.0.{kind}."): t for n, t in static.items() if f".{kind}." in n}
    assert f"layer 0, {kind}: {method} is calibrated, but {short} {message}" in refusal(
        method, spec, own, **case.settings
    )


def test_a_basis_that_is_none() -> None:
    """To be found by inverting it, which waits for the first keys."""
    case, name = next(case for case in CALIBRATED if case.method == "pca"), "layers.0.values.back"
    static = {**case.static(), name: changed(case.static()[name], dict.fromkeys(range(WIDTH), 0.0))}
    cache = make_cache(model(), case.recipe, static)
    with pytest.raises(RecipeError, match="layer 0, values: back holds a singular matrix; calibrate"):
        cache.codec(0, "values", normal(1, HEADS, 8, WIDTH))


def test_an_order_with_a_channel_twice(tmp_path: Path) -> None:
    """The channel that it leaves out would never be written: equal calls gave different tokens."""
    case = next(case for case in CALIBRATED if case.method == "rotatekv")
    order = case.static()["layers.0.keys.order"]
    static = {"layers.0.keys.order": changed(order, {4: int(order[9])})}
    assert f"holds {order[9]} twice" in refused(case, tmp_path, static, "layers.0.keys.order")


@every_case
def test_a_configuration_that_names_no_file(case: Case, tmp_path: Path) -> None:
    config, settings = model(), cache_settings(case.recipe)
    section = kv_config.write(tmp_path, settings, 1, {})
    if not case.static():
        assert kv_config.read_static(section, tmp_path, config, settings) == {}
        return
    with pytest.raises(CheckpointError, match=r"config\.json: kv_cache: layers\.0\..* is missing"):
        kv_config.read_static(section, tmp_path, config, settings)


def test_another_model(tmp_path: Path) -> None:
    case = next(case for case in CALIBRATED if case.method == "pca")
    for changes in ({"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"head_dim": 2 * WIDTH}):
        with pytest.raises(CheckpointError, match=r"kv_cache: layers\.\d\.keys\.\w+ is "):
            read(case, tmp_path, case.static(), **changes)


def test_where_the_configuration_does_not_tell_the_heads(tmp_path: Path) -> None:
    """Names are checked at once, the rest with the first keys."""
    case = next(case for case in CALIBRATED if case.method == "pca")
    static = {
        name: tensor[..., :1].clone() if name.endswith("keys.mean") else tensor
        for name, tensor in case.static().items()
    }
    assert read(case, tmp_path, static, kv_lora_rank=8).keys() == static.keys()
    with pytest.raises(CheckpointError, match=r"layers\.0\.keys\.spare is not expected"):
        read(case, tmp_path, {**static, "layers.0.keys.spare": torch.zeros(1)}, kv_lora_rank=8)
    cache = make_cache(model(), case.recipe, static)
    with pytest.raises(
        RecipeError, match=r"keys: pca is calibrated, but mean is float16 \[2, 1\], expected float16 \[2, 16\]"
    ):
        cache.codec(0, "keys", normal(1, HEADS, 8, WIDTH))
