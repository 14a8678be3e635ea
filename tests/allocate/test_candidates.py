"""Joint divergences: against whole models with the weights copied in, and the same however they are computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress.allocate import joint_kl, memory_split, prefix_tree
from compress.allocate.joint_kl import JointKL
from compress.allocate.memory_split import MemorySplit
from compress.allocate.prefix_tree import Resources
from compress.calib import reference_logprobs
from compress.errors import BudgetError, NumericalError
from compress.model import towers
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import open_checkpoint
from compress.transform import rotate

SAMPLES, LENGTH = 5, 12
TOKENS = torch.randint(0, 256, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")
KEPT = MemorySplit(True, 1 << 30, 1 << 30)
ALL = Resources(top_k=1 << 20, memory=KEPT)
EXACT = Resources(top_k=1 << 20, memory=KEPT, dtype="auto")


class Rounded:
    """A level is a number of bits; each row is rounded to nearest. Counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def weight(self, name: str, level: Any, original: Tensor) -> Tensor:
        self.count += 1
        scale = original.abs().amax(1, keepdim=True) / 2 ** (level - 1)
        return (original / scale).round() * scale


def source(directory: Path, levels: Any = None) -> tuple[Skeleton, Any]:
    return Skeleton(open_checkpoint(directory)), levels or Rounded()


def linears(directory: Path) -> list[str]:
    return [spec.name for spec in source(directory)[0].linears()[0]]


def everything(directory: Path) -> list[str]:
    """Linears, token embeddings and output head."""
    return [*linears(directory), *(table.spec.name for table in towers.find_tables(source(directory)[0]))]


def assignments(names: Sequence[str], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Of every kind: random ones, some that agree in the first block, equal ones, the original."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = [{name: draw.choice([None, 2, 3, 4]) for name in names} for _ in range(count - 3)]
    found.append({**found[0], names[-1]: 5})
    return [*found, dict(reversed(found[1].items())), {}]


def changed(model: Any, assignment: Mapping[str, Any]) -> None:
    """Copy the weights of an assignment into a whole model."""
    for name, level in assignment.items():
        if level is None:
            continue
        path, _, projection = name.rpartition(".")
        if ".experts." in name:
            fused = model.get_submodule(path.rpartition(".")[0])
            number, width = int(path.rpartition(".")[2]), fused.gate_up_proj.shape[1] // 2
            views = {
                "gate_proj": fused.gate_up_proj[number, :width],
                "up_proj": fused.gate_up_proj[number, width:],
                "down_proj": fused.down_proj[number],
            }
            weight = views[projection]
        else:
            weight = model.get_submodule(name).weight
        weight.data.copy_(Rounded().weight(name, level, weight.data.clone()))


@torch.no_grad()
def reference(directory: Path, assignment: Mapping[str, Any], top_k: int | None = None) -> Tensor:
    """KL of every sample, exact; or with all but the original's top_k outcomes put together."""
    load = partial(AutoModelForCausalLM.from_pretrained, directory, dtype="auto", experts_implementation="eager")
    original: Any = load()
    other: Any = load()
    changed(other, assignment)
    p, q = (model(TOKENS).logits.double().softmax(-1) for model in (original, other))
    if top_k is not None:
        ids = p.topk(top_k).indices
        p, q = (torch.cat((x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)), -1) for x in (p, q))
    return (p * (p / q).log()).sum(-1).mean(-1)


def of(directory: Path, folder: Path, means: Resources = ALL) -> JointKL:
    folder.mkdir(exist_ok=True)
    return JointKL(partial(source, directory), TOKENS, folder, means)


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "gpt_neox"])
def test_against_whole_models(name: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """In float64, where nothing but the teacher's float32 log-probabilities is rounded; and in float32."""
    exact, plain = pico_dir(name, dtype=torch.float64), pico_dir(name)
    names = everything(exact)
    assert len(names) == len(linears(exact)) + (1 if name == "llama_tied" else 2)
    assert name != "mixtral" or "model.layers.0.mlp.experts.3.up_proj" in names
    asked = [*assignments(names, 5), {names[-2]: 8}]
    for directory, close, means in ((plain, 1e-4, ALL), (exact, 1e-6, EXACT)):
        with of(directory, tmp_path / means.dtype, means) as mine:
            found = mine.per_sample(asked, range(SAMPLES))
        for row, assignment in zip(found, asked, strict=True):
            assert torch.allclose(row, reference(directory, assignment), rtol=close, atol=1e-9)
        assert found[0].min() > 0.01 and (found >= 0).all()
    with of(exact, tmp_path / "part", Resources(top_k=64, memory=KEPT, dtype="auto")) as mine:
        part = mine.per_sample(asked, range(SAMPLES))
    for row, whole, assignment in zip(part, found, asked, strict=True):
        assert torch.allclose(row, reference(exact, assignment, 64), rtol=1e-5, atol=1e-9)
        assert (row <= whole + 1e-6).all()
    assert (part[:3] > found[:3] / 2).all(), "random models are nearly undecided: much is in the rest"


def test_a_model_that_is_not_changed(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    with of(pico_dir("llama"), tmp_path) as mine:
        assert mine.divergence([{}, dict.fromkeys(linears(pico_dir("llama")))], [3, 0]) == pytest.approx(
            [0, 0], abs=1e-12
        )
        assert mine.forwards == 2 * LENGTH


def test_a_rotated_model(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Edits apply to candidates and to the output head, not to the original that they are compared with."""

    def rotated() -> tuple[Skeleton, Any]:
        skeleton, levels = source(pico_dir("llama_tied", dtype=torch.float64))
        skeleton.edits = rotate.apply(skeleton, rotate.Config(), 0)
        skeleton.edits.begin(CPU)
        return skeleton, levels

    name = linears(pico_dir("llama_tied"))[0]
    for room in (KEPT, MemorySplit(False, 0, 0)):
        with JointKL(rotated, TOKENS, tmp_path, Resources(memory=room, dtype="auto")) as mine:
            same, other = mine.divergence([{}, {name: 2}], range(SAMPLES))
        with of(pico_dir("llama_tied", dtype=torch.float64), tmp_path, Resources(memory=room, dtype="auto")) as plain:
            (before,) = plain.divergence([{name: 2}], range(SAMPLES))
        assert 0 <= same < 1e-9 and other > 1e-3
        assert other != pytest.approx(before, rel=1e-3), "rounded in another basis"


def test_the_type_that_blocks_compute_in(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """In bfloat16 the smallest change moves all roundings that follow; float32 goes down with the change."""
    directory = pico_dir("llama_tied", dtype=torch.bfloat16)
    skeleton, levels = source(directory)
    name, found = linears(directory)[0], {}
    levels.weight = lambda name, level, original: original * (1 + 2**-level)
    parameters = {key: p.dtype for key, p in skeleton.model.named_parameters(remove_duplicate=False)}
    for dtype in ("auto", "float32", "float64"):
        folder = tmp_path / dtype
        folder.mkdir()
        with JointKL(lambda: (skeleton, levels), TOKENS, folder, Resources(top_k=300, dtype=dtype)) as mine:
            assert str(mine.evaluator.skeleton.dtype) == f"torch.{'bfloat16' if dtype == 'auto' else dtype}"
            found[dtype] = mine.divergence([{name: 7}, {name: 9}], range(SAMPLES))
        assert skeleton.dtype == torch.bfloat16
        assert {key: p.dtype for key, p in skeleton.model.named_parameters(remove_duplicate=False)} == parameters
        assert all(p.is_meta for p in skeleton.model.parameters())
        assert skeleton.model.lm_head.weight is skeleton.model.model.embed_tokens.weight
    assert found["float32"] == pytest.approx(found["float64"], rel=1e-3)
    assert found["float32"][0] / found["float32"][1] == pytest.approx(16, rel=0.1)
    assert found["auto"][0] > 2 * found["float32"][0]
    with pytest.raises(ValueError, match="dtype 'int8' is not one of auto, float32"):
        Resources(dtype="int8")


def test_what_is_prepared_counts_as_original(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    class Doubled(Rounded):
        prepared: list[int] = []

        def prepare(self, index: int, block: nn.Module) -> None:
            self.prepared.append(index)
            for parameter in block.parameters():
                if parameter.dim() == 2:
                    parameter.data.mul_(2)

    (seen, levels), name = ([], Doubled()), linears(pico_dir("llama"))[0]

    def weight(name: str, level: Any, original: Tensor) -> Tensor:
        seen.append(original.clone())
        return original / 2

    levels.weight = weight  # type: ignore[method-assign]
    with JointKL(partial(source, pico_dir("llama"), levels), TOKENS, tmp_path, ALL) as mine:
        first = mine.divergence([{}, {name: None}], [0])
        assert first[0] > 0.01 and first == mine.divergence([{name: None}, {}], [0])
        mine.divergence([{name: 1}], [0])
    assert levels.prepared == [0, 1]
    stored: Any = AutoModelForCausalLM.from_pretrained(pico_dir("llama"))
    assert torch.equal(seen[0], 2 * stored.get_submodule(name).weight)


# ---------------------------------------------------------------- the same however it is computed


def test_any_order_any_company_any_memory(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = pico_dir("mixtral")
    asked = assignments(everything(directory), 7)
    with of(directory, tmp_path) as mine:
        whole = mine.per_sample(asked, range(SAMPLES))
        assert torch.equal(whole[1], whole[-2]) and len(set(whole[:, 0].tolist())) == 6
        for rows, columns in (([6, 2, 2, 5], [4, 0, 1]), ([3], [2]), (range(7), [3, 2, 1])):
            found = mine.per_sample([asked[row] for row in rows], columns)
            assert torch.equal(found, whole[list(rows)][:, list(columns)])
        means = mine.divergence(asked, [3, 1])
        assert means == mine.divergence(asked, [1, 3])
        assert means == pytest.approx(((whole[:, 1] + whole[:, 3]) / 2).tolist(), rel=1e-15)
    sample = LENGTH * 64 * 4
    for room in (
        MemorySplit(False, 0, 0),  # everything in files
        MemorySplit(False, 1 << 30, 2 * SAMPLES * sample),  # two of six
        MemorySplit(True, 0, 13 * sample),  # two samples at a time
        MemorySplit(True, 1 << 14, 1),
    ):
        with of(directory, tmp_path, Resources(top_k=1 << 20, memory=room)) as mine:
            assert torch.equal(mine.per_sample(asked, range(SAMPLES)), whole)
            if not room.keeps:
                assert all(p.is_meta for p in mine.evaluator.skeleton.model.parameters())
    assert [file.name for file in tmp_path.iterdir()] == [reference_logprobs.STORE_FILE]


@pytest.mark.slow
def test_any_number_of_processes(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = pico_dir("llama")
    asked = assignments(everything(directory), 6)
    before = torch.get_num_threads()
    with of(directory, tmp_path) as mine:
        whole, one = mine.per_sample(asked, range(SAMPLES)), mine.per_sample(asked[:3], [4])
        forwards = mine.forwards
    torch.set_num_threads(2)
    try:
        with of(directory, tmp_path, Resources(top_k=1 << 20, processes=2, memory=KEPT)) as mine:
            assert torch.equal(mine.per_sample(asked, range(SAMPLES)), whole)
            assert torch.equal(mine.per_sample(asked[:3], [4]), one)
            assert mine.forwards == forwards
            with pytest.raises(NumericalError, match="layers.1 is not finite"):
                mine.divergence([{linears(directory)[-1]: -1100}], [0])
        with of(directory, tmp_path) as mine:
            assert torch.equal(mine.per_sample(asked, range(SAMPLES)), whole)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- what it costs


def test_what_is_shared_is_computed_once(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = pico_dir("llama")
    names = linears(directory)
    late = [name for name in names if ".1." in name]
    asked = [{}, {late[0]: 2}, {late[0]: 3}, {late[1]: 2}, {names[0]: 2}, {names[0]: 2, late[0]: 2}, {late[0]: 2}]
    levels, runs, loads = Rounded(), [], []
    real, load = prefix_tree.blockwise.run_block, Skeleton.load_block

    def counted(block: Any, call: Any, hidden: Tensor, name: str) -> Tensor:
        runs.append(hidden.shape[0])
        return real(block, call, hidden, name)

    def loading(self: Skeleton, index: int, device: torch.device) -> nn.Module:
        loads.append(index)
        return load(self, index, device)

    with JointKL(partial(source, directory, levels), TOKENS, tmp_path, ALL) as mine:
        mine.divergence([{}], [0])  # the teacher's own passes
        monkeypatch.setattr(prefix_tree.blockwise, "run_block", counted)
        monkeypatch.setattr(Skeleton, "load_block", loading)
        mine.forwards = 0
        mine.divergence(asked, [0, 1, 4])
        assert sum(runs) == 3 * (2 + 6)
        assert mine.forwards == 3 * LENGTH * (2 + 6) / 2
        assert levels.count == 4 and loads == []
        mine.divergence(asked, [2])
        assert levels.count == 4, "decoded once"
        runs.clear()
        embeddings, head = everything(directory)[-2:]
        mine.divergence([{}, {head: 2}, {head: 3}, {embeddings: 2}], [0])
        assert sum(runs) == 2 * 2, "heads share all blocks, other embeddings none"
    levels.count = 0
    loads.clear()
    with JointKL(
        partial(source, directory, levels), TOKENS, tmp_path, Resources(top_k=1 << 20, memory=MemorySplit(False, 0, 0))
    ) as mine:
        mine.divergence(asked, range(SAMPLES))
    assert loads == [0, 1] and levels.count == 4, "each block is loaded once, each part of it decoded once"


def test_room(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    skeleton = source(pico_dir("llama"))[0]
    needed = memory_split.sizes(skeleton, LENGTH, 8, 4)
    assert needed.whole == sum(p.numel() for p in skeleton.model.parameters()) * 4 < needed.all_loaded
    rest, room = needed.whole, needed.all_loaded + needed.whole
    assert MemorySplit.within(needed, needed.all_loaded + rest) == MemorySplit(True, rest // 2, rest // 3)
    tight = MemorySplit.within(needed, needed.all_loaded + rest - 1)
    assert not tight.keeps and tight.states > rest // 3
    assert MemorySplit.within(needed, needed.least) == MemorySplit(False, 0, 0)
    with pytest.raises(BudgetError, match="at least"):
        MemorySplit.within(needed, needed.least - 1)
    half = Skeleton(open_checkpoint(pico_dir("llama", dtype=torch.bfloat16)))
    with pytest.raises(BudgetError, match="at least"):
        JointKL(lambda: (half, Rounded()), TOKENS, tmp_path, Resources(max_memory=1 << 16))
    assert half.dtype == torch.bfloat16
    with pytest.raises(BudgetError, match="at least .* beside the program"):
        of(pico_dir("llama"), tmp_path, Resources(max_memory=1 << 16))
    assert not list(tmp_path.iterdir())
    with of(pico_dir("llama"), tmp_path, Resources(max_memory=2 * room, processes=2)) as mine:
        assert mine.evaluator.memory.keeps


@pytest.mark.parametrize(("paths", "samples", "processes"), [(1, 1, 1), (7, 5, 2), (7, 2, 8), (3, 1, 4), (1, 1, 4)])
def test_shares_are_everything_once(paths: int, samples: int, processes: int) -> None:
    seen = torch.zeros(paths, samples)
    parts = joint_kl.shares(paths, samples, processes)
    for rows, columns in parts:
        assert seen[rows, columns].numel()
        seen[rows, columns] += 1
    assert (seen == 1).all() and len(parts) <= 2 * processes
    assert len(parts) >= min(processes, paths * samples)


def test_what_cannot_be_asked(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    with of(pico_dir("llama"), tmp_path) as mine:
        for samples in ([], [0, 0], [SAMPLES], [-1]):
            with pytest.raises(ValueError, match="samples are some of 0 to 4"):
                mine.divergence([{}], samples)
        for name in ("model.norm", "model.layers.2.mlp.up_proj", "model.layers.x.mlp.up_proj"):
            with pytest.raises(ValueError, match="is no linear of the blocks"):
                mine.divergence([{name: 2}], [0])
        bad = Rounded()
        bad.weight = lambda name, level, original: original.double()  # type: ignore[method-assign]
        mine.evaluator.decoded.variants = bad
        with pytest.raises(ValueError, match="float64, not "):
            mine.divergence([{linears(pico_dir("llama"))[0]: 2}], [0])
        assert mine.divergence([{}], [0])[0] < 1e-12, "all is as before"
    with pytest.raises(ValueError, match="processes 0 is less than 1"):
        Resources(processes=0)
