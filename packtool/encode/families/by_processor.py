"""Families whose pictures are counted, spelled and made by their own transformers processor: a record each.

They have in common what makes this enough: a causal text tower with plain positions, one token in ``config.json`` that
stands for a piece of a picture, and a forward that takes what the processor made and puts features where that token is.
``processor.ProcessorFamily`` encodes for them, ``batch.processed`` loads for them. Each is proven in
``tests/batch/test_processed.py``.
"""

from __future__ import annotations

from packtool.encode.families.record import BY_PROCESSOR, Family, Towers


def _family(
    title: str,
    *model_types: str,
    inputs: tuple[str, ...] = (),
    vision: str = "model.vision_tower",
    aligner: tuple[str, ...] = ("model.multi_modal_projector",),
) -> Family:
    return Family(
        title=title,
        model_types=model_types,
        encoding=BY_PROCESSOR,
        kinds=("image",),
        towers=Towers(vision=(vision,), aligner=aligner),
        positions="counted",
        processor_inputs=("pixel_values", *inputs),
    )


_NEWLINE = ("model.multi_modal_projector", "model.image_newline")
"""The second is learned, and stands at the end of each row of a picture's features."""

FAMILIES: tuple[Family, ...] = (
    _family("InternVL 3, 3.5", "internvl"),
    _family(
        "LLaVA-OneVision (one picture in a row)",
        "llava_onevision",
        inputs=("image_sizes", "batch_num_images"),
        aligner=_NEWLINE,
    ),
    _family("LLaVA-NeXT (1.6)", "llava_next", inputs=("image_sizes",), aligner=_NEWLINE),
    _family("LLaVA 1.5", "llava", inputs=("image_sizes",)),
    _family("Mistral 3", "mistral3", inputs=("image_sizes",)),
    _family(
        "Idefics 3, SmolVLM",
        "idefics3",
        "smolvlm",
        inputs=("pixel_attention_mask",),
        vision="model.vision_model",
        aligner=("model.connector",),
    ),
    Family(
        title="Gemma 3, PaliGemma",
        model_types=("gemma3", "paligemma"),
        encoding=BY_PROCESSOR,
        refused="the tokens of a picture see each other in both directions, and packed attention is causal",
    ),
)
