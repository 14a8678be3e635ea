"""Ways to train a packed weight: gradients of rounding, the stored codes at the start, what is stored at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from compress import formats, plugins
from compress.formats import grid
from compress.formats import int as int_format
from compress.model.blockwise import BlockArgs
from compress.tune import held_block
from compress.tune.blockwise import BlockTuning, Config
from compress.tune.codes.latent import MARGIN, Rounded
from compress.tune.descend import descend
from compress.tune.held_block import Portions
from compress.tune.trained import Rates, TrainedWeight, strip_surroundings
from compress.types import PackedWeight, Stored, WeightTransforms
from helpers.pico import round_to_nearest
from helpers.stored import samples

AROUND = WeightTransforms(input=("signs", "hadamard"), output=("hadamard",))
LEARNED = ("straight_through", "signs", "clips")
RATES = Rates(steps=8, rate=0.01, codes_rate=1.0, start="weights")


def weights() -> Iterator[tuple[Tensor, PackedWeight]]:
    """A weight and what a careless method made of it: codes are up to two steps from the nearest ones."""
    for seed, (bits, group, symmetric) in enumerate([(2, 16, True), (2, 64, False), (3, -1, False), (4, 32, True)]):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(24, 80, generator=generator)
        packed = round_to_nearest(weight, bits, group, symmetric=symmetric)
        codes, scales, zeros = int_format.unpack(packed.tensors, packed.params, packed.shape)
        off = torch.randint(-2, 3, codes.shape, generator=generator)
        codes = (codes + off).clamp(0, 2**bits - 1).to(torch.uint8)
        yield weight, PackedWeight(packed.stored, int_format.pack(codes, scales, zeros, packed.params), packed.shape)


def rotated() -> tuple[Tensor, PackedWeight]:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
    around = {"in_signs": torch.full((8,), 0xA5, dtype=torch.uint8)}
    plain = round_to_nearest(weight, 3, 16, symmetric=False)
    shell = PackedWeight(Stored("int", plain.params, AROUND), {**plain.tensors, **around}, plain.shape)
    inner = strip_surroundings(weight, shell)
    assert inner is not None
    stored = round_to_nearest(inner, 3, 16, symmetric=False).tensors
    return weight, PackedWeight(shell.stored, {**stored, **around}, plain.shape)


def made(name: str, weight: Tensor, packed: PackedWeight, rates: Rates = RATES) -> TrainedWeight:
    found = plugins.load("codes", name).Codes(packed, weight, rates)
    assert isinstance(found, TrainedWeight)
    return found


@pytest.mark.parametrize("start", ["codes", "weights"])
@pytest.mark.parametrize("name", plugins.names("codes"))
def test_training_begins_with_what_is_stored(name: str, start: str) -> None:
    kinds = ("codebook", "e8p", "ternary", "trellis", "grid")
    others = [packed for kind in kinds for packed in samples(kind, (16, 128))]
    vectors = [(formats.decode(packed, torch.float32), packed) for packed in others]
    served = [pair for pair in [*weights(), rotated(), *vectors] if plugins.load("codes", name).serves(pair[1])]
    assert len(served) > 3
    for weight, packed in served:
        trained = made(name, weight, packed, dataclasses.replace(RATES, start=start))
        assert torch.allclose(trained.weight(), formats.decode(packed, torch.float32), rtol=1e-5, atol=1e-5)
        rounded = trained.pack()
        assert rounded.stored == packed.stored and rounded.tensors.keys() == packed.tensors.keys()
        pairs = [(tensor, rounded.tensors[key]) for key, tensor in packed.tensors.items()]
        assert all(torch.equal(before.view(torch.uint8), after.view(torch.uint8)) for before, after in pairs)
        assert trained.changed_share() in (0.0, None)


def test_latents_are_as_near_to_the_weight_as_their_cells_allow() -> None:
    for weight, packed in weights():
        trained = made("straight_through", weight, packed)
        codes, scales, zeros = (
            None if t is None else t.double() for t in int_format.unpack(packed.tensors, packed.params, packed.shape)
        )
        assert codes is not None and scales is not None
        group = packed.params.group(packed.shape[1])
        latent = trained.trained["latent"].start.flatten(1)
        for row, column in ((0, 0), (3, 17), (23, 79), (11, 40)):
            g = column // group
            zero = 2 ** (packed.params.bits - 1) if zeros is None else zeros[row, g]
            centre = float(codes[row, column] - zero)
            wanted = float(weight[row, column].double() / scales[row, g])
            expected = min(max(wanted, centre - 0.5 + MARGIN), centre + 0.5 - MARGIN)
            assert latent[row, column].item() == pytest.approx(expected, abs=1e-5)


def test_straight_through_gradients_are_those_of_the_formula() -> None:
    """In float64, from the definition: rounding has slope 1, clamping 0 outside."""
    for weight, packed in weights():
        trained = made("straight_through", weight, packed)
        generator = torch.Generator().manual_seed(9)
        parts = {name: trained.trained[name] for name in ("latent", "scales", "zeros") if name in trained.trained}
        for name, step in (("latent", 1.0), ("zeros", 0.6)):  # some codes leave the range
            if name in parts:
                part = parts[name]
                part.moved.data = step * torch.randn(part.start.shape, generator=generator) / part.unit
        values = {name: part.value().detach().double() for name, part in parts.items()}
        top, (out, columns) = 2**packed.params.bits - 1, packed.shape
        mixing = torch.randn(out, columns, generator=generator).double()
        (trained.weight() * mixing.float()).sum().backward()

        group = packed.params.group(columns)
        zeros = values.get("zeros", torch.full_like(values["scales"], 2 ** (packed.params.bits - 1)))
        zero, latent = zeros.round().clamp(0, top), values["latent"].round()
        mix = torch.nn.functional.pad(mixing, (0, -columns % group)).unflatten(1, (-1, group))
        code, scale = latent + zero, values["scales"].half().double()
        inside = ((code >= 0) & (code <= top)).double()
        expected = {
            "latent": mix * scale * inside,
            "scales": (mix * (code.clamp(0, top) - zero)).sum(-1, keepdim=True),
            "zeros": (mix * scale * (inside - 1)).sum(-1, keepdim=True),
        }
        for name, part in parts.items():
            assert part.moved.grad is not None
            slope = part.moved.grad.double() / part.unit
            assert torch.allclose(slope, expected[name], rtol=1e-4, atol=1e-4), (packed.params, name)


def test_signs_move_as_the_paper_says() -> None:
    """From round-to-nearest codes V begins at 0, and the rate falls from 1 / steps to 0 along a line."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    packed = round_to_nearest(weight, 4, 16, symmetric=False)
    steps = 10
    trained = made("signs", weight, packed, Rates(steps, 0.01, 0.5, "weights"))
    offset, beta = trained.parts()[-3], trained.parts()[-1]
    mixing = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    inside = torch.ones_like(mixing, dtype=torch.bool)
    for step in range(steps):
        (trained.weight() * mixing).sum().backward()
        assert offset.moved.grad is not None
        inside &= offset.moved.grad.flatten(1) != 0
        before = offset.value().detach().clone()
        trained.behind(step)
        moved = (offset.value().detach() - before).flatten(1)
        rate = (1 - step / steps) / steps
        assert torch.allclose(moved[inside], -rate * mixing.sign()[inside], atol=1e-6)
    assert inside.float().mean() > 0.5
    assert offset.value().abs().max() <= 0.5 + 0.5 / steps + 1e-6  # the sum of all rates
    assert beta.value().min() > 0.4 and 0 < (trained.changed_share() or 0) < 1


class Pair(nn.Module):
    """Two linears with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm, self.down = nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 32] -> [..., 32]."""
        return x + self.down(torch.nn.functional.silu(self.norm(self.up(x))))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", plugins.names("codes"))
def test_learned_codes_lower_the_error_of_a_block(name: str, symmetric: bool) -> None:
    """From nearest codes; signs at the published first rate, 1 / steps."""
    block, travel = Pair().requires_grad_(False), 0.5 if name == "signs" else 1.0
    x = torch.randn(4, 16, 8, 32, generator=torch.Generator().manual_seed(2))
    config = Config(steps=60, between=0, rate=0.01, codes=name, codes_rate=travel, tokens=128)
    tuning = BlockTuning(block, ["up", "down"], lambda: ((b, BlockArgs((), {}), block(b)) for b in x), 4, config)
    for linear in ("up", "down"):
        tuning.add(linear, round_to_nearest(tuning.weight(linear), 2, 16, symmetric=symmetric))
    given = dict(tuning.packed)
    packed, _, note = tuning.finish()
    [stage] = tuning.stages
    assert stage.after < stage.before * (0.95 if name in LEARNED else 1)
    assert stage.after == pytest.approx(tuning.error({}), rel=1e-6)
    for linear, weight in packed.items():  # what is stored is what was measured
        assert torch.equal(formats.decode(weight, torch.float32), tuning.model.get_parameter(f"{linear}.weight"))
        assert weight.nbytes == given[linear].nbytes
        moved = any(not torch.equal(weight.tensors[k], t) for k, t in given[linear].tensors.items() if "words" in k)
        assert moved == (name in LEARNED)
    assert ("codes that moved: up " in note) == (name in LEARNED)


@pytest.mark.parametrize("name", LEARNED)
def test_training_returns_to_the_best(name: str) -> None:
    weight, packed = next(weights())
    trained = made(name, weight, packed)
    parts = [each.moved for each in trained.trained.values()] or [nn.Parameter(torch.zeros(1))]

    def loss(step: int) -> float:
        with torch.enable_grad():
            error = trained.weight().square().sum()
            error.backward()
        return error.item()

    kept: list[Tensor] = []

    def behind(step: int) -> None:
        trained.behind(step)
        if step == 3:
            trained.keep()
            kept.append(trained.weight().detach().clone())

    descend(parts, 8, 0.01, loss, behind)
    assert not torch.equal(trained.weight(), kept[0])
    trained.restore()
    assert torch.equal(trained.weight(), kept[0])


def test_formats_that_a_way_does_not_serve_keep_their_codes() -> None:
    packed = next(iter(samples("nf", (16, 128))))
    assert not any(plugins.load("codes", name).serves(packed) for name in LEARNED)
    block = nn.Sequential(nn.Linear(128, 16, bias=False), nn.LayerNorm(16)).requires_grad_(False)
    x = torch.randn(3, 4, 8, 128)
    config = Config(steps=20, codes="signs", rate=0.01)
    tuning = BlockTuning(block, ["0"], lambda: ((b, BlockArgs((), {}), block(b)) for b in x), 3, config)
    tuning.add("0", packed)
    found, _, note = tuning.finish()
    assert note.endswith("codes that signs cannot move: 0")
    for key, tensor in packed.tensors.items():
        assert torch.equal(found["0"].tensors[key], tensor) or tensor.is_floating_point()


def test_a_step_takes_some_samples_where_they_do_not_hear_of_each_other() -> None:
    x = torch.randn(3, 4, 8, 6, generator=torch.Generator().manual_seed(0))
    own = torch.arange(4.0)[:, None, None]
    batches = [(b, BlockArgs((own, torch.ones(8, 1)), {}), b) for b in x]

    def apart(hidden: Tensor, call: BlockArgs) -> Tensor:
        return hidden * call.args[0] + call.args[1]

    def mixed(hidden: Tensor, call: BlockArgs) -> Tensor:
        return hidden - hidden.mean(0)

    for run, sizes in ((apart, [2, 2, 2, 2]), (mixed, [4, 4, 4, 4])):
        cut = Portions(lambda: iter(batches), 3, 3, 16, run)
        found = [hidden for hidden, _, _ in islice(cut.endless(), 4)]
        assert [len(hidden) for hidden in found] == sizes
        assert torch.equal(torch.cat(found)[:8], x[1:].flatten(0, 1)[:8])
        assert [id(batch[0]) for batch in cut.held_out()] == [id(batches[0][0])]
    hidden, call, target = held_block.batch_part(batches[1], slice(2, 4))
    assert torch.equal(call.args[0].flatten(), torch.tensor([2.0, 3.0])) and call.args[1].shape == (8, 1)
    assert torch.equal(hidden, x[1, 2:]) and torch.equal(target, x[1, 2:])


@pytest.mark.parametrize("top", [1, 3, 15, 127, 255])
def test_rounding_has_the_gradient_of_what_is_rounded(top: int) -> None:
    """Against the same formula in float64, by the gradients of its parts; latents lie within the range and outside."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(6, 3, 16, generator=generator, dtype=torch.float64) * (top + 1)
    scales = torch.rand(6, 3, 1, generator=generator, dtype=torch.float64) + 0.1
    zeros = torch.randint(0, top + 1, (6, 3, 1), generator=generator).double()
    slope = torch.randn(latent.shape, generator=generator, dtype=torch.float64)
    leaves = [each.clone().requires_grad_() for each in (latent, scales, zeros)]
    codes = leaves[0] + (leaves[0].round() - leaves[0]).detach() + leaves[2]
    exact = (codes.clamp(0, top) - leaves[2]) * leaves[1]
    floats = [each.float().requires_grad_() for each in (latent, scales, zeros)]
    made = Rounded.apply(*floats, top)
    assert (codes.detach() < 0).any() and (codes.detach() > top).any()
    torch.testing.assert_close(made.double(), exact, rtol=1e-6, atol=1e-6)
    gradients = (torch.autograd.grad(y, x, g) for y, x, g in ((made, floats, slope.float()), (exact, leaves, slope)))
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-4 * top)


def test_points_are_as_near_to_the_weight_as_their_cells_allow() -> None:
    """Halfway between two points is half a place; the gradient is that of the value, and ends with the table."""
    table = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2])
    params = grid.Params("e2m1", 16, "e8m0")
    codes, scales = torch.arange(16)[None] % 8, torch.full((1, 1), 127)
    tensors = grid.pack(codes.to(torch.uint8), {"scales": scales.to(torch.uint8)}, params)
    packed = PackedWeight(Stored("grid", params), tensors, (1, 16))
    target = table + torch.tensor([0.2, -0.2, 0.1, 0.9, -0.9, 0.25, -0.4, 9.0] * 2)
    trained = made("points", target, packed)
    moved = trained.trained["latent"].start - (codes + 7)  # 0 is the eighth of 15
    wanted = torch.tensor([0.4, -0.4, 0.2, 0.48, -0.48, 0.25, -0.4, 0.48] * 2)
    assert torch.allclose(moved, wanted[None], atol=1e-6)
    trained.trained["latent"].moved.data += 0.6 / trained.trained["latent"].unit
    (trained.weight() * torch.arange(16.0)).sum().backward()
    gradient = trained.trained["latent"].moved.grad
    assert gradient is not None
    inside = torch.tensor([1.0] * 7 + [0.0]).repeat(2)
    assert torch.allclose(gradient / trained.trained["latent"].unit, inside * torch.arange(16.0), rtol=1e-5)
    assert trained.changed_share() is not None and 0 < float(trained.changed_share() or 0) < 1


@pytest.mark.parametrize("name", ["fixed", "points"])
def test_what_linears_share_is_not_trained(name: str) -> None:
    packed = samples("grid", (16, 128))
    for weight in packed:
        trained = made(name, formats.decode(weight, torch.float32), weight).trained
        assert "tensor_scale" not in trained
        if weight.params.block_rows == weight.params.block_columns == -1:
            assert "scales" not in trained
    assert any("tensor_scale" in weight.tensors for weight in packed)
