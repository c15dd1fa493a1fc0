"""A small Qwen3-VL with random weights and a real processor.

Nothing is downloaded: the tokenizer is a byte-level BPE trained on the synthetic dataset's sentences, with the special
tokens and the splitting rule of the Qwen tokenizers; the processor settings have the form of Qwen3-VL's, with limits
that fit small pictures. ``AutoProcessor`` and ``AutoModelForImageTextToText`` load the directory like any other.
"""

from __future__ import annotations

import random
from importlib import resources
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from packtool.config.settings import load_json
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

_FILES = resources.files("packtool.demo")
_SETTINGS = (
    *("chat_template.jinja", "tokenizer_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
"""Files of the model's directory; larger images are shrunk to 12 tokens of 32 x 32 pixels, 4 tokens is the minimum."""


def make_model(directory: str, seed: int) -> int:
    """Write a loadable Qwen3-VL with random weights, its tokenizer and its settings; return the number of parameters.

    The same seed writes the same weights.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(root / "tokenizer.json"))
    for name in _SETTINGS:
        (root / name).write_bytes(_FILES.joinpath(name).read_bytes())
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
    """Return the configuration of a small Qwen3-VL, in ``architecture.json``, with the tokenizer's numbers.

    It is narrow, so it learns sooner with weights of standard deviation 0.05 than with the usual 0.02.
    """
    token_ids = tokenizer.get_vocab()
    architecture = load_json(_FILES.joinpath("architecture.json").read_bytes())
    architecture["text_config"] |= {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": token_ids["<|endoftext|>"],
        "eos_token_id": token_ids["<|im_end|>"],
        "pad_token_id": token_ids["<|endoftext|>"],
    }
    return Qwen3VLConfig(
        **architecture,
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
    )
