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
# Of decoders that are part of an encoder-decoder model elsewhere.
_TEXT |= dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 3)
_TEXT |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_decoder_attention_heads"), 4)
_TEXT |= {"encoder_ffn_dim": 160, "decoder_ffn_dim": 160, "max_target_positions": 512}
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
    "dbrx": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 8,
    },
    "cpmant": {"prompt_length": 1, "dim_head": 16, "dim_ff": 160},  # a prompt is not counted
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
    axk2 bailing_hybrid bamba bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert
    cohere_compass_text cpmant data2vec-text dbrx deepseek_v32 deepseek_v4 doge dots3_note_text electra emu3 ernie
    falcon_h1 falcon_mamba fuyu gemma3n_text glm_moe_dsa granitemoehybrid hy_v4 inkling_text inkling2_text jamba
    kimi_linear lfm2 lfm2_moe lfm3 llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert minimax mpt mvp
    nemotron_h olmo_hybrid openai-gpt pegasus plbart prophetnet qwen4_exp_text recurrent_gemma rembert roberta
    roberta-prelayernorm roc_bert roformer rwkv trocr whisper xglm xlm xlm-roberta xlm-roberta-xl xlstm zamba zamba2
    zaya
"""
COUNTED_TYPES = (*_COUNTED_TYPES.split(), *_UNKNOWN_TYPES.split())
_REASONS = {
    "transformers cannot run it without weights": "blt xlnet xmod",
    "its attention to pairs of chunks is no polynomial of the length, and samples must have one length": "reformer",
    "it continues sound, not text": "musicgen musicgen_melody",
    "it drafts tokens from the states of another model": "gemma4_assistant gemma4_unified_assistant",
}
NOT_COMPARED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Why the FLOPs of some types are not compared with those that torch counts."""
# Models whose text model is of a type of its own.
_OF_TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "emu3": ("emu3_text_model", {"vocabulary_map": {"<image>": 90}, "vq_config": {"base_channels": 32}}),
    "fuyu": ("persimmon", {}),
}


def small_text_config(name: str) -> Any:
    """A configuration of three layers."""
    if name in _OF_TEXT_MODELS:
        text_type, others = _OF_TEXT_MODELS[name]
        return AutoConfig.for_model(name, text_config=small_text_config(text_type).to_dict(), **others)
    default = type(AutoConfig.for_model(name))()
    settings = default.to_dict()
    sizes = _TEXT | (_LATENT if settings.get("kv_lora_rank") else {})
    if name not in (*TEXT_TYPES, *_COUNTED_TYPES.split()):
        sizes |= _STATES
    small = {key: size for key, size in sizes.items() if settings.get(key) or key in settings.keys() - _SWITCHES}
    required = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    small |= {key: sizes[key] for key in required[: 2 if name == "prophetnet" else 3]}
    small |= _SPECIAL.get(name, {})
    for key in {"layer_types", "mlp_layer_types", "layers_block_type"} - _SPECIAL.get(name, {}).keys():
        if kinds := settings.get(key):
            small[key] = [kinds[0], *([kinds[-1]] * (small["num_hidden_layers"] - 1))]
    return type(default)(**small)
