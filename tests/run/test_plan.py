"""Plans: what a recipe does to every linear, with bytes that are exact before a weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.errors import RecipeError
from compress.formats import dense
from compress.formats import int as int_format
from compress.model.skeleton import Skeleton
from compress.run import plan, plan_summary
from compress.storage.checkpoint import StoredTensor, open_checkpoint
from compress.types import Plan, Stored
from helpers.pico import PICO
from helpers.runs import GPTQ, RTN, Setup

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def make(pico_dir: Callable[..., Path]) -> Callable[[str, Setup], Plan]:
    """make(architecture, setup) -> the plan."""
    known: dict[str, Skeleton] = {}

    def made(name: str, setup: Setup) -> Plan:
        if name not in known:
            known[name] = Skeleton(open_checkpoint(pico_dir(name)))
        return plan.make(setup.load(), known[name])

    return made


@pytest.mark.parametrize("name", PICO)
def test_every_linear_has_its_bytes_and_every_tensor_its_place(
    name: str, make: Callable[[str, Setup], Plan], pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: StoredTensor) -> torch.Tensor:
        raise AssertionError(f"{self.name} was read")

    monkeypatch.setattr(StoredTensor, "read", read)
    source = open_checkpoint(pico_dir(name))
    for setup, bits in ((RTN, 8), (GPTQ, 4)):
        made = make(name, setup)
        assert len({layer.spec.name for layer in made.layers}) == len(made.layers) and not made.kept_reasons
        for layer in made.layers:
            rows, columns = layer.spec.shape
            padded = int_format.padded_shape(layer.stored.params, layer.spec.shape)
            groups = 1 if bits == 8 else -(-padded[1] // 32)
            assert layer.nbytes == padded[0] * padded[1] * bits // 8 + 2 * padded[0] * groups
            assert padded[0] - 16 < rows <= padded[0] and columns <= padded[1]
            assert (layer.stored.format, layer.stored.params.bits, layer.bpw) == (
                "int",
                bits,
                8 * layer.nbytes / (rows * columns),
            )
        assert made.quantized_nbytes == sum(layer.nbytes for layer in made.layers)
        assert made.nbytes == made.quantized_nbytes + sum(made.kept_nbytes.values())
        weights = sum(layer.spec.numel for layer in made.layers)
        assert made.bpw == 8 * made.quantized_nbytes / weights
        assert source.nbytes - sum(made.kept_nbytes.values()) == 4 * weights  # what is not copied is replaced
        assert all(source.tensors[tensor].nbytes == nbytes for tensor, nbytes in made.kept_nbytes.items())


def schemes(made: Plan) -> dict[str, tuple[str, str, int]]:
    """Name -> method, format, bits (0: dense)."""
    return {x.spec.name: (x.scheme.method, x.stored.format, getattr(x.stored.params, "bits", 0)) for x in made.layers}


def test_the_first_matching_rule_decides(make: Callable[[str, Setup], Plan]) -> None:
    rules = "[{match: '*.0.*.q_proj', bits: 8}, {match: '*.q_proj', bits: 2}, {match: '*.v_proj', method: rtn}]"
    found = schemes(make("llama", GPTQ.set(f"rules={rules}", "ignore=['*.1.self_attn.v_proj']")))
    assert found[Q] == ("gptq", "int", 8)
    assert found["model.layers.1.self_attn.q_proj"] == ("gptq", "int", 2)
    assert found["model.layers.0.self_attn.v_proj"] == ("rtn", "int", 4)
    assert "model.layers.1.self_attn.v_proj" not in found
    assert found["model.layers.1.self_attn.k_proj"] == ("gptq", "int", 4)


@pytest.mark.parametrize("how", [f"ignore=['{Q}']", f"rules=[{{match: '{Q}', keep: true}}]"])
def test_a_kept_linear_is_copied(how: str, make: Callable[[str, Setup], Plan]) -> None:
    made, whole = make("llama", RTN.set(how)), make("llama", RTN)
    assert made.kept_reasons == {Q: "kept by the recipe"}
    assert schemes(made).keys() == schemes(whole).keys() - {Q}
    assert made.kept_nbytes == whole.kept_nbytes | {f"{Q}.weight": 4 * 64 * 64}


def test_a_kept_expert_is_dense_where_others_of_its_module_are_packed(make: Callable[[str, Setup], Plan]) -> None:
    kept = "model.layers.0.mlp.experts.1.up_proj"
    made, whole = make("mixtral", RTN.set(f"ignore=['{kept}']")), make("mixtral", RTN)
    assert schemes(made)[kept] == ("keep", "dense", 0)
    (layer,) = (layer for layer in made.layers if layer.stored.format == "dense")
    assert layer.stored.params == dense.Params("float32") and layer.nbytes == 4 * 96 * 64 and layer.bpw == 32
    assert made.kept_reasons == {} and made.kept_nbytes == whole.kept_nbytes
    assert {n: s for n, s in schemes(made).items() if n != kept} == {
        n: s for n, s in schemes(whole).items() if n != kept
    }


def test_experts_that_are_all_kept_are_copied(make: Callable[[str, Setup], Plan]) -> None:
    made, whole = make("mixtral", RTN.set("ignore=['model.layers.0.mlp.experts.*']")), make("mixtral", RTN)
    kept = {f"model.layers.0.mlp.experts.{e}.{p}" for e in range(4) for p in ("gate_proj", "up_proj", "down_proj")}
    assert made.kept_reasons.keys() == kept and not kept & schemes(made).keys()
    more = {name: nbytes for name, nbytes in made.kept_nbytes.items() if name not in whole.kept_nbytes}
    assert sum(more.values()) == 4 * 4 * 3 * 96 * 64


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("quantize.lowrank={rank: 4, metric: fisher}",), "changes what linears read after gradients are taken"),
        (("tune={method: bitnet}",), "^tune: bitnet trains the weights as the source has them"),
    ],
)
def test_what_goes_by_the_source_is_refused_behind_a_transform(
    overrides: tuple[str, ...], message: str, make: Callable[[str, Setup], Plan]
) -> None:
    with pytest.raises(RecipeError, match=message):
        make("llama", RTN.set("transform=[{method: order_neurons}]", *overrides))


@pytest.mark.parametrize("pattern", ["*.query", "model.layers.2.*", "q_proj", "*.Q_proj", "lm_head"])
def test_a_rule_that_matches_nothing(pattern: str, make: Callable[[str, Setup], Plan]) -> None:
    with pytest.raises(RecipeError, match="matches no linear of the decoder blocks; names look like") as caught:
        make("llama", RTN.set(f"rules=[{{match: '{pattern}', bits: 4}}]"))
    assert repr(pattern) in str(caught.value) and Q in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "pattern", "closest"),
    [
        ("ignore=['*.q_proj', '*.donw_proj']", "*.donw_proj", "model.layers.0.mlp.down_proj"),
        ("ignore=[lm_haed]", "lm_haed", "lm_head"),
        ("rules=[{match: ['*.q_proj', '*.attn.k_proj'], bits: 4}]", "*.attn.k_proj", "model.layers.0.self_attn.k_proj"),
        ("rules=[{match_any: ['*.query', '*.kproj'], bits: 4}]", "*.query", Q),
    ],
)
def test_every_pattern_must_match(
    overrides: str, pattern: str, closest: str, make: Callable[[str, Setup], Plan]
) -> None:
    with pytest.raises(RecipeError, match="matches no") as caught:
        make("llama", RTN.set(overrides))
    assert repr(pattern) in str(caught.value) and repr(closest) in str(caught.value)


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens.weight", "*.input_layernorm"])
def test_what_is_no_target_may_be_ignored(name: str, make: Callable[[str, Setup], Plan]) -> None:
    found = schemes(make("llama", RTN.set(f"ignore=['{name}', '{Q}']")))
    assert Q not in found and len(found) == 13


def test_of_alternatives_one_is_enough(make: Callable[[str, Setup], Plan]) -> None:
    found = schemes(make("llama", GPTQ.set("rules=[{match_any: ['*.qkv_proj', '*.q_proj'], bits: 2}]")))
    assert found == schemes(make("llama", GPTQ.set("rules=[{match: '*.q_proj', bits: 2}]")))
    assert make("llama", Setup("lq-lora2.75")).layers


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_nothing_left_to_quantize(name: str, make: Callable[[str, Setup], Plan]) -> None:
    with pytest.raises(RecipeError, match="recipe 'int8' leaves no linear to quantize"):
        make(name, RTN.set("ignore=['*']"))


def test_groups_gather_what_differs_only_in_numbers(make: Callable[[str, Setup], Plan]) -> None:
    made = make("qwen3_moe", GPTQ.set("rules=[{match: '*.1.*.o_proj', bits: 3}]"))
    groups = plan_summary.groups(made)
    found = {(group.pattern.removeprefix("model.layers.*."), group.format.split()[1]): group.count for group in groups}
    assert found == {
        ("self_attn.q_proj", "bits=4"): 2,
        ("self_attn.k_proj", "bits=4"): 2,
        ("self_attn.v_proj", "bits=4"): 2,
        ("self_attn.o_proj", "bits=4"): 1,
        ("self_attn.o_proj", "bits=3"): 1,
        ("mlp.experts.*.gate_proj", "bits=4"): 16,
        ("mlp.experts.*.up_proj", "bits=4"): 16,
        ("mlp.experts.*.down_proj", "bits=4"): 16,
    }
    assert sum(group.nbytes for group in groups) == made.quantized_nbytes
    for group in groups:
        assert group.bpw == pytest.approx(8 * group.nbytes / (group.count * group.shape[0] * group.shape[1]))


def test_the_description_of_a_layer(make: Callable[[str, Setup], Plan]) -> None:
    layer = make("llama", GPTQ).layers[0]
    assert plan_summary.describe(layer) == "int bits=4 group_size=32 symmetric=True"
    other = dataclasses.replace(layer, stored=Stored("dense", dense.Params("bfloat16")))
    assert plan_summary.describe(other) == "dense dtype=bfloat16"
