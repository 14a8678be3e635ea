"""What MatMulNBits and GatherBlockQuantized are given, read by their definitions; what the target refuses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from compress.errors import ExportError
from compress.export import convert
from compress.export.source import open_source
from compress.export.targets import onnx
from compress.export.targets.onnx import graph, nodes
from compress.export.weights import EMBEDDINGS, HEAD, ExportWeight, IntWeight
from compress.formats import int as int_format
from compress.model import stored_weights
from compress.types import Activations, Stored
from helpers.engines import packed
from helpers.runs import cli, one_line


def random_weight(bits: int, group: int, symmetric: bool, shape: tuple[int, int]) -> tuple[ExportWeight, IntWeight]:
    """Return random integers, codes of all values and scales of both signs among them."""
    generator = torch.Generator().manual_seed(bits)
    length = shape[1] if group == -1 else group
    sizes = shape[0], -(-shape[1] // length)
    codes = torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)
    scales = torch.randn(sizes, generator=generator).half()
    zeros = None if symmetric else torch.randint(0, 1 << bits, sizes, generator=generator).to(torch.uint8)
    params = int_format.params_for(bits, group, symmetric, shape[1])
    weight = ExportWeight("table", shape, Stored("int", params), (EMBEDDINGS, HEAD))
    return weight, IntWeight("linear", codes, bits, length, scales, zeros, None)


def field(row: torch.Tensor, index: int, bits: int) -> int:
    """Return the number of `bits` bits at a place in a row of bytes."""
    return (int(row[index * bits // 8]) >> (index * bits % 8)) & ((1 << bits) - 1)


def multiplied(tensors: dict[str, torch.Tensor], form: nodes.Form, columns: int) -> torch.Tensor:
    """Return the weight as the definition of MatMulNBits has it, one number after the other."""
    rows = []
    for number, row in enumerate(tensors["codes"]):
        weights = []
        for column in range(columns):
            block, place = divmod(column, form.block)
            zero = field(tensors["zeros"][number], block, form.bits) if "zeros" in tensors else 1 << (form.bits - 1)
            weights.append(float(tensors["scales"][number, block]) * (field(row[block], place, form.bits) - zero))
        rows.append(weights)
    return torch.tensor(rows)


CASES = [
    (2, 16, True, (5, 64)),
    (2, -1, False, (3, 80)),
    (3, 32, True, (4, 96)),
    (3, 48, False, (4, 96)),
    (4, 64, False, (6, 192)),
    (4, 32, True, (3, 50)),
    (5, -1, True, (4, 66)),
    (6, 128, False, (2, 200)),
    (7, 32, True, (2, 64)),
    (8, -1, True, (3, 576)),
    (8, 16, False, (3, 48)),
]


@pytest.mark.parametrize(("bits", "group", "symmetric", "shape"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_weight_is_ours(
    bits: int, group: int, symmetric: bool, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, integers = random_weight(bits, group, symmetric, shape)
    assert onnx.refuses(weight) is None
    form = nodes.form_of(weight)
    assert form is not None
    specs = nodes.specs(form, weight, dtype)
    tensors = {name: nodes.tensor(integers, form, name, dtype) for name in specs}
    assert {name: (tuple(made.shape), made.dtype) for name, made in tensors.items()} == specs
    of_column = torch.arange(shape[1]) // integers.group_size
    zeros = integers.full_zeros()[:, of_column].float()
    expected = integers.scales.float()[:, of_column] * (integers.codes.float() - zeros)
    assert torch.equal(multiplied(tensors, form, shape[1]), expected)
    if not symmetric:
        unpacked = [[field(row, block, form.bits) for block in range(form.blocks)] for row in tensors["zeros"]]
        assert tensors["row_zeros"][:, :, 0].tolist() == unpacked


def test_blocks_are_those_of_the_fewest_bytes() -> None:
    for bits, columns, block in ((8, 576, 64), (4, 4096, 256), (4, 192, 64), (8, 16, 16)):
        form = nodes.form_of(random_weight(bits, -1, True, (2, columns))[0])
        assert form is not None
        assert form.block == block, (bits, columns)


def weight_of(format: str = "int", group: int = 32, **others: Any) -> ExportWeight:
    return ExportWeight("linear", (32, 96), Stored(format, int_format.params_for(4, group, True, 96), **others))


def test_refused_with_what_to_choose() -> None:
    assert "choose a method that writes plain integers" in (onnx.refuses(weight_of("trellis")) or "")
    assert "set group_size to a multiple of 16" in (onnx.refuses(weight_of(group=24)) or "")
    assert onnx.refuses(weight_of(activations=Activations(bits=8, scale="token", clip=1.0, dtype="int"))) is None


def test_packages_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(packed("llama", tmp_path))
    monkeypatch.setattr(onnx, "PACKAGES", ("no_such_package",))
    with pytest.raises(ExportError, match=r"pip install 'compress-llm\[onnx\]'"):
        convert.prepare(source, "onnx")
    monkeypatch.setattr(onnx, "PACKAGES", ())
    with pytest.raises(ExportError, match="set --dtype"):
        convert.prepare(source, "onnx", torch.bfloat16)
    prepared = convert.prepare(source, "onnx")
    assert (prepared.dtype, prepared.tables) == (torch.float32, ())


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("symmetric", ["true", "false"])
def test_bytes_are_those_of_the_tensors_that_nodes_read(
    name: str, symmetric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products read zero points in one form, lookups in another, a tied table in both."""
    monkeypatch.setattr(onnx, "PACKAGES", ())
    settings = ("bits=4", "group_size=16", f"symmetric={symmetric}")
    prepared = convert.prepare(open_source(packed(name, tmp_path, settings)), "onnx")
    model, makers = nodes.stand_ins(prepared)
    made = {name: makers[name]() for name, _ in model.named_parameters()}
    codes = [tensor.nbytes for name, tensor in made.items() if name.endswith((".codes", ".scales", ".zeros"))]
    assert sum(codes) == sum(onnx.nbytes(prepared, weight) for weight in prepared.held)


def test_the_names_of_a_model_are_matched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "PACKAGES", ())
    prepared = convert.prepare(open_source(packed("llama", tmp_path)), "onnx")
    mapping = Mock(wraps=stored_weights.get_model_conversion_mapping)
    monkeypatch.setattr(stored_weights, "get_model_conversion_mapping", mapping)
    nodes.stand_ins(prepared)
    assert mapping.call_count == 2  # to open the model, and to find the tensors that are converted


@pytest.mark.parametrize("name", ["torch.onnx.exporter", "onnx_ir.passes.common"])
def test_what_the_tracer_warns_of_is_not_shown(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with graph._quiet():
        logging.getLogger(name).warning("of the tracer")
    assert caplog.text == ""
    logging.getLogger(name).warning("of others")
    assert "of others" in caplog.text


def test_inputs_are_rounded_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "PACKAGES", ())
    source = open_source(packed("llama", tmp_path))
    for is_asked, level in ((True, 4), (False, None)):
        model, _ = nodes.stand_ins(convert.prepare(source, "onnx", wishes=convert.Wishes(is_asked)))
        products = [module for module in model.modules() if isinstance(module, nodes.MatMulNBits)]
        assert [product.attributes.get("accuracy_level") for product in products] == [level] * 15


def test_other_targets_refuse_to_round_inputs(tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path)
    source = open_source(checkpoint)
    for name in set(convert.target_names()) - {"onnx"}:
        with pytest.raises(ExportError, match=f"{name} takes no --int8-inputs; leave it out"):
            convert.prepare(source, name, wishes=convert.Wishes(True))
    done = cli("export", str(checkpoint), "--to", "gptq", "--out", str(tmp_path / "out"), "--int8-inputs")
    assert "gptq takes no --int8-inputs" in one_line(done)
    assert not (tmp_path / "out").exists()
