"""Embeddings and output head are packed, loaded, counted and resumed like everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from compress import api
from compress.errors import RecipeError
from compress.model import towers as model_tables
from compress.model.skeleton import Skeleton
from compress.run import prepare, report, sizes, tables, verify
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from helpers.runs import GPTQ, RTN, cli, command, contents, interrupt, job, noted_statistics, report_of, stored_tensors

HEAD = "head={method: gptq, bits: 8, group_size: 32}"
EMBEDDINGS = "embeddings={bits: 8, group_size: 32}"
IDS = torch.arange(60)[None]


def logits(directory: Path, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, **options)(IDS).logits.float()


@pytest.mark.parametrize(
    ("name", "sections", "names"),
    [
        ("llama_tied", (HEAD,), {"model.embed_tokens"}),
        ("llama_tied", (EMBEDDINGS,), {"model.embed_tokens"}),
        ("llama", (HEAD, EMBEDDINGS), {"model.embed_tokens", "lm_head"}),
        ("llama", (HEAD,), {"lm_head"}),
        ("gemma2", (HEAD, EMBEDDINGS), {"model.embed_tokens"}),
        ("opt", (HEAD,), {"model.decoder.embed_tokens"}),
    ],
)
def test_tables_are_packed_and_load(
    name: str, sections: tuple[str, ...], names: set[str], pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """The decoded tables are close to the originals; transformers saves and loads them as they are."""
    source, out, again = pico_dir(name, dtype=torch.bfloat16), tmp_path / "out", tmp_path / "again"
    result = api.quantize(job(source, GPTQ.set(*sections), out))
    assert result["self_check"] == "passed" and names <= {row["name"] for row in result["layers"]}
    assert not {key for key in stored_tensors(out) if key.endswith(("embed_tokens.weight", "lm_head.weight"))} & {
        f"{name}.weight" for name in names
    }
    verify.verify(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    original = AutoModelForCausalLM.from_pretrained(source)
    assert model.dtype == torch.bfloat16
    for packed in names:
        module, weight = model.get_submodule(packed), original.get_submodule(packed).weight.float()
        assert isinstance(module, PackedEmbedding | PackedLinear)
        assert (module.dequantize(torch.float32) - weight).norm() < 0.02 * weight.norm()
    model.save_pretrained(again)
    assert torch.equal(logits(again), logits(out))
    found = report.load(again)
    assert found["whole"] == result["whole"] and found["nbytes"] == result["nbytes"]
    dequantized = model.dequantize()
    tied = dequantized.get_input_embeddings().weight is dequantized.get_output_embeddings().weight
    assert tied == (original.get_input_embeddings().weight is original.get_output_embeddings().weight)


def test_whole_bits_are_all_bytes_over_all_parameters(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """A tied table counts once, and so it does where a rotation has untied it."""
    source = pico_dir("llama_tied", dtype=torch.bfloat16)
    numel = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(source).parameters())
    for number, overrides in enumerate([(HEAD,), (), (HEAD, EMBEDDINGS, "transform=[{method: rotate}]")]):
        out = tmp_path / str(number)
        whole = api.quantize(job(source, GPTQ.set(*overrides), out))["whole"]
        nbytes = sum(tensor.nbytes for tensor in stored_tensors(out).values())
        assert whole["parameters"] == numel and whole["bpw"] == pytest.approx(8 * nbytes / numel)
        assert 0.99 < whole["share"] <= 1 if overrides else whole["share"] < 0.9
    result = cli("inspect", str(tmp_path / "0"))
    assert "bits per packed weight, " in result.out and "of parameters packed)" in result.out


def test_errors_of_a_table_are_those_of_its_rows(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    errors = report.WeightErrors(2.0, 0.5, None, None, lost_rows=0.25)
    chunks = [tables._Chunk(None, errors, norm) for norm in (1.0, 3.0)]  # type: ignore[arg-type]
    assert tables._mean(chunks) == report.WeightErrors(4.0, 0.5, None, None, lost_rows=0.25)
    made = api.quantize(job(pico_dir("llama"), RTN.set(HEAD, EMBEDDINGS), tmp_path / "out"))
    assert all("two_sided_error" not in row for row in made["layers"])


@pytest.mark.parametrize(
    ("section", "equal"), [(HEAD, 0.99), ("head={method: rtn, bits: 6, group_size: 32, symmetric: false}", 1)]
)
def test_rows_in_chunks_are_those_of_the_whole(
    section: str, equal: float, pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pico_dir("llama_tied")
    api.quantize(job(source, GPTQ.set(section), tmp_path / "whole"))
    monkeypatch.setattr(sizes, "chunk_rows", lambda layer: 80)
    api.quantize(job(source, GPTQ.set(section), tmp_path / "chunks"))
    whole, chunks = stored_tensors(tmp_path / "whole"), stored_tensors(tmp_path / "chunks")
    assert whole.keys() == chunks.keys()
    table = [name for name in whole if name.startswith("model.embed_tokens") and whole[name].numel()]
    assert table and all((whole[name] == chunks[name]).double().mean() >= equal for name in table)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        interrupt("compress.run.tables", "_chunk", 1),
        interrupt("compress.run.outside_shards", "_write_rest_shard", 1),
        interrupt("compress.run.verify", "self_check", 1),
    ],
)
def test_a_run_that_is_killed_at_its_tables_goes_on(moment: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    source, setup = pico_dir("llama"), GPTQ.set(HEAD, EMBEDDINGS)
    api.quantize(job(source, setup, tmp_path / "expected"))
    assert cli(*command(source, setup, tmp_path / "out"), prepare=moment).code == -9
    assert cli(*command(source, setup, tmp_path / "out")).code == 0
    assert report_of(tmp_path / "out")["resumed_blocks"] == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_the_hessian_of_a_head_is_that_of_what_it_reads(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the quantized blocks and the final norm, as the written model gives it."""
    seen = noted_statistics(monkeypatch)
    setup = RTN.set("calibration.num_samples=8", "calibration.seq_len=32", "head={method: gptq, bits: 4}")
    result = api.quantize(job(pico_dir("llama"), setup, tmp_path / "out"))
    row = next(row for row in result["layers"] if row["name"] == "lm_head")
    assert row["tokens"] == 256 and row["output_error"] < row["weight_error"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ((tokens, hessian),), inputs = seen, list[torch.Tensor]()
    model.lm_head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(tokens)
    read = inputs[0].flatten(0, 1).double()
    expected = read.T @ read
    assert (hessian.double() - expected).norm() < 1e-3 * expected.norm()


def test_a_tied_table_is_not_stored_in_two_ways(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = pico_dir("llama_tied")
    with pytest.raises(RecipeError, match="is stored once, but the sections embeddings and head of the recipe differ"):
        prepare.prepare(job(source, GPTQ.set(HEAD, "embeddings={bits: 4, group_size: 32}"), tmp_path / "out"))
    with pytest.raises(RecipeError, match="nf as the recipe has it stores no rows that could be looked up"):
        prepare.prepare(job(source, GPTQ.set("head={method: nf, bits: 4}"), tmp_path / "out"))


def test_embeddings_of_their_own_take_no_method_that_needs_inputs(
    pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="gptq works by statistics of inputs, which a look-up has none of"):
        section = "embeddings={method: gptq, bits: 4, group_size: 32}"
        prepare.prepare(job(pico_dir("llama"), GPTQ.set(section), tmp_path / "out"))


def test_an_ignored_table_stays(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = pico_dir("llama_tied")
    prepared = prepare.prepare(job(source, GPTQ.set(HEAD, "ignore=[lm_head]"), tmp_path / "out"))
    assert prepared.plan.tables == () and prepared.plan.kept_reasons["model.embed_tokens"] == "kept by the recipe"


def test_a_head_of_its_own_takes_any_method(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """One whose format has no rows that could be looked up."""
    out = tmp_path / "out"
    result = api.quantize(job(pico_dir("llama"), GPTQ.set("head={method: nf, bits: 4}"), out))
    assert next(row for row in result["layers"] if row["name"] == "lm_head")["format"] == "nf"
    assert torch.isfinite(logits(out)).all()


def test_what_other_modules_share_stays(pico_dir: Callable[..., Path]) -> None:
    skeleton = Skeleton(open_checkpoint(pico_dir("llama_tied")))
    (table,) = model_tables.find_tables(skeleton)
    assert table.roles == ("embeddings", "head") and table.names == ("model.embed_tokens", "lm_head")
    assert table.refused is None and dataclasses.asdict(table.spec)["shape"] == (264, 64)
    skeleton.model.model.layers[0].mlp.up_proj.weight = skeleton.model.get_input_embeddings().weight
    (table,) = model_tables.find_tables(skeleton)
    assert table.refused is not None and table.refused.startswith("shared by model.embed_tokens, ")


def test_other_large_tables_are_found_behind_those_of_tokens(pico_dir: Callable[..., Path]) -> None:
    skeleton = Skeleton(open_checkpoint(pico_dir("llama")))
    for name, rows in (("by_layer", 66), ("positions", 65)):  # of 264 tokens: a quarter, and less
        skeleton.model.model.register_module(name, nn.Embedding(rows, 64, device="meta"))
    skeleton.model.model.register_module("again", nn.Embedding(66, 64, device="meta"))
    skeleton.model.model.again.weight = skeleton.model.model.by_layer.weight
    found_tables = model_tables.find_tables(skeleton)
    assert [table.names[0] for table in found_tables] == ["model.embed_tokens", "lm_head", "model.by_layer"]
    assert [table.is_other for table in found_tables] == [False, False, True]
    assert found_tables[2].names == ("model.by_layer", "model.again")  # once
