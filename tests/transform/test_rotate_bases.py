"""Rotation: its bases and operations against dense matrices, and the weights and statistics against the bases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rotate import ROTATE, distance, transformed
from torch import Tensor

from compress import api
from compress.errors import CheckpointError
from compress.formats import transforms
from compress.numerics import hadamard
from compress.quant import gptq
from compress.transform.bases import Basis, Orthogonal
from compress.types import Stats, WeightTransforms
from helpers.problems import random
from helpers.runs import GPTQ, Setup, job, stored_tensors


@pytest.fixture(scope="module")
def rotated(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformed llama."""
    out = tmp_path_factory.mktemp("rotated") / "out"
    transformed(pico_dir("llama"), out)
    return out


def hadamard_matrix(size: int) -> Tensor:
    """H [size, size] float64, from the images of the unit vectors."""
    return hadamard.transform(torch.eye(size, dtype=torch.float64)).T.contiguous()


# ---------------------------------------------------------------- what the weights become


def recovered(before: Tensor, after: Tensor) -> Tensor:
    """Q with after = before Q^T, by least squares."""
    return torch.linalg.lstsq(before, after).solution.T


@pytest.fixture(scope="module")
def bases(pico_dir: Callable[..., Path], rotated: Path) -> tuple[Tensor, Tensor]:
    """Q of the stream, and R of the values of block 0, of the rotated llama; found from its embeddings and v."""
    before, after = (doubles(path) for path in (pico_dir("llama"), rotated))
    q = recovered(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    v = "model.layers.0.self_attn.v_proj.weight"
    plain = before[v] * before["model.layers.0.input_layernorm.weight"] @ q.T
    return q, recovered(plain[:16].T, after[v][:16].T)


def doubles(directory: Path) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in stored_tensors(directory).items()}


def test_every_matrix_against_the_bases(
    bases: tuple[Tensor, Tensor], pico_dir: Callable[..., Path], rotated: Path
) -> None:
    """Readers W diag(norm) Q^T, writers Q W; heads of v by R, columns of o by its inverse."""
    before, after = doubles(pico_dir("llama")), doubles(rotated)
    q, r = bases
    for basis in (q, r):
        assert torch.allclose(basis @ basis.T, torch.eye(len(basis), dtype=torch.float64), atol=1e-5)
        assert basis.abs().max() < 0.7  # no channel stays alone
    block = "model.layers.0."
    attention, mlp = (before[f"{block}{n}_layernorm.weight"] for n in ("input", "post_attention"))
    two, four = (torch.block_diag(*[r] * n) for n in (2, 4))
    expected = {
        "self_attn.q_proj": before[f"{block}self_attn.q_proj.weight"] * attention @ q.T,
        "self_attn.v_proj": two @ (before[f"{block}self_attn.v_proj.weight"] * attention) @ q.T,
        "self_attn.o_proj": q @ before[f"{block}self_attn.o_proj.weight"] @ four.T,
        "mlp.up_proj": before[f"{block}mlp.up_proj.weight"] * mlp @ q.T,
        "mlp.down_proj": q @ before[f"{block}mlp.down_proj.weight"],
    }
    for name, matrix in expected.items():
        assert torch.allclose(after[f"{block}{name}.weight"], matrix, atol=2e-6), name
    head = before["lm_head.weight"] * before["model.norm.weight"] @ q.T
    assert torch.allclose(after["lm_head.weight"], head, atol=2e-6)


def test_each_block_turns_its_values_its_own_way(
    bases: tuple[Tensor, Tensor], pico_dir: Callable[..., Path], rotated: Path
) -> None:
    before, after = doubles(pico_dir("llama")), doubles(rotated)
    q, r = bases
    v = "model.layers.1.self_attn.v_proj.weight"
    plain = before[v] * before["model.layers.1.input_layernorm.weight"] @ q.T
    other = recovered(plain[:16].T, after[v][:16].T)
    assert torch.allclose(other @ other.T, torch.eye(16, dtype=torch.float64), atol=1e-5)
    assert (other - r).abs().max() > 0.1


def test_half_precision_is_rounded_once(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = pico_dir("llama", dtype=torch.bfloat16)
    transformed(source, tmp_path / "out")
    after, exact = stored_tensors(tmp_path / "out"), stored_tensors(source)
    basis = recovered(exact["model.embed_tokens.weight"].double(), after["model.embed_tokens.weight"].double())
    assert (basis @ basis.T - torch.eye(64)).abs().max() < 0.01
    for tensor in after.values():
        assert tensor.dtype == torch.bfloat16
    assert 0 < distance(source, tmp_path / "out") < 0.05


# ---------------------------------------------------------------- bases


@pytest.mark.parametrize("keep_mean", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7, 12, 50, 64, 172])
def test_a_basis_is_an_orthogonal_matrix(size: int, keep_mean: bool) -> None:
    one = torch.eye(size, dtype=torch.float64)
    for seed in range(4):
        basis = Basis(size, seed, keep_mean)
        matrix = basis.forward(one).T  # columns are the images of the unit vectors
        assert torch.allclose(matrix @ matrix.T, one, atol=1e-12)
        x = random(3, size, seed=7).double()
        assert torch.allclose(basis.forward(x), x @ matrix.T, atol=1e-12)
        assert torch.allclose(basis.transpose(x), x @ matrix, atol=1e-12)
        assert torch.equal(basis.dense(size), matrix)
        assert torch.allclose(basis.forward(x.float()).double(), x @ matrix.T, atol=1e-5)
        assert basis.forward(x.float()).dtype == torch.float32
        ones = torch.ones(size, dtype=torch.float64)
        kept = (basis.forward(ones) - ones).abs().max() < 1e-12
        assert kept or not keep_mean
        assert keep_mean or not kept or size < 7
        assert torch.equal(matrix, Basis(size, seed, keep_mean).forward(one).T)
        if size >= 50:
            assert matrix.abs().max() < (0.7 if keep_mean else 3 / size**0.5)
            assert not torch.allclose(matrix, Basis(size, seed + 9, keep_mean).forward(one).T, atol=0.1)


def test_a_basis_is_a_hadamard_matrix_of_signed_channels() -> None:
    basis = Basis(64, 3)
    dense = hadamard_matrix(64) * basis.signs
    assert torch.allclose(basis.forward(torch.eye(64, dtype=torch.float64)).T, dense, atol=1e-12)
    assert set(basis.signs.tolist()) == {-1.0, 1.0}


# ---------------------------------------------------------------- head mixing


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 16), (5, 10), (12, 4), (1, 8), (7, 3)])
def test_mixing_heads_is_a_kronecker_product(heads: int, head_dim: int) -> None:
    op = transforms.find(f"head_mix/{head_dim}")
    assert op is not None
    size = heads * head_dim
    assert op.spec(size) is None
    small = hadamard_matrix(heads)
    dense = torch.kron(small, torch.eye(head_dim, dtype=torch.float64))
    x = random(2, 3, size).double()
    assert torch.allclose(op.forward(x, None), x @ dense.T, atol=1e-12)
    assert torch.allclose(op.transpose(x, None), x @ dense, atol=1e-12)
    assert torch.allclose(op.transpose(op.forward(x, None), None), x, atol=1e-12)
    half = op.forward(x.bfloat16(), None)
    assert half.dtype == torch.bfloat16 and torch.allclose(half.double(), x @ dense.T, atol=0.1)
    around = WeightTransforms(input=(f"head_mix/{head_dim}",))
    weight = random(6, size)
    assert torch.allclose(transforms.effective(weight, around, {}).double(), weight.double() @ dense, atol=1e-5)
    assert torch.allclose(transforms.rotate(weight, around, {}).double(), weight.double() @ dense.T, atol=1e-5)
    assert transforms.describe(around) == f"head_mix/{head_dim}" and transforms.specs(around, (6, size)) == {}


@pytest.mark.parametrize(("blocks", "size"), [(3, 32), (1, 12), (4, 5)])
def test_blocks_are_mixed_apart(blocks: int, size: int) -> None:
    op = transforms.find(f"block_hadamard/{size}")
    assert op is not None and op.spec(blocks * size) is None
    dense = torch.kron(torch.eye(blocks, dtype=torch.float64), hadamard_matrix(size))
    x = random(2, 3, blocks * size).double()
    assert torch.allclose(op.forward(x, None), x @ dense.T, atol=1e-12)
    assert torch.allclose(op.transpose(x, None), x @ dense, atol=1e-12)
    around = WeightTransforms(input=(f"block_hadamard/{size}",))
    weight = random(6, blocks * size)
    assert torch.allclose(transforms.effective(weight, around, {}).double(), weight.double() @ dense, atol=1e-5)
    assert torch.allclose(transforms.rotate(weight, around, {}).double(), weight.double() @ dense.T, atol=1e-5)
    with pytest.raises(ValueError, match=f"{blocks * size + 1} channels are no blocks of {size}"):
        transforms.specs(around, (6, blocks * size + 1))


@pytest.mark.parametrize(
    "name", ["block_hadamard/0", "head_mix", "head_mix/", "head_mix/0", "head_mix/-1", "head_mix/2.5", "head_mix/x"]
)
def test_no_such_operation(name: str) -> None:
    assert transforms.find(name) is None
    with pytest.raises(CheckpointError, match="is unknown to this version"):
        transforms.from_dict({"input": [name]}, "x")


def test_channels_that_are_no_heads() -> None:
    with pytest.raises(ValueError, match="^head_mix/7: 64 channels are no heads of 7$"):
        transforms.specs(WeightTransforms(input=("head_mix/7",)), (8, 64))
    with pytest.raises(ValueError, match="no Hadamard transform of size 2049"):
        transforms.specs(WeightTransforms(input=("head_mix/2",)), (8, 2 * 2049))


# ---------------------------------------------------------------- statistics in the new basis


def test_hessians_are_those_of_the_rotated_inputs(
    bases: tuple[Tensor, Tensor], pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of block 0, whose inputs are exact: Q D H D Q^T behind a norm with weight 1 / D, and the operations left over."""
    seen: list[Tensor] = []
    real = gptq.prepare

    def prepare(weight: Tensor, stats: Stats | None, config: gptq.Config) -> Any:
        assert stats is not None
        seen.append(stats.hessian.double())
        return real(weight, stats, config)

    def collected(setup: Setup, out: Path) -> dict[str, Tensor]:
        """Linear of block 0 -> what its method is given."""
        seen.clear()
        rows = api.quantize(job(pico_dir("llama"), setup, out))["layers"][:7]
        order = [row["name"].rsplit(".", 1)[1] for row in rows]
        assert order == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        return dict(zip(order, seen[:7], strict=True))

    monkeypatch.setattr(gptq, "prepare", prepare)
    before = collected(GPTQ, tmp_path / "plain")
    after = collected(GPTQ.set(ROTATE), tmp_path / "rotated")
    q, r = bases
    norms = stored_tensors(pico_dir("llama"))
    mixed = torch.kron(hadamard_matrix(4), torch.eye(16, dtype=torch.float64)) @ torch.block_diag(*[r] * 4)
    change = {
        "q_proj": q / norms["model.layers.0.input_layernorm.weight"].double(),
        "up_proj": q / norms["model.layers.0.post_attention_layernorm.weight"].double(),
        "o_proj": mixed,
        "down_proj": hadamard_matrix(192),
    }
    for name, t in change.items():
        expected = t @ before[name] @ t.T
        assert (after[name] - expected).norm() < 1e-5 * expected.norm(), name
        assert (after[name] - before[name]).norm() > 0.1 * expected.norm(), name


@pytest.mark.parametrize("keep_mean", [False, True])
def test_bases_and_their_inverses(keep_mean: bool) -> None:
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    basis = Basis(24, 7, keep_mean)
    assert torch.allclose(basis.transpose(basis.forward(x)), x, atol=1e-12)
    same = Orthogonal(basis.dense(24))
    assert torch.allclose(same.forward(x), basis.forward(x), atol=1e-12)
    assert torch.allclose(same.transpose(x), basis.transpose(x), atol=1e-12)
    assert torch.equal(Orthogonal().forward(x), x) and torch.equal(Orthogonal().transpose(x), x)
