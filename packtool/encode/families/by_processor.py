"""Families whose pictures are counted, spelled and made by their own transformers processor: a record each.

They have in common what makes this enough: a causal text tower with plain positions, one token in ``config.json`` that
stands for a piece of a picture, and a forward that takes what the processor made and puts features where that token is.
``processor.ProcessorFamily`` encodes for them, ``batch.processed`` loads for them. Each is proven in
``tests/batch/test_processed.py``.
"""

from __future__ import annotations

from packtool.encode.families.record import Family, Towers, encoded_by

_BY_PROCESSOR = encoded_by("processor.ProcessorFamily")


def _family(
    *model_types: str,
    inputs: tuple[str, ...] = (),
    vision: str = "model.vision_tower",
    aligner: tuple[str, ...] = ("model.multi_modal_projector",),
) -> Family:
    return Family(
        model_types=model_types,
        encoding=_BY_PROCESSOR,
        kinds=("image",),
        towers=Towers(vision=(vision,), aligner=aligner),
        positions="counted",
        processor_inputs=("pixel_values", *inputs),
    )


_NEWLINE = ("model.multi_modal_projector", "model.image_newline")
"""The second is learned, and stands at the end of each row of a picture's features."""

FAMILIES: tuple[Family, ...] = (
    _family("internvl"),
    _family("llava_onevision", inputs=("image_sizes", "batch_num_images"), aligner=_NEWLINE),
    _family("llava_next", inputs=("image_sizes",), aligner=_NEWLINE),
    _family("llava", inputs=("image_sizes",)),
    _family("mistral3", inputs=("image_sizes",)),
    _family(
        "idefics3",
        "smolvlm",
        inputs=("pixel_attention_mask",),
        vision="model.vision_model",
        aligner=("model.connector",),
    ),
    Family(
        model_types=("gemma3", "paligemma"),
        encoding=_BY_PROCESSOR,
        refused="the tokens of a picture see each other in both directions, and packed attention is causal",
    ),
)
