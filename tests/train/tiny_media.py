"""Small models that take media of all kinds, with a tokenizer of single bytes, and rows for them.

A Qwen2.5-Omni sees and hears, a Qwen3-VL sees.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText

from packtool.cache.export import export
from packtool.config.data import ExportConfig
from packtool.progress import SilentProgress
from tests.batch.reduced import make_picture
from tests.media.clips import write_clip, write_sound
from tests.train.tiny import TinyWorld

KINDS = ("text", "picture", "video", "sound")
_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_TOKENS.values())
_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'audio' -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
"""


def make_media_world(root: Path, *, hears: bool) -> TinyWorld:
    """A model and media; ``export_kinds`` makes the rest."""
    tiny = TinyWorld(str(root / "model"), str(root / "cache"), str(root / "rows.jsonl"))
    _make_model(root / "model", hears)
    (root / "picture.png").write_bytes(make_picture(60, 40, seed=0))
    write_clip(root / "video.mp4", num_frames=12, size=(56, 56))
    write_sound(root / "sound.wav", 0.3, rate=16000)
    return tiny


def write_rows(tiny: TinyWorld, rows: Sequence[Sequence[str]]) -> None:
    """A row for each combination of ``KINDS``, in this order."""
    root = Path(tiny.rows).parent
    names = {"picture": ("image", "picture.png"), "video": ("video", "video.mp4"), "sound": ("audio", "sound.wav")}
    lines = []
    for number, kinds in enumerate(rows):
        media = [names[kind] for kind in kinds if kind != "text"]
        question = "".join(f"<{kind}>" for kind, _ in media) + "abcdefgh"[: 1 + number % 8]
        row: dict[str, Any] = {"images": [], "videos": [], "audios": []}
        for kind, file in media:
            row[f"{kind}s"].append(str(root / file))
        answer = {"role": "assistant", "content": "xyz" * (1 + number % 3)}
        lines.append(json.dumps({"messages": [{"role": "user", "content": question}, answer], **row}))
    Path(tiny.rows).write_text("\n".join(lines))


def export_kinds(tiny: TinyWorld, cache: str, rows: Sequence[Sequence[str]]) -> TinyWorld:
    """The rows, exported as they follow each other."""
    write_rows(tiny, rows)
    limits: dict[str, Any] = {"max_pixels": 56 * 56, "min_pixels": 28 * 28}
    if (Path(tiny.model) / "video_preprocessor_config.json").exists():
        limits |= {"fps_max_frames": 4}  # which has its own
    else:
        limits |= {"video_max_pixels": 56 * 56, "video_min_pixels": 28 * 28}
    given: dict[str, Any] = {"model": tiny.model, "dataset": (tiny.rows,), "output_dir": cache, "max_length": 512}
    export(ExportConfig(**given | limits), SilentProgress())
    return TinyWorld(tiny.model, cache, tiny.rows)


def _make_model(directory: Path, hears: bool) -> None:
    directory.mkdir(parents=True)
    tokenizer = Tokenizer(
        models.BPE(vocab={char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _CONTROL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write(directory / "tokenizer_config.json", named | {"extra_special_tokens": _TOKENS} | _TOKENS)
    patches: dict[str, Any] = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    patches["size"] = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    sounds = {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16000, "feature_size": 16}
    sounds |= {"n_fft": 400, "hop_length": 160, "chunk_length": 1, "return_attention_mask": True}
    pictures = patches | {"image_processor_type": "Qwen2VLImageProcessor"}
    _write(directory / "preprocessor_config.json", pictures | (sounds if hears else {}))
    if not hears:
        videos = patches | {"video_processor_type": "Qwen3VLVideoProcessor"}
        videos["size"] = {"shortest_edge": 4 * 28 * 28, "longest_edge": 4 * 56 * 56}
        _write(directory / "video_preprocessor_config.json", videos)
    ids = {name: tokenizer.token_to_id(token) for name, token in _TOKENS.items()}
    make = _omni_config if hears else _vision_config
    config = make(ids, tokenizer.token_to_id("<|im_end|>"))
    _write(directory / "config.json", config)
    loaded = AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(getattr(loaded, "thinker_config", loaded)).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.06)
    model.save_pretrained(directory)
    # Saving a thinker writes its own config over the whole model's, which real checkpoints have.
    _write(directory / "config.json", config)


_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 272,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def _vision_config(ids: dict[str, int], end: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = _TEXT | {"model_type": "qwen3_vl_text", "rope_parameters": rope, "eos_token_id": end}
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
    vision |= {"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config: dict[str, Any] = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    config |= {f"{kind}_token_id": ids[f"{kind}_token"] for kind in ("image", "video")}
    config |= {"vision_start_token_id": ids["vision_bos_token"], "vision_end_token_id": ids["vision_eos_token"]}
    return config | {"tie_word_embeddings": False}


def _omni_config(ids: dict[str, int], end: int) -> dict[str, Any]:
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


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
