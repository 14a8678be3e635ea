"""A run that would leave out most of a model has to be asked for; what the recipe leaves out is no reason to ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compress.errors import UnsupportedModelError
from compress.model.skeleton import Skeleton
from compress.run import plan, plan_summary
from compress.storage.checkpoint import open_checkpoint
from compress.types import Plan
from helpers.runs import RTN, Setup, cli, one_line

WHERE = Path("model")
ATTENTION_ONLY = RTN.set('ignore=["*.mlp.*"]')


def planned(directory: Path, setup: Setup = RTN) -> tuple[Plan, dict[str, int]]:
    skeleton = Skeleton(open_checkpoint(directory))
    matrices = plan_summary.matrix_sizes(skeleton)
    return plan_summary.add_reasons(plan.make(setup.load(), skeleton), skeleton, matrices), matrices


def without(whole: Plan, part: str, reason: str) -> Plan:
    """The plan, were these linears none that can be packed."""
    layers = tuple(layer for layer in whole.layers if part not in layer.spec.name)
    kept = {layer.spec.name: reason for layer in whole.layers if part in layer.spec.name}
    return replace(whole, layers=layers, kept_reasons={**whole.kept_reasons, **kept})


def test_what_is_left_out_is_named_with_its_reason(pico_dir: Callable[..., Path]) -> None:
    whole, matrices = planned(pico_dir("llama"))
    plan_summary.check(whole, WHERE, matrices)
    plan_summary.check(without(whole, "self_attn", "too odd"), WHERE, matrices)  # 25% of the weights
    partial = without(whole, "mlp", "too odd")
    with pytest.raises(UnsupportedModelError, match=r"only 25% .*layers\.\*\.mlp\.\w+_proj, 25%: too odd; .*--allow-"):
        plan_summary.check(partial, WHERE, matrices)
    plan_summary.check(partial, WHERE, matrices, ("*.mlp.*",))  # the user's own choice


def test_what_the_recipe_leaves_out_counts_as_packed(pico_dir: Callable[..., Path]) -> None:
    chosen, matrices = planned(pico_dir("llama"), ATTENTION_ONLY)
    assert chosen.chosen_numel == 2 * 3 * 64 * 192
    plan_summary.check(chosen, WHERE, matrices)
    experts, matrices = planned(pico_dir("mixtral"), RTN.set('ignore=["*.experts.*"]'))
    plan_summary.check(experts, WHERE, matrices)


def test_embeddings_heads_and_narrow_routers_do_not_count(pico_dir: Callable[..., Path]) -> None:
    for name in ("llama", "llama_tied", "gpt_neox", "opt", "mixtral"):
        whole, _ = planned(pico_dir(name))
        assert all("narrower" in reason for reason in whole.kept_reasons.values()), whole.kept_reasons


def test_the_command_line_asks_once(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    prepare = "from compress.run import plan_summary\nplan_summary.MIN_PACKED_SHARE = 1.1"
    words = ["quantize", str(pico_dir("llama")), *RTN.options(), "--out", str(tmp_path / "out")]
    assert "only 100% of the linear weights" in one_line(cli(*words, prepare=prepare))
    assert not (tmp_path / "out").exists()
    plans = cli("plan", str(pico_dir("llama")), *RTN.options(), prepare=prepare)
    assert plans.code == 1 and "--allow-partial" in plans.err
    assert cli(*words, "--allow-partial", prepare=prepare).code == 0
