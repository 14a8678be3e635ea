"""Target correction: the least-squares solution, and what the engine gives to methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api, process_memory
from compress.calib.stats import CHUNK, HessianSum, adding_nbytes, nbytes
from compress.model import blockwise
from compress.model.skeleton import Skeleton
from compress.quant import gptq, target_correction
from compress.quant.target_correction import DAMP_FRACTION, TOKENS_PER_INPUT, correction, target
from compress.run import calibration_stream, calibration_text, memory_plan, pipeline, predict, prepare, quantize_linear
from compress.run.plan import make
from compress.storage.checkpoint import open_checkpoint
from compress.types import Quantized, Stats
from helpers import pico, problems
from helpers.runs import GPTQ, RTN, Setup, cli, command, contents, interrupt, job, report_of

FULL = GPTQ.set("calibration.target_correction=1")
ROTATED = FULL.set("incoherence=true")
COLUMNS, TOKENS = 24, 20 * 24


def streams(tokens: int = TOKENS, columns: int = COLUMNS) -> tuple[Tensor, Tensor]:
    """Inputs [tokens, columns] in the full-precision model and behind a quantized prefix."""
    y = problems.inputs(tokens, columns)
    return y, behind(y, seed=7)


def behind(y: Tensor, seed: int) -> Tensor:
    """Errors of 15 % of the inputs' size, in part a function of them."""
    size = y.square().mean(0).sqrt()
    caused = y / size @ problems.random(y.shape[1], y.shape[1], seed=99) / y.shape[1] ** 0.5
    return y + 0.1 * size * (caused + problems.random(*y.shape, seed=seed))


def paired(y: Tensor, x: Tensor) -> Stats:
    total = HessianSum(x.shape[1], torch.device("cpu"), paired=True)
    total.expect(y)
    total.add(x, 64)
    return total.finish("layer")


def corrected(stats: Stats, alpha: float = 1.0) -> Tensor:
    matrix, _ = correction(stats, alpha, stats.count)
    assert matrix is not None and matrix.dtype == torch.float32
    return matrix


# ---------------------------------------------------------------- the target


def damped_solution(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """W (sum y x^T) H^-1 [out, in] float64, both sums damped alike."""
    h, g = x.double().T @ x.double(), y.double().T @ x.double()
    damping = DAMP_FRACTION * h.diagonal().mean() * torch.eye(COLUMNS)
    return weight.double() @ (g + damping) @ torch.linalg.inv(h + damping)


def test_the_target_is_the_least_squares_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of W y ~ V x, and the loss of any weight Q is its distance from V in the metric of the inputs, and a constant."""
    monkeypatch.setattr(target_correction, "DAMP_FRACTION", 0.0)
    (y, x), weight = streams(), problems.random(10, COLUMNS, seed=3)
    found = target(weight, corrected(paired(y, x)))
    y, x, weight = y.double(), x.double(), weight.double()
    solution = torch.linalg.lstsq(x, y @ weight.T).solution.T
    assert (found - solution).abs().max() < 1e-4 * float((solution - weight).abs().max())
    constants = []
    for seed in range(4):
        q = weight + 0.1 * problems.random(10, COLUMNS, seed=seed).double()
        constants.append(float((y @ weight.T - x @ q.T).square().sum()) - problems.loss(found, q, x.T @ x))
    assert min(constants) > 0 and max(constants) - min(constants) < 1e-5 * max(constants)


def test_damping_is_that_of_both_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    (y, x), weight = streams(), problems.random(10, COLUMNS, seed=3)
    stats, expected = paired(y, x), damped_solution(y, x, weight)
    shift = (expected - weight).abs().max()
    assert shift > 0.1 and (target(weight, corrected(paired(y, x))) - expected).abs().max() < 1e-4 * shift
    for alpha in (0.25, 0.5):
        part = weight + alpha * (expected - weight)
        assert (target(weight, corrected(paired(y, x), alpha)) - part).abs().max() < 1e-4 * shift
    monkeypatch.setattr(target_correction, "ROWS_PER_SOLVE", 7)  # rows at a time
    assert (target(weight, corrected(stats)) - expected).abs().max() < 1e-4 * shift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_that_agree_leave_every_bit(dtype: torch.dtype) -> None:
    x, weight = problems.inputs(TOKENS, COLUMNS).to(dtype), problems.random(10, COLUMNS).to(dtype)
    found = target(weight, corrected(paired(x, x)))
    assert found.dtype == torch.float32 and torch.equal(found, weight.float())


def test_dead_inputs_keep_their_weights() -> None:
    """A channel that is always zero behind the quantized prefix: the others take over what it gave."""
    (y, x), weight = streams(), problems.random(10, COLUMNS, seed=3)
    x[:, [0, 5]] = 0
    found = target(weight, corrected(paired(y, x)))
    assert torch.isfinite(found).all() and torch.equal(found[:, [0, 5]], weight[:, [0, 5]])
    expected = damped_solution(y, x, weight)
    assert (found - expected).abs().max() < 1e-4 * (expected - weight).abs().max()
    nothing = target(weight, corrected(paired(y, torch.zeros_like(x))))
    assert torch.equal(nothing, weight)


def test_less_is_applied_where_tokens_are_few() -> None:
    for tokens in (TOKENS_PER_INPUT * COLUMNS, TOKENS_PER_INPUT * COLUMNS - 1, 60, 1):
        y, x = streams(tokens)
        share = tokens / (TOKENS_PER_INPUT * COLUMNS)
        matrix, note = correction(paired(y, x), 0.5, tokens)
        stats = paired(y, x)
        assert stats.drift is not None and matrix is not None
        whole = stats.drift.double() @ torch.linalg.inv(problems.damped(stats.hessian, DAMP_FRACTION))
        assert (matrix - 0.5 * share * whole).abs().max() < 1e-4 * whole.abs().max() * share
        assert (note is None) == (share == 1)
        if note is not None:
            assert f"{tokens} calibration tokens for 24 inputs: only {share:.2f} of the target correction" in note


def test_what_cannot_be_paired_keeps_the_plain_target() -> None:
    y, x = streams()
    plain = "other tokens reach this input"
    for stats, tokens, expected in (
        (paired(y[:-1], x), TOKENS, plain),
        (paired(y, x), TOKENS + 1, plain),  # not every token came here
        (dataclasses.replace(paired(y, x), count=0), TOKENS, None),  # that is noted by the method
    ):
        matrix, note = correction(stats, 1.0, tokens)
        assert matrix is None and (note is None if expected is None else note is not None and expected in note)
    huge = paired(y, x)
    assert huge.drift is not None
    huge.drift[3, 4] = torch.inf
    matrix, note = correction(huge, 1.0, TOKENS)
    assert matrix is None and "no target could be solved for" in (note or "")


def test_rounding_to_the_target_gives_what_the_full_precision_model_gives() -> None:
    """On tokens that were not seen."""
    full, quantized = streams(6144, 128)
    weight, config = problems.random(64, 128, seed=3), gptq.Config(bits=3, group_size=-1)
    stats = paired(full[:4096], quantized[:4096])
    plain, moved = Stats(stats.hessian, stats.count), target(weight, corrected(stats))
    y, x, errors = full[4096:], quantized[4096:], []
    for given in (weight, moved):
        q = problems.decoded(gptq.quantize(given, plain, config).weight).float()
        errors.append(float((y @ weight.T - x @ q.T).square().sum() / (y @ weight.T).square().sum()))
    assert errors[1] < 0.8 * errors[0]


# ---------------------------------------------------------------- what methods are given


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of three blocks."""
    kind, settings = pico._CONFIGS["llama"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pico._CONFIGS, "llama", (kind, {**settings, "num_hidden_layers": 3}))
        return pico.save_pico("llama", tmp_path_factory.mktemp("deep") / "model", shards=True)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Tensor, Stats | None]]:
    """Name -> the target in the layer's own basis, and the statistics that its method was given."""
    found: dict[str, tuple[Tensor, Stats | None]] = {}
    real = quantize_linear.quantize

    def quantize(task: quantize_linear.LinearTask, seed: int) -> Quantized:
        target, stats = task.statistics.target(task.weight), task.statistics.for_layer(task.layer)
        assert stats is None or stats.drift is None
        copy = None if stats is None else Stats(stats.hessian.clone(), stats.count)
        found[task.layer.spec.name] = (target.clone(), copy)
        return real(task, seed)

    monkeypatch.setattr(quantize_linear, "quantize", quantize)
    return found


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def inputs(model: PreTrainedModel, name: str, tokens: Tensor) -> Tensor:
    """What a linear reads, [tokens, in] float64."""
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, x: seen.append(x[0].flatten(0, 1)))
    with torch.no_grad():
        model(tokens)
    hook.remove()
    return seen[0].double()


@pytest.mark.parametrize(
    "setup",
    [
        FULL,
        ROTATED,
        GPTQ.set("calibration.target_correction=0.3", "calibration.num_samples=64"),
        FULL.set("rules=[{match: 'model.layers.1.*', method: rtn, bits: 2}]"),
        FULL.set("rules=[{match: 'model.layers.0.*', method: rtn, bits: 2}]"),
    ],
    ids=["whole", "rotated", "part", "block 1 without statistics", "block 0 without statistics"],
)
def test_methods_are_given_the_target(
    setup: Setup, deep: Path, given: dict[str, tuple[Tensor, Stats | None]], tmp_path: Path
) -> None:
    """y comes from the original model, x from the original block behind the finished ones."""
    asked = job(deep, setup, tmp_path / "out")
    report = api.quantize(asked)
    calibration = calibration_text.calibration(asked, prepare.prepare(asked), lambda *args: None)
    assert calibration is not None
    original, finished = load(deep), load(tmp_path / "out")
    layers: Any = finished.dequantize(torch.float32).base_model.layers
    hybrid: Any = load(deep)
    notes = {row["name"]: row["notes"] for row in report["layers"]}
    for index in range(3):
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
            name = f"model.layers.{index}.{part}"
            found, stats = given[name]
            weight = original.get_parameter(f"{name}.weight").detach()
            if index == 0 or stats is None:  # both streams are one; or the method wants no statistics
                assert torch.equal(found, weight)
                continue
            y, x = (inputs(model, name, calibration.tokens) for model in (original, hybrid))
            if setup is ROTATED:  # traces do not change
                assert stats.hessian.trace() == pytest.approx(float((x.T @ x).trace()), rel=1e-5)
            else:
                assert (stats.hessian - x.T @ x).norm() < 1e-5 * (x.T @ x).norm()
            share = min(1.0, len(x) / (TOKENS_PER_INPUT * x.shape[1])) * asked.recipe.calibration.target_correction
            shift = share * weight.double() @ (y - x).T @ x @ torch.linalg.inv(problems.damped(x.T @ x, DAMP_FRACTION))
            assert (found - weight - shift).norm() < 1e-3 * shift.norm() and shift.norm() > 1e-3 * weight.norm()
            few = len(x) < TOKENS_PER_INPUT * x.shape[1]
            assert few == any("of the target correction applies" in note for note in notes[name])
        hybrid.base_model.layers[index] = layers[index]
    assert all(not note for name, note in notes.items() if "layers.0." in name)


def test_experts_keep_the_plain_target(
    pico_dir: Callable[..., Path], given: dict[str, tuple[Tensor, Stats | None]], tmp_path: Path
) -> None:
    report = api.quantize(job(pico_dir("mixtral"), FULL, tmp_path / "out"))
    assert report["calibration"]["notes"] == [
        "Experts are calibrated on their own inputs alone: full-precision routing sends them other tokens."
    ]
    assert not any("other tokens" in note for row in report["layers"] for note in row["notes"])
    skeleton, moved = Skeleton(open_checkpoint(pico_dir("mixtral"))), set()
    for index in range(2):
        block = skeleton.load_block(index, torch.device("cpu"))
        names = [name for name in given if f"layers.{index}." in name]
        assert len(names) == 4 + 4 * 3
        for name in names:
            weight = block.get_submodule(name.removeprefix(f"model.layers.{index}.")).get_parameter("weight")
            moved |= set() if torch.equal(given[name][0], weight) else {name}
        skeleton.free()
    assert moved == {f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"}


# ---------------------------------------------------------------- the run


def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the blocks in the order in which the calibration stream is run through them, for one batch."""
    names: list[str] = []
    real = blockwise.run_block_fully

    def run_block_fully(block: nn.Module, call: Any, hidden: Tensor, name: str, **settings: Any) -> Any:
        if hidden.shape[0] > 1:  # the probe is one sample
            names.append(name.removeprefix("model.layers."))
        return real(block, call, hidden, name, **settings)

    monkeypatch.setattr(blockwise, "run_block_fully", run_block_fully)
    return names


@pytest.mark.parametrize("setup", [GPTQ, RTN.set("calibration.target_correction=1")], ids=["off", "without data"])
def test_off_there_is_one_stream_and_one_sum(
    setup: Setup, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides: list[int] = []
    pairs: list[bool] = []
    real_stream, real_sum = blockwise.HiddenStates, HessianSum

    def stream(*words: Any) -> Any:
        sides.append(words[2] if len(words) > 2 else 1)
        return real_stream(*words)

    def total(*words: Any) -> HessianSum:
        pairs.append(len(words) > 2 and words[2])
        return real_sum(*words)

    names = passes(monkeypatch)
    monkeypatch.setattr(blockwise, "HiddenStates", stream)
    monkeypatch.setattr(calibration_stream.calib_stats, "HessianSum", total)
    api.quantize(job(deep, setup.set("calibration.asymmetric=0"), tmp_path / "zero"))
    assert names == (["0", "0", "1", "1", "2"] if setup is GPTQ else [])
    api.quantize(job(deep, setup, tmp_path / "out"))
    assert set(sides) == {1} and not any(pairs)
    files, others = contents(tmp_path / "out"), contents(tmp_path / "zero")
    assert {name for name in files if files[name] != others[name]} == ({"recipe.yaml"} if setup is not GPTQ else set())


def test_no_more_passes_than_needed(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than without for each block but the first, where both streams are one."""
    names = passes(monkeypatch)
    api.quantize(job(deep, FULL, tmp_path / "out"))
    assert names == ["0", "0", "1", "1", "1", "2", "2"]
    names.clear()
    kept = FULL.set("rules=[{match: 'model.layers.1.*', method: rtn, bits: 2}]")
    api.quantize(job(deep, kept, tmp_path / "kept"))
    assert names == ["0", "0", "1", "1", "2", "2"]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bytes(deep: Path, tmp_path: Path) -> None:
    """Killed in block 1 and again in block 2: both streams are replayed."""
    api.quantize(job(deep, FULL, tmp_path / "expected"))
    words = command(deep, FULL, tmp_path / "out")
    for call in (10, 7 + 3):  # of seven linears a block; the second run starts with block 1
        result = cli(*words, prepare=interrupt("compress.quant.gptq", "quantize_rows", call))
        assert result.code < 0 and not (tmp_path / "out").exists()
    assert cli(*words).code == 0
    report, expected = report_of(tmp_path / "out"), report_of(tmp_path / "expected")
    assert report["resumed_blocks"] == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    rows = [[{**row, "seconds": 0} for row in found["layers"]] for found in (report, expected)]
    assert rows[0] == rows[1]
    api.quantize(job(deep, FULL.set("calibration.asymmetric=0"), tmp_path / "off"))
    assert contents(tmp_path / "off") != contents(tmp_path / "expected")  # the test can tell


def test_an_arrangement_changes_no_byte(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both streams on disk, and a pass for each input."""
    real = memory_plan.arrange
    arrangements: list[dict[str, Any]] = [{"spill": False}, {"spill": True, "statistics_nbytes": 1, "passes": 4}]
    asked: list[int] = []
    monkeypatch.setattr(pipeline, "check_space", lambda directory, nbytes: asked.append(nbytes))
    names = passes(monkeypatch)
    for number, changes in enumerate(arrangements):
        names.clear()
        with monkeypatch.context() as patch:
            patch.setattr(memory_plan, "arrange", lambda *words, c=changes: dataclasses.replace(real(*words), **c))
            api.quantize(job(deep, FULL, tmp_path / str(number)))
    assert names.count("2") == 2 * 4 and names.count("0") == 4 + 1
    assert contents(tmp_path / "0") == contents(tmp_path / "1")
    assert asked[1] - asked[0] == 2 * 8 * 32 * 64 * 4


def test_the_time_is_predicted(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial carries both streams, whichever block it takes."""
    names, asked = passes(monkeypatch), job(deep, FULL, tmp_path / "out")
    assert predict.predict_seconds(asked, prepare.prepare(asked)) > 0
    assert names == ["0", "0", "0"] and not list(tmp_path.iterdir())


def test_the_second_stream_is_counted(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "TOKENIZING_NBYTES", 0)
    monkeypatch.setattr(process_memory, "resident", lambda: 0)
    plan = make(GPTQ.load(), skeleton := Skeleton(open_checkpoint(deep)))
    demands = [memory_plan.MemoryDemands(is_paired=is_paired) for is_paired in (False, True)]
    off, on = (memory_plan.arrange(plan, skeleton, 10_000, 256, 1 << 40, each) for each in demands)
    assert [off.statistics_nbytes, on.statistics_nbytes] == [3 * nbytes(64, p) + nbytes(192, p) for p in (False, True)]
    stream, waiting = 10_000 * 256 * 64 * 4, on.batch * 256 * 4 * (3 * 64 + 192)  # of the full-precision model
    copies = 2 * 4 * CHUNK * (3 - 1) * 192  # of a chunk's inputs, both and their difference, as they are and scaled
    forward = waiting + copies + adding_nbytes(3 * 192) - adding_nbytes(192)  # twice: what is freed is kept
    more = memory_plan.MARGIN_FACTOR * (on.statistics_nbytes - off.statistics_nbytes + 2 * forward)
    assert on.peak_nbytes - off.peak_nbytes - stream == pytest.approx(more, abs=2)
    spilled = memory_plan.arrange(plan, skeleton, 10_000, 256, 2 * stream, demands[1])
    assert spilled.spill and spilled.peak_nbytes == on.peak_nbytes - 2 * stream


def test_a_limit_is_kept(deep: Path, tmp_path: Path) -> None:
    result = cli(*command(deep, FULL, tmp_path / "out"), "--max-memory", "1GiB")
    assert result.code == 0, result.err
    used = report_of(tmp_path / "out")["memory"]
    assert used["measured_peak"] <= used["predicted_peak"] <= used["limit"] == 1 << 30


@pytest.mark.parametrize("columns", [900, 1600])
def test_solving_takes_no_more_than_said(columns: int) -> None:
    stats = Stats(torch.eye(columns), 10 * columns, 0.01 * problems.random(columns, columns))
    correction(Stats(torch.eye(50), 500, torch.zeros(50, 50)), 1.0, 500)  # the library's own buffers
    process_memory.reset_peak()
    before = process_memory.resident()
    matrix, _ = correction(stats, 1.0, 10 * columns)
    taken = process_memory.peak() - before
    assert matrix is not None and torch.allclose(matrix, 0.01 / 1.01 * problems.random(columns, columns), atol=1e-6)
    assert taken < target_correction.solve_workspace(columns) + (4 << 20)
