"""The models, rows and media that ``scripts/golden`` runs its commands on, made without packtool.

They are the same bytes in every run: no clock and no unseeded draw decides them.
"""

from __future__ import annotations

import json
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

_NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_NAMED_TOKENS.values())
# Like Qwen3's, it leaves out what earlier turns thought.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{%- if message.role == 'assistant' and not loop.last and '</think>' in message.content -%}
{{- message.content.split('</think>')[-1] -}}
{%- else -%}{{- message.content -}}{%- endif -%}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'audio' -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 272,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_PATCHES: dict[str, Any] = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "seven", "small", "green", "birds", "over", "there")

Row = dict[str, Any]


def make_world(root: Path) -> None:
    """Write ``models/``, ``rows/`` and the files of settings below a new directory."""
    for name, make_config in (("text", text_config), ("vision", vision_config), ("omni", omni_config)):
        make_model(root / "models" / name, make_config)
    rows = root / "rows"
    (rows / "media").mkdir(parents=True)
    _make_media(rows / "media")
    random = np.random.default_rng(0)
    texts = _texts(random, 120)
    _write_rows(rows / "texts.jsonl", texts)
    _write_rows(rows / "more-texts.jsonl", texts[:90] + _texts(random, 50))
    _write_rows(rows / "long-texts.jsonl", _texts(random, 40, num_words=60))
    _write_rows(rows / "documents.jsonl", [{"text": _sentence(random, 10 + 15 * (i % 9))} for i in range(40)])
    _write_rows(rows / "thoughts.jsonl", [_thoughtful(random, 1 + i % 4) for i in range(30)])
    for name, kinds in (("pictures", ("image",)), ("videos", ("image", "video")), ("sounds", ("video", "audio"))):
        _write_rows(rows / f"{name}.jsonl", _with_media(random, 48, kinds))
    _write_rows(rows / "shared.jsonl", _shared(random))
    _write_tokens(rows / "tokens.parquet", random)
    lengths = np.clip(random.lognormal(5.5, 1.0, 3000), 8, 8000).astype(int)
    (rows / "lengths.json").write_text(json.dumps(lengths.tolist()))
    _write_settings(root)


def _sentence(random: np.random.Generator, num_words: int) -> str:
    return " ".join(random.choice(_WORDS, num_words))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _texts(random: np.random.Generator, num_rows: int, num_words: int = 8) -> list[Row]:
    rows: list[Row] = []
    for number in range(num_rows):
        messages = [_turn("system", "Answer briefly.")] if number % 4 == 0 else []
        for _ in range(1 + number % 3):
            messages.append(_turn("user", _sentence(random, int(random.integers(1, num_words)))))
            messages.append(_turn("assistant", _sentence(random, int(random.integers(1, 2 * num_words)))))
        rows.append({"messages": messages, "channel": ("chat", "code")[number % 2]})
    rows[7] = {"messages": [_turn("user", "no answer")], "channel": "chat"}
    rows[11] = {"messages": [_turn("user", "long"), _turn("assistant", "word " * 300)], "channel": "code"}
    return rows


def _thoughtful(random: np.random.Generator, num_turns: int) -> Row:
    messages = []
    for _ in range(num_turns):
        messages.append(_turn("user", _sentence(random, 3)))
        messages.append(_turn("assistant", f"<think>{_sentence(random, 4)}</think>{_sentence(random, 3)}"))
    return {"messages": messages}


def _with_media(random: np.random.Generator, num_rows: int, kinds: Sequence[str]) -> list[Row]:
    files = {"image": [f"{i}.png" for i in range(8)], "video": ["0.mp4", "1.mp4"], "audio": ["0.wav", "1.wav"]}
    rows = []
    for number in range(num_rows):
        row: Row = {f"{kind}s": [] for kind in files}
        question = ""
        for kind in kinds[: 1 + number % len(kinds)] if number % 5 else ():
            row[f"{kind}s"].append(f"media/{random.choice(files[kind])}")
            question += f"<{kind}>"
        question += _sentence(random, int(random.integers(1, 6)))
        answer = _sentence(random, int(random.integers(1, 8)))
        rows.append({"messages": [_turn("user", question), _turn("assistant", answer)], **row})
    rows[3]["images"] = ["media/lost.png"]
    rows[3]["messages"][0]["content"] = "<image>lost"
    return rows


def _shared(random: np.random.Generator) -> list[Row]:
    """Several questions about each picture, and several answers to each prompt."""
    rows: list[Row] = []
    for number in range(60):
        picture, system = f"media/{number % 6}.png", _turn("system", "Look closely. " * (1 + number % 2))
        question = "<image>" + ("what is it", "how many are there", _sentence(random, 3))[number % 3]
        answer = _turn("assistant", _sentence(random, int(random.integers(1, 6))))
        rows.append({"messages": [system, _turn("user", question), answer], "images": [picture]})
    return rows


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_tokens(path: Path, random: np.random.Generator) -> None:
    """Rows of token ids and labels, as other tools prepare them."""
    token_ids = [random.integers(0, 256, int(random.integers(4, 90))).tolist() for _ in range(50)]
    labels = [[-100] * (len(ids) // 2) + ids[len(ids) // 2 :] for ids in token_ids]
    attention = [[1] * len(ids) for ids in token_ids]
    pq.write_table(pa.table({"input_ids": token_ids, "attention_mask": attention, "labels": labels}), path)


def _write_settings(root: Path) -> None:
    sources = [{"path": "caches/texts", "tokens": 2}, {"path": "caches/long-texts", "tokens": 1, "loss_weight": 0.5}]
    last_round = [sources[0] | {"loss_scale": "last_round", "channel": "chat"}, sources[1] | {"min_length": 60}]
    by_size = [{"path": source["path"]} for source in sources]
    other_shares = [sources[0] | {"tokens": 1}, sources[1] | {"tokens": 3}]
    stages = [{"until": "60%", "packing_length": 1024}, {"packing_length": 2048, "sources": other_shares}]
    two_sizes = [stages[0] | {"sequence_parallel_size": 1}, stages[1] | {"sequence_parallel_size": 2}]
    for name, value in (
        ("mix", {"sources": sources}),
        ("mix-last-round", {"sources": last_round}),
        ("mix-temperature", {"sources": by_size, "temperature": 2, "unit": "tokens"}),
        ("stages", {"stages": stages, "sources": sources}),
        ("stages-parallel", {"stages": two_sizes, "sources": sources}),
        ("mix-wrong", {"sources": [{"path": "caches/texts", "token": 2}, {"tokens": -1}], "stage": []}),
    ):
        (root / f"{name}.yaml").write_text(json.dumps(value))  # YAML, too
    train = {"model": "models/text", "cached_dataset": ["caches/texts"], "packing_length": 512, "learning_rate": 1e-3}
    (root / "train.yaml").write_text(json.dumps(train))
    (root / "train-wrong.yaml").write_text(json.dumps(train | {"packing_lenght": 8, "seed": "x", "optim": 3}))


def _make_media(directory: Path) -> None:
    random = np.random.default_rng(1)
    for number in range(8):
        height, width = random.integers(30, 120, 2)
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(directory / f"{number}.png")
    for number in range(2):
        _write_clip(directory / f"{number}.mp4", num_frames=10 + 6 * number)
        samples = (np.sin(np.arange(int(16000 * (0.3 + number / 4))) * 0.05) * 20000).astype(np.int16)
        with wave.open(str(directory / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(samples.tobytes())


def _write_clip(path: Path, num_frames: int) -> None:
    with av.open(str(path), "w", options={"fflags": "+bitexact"}) as container:
        video = container.add_stream("mpeg4", rate=8)
        video.width, video.height, video.pix_fmt = 56, 56, "yuv420p"
        for number in range(num_frames):
            frame = np.full((56, 56, 3), number * 9 % 256, np.uint8)
            frame[:28, :28] = 255 - number
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(video.encode(None))


def make_model(directory: Path, make_config: Callable[[dict[str, int], int], dict[str, Any]]) -> None:
    """Write a small model with random weights and a tokenizer of single bytes.

    Args:
        make_config: makes ``config.json`` from the ids of the media tokens and of the end of a turn.
    """
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _CONTROL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write_json(directory / "tokenizer_config.json", named | {"extra_special_tokens": _NAMED_TOKENS} | _NAMED_TOKENS)
    ids = {name: tokenizer.token_to_id(token) for name, token in _NAMED_TOKENS.items()}
    config = make_config(ids, tokenizer.token_to_id("<|im_end|>"))
    _write_json(directory / "config.json", config)
    if config["model_type"] != "qwen3":
        _write_processor(directory, hears="thinker_config" in config)
    loaded = AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if config["model_type"] == "qwen3" else AutoModelForImageTextToText
    model = auto.from_config(getattr(loaded, "thinker_config", loaded)).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.06)
    model.save_pretrained(directory)
    # Saving a thinker writes its own config over that of the model around it.
    _write_json(directory / "config.json", config)


def _write_processor(directory: Path, hears: bool) -> None:
    pictures = _PATCHES | {"image_processor_type": "Qwen2VLImageProcessor"}
    pictures["size"] = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    sounds = {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16000, "feature_size": 16}
    sounds |= {"n_fft": 400, "hop_length": 160, "chunk_length": 1, "return_attention_mask": True}
    _write_json(directory / "preprocessor_config.json", pictures | (sounds if hears else {}))
    if not hears:
        videos = _PATCHES | {"video_processor_type": "Qwen3VLVideoProcessor"}
        videos["size"] = {"shortest_edge": 4 * 28 * 28, "longest_edge": 4 * 56 * 56}
        _write_json(directory / "video_preprocessor_config.json", videos)


def text_config(ids: dict[str, int], end: int) -> dict[str, Any]:
    """A Qwen3, which takes text only."""
    return _TEXT | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "eos_token_id": end}


def vision_config(ids: dict[str, int], end: int) -> dict[str, Any]:
    """A Qwen3-VL, which takes images and videos."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = _TEXT | {"model_type": "qwen3_vl_text", "rope_parameters": rope, "eos_token_id": end}
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
    vision |= {"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config: dict[str, Any] = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    config |= {f"{kind}_token_id": ids[f"{kind}_token"] for kind in ("image", "video")}
    config |= {"vision_start_token_id": ids["vision_bos_token"], "vision_end_token_id": ids["vision_eos_token"]}
    return config | {"tie_word_embeddings": False}


def omni_config(ids: dict[str, int], end: int) -> dict[str, Any]:
    """A Qwen2.5-Omni, which takes images, videos and audio."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text = _TEXT | {"rope_parameters": rope, "layer_types": ["full_attention"] * 2}
    vision = {"depth": 2, "num_heads": 2, "embed_dim": 16, "hidden_size": 16, "intermediate_size": 24}
    vision |= {"out_hidden_size": 32, "fullatt_block_indexes": [1], "patch_size": 14, "window_size": 56}
    audio = {"d_model": 16, "encoder_layers": 2, "num_hidden_layers": 2, "encoder_attention_heads": 2}
    audio |= {"encoder_ffn_dim": 24, "output_dim": 32, "num_mel_bins": 16, "n_window": 20, "max_source_positions": 100}
    thinker: dict[str, Any] = {"model_type": "qwen2_5_omni_thinker", "text_config": text, "vision_config": vision}
    thinker |= {"audio_config": audio, "position_id_per_seconds": 25, "seconds_per_chunk": 2}
    thinker |= {f"{kind}_token_index": ids[f"{kind}_token"] for kind in ("image", "video", "audio")}
    thinker |= {"vision_start_token_id": ids["vision_bos_token"], "vision_end_token_id": ids["vision_eos_token"]}
    thinker |= {"audio_start_token_id": ids["audio_bos_token"], "audio_end_token_id": ids["audio_eos_token"]}
    thinker |= {"eos_token_id": end, "tie_word_embeddings": False, "user_token_id": 117}
    return {"model_type": "qwen2_5_omni", "thinker_config": thinker, "enable_talker": False}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
