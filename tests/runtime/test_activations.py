"""Quantized inputs: what becomes of numbers, tokens and gradients, and what config.json says of it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress.errors import CheckpointError, NumericalError
from compress.formats.stored import from_dict, from_table
from compress.kernels import dispatch
from compress.runtime import activation_quant as inputs
from compress.runtime.activation_quant import LargestInput, fake_quantize, quantize, split
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.hf import CompressQuantizer, build_config, scheme
from compress.runtime.linear import PackedLinear
from compress.types import Activations, PackedWeight, Stored, WeightTransforms
from helpers.pico import PICO, round_to_nearest

BF16 = torch.bfloat16
EIGHT, FOUR, FP8, STATIC = Activations(), Activations(4), Activations(8, dtype="fp8"), Activations(8, "tensor")
KINDS = [*(Activations(bits) for bits in range(2, 9)), Activations(4, clip=0.9), FP8, STATIC]
BLOCKS = [Activations(4, dtype="nvfp4"), Activations(4, "tensor", dtype="nvfp4"), Activations(4, dtype="mxfp4")]
BLOCKS += [Activations(dtype="mxfp8"), Activations(dtype="fp8-block")]  # tests/runtime/test_block_activations.py
IN_SCALE = torch.tensor([0.02])
every_kind = pytest.mark.parametrize("kind", [*KINDS, *BLOCKS], ids=lambda k: f"{inputs.describe(k)} {k.clip}")
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{inputs.describe(k)} {k.clip}")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grid(kind: Activations) -> Tensor:
    """All quantized numbers there are, float64, ascending."""
    if kind.dtype == "int":
        top = 2 ** (kind.bits - 1) - 1
        return torch.arange(-top, top + 1).double()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return every[every.isfinite()].unique()


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16, torch.float64])
def test_each_input_goes_to_the_nearest_number(kind: Activations, dtype: torch.dtype) -> None:
    x = random(7, 5, 33, dtype=dtype)
    q, scale = quantize(x, kind, IN_SCALE)
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (torch.float32, x.shape, torch.float32, (7, 5, 1))
    top = 448 if kind.dtype == "fp8" else 2 ** (kind.bits - 1) - 1
    if kind.scale == "token":
        torch.testing.assert_close(scale, kind.clip * x.abs().amax(-1, keepdim=True).float() / top, rtol=1e-6, atol=0)
    else:
        assert torch.equal(scale, IN_SCALE.expand_as(scale))
    numbers = grid(kind)
    assert torch.isin(q.double(), numbers).all()
    unit = x.double() / scale.double()
    distance = (unit[..., None] - numbers).abs().amin(-1)
    torch.testing.assert_close((unit - q.double()).abs(), distance, rtol=0, atol=top * 1e-6)


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_most_negative_integer_does_not_occur(bits: int) -> None:
    x = torch.cat([-random(64, 40).abs(), torch.full((1, 40), -3.0)])
    for kind in (Activations(bits), Activations(bits, clip=0.5), Activations(bits, "tensor")):
        q, _ = quantize(x, kind, torch.tensor([1e-3]))
        assert q.min() == -(2 ** (bits - 1) - 1)
        assert torch.equal(q.to(torch.int8).float(), q)


@every_kind
def test_zeros_are_zeros(kind: Activations) -> None:
    x = random(3, 8)
    x[1] = 0
    q, scale = quantize(x, kind, IN_SCALE)
    assert scale.isfinite().all() and (scale > 0).all()
    assert (q[1] == 0).all() and (fake_quantize(x, kind, IN_SCALE)[1] == 0).all()


def test_the_smallest_and_largest_tokens() -> None:
    for size in (1e-45, 1e-40, 1e-30, 1e30, 3e38):
        x = torch.tensor([[size, -size, 0.0]])
        q, scale = quantize(x, Activations(4))
        assert q.isfinite().all() and scale.isfinite().all()
        if size > 1e-36:
            torch.testing.assert_close(fake_quantize(x, Activations(4)), x)


@every_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_token_that_is_not_finite_is_not_a_number(kind: Activations, bad: float, dtype: torch.dtype) -> None:
    x = random(4, 8, dtype=dtype)
    clean = quantize(x, kind, IN_SCALE)
    x[2, 3] = bad
    q, scale = quantize(x, kind, IN_SCALE)
    assert q.isfinite().all(), "integers are made of it"
    assert scale[2].isnan().all() and fake_quantize(x, kind, IN_SCALE)[2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(q[others], clean[0][others]) and torch.equal(scale[others], clean[1][others])


@every_kind
def test_a_token_does_not_depend_on_the_others(kind: Activations) -> None:
    x = random(16, 24)
    whole = quantize(x, kind, IN_SCALE)
    for size in (1, 5):
        parts = [quantize(part, kind, IN_SCALE) for part in x.split(size)]
        assert all(
            torch.equal(torch.cat(part), all_) for part, all_ in zip(zip(*parts, strict=True), whole, strict=True)
        )


@each_kind
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_split_loses_nothing(kind: Activations, dtype: torch.dtype) -> None:
    x = random(9, 64, dtype=dtype) * 5
    q, scale = quantize(x, kind, IN_SCALE)
    part, factor = split(x, kind, IN_SCALE)
    assert part.dtype == dtype and part.abs().max() < 2
    assert torch.equal(part.double() * factor.double(), q.double() * scale.double())
    assert torch.equal(fake_quantize(x, kind, IN_SCALE), (q * scale).to(dtype))


# ---------------------------------------------------------------- gradients


def test_gradients_pass_the_rounding_and_not_what_is_clipped() -> None:
    weight = random(32, seed=1)
    for kind in (Activations(), Activations(2), FP8):
        x = random(6, 32).requires_grad_()
        (fake_quantize(x, kind) * weight).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, weight.expand(6, -1))  # the largest input of each token, too
    x = random(6, 32).requires_grad_()
    kind = Activations(8, clip=0.5)
    (fake_quantize(x, kind) * weight).sum().backward()
    _, scale = quantize(x, kind)
    clipped = x.detach().abs() > 127.5 * scale
    assert clipped.any() and x.grad is not None
    torch.testing.assert_close(x.grad, torch.where(clipped, 0, weight.expand(6, -1)))


def test_values_do_not_depend_on_whether_gradients_are_wanted() -> None:
    x = random(6, 32)
    for kind in [*KINDS, *BLOCKS]:
        assert torch.equal(fake_quantize(x.clone().requires_grad_(), kind, IN_SCALE), fake_quantize(x, kind, IN_SCALE))


# ---------------------------------------------------------------- static scales


def test_a_static_scale_is_that_of_the_largest_input() -> None:
    x = random(40, 16, dtype=BF16)
    for batch in (1, 7, 40):
        running = LargestInput()
        for part in x.split(batch):
            running.add(part)
        running.add(x[:0])
        for kind, top in ((Activations(8, "tensor"), 127), (Activations(4, "tensor", 0.9), 7)):
            scale = running.in_scale(kind, "layer")
            assert (scale.shape, scale.dtype) == ((1,), torch.float32)
            torch.testing.assert_close(scale, kind.clip * x.float().abs().amax().view(1) / top)
    fp8 = running.in_scale(Activations(8, "tensor", dtype="fp8"), "layer")
    torch.testing.assert_close(fp8, x.float().abs().amax().view(1) / 448)


def test_inputs_that_give_no_scale() -> None:
    running, kind = LargestInput(), Activations(8, "tensor")
    with pytest.raises(NumericalError, match="layer: no calibration token reached it"):
        running.in_scale(kind, "layer")
    running.add(torch.zeros(3, 4))
    assert running.in_scale(kind, "layer").tolist() == [1]
    running.add(torch.tensor([[1.0, math.nan]]))
    running.add(torch.ones(2, 2))
    with pytest.raises(NumericalError, match="layer: its inputs are not finite"):
        running.in_scale(kind, "layer")


# ---------------------------------------------------------------- config.json


@each_kind
def test_dictionaries_and_back(kind: Activations) -> None:
    assert from_table(Activations, dataclasses.asdict(kind), "here") == kind
    assert from_table(Activations, {}, "here") == Activations()
    entry = {"format": "dense", "params": {}, "activations": None}
    assert from_dict(entry, "here").activations is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([8], "activations is not a table"),
        ("int8", "activations is not a table"),
        ({"bits": 8, "zero_point": True}, r"unknown keys \['zero_point'\]; upgrade compress"),
        ({"bits": 9}, "bits 9 is not between 2 and 8"),
        ({"bits": True}, "bits True"),
        ({"bits": 8.0}, "bits 8.0"),
        ({"bits": "8"}, "bits '8'"),
        ({"scale": "channel"}, "scale 'channel'"),
        ({"scale": ["token"]}, r"scale \['token'\]"),
        ({"clip": 0}, "clip 0"),
        ({"clip": math.nan}, "clip nan"),
        ({"clip": "1"}, "clip '1'"),
        ({"dtype": "fp4"}, "unknown dtype of activations 'fp4'"),
        ({"dtype": "fp8", "bits": 4}, "bits 4"),
    ],
)
def test_what_is_not_known_is_an_error(values: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"a.b: .*{message}"):
        from_dict({"format": "dense", "params": {}, "activations": values}, "a.b")


def test_descriptions() -> None:
    assert [inputs.describe(kind) for kind in (Activations(), Activations(4, "tensor"), FP8)] == [
        "int8 inputs",
        "static int4 inputs",
        "fp8 inputs",
    ]


# ---------------------------------------------------------------- layers


def layer_of(weight: PackedWeight, activations: Activations) -> PackedLinear:
    static = {"in_scale": IN_SCALE} if activations.scale == "tensor" else {}
    tensors = {key: tensor.clone() for key, tensor in {**weight.tensors, **static}.items()}
    stored = dataclasses.replace(weight.stored, activations=activations)
    return PackedLinear.from_packed(PackedWeight(stored, tensors, weight.shape))


def test_inputs_are_quantized_after_the_operations_on_them() -> None:
    weight = round_to_nearest(random(32, 64), 8, -1)
    signs = torch.randint(0, 256, (8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    around = WeightTransforms(("signs", "hadamard"), ())
    packed = PackedWeight(Stored("int", weight.params, around, FOUR), {**weight.tensors, "in_signs": signs}, (32, 64))
    layer, plain = PackedLinear.from_packed(packed, random(32)), layer_of(weight, FOUR)
    x = random(5, 64)
    assert layer.bias is not None
    turned = dispatch.before(x, around, layer.tensors)
    assert torch.equal(layer(x), plain(turned) + layer.bias)
    assert not torch.allclose(layer(x), F.linear(x, layer.dequantize(torch.float32), layer.bias), atol=1e-2)


def test_a_layer_goes_and_comes_back() -> None:
    layer = layer_of(round_to_nearest(random(32, 64), 4, -1), STATIC)
    back = layer.packed()
    assert back.stored.activations == STATIC and torch.equal(back.tensors["in_scale"], IN_SCALE)
    assert layer.state_dict().keys() == {"words4", "scales", "in_scale"}
    moved = copy.deepcopy(layer).to(BF16)
    assert moved.get_parameter("in_scale").dtype == torch.float32 and not moved.get_parameter("in_scale").requires_grad
    x = random(5, 64)
    assert torch.equal(PackedLinear.from_packed(back)(x), layer(x))
    assert "static int8 inputs" in repr(layer) and "inputs" not in repr(
        PackedLinear.from_packed(round_to_nearest(random(4, 8), 4, -1))
    )
    linear = layer.to_linear(torch.float32)
    assert torch.equal(linear(x), F.linear(x, layer.dequantize(torch.float32)))


def test_a_static_scale_is_used() -> None:
    layer = layer_of(round_to_nearest(random(32, 64), 8, -1), STATIC)
    x = random(5, 64) * 10  # clipped at 127 * 0.02
    with torch.no_grad():
        expected = F.linear(fake_quantize(x, STATIC, IN_SCALE), layer.dequantize(torch.float32))
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-3)
        layer.get_parameter("in_scale").mul_(2)
        assert not torch.allclose(layer(x), expected, rtol=1e-2)


# ---------------------------------------------------------------- checkpoints

IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
Q = "model.layers.0.self_attn.q_proj"


def kind_of(name: str) -> Activations | None:
    """Most inputs in 8 bits, some in 4, some with a static scale, some as they are."""
    kinds: Mapping[str, Activations | None] = {"down_proj": FOUR, "o_proj": STATIC, "gate_proj": None}
    return kinds.get(name.rsplit(".", 1)[1], EIGHT)


def pack(model: PreTrainedModel) -> PreTrainedModel:
    for name, module in list(model.named_modules()):
        if is_fused_experts(module):
            model.set_submodule(name, Experts.from_fused(module))
    packed = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight, kind = round_to_nearest(module.weight, 8, -1), kind_of(name)
            tensors = {**weight.tensors, **({"in_scale": IN_SCALE} if kind == STATIC else {})}
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}
            packed[name] = PackedWeight(Stored("int", weight.params, activations=kind), tensors, weight.shape)
            model.set_submodule(name, PackedLinear.from_packed(packed[name], module.bias))
    config = build_config({name: w.stored for name, w in packed.items()})
    model.hf_quantizer, model.config.quantization_config = CompressQuantizer(config), config
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def load(directory: Path, **options: Any) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    model = pack(PICO[name]())
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    expected = logits(model)
    loaded = load(tmp_path)
    assert torch.equal(logits(loaded), expected)
    for path, module in loaded.named_modules():
        if isinstance(module, PackedLinear):
            assert module.activations == kind_of(path)
            assert ("in_scale" in module.tensors) == (module.activations == STATIC)
    for module in loaded.modules():  # the inputs do matter
        if isinstance(module, PackedLinear):
            module.activations = None
    assert 1e-3 < (logits(loaded) - expected).norm() / expected.norm() < 0.5
    loaded = load(tmp_path, dtype=BF16)
    scales = [p for path, p in loaded.named_parameters() if path.endswith("in_scale")]
    assert scales and all(torch.equal(p, IN_SCALE) and p.dtype == torch.float32 for p in scales)
    assert (logits(loaded).float() - expected).norm() < 0.3 * expected.norm()  # four bits flip where bfloat16 rounds
    plain = load(tmp_path).dequantize()
    assert not any(isinstance(module, PackedLinear) for module in plain.modules())


def test_the_list_says_what_differs() -> None:
    weight = round_to_nearest(random(8, 16), 8, -1)
    kinds = {"a": EIGHT, "b": EIGHT, "c": None, "d": STATIC}
    packed = {
        name: PackedWeight(Stored("int", weight.params, activations=kind), weight.tensors, (8, 16))
        for name, kind in kinds.items()
    }
    config = build_config({name: w.stored for name, w in packed.items()})
    assert config.default["activations"] == {"bits": 8, "scale": "token", "clip": 1.0, "dtype": "int"}
    assert config.modules["a"] == config.modules["b"] == {}
    assert config.modules["c"] == {"activations": None}
    assert config.modules["d"] == {"activations": {"bits": 8, "scale": "tensor", "clip": 1.0, "dtype": "int"}}
    again = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    assert {name: scheme(again, name).activations for name in kinds} == kinds
    plain = build_config({"c": packed["c"].stored})
    assert plain.default.keys() == {"format", "params"} and scheme(plain, "c").activations is None


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pack(PICO["llama"]()).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["default"]["activations"].update(bits=16), "bits 16 is not between 2 and 8"),
        (lambda c: c["default"]["activations"].update(group=16), r"unknown keys \['group'\].*upgrade compress"),
        (lambda c: c["default"].update(activations=8), "activations is not a table"),
        (lambda c: c["default"].update(inputs=8), r"has \[.*'inputs'"),
        (lambda c: c["modules"][Q].update(activations={"scale": "tensor"}), f"{Q}.in_scale is not in the checkpoint"),
    ],
)
def test_a_list_that_does_not_fit(change: Callable[[dict[str, Any]], object], message: str, saved: Path) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_stored_scale_that_is_none(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    tensors[f"{name}.in_scale"] = torch.tensor([0.0])
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}.in_scale holds 0, which is not above 0"):
        AutoModelForCausalLM.from_pretrained(saved)
