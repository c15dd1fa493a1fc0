"""A small Qwen3-VL with random weights and a real processor.

Nothing is downloaded: the tokenizer is a byte-level BPE trained on the synthetic dataset's sentences, with the special
tokens and the splitting rule of the Qwen tokenizers; the processor settings have the form of Qwen3-VL's, with limits
that fit small pictures. ``AutoProcessor`` and ``AutoModelForImageTextToText`` load the directory like any other.
"""

from __future__ import annotations

import json
import random
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from packtool.demo.dataset import sentences
from packtool.train.model.load import quiet_transformers

VOCAB_SIZE = 512
"""Rows of the embedding; as in real models, some are unused, because the texts give too few merges."""

NUM_SENTENCES = 4000

PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The splitting rule of Qwen2 and Qwen3 before merging (transformers, models/qwen2/tokenization_qwen2.py)."""

CONTROL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
PLAIN_ADDED_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
"""Tokens that are added but not special: they are decoded even where special tokens are skipped."""

MIN_PIXELS = 64 * 64
MAX_PIXELS = 112 * 112
"""Limits of an image, 4 to 12 tokens of 32 x 32 pixels; larger images are shrunk."""

INITIALIZER_RANGE = 0.05
"""Standard deviation of the weights; the usual 0.02, for wider models, would delay the first progress by 40 steps."""


def make_model(directory: str, seed: int) -> int:
    """Write a loadable Qwen3-VL with random weights, its tokenizer and its settings; return the number of parameters.

    The same seed writes the same weights.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(root / "tokenizer.json"))
    _write_settings(root)
    config = _model_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    with quiet_transformers():
        model.save_pretrained(root)
    return sum(parameter.numel() for parameter in model.parameters())


def _train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer, with the steps of Qwen's, on sentences of the synthetic dataset."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(PLAIN_ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(random.Random(0), NUM_SENTENCES), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN_ADDED_TOKENS])
    return tokenizer


def _model_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """Return the configuration of a small Qwen3-VL: three text layers, and a vision tower of two layers."""
    width = 192
    token_id = tokenizer.get_vocab()
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
        "bos_token_id": token_id["<|endoftext|>"],
        "eos_token_id": token_id["<|im_end|>"],
        "pad_token_id": token_id["<|endoftext|>"],
        "tie_word_embeddings": True,
        "initializer_range": INITIALIZER_RANGE,
    }
    vision = {
        "depth": 2,
        "hidden_size": width,
        "intermediate_size": 512,
        "num_heads": 6,
        "out_hidden_size": width,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": INITIALIZER_RANGE,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"],
        vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )


def _write_settings(root: Path) -> None:
    """Write the chat template, and the settings of the tokenizer, image processor and video processor."""
    settings: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "additional_special_tokens": list(CONTROL_TOKENS[1:]),
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "model_max_length": 8192,
            "split_special_tokens": False,
        }
    }
    for kind, file, class_name, max_pixels in (
        ("image", "preprocessor_config.json", "Qwen2VLImageProcessorFast", MAX_PIXELS),
        ("video", "video_preprocessor_config.json", "Qwen3VLVideoProcessor", 16 * MAX_PIXELS),  # of all frames
    ):
        settings[file] = {
            f"{kind}_processor_type": class_name,
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": MIN_PIXELS, "longest_edge": max_pixels},  # numbers of pixels, despite their names
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
    for file, values in settings.items():
        (root / file).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    template = resources.files("packtool.demo").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    (root / "chat_template.jinja").write_text(template, encoding="utf-8")
