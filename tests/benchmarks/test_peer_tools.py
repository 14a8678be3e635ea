"""Readers of what other tools store, and the walk through blocks, against their definitions; no tool is needed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import peers  # noqa: E402
from peer_tools import blocks, common, gptq_layout, hqq, llama_cpp, llm_compressor  # noqa: E402

BOOKS = Path(__file__).parents[1] / "models" / "books-8m"


def random(*shape: int, top: int = 0, seed: int = 0) -> Tensor:
    """Gaussian float32 values, or integers below `top`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, top, shape, generator=generator) if top else torch.randn(shape, generator=generator)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] -> int32 words along the rows, first code in the lowest bits."""
    stream = ((codes[..., None] >> torch.arange(bits)) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (stream << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def test_tools_are_the_files_that_name_a_distribution() -> None:
    tools = peers.load_tools()
    assert {"llm-compressor", "gptqmodel", "auto-round", "hqq", "llama-cpp", "turbopress", "exl3"} <= tools.keys()
    assert not {"common", "blocks", "gptq-layout"} & tools.keys()
    for tool in tools.values():
        assert callable(tool.quantize)
        assert callable(tool.restore)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_packed_words_are_a_stream_of_bits(bits: int) -> None:
    codes = random(3, 40, top=2**bits)
    assert torch.equal(common.unpack_words(pack_words(codes, bits), bits, 40), codes)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_compressed_tensors(bits: int) -> None:
    codes, zeros, scales = random(8, 64, top=2**bits), random(8, 2, top=2**bits, seed=1), random(8, 2, seed=2)
    parts = {
        "weight_packed": pack_words(codes, bits),
        "weight_zero_point": pack_words(zeros.T, bits).T,
        "weight_scale": scales,
        "weight_shape": torch.tensor([8, 64]),
    }
    config = {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}
    expected = (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    assert torch.equal(llm_compressor.decode(parts, config), expected)


def test_data_types_of_llm_compressor() -> None:
    """Two rows of e2m1 with powers of two, of e4m3 with a global divisor, and float8 with a scale for 2 x 2 weights."""
    octets = torch.tensor([[0x21, 0xF7], [0x90, 0x0A]], dtype=torch.uint8)
    values = torch.tensor([[0.5, 1.0, 6.0, -6.0], [0.0, -0.5, -1.0, 0.0]])
    config = {"config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4}}}}
    exponents = torch.tensor([[127, 128], [126, 130]], dtype=torch.uint8)
    powers = torch.tensor([[1.0, 2.0], [0.5, 8.0]]).repeat_interleave(2, 1)
    assert torch.equal(
        llm_compressor.decode({"weight_packed": octets, "weight_scale": exponents}, config), values * powers
    )
    scales = torch.tensor([[1.5, 2.0], [0.5, 448.0]])
    parts = {
        "weight_packed": octets,
        "weight_scale": scales.to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([4.0]),
    }
    assert torch.equal(llm_compressor.decode(parts, config), values * (scales / 4).repeat_interleave(2, 1))
    blocks = {"type": "float", "num_bits": 8, "block_structure": [2, 2]}
    parts = {"weight": values.to(torch.float8_e4m3fn), "weight_scale": torch.tensor([[0.25, 3.0]])}
    wanted = values * torch.tensor([[0.25, 0.25, 3.0, 3.0]])
    assert torch.equal(llm_compressor.decode(parts, {"config_groups": {"group_0": {"weights": blocks}}}), wanted)


def test_gptq_layout_of_both_versions() -> None:
    codes, zeros, scales = random(8, 64, top=16), random(8, 2, top=15, seed=1), random(8, 2, seed=2)
    expected = (codes - 1 - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    parts = {"qweight": pack_words(codes, 4).T, "qzeros": pack_words(zeros.T, 4), "scales": scales.T}
    config = {"bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
    assert torch.equal(gptq_layout.decode(parts, config), expected)
    parts["qzeros"] = pack_words(zeros.T + 1, 4)
    assert torch.equal(gptq_layout.decode(parts, config | {"checkpoint_format": "gptq_v2"}), expected)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_hqq(bits: int) -> None:
    rows, columns, size = 6, 64, 16
    codes = random(rows * columns // size, size, top=2**bits)
    scale, zero = random(len(codes), 1, seed=1), random(len(codes), 1, seed=2)
    count = hqq.CODES_OF_A_WORD[bits]
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % count)).view(count, -1, size)
    words = sum(part << (bits * (count - 1 - i)) for i, part in enumerate(padded.unbind()))
    parts = {"W_q": words.to(torch.int32 if bits == 3 else torch.uint8), "scale": scale, "zero": zero}
    assert torch.equal(hqq.decode(parts, (rows, columns), bits), ((codes - zero) * scale).view(rows, columns))


def test_types_of_llama_cpp_are_those_of_its_package() -> None:
    gguf = pytest.importorskip("gguf")
    for name, number in llama_cpp.TYPES.items():
        assert gguf.LlamaFileType[f"MOSTLY_{name}"] == number


def test_a_gguf_file_is_read_back_as_the_model_it_was_made_of(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    names = llama_cpp._write_base(BOOKS, tmp_path / llama_cpp.FILE)
    source, restored = common.read_checkpoint(BOOKS), llama_cpp.restore(tmp_path, BOOKS)
    assert restored.keys() == source.keys() == names.keys()
    for name, tensor in source.items():
        expected = tensor.to(torch.bfloat16).float() if tensor.ndim == 2 else tensor.float()
        assert torch.equal(restored[name], expected), name
    stored = llama_cpp.stored_bytes(tmp_path, BOOKS)
    assert stored["model.embed_tokens.weight"] == 2 * source["model.embed_tokens.weight"].numel()


def test_bits_are_those_of_everything_below_a_linears_name(tmp_path: Path) -> None:
    shapes = common.source_linears(BOOKS)
    counts = {name: rows * columns // 4 for name, (rows, columns) in shapes.items()}
    stored = {f"{name}.parts.words": torch.zeros(count, dtype=torch.uint8) for name, count in counts.items()}
    kept = next(iter(shapes))
    del stored[f"{kept}.parts.words"]
    stored[f"{kept}.weight"] = torch.zeros(shapes[kept], dtype=torch.float16)  # not quantized: does not count
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / peers.SAID).write_text('{"tool": "hqq"}')
    sizes = peers.sizes(tmp_path, BOOKS)
    numbers = sum(torch.Size(shape).numel() for shape in common.read_shapes(BOOKS).values())
    assert sizes["bpw"] == 2
    assert sizes["whole_bpw"] == 8 * sum(each.nbytes for each in stored.values()) / numbers


def tiny_model() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def linear_inputs(model: torch.nn.Module, block: torch.nn.Module, windows: Tensor) -> dict[str, Tensor]:
    """What each linear of a block reads in a whole pass, float64 [tokens, in]."""
    inputs: dict[str, Tensor] = {}

    def hook(name: str, given: tuple[Tensor, ...]) -> None:
        inputs[name] = given[0].double().flatten(0, 1)

    named = [(name, module) for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(lambda _, given, name=name: hook(name, given)) for name, module in named]
    with torch.no_grad():
        model(input_ids=windows, use_cache=False)
    for each in hooks:
        each.remove()
    return inputs


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_the_walk_sees_what_each_block_reads_behind_replaced_ones(batch: int) -> None:
    windows = random(4, 12, top=64)
    model, reference = tiny_model(), tiny_model()
    seen: dict[str, Tensor] = {}
    shared: dict[str, str] = {}

    def replace(_: str, hessians: blocks.Hessians) -> dict[str, Tensor]:
        seen.update({name: hessians.moments[first].clone() for name, first in hessians.first_reader.items()})
        shared.update(hessians.first_reader)
        return {name: 0.9 * model.get_submodule(name).weight.data for name in hessians.first_reader}

    blocks.walk(model, windows, batch, replace)
    for name, module in reference.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert torch.equal(model.model.layers.get_submodule(name).weight.data, 0.9 * module.weight.data)
    for number, block in enumerate(reference.model.layers):
        for name, rows in linear_inputs(reference, block, windows).items():
            moment = (rows.T @ rows / len(rows)).float()
            assert torch.allclose(seen[f"model.layers.{number}.{name}"], moment, rtol=1e-4, atol=1e-5), name
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data *= 0.9
    assert shared["model.layers.1.self_attn.v_proj"] == "model.layers.1.self_attn.q_proj"
    assert shared["model.layers.1.mlp.up_proj"] == "model.layers.1.mlp.gate_proj"
    assert shared["model.layers.1.self_attn.o_proj"] == "model.layers.1.self_attn.o_proj"


@pytest.mark.slow
def test_exl3_is_stored_and_read_back(tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "packed"
    tiny_model().save_pretrained(source)
    save_file({"tokens": random(4, 12, top=64)}, tmp_path / "tokens")
    args = argparse.Namespace(
        tool="exl3",
        model=source,
        out=out,
        tokens=tmp_path / "tokens",
        bits=2,
        code="mul1",
        hadamard=16,
        two_sided=None,
        batch_size=2,
    )
    said = peers.quantize(args)
    linears = common.source_linears(source).values()
    stored = sum(rows * columns * 2 // 8 + 2 * (rows + columns) + 4 for rows, columns in linears)
    assert said["bpw"] == 8 * stored / sum(rows * columns for rows, columns in linears)
    peers.decode(out, source, tmp_path / "plain")
    plain, original = common.read_checkpoint(tmp_path / "plain"), common.read_checkpoint(source)
    assert plain.keys() == original.keys()
    for name, tensor in original.items():
        if tensor.ndim == 1 or "layers" not in name:
            assert torch.equal(plain[name], tensor), name
        else:
            assert 0.01 < ((plain[name] - tensor).square().sum() / tensor.square().sum()) < 0.3, name
