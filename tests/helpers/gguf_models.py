"""Tiny models of the architectures that are written as GGUF, beside those of helpers/pico.py."""

from __future__ import annotations

from typing import Any

HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 192}
EXPERTS: dict[str, Any] = {**HEADS, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED: dict[str, Any] = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64}
SCORED: dict[str, Any] = {**EXPERTS, "num_hidden_layers": 3, "n_routed_experts": 4, "first_k_dense_replace": 1}
SCORED |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LOCAL: dict[str, Any] = {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
DELTA: dict[str, Any] = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
MULTIPLIED = {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.4}
MULTIPLIED |= {"attention_multiplier": 0.1}
LATENT: dict[str, Any] = {**SCORED, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}
TWO_OF_THREE = ["sliding_attention", "sliding_attention", "full_attention"]
WINDOWS: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": TWO_OF_THREE, "sliding_window": 16}
GEMMA: dict[str, Any] = {**HEADS, **WINDOWS, "tie_word_embeddings": True, "intermediate_size": 160}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2]}
BANDS = {"beta_fast": 32.0, "beta_slow": 1.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, **BANDS}
SCALED = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (model type, settings)
    "arcee": ("arcee", HEADS),
    "cohere": ("cohere", {**HEADS, "tie_word_embeddings": True, "logit_scale": 0.1}),
    "cohere2": ("cohere2", {**GEMMA, "logit_scale": 0.1}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_routed_experts": 8, "n_group": 2, "rope_parameters": SCALED}),
    "dots1": ("dots1", {**SCORED, "num_key_value_heads": 4, "sliding_window": None}),
    "ernie4_5": ("ernie4_5", HEADS),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **{**EXPERTS, "num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2},
            **{"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
        },
    ),
    "exaone4": ("exaone4", {**HEADS, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "gemma3_text": ("gemma3_text", {**GEMMA, "query_pre_attn_scalar": 16}),
    "gemma4_text": (  # layers that take keys and values of earlier ones, and a table for each layer
        "gemma4_text",
        {
            **{**GEMMA, "num_hidden_layers": 6, "layer_types": TWO_OF_THREE * 2, "final_logit_softcapping": 30.0},
            **{"global_head_dim": 32, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
            **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 264},
        },
    ),
    "gemma4_moe": (  # values are keys
        "gemma4_text",
        {
            **{**GEMMA, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4},
            **{"top_k_experts": 2, "moe_intermediate_size": 64},
        },
    ),
    "glm4": ("glm4", HEADS),
    "glm4_moe": ("glm4_moe", {**SCORED, "use_qk_norm": True}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 192}),
    "gpt_oss": (
        "gpt_oss",
        {**LOCAL, "sliding_window": 16, "layer_types": TWO_OF_THREE[1:], "rope_parameters": YARN},
    ),
    "granite": ("granite", {**HEADS, **MULTIPLIED}),
    "granitemoe": ("granitemoe", {**LOCAL, **MULTIPLIED}),
    "granitemoeshared": ("granitemoeshared", {**LOCAL, **MULTIPLIED, "shared_intermediate_size": 64}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", HEADS),
    "lfm2": (
        "lfm2",
        {
            **{**HEADS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
            "block_multiple_of": 32,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            **{**LOCAL, "num_hidden_layers": 4, "intermediate_size_mlp": 192, "num_experts_per_tok": 1},
            **{"interleave_moe_layer_step": 2, "attention_chunk_size": 8192},
        },
    ),
    "minimax_m2": ("minimax_m2", LOCAL),
    "nemotron": ("nemotron", HEADS),
    "olmo": ("olmo", HEADS),
    "olmo2": ("olmo2", HEADS),
    "olmo3": ("olmo3", {**HEADS, **WINDOWS}),
    "olmoe": ("olmoe", {**LOCAL, "num_key_value_heads": 4, "num_experts": 4}),
    "phi": ("phi", HEADS),
    "qwen2_moe": ("qwen2_moe", {**SHARED, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "qwen3_5_text": ("qwen3_5_text", {**HEADS, **DELTA, "head_dim": 64, "rope_parameters": SECTIONS}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**SHARED, **DELTA, "head_dim": 64, "rope_parameters": SECTIONS}),
    "qwen3_next": ("qwen3_next", {**SHARED, **DELTA}),
    "seed_oss": ("seed_oss", HEADS),
    "smollm3": ("smollm3", {**HEADS, "num_hidden_layers": 4}),
    "stablelm": ("stablelm", HEADS),
    "starcoder2": ("starcoder2", {**HEADS, "tie_word_embeddings": True, "sliding_window": None}),
}
