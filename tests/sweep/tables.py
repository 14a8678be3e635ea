"""Sizes of the tiny models, by the names that configurations have for them, and what single architectures need."""

from __future__ import annotations

from typing import Any

VOCABULARY = 4096  # the books-8m tokenizer has as many tokens

SIZES: dict[str, Any] = {
    # widths
    "hidden_size": 128, "d_model": 128, "n_embd": 128, "dim": 128, "embed_dim": 128, "dim_model": 128, "emb_dim": 128,
    "embedding_size": 128, "model_dim": 128, "input_dim": 128, "word_embed_proj_dim": 128, "lm_hidden_size": 128,
    "intermediate_size": 256, "ffn_dim": 256, "d_inner": 256, "n_inner": 256, "dim_ff": 256, "ffn_hidden_size": 256,
    "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "mlp_dim": 256, "intermediate_size_mlp": 256, "dff": 256,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128, "expert_ffn_hidden_size": 128, "expert_intermediate_size": 128,
    "hidden_size_per_layer_input": 64, "laurel_rank": 16, "attention_hidden_size": 128, "lru_width": 128,
    "dense_intermediate_size": 256, "mlp_intermediate_size": 256, "mamba_intermediate_size": 256,
    # depth
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "depth": 2, "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1, "num_kv_shared_layers": 0, "num_global_layers": 1, "mtp_num_hidden_layers": 0,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 32, "kv_channels": 32,
    "attention_head_dim": 32, "d_head": 32, "d_kv": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 32, "swa_v_head_dim": 32, "global_head_dim": 32, "num_global_key_value_heads": 2,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "qk_head_dim": 48, "index_head_dim": 32, "index_n_heads": 4, "index_topk": 64, "o_lora_rank": 64, "o_groups": 2,
    "num_attention_groups": 2, "num_query_groups": 2, "dim_head": 32,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_top_k": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "num_expert_group": 1, "zero_expert_num": 2, "num_experts_per_topk": 2,
    # state-space and linear attention
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "mamba_d_state": 16,
    "ssm_state_size": 16, "mamba_d_ssm": 256, "mamba_n_groups": 1, "n_groups": 1, "mamba_ngroups": 1, "state_size": 16,
    "mamba_dt_rank": 16, "time_step_rank": 16, "chunk_size": 32, "mamba_chunk_size": 32, "n_mamba_heads": 1,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 32, "linear_num_heads": 4, "conv_dim": 128, "conv_dim_out": 128, "block_multiple_of": 64,
    "block_ff_dim": 256, "num_blocks": 2, "qk_dim_factor": 0.5, "mamba_expand": 2, "expand": 2,
    # tokens and lengths
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "decoder_vocab_size": VOCABULARY,
    "text_vocab_size": VOCABULARY, "n_vocab": VOCABULARY,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_sequence_length": 512, "max_seq_len": 512,
    "seq_length": 512, "context_length": 512, "model_max_length": 512, "max_target_positions": 512,
    "sliding_window": 64, "local_window_size": 64, "attention_chunk_size": 64, "window_size": 64,
    "attention_window_size": 64,
    # vision and audio towers
    "image_size": 28, "patch_size": 14, "out_hidden_size": 128, "projection_dim": 128, "vision_output_dim": 128,
    "projector_hidden_size": 128, "mm_hidden_size": 128, "conf_num_hidden_layers": 1, "mm_tokens_per_image": 4,
    # dropout never
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2,
    "unk_token_id": 0, "cls_token_id": 1,
}  # fmt: skip

# What the table above gets wrong for one architecture, found by trying.
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
HALF_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    }
}
SPECIAL: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 512},
    "codegen": {"rotary_dim": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                 "mrope_section": [6, 6, 4]}},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
              "use_mamba_kernels": False},
    "kimi_linear": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"num_hidden_layers": 4},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "num_hidden_layers": None,
                   "use_mamba_kernels": False},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen4_exp_text": {"num_hidden_layers": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32,
                       "indexer_budget": 64, "indexer_compress_ratio": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 4, "attention_hidden_size": 256, "attention_head_dim": 64,
              "use_mamba_kernels": False, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"num_hidden_layers": 3, "attention_hidden_size": 256, "attention_head_dim": 64,
               "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": [64, 64], "axial_pos_shape": [16, 32]},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"num_hidden_layers": 5, "intermediate_size": 256},  # more than its other lists of modules have
    "qwen2_vl_text": MROPE, "qwen2_5_vl_text": MROPE, "glm4v_text": MROPE, "glm4v_moe_text": HALF_MROPE,
    "qwen2_5_omni_text": MROPE,
    "gemma4_text_moe": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128},
}  # fmt: skip
# What generating reads of a configuration, that checkpoints have and its class does not declare.
UNDECLARED = {
    "blt": {"num_hidden_layers": 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 3, "audio_start_token_id": 4},
}
# Variants of one architecture that are worth a row of their own: name -> (architecture, overrides)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama (tied)": ("llama", {"tie_word_embeddings": True}),
    "falcon (7b style)": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}),
    "gemma4_text (moe)": ("gemma4_text", SPECIAL["gemma4_text_moe"]),
    "llama (default init)": ("llama", {"default_init": True}),
    "deepseek_v3 (rope 32)": ("deepseek_v3", {"qk_rope_head_dim": 32, "head_dim": 32, "qk_head_dim": 64}),
    "llama (hidden 96)": ("llama", {"hidden_size": 96, "intermediate_size": 200, "head_dim": 24}),
}
# Wrappers whose language model is what people quantize.
WRAPPERS = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma3n", "gemma4", "llama4", "llava",
    "llava_next", "llava_onevision", "mllama", "mistral3", "internvl", "idefics3", "smolvlm", "paligemma", "glm4v",
    "glm4v_moe", "qwen3_5", "qwen3_5_moe", "qwen2_5_omni_thinker", "aya_vision", "deepseek_vl", "kimi_k25",
    "ernie4_5_vl_moe", "lfm2_vl", "ovis2",
)  # fmt: skip
