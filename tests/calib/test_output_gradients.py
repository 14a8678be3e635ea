"""Gradients at the outputs of linears: those of torch's own backward pass, in any basis, from a folder."""

from __future__ import annotations

import fcntl
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import ranks
from compress.calib import gradient_pass, output_gradients
from compress.calib.backward_pass import LOSS_SCALE, BackwardPass, linear_widths
from compress.calib.gradient_store import GradientStore
from compress.calib.output_gradients import (
    REGULARIZATION,
    BlockOutputs,
    GradientRows,
    OutputGradients,
    SampledLabels,
    reduce_rows,
)
from compress.errors import CheckpointError, OutputError
from compress.model.skeleton import Skeleton
from compress.numerics import products
from compress.storage.checkpoint import open_checkpoint
from helpers import forked
from helpers.pico import save_pico

TOKENS = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(0))
SEED = 5
BOOKS = Path(__file__).parents[1] / "models" / "books-8m"


def store_of(skeleton: Skeleton, folder: Path, **identity: str) -> GradientStore:
    return GradientStore(folder, identity, linear_widths(skeleton))


def made(directory: Path, folder: Path, tokens: Tensor = TOKENS) -> tuple[Skeleton, GradientStore]:
    skeleton = Skeleton(open_checkpoint(directory))
    store = store_of(skeleton, folder)
    gradient_pass.make(skeleton, tokens, store, SEED)
    return skeleton, store


def reference(directory: Path, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    """Module -> gradients [tokens, out] float64 of torch's own backward pass of the whole model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    labels, seen = SampledLabels(tokens.shape[1], SEED), dict[str, list[Tensor]]()

    def watch(name: str, module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: seen.setdefault(name, []).append(gradient.flatten(0, -2)))

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(partial(watch, name))
    for sample, ids in enumerate(tokens):
        logits = model(input_ids=ids[None]).logits[0]
        drawn = labels.draw(sample, slice(None), logits.detach().float().softmax(-1))
        (torch.nn.functional.cross_entropy(logits, drawn) * LOSS_SCALE).backward()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def test_gradients_are_those_of_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_fast", lambda dtype: False)
    directory = save_pico("llama", tmp_path / "m")
    skeleton, store = made(directory, tmp_path / "gradients")
    wanted = reference(directory)
    kinds = set()
    for index, linears in enumerate(store.linears):
        block = store.read(index)
        for name, width in linears.items():
            gradients, rows = block.of(name), wanted[name]
            assert gradients.count == TOKENS.numel() and gradients.width == width
            kinds.add(type(gradients.gradients))
            moment = rows.T @ rows
            scaled = moment / moment.diagonal().mean()
            error = gradients.metric(slice(None), damp=0.0).double() - scaled
            assert error.abs().max() < 2e-3 * scaled.diagonal().max()
    assert kinds == {GradientRows, Tensor}
    assert all(p.is_meta for p in skeleton.model.parameters())


@pytest.mark.parametrize("is_fast", [False, True])
def test_gradients_in_bfloat16_are_near_those_in_float64(
    is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trained model, with the same labels for both; bfloat16 has 8 bits, and errors of tokens even out in G."""

    def draw(self: SampledLabels, sample: int, part: slice, probabilities: Tensor) -> Tensor:
        places = torch.arange(self.positions)[part]
        return (31 * places + 7 * sample) % probabilities.shape[1]

    torch.set_num_threads(1)  # processes are forked later, and those threads would be missing there
    monkeypatch.setattr(SampledLabels, "draw", draw)
    monkeypatch.setattr(products, "is_fast", lambda dtype: is_fast)
    _, store = made(BOOKS, tmp_path / "gradients")
    wanted, errors = reference(BOOKS), []
    for index, linears in enumerate(store.linears):
        block = store.read(index)
        for name in linears:
            moment = wanted[name].T @ wanted[name]
            scaled = moment / moment.diagonal().mean()
            error = block.of(name).metric(slice(None), damp=0.0).double() - scaled
            errors.append((error.norm() / scaled.norm()).item())
    largest = max(errors)
    assert largest < (0.05 if is_fast else 1e-3), largest
    assert (largest > 1e-3) is is_fast  # what is computed in bfloat16 has its errors


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_experts_count_their_own_tokens(tmp_path: Path) -> None:
    skeleton, store = made(save_pico("mixtral", tmp_path / "m"), tmp_path / "gradients")
    experts = [spec for spec in skeleton.linears()[0] if spec.is_expert and spec.name.endswith("down_proj")]
    per_token = skeleton.config.num_experts_per_tok
    for index in range(len(store.linears)):
        counts = [store.read(index).of(spec.name).count for spec in experts if spec.block == index]
        assert sum(counts) == TOKENS.numel() * per_token and max(counts) < TOKENS.numel()


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    """Also where there are fewer samples than processes."""
    torch.set_num_threads(1)
    for name in ("llama", "mixtral"):
        directory = save_pico(name, tmp_path / name)

        def work(folder: Path, directory: Path = directory) -> None:
            torch.set_num_threads(1)
            with ranks.joined("cpu"):
                made(directory, folder, TOKENS[:2])

        work(tmp_path / f"{name}1")
        for processes in (2, 3):
            folder = tmp_path / f"{name}{processes}"
            assert forked.together(processes, partial(work, folder)) == [0] * processes
            assert contents(folder) == contents(tmp_path / f"{name}1")


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_a_killed_pass_goes_on(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when a file is put in place: finished blocks are not passed backward again, and the bytes are the same."""
    directory = save_pico("llama", tmp_path / "m")
    made(directory, tmp_path / "whole")
    replace, calls, passed = os.replace, 0, list[int]()

    def kill(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        replace(*given)

    folder = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        if call <= 5:  # two blocks, one of them with the gradient in front of it, and the list of files twice
            with pytest.raises(KeyboardInterrupt):
                made(directory, folder)
        else:
            made(directory, folder)
    real = BackwardPass._go_back

    def note(way: BackwardPass, index: int, take: Any) -> Any:
        passed.append(index)
        return real(way, index, take)

    monkeypatch.setattr(BackwardPass, "_go_back", note)
    _, store = made(directory, folder)
    assert passed == {1: [1, 0], 2: [1, 0], 3: [1, 0], 4: [0], 5: [0], 6: []}[call]
    assert contents(folder) == contents(tmp_path / "whole")
    assert store.remaining() == 0


def test_what_is_there_is_read_and_what_is_not_ours_is_made_anew(tmp_path: Path) -> None:
    directory, folder = save_pico("llama", tmp_path / "m"), tmp_path / "gradients"
    skeleton, store = made(directory, folder)
    before = contents(folder)
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    made(directory, folder)
    assert stamps == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert store_of(skeleton, folder, model="another").remaining() == len(store.linears)
    for damage in (lambda raw: b"", lambda raw: raw[:-5], lambda raw: b"garbage"):
        (folder / "00001.safetensors").write_bytes(damage(before["00001.safetensors"]))
        assert store.remaining() == len(store.linears)
    for name in ("gradients.json", "00000.safetensors"):
        (folder / name).unlink()
        made(directory, folder)
        assert contents(folder) == before
    for left in ("00001.safetensors.part", "behind-00001.safetensors"):
        (folder / left).touch()
    made(directory, folder)
    assert contents(folder) == before
    (folder / "gradients.json").write_text("[]")
    assert store.remaining() == len(store.linears)


def test_a_changed_byte_is_one_line(tmp_path: Path) -> None:
    directory, folder = save_pico("llama", tmp_path / "m"), tmp_path / "gradients"
    _, store = made(directory, folder)
    before = contents(folder)
    raw = bytearray(before["00001.safetensors"])
    raw[-1] ^= 1
    (folder / "00001.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"00001.safetensors was damaged or gone; run the same command again"):
        store.read(1)
    made(directory, folder)
    assert contents(folder) == before


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "gradients").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError):
        made(save_pico("llama", tmp_path / "m"), tmp_path / "gradients")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_that_waits_for_another_says_so(tmp_path: Path) -> None:
    skeleton = Skeleton(open_checkpoint(save_pico("llama", tmp_path / "m")))
    store, said = store_of(skeleton, tmp_path / "gradients"), list[str]()
    (tmp_path / "gradients").mkdir()
    with (tmp_path / "gradients" / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def end_other(text: str) -> None:
            said.append(text)
            fcntl.flock(other, fcntl.LOCK_UN)

        with store.hold(end_other):
            pass
    with store.hold(said.append):
        pass
    assert said == [f"waiting for another run, which takes output gradients in {store.folder}"]


def test_too_little_space_is_one_line(tmp_path: Path) -> None:
    store = store_of(Skeleton(open_checkpoint(save_pico("llama", tmp_path / "m"))), tmp_path / "gradients")
    line = r"the disk of .* free, output gradients need .*; .* give another --measurements, or set two_sided: false$"
    with pytest.raises(OutputError, match=line):
        store.check_space(1 << 60)


def gradients_of(tokens: int, width: int) -> tuple[Tensor, OutputGradients]:
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, width, generator=generator) * torch.logspace(-9, 3, tokens)[:, None]
    return rows.double(), OutputGradients(tokens, reduce_rows(GradientRows.of(rows)))


@pytest.mark.parametrize("tokens", [40, 100])
def test_another_basis(tokens: int) -> None:
    """Of gradients and of their moment alike; against float64."""
    rows, gradients = gradients_of(tokens, 64)
    assert isinstance(gradients.gradients, GradientRows) == (tokens == 40)
    change = torch.randn(64, 80, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = (rows @ change).T @ (rows @ change)
    wanted = wanted / wanted.diagonal().mean()
    moment = gradients.in_basis(lambda g: g @ change.float())
    top = wanted.abs().max()
    assert (moment.block(slice(None), 0.0) - wanted).abs().max() < 2e-3 * top
    assert (moment.diagonal() - wanted.diagonal()).abs().max() < 2e-3 * top
    part = moment.block(slice(16, 48))
    assert torch.equal(part, part.T)
    expected = wanted[16:48, 16:48] + REGULARIZATION * torch.eye(32, dtype=torch.float64)
    assert (part - expected).abs().max() < 2e-3 * top
    assert torch.linalg.eigvalsh(moment.block(slice(None)).double()).min() > 0.9 * REGULARIZATION


def test_few_tokens_count_less_and_none_at_all_give_the_identity() -> None:
    for tokens, times in ((40, 1.0), (8, 1.0), (4, 2.0), (1, 8.0)):
        moment = gradients_of(tokens, 64)[1].in_basis()
        assert moment.damp() == pytest.approx(times * REGULARIZATION)
    for nothing in (torch.zeros(0, 64), torch.zeros(5, 64), torch.zeros(70, 64)):
        gradients = OutputGradients(len(nothing), reduce_rows(GradientRows.of(nothing)))
        moment = gradients.in_basis(lambda rows: rows / (len(rows) > 0))
        assert torch.equal(moment.block(slice(8, 24)), torch.eye(16)) and torch.equal(moment.diagonal(), torch.ones(64))


def test_labels_are_drawn_from_the_predictions_whatever_the_parts() -> None:
    logits = torch.randn(6000, 5, generator=torch.Generator().manual_seed(0))
    logits[:, 2] = -torch.inf
    logits[:, :] = logits[0].clone()
    labels, predictions = SampledLabels(6000, SEED), logits.softmax(-1)
    drawn = labels.draw(3, slice(None), predictions)
    assert torch.equal(
        torch.cat([labels.draw(3, slice(i, i + 700), predictions[i : i + 700]) for i in range(0, 6000, 700)]), drawn
    )
    assert torch.equal(SampledLabels(6000, SEED, first=2).draw(1, slice(None), predictions), drawn)
    for other in (
        labels.draw(2, slice(None), predictions),
        SampledLabels(6000, SEED + 1).draw(3, slice(None), predictions),
    ):
        assert not torch.equal(other, drawn)
    shares, wanted = torch.bincount(drawn, minlength=5) / 6000, predictions[0]
    assert (shares - wanted).abs().max() < 5 * (0.25 / 6000) ** 0.5 and shares[2] == 0


@pytest.mark.parametrize("factor", [float("inf"), 1e25])  # the squares of the second overflow
def test_gradients_that_are_not_finite(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BackwardPass._of_loss
    monkeypatch.setattr(BackwardPass, "_of_loss", lambda *given: real(*given) * factor)
    _, store = made(save_pico("llama", tmp_path / "m"), tmp_path / "gradients")
    assert store.failure is not None
    assert re.match(r"the gradient at the outputs of model\.layers\.1.* is not finite", store.failure)


def test_all_processes_hear_of_a_failure_of_one(tmp_path: Path) -> None:
    directory = save_pico("llama", tmp_path / "m")

    def work() -> None:
        torch.set_num_threads(1)
        with ranks.joined("cpu") as joined:
            if joined.rank:
                BlockOutputs.pull_back = fail  # type: ignore[method-assign]
            _, store = made(directory, tmp_path / "gradients", TOKENS[:2])
            assert store.failure == "no derivative"

    def fail(*given: Any) -> torch.Tensor:
        raise RuntimeError("no derivative")

    assert forked.together(2, work) == [0, 0]


@pytest.mark.parametrize("entries", [1, 2, 5, 16, 1000])
def test_entries_are_drawn_where_the_running_sum_passes_a_share(entries: int) -> None:
    generator = torch.Generator().manual_seed(entries)
    probabilities = torch.randn(200, entries, generator=generator).mul(3).softmax(-1)
    probabilities[:, ::3] *= (torch.rand(200, 1, generator=generator) > 0.5).float()  # some are never drawn
    shares = torch.rand(200, 1, generator=generator, dtype=torch.float64)
    sums = probabilities.double().cumsum(1)
    expected = torch.searchsorted(sums, shares * sums[:, -1:], right=True)[:, 0].clamp(max=entries - 1)
    assert torch.equal(output_gradients.draw_entries(probabilities, shares), expected)


def test_the_loss_has_the_gradient_of_the_cross_entropy() -> None:
    labels = output_gradients.SampledLabels(12, seed=3)
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(1)).mul_(2).requires_grad_()
    loss = labels(0, slice(0, 12), logits)
    drawn = labels.draw(0, slice(0, 12), logits.detach().softmax(-1))
    known = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
    torch.testing.assert_close(loss, known)
    torch.testing.assert_close(torch.autograd.grad(loss * 3, logits)[0], 3 * torch.autograd.grad(known, logits)[0])
