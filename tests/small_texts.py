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
    "modernbert-decoder": {"num_hidden_layers": 6},  # the dense layer of its head is not counted
}
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
COUNTED_TYPES = tuple(_COUNTED_TYPES.split())


def small_text_config(name: str) -> Any:
    """A configuration of three layers."""
    default = type(AutoConfig.for_model(name))()
    settings = default.to_dict()
    sizes = _TEXT | (_LATENT if name in LATENT_TYPES else {})
    small = {key: size for key, size in sizes.items() if settings.get(key) or key in settings.keys() - _SWITCHES}
    small |= {key: sizes[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    small |= _SPECIAL.get(name, {})
    for key in ("layer_types", "mlp_layer_types"):
        if kinds := settings.get(key):
            small[key] = [kinds[0], *([kinds[-1]] * (small["num_hidden_layers"] - 1))]
    return type(default)(**small)
