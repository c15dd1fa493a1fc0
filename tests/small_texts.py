"""Small configurations of text models of every type, with each kind of layer and of MLP that the default has."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "ffn_dim": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_TEXT |= dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2)
# Sizes that only some models have: set where the default is not 0 or None.
_SWITCHES = {"sliding_window": 24, "first_k_dense_replace": 1}
_SWITCHES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
_TEXT |= _SWITCHES
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_LATENT |= {"num_key_value_heads": 4, "head_dim": 8}
_GROUPED = {"num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_SPECIAL = {
    "dots1": {"n_routed_experts": 4},
    # By default 0.1, which ranks that share a sequence refuse.
    "seed_oss": {"attention_dropout": 0.0},
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 24},
    "gptj": {"rotary_dim": 8},
    # Layers with embeddings of their own, wider keys in complete attention, and the keys of the layer before.
    "gemma4_text": {
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "num_experts": None,
        "global_head_dim": 24,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
    },
    "bailing_hybrid": _GROUPED,
    "kimi_linear": _GROUPED,
    "gemma3n_text": {"num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.0] * 3, "laurel_rank": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 0, "ffn_hidden_size": 160, "expert_ffn_hidden_size": 48},
    "zaya": {"num_experts_per_tok": 1},
    "modernbert-decoder": {"num_hidden_layers": 6},  # the dense layer of its head is not counted
}
# Sizes of layers with a state, with chunks, and with an index of tokens.
_STATES = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "num_heads": 8,
    "n_groups": 1,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 32,
}
_STATES |= dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16)
_STATES |= dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 32)
LATENT_TYPES = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
_OTHER_TYPES = """
    afmoe apertus arcee aria_text beam bitnet cohere cohere2 cohere2_moe cwm dots1 ernie4_5 ernie4_5_moe exaone4
    exaone_moe flex_olmo gemma gemma3_text glm glm4 glm4_moe gpt_neox granite granitemoe granitemoeshared helium
    hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama
    mellum minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2
"""
TEXT_TYPES = (*_OTHER_TYPES.split(), *LATENT_TYPES)
# Further types whose FLOPs are counted; some of them cannot be packed.
_COUNTED_TYPES = """
    biogpt bloom codegen ctrl diffllama falcon flint gemma2 gemma4_text gemma4_unified_text gpt2 gpt_bigcode gpt_neo
    gpt_neox_japanese gpt_oss gpt-sw3 gptj granite_swa granitemoe_swa jetmoe mimo_v2_flash minimax_m3_vl_text moshi
    nemotron stablelm vaultgemma
"""
# Types without formulas, of which packtool counts the FLOPs in a model without weights.
_UNKNOWN_TYPES = """
    axk2 bailing_hybrid bamba bert big_bird deepseek_v32 deepseek_v4 doge falcon_h1 falcon_mamba gemma3n_text
    glm_moe_dsa granitemoehybrid hy_v4 inkling_text jamba kimi_linear lfm2 lfm2_moe llama4_text longcat_flash mamba
    mamba2 minimax nemotron_h olmo_hybrid recurrent_gemma rwkv xlstm zamba2 zaya
"""
COUNTED_TYPES = (*_COUNTED_TYPES.split(), *_UNKNOWN_TYPES.split())


def small_text_config(name: str) -> Any:
    """A configuration of three layers."""
    default = type(AutoConfig.for_model(name))()
    settings = default.to_dict()
    sizes = _TEXT | (_LATENT if settings.get("kv_lora_rank") else {})
    if name not in (*TEXT_TYPES, *_COUNTED_TYPES.split()):
        sizes |= _STATES
    small = {key: size for key, size in sizes.items() if settings.get(key) or key in settings.keys() - _SWITCHES}
    small |= {key: sizes[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    small |= _SPECIAL.get(name, {})
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if kinds := settings.get(key):
            small[key] = [kinds[0], *([kinds[-1]] * (small["num_hidden_layers"] - 1))]
    return type(default)(**small)
