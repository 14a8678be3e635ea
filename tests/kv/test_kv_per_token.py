"""Tokens coded alone: what codecs store is what pages hold, maps against float64, bits by cost, what can be served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kv import paging
from compress.kv.codec import Spec
from compress.kv.codecs import balanced, per_token
from compress.kv.pages import PageCodes, Pages
from compress.kv.settings import cache_settings
from helpers.kv_cases import through_a_model

ALONE = {"sink": 0, "residual_length": 0, "flush": 1}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spec(kind: Any = "keys", layer: int = 0, width: int = 32) -> Spec:
    return Spec(kind, layer, 2, 2, width, 3)


def samples(width: int = 32, tokens: int = 400) -> dict[str, Tensor]:
    """Channels of falling size, gradients of another fall, and a few tokens on which all depends."""
    x = normal(tokens, 2, width) * torch.logspace(0.5, -1, width) + normal(2, width, seed=3)
    slopes = normal(tokens, 2, width, seed=1) * torch.logspace(-1, 0, width).roll(5)
    x[::50] *= 0.05
    slopes[::50] *= 10
    return {"keys": x, "values": x, "gradients_rotated": slopes}


def cost(forward: Tensor, mean: Tensor, x: Tensor, slopes: Tensor) -> float:
    """What errors as large as the turned vectors cost, in float64."""
    inverse = forward.double().inverse()
    errors = ((x.double() - mean.double())[:, :, None] @ forward.double())[:, :, 0].square().sum(-1)
    return float((errors * (slopes.double()[:, :, None] @ inverse.mT)[:, :, 0].square().sum(-1)).mean())


def test_the_map_costs_less_than_a_rotation_and_than_any_neighbour() -> None:
    given = samples()
    static = balanced.calibrate(balanced.Config(), spec(), given)
    x, slopes = given["keys"], given["gradients_rotated"]
    forward, mean = static["forward"].float(), static["mean"].float()
    own = cost(forward, mean, x, slopes)
    plain = per_token.rotation(32).expand(2, -1, -1)
    assert own < 0.5 * cost(plain, torch.zeros(2, 32), x, slopes)
    assert own < 0.5 * cost(plain, x.mean(0), x, slopes)
    assert abs(float(static["cost"]) / (own * 2) - 1) < 0.02
    for seed in range(8):
        near = forward @ (torch.eye(32) + 0.03 * normal(2, 32, 32, seed=seed))
        assert cost(near, mean, x, slopes) > own
        assert cost(forward, mean + 0.2 * normal(2, 32, seed=seed), x, slopes) > own


def test_calibration_does_not_depend_on_the_order_of_tokens() -> None:
    given, order = samples(), torch.randperm(400, generator=torch.Generator().manual_seed(0))
    one = balanced.calibrate(balanced.Config(), spec("values"), given)
    two = balanced.calibrate(balanced.Config(), spec("values"), {name: x[order] for name, x in given.items()})
    for name, tensor in one.items():
        assert (tensor.double() - two[name].double()).abs().max() <= 2e-3 * tensor.double().abs().max()


@pytest.mark.parametrize("bits", [2.94, 3.25, 4.5])
@pytest.mark.parametrize("levels", ["uniform", "lloyd"])
def test_bits_go_where_errors_cost_most_and_keep_the_budget(bits: float, levels: Any) -> None:
    config = balanced.Config(bits=bits, levels=levels)
    costs = [10.0**-i for i in range(8)]
    widths = balanced.allocate(costs, [64] * 8, config)
    assert sum(widths) <= 8 * bits and sum(widths) >= 8 * bits - 1
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]
    assert balanced.allocate([1.0] * 8, [64] * 8, balanced.Config(bits=4.01)) == [4] * 8
    learned = [
        (config, spec(layer=i), {"cost": torch.tensor(c), "bits": torch.tensor([0])}) for i, c in enumerate(costs)
    ]
    balanced.balance(learned)
    assert [int(static["bits"]) for _, _, static in learned] == widths


def test_heads_whose_codes_are_no_whole_bytes_are_refused_before_calibration() -> None:
    balanced.check_heads(balanced.Config(bits=4), spec(width=20))
    for bits in (3.0, 4.5):
        with pytest.raises(RecipeError, match=r"layer 0, keys: 3 bits of 20 channels are no whole bytes; choose"):
            balanced.check_heads(balanced.Config(bits=bits), spec(width=20))


def layer(recipe: dict[str, Any], static: dict[str, Tensor] | None = None) -> Any:
    settings = cache_settings(recipe)
    codings, line = paging.servable(settings, 2)
    return codings, line, paging.for_layer(codings[0], {k: spec(k) for k in ("keys", "values")}, static or {})


def test_codecs_store_what_pages_hold() -> None:
    own = balanced.calibrate(balanced.Config(bits=3), spec(), samples())
    static = {f"layers.0.{kind}.{name}": x for kind in ("keys", "values") for name, x in own.items()}
    codings, line, held = layer({"method": "balanced", "bits": 3, "levels": "lloyd", **ALONE}, static)
    assert line is None and held is not None
    assert held.keys.codes == PageCodes(3, 32, 32, True)
    x, pages = normal(9, 2, 32), Pages(held.keys.codes, held.values.codes, 4)
    held_pages = torch.zeros(3, 2, 4, pages.token_bytes, dtype=torch.uint8)
    tables = held.keys.levels, held.values.levels
    pages.encode_into(held_pages, torch.arange(9), (held.keys.turn.into(x), held.values.turn.into(x)), tables)
    keys, _ = pages.decode_first(held_pages, torch.arange(3), 9, tables)
    codec = balanced.build(codings[0]["keys"].config, spec(), own)
    rows = codec.encode(x.transpose(0, 1)[None], {})
    assert torch.equal(rows["codes"][0].transpose(0, 1), pages.read(held_pages, torch.arange(3), 9)[0].codes)
    assert (held.keys.turn.out_of(keys) - codec.decode(rows)[0].transpose(0, 1)).abs().max() < 1e-5


def test_layers_without_calibrated_tensors_are_rotated() -> None:
    _, _, held = layer({"method": "balanced", "bits": 4.5, **ALONE})
    assert held.keys.codes == PageCodes(4, 32, 32) and held.keys.turn.mean is None
    assert torch.equal(held.keys.turn.forward, per_token.rotation(32))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"method": "per_token", **ALONE}, None),
        ({"method": "per_token", "sink": 4, "residual_length": 128}, "no token exact (sink 4 and residual_length 128)"),
        ({"method": "kivi", "bits": 2, **ALONE}, "kivi is not that; served as method: per_token, bits: 2"),
        ({"method": "pca", "bits": 2.5, **ALONE}, "pca is not that; served as method: per_token, bits: 3"),
        ({"method": "per_token", **ALONE, "evict": {"method": "snapkv", "keep": 0.5}}, "kv_cache.evict: pages"),
        ({"method": "per_token", **ALONE, "values": {"method": "identity"}}, "served as method: per_token, bits: 8"),
    ],
)
def test_what_pages_cannot_hold_has_a_nearest_setting(recipe: dict[str, Any], words: str | None) -> None:
    codings, line, held = layer(recipe)
    assert line is None if words is None else words in line and "\n" not in line
    assert held is not None and all(c.policy == paging.NO_EXACT for c in codings[0].values())


def test_all_that_is_replaced_is_in_the_line() -> None:
    evict = {"method": "snapkv", "keep": 0.5}
    _, line, _ = layer({"method": "kivi", "bits": 2, **ALONE, "evict": evict})
    assert line is not None and "kv_cache.evict: pages" in line and "served as method: per_token, bits: 2" in line


def test_layers_that_are_skipped_stay_exact() -> None:
    _, line, held = layer({"method": "per_token", **ALONE, "skip_layers": [0]})
    assert held is None and line is None


def test_calibrated_on_a_model_and_read_in_both_ways() -> None:
    static, (decoded, fused, exact) = through_a_model(
        {"method": "balanced", "bits": 5.5, **ALONE, "exact_prefill": False}
    )
    torch.testing.assert_close(decoded, fused, rtol=1e-3, atol=1e-3)
    assert 0 < (decoded - exact).abs().mean() < 0.1 * exact.std()
    assert {tensor.dtype for name, tensor in static.items() if name.endswith("forward")} == {torch.float16}
    widths = [int(tensor) for name, tensor in static.items() if name.endswith("bits")]
    assert len(widths) == 4 and sum(widths) <= 4 * 5.5
