"""GGUF files: in every bit the packed weights, read by the package gguf, by our importer and by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.errors import ExportError, OutputError
from compress.export import convert
from compress.export.source import open_source
from compress.export.targets.gguf import architecture, vocabulary
from compress.importers import gguf_header, open_checkpoint
from compress.importers.gguf import values
from compress.importers.gguf_header import FREQUENCIES, Bands
from compress.model.load import load_config, load_model
from compress.run import source
from helpers.engines import FOUR_BITS, packed, token_ids, tokenizer
from helpers.pico import build

gguf = pytest.importorskip("gguf")

MODELS = ("llama", "llama_tied", "qwen2", "qwen3", "phi3")
TABLES = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}


def written(checkpoint: Path) -> Path:
    """Export next to a checkpoint; return the file."""
    out = checkpoint.parent / "model.gguf"
    convert.export(checkpoint, "gguf", out)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_in_every_bit(name: str, tmp_path: Path) -> None:
    """The importer puts rows and names back; it rounds what is in blocks to bfloat16."""
    checkpoint = packed(name, tmp_path)
    expected = load_model(checkpoint, "float32")
    plain = open_source(checkpoint)
    found = open_checkpoint(source.resolve(str(written(checkpoint)))).tensors
    assert {f"{weight.name}.weight" for weight in plain.packed} | plain.plain.keys() == found.keys()
    for weight in plain.packed:
        decoded = weight.dense(torch.float32)
        assert torch.equal(found[f"{weight.name}.weight"].read(), decoded.to(torch.bfloat16)), weight.name
    for key, stored in plain.plain.items():
        assert torch.equal(found[key].read(), stored.read()), key
    assert expected.config.vocab_size == found["model.embed_tokens.weight"].shape[0]


def test_the_package_decodes_what_we_decode(tmp_path: Path) -> None:
    """Rows of queries and keys have the halves of each rotary pair side by side; tables are Q8_0."""
    checkpoint = packed("llama", tmp_path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(written(checkpoint)).tensors}
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"Q4_0", "Q8_0", "F32"}
    weights = {weight.name: weight.dense(torch.float32) for weight in open_source(checkpoint).packed}
    for name, place in (("model.layers.1.mlp.down_proj", "blk.1.ffn_down"), ("lm_head", "output")):
        tensor = tensors[f"{place}.weight"]
        assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), weights[name].numpy())
    key = tensors["blk.0.attn_k.weight"]
    pairs = torch.from_numpy(gguf.dequantize(key.data, key.tensor_type)).view(2, 8, 2, 64)
    assert torch.equal(pairs.transpose(1, 2).reshape(32, 64), weights["model.layers.0.self_attn.k_proj"])


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (("bits=5", "group_size=64"), "Q5_0"),
        (("bits=6", "group_size=-1"), "Q8_0"),
        (("bits=3", "group_size=32"), "Q4_0"),
        (("bits=4", "group_size=32", "symmetric=false"), "Q5_0"),
        (("bits=3", "group_size=32", "symmetric=false"), "Q4_0"),
        (("bits=7", "group_size=32", "symmetric=false"), "Q8_0"),
    ],
)
def test_other_bits_take_the_narrowest_type_that_holds_them(
    settings: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    checkpoint = packed("qwen2", tmp_path, settings)
    entries = gguf_header.read_all(written(checkpoint)).tensors
    weight = next(each for each in open_source(checkpoint).packed if each.name.endswith("0.mlp.up_proj"))
    assert gguf.GGMLQuantizationType(entries["blk.0.ffn_up.weight"].type).name == kind
    assert torch.equal(values(entries["blk.0.ffn_up.weight"]), weight.dense(torch.float32))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_one_tensor(name: str, tmp_path: Path) -> None:
    checkpoint = packed(name, tmp_path)
    entry = gguf_header.read_all(written(checkpoint)).tensors["blk.1.ffn_up_exps.weight"]
    published = {"mixtral": "block_sparse_moe.experts.{}.w3", "qwen3_moe": "mlp.experts.{}.up_proj"}[name]
    weights = {weight.name: weight for weight in open_source(checkpoint).packed}
    stack = [weights[f"model.layers.1.{published.format(index)}"] for index in range(entry.shape[0])]
    assert torch.equal(values(entry), torch.stack([weight.dense(torch.float32) for weight in stack]))


@pytest.mark.parametrize("name", ["gemma", "gemma2"])
def test_norms_are_written_with_their_one(name: str, tmp_path: Path) -> None:
    checkpoint = packed(name, tmp_path)
    header = gguf_header.read_all(written(checkpoint))
    norm = open_source(checkpoint).plain["model.norm.weight"].read()
    assert torch.equal(values(header.tensors["output_norm.weight"]), norm + 1)
    assert "output.weight" not in header.tensors
    if name == "gemma2":
        assert header.metadata["gemma2.attention.sliding_window"] == 32
        assert header.metadata["gemma2.attn_logit_softcapping"] == 50.0


def test_transformers_reads_the_file(tmp_path: Path) -> None:
    checkpoint = packed("llama_tied", tmp_path)
    file = written(checkpoint)
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        expected = load_model(checkpoint, "float32")(token_ids()).logits
        assert torch.allclose(model(token_ids()).logits, expected, rtol=0, atol=1e-5)
    text = "The other thing; it's 12 o'clock."
    read = AutoTokenizer.from_pretrained(file.parent, **options)
    assert read(text)["input_ids"] == tokenizer()(text)["input_ids"]


def test_plain_numbers_keep_their_type_and_tables_that_do_not_fit_are_plain(tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path, (*FOUR_BITS, "head={bits: 8, symmetric: false}"))
    result = convert.export(checkpoint, "gguf", tmp_path / "x.gguf")
    assert any(line.startswith("lm_head is written as plain float32") for line in result.notes)
    entries = gguf_header.read_all(tmp_path / "x.gguf").tensors
    assert gguf.GGMLQuantizationType(entries["output.weight"].type).name == "F32"
    assert result.nbytes == (tmp_path / "x.gguf").stat().st_size


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("bits=8", "symmetric=false"), "asymmetric codes of 8 bits"),
        (("bits=4", "group_size=16"), "groups of 16"),
        (("bits=4", "incoherence=true"), "operations lie around it"),
    ],
)
def test_what_has_no_type_is_refused(settings: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path, settings)
    with pytest.raises(ExportError, match=reason):
        written(checkpoint)
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("opt", {}, "models of type opt are not written"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar"),
        ("gemma2", {"layer_types": ["full_attention"] * 2, "sliding_window": 8}, None),
        ("gemma2", {"layer_types": ["sliding_attention"] * 2}, "alternate"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(name: str, changes: dict[str, Any], reason: str | None) -> None:
    config = build(name, changes).config
    if reason is None:
        assert "gemma2.attention.sliding_window" not in architecture.describe(config).metadata
        return
    with pytest.raises(ExportError, match=reason):
        architecture.describe(config)


def test_positions(tmp_path: Path) -> None:
    """Stretched positions, and windows that llama.cpp does not have."""
    window = architecture.describe(build("mistral").config)
    assert window.metadata["llama.context_length"] == 32 and "sliding window" in window.notes[0]
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
    found = architecture.describe(build("qwen2", {"rope_parameters": yarn}).config).metadata
    assert (found["qwen2.rope.scaling.type"], found["qwen2.rope.scaling.factor"]) == ("yarn", 4.0)
    assert found["qwen2.rope.scaling.original_context_length"] == 64 and found["qwen2.rope.freq_base"] == 1e6
    bands = Bands(8.0)
    stretched = {"rope_type": "llama3", "rope_theta": 5e5, **bands._asdict()}
    checkpoint = packed("llama", tmp_path, changes={"rope_parameters": stretched})
    file = written(checkpoint)
    divisors = values(gguf_header.read_all(file).tensors[FREQUENCIES])
    assert torch.equal(divisors, torch.tensor(bands.divisors(5e5, 8))) and divisors.max() == 8
    assert load_config(source.resolve(str(file))).rope_parameters == stretched


def test_only_our_own_files_are_replaced(tmp_path: Path) -> None:
    """Neither a GGUF file of another tool nor a file that only has the name of one."""
    checkpoint = packed("llama", tmp_path)
    ours, other = written(checkpoint), tmp_path / "other.gguf"
    convert.export(checkpoint, "gguf", ours, overwrite=True)
    writer = gguf.GGUFWriter(other, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    for content in (other.read_bytes(), b"notes"):
        other.write_bytes(content)
        with pytest.raises(OutputError, match="is not a file that compress wrote"):
            convert.export(checkpoint, "gguf", other, overwrite=True)
        assert other.read_bytes() == content


def test_split_files_hold_what_one_file_does(tmp_path: Path) -> None:
    """Their names and keys are llama.cpp's; the first is given to read them, or their directory."""
    checkpoint = packed("llama", tmp_path)
    whole, out = gguf_header.read_all(written(checkpoint)), tmp_path / "split"
    result = convert.export(checkpoint, "gguf", out, wishes=convert.Wishes(split_size=40_000))
    files = sorted(out.glob("*.gguf"))
    assert [file.name for file in files] == [
        f"packed-{n:05d}-of-{len(files):05d}.gguf" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2 and result.nbytes == sum(file.stat().st_size for file in out.iterdir())
    parts = [gguf_header.read(file) for file in files]
    for number, part in enumerate(parts):
        split = {key: value for key, value in part.metadata.items() if key.startswith("split.")}
        assert split == {"split.no": number, "split.count": len(files), "split.tensors.count": len(whole.tensors)}
        assert sum(entry.nbytes for entry in part.tensors.values()) <= 40_000 or len(part.tensors) == 1
    split = gguf_header.read_all(files[0])
    assert split.tensors.keys() == whole.tensors.keys() and whole.metadata.items() <= split.metadata.items()
    for name, entry in whole.tensors.items():
        assert torch.equal(values(split.tensors[name]), values(entry)), name
    assert open_checkpoint(source.resolve(str(files[0]))).tensors.keys()
    convert.export(checkpoint, "gguf", out, overwrite=True, wishes=convert.Wishes(split_size=1 << 30))
    assert [file.name for file in out.glob("*.gguf")] == ["packed.gguf"]
    with pytest.raises(ExportError, match="mlx takes no --split-size"):
        convert.export(checkpoint, "mlx", tmp_path / "mlx", wishes=convert.Wishes(split_size=1))


def test_missing_merges_and_unknown_splits_are_refused(tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path)
    facts = json.loads((checkpoint / "tokenizer.json").read_text())
    for change, reason in (
        ({"model": {**facts["model"], "merges": []}}, "no merges"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits text"),
        ({"normalizer": {"type": "Lowercase"}}, "changes text first"),
    ):
        (checkpoint / "tokenizer.json").write_text(json.dumps({**facts, **change}))
        with pytest.raises(ExportError, match=reason):
            vocabulary.metadata(checkpoint, 264)
    (checkpoint / "tokenizer.json").write_text(json.dumps(facts))
    with pytest.raises(ExportError, match="258 tokens, the table of embeddings 200"):
        vocabulary.metadata(checkpoint, 200)
