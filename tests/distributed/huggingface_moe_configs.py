"""Tiny configurations of every family whose MoE layer ``MoE`` can be. Needs no framework."""

LAYER, DIM, HIDDEN, EXPERTS, TOP_K, TOKENS, EP = 1, 20, 8, 8, 2, 24, 2

SIZES = {
    "hidden_size": DIM,
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE = {"intermediate_size": 24, "moe_intermediate_size": HIDDEN}
LATENT = {
    "head_dim": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
LOCAL = {"intermediate_size": HIDDEN, "num_local_experts": EXPERTS}
PLAIN = {**DENSE, "num_experts": EXPERTS}
ROUTED = {**DENSE, "n_routed_experts": EXPERTS, "first_k_dense_replace": 1}
GROUPS = {"n_group": 4, "topk_group": 2}
INDEXED = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

CONFIGS = {
    "mixtral": LOCAL,
    "minimax": {**LOCAL, "block_size": 8},
    "minimax_m2": LOCAL,
    "qwen2_moe": {**PLAIN, "shared_expert_intermediate_size": 2 * HIDDEN, "norm_topk_prob": True},
    "qwen3_moe": PLAIN,
    "qwen3_next": {**PLAIN, **LINEAR, "shared_expert_intermediate_size": HIDDEN},
    "olmoe": {"intermediate_size": HIDDEN, "num_experts": EXPERTS, "norm_topk_prob": True},
    "flex_olmo": {"intermediate_size": HIDDEN, "num_experts": EXPERTS},
    "granitemoe": LOCAL,
    "deepseek_v2": {**ROUTED, **LATENT, "n_shared_experts": 1, "routed_scaling_factor": 3.0},
    "deepseek_v2 groups": {**ROUTED, **LATENT, **GROUPS, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**ROUTED, **LATENT, **GROUPS},
    "deepseek_v32": {**ROUTED, **LATENT, **GROUPS, **INDEXED, "norm_topk_prob": False},
    "glm4_moe": {**ROUTED, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "glm_moe_dsa": {**ROUTED, **LATENT, **INDEXED},
    "dots1": {**ROUTED, "n_shared_experts": 1},
    "exaone_moe": {**PLAIN, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "solar_open": ROUTED,
    "mimo_v2_flash": {**ROUTED, "v_head_dim": 8},
    "ernie4_5_moe": {
        **DENSE,
        "moe_num_experts": EXPERTS,
        "moe_k": TOP_K,
        "moe_num_shared_experts": 1,
        "moe_layer_end_index": 1,
    },
}
