"""Training of low-rank parts: it lowers what it is to lower, keeps what is better, and touches nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compress
from compress import api, process_memory
from compress.errors import NumericalError, RecipeError
from compress.model import load as lm
from compress.model.blockwise import BlockArgs
from compress.model.skeleton import Skeleton
from compress.recipe import load
from compress.run import memory_plan, plan, trained_tensors, verify
from compress.storage.checkpoint import MANIFEST, open_checkpoint
from compress.tune import descend, low_rank
from compress.types import Correction
from helpers.pico import save_pico
from helpers.runs import GPTQ, contents, job, report_of, stored_tensors

TOKENS = torch.randint(256, (6, 32), generator=torch.Generator().manual_seed(1))
PART = ("bits=2", "calibration.num_samples=6", "calibration.seq_len=32")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a packed one with low-rank parts."""
    folder = tmp_path_factory.mktemp("made")
    model = save_pico("llama", folder / "model")
    api.quantize(job(model, GPTQ.set(*PART, "lowrank={rank: 4}"), folder / "packed"))
    return model, folder / "packed"


def names(directory: Path) -> frozenset[str]:
    return frozenset(row["name"] for row in report_of(directory)["layers"])


def copied(directory: Path, out: Path) -> Path:
    out.mkdir()
    for file in directory.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


def trained(
    directory: Path, model: Path, tokens: Tensor, asked: low_rank.LowRankRequest, *more: Any
) -> low_rank.LowRankResult:
    """Train a checkpoint, and write what is better into its shards."""
    before = contents(directory)
    result, factors = low_rank.train_model(directory, model, tokens, asked, *more)
    assert contents(directory) == before and bool(factors) == result.improved
    for path in sorted(directory.glob("*.safetensors")):
        trained_tensors.write_into(path, factors)
    (directory / MANIFEST).unlink(missing_ok=True)  # whose hashes are those of the shards before
    return result


def kl(model: Path, packed: Path, tokens: Tensor) -> float:
    original, other = (lm.load_model(path, "float32")(input_ids=tokens).logits.double() for path in (model, packed))
    p, q = original.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_the_whole_model_comes_nearer_to_the_original(made: tuple[Path, Path], tmp_path: Path) -> None:
    model, packed = made
    out = copied(packed, tmp_path / "out")
    said: list[str] = []
    asked = low_rank.LowRankRequest(40, 3e-3, names(packed))
    result = trained(out, model, TOKENS.repeat(2, 1), asked, "cpu", said.append)
    assert (
        result.improved
        and result.after < 0.8 * result.before
        and result.parameters
        == sum(tensor.numel() for name, tensor in stored_tensors(packed).items() if "lowrank_" in name)
    )
    assert result.before == pytest.approx(kl(model, packed, TOKENS[-1:]), rel=1e-4)
    assert result.after == pytest.approx(kl(model, out, TOKENS[-1:]), rel=1e-4)
    assert len(said) == 40 and said[-1] == "training low-rank parts, step 40 of 40"
    before, after = stored_tensors(packed), stored_tensors(out)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if "lowrank_" in name}
    assert all(after[name].dtype == before[name].dtype for name in before)


def test_only_the_asked_parts_and_only_if_it_is_better(made: tuple[Path, Path], tmp_path: Path) -> None:
    model, packed = made
    one = frozenset({"model.layers.1.mlp.down_proj"})
    out = copied(packed, tmp_path / "out")
    assert trained(
        out, model, TOKENS.repeat(2, 1), low_rank.LowRankRequest(20, 3e-3, one), "cpu", lambda _: None
    ).improved
    before, after = stored_tensors(packed), stored_tensors(out)
    changed = {name.rsplit(".", 1)[0] for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == one
    worse = copied(packed, tmp_path / "worse")
    result = trained(worse, model, TOKENS, low_rank.LowRankRequest(8, 3.0, names(packed)), "cpu", lambda _: None)
    assert not result.improved and "no better, so the parts stay as they were" in result.note
    assert contents(worse) == contents(packed)


def test_the_same_again(made: tuple[Path, Path], tmp_path: Path) -> None:
    model, packed = made
    asked = low_rank.LowRankRequest(5, 1e-3, names(packed))
    outs = [copied(packed, tmp_path / name) for name in "ab"]
    for out in outs:
        trained(out, model, TOKENS, asked, "cpu", lambda _: None)
    assert contents(outs[0]) == contents(outs[1])


def test_a_run_trains_and_says_so(made: tuple[Path, Path], tmp_path: Path) -> None:
    model, packed = made
    out = tmp_path / "out"
    settings = "{rank: 4, train: 30, train_blocks: 40, train_rate: 3e-3}"
    api.quantize(job(model, GPTQ.set(*PART, "calibration.num_samples=12", f"lowrank={settings}"), out))
    notes = report_of(out)["notes"]
    text = str(notes)
    assert "low-rank parts (" in text and "trained for 30 steps" in text and text.count("error of the block") == 2
    verify.verify(out)
    compress.load(out)
    held = TOKENS % 128
    assert kl(model, out, held) < kl(model, packed, held)


def test_a_block_comes_nearer_to_what_it_gave(made: tuple[Path, Path]) -> None:
    model, packed = made
    original, other = (lm.load_model(path, "float32") for path in (model, packed))
    caught: list[tuple[Tensor, BlockArgs]] = []

    def catch(_: object, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> None:
        caught.append((args[0].detach(), BlockArgs(args[1:], kwargs)))

    hook = original.model.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    original(input_ids=TOKENS, use_cache=False)
    hook.remove()
    block, student = original.model.layers[0], other.model.layers[0]
    kept = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    layers = {name: m.packed() for name, m in student.named_modules() if hasattr(m, "packed")}
    settings = dict.fromkeys(layers, Correction(4, train_blocks=60, train_rate=3e-3))
    trained, note = low_rank.train_block(block, layers, settings, lambda: caught)
    assert note is not None and "no better" not in note
    before, after = (float(word) for word in note.split("block ")[1].split(" -> "))
    assert after < 0.8 * before
    assert all(torch.equal(tensor, kept[name]) for name, tensor in block.state_dict().items())
    for name, weight in trained.items():
        changed = {key for key, tensor in weight.tensors.items() if not torch.equal(tensor, layers[name].tensors[key])}
        assert changed == {"lowrank_a", "lowrank_b"}
    same, nothing = low_rank.train_block(block, layers, dict.fromkeys(layers, Correction(4)), lambda: caught)
    assert nothing is None and same == layers


def test_settings() -> None:
    assert low_rank.find_request({"a": None, "b": Correction(4)}) is None
    settings = {"a": Correction(4, train=3), "b": Correction(4), "c": Correction(4, train=7, train_rate=0.1)}
    assert low_rank.find_request(settings) == low_rank.LowRankRequest(7, 0.1, frozenset("ac"))
    with pytest.raises(RecipeError, match="bits 8 of a low-rank factor cannot be trained; set bits: 16"):
        load("int4", ["lowrank={rank: 4, bits: 8, train: 10}"])
    with pytest.raises(RecipeError, match="train -1"):
        load("int4", ["lowrank={rank: 4, train: -1}"])


def test_a_loss_that_is_not_finite_is_one_clear_line() -> None:
    with pytest.raises(NumericalError, match=r"is nan at step 1; lower its rate: train_rate"):
        descend.descend([torch.nn.Parameter(torch.ones(1))], 3, 1.0, lambda _: float("nan"))


def test_the_memory_of_training_is_predicted(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "resident", lambda: 0)
    monkeypatch.setattr(memory_plan, "TOKENIZING_NBYTES", 0)
    skeleton = Skeleton(open_checkpoint(made[0]))

    def peak(lowrank: str, samples: int = 6) -> int:
        planned = plan.make(GPTQ.set(*PART, f"lowrank={lowrank}").load(), skeleton)
        return memory_plan.arrange(planned, skeleton, samples, 32, 1 << 40).peak_nbytes

    alone, blocks, whole = (peak(f"{{rank: 4{more}}}") for more in ("", ", train_blocks: 5", ", train: 5"))
    assert (
        alone + memory_plan.TRAINING_NBYTES < blocks < alone + 1.2 * memory_plan.TRAINING_NBYTES
    )  # all else is small here
    planned = plan.make(GPTQ.set(*PART, "lowrank={rank: 4}").load(), skeleton)
    linears = sum(layer.spec.numel for layer in planned.layers)
    parameters = linears + sum(nbytes for name, nbytes in planned.kept_nbytes.items()) // 4
    trained = 4 * sum(sum(layer.spec.shape) for layer in planned.layers)
    states = sum(sum(layer.spec.shape) for layer in planned.layers) + 2 * 12 * 64
    sizes = low_rank.TrainingSizes(parameters, linears, planned.quantized_nbytes, trained, 264, states)
    assert sizes.trained == sum(t.numel() for name, t in stored_tensors(made[1]).items() if "lowrank_" in name)
    tokenizer = sum(path.stat().st_size for path in made[0].glob("tokenizer*"))
    kept = memory_plan.KEPT_NBYTES + memory_plan.TOKENIZER_KEPT_FACTOR * tokenizer + 8 * 6 * 32
    assert whole == memory_plan.SLACK_NBYTES + kept + int(
        memory_plan.MARGIN_FACTOR * (memory_plan.TRAINING_NBYTES + low_rank.whole_workspace(sizes, 32))
    )
    models = 4 * (2 * parameters - linears) + sizes.packed + 4 * linears
    assert low_rank.whole_workspace(sizes, 32) == models + 1024 * 4 * (states + 5 * 264) + 16 * trained
    assert peak("{rank: 4, metric: fisher}") >= alone
