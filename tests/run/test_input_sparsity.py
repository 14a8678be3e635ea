"""Thresholds and shares of activation sparsity, and a checkpoint from the recipe to the text that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compress import api
from compress.errors import RecipeError
from compress.evaluate import measure_sparsity, scores
from compress.formats import dense
from compress.model import load
from compress.run.linear_inputs import (
    FIRST_TOKENS,
    ScoreCounts,
    SparseLinear,
    UnreadTrial,
    choose,
    evolve,
    raise_shares,
)
from compress.runtime.linear import PackedLinear
from compress.runtime.linears import sparse_for
from compress.types import IN_THRESHOLD, LayerPlan, LinearSpec, Scheme, Sparsity, Stored
from helpers import pico, runs


def _inputs(samples: int = 6, tokens: int = 40, size: int = 16) -> Tensor:
    return torch.randn(samples, tokens, size, generator=torch.Generator().manual_seed(0)) ** 3


@pytest.mark.parametrize("weights", [None, torch.linspace(0.1, 3, 16)])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_threshold_is_the_quantile_of_all_but_the_first_tokens(weights: Tensor | None, share: float) -> None:
    x = _inputs()
    counts = ScoreCounts(weights)
    counts.add(x)
    edge, reached = counts.threshold(share)
    sizes = (x.double().abs() * (1 if weights is None else weights.double()))[:, FIRST_TOKENS:]
    assert reached == pytest.approx(float((sizes < edge).double().mean()), abs=1e-3)
    assert reached == pytest.approx(share, abs=5e-3)


def test_threshold_depends_neither_on_batches_nor_on_order() -> None:
    x = _inputs()
    all_at_once, one_by_one = ScoreCounts(None), ScoreCounts(None)
    all_at_once.add(x)
    for i in torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).tolist():
        one_by_one.add(x[i : i + 1])
    assert torch.equal(all_at_once.counts, one_by_one.counts)
    flat, whole = ScoreCounts(None), ScoreCounts(None)  # where samples begin is not seen
    flat.add(x.flatten(0, 1))
    for part in x.flatten(0, 1).split(7):
        whole.add(part)
    assert torch.equal(flat.counts, whole.counts)
    assert ScoreCounts(None).threshold(0.5) == (0.0, 0.0)


def test_zeros_are_never_read() -> None:
    counts = ScoreCounts(None)
    counts.add(_inputs().relu())
    edge, reached = counts.threshold(0.1)
    assert edge > 0
    assert reached == pytest.approx(0.5, abs=0.05)


class _Block(nn.Module):
    """Two linears behind each other, one of which reads inputs that are nearly all small."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        for linear in (self.first, self.second):
            linear.weight.data = torch.randn(linear.weight.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x) ** 3)


def _linears(block: _Block, asked: Sparsity) -> dict[str, SparseLinear]:
    made = {}
    for name, linear in block.named_children():
        spec = LinearSpec(name, tuple(linear.weight.shape), torch.float32, 0, name)  # type: ignore[arg-type]
        stored = Stored("dense", dense.Params("float32"))
        made[name] = SparseLinear(LayerPlan(spec, Scheme("x", None, sparsity=asked), stored, 0), linear)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("score", ["magnitude", "weighted"])
def test_search_keeps_the_budget_and_is_no_worse_than_equal_shares(score: str) -> None:
    block, x, asked = _Block(), _inputs(), Sparsity(0.5, score)  # type: ignore[arg-type]
    linears = _linears(block, asked)
    linears["first"].scores.add(x)
    linears["second"].scores.add(block.first(x).detach() ** 3)
    with torch.no_grad():
        trial = UnreadTrial(linears, lambda: [block(x)])
        raised = raise_shares(trial, 0.5)
        assert sum(raised.values()) / 2 == pytest.approx(0.5)  # of the same size
        assert trial.error(raised) <= trial.error(dict.fromkeys(raised, 0.5))
        evolved = evolve(trial, dict.fromkeys(raised, 0.5), asked, seed=0)
        assert sum(evolved.values()) / 2 == pytest.approx(0.5)
        assert trial.error(evolved) <= trial.error(dict.fromkeys(raised, 0.5))
        assert trial.error(dict.fromkeys(raised, 0.0)) == 0


def test_search_moves_nothing_where_nobody_can_take_it() -> None:
    block, x, asked = _Block(), _inputs(), Sparsity(0.97)
    linears = _linears(block, asked)
    linears["first"].scores.add(x)
    linears["second"].scores.add(block.first(x).detach() ** 3)
    with torch.no_grad():
        shares = dict.fromkeys(linears, 0.97)
        assert evolve(UnreadTrial(linears, lambda: [block(x)]), shares, asked, seed=0) == shares
        alone = {"first": linears["first"]}
        assert evolve(UnreadTrial(alone, lambda: [block(x)]), {"first": 0.5}, asked, seed=0) == {"first": 0.5}


def test_part_for_what_is_not_read_takes_the_rest_of_the_budget() -> None:
    block, x, asked = _Block(), _inputs(), Sparsity(0.5, "rank", levels="uniform", columns=0.5)
    linears = _linears(block, asked)
    for each in linears.values():
        each.scores.add(x if each.linear.in_features == 16 else block.first(x).detach() ** 3)
    chosen = choose(linears, lambda: [block(x)], seed=0)["first"]
    assert chosen.lowrank is not None
    assert chosen.lowrank.rank == int(0.25 * 16 * 32 / 48)
    assert chosen.sparsity.share == pytest.approx(0.75, abs=0.01)
    norms = block.first.weight.norm(dim=0)
    assert torch.allclose(chosen.tensors[IN_THRESHOLD] * norms, (chosen.tensors[IN_THRESHOLD] * norms)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 1.0}, "share 1.0"),
        ({"columns": 0.0}, "columns 0.0"),
        ({"score": "rank", "levels": "greedy"}, "levels greedy"),
    ],
)
def test_what_cannot_be_is_said(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sparsity(**settings)  # type: ignore[arg-type]


SPARSE = runs.Setup(
    "teal50",
    ("calibration.num_samples=8", "calibration.seq_len=32", "quantize.dtype=float32", "quantize.sparsity.tokens=all"),
)
TOKENS = torch.arange(24).reshape(1, 24) * 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose linears leave half of their inputs unread, at all tokens; its original is beside it."""
    folder = tmp_path_factory.mktemp("sparse")
    source = pico.save_pico("llama", folder / "m", dtype=torch.float32)
    api.quantize(runs.job(source, SPARSE, folder / "out"))
    return folder / "out"


def test_checkpoint_has_the_share_that_was_asked_for(checkpoint: Path) -> None:
    model = load.load_model(checkpoint, "float32", "cpu")
    blocks: dict[str, list[PackedLinear]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            blocks.setdefault(name.split("layers.")[1][0], []).append(module)
    assert len(blocks) == 2
    for linears in blocks.values():
        sizes = [each.in_features * each.out_features for each in linears]
        shares = [each.sparsity.share for each in linears if each.sparsity is not None]
        mean = sum(size * share for size, share in zip(sizes, shares, strict=True)) / sum(sizes)
        assert mean == pytest.approx(0.5, abs=0.01)
    listed = {row["name"]: row["sparsity"]["share"] for row in runs.report_of(checkpoint)["layers"]}
    assert {each.sparsity.share for each in sum(blocks.values(), [])} == set(listed.values())  # type: ignore[union-attr]


def test_text_through_a_cache_is_that_of_a_whole_pass(checkpoint: Path, tmp_path: Path) -> None:
    model = load.load_model(checkpoint, "float32", "cpu")
    with torch.no_grad():
        whole = model(input_ids=TOKENS, use_cache=False).logits
        cache, steps = None, []
        for i in range(TOKENS.shape[1]):
            out = model(input_ids=TOKENS[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache, _ = out.past_key_values, steps.append(out.logits)
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
        with sparse_for(model, None):
            original = load.load_model(checkpoint.parent / "m", "float32", "cpu")
            torch.testing.assert_close(
                model(input_ids=TOKENS).logits, original(input_ids=TOKENS).logits, rtol=1e-4, atol=1e-4
            )
        model.save_pretrained(tmp_path / "again")
        again = load.load_model(tmp_path / "again", "float32", "cpu")
        assert torch.equal(again(input_ids=TOKENS, use_cache=False).logits, whole)
    assert not torch.allclose(whole, original(input_ids=TOKENS).logits, atol=1e-2)


def test_scores_are_of_sparse_tokens_and_neurons_are_counted(checkpoint: Path) -> None:
    lengths = (32, 256)
    compared = scores.evaluate(checkpoint, runs.TEXT, checkpoint.parent / "m", *lengths)
    assert isinstance(compared, scores.Comparison)
    assert compared.kl_mean > 1e-3
    little = measure_sparsity(checkpoint.parent / "m", runs.TEXT, 1.0, lengths)
    more = measure_sparsity(checkpoint.parent / "m", runs.TEXT, 10.0, lengths)
    assert 0 < little.share < more.share < 1
    assert little.perplexity <= 1.01 * little.dense_perplexity
    assert little.layers == 2


def test_what_cannot_leave_inputs_unread_is_said(tmp_path: Path) -> None:
    rotated = SPARSE.set("quantize.incoherence=true")
    source = pico.save_pico("llama", tmp_path / "m", dtype=torch.float32)
    with pytest.raises(RecipeError, match="inputs are rotated"):
        api.quantize(runs.job(source, rotated, tmp_path / "out"))
    with pytest.raises(RecipeError, match="rotate rotates"):
        api.quantize(runs.job(source, SPARSE.set("transform=[{method: rotate}]"), tmp_path / "out"))
