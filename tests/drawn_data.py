"""Model directories, rows and media in the layout of the real data, drawn from fixed seeds.

Tokenizers are byte-level BPE trained here, with the splitting rule and the added tokens of Qwen's; ``AutoProcessor``
and ``AutoTokenizer`` load the directories as they load published ones, so tests can compare tokens and pixels with
transformers' own classes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from packtool.demo.model import CONTROL_TOKENS, PLAIN_ADDED_TOKENS, PRE_TOKENIZER
from tests.media.clips import write_clip, write_sound

NUM_MERGES = 1200
VOCAB_SIZE = 1536
"""Rows of the embedding: a few more than tokens, as in published models."""

MEDIA = "raw/llama-factory/data/mllm_demo_data"
FIGURES = "raw/math-v/images"
CHARTS = "raw/qwen3-vl/qwen-vl-finetune/demo/images"

# The template's switches: the system message of conversations without one, whether tools and thoughts are rendered,
# and the text of a picture, a video and a sound.
_TEMPLATE = """\
{%- set default_system, agentic, thinking, image, video, audio = SWITCHES -%}
{%- macro text_of(content) -%}
    {%- for part in ([{'text': content}] if content is string else content or []) -%}
        {%- if part.type == 'image' -%}{{- image -}}
        {%- elif part.type == 'video' -%}{{- video -}}
        {%- elif part.type == 'audio' -%}{{- audio -}}
        {%- else -%}{{- part.text -}}
        {%- endif -%}
    {%- endfor -%}
{%- endmacro -%}
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set has_system = messages[0].role == 'system' -%}
{%- if has_system or default_system or (agentic and tools) -%}
    {{- '<|im_start|>system\\n' + (text_of(messages[0].content) if has_system else default_system) -}}
    {%- if agentic and tools -%}
        {{- '\\n\\nTools:' -}}
        {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = text_of(message.content) -%}
    {%- if message.role == 'tool' and agentic -%}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' -}}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' -}}
    {%- elif not (loop.first and has_system) -%}
        {{- '<|im_start|>' + message.role + '\\n' -}}
        {%- if thinking and message.role == 'assistant' -%}
            {%- set thought = message.reasoning_content or '' -%}
            {%- if not thought and '</think>' in content -%}
                {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
            {%- endif -%}
            {%- if loop.index0 > last.question and (loop.last or thought) -%}
                {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
                {%- set content = content.lstrip('\\n') -%}
            {%- endif -%}
        {%- endif -%}
        {{- content -}}
        {%- for call in (message.tool_calls or []) if agentic -%}
            {%- set call = call.function or call -%}
            {{- '\\n' if content or not loop.first -}}
            {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + arguments + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if thinking and enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""

_SEEN = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
_HELPS = "You help."
_TEXT_TEMPLATES: dict[str, tuple[Any, ...]] = {
    "text-qwen2_5": (_HELPS, True, False, "", "", ""),
    "text-qwen3": ("", True, True, "", "", ""),
    "text-qwen3_instruct_2507": ("", True, False, "", "", ""),
}
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_PATCHES = {"temporal_patch_size": 2, "merge_size": 2}
_LARGEST = 12845056
_SOUNDS = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "sampling_rate": 16000,
    "feature_size": 128,
    "n_fft": 400,
    "hop_length": 160,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "return_attention_mask": True,
}
_OMNI_NAMES = ("image", "audio", "video", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
_OLD_OMNI = ("IMAGE", "AUDIO", "VIDEO", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
_NEW_OMNI = ("image_pad", "audio_pad", "video_pad", "vision_start", "vision_end", "audio_start", "audio_end")


def draw_data(folder: Path) -> None:
    """Write ``tokenizers/``, files of rows and ``raw/`` media under a folder."""
    _draw_models(folder / "tokenizers")
    _draw_media(folder)
    for name, rows in _rows().items():
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _draw_models(folder: Path) -> None:
    plain = ("<|endoftext|>", *CONTROL_TOKENS[1:], *PLAIN_ADDED_TOKENS)
    old = (*plain[:3], *(f"<|{name}|>" for name in _OLD_OMNI), *PLAIN_ADDED_TOKENS)
    new = (*plain, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
    token_names = dict(zip(_OMNI_NAMES, _OLD_OMNI, strict=True)), dict(zip(_OMNI_NAMES, _NEW_OMNI, strict=True))
    _draw_model(
        folder / "qwen2.5-vl",
        plain,
        (_HELPS, False, False, *_SEEN, ""),
        {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 14}
        | {"min_pixels": 3136, "max_pixels": _LARGEST, **_PATCHES, **_CLIP},
    )
    sizes = {"processor_class": "Qwen3VLProcessor", "patch_size": 16, **_PATCHES, **_HALF}
    _draw_model(
        folder / "qwen3-vl",
        plain,
        ("", True, False, *_SEEN, ""),
        sizes
        | {"image_processor_type": "Qwen2VLImageProcessorFast"}
        | {"size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    )
    videos = {"video_processor_type": "Qwen3VLVideoProcessor"}
    videos |= {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
    _write(folder / "qwen3-vl" / "video_preprocessor_config.json", sizes | videos)
    for name, tokens, names, model_settings in (
        ("qwen2.5-omni", old, token_names[0], {"processor_class": "Qwen2_5OmniProcessor", "patch_size": 14, **_CLIP}),
        ("qwen3-omni", new, token_names[1], {"processor_class": "Qwen3OmniMoeProcessor", "patch_size": 16, **_HALF}),
    ):
        named = {f"{name}_token": f"<|{token}|>" for name, token in names.items()}
        written = [
            named[f"{place}_bos_token"] + named[f"{kind}_token"] + named[f"{place}_eos_token"]
            for kind, place in (("image", "vision"), ("video", "vision"), ("audio", "audio"))
        ]
        system = (_HELPS, False) if name == "qwen2.5-omni" else ("", True)
        pixels = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": _LARGEST}
        settings = _SOUNDS | pixels | model_settings | _PATCHES
        settings |= {"chunk_length": 300} if name == "qwen2.5-omni" else {}
        _draw_model(folder / name, tokens, (*system, False, *written), settings, named)
    for name, switches in _TEXT_TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(_TEMPLATE.replace("SWITCHES", repr(switches)))


def _draw_model(
    folder: Path,
    tokens: tuple[str, ...],
    switches: tuple[Any, ...],
    processor: dict[str, Any],
    named: dict[str, str] | None = None,
) -> None:
    """A directory without weights; ``named`` are the tokens that a tokenizer has as attributes."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_str(_trained_tokenizer())
    added = [AddedToken(token, normalized=False, special=token not in PLAIN_ADDED_TOKENS) for token in tokens]
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    named = named or {}
    settings: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "additional_special_tokens": [token for token in tokens[1:] if token not in PLAIN_ADDED_TOKENS],
        "added_tokens_decoder": {
            str(ids[token.content]): {"content": token.content, "special": token.special, "normalized": False}
            for token in added
        },
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        **({"extra_special_tokens": named} | named if named else {}),
    }
    _write(folder / "tokenizer_config.json", settings)
    _write(folder / "preprocessor_config.json", processor)
    _write(folder / "config.json", _CONFIGS[folder.name](ids))
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("SWITCHES", repr(switches)))


@cache
def _trained_tokenizer() -> str:
    """``tokenizer.json`` without added tokens: the ids 0 to 255 are bytes, each further one is the next merge's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    cutter = pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cutter, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=256 + NUM_MERGES, initial_alphabet=alphabet, show_progress=False)
    draw = random.Random(0)
    roles = "system\nuser\nassistant\ntool\nname arguments\n\n\n\n\n" * 50
    tokenizer.train_from_iterator([roles, *(_text(draw, 12) for _ in range(800))], trainer)
    return tokenizer.to_str()


def _text_config(ids: dict[str, int], **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 65536,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        **more,
    }


def _tower(**more: Any) -> dict[str, Any]:
    sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 256}
    return {**sizes, "spatial_merge_size": 2, "temporal_patch_size": 2, **more}


def _seeing_ids(ids: dict[str, int], suffix: str = "id") -> dict[str, int]:
    token_ids = {f"{kind}_token_{suffix}": ids[f"<|{kind}_pad|>"] for kind in ("image", "video")}
    return token_ids | {f"vision_{end}_token_id": ids[f"<|vision_{end}|>"] for end in ("start", "end")}


def _qwen2_5_vl(ids: dict[str, int]) -> dict[str, Any]:
    rope = {"type": "mrope", "mrope_section": [16, 8, 8]}
    tower = _tower(patch_size=14, window_size=112, fullatt_block_indexes=[0], tokens_per_second=2)
    config = _text_config(ids, rope_scaling=rope, vision_config=tower)
    return {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]} | (
        config | _seeing_ids(ids)
    )


_INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]}


def _qwen3_vl(ids: dict[str, int]) -> dict[str, Any]:
    text = _text_config(ids, model_type="qwen3_vl_text", head_dim=64, rope_scaling=_INTERLEAVED)
    tower = _tower(model_type="qwen3_vl", patch_size=16, num_position_embeddings=256, deepstack_visual_indexes=[0])
    config = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    return config | {"vision_config": tower, "tie_word_embeddings": True} | _seeing_ids(ids)


_HEARS = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 96, "output_dim": 256}


def _qwen2_5_omni(ids: dict[str, int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "type": "default", "mrope_section": [16, 8, 8]}
    text = _text_config(ids, model_type="qwen2_5_omni_text", rope_scaling=rope, tie_word_embeddings=False)
    tower = _tower(patch_size=14, window_size=112, fullatt_block_indexes=[0], tokens_per_second=25, embed_dim=64)
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": text, "vision_config": tower}
    thinker |= {"audio_config": {**_HEARS, "n_window": 100, "num_mel_bins": 128}}
    thinker |= {f"{kind}_token_index": ids[f"<|{kind.upper()}|>"] for kind in ("image", "video", "audio")}
    for kind in ("vision", "audio"):
        thinker |= {f"{kind}_start_token_id": ids[f"<|{kind}_bos|>"], f"{kind}_end_token_id": ids[f"<|{kind}_eos|>"]}
    thinker |= {"position_id_per_seconds": 25, "seconds_per_chunk": 2, "user_token_id": ids["user"]}
    return {
        "model_type": "qwen2_5_omni",
        "architectures": ["Qwen2_5OmniForConditionalGeneration"],
        "thinker_config": thinker,
        "tie_word_embeddings": False,
    }


def _qwen3_omni(ids: dict[str, int]) -> dict[str, Any]:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    text = _text_config(ids, model_type="qwen3_omni_moe_text", head_dim=64, rope_scaling=_INTERLEAVED, **experts)
    text["tie_word_embeddings"] = False
    tower = _tower(patch_size=16, num_position_embeddings=256, deepstack_visual_indexes=[0])
    audio = {**_HEARS, "n_window": 50, "n_window_infer": 800, "num_mel_bins": 128, "downsample_hidden_size": 32}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text, "vision_config": tower}
    thinker |= {"audio_config": audio, "position_id_per_seconds": 13, "seconds_per_chunk": 2}
    thinker |= _seeing_ids(ids) | {f"audio_{end}_token_id": ids[f"<|audio_{end}|>"] for end in ("start", "end")}
    thinker |= {"audio_token_id": ids["<|audio_pad|>"], "user_token_id": ids["user"]}
    return {
        "model_type": "qwen3_omni_moe",
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "thinker_config": thinker,
        "tie_word_embeddings": False,
    }


_CONFIGS = {
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
    "qwen2.5-omni": _qwen2_5_omni,
    "qwen3-omni": _qwen3_omni,
}


def _draw_media(folder: Path) -> None:
    for name in (MEDIA, FIGURES, CHARTS):
        (folder / name).mkdir(parents=True)
    draw = np.random.default_rng(0)

    def picture(path: Path, width: int, height: int) -> None:
        coarse = draw.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR).save(path)

    for index, size in enumerate([(240, 160), (180, 300), (200, 200)]):
        picture(folder / MEDIA / f"{index + 1}.jpg", *size)
    for index, size in enumerate(_figure_sizes()):
        picture(folder / FIGURES / f"{index}.jpg", *size)
    for index in range(3):
        picture(folder / CHARTS / f"1009{5 + index}.png", 400 + 30 * index, 301)
    media = folder / MEDIA
    write_clip(media / "1.mp4", num_frames=150, size=(240, 320))
    write_clip(media / "2.avi", num_frames=90, size=(112, 80), fps=15)
    write_clip(media / "3.mp4", num_frames=75, size=(64, 96), fps=30, seconds_of_sound=2.5)
    write_clip(media / "4.mp4", num_frames=63, size=(96, 64), seconds_of_sound=2.2)
    for name, seconds, rate in (("1.wav", 2.0, 44100), ("2.wav", 1.03, 16000), ("3.wav", 3.1, 48000)):
        write_sound(media / name, seconds, rate)


def _figure_sizes() -> list[tuple[int, int]]:
    """(width, height) of figures, some of few pixels, some large, and one eleven times as wide as high."""
    draw = random.Random(1)
    return [(880, 80), (60, 57), (1400, 900), *((draw.randrange(60, 700), draw.randrange(60, 700)) for _ in range(25))]


_SYLLABLES = [onset + vowel + last for onset in "bdfklmnprstvz" for vowel in "aeiou" for last in ("", "n", "r", "st")]
_PHRASES = (
    "the quick brown fox, isn't it? 1234 + 5 = 1239.",
    "图片中的狗是什么颜色？棕色的。",
    "Größe naïve façade: 3,50 €",
    "привет, мир! ΑΒΓ",
    "def f(x):\n    return x  # ok\n\n",
    "one\n\n\ntwo\r\n\tthree   four",
    '\\boxed{E} <b>$x^2$</b> {"a": [1, 2.5]}',
)


def _text(draw: random.Random, num_words: int) -> str:
    """Words of one to three syllables, the first ones the most frequent, with some phrases of other alphabets."""

    def word() -> str:
        if draw.random() < 0.06:
            return draw.choice(_PHRASES)
        return "".join(_SYLLABLES[int(draw.random() ** 2 * len(_SYLLABLES))] for _ in range(draw.randrange(1, 4)))

    return " ".join(word() for _ in range(num_words)).capitalize() + draw.choice((".", "?", "!\n", ""))


def _rows() -> dict[str, list[dict[str, Any]]]:
    """Rows by the name of their file."""
    draw = random.Random(2)

    def conversation(num_turns: int, before: str = "", words: int = 15) -> list[dict[str, Any]]:
        texts = (_text(draw, draw.randrange(1, words)) for _ in range(2 * num_turns))
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        messages[0]["content"] = before + messages[0]["content"]
        return messages

    def media(question: str, **files: list[str]) -> dict[str, Any]:
        media_paths = {kind: [f"{MEDIA}/{name}" for name in names] for kind, names in files.items()}
        return {"messages": conversation(1 + draw.randrange(3), question), **media_paths}

    figures = [
        {
            "messages": conversation(1, draw.choice(("<image>", "<image>\n", "See <image> "))),
            "images": [f"{FIGURES}/{n}.jpg"],
        }
        for n in range(len(_figure_sizes()))
    ]
    two = [media("<image>" * n + "\n", images=["1.jpg", "3.jpg"][:n]) for n in (1, 2, 1, 2, 2, 1)]
    charts = [{"messages": conversation(1, "<image>"), "images": [f"{CHARTS}/1009{n}.png"]} for n in (5, 6, 7)]
    texts = [{"messages": conversation(1, words=60)} for _ in range(120)]
    texts[7]["messages"][1]["content"] += " 🙂 e\u0301 ﬁ"
    return {
        "mm_mathvision_a": figures,
        "mm_xtuner_coco_zh": two,
        "mm_llamafactory_mllm_demo": [media("<image>", images=[f"{n}.jpg"]) for n in (1, 2, 3, 1)],
        "mm_qwen3vl_demo": [*charts, media("<video>", videos=["1.mp4"])],
        "mm_llamafactory_mllm_video_demo": [media("<video>", videos=[name]) for name in ("1.mp4", "2.avi", "3.mp4")],
        "mm_llamafactory_mllm_audio_demo": [media("<audio>", audios=[f"{n}.wav"]) for n in (1, 2, 3)],
        "mm_llamafactory_mllm_video_audio_demo": [
            media("<video><audio>", videos=[f"{n}.mp4"], audios=[f"{n - 1}.wav"]) for n in (3, 4)
        ],
        "text_gsm8k_test": texts,
        "text_gpteacher_toolformer": [{"messages": conversation(1)} for _ in range(60)],
        "tool_glaive_en": [
            *_agents(draw, 40, thinking=False),
            *({"messages": conversation(2), "tools": []} for _ in range(9)),
        ],
        "tool_reasoning_50": [*_agents(draw, 20, thinking=True)],
    }


def _agents(draw: random.Random, num: int, *, thinking: bool) -> Iterator[dict[str, Any]]:
    """Conversations with tools, calls and responses; those that think have a system message, too."""
    for _ in range(num):
        tools = [
            {"type": "function", "function": {"name": f"tool_{n}", "description": _text(draw, 5), "parameters": {}}}
            for n in range(2)
        ]
        messages: list[dict[str, Any]] = [{"role": "system", "content": _text(draw, 6)}] if thinking else []
        for _ in range(draw.randrange(1 + thinking, 4)):
            messages.append({"role": "user", "content": _text(draw, 8)})
            for _ in range(draw.randrange(3)):
                arguments = {"query": _text(draw, 3), "limit": draw.randrange(100)}
                calls = [
                    {"type": "function", "function": {"name": f"tool_{n}", "arguments": arguments}} for n in (0, 1)
                ]
                calls = calls[: draw.randrange(1, 3)]
                messages.append(
                    {"role": "assistant", "content": draw.choice(("", _text(draw, 4))), "tool_calls": calls}
                )
                messages += [{"role": "tool", "content": _text(draw, 5)} for _ in calls]
            messages.append({"role": "assistant", "content": _text(draw, 12)})
        for message in messages if thinking else []:
            if message["role"] == "assistant":
                message["reasoning_content"] = _text(draw, 20)
        yield {"messages": messages, "tools": tools}


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings))
