"""A tied table stays one where the model is rotated: stored as it was, turned at run time on either side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api, formats
from compress.run import prepare, report, verify
from compress.runtime.linear import PackedLinear
from compress.transform.bases import Basis
from compress.types import NO_TRANSFORMS, PackedWeight
from helpers.pico import ODD, of_type, save, save_pico
from helpers.runs import GPTQ, RTN, Setup, cli, command, contents, interrupt, job, noted_statistics, stored_tensors

ROTATE = "transform=[{method: rotate}]"
PACKED = ("head={bits: 8}", "embeddings={bits: 8}")
EIGHT = RTN.set(*PACKED)
TIED = {"tie_word_embeddings": True}
IDS = torch.arange(60)[None]
OPS = ["hadamard_transposed", "signs", "channel_scale"]


def loaded(directory: Path, **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, **options)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.double()


def apart(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def rotated(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied llama in 8 bits, rotated."""
    out = tmp_path_factory.mktemp("rotated") / "out"
    result = api.quantize(job(pico_dir("llama_tied"), EIGHT.set(ROTATE), out))
    assert result["self_check"] == "passed" and "transform" not in result["notes"]
    return out


def table_of(model: PreTrainedModel) -> Tensor:
    """The stored table, float64, without what is around it."""
    weight = model.get_output_embeddings().packed()
    bare = dataclasses.replace(weight.stored, ops=NO_TRANSFORMS)
    names = formats.specs(bare, weight.shape)
    return formats.decode(PackedWeight(bare, {n: weight.tensors[n] for n in names}, weight.shape), torch.float64)


def stream_basis(size: int, drawn: Any) -> Tensor:
    """Q of the stream, float64, as the transform draws it for seed 0."""
    return Basis(size, drawn.derived_seed(0, "rotation", "residual")).dense(size)


# ---------------------------------------------------------------- what is stored, and what it computes


def test_one_table_is_stored_in_the_original_basis(rotated: Path, pico_dir: Callable[..., Path]) -> None:
    source, tensors, model = stored_tensors(pico_dir("llama_tied")), stored_tensors(rotated), loaded(rotated)
    config = json.loads((rotated / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    entry = config["quantization_config"]["modules"]["model.embed_tokens"]
    assert entry["ops"] == {"input": OPS, "output": []} and "lm_head" not in config["quantization_config"]["modules"]
    assert not [name for name in tensors if name.startswith("lm_head")]
    assert torch.equal(tensors["model.embed_tokens.in_channel_scale"], source["model.norm.weight"])
    assert (tensors["model.norm.weight"] == 1).all()
    assert apart(table_of(model), source["model.embed_tokens.weight"].double()) < 0.01
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    assert all(getattr(head, key) is getattr(embeddings, key) for key in head.specs)


def test_it_computes_what_a_slow_reference_does(rotated: Path, pico_dir: Callable[..., Path]) -> None:
    """In float64, by matrices: rows Q e of the decoded table, logits E diag(g) Q^T x, blocks decoded."""
    from compress.quant import incoherence

    model, source = loaded(rotated), stored_tensors(pico_dir("llama_tied"))
    q, table = stream_basis(64, incoherence), table_of(model)
    plain = loaded(pico_dir("llama_tied")).double()
    plain.config.tie_word_embeddings = False
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear) and name != "lm_head":
            plain.get_submodule(name).weight.data = module.dequantize(torch.float32).double()
        elif name.endswith("norm"):
            plain.get_submodule(name).weight.data = module.weight.data.double()
    plain.get_input_embeddings().weight = torch.nn.Parameter(table @ q.T)
    plain.lm_head.weight = torch.nn.Parameter(table * source["model.norm.weight"].double() @ q.T)
    assert apart(logits(model), logits(plain)) < 1e-5
    assert apart(model.get_input_embeddings()(IDS)[0].double(), table[IDS[0]] @ q.T) < 1e-6


def test_it_is_the_original_up_to_eight_bits(rotated: Path, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """No further from it than without a rotation; by other random rotations too."""
    original = logits(loaded(pico_dir("llama_tied")))
    api.quantize(job(pico_dir("llama_tied"), EIGHT, tmp_path / "plain"))
    limit = 1.5 * apart(logits(loaded(tmp_path / "plain")), original)
    assert apart(logits(loaded(rotated)), original) < limit < 0.06
    chosen = EIGHT.set("transform=[{method: rotate, seeds: 2, search_samples: 2}]", "calibration.seq_len=32")
    found = api.quantize(job(pico_dir("llama_tied"), chosen, tmp_path / "seeds"))
    assert found["notes"]["transform"][0].startswith("rotation ")
    assert apart(logits(loaded(tmp_path / "seeds")), original) < limit


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms that multiply by 1 + w, rows times a number": ("gemma", {}),
    "layer norms, positions": ("opt", {}),
    "a head with a bias": ("phi", {**TIED, "intermediate_size": 128}),
    "sizes with tables of their own": ("llama", {**ODD, **TIED}),
    "36 times 16": ("llama", {**TIED, "hidden_size": 576, "intermediate_size": 96, "num_hidden_layers": 1}),
    "norms without weights": ("olmo", {**TIED, "intermediate_size": 96}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_other_models(case: str, tmp_path: Path) -> None:
    """Each as close to its original as without a rotation; loaded, saved and decoded it is the same."""
    kind, changes = MODELS[case]
    source = save(of_type(kind, {"pad_token_id": 1, **(sizes_of(kind)), **changes}), tmp_path / "model")
    for name, setup in (("plain", EIGHT), ("out", EIGHT.set(ROTATE))):
        result = api.quantize(job(source, setup, tmp_path / name))
        assert result["nbytes"]["total"] == sum(t.nbytes for t in stored_tensors(tmp_path / name).values())
    original, plain, model = (loaded(tmp_path / name) for name in ("model", "plain", "out"))
    head, expected = model.get_output_embeddings(), logits(model)
    assert head.ops.input[-1] == ("signs" if kind == "olmo" else "channel_scale")
    assert ("reflection" in head.ops.input) == (kind in ("opt", "phi", "olmo"))
    assert apart(expected, logits(original)) < 1.5 * apart(logits(plain), logits(original)) < 0.06
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again")), expected)
    decoded = model.dequantize()
    assert decoded.get_input_embeddings().weight is not decoded.get_output_embeddings().weight
    decoded.save_pretrained(tmp_path / "decoded")
    assert apart(logits(loaded(tmp_path / "decoded")), expected) < 1e-5


def sizes_of(kind: str) -> dict[str, Any]:
    """Configuration of the models that have a name in pico.py."""
    gqa = {"num_key_value_heads": 2, "head_dim": 16}
    return {
        "gemma": {**gqa, **TIED, "intermediate_size": 144},
        "opt": {**TIED, "ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
        "llama": {**gqa, "intermediate_size": 192},
    }.get(kind, {})


def test_a_model_in_sixteen_bits(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = pico_dir("llama_tied", dtype=torch.bfloat16)
    api.quantize(job(source, EIGHT.set(ROTATE), tmp_path / "out"))
    model = loaded(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and model.get_input_embeddings()(IDS).dtype == torch.bfloat16
    assert model.get_output_embeddings().in_channel_scale.dtype == torch.float32
    assert apart(logits(model), logits(loaded(source, dtype=torch.float32))) < 0.06


# ---------------------------------------------------------------- the run around it


def test_bytes_and_bits_are_known_before(rotated: Path, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    prepared = prepare.prepare(job(pico_dir("llama_tied"), EIGHT.set(ROTATE), tmp_path / "out"))
    nbytes = sum(tensor.nbytes for tensor in stored_tensors(rotated).values())
    numel = sum(p.numel() for p in loaded(pico_dir("llama_tied")).parameters())
    plan = prepared.plan
    assert prepared.messages == () and plan.nbytes == nbytes and plan.numel == plan.written_numel == numel
    assert plan.whole_bpw == pytest.approx(8 * nbytes / numel)
    plain = prepare.prepare(job(pico_dir("llama_tied"), EIGHT, tmp_path / "out")).plan
    assert plan.tables[0].nbytes - plain.tables[0].nbytes == 64 // 8 + 4 * 64
    verify.verify(rotated)
    found = report.load(rotated)
    loaded(rotated).save_pretrained(tmp_path / "again")
    again = report.load(tmp_path / "again")
    assert again["whole"] == found["whole"] and again["nbytes"] == found["nbytes"]
    assert "hadamard_transposed channel_scale" in cli("inspect", str(rotated)).out.replace("\n", " ")


REASONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a learned rotation is a matrix": ("transform=[{method: rotate, learn: 2}]", PACKED),
    "the recipe packs neither": (ROTATE, ()),
    "they are not both packed (kept by the recipe)": (ROTATE, (*PACKED, "ignore=[lm_head]")),
    "nf as the recipe has it stores no rows": (ROTATE, ("head={method: nf, bits: 4}",)),
    "sections embeddings and head store them in two ways": (ROTATE, ("head={bits: 4}", PACKED[1])),
    "rtn as the recipe has it stores no rows": (ROTATE, ("head={bits: 8, incoherence: true}",)),
}


@pytest.mark.parametrize("reason", REASONS)
def test_two_tables_where_it_cannot_be(reason: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    rotate, sections = REASONS[reason]
    prepared = prepare.prepare(job(pico_dir("llama_tied"), GPTQ.set(rotate, *sections), tmp_path / "out"))
    (said,) = prepared.messages
    assert said.startswith("the transform unties the output head from the embeddings, because ") and reason in said
    assert said.endswith("both are then stored: + 0.1 MiB before either is packed")
    assert not prepared.plan.tables_are_shared and prepared.plan.written_numel == prepared.plan.numel + 264 * 64


def test_a_plain_checkpoint_has_two_tables(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    asked = dataclasses.replace(job(pico_dir("llama_tied"), EIGHT.set(ROTATE), tmp_path / "out"), pack=False)
    (note,) = api.quantize(asked)["notes"]["transform"]
    assert "because a plain checkpoint has no place for operations at run time" in note
    assert "lm_head.weight" in stored_tensors(tmp_path / "out")


def test_the_hessian_is_that_of_what_the_stored_table_multiplies(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the head reads, turned back and multiplied by the final norm's weight."""
    from compress.quant import incoherence

    seen = noted_statistics(monkeypatch)
    setup = RTN.set("calibration.num_samples=8", "calibration.seq_len=32", "head={method: gptq, bits: 4}", ROTATE)
    result = api.quantize(job(pico_dir("llama_tied"), setup, tmp_path / "out"))
    row = next(row for row in result["layers"] if row["name"] == "model.embed_tokens")
    assert row["tokens"] == 256 and row["output_error"] < row["weight_error"] < 0.02
    model, weight = loaded(tmp_path / "out"), stored_tensors(pico_dir("llama_tied"))["model.norm.weight"]
    model.set_input_embeddings(loaded(pico_dir("llama_tied")).get_input_embeddings())
    q = stream_basis(64, incoherence)
    model.get_input_embeddings().weight.data = (model.get_input_embeddings().weight.double() @ q.T).float()
    ((tokens, hessian),), read = seen, list[Tensor]()
    model.lm_head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad():
        model(tokens)
    x = read[0].flatten(0, 1).double() @ q * weight.double()
    assert apart(hessian.double(), x.T @ x) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", [interrupt("compress.run.tables", "_chunk", 1), interrupt("compress.run.verify", "self_check", 1)]
)
def test_a_run_that_is_killed_goes_on(moment: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    source, setup = pico_dir("llama_tied"), GPTQ.set("head={method: gptq, bits: 6, group_size: 32}", ROTATE)
    api.quantize(job(source, setup, tmp_path / "expected"))
    assert cli(*command(source, setup, tmp_path / "out"), prepare=moment).code == -9
    assert cli(*command(source, setup, tmp_path / "out")).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


CACHED = Setup("w4a4kv4", ("calibration.num_samples=8", "calibration.seq_len=32", "kv_cache.residual_length=32"))


@pytest.mark.parametrize("setup", [EIGHT.set(ROTATE), CACHED.set(*PACKED)], ids=["plain cache", "coded cache"])
def test_text_is_generated_through_a_cache(setup: Setup, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Token by token, as the whole prefix at once gives it."""
    result = api.quantize(job(pico_dir("llama_tied"), setup, tmp_path / "out"))
    assert "model.embed_tokens" in {row["name"] for row in result["layers"]}
    model = loaded(tmp_path / "out")
    assert model.get_output_embeddings().ops.input == tuple(OPS)
    words = model.generate(IDS, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert words.shape == (1, 72) and torch.equal(words[:, :60], IDS)
    if setup.name == RTN.name:
        with torch.no_grad():
            expected = model(words[:, :-1], use_cache=False).logits[:, 59:].argmax(-1)
        assert torch.equal(words[:, 60:], expected)
    result = cli("generate", str(tmp_path / "out"), "--prompt", "a", "--max-new-tokens", "4")
    assert result.code == 0, result.err


def test_a_matrix_of_its_own_for_each_of_two_roles(tmp_path: Path) -> None:
    """A model that is not tied has nothing around its tables."""
    source = save_pico("llama", tmp_path / "model")
    prepared = prepare.prepare(job(source, EIGHT.set(ROTATE), tmp_path / "out"))
    assert prepared.messages == () and [bool(table.stored.ops) for table in prepared.plan.tables] == [False, False]
