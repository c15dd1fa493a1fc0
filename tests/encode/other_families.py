"""Reduced models and processors of families that encode through their own processor, from transformers' classes."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata

from packtool.encode.families import family_of
from packtool.media.measure import load_image
from packtool.media.video import load_video, measure_video
from packtool.rows.sample import Sample
from scripts._reduced_model import cut_tokenizer
from tests.encode.more_families import CONFIGS, PADS, PROCESSORS, VOCABULARY
from tests.encode.more_families import SEES as _SEES
from tests.encode.more_families import TEXT as _TEXT

_TEMPLATE = (
    "{{% for message in messages %}}<|im_start|>{{{{ message.role }}}}\n"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{mark}"
    "{{% elif part['type'] == 'video' %}}{video}"
    "{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)


def make_processor(family: str, tokenizer_folder: Path) -> Any:
    import transformers as t

    def tokenizer(**tokens: str) -> Any:
        hf_tokenizer: Any = t.AutoTokenizer.from_pretrained(tokenizer_folder)
        hf_tokenizer.add_special_tokens(
            {"additional_special_tokens": list(tokens.values())}, replace_extra_special_tokens=False
        )
        return t.PreTrainedTokenizerFast(
            tokenizer_object=hf_tokenizer.backend_tokenizer,
            extra_special_tokens=tokens,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
        )

    if family in PROCESSORS:
        return PROCESSORS[family](tokenizer)
    if family == "internvl":
        names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        names |= {"ref": "<ref>", "end_ref": "</ref>", "box": "<box>", "end_box": "</box>"}
        images = t.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=6)
        return t.InternVLProcessor(
            images,
            tokenizer(**names, video_token="<video>"),
            t.InternVLVideoProcessor(size={"height": 56, "width": 56}, do_sample_frames=True, num_frames=3),
            image_seq_length=4,
        )
    if family == "llava_onevision":
        images = t.LlavaOnevisionImageProcessor(
            size={"height": 56, "width": 56}, image_grid_pinpoints=[[56, 56], [56, 112], [112, 56], [112, 112]]
        )
        return t.LlavaOnevisionProcessor(
            images,
            tokenizer(image_token="<image>", video_token="<video>"),
            t.LlavaOnevisionVideoProcessor(size={"height": 56, "width": 56}, do_sample_frames=True, num_frames=3),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
        )
    if family.startswith("glm"):
        names = {"image_token": "<|image|>", "video_token": "<|video|>"}
        names |= {f"{end}_{kind}": f"<|{end}_of_{kind}|>" for end in ("begin", "end") for kind in ("image", "video")}
        old = family.startswith("glm4v")
        return (t.Glm4vProcessor if old else t.Glm46VProcessor)(
            t.Glm4vImageProcessor(size={"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 28 * 28 * 12}),
            tokenizer(**names),
            (t.Glm4vVideoProcessor if old else t.Glm46VVideoProcessor)(
                size={"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 28 * 28 * 16}
            ),
        )
    if family == "llava":
        images = t.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
        return t.LlavaProcessor(
            images,
            tokenizer(image_token="<image>"),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    if family == "mistral3":
        names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
        images = t.PixtralImageProcessor(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})
        return t.PixtralProcessor(images, tokenizer(**names), patch_size=14, spatial_merge_size=2)
    if family == "gemma3":
        names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        images = t.Gemma3ImageProcessor(size={"height": 84, "width": 84})
        return t.Gemma3Processor(images, tokenizer(**names), image_seq_length=9)
    if family == "llava_next":
        images = t.LlavaNextImageProcessor(
            size={"shortest_edge": 56},
            crop_size={"height": 56, "width": 56},
            image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        )
        return t.LlavaNextProcessor(
            images,
            tokenizer(image_token="<image>"),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    names = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global": "<global-img>"}
    rows = {f"r{i}{j}": f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)}
    processor_tokenizer = tokenizer(**names, **rows, end_of_utterance_token="<end_of_utterance>")
    sizes = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}
    if family == "smolvlm":
        # Spells numbers of frames; an optional package.
        processing_smolvlm.num2words = processing_smolvlm.num2words or str
        videos = t.SmolVLMVideoProcessor(**sizes, do_sample_frames=True, num_frames=3, fps=10)
        return t.SmolVLMProcessor(t.SmolVLMImageProcessor(**sizes), processor_tokenizer, videos, image_seq_len=4)
    return t.Idefics3Processor(t.Idefics3ImageProcessor(**sizes), processor_tokenizer, image_seq_len=4)


_CLIP = {"vision_config": _SEES | {"model_type": "clip_vision_model"}, "vision_feature_layer": -1}
_CONFIGS: dict[str, dict[str, Any]] = {
    "internvl": {"vision_config": _SEES | {"model_type": "internvl_vision", "use_qk_norm": False}},
    "llava_onevision": {
        "vision_config": _SEES | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]],
        "vision_feature_layer": -1,
    },
    "llava_next": _CLIP | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    "llava": _CLIP,
    "mistral3": {
        "vision_config": _SEES | {"model_type": "pixtral", "head_dim": 16, "image_size": 112},
        "text_config": _TEXT | {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    "idefics3": {"vision_config": _SEES | {"model_type": "idefics3_vision"}, "scale_factor": 2},
    "smolvlm": {"vision_config": _SEES | {"model_type": "smolvlm_vision"}, "scale_factor": 2},
    # Its window is narrower than a picture.
    "gemma3": {
        "vision_config": _SEES | {"model_type": "siglip_vision_model", "image_size": 84, "vision_use_head": False},
        "text_config": _TEXT
        | {"model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        "mm_tokens_per_image": 9,
    },
}


_GLM_TEXT = _TEXT | {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
_GLM_TEXT["rope_parameters"] |= {"partial_rotary_factor": 1.0, "rope_theta": 10000.0}
_GLM = _SEES | {"depth": 2, "num_heads": 2, "out_hidden_size": 32, "model_type": "glm4v_vision"}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
_CONFIGS |= {
    "glm4v": {"vision_config": _GLM, "text_config": _GLM_TEXT | {"model_type": "glm4v_text"}},
    "glm46v": {"vision_config": _GLM, "text_config": _GLM_TEXT | {"model_type": "glm4v_text"}},
    "glm_ocr": {
        "vision_config": _GLM | {"model_type": "glm_ocr_vision"},
        "text_config": _GLM_TEXT | {"model_type": "glm_ocr_text", "head_dim": 8},
    },
    "glm4v_moe": {
        "vision_config": _GLM | {"model_type": "glm4v_moe_vision"},
        "text_config": _GLM_TEXT | _EXPERTS | {"model_type": "glm4v_moe_text", "head_dim": 8},
    },
}
_CONFIGS |= CONFIGS


def config_of(family: str, processor: Any) -> dict[str, Any]:
    """``config.json`` of a model of two layers for a processor's tokens."""
    token = "<image_soft_token>" if family == "gemma3" else processor.image_token
    token = "<IMG_CONTEXT>" if family == "internvl" else PADS.get(family, token)
    token_id = processor.tokenizer.convert_tokens_to_ids(token)
    # Some name it in one way and some in the other.
    indexed = ("aya_vision", "gemma3", "llama4", "llava", "mllama", "pixtral", "vipllava")
    name = "image_token_index" if family in indexed else "image_token_id"
    config_values = {
        "model_type": family,
        "text_config": _TEXT,
        "tie_word_embeddings": False,
        **_CONFIGS[family],
        name: token_id,
    }
    if family_of({"model_type": family}).video_outputs:
        config_values["video_token_id"] = processor.tokenizer.convert_tokens_to_ids(processor.video_token)
    if family.startswith("glm"):
        marks = {"image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>"}
        marks |= {"video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>"}
        marks |= {"video_token_id": "<|video|>"}
        config_values |= {key: processor.tokenizer.convert_tokens_to_ids(mark) for key, mark in marks.items()}
    return config_values


@cache
def model_of(family: str, drawn_data: Path, folder: Path) -> tuple[Path, Any]:
    """A directory as these models publish it, and its processor as transformers loads it."""
    from transformers import AutoProcessor

    target = folder / family
    source = folder / "tokenizer"
    if not source.exists():
        # The first merges of a real tokenizer: its whole vocabulary would be read several times for each family.
        shutil.copytree(drawn_data / "tokenizers" / "qwen3-vl", source)
        for path in (source, *source.iterdir()):
            path.chmod(0o755)
        cut_tokenizer(source, VOCABULARY)
        settings = json.loads((source / "tokenizer_config.json").read_text())
        settings.pop("processor_class", None)
        (source / "tokenizer_config.json").write_text(json.dumps(settings))
        (source / "preprocessor_config.json").unlink()
        (source / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    processor = make_processor(family, source)
    mark = "<start_of_image>" if family == "gemma3" else processor.image_token
    mark += "\\n" if family == "internvl" else ""
    mark = "<|begin_of_image|><|image|><|end_of_image|>" if family.startswith("glm") else mark
    video = getattr(processor, "video_token", None) or ""
    video = f"<|begin_of_video|>{video}<|end_of_video|>" if family.startswith("glm") else video
    video += "\n" if family == "internvl" else ""
    processor.chat_template = _TEMPLATE.format(mark=mark.replace("\\n", "\n"), video=video)
    processor.save_pretrained(target)
    (target / "config.json").write_text(json.dumps(config_of(family, processor)))
    return target, AutoProcessor.from_pretrained(target)


def tokens_of(processor: Any, sample: Sample) -> dict[str, Any]:
    """What a processor makes of a row, tokens first."""
    messages = []
    for turn in sample.turns:
        parts: list[dict[str, str]] = []
        for piece in re.split("(<image>|<video>)", turn.content):
            is_mark = piece in ("<image>", "<video>")
            parts += [{"type": piece[1:-1]} if is_mark else {"type": "text", "text": piece}] if piece else []
        messages.append({"role": turn.role, "content": parts})
    rendered = processor.apply_chat_template(messages, tokenize=False)
    loaded = [[load_image(ref.path, ref.data) for ref in sample.images]] if sample.images else None
    settings = {"return_tensors": None, "add_special_tokens": False}
    media: dict[str, Any] = {"images": loaded, "images_kwargs": {"return_tensors": "pt"}}
    if sample.videos:  # whole, for the processor to take frames of
        sizes = [measure_video(ref) for ref in sample.videos]
        media["videos"] = [
            load_video(ref.path, ref.data, (), range(size.num_frames))
            for ref, size in zip(sample.videos, sizes, strict=True)
        ]
        metadata = [(size.num_frames, size.fps, size.width, size.height, size.num_frames / size.fps) for size in sizes]
        media["videos_kwargs"] = {"return_tensors": "pt", "video_metadata": [VideoMetadata(*each) for each in metadata]}
    return dict(processor(text=[rendered], text_kwargs=settings, **media))
