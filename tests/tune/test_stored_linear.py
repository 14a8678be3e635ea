"""Linears computed around their stored matrix have the outputs and gradients of the dense weight in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress import api, formats
from compress.formats import lowrank, transforms
from compress.model.blockwise import BlockArgs
from compress.quant import trellis
from compress.run import verify
from compress.tune import stored_linear
from compress.tune.blockwise import BlockTuning, Config
from compress.tune.codes import fixed
from compress.tune.stored_linear import StoredLinear
from compress.types import Activations, LowRank, PackedWeight, Stats, Stored, WeightTransforms
from helpers.pico import save_pico
from helpers.runs import Setup, job, stored_tensors
from helpers.stored import samples

SHAPE = (32, 64)
FLOATS = (torch.float32, torch.float16)
HADAMARD = WeightTransforms(("signs", "hadamard"), ("hadamard_transposed", "signs"))
SCALES = WeightTransforms(("channel_scale16", "hadamard"), ("hadamard", "channel_scale16"))
BYTES = WeightTransforms(("channel_scale8", "hadamard"), ("hadamard", "channel_scale8"))
BETWEEN = WeightTransforms(("hadamard", "channel_scale"), ("signs", "hadamard", "channel_scale16"))
AROUND = (WeightTransforms(), HADAMARD, SCALES, BYTES, BETWEEN)


def surrounded(packed: PackedWeight, ops: WeightTransforms, part: LowRank | None = None) -> PackedWeight:
    """A stored matrix with transforms around it, their scales between -1.5 and 1.5, and a low-rank part beside it."""
    generator = torch.Generator().manual_seed(1)
    own = {}
    for name, (size, dtype) in transforms.specs(ops, packed.shape).items():
        side, _, transform = name.partition("_")
        n = packed.shape[0 if side == "out" else 1]
        values = (torch.rand(n, generator=generator) + 0.5) * (torch.randint(2, (n,), generator=generator) * 2 - 1)
        own[name] = transforms.pack_diagonal(transform, values)
        assert own[name].shape == size and own[name].dtype == dtype
    if part is not None:
        a, b = (torch.randn(part.rank, n, generator=generator) for n in packed.shape[::-1])
        own |= {f"{lowrank.PREFIX}{name}": each for name, each in lowrank.pack(a, b, part).items()}
    return PackedWeight(
        Stored(packed.format, packed.params, ops, lowrank=part), {**packed.tensors, **own}, packed.shape
    )


def cases() -> Iterator[PackedWeight]:
    for name in ("trellis", "int", "codebook"):
        for packed in samples(name, SHAPE):
            for ops in AROUND:
                yield surrounded(packed, ops)
        yield surrounded(packed, HADAMARD, LowRank(4))


def leaves_of(packed: PackedWeight) -> dict[str, Tensor]:
    return {name: t.float().requires_grad_() for name, t in packed.tensors.items() if t.dtype in FLOATS}


def densely(packed: PackedWeight, x: Tensor, slope: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs and gradients by the dense weight: what is beside and around the matrix in float64."""
    leaves = leaves_of(packed)
    tensors = {**packed.tensors, **leaves}
    matrix = formats.decode_stored(PackedWeight(packed.stored, tensors, packed.shape), torch.float32).double()
    if packed.stored.lowrank is not None:
        a, b = lowrank.part_factors(tensors, packed.stored.lowrank, packed.shape, torch.float32)
        matrix = matrix + b.double().T @ a.double()
    weight = transforms.effective(matrix, packed.stored.ops, tensors)
    x = x.double().requires_grad_()
    y = x @ weight.T
    names = ["x", *leaves]
    slopes = torch.autograd.grad(y, [x, *leaves.values()], slope.double())
    return y.detach(), dict(zip(names, slopes, strict=True))


def around(
    packed: PackedWeight, x: Tensor, slope: Tensor, turns_activations: bool
) -> tuple[StoredLinear, Tensor, dict[str, Tensor]]:
    """The same by a `StoredLinear`."""
    leaves = leaves_of(packed)
    linear = StoredLinear(packed.stored, packed.shape, False, leaves)
    moved = PackedWeight(packed.stored, {**packed.tensors, **leaves}, packed.shape)
    numbers = linear.numbers(moved, 1 if turns_activations else 10**9)
    x = x.clone().requires_grad_()
    y = functional_call(linear, numbers, (x,))
    names = ["x", *leaves]
    return linear, y.detach(), dict(zip(names, torch.autograd.grad(y, [x, *leaves.values()], slope), strict=True))


@pytest.mark.parametrize("turns_activations", [True, False], ids=["few tokens", "many"])
def test_outputs_and_gradients_are_those_of_the_dense_weight(turns_activations: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x, slope = (torch.randn(2, 3, n, generator=generator) for n in SHAPE[::-1])
    kinds = set()
    for packed in cases():
        y, expected = densely(packed, x, slope)
        linear, outputs, slopes = around(packed, x, slope, turns_activations)
        kinds.add((packed.format, linear.is_fixed, linear.turns_activations))
        assert (outputs - y).norm() < 2e-6 * y.norm()
        for name, gradient in expected.items():
            error = (slopes[name] - gradient).norm() / gradient.norm().clamp(min=1e-3 * x.norm())
            assert error < 1e-5, (packed.stored, name)
    assert ("trellis", True, turns_activations) in kinds and ("codebook", False, turns_activations) in kinds


def test_the_matrix_of_fixed_codes_needs_no_gradient() -> None:
    """Nor are its codes decoded anew for another scale; what rows are multiplied by leaves no choice."""
    seen = set()
    for packed in samples("trellis", SHAPE):
        stored = surrounded(packed, HADAMARD)
        floats = [name for name, tensor in stored.tensors.items() if tensor.dtype in FLOATS]
        linear = StoredLinear(stored.stored, stored.shape, True, floats)
        if "table" in floats:
            assert not linear.is_fixed and linear.direct == ()
            continue
        assert linear.is_fixed and set(linear.direct) == set(floats)
        assert linear.must_turn == packed.params.row_scales
        doubled = PackedWeight(stored.stored, {**stored.tensors, "scale": 2 * stored.tensors["scale"]}, stored.shape)
        assert torch.equal(linear.numbers(stored, 1)["weight"], linear.numbers(doubled, 1)["weight"])
        seen.add(packed.params.row_scales)
    assert seen == {True, False}


def test_what_is_less_work_is_turned() -> None:
    square = stored_linear.turning_is_cheaper(HADAMARD, (4096, 4096), 2048)
    assert square and not stored_linear.turning_is_cheaper(HADAMARD, (576, 576), 2048)
    assert not stored_linear.turning_is_cheaper(WeightTransforms(), (64, 64), 1)
    assert stored_linear.turning_is_cheaper(HADAMARD, (64, 64), 63)
    assert not stored_linear.turning_is_cheaper(HADAMARD, (64, 64), 64)


class Pair(nn.Module):
    """Two linears, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 64] -> [..., 64]."""
        return x + self.down(torch.tanh(self.up(x)))


def scaled_weight(weight: Tensor, activations: Activations | None = None) -> PackedWeight:
    """2 bits in a rotated basis with scales of 1 or -1 around it, which can be trained."""
    shape = weight.shape[0], weight.shape[1]
    generator = torch.Generator().manual_seed(3)
    ones = {
        name: transforms.pack_diagonal("channel_scale16", torch.randint(2, size, generator=generator) * 2 - 1.0)
        for name, (size, _) in transforms.specs(SCALES, shape).items()
    }
    stats = Stats(torch.eye(shape[1]), 1)
    plain = trellis.quantize(transforms.rotate(weight, SCALES, ones), stats, trellis.Config(state_bits=8)).weight
    return PackedWeight(Stored("trellis", plain.params, SCALES, activations), {**plain.tensors, **ones}, shape)


@pytest.mark.parametrize("activations", [None, Activations(bits=8)], ids=["", "inputs in 8 bits"])
def test_scales_of_channels_are_trained_between_groups(activations: Activations | None) -> None:
    """They lower the error of the block while its last linear has its own weight; codes stay."""
    block = Pair().requires_grad_(False)
    x = torch.randn(4, 4, 8, 64, generator=torch.Generator().manual_seed(2))
    config = Config(steps=0, between=40, rate=0.01, weights_rate=1e-6)
    tuning = BlockTuning(
        block, ["up", "down"], lambda: ((batch, BlockArgs((), {}), block(batch)) for batch in x), 4, config
    )
    packed = scaled_weight(block.up.weight, activations)
    tuning.add("up", packed)
    tuning.between()
    (stage,) = tuning.stages
    now = tuning.packed["up"]
    changed = {name for name, tensor in packed.tensors.items() if not torch.equal(tensor, now.tensors[name])}
    if activations is not None:
        assert not changed
        return
    assert stage.after < 0.98 * stage.before
    assert changed == {"in_channel_scale16", "out_channel_scale16"}
    assert all(tensor.dtype == packed.tensors[name].dtype for name, tensor in now.tensors.items())
    assert torch.equal(tuning.model.get_parameter("up.weight"), formats.decode(now, torch.float32))
    assert tuning.error({}) == pytest.approx(stage.after, rel=0.02)


def test_factors_alone_need_no_decoding() -> None:
    kinds = set()
    for packed in samples("trellis", SHAPE):
        for ops in AROUND:
            stored = surrounded(packed, ops)
            codes = fixed.Codes(stored, torch.empty(0))
            assert (codes.core is None) == ("table" in packed.tensors or ops == BETWEEN)
            assert codes.has_scales == (codes.core is not None and ops == SCALES and not packed.params.row_scales)
            assert torch.allclose(codes.weight(), formats.decode(stored, torch.float32), rtol=1e-4, atol=1e-5)
            assert all(torch.equal(t, codes.pack().tensors[name]) for name, t in stored.tensors.items())
            if codes.has_scales:
                assert set(codes.trained) == {"in_channel_scale16", "out_channel_scale16"}
            kinds.add((codes.core is None, codes.has_scales))
            generator = torch.Generator().manual_seed(4)
            slope = torch.randn(SHAPE, generator=generator)
            codes.weight().backward(slope)
            _, expected = densely(stored, torch.eye(SHAPE[1]), slope.T)
            for name, each in codes.trained.items():
                assert each.moved.grad is not None
                wanted = expected[name] * each.unit
                assert (each.moved.grad - wanted).norm() < 1e-5 * wanted.norm().clamp(min=1e-3), name
    assert len(kinds) == 3


def test_all_stages_train_scales_of_channels(tmp_path: Path) -> None:
    """Codes stay; every vector around a linear has moved from the signs that it began with."""
    model = save_pico("llama", tmp_path / "llama", dtype=torch.bfloat16)
    small = ("calibration.num_samples=8", "calibration.seq_len=32", "calibration.target_correction=0", "state_bits=6")
    setup = Setup("vq2bit", (*small, "out_scales=ones", "in_vector=true", "vector_bits=16"))
    tunes = {
        "between": "tune={method: blockwise, steps: 0, between: 6, rate: 0.01}",
        "behind": "tune={method: blockwise, steps: 6, between: 0, rate: 0.01}",
    }
    for name, tune in tunes.items():
        api.quantize(job(model, setup.set(tune), tmp_path / name))
        verify.verify(tmp_path / name)
        scales = {key: t for key, t in stored_tensors(tmp_path / name).items() if "channel_scale16" in key}
        moved = {key for key, t in scales.items() if not torch.equal(t.abs(), torch.ones_like(t))}
        last = {key for key in scales if "down_proj" in key}
        assert len(scales) == 2 * 7 * 2 and moved and (name == "behind" or not moved & last)
    api.quantize(job(model, setup, tmp_path / "plain"))
    plain, tuned = (stored_tensors(tmp_path / name) for name in ("plain", "behind"))
    first = "model.layers.0.self_attn.q_proj.words"
    assert torch.equal(plain[first], tuned[first])
