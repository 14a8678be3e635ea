"""Every layout in which transformers holds experts: taken apart, it computes the same, and put together it is the same.

The modules are those of transformers, made alone, with random weights in float64.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from compress.runtime.expert_layouts import CALLS, POST_NORM, ROUTED, SHARED, SORTED, ExpertLayout, describe
from compress.runtime.experts import Experts, is_supported, layout_of

HIDDEN, INNER, EXPERTS, TOKENS = 32, 24, 3, 11
CONFIG = SimpleNamespace(
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), "silu"),
    **{"n_shared_experts": EXPERTS, "zero_expert_num": 2, "moe_latent_size": None, "mlp_hidden_act": "relu2"},
    **{"ffn_act_fn": {"name": "silu"}, "swiglu_limit": 0.3, "swiglu_alpha": 1.7, "post_norm_eps": 1e-6},
    **{"mlp_gate_softcap": 0.5, "mlp_up_softcap": 0.5, "_experts_implementation": "eager"},
)
GATED = ("gate_proj", "up_proj", "down_proj")
MODULES = {  # family.class -> its projections, and how it is called
    "mixtral.MixtralExperts": (GATED, ROUTED),
    "granitemoe.GraniteMoeExperts": (GATED, ROUTED),
    "gemma4.Gemma4TextExperts": (GATED, ROUTED),
    "aria.AriaExperts": (GATED, ROUTED),  # transposed
    "gpt_oss.GptOssExperts": (GATED, ROUTED),  # transposed, interleaved, with biases, a gate of its own
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": (GATED, ROUTED),  # the same, concatenated
    "deepseek_v4.DeepseekV4Experts": (GATED, ROUTED),  # a gate of its own, as in the next
    "minimax_m3_vl.MiniMaxM3VLExperts": (GATED, ROUTED),
    "glm5_next.Glm5NextTextExperts": (GATED, ROUTED),
    "beam.BeamExperts": (GATED, ROUTED),
    "step3p7.Step3p7Experts": (GATED, ROUTED),
    "inkling2.Inkling2Experts": (GATED, ROUTED),
    "muse_spark.MuseSparkExperts": (GATED, ROUTED),  # a norm behind each expert
    "longcat_flash.LongcatFlashExperts": (GATED, ROUTED),  # experts that do nothing
    "nemotron_h.NemotronHExperts": (GATED[1:], ROUTED),
    "dbrx.DbrxExperts": (GATED, ROUTED),  # two dimensions
    "llama4.Llama4TextExperts": (GATED, SORTED),
    "jetmoe.JetMoeParallelExperts": (("proj",), SORTED),
    "inkling.InklingSharedExperts": (GATED, SHARED),
}


def fused_experts(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    family, _, class_name = name.partition(".")
    kind = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), class_name)
    is_one = "config" not in inspect.signature(kind.__init__).parameters
    module: nn.Module = kind(EXPERTS, HIDDEN, INNER) if is_one else kind(CONFIG)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) * HIDDEN**-0.5
    return module.eval()


def inputs_of(name: str, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    if name.startswith("jetmoe"):
        return x, [4, 0, tokens - 4]
    if name.startswith("llama4"):  # a token is a row of zeros for the experts that it does not go to
        chosen = torch.nn.functional.one_hot(torch.arange(tokens) % (EXPERTS - 1), EXPERTS)
        return ((x[None] * chosen.T[:, :, None]).flatten(0, 1),)
    if name.startswith("inkling."):
        return x[None], torch.rand(1, tokens, EXPERTS, generator=generator).to(dtype)
    count = EXPERTS + 2 * name.startswith("longcat")
    weights, index = torch.rand(tokens, count, generator=generator).to(dtype).topk(2)
    return (x[None] if name.startswith("dbrx") else x), index, weights


def original(fused: nn.Module, *inputs: object) -> Tensor:
    result: Tensor = inspect.unwrap(type(fused).forward)(fused, *inputs)
    return result


@torch.no_grad()
@pytest.mark.parametrize("name", MODULES)
def test_experts_compute_what_the_fused_module_does(name: str) -> None:
    fused, inputs = fused_experts(name), inputs_of(name)
    experts, expected = Experts.from_fused(fused), original(fused, *inputs)
    projections, call = MODULES[name]
    assert (experts.layout.projections, experts.layout.call, len(experts)) == (projections, call, EXPERTS)
    found = experts(*inputs)
    assert found.shape == expected.shape and expected.abs().max() > 1e-3
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("name", MODULES)
def test_linears_are_views_with_gate_and_up_apart(name: str) -> None:
    fused = fused_experts(name)
    experts = Experts.from_fused(fused)
    inner = 1 if len(experts.layout.parts) == 1 else 2
    for i in range(EXPERTS):
        shapes = [tuple(experts.get_parameter(f"{i}.{p}.weight").shape) for p in experts.layout.projections]
        assert shapes == [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)][-len(shapes) :] or inner == 1
    storages = {p.untyped_storage().data_ptr() for p in fused.parameters()}
    assert {p.untyped_storage().data_ptr() for p in experts.parameters()} == storages
    has_biases = any("bias" in key for key, _ in fused.named_parameters())
    assert (experts.get_submodule(f"0.{experts.layout.projections[-1]}").bias is not None) == has_biases


@pytest.mark.parametrize("name", MODULES)
def test_fusing_again_gives_the_same_module(name: str) -> None:
    fused = fused_experts(name)
    again = Experts.from_fused(fused).fuse(torch.float64)
    assert type(again) is type(fused) and is_supported(again)
    for key, parameter in fused.named_parameters():
        used = slice(EXPERTS) if parameter.shape[0] == EXPERTS + 2 else slice(None)  # those that do nothing have none
        assert torch.equal(again.get_parameter(key)[used], parameter[used])
    assert not any(parameter.is_meta for parameter in again.parameters())


@pytest.mark.parametrize("name", MODULES)
def test_the_layout_is_known_without_data(name: str) -> None:
    fused = fused_experts(name)
    layout = layout_of(fused)
    assert describe(copy.deepcopy(fused).to("meta")) == layout
    on_meta = Experts.from_fused(fused.to("meta"))
    assert all(parameter.is_meta for parameter in on_meta.parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, (_, call) in MODULES.items() if call == ROUTED])
def test_a_token_does_not_depend_on_the_others(name: str) -> None:
    experts = Experts.from_fused(fused_experts(name))
    x, index, weights = inputs_of(name)
    assert isinstance(x, Tensor) and isinstance(index, Tensor) and isinstance(weights, Tensor)
    flat, together = x.view(-1, HIDDEN), experts(x, index, weights).view(-1, HIDDEN)
    for token in range(TOKENS):
        alone = experts(flat[token, None], index[token, None], weights[token, None])
        torch.testing.assert_close(alone[0], together[token], rtol=1e-5, atol=1e-7)
    shuffled = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))
    found = experts(flat[shuffled], index[shuffled].flip(1), weights[shuffled].flip(1))
    torch.testing.assert_close(found, together[shuffled], rtol=1e-5, atol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama4.Llama4TextExperts", "inkling.InklingSharedExperts", "mixtral.MixtralExperts"])
def test_each_expert_knows_its_tokens(name: str) -> None:
    experts, inputs = Experts.from_fused(fused_experts(name)), inputs_of(name)
    given: dict[int, Tensor] = {}
    for i in range(EXPERTS):
        linear = experts.get_submodule(f"{i}.gate_proj")
        linear.register_forward_pre_hook(lambda _, args, i=i: given.__setitem__(i, args[0]))
    experts(*inputs)
    x = inputs[0]
    assert isinstance(x, Tensor)
    for i in range(EXPERTS):
        tokens = experts.tokens(i, *(value for value in inputs if isinstance(value, Tensor)))
        rows = x.chunk(EXPERTS)[i] if name.startswith("llama4") else x.view(-1, HIDDEN)
        assert tokens.count == TOKENS and torch.equal(rows[tokens.index], given[i])


def test_a_parameter_of_no_known_use_is_named() -> None:
    fused = fused_experts("mixtral.MixtralExperts")
    fused.scales = nn.Parameter(torch.zeros(1))
    assert describe(fused) == "experts with a parameter of no known use, scales"


def test_a_call_that_is_not_known_is_named() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 4))
            self.down_proj = nn.Parameter(torch.zeros(2, 4, 4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x

    assert describe(Other()) == "experts that are called with (x, mask), which is not known"


def test_shapes_that_do_not_belong_together_are_named() -> None:
    fused = fused_experts("mixtral.MixtralExperts")
    fused.down_proj = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, INNER + 1))
    assert "do not belong together" in str(describe(fused))
    fused.down_proj = nn.Parameter(torch.zeros(EXPERTS + 1, HIDDEN, INNER))
    assert describe(fused) == f"{EXPERTS} experts in gate_up_proj and {EXPERTS + 1} in down_proj"


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.Conv1d(4, 4, 3, bias=False), nn.Embedding(4, 4)])
def test_other_modules_hold_no_experts(module: nn.Module) -> None:
    assert describe(module) is None


def test_only_a_plain_gate_lets_scales_through() -> None:
    layouts = {name: layout_of(fused_experts(name)) for name in MODULES}
    assert {name for name, layout in layouts.items() if layout.is_bilinear} >= {"mixtral.MixtralExperts"}
    assert not layouts["gpt_oss.GptOssExperts"].is_bilinear and not layouts["nemotron_h.NemotronHExperts"].is_bilinear
    closed = {name.partition(".")[0] for name, layout in layouts.items() if not layout.is_open}
    assert closed == {"muse_spark", "longcat_flash", "llama4", "jetmoe", "inkling"}
    assert layouts["muse_spark.MuseSparkExperts"].has_post_norm and POST_NORM == "post_expert_norm"
    assert all(isinstance(layout, ExpertLayout) and layout.call in CALLS.values() for layout in layouts.values())
