"""Exports run by onnxruntime and onnxruntime-genai: skipped where these are not installed, run by `make exports`.

Logits are compared in float32 for a whole text, for a text that is read token by token with keys and values, and for
texts of different lengths in one batch.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from compress import api
from compress.errors import ExportError
from compress.export import convert
from compress.export.source import open_source
from compress.export.targets import onnx
from compress.export.targets.onnx import graph
from compress.model.load import load_model
from helpers.engines import packed
from helpers.pico import build, of_type, save
from helpers.runs import KEEP_TABLES, Setup, job

SINGLE = 2e-6  # error of logits of computing in float32, relative to the largest
HALF = 0.01
EIGHT_BITS = 0.05  # of rounding inputs in blocks and for each token
LENGTH = 44  # tokens of a text, more than a sliding window of the models has
FED = 40  # of these at once, the others one by one
ASYMMETRIC = ("bits=4", "group_size=16", "symmetric=false")
CASES: list[tuple[str, tuple[str, ...]]] = [
    ("llama", ("bits=4", "group_size=32")),
    ("llama", ("bits=2", "group_size=-1")),
    ("llama_tied", ASYMMETRIC),
    ("qwen2", ("bits=3", "group_size=32", "symmetric=false")),
    ("qwen3", ("bits=8", "group_size=64")),
    ("mistral", ("bits=6", "group_size=-1")),
    ("gemma", ("bits=4", "group_size=16", "embeddings={bits: 4}", "head={bits: 4}")),
    ("gemma2", ("bits=4", "group_size=16")),
    ("phi3", ("bits=4", "group_size=32", "rules=[{match: '*down_proj', bits: 8}]")),
    ("mixtral", ("bits=4", "group_size=32")),
    ("qwen3_moe", ASYMMETRIC),
    ("gpt_neox", ("bits=4", "group_size=32")),
    ("opt", ("bits=4", "group_size=32", *KEEP_TABLES)),
]
ROOT = Path(__file__).parents[2]
Arrays = dict[str, NDArray[Any]]


def reader(name: str) -> ModuleType:
    return pytest.importorskip(name, reason=f"{name} is not installed; `make exports` does")


class Session:
    """An exported model in onnxruntime."""

    def __init__(self, out: Path) -> None:
        runtime = reader("onnxruntime")
        self.session = runtime.InferenceSession(out / graph.FILE, providers=["CPUExecutionProvider"])
        self.inputs = {each.name: each for each in self.session.get_inputs()}
        self.outputs = [each.name for each in self.session.get_outputs()]

    def empty(self, batch: int) -> Arrays:
        """Return keys and values of no tokens."""
        cached = {name: each for name, each in self.inputs.items() if name.startswith("past_key_values")}
        kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        return {name: np.zeros((batch, e.shape[1], 0, e.shape[3]), kinds[e.type]) for name, e in cached.items()}

    def step(self, ids: torch.Tensor, mask: torch.Tensor, past: Arrays) -> tuple[torch.Tensor, Arrays]:
        """Return logits [batch, sequence, vocabulary], and the keys and values of all tokens."""
        given = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), **past}
        if "position_ids" in self.inputs:
            given["position_ids"] = positions(mask)[:, -ids.shape[1] :].numpy()
        logits, *kept = self.session.run(None, given)
        names = [name.replace("present", "past_key_values") for name in self.outputs[1:]]
        return torch.tensor(logits).float(), dict(zip(names, kept, strict=True))


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def token_ids(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).view(batch, length) * 7 % 250


def graph_of(checkpoint: Path) -> Any:
    """Return the model of onnx that has been exported, without its tensors."""
    return reader("onnx").load(checkpoint.parent / "onnx" / graph.FILE, load_external_data=False)


def nodes(model: Any) -> list[Any]:
    """Return all nodes of a model, those of its functions and of graphs within nodes, too."""
    graphs, found = [model.graph, *model.functions], []
    while graphs:
        for node in graphs.pop().node:
            found.append(node)
            graphs += [each.g for each in node.attribute if each.HasField("g")]
    return found


def levels(model: Any) -> list[int]:
    """Return how the products of a model round their inputs, where a node says it."""
    return [each.i for node in nodes(model) for each in node.attribute if each.name == "accuracy_level"]


def exported(checkpoint: Path, dtype: torch.dtype | None = None, int8_inputs: bool = False) -> Session:
    reader("onnxscript")
    out = checkpoint.parent / "onnx"
    convert.export(checkpoint, "onnx", out, dtype, wishes=convert.Wishes(int8_inputs))
    return Session(out)


def assert_equal(checkpoint: Path, session: Session, limit: float = SINGLE) -> None:
    """Compare a whole text, the same in steps, and a batch of texts of two lengths."""
    model = load_model(checkpoint, "float32")
    ids = token_ids(1, LENGTH)
    with torch.no_grad():
        expected = model(ids).logits
    limit *= float(expected.abs().max())
    whole, _ = session.step(ids, torch.ones_like(ids), session.empty(1))
    first, past = session.step(ids[:, :FED], torch.ones(1, FED, dtype=torch.long), session.empty(1))
    steps = [first]
    for place in range(FED, LENGTH):
        mask = torch.ones(1, place + 1, dtype=torch.long)
        logits, past = session.step(ids[:, place : place + 1], mask, past)
        steps.append(logits)
    assert (whole - expected).abs().max() < limit
    assert (torch.cat(steps, 1) - expected).abs().max() < limit
    ids = token_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    logits, _ = session.step(ids, mask, session.empty(2))
    assert (logits - expected)[mask.bool()].abs().max() < limit


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_onnxruntime_computes_the_same(name: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint = packed(name, tmp_path, settings)
    assert_equal(checkpoint, exported(checkpoint))


def test_linears_that_are_stored_turned(tmp_path: Path) -> None:
    model = of_type("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128})
    api.quantize(job(save(model, tmp_path / "model"), Setup("int8", ("bits=4", "group_size=32")), tmp_path / "packed"))
    assert_equal(tmp_path / "packed", exported(tmp_path / "packed"))


def test_quantized_inputs(tmp_path: Path) -> None:
    settings = ("bits=8", "group_size=-1", "activations={bits: 8, scale: token}")
    checkpoint = packed("llama", tmp_path, settings)
    session = exported(checkpoint)
    assert_equal(checkpoint, session, EIGHT_BITS)
    assert levels(graph_of(checkpoint)) == [4] * 14  # not the output head


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "dtype"),
    [
        ("llama", ("bits=4", "group_size=32"), torch.float32),
        ("llama_tied", ASYMMETRIC, torch.float32),
        ("llama", ("bits=2", "group_size=-1"), torch.float16),
        ("qwen3_moe", ("bits=8", "group_size=16"), torch.float32),
    ],
)
def test_all_products_round_their_inputs_when_asked(
    name: str, settings: tuple[str, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = packed(name, tmp_path, settings)
    assert_equal(checkpoint, exported(checkpoint, dtype, int8_inputs=True), EIGHT_BITS)
    model = graph_of(checkpoint)
    products = [node for node in nodes(model) if node.op_type == "MatMulNBits"]
    assert levels(model) == [4] * len(products)
    assert len(products) >= 15  # the output head, too


def test_half_the_precision(tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path)
    assert_equal(checkpoint, exported(checkpoint, torch.float16), HALF)


@pytest.mark.parametrize("name", ["llama_tied", "gemma", "opt"])
def test_a_table_that_fits_no_blocks_becomes_plain(name: str, tmp_path: Path) -> None:
    table = "{bits: 8, group_size: 24}"
    checkpoint = packed(name, tmp_path, ("bits=4", "group_size=16", f"embeddings={table}", f"head={table}"))
    session = exported(checkpoint)
    assert_equal(checkpoint, session)
    assert "GatherBlockQuantized" not in {node.op_type for node in nodes(graph_of(checkpoint))}


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_bytes_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    checkpoint = packed(name, tmp_path, ASYMMETRIC)
    exported(checkpoint)
    prepared = convert.prepare(open_source(checkpoint), "onnx")
    stored = [
        next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), len(tensor.raw_data))
        for tensor in graph_of(checkpoint).graph.initializer
        if tensor.name.endswith((".codes", ".scales", ".zeros"))
    ]
    assert sum(stored) == sum(onnx.nbytes(prepared, weight) for weight in prepared.held)


def test_files_name_nothing_of_this_machine(tmp_path: Path) -> None:
    """A tied table is stored once, in the file of tensors, and nodes say nothing of the sources they come from."""
    checkpoint = packed("llama_tied", tmp_path)
    exported(checkpoint)
    raw = (checkpoint.parent / "onnx" / graph.FILE).read_bytes()
    for place in (tmp_path, ROOT, Path(torch.__file__).parents[1]):
        assert str(place).encode() not in raw
    model = graph_of(checkpoint)
    assert model.graph.node
    assert not [node.name for node in nodes(model) if node.metadata_props]
    names = [each.name for each in model.graph.initializer]
    assert len([name for name in names if ("embed_tokens" in name or "lm_head" in name) and "codes" in name]) == 1


def test_positions_that_depend_on_lengths_are_refused(tmp_path: Path) -> None:
    reader("onnxscript")
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    checkpoint = packed("llama", tmp_path, changes={"rope_parameters": rope})
    with pytest.raises(ExportError, match="torch.onnx cannot write LlamaForCausalLM as a graph"):
        convert.export(checkpoint, "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    reader("onnxscript")
    model = build("llama")
    model.get_parameter("model.layers.1.mlp.down_proj.weight").data[3] *= 1e8
    api.quantize(job(save(model, tmp_path / "model"), Setup("int8", ("bits=4", "group_size=32")), tmp_path / "packed"))
    with pytest.raises(ExportError, match="scales that float16"):
        convert.export(tmp_path / "packed", "onnx", tmp_path / "out", torch.float16)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "packed"}


def test_genai_writes_the_same_text(tmp_path: Path) -> None:
    checkpoint = packed("qwen2", tmp_path)
    exported(checkpoint)
    genai = reader("onnxruntime_genai")
    ids, count = [5, 6, 7, 8, 9], 20
    model = genai.Model(str(checkpoint.parent / "onnx"))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(ids) + count, do_sample=False)
    generator = genai.Generator(model, settings)
    generator.append_tokens(ids)
    written = []
    while not generator.is_done():
        generator.generate_next_token()
        written.append(int(generator.get_next_tokens()[0]))
    given = torch.tensor([ids])
    ours = load_model(checkpoint, "float32").generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count
    )
    assert written == ours[0, len(ids) :].tolist()
