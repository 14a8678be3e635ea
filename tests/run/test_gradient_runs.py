"""Runs that need the loss's gradients at outputs: taken once, read by others, planned and refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import api
from compress.calib import gradient_pass
from compress.calib.backward_pass import BackwardPass
from compress.calib.output_gradients import BlockOutputs
from compress.errors import UnsupportedModelError
from compress.run import loss_gradients, prepare, quantize_linear, sizes
from compress.run.job import Job
from compress.storage.workdir import Output
from helpers.pico import save_pico
from helpers.runs import KEEP_TABLES, Setup, cli, command, contents, interrupt, job

SMALL = ("calibration.num_samples=8", "calibration.seq_len=32", "calibration.gradient_tokens=100", "state_bits=6")
TWO_SIDED = Setup("int3", (*SMALL[:-1], *KEEP_TABLES, "group_size=32", "two_sided=true"))
BACKWARD_OF_LOSS = BackwardPass._of_loss
SENSITIVE = Setup("vq2bit", (*SMALL, "tile_rows=32", "out_scales=sensitivity"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_pico("llama", tmp_path / "model")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Gets the shape of the tokens of each pass."""
    shapes: list[tuple[int, ...]] = []
    real = gradient_pass._GradientPass

    def noted(skeleton: Any, tokens: torch.Tensor, *given: Any) -> Any:
        shapes.append(tuple(tokens.shape))
        return real(skeleton, tokens, *given)

    monkeypatch.setattr(gradient_pass, "_GradientPass", noted)
    return shapes


def weights(directory: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(directory).items() if name.endswith(".safetensors")}


def folders(where: Path) -> list[Path]:
    return sorted(where.glob("*gradients*"))


def test_recipes_of_one_model_and_text_share_a_pass(
    model: Path, tmp_path: Path, passes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = list[Any]()
    real = quantize_linear.quantize

    def note(task: quantize_linear.LinearTask, seed: int) -> Any:
        tasks.append(task)
        return real(task, seed)

    monkeypatch.setattr(quantize_linear, "quantize", note)
    api.quantize(job(model, SENSITIVE, tmp_path / "one"))
    assert passes == [(4, 32)]  # the fewest samples of at least 100 tokens
    (folder,) = folders(tmp_path)
    assert folder.name.startswith("model-") and folder.name.endswith(".gradients")
    inner = [task for task in tasks if task.layer.spec.block >= 0]
    assert all(task.output_gradients.width == task.layer.spec.shape[0] for task in inner)
    assert all(task.output_gradients.count == 128 for task in inner)
    api.quantize(job(model, SENSITIVE.set("bits=3", "calibration.num_samples=6"), tmp_path / "two"))
    assert len(passes) == 1
    api.quantize(job(model, SENSITIVE, tmp_path / "again"))
    assert len(passes) == 1 and contents(tmp_path / "again") == contents(tmp_path / "one")
    api.quantize(job(model, SENSITIVE.set("calibration.gradient_tokens=200"), tmp_path / "more"))
    assert passes[1:] == [(7, 32)] and len(folders(tmp_path)) == 2


def test_only_schemes_that_need_gradients_take_them(model: Path, tmp_path: Path, passes: list[tuple[int, ...]]) -> None:
    api.quantize(job(model, SENSITIVE.set("out_scales=none", "two_sided=false"), tmp_path / "plain"))
    assert not passes and not folders(tmp_path)


def test_a_folder_of_measurements_keeps_them(model: Path, tmp_path: Path, passes: list[tuple[int, ...]]) -> None:
    kept = tmp_path / "kept"
    for name in ("one", "two"):
        asked = Job(
            str(model),
            SENSITIVE.load(),
            tmp_path / name,
            calib=job(model, SENSITIVE, tmp_path).calib,
            measurements=kept,
        )
        api.quantize(asked)
    assert len(passes) == 1 and not folders(tmp_path) and len(folders(kept)) == 1


def test_with_a_folder_for_unfinished_work_they_lie_in_it(model: Path, tmp_path: Path) -> None:
    """An output in an object store has nothing beside it that can be renamed."""
    asked = job(model, TWO_SIDED, tmp_path / "store" / "out")
    api.quantize(dataclasses.replace(asked, work=tmp_path / "work"))
    assert len(folders(tmp_path / "work")) == 1
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["out"]


@pytest.mark.parametrize("transform", ["smooth", "awq"])
def test_behind_transforms_that_change_outputs_later_rounding_is_one_sided(
    transform: str, model: Path, tmp_path: Path, passes: list[tuple[int, ...]]
) -> None:
    setup = TWO_SIDED.set(f"transform=[{{method: {transform}}}]", "out_scales=sensitivity")
    (message,) = prepare.prepare(job(model, setup, tmp_path / "out")).messages
    assert message == f"{transform} changes what linears give after gradients are taken there: rounding is one-sided"
    assert api.quantize(job(model, setup, tmp_path / "out"))["notes"]["two_sided"] == [message]
    api.quantize(job(model, setup.set("two_sided=false", "out_scales=rms"), tmp_path / "plain"))
    assert not passes and not folders(tmp_path)
    assert weights(tmp_path / "out") == weights(tmp_path / "plain")


def fail(error: BaseException) -> Callable[..., Any]:
    def stand_in(*given: Any) -> Any:
        raise error

    return stand_in


def to_infinity(*given: Any) -> torch.Tensor:
    return BACKWARD_OF_LOSS(*given) * float("inf")


NOT_FINITE = r"the gradient at the outputs of model\.layers.* is not finite, or too large"
FAILURES = {
    "derivative": (BlockOutputs, "pull_back", fail(RuntimeError("no derivative\nof x")), "no derivative"),
    "code": (BlockOutputs, "pull_back", fail(UnsupportedModelError("blocks differ; use int4")), "blocks differ"),
    "overflow": (BackwardPass, "_of_loss", to_infinity, NOT_FINITE),
}


@pytest.mark.parametrize("kind", list(FAILURES))
def test_where_gradients_cannot_be_had_rounding_is_one_sided(
    kind: str, model: Path, tmp_path: Path, passes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    owner, name, stand_in, why = FAILURES[kind]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stand_in)
        report = api.quantize(job(model, TWO_SIDED, tmp_path / "out"))
    (said,) = report["notes"]["two_sided"]
    expected = r"rounding is one-sided: the loss's gradients at outputs of linears cannot be taken \(" + why + r"\)"
    assert re.fullmatch(expected, said)
    assert [record.getMessage() for record in caplog.records].count(said) == 1
    assert all("two_sided_error" not in row for row in report["layers"]) and not report["fallbacks"]
    again = api.quantize(job(model, TWO_SIDED, tmp_path / "again"))  # which does not try it again
    assert len(passes) == 1 and again["notes"] == report["notes"]
    api.quantize(job(model, TWO_SIDED.set("two_sided=false"), tmp_path / "plain"))
    assert weights(tmp_path / "out") == weights(tmp_path / "again") == weights(tmp_path / "plain")
    (folder,) = folders(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["gradients.json", "lock"]


def test_a_run_that_goes_on_behind_all_blocks_says_why_they_are_one_sided(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(BlockOutputs, "pull_back", fail(RuntimeError("no derivative")))
        patch.setattr(Output, "publish", fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            api.quantize(job(model, TWO_SIDED, tmp_path / "out"))
    (said,) = api.quantize(job(model, TWO_SIDED, tmp_path / "out"))["notes"]["two_sided"]
    assert "no derivative" in said


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("too much"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`")],
    ids=["memory", "device"],
)
def test_what_another_run_may_not_have_is_no_reason_to_round_one_sided(
    error: RuntimeError, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockOutputs, "pull_back", fail(error))
    with pytest.raises(type(error), match=str(error)[:8]):
        api.quantize(job(model, TWO_SIDED, tmp_path / "out"))
    assert not folders(tmp_path)


def test_linears_that_no_gradient_reaches_say_so(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BlockOutputs._watch
    cut = "model.layers.1.mlp.up_proj"
    watch = lambda self, name, *given: None if name == cut else real(self, name, *given)  # noqa: E731
    monkeypatch.setattr(BlockOutputs, "_watch", watch)
    report = api.quantize(job(model, TWO_SIDED, tmp_path / "out"))
    assert report["fallbacks"] == {cut: ["no gradient of the loss reaches its outputs: rounded one-sided"]}


def test_an_allocation_and_its_run_share_a_pass(model: Path, tmp_path: Path, passes: list[tuple[int, ...]]) -> None:
    settings = ("allocate.samples=2", "allocate.estimator=hessian", "allocate.options=[{bits: 2}, {bits: 3}]")
    asked = dataclasses.replace(
        job(model, Setup("mixed2bit", (*SMALL, *settings, "two_sided=true")), tmp_path / "out"),
        measurements=tmp_path / "kept",
    )
    report = api.quantize(asked)
    assert len(passes) == 1 and len(folders(tmp_path / "kept")) == 1 and not report["notes"]
    assert any(row["two_sided_error"] > 0 for row in report["layers"] if row["name"].startswith("model.layers"))
    api.quantize(dataclasses.replace(asked, out=tmp_path / "again"))
    assert len(passes) == 1 and contents(tmp_path / "out") == contents(tmp_path / "again")


def test_text_that_the_model_writes_itself_has_gradients(model: Path, tmp_path: Path) -> None:
    report = api.quantize(dataclasses.replace(job(model, TWO_SIDED, tmp_path / "out"), calib=None))
    assert report["calibration"]["self_generated"] and not report["notes"]
    assert all(row["two_sided_error"] > 0 for row in report["layers"] if row["name"].startswith("model.layers"))


def test_of_a_rotated_model_gradients_are_in_its_basis(model: Path, tmp_path: Path) -> None:
    """Writers to the stream give Q y in place of y, and so their gradients are Q g."""
    stores = []
    for name, extra in (("plain", ()), ("rotated", ("transform=[{method: rotate, values: false}]",))):
        asked = job(model, SENSITIVE.set(*extra), tmp_path / name)
        prepared = prepare.prepare(asked)
        tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
        skeleton = prepared.skeleton
        stores.append(loss_gradients.output_gradients(asked, skeleton, tokens, None, lambda text: None))
    assert stores[0].folder != stores[1].folder
    basis = skeleton.edits.basis  # type: ignore[union-attr]
    for name, is_turned in (("mlp.up_proj", False), ("mlp.down_proj", True), ("self_attn.o_proj", True)):
        plain, turned = (store.read(1).of(f"model.layers.1.{name}") for store in stores)
        change = basis.forward if is_turned else (lambda rows: rows)
        wanted = plain.in_basis(change).block(slice(None), 0.0)
        assert (turned.metric(slice(None), damp=0.0) - wanted).norm() < 0.02 * wanted.norm(), name


def test_memory_and_disk_are_planned(model: Path, tmp_path: Path) -> None:
    asked = job(model, SENSITIVE, tmp_path / "out")
    prepared = prepare.prepare(asked)
    skeleton = prepared.skeleton
    assert any("output gradients are taken on 128 tokens first" in line for line in prepared.messages)
    need = sizes.output_gradient_sizes(skeleton, 4, 32, 4)
    blocks, hidden = len(skeleton.blocks), skeleton.config.hidden_size
    assert need.states == 4 * 32 * hidden * (blocks + 1) * 4
    api.quantize(asked)
    (folder,) = folders(tmp_path)
    files = [path.stat().st_size for path in folder.glob("0*.safetensors")]
    assert sum(files) <= need.stored + 4096 * blocks
    assert sum(files) >= 0.8 * (need.stored - 4 * 32 * hidden * 4)


def test_a_run_that_is_killed_while_it_quantizes_does_not_take_them_again(model: Path, tmp_path: Path) -> None:
    words = command(model, SENSITIVE, tmp_path / "out")
    assert cli(*words, prepare=interrupt("compress.run.quantize_linear", "quantize", 9)).code == -9
    (folder,) = folders(tmp_path)
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    result = cli(*words)
    assert result.code == 0, result.err
    assert stamps == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert cli(*command(model, SENSITIVE, tmp_path / "whole")).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("call", [2, 9])
def test_a_run_that_is_killed_while_it_takes_them_has_the_same_bytes(call: int, model: Path, tmp_path: Path) -> None:
    words = command(model, TWO_SIDED, tmp_path / "out")
    kill = interrupt("compress.calib.gradient_pass", "as_stored", call)
    assert cli(*words, prepare=kill).code == -9
    assert cli(*words).code == 0
    assert cli(*command(model, TWO_SIDED, tmp_path / "whole")).code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_damaged_block_is_one_line(model: Path, tmp_path: Path) -> None:
    words = command(model, SENSITIVE, tmp_path / "out")
    assert cli(*words).code == 0
    (folder,) = folders(tmp_path)
    file = folder / "00001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    words = command(model, SENSITIVE, tmp_path / "two")
    result = cli(*words)
    assert result.code == 1 and "00001.safetensors was damaged or gone; run the same command again" in result.err
    assert cli(*words).code == 0
    assert contents(tmp_path / "two") == contents(tmp_path / "out")
