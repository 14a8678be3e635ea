"""Encoder-decoders, end to end: what is packed, how near it stays, what each linear is calibrated on, how it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, WhisperForConditionalGeneration

from compress import api, recipe
from compress.calib import pairs
from compress.errors import CompressError
from compress.evaluate import writers
from compress.evaluate.reader import Execution
from compress.importers import open_checkpoint
from compress.model import inputs, load
from compress.model.blockwise import HiddenStates, propagate, record_inputs
from compress.model.hidden_states import QUANTIZED
from compress.model.inputs import Pairs
from compress.model.skeleton import Skeleton
from compress.progress import silent
from compress.run import verify
from compress.run.job import Job
from compress.runtime.linear import PackedModule
from helpers import two_stacks
from helpers.runs import TEXT

SMALL = ("calibration.num_samples=24", "calibration.seq_len=64")
TOKENS = torch.arange(96).view(2, 48) * 7 % 250
LEAST = {"int8": 0.995, "int4": 0.965, "trellis4bit": 0.97}  # cosine of the decoder's states


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give the directory of a tiny model, made once."""
    root, known = tmp_path_factory.mktemp("two stacks"), dict[str, Path]()

    def make(kind: str) -> Path:
        if kind not in known:
            known[kind] = two_stacks.save(kind, root / kind)
        return known[kind]

    two_stacks.tones(root / "tones")
    return make


def calib(model: Path) -> str:
    return str(model.parent / "tones") if model.name == "whisper" else str(TEXT)


def quantize(model: Path, name: str, out: Path, *settings: str, **options: Any) -> dict[str, Any]:
    options = {"calib": calib(model), **options}
    return api.quantize(Job(str(model), recipe.load(name, (*SMALL, *settings)), out, **options))


def states(model: Any) -> Tensor:
    """The decoder's states behind its last block [rows, hidden]."""
    with torch.no_grad():
        out = model(**inputs.arguments(model, TOKENS), output_hidden_states=True)
    return out.decoder_hidden_states[-1].flatten(0, 1)


def repeated(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("t5", "int4"), ("whisper", "int4")),
        *(repeated(kind, "int4") for kind in two_stacks.KINDS if kind not in ("t5", "mt5", "mbart", "whisper")),
        *(repeated(kind, "int8") for kind in ("t5", "bart", "whisper")),
        repeated("bart", "trellis4bit"),
    ],
)
def test_it_is_packed_whole_and_stays_near(kind: str, name: str, made: Any, tmp_path: Path) -> None:
    report = quantize(made(kind), name, tmp_path / "out")
    assert all(name.endswith("embed_positions") for name in report["kept"]), report["kept"]
    base, model = (load.load_model(each, tasks=None) for each in (made(kind), tmp_path / "out"))
    cosine = torch.nn.functional.cosine_similarity(states(base), states(model), dim=-1).mean()
    assert cosine >= LEAST[name], cosine
    plain = {n for n, p in model.named_parameters() if p.dim() == 2 and p.is_floating_point()}
    packed = {f"{n}.{key}" for n, m in model.named_modules() if isinstance(m, PackedModule) for key in m.specs}
    assert all("position" in each or "relative" in each for each in plain - packed), plain - packed
    assert verify.verify(tmp_path / "out")["manifest"] == verify.CHECKED


@pytest.mark.parametrize("kind", ["t5", "mbart", "whisper"])
def test_blocks_one_by_one_give_what_the_model_gives(kind: str, made: Any) -> None:
    """In batches of 2 and 1, behind the encoder's own last states."""
    skeleton, model = Skeleton(open_checkpoint(made(kind))), load.load_model(made(kind), tasks=None)
    decoder = torch.stack([torch.arange(20) * k % 200 for k in (1, 3, 5)])
    read: Tensor = torch.stack([torch.arange(33) * k % 250 for k in (2, 3, 7)])
    if kind == "whisper":
        read = torch.randn(3, 16, 100, generator=torch.Generator().manual_seed(1))
    stream = HiddenStates(3, None)
    calls = record_inputs(skeleton, Pairs(read, decoder), 2, stream, torch.device("cpu"))
    for index in range(len(skeleton.blocks)):
        propagate(skeleton, index, calls, stream, 2, torch.device("cpu"), (QUANTIZED, QUANTIZED))
    with torch.no_grad():
        given = {model.main_input_name: read, "decoder_input_ids": decoder}
        body = model.base_model(**given)
        last = calls.stacks[-1].read(0, 3)
        encoder, block = model.get_encoder(), calls.at(len(skeleton.blocks) - 1, 0, 2)
        norm = next(
            (m for n, m in model.get_decoder().named_children() if n in ("final_layer_norm", "layer_norm")), None
        )
        behind = last if norm is None else norm(last)
    torch.testing.assert_close(behind, body.last_hidden_state if kind != "t5" else _t5_states(model, given))
    kept = [value for value in (*block.args, *block.kwargs.values()) if isinstance(value, Tensor)]
    with torch.no_grad():
        expected = encoder(given[model.main_input_name][:2]).last_hidden_state
    assert any(each.shape == expected.shape and torch.allclose(each, expected, atol=1e-5) for each in kept)


def _t5_states(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**given, output_hidden_states=True).decoder_hidden_states[-1]  # behind the norm


def test_keys_and_values_are_calibrated_on_the_encoder(made: Any) -> None:
    """Those of every block share one input of its own; queries read the decoder."""
    specs, kept = Skeleton(open_checkpoint(made("bart"))).linears()
    keys = {spec.name: spec.input_key for spec in specs}
    for block in (0, 1):
        cross = f"model.decoder.layers.{block}.encoder_attn"
        assert keys[f"{cross}.k_proj"] == keys[f"{cross}.v_proj"] == f"{cross}.k_proj"
        assert keys[f"{cross}.q_proj"] == f"{cross}.q_proj"
    assert [spec.block for spec in specs] == sorted(spec.block for spec in specs) and not kept


@pytest.mark.parametrize(
    ("kind", "opener"), [("flan_t5", AutoModelForSeq2SeqLM), repeated("whisper", WhisperForConditionalGeneration)]
)
def test_it_loads_by_its_own_class_and_writes(kind: str, opener: Any, made: Any, tmp_path: Path) -> None:
    quantize(made(kind), "int8", tmp_path / "out")
    model, base = opener.from_pretrained(tmp_path / "out"), opener.from_pretrained(made(kind))
    read = next(iter(inputs.arguments(model, TOKENS).values()))
    outputs = [pairs.write(each, read, 6) for each in (model, base)]
    assert sum(map(torch.equal, *outputs)) >= 1
    scores = writers.evaluate(
        tmp_path / "out", calib(made(kind)), made(kind), (32, 256), Execution("float32", "cpu"), silent
    )
    assert 0 <= scores.kl_mean < 0.01 and scores.same_top1 > 0.9 and scores.tokens > 8
    same = writers.evaluate(made(kind), calib(made(kind)), made(kind), (32, 256), Execution("float32", "cpu"), silent)
    assert (same.kl_mean, same.same_tokens, same.same_outputs) == (0, 1, 1) and same.word_error in (0, None)


@pytest.mark.slow  # once in ten runs beside other tests a decoder block had other bytes; the cause is not known
def test_a_run_that_was_stopped_gives_the_same_bytes(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.run import loop

    whole = quantize(made("t5"), "int4", tmp_path / "whole", "calibration.target_correction=0.5")
    walk = loop.BlockLoop._walk_block

    def stop(self: Any, index: int, *rest: Any) -> Any:
        if index == 3:  # in the decoder
            raise KeyboardInterrupt
        return walk(self, index, *rest)

    monkeypatch.setattr(loop.BlockLoop, "_walk_block", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(made("t5"), "int4", tmp_path / "out", "calibration.target_correction=0.5")
    monkeypatch.setattr(loop.BlockLoop, "_walk_block", walk)
    again = quantize(made("t5"), "int4", tmp_path / "out", "calibration.target_correction=0.5")
    assert again["resumed_blocks"] == 3
    for file in sorted(each.name for each in (tmp_path / "whole").glob("*.safetensors")):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "out" / file).read_bytes(), file
    assert whole["bpw"] == again["bpw"]


@pytest.mark.parametrize(
    ("kind", "name", "options", "words"),
    [
        ("whisper", "int4", {"calib": str(TEXT)}, "reads sound: give --calib a folder with .wav files"),
        ("t5", "int4", {"calib": None}, "give --calib a file"),
        ("t5", "w4kv4", {}, "not for a model of an encoder and a decoder"),
        ("t5", "quarot4bit", {}, "not for a model of an encoder and a decoder"),
    ],
)
def test_what_does_not_fit_is_one_line(
    kind: str, name: str, options: dict[str, Any], words: str, made: Any, tmp_path: Path
) -> None:
    with pytest.raises(CompressError) as raised:
        quantize(made(kind), name, tmp_path / "out", **options)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_features_are_made_of_the_chosen_pieces_alone(made: Any, tmp_path: Path) -> None:
    model = made("whisper")
    whole = pairs.read_sound(Path(calib(model)), model)
    assert torch.equal(pairs.read_sound(Path(calib(model)), model, [1, 4]), whole[[1, 4]])
    with pytest.raises(CompressError, match="no .wav file of 0.1 seconds or more"):
        pairs.read_sound(two_stacks.tones(tmp_path / "short", 1, 0.05), model)


def test_edits() -> None:
    assert writers.edits("kitten", "sitting") == 3 and writers.edits("", "ab") == 2 and writers.edits("ab", "") == 2
    assert writers.word_error([["a", "b"], ["c"]], [["a"], ["c", "d"]]) == pytest.approx(2 / 3)
    assert writers.word_error([[]], [["a"]]) is None
