"""Merged experts: groups by mean outputs, and weights that are means of their groups'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import api, recipe
from compress.calib.expert_scores import SUMS_FILE, ExpertSums
from compress.papers.transform import merge_experts
from compress.run.job import Job
from compress.storage.checkpoint import read_header
from helpers.pico import of_type, save
from helpers.runs import TEXT

HEADS = {"num_key_value_heads": 2, "head_dim": 16}
MODEL = {**HEADS, "intermediate_size": 96, "num_local_experts": 6, "num_experts_per_tok": 2}


def test_an_expert_goes_to_the_most_similar_one() -> None:
    outputs = torch.tensor([[1.0, 0], [0, 1], [0.9, 0.1], [-0.2, 3]], dtype=torch.float64)
    sums = ExpertSums(torch.tensor([3.0, 1, 1, 0]), torch.ones(4), torch.ones(4), outputs)
    assert merge_experts.groups([0, 1], sums) == {0: [(0, 0.75), (2, 0.25)], 1: [(1, 1.0), (3, 0.0)]}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])  # stored one by one, and all together with biases
def test_merged_experts_are_means_of_their_groups(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(of_type(name, MODEL), tmp_path / "m")
    path = tmp_path / "r.yaml"
    path.write_text("calibration: {num_samples: 4, seq_len: 16}\ntransform: [{method: merge_experts, remove: 3}]\n")
    merged: list[merge_experts.Groups] = []
    groups = merge_experts.groups

    def spy(kept: list[int], sums: ExpertSums) -> merge_experts.Groups:
        merged.append(groups(kept, sums))
        return merged[-1]

    monkeypatch.setattr(merge_experts, "groups", spy)
    api.quantize(Job(str(model), recipe.load(str(path)), tmp_path / "out", calib=str(TEXT), pack=False))
    before, after = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (model, tmp_path / "out"))
    assert max(len(group) for block in merged for group in block.values()) > 1
    for key, tensor in before.items():
        block = int(key.split("layers.")[1].partition(".")[0]) if "layers." in key else -1
        expected = tensor
        if "experts." in key:
            means = [sum(tensor[n] * share for n, share in group) for group in merged[block].values()]
            expected = torch.stack(means)  # type: ignore[arg-type]
        elif tensor.shape[0] == 6:
            expected = tensor[list(merged[block])]
        torch.testing.assert_close(after[key], expected, rtol=1e-6, atol=1e-6)
    assert not (tmp_path / "out" / SUMS_FILE).exists() and "lm_head.weight" in read_header(
        next((tmp_path / "out").glob("model-00003*"))
    )


def test_chance_is_refused() -> None:
    with pytest.raises(ValueError, match="similar experts"):
        merge_experts.Config(by="random")
