from __future__ import annotations

import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.config.data import MediaOptions
from packtool.encode import families
from packtool.encode.families import FAMILIES, OTHER, REFUSED, TEXT, family_of, is_multimodal
from packtool.encode.families.qwen_vl import image_limits, smart_resize
from packtool.encode.families.record import Family
from packtool.errors import ConfigError

SETTINGS = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}


@pytest.mark.smoke
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([28, 32]), st.integers(1, 40), st.integers(41, 4000))
def test_smart_resize_equals_that_of_transformers(height: int, width: int, factor: int, low: int, high: int) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as theirs

    low, high = low * factor**2, high * factor**2
    try:
        expected = theirs(height, width, factor, low, high)
    except ValueError:
        with pytest.raises(ValueError, match="200 times"):
            smart_resize(height, width, factor, low, high)
    else:
        assert smart_resize(height, width, factor, low, high) == expected


@pytest.mark.smoke
def test_limits_come_from_settings_then_options() -> None:
    assert image_limits(SETTINGS, MediaOptions()).max_pixels == 16777216
    tokens = image_limits(SETTINGS, MediaOptions(image_max_token_num=5000, image_min_token_num=4))
    assert (tokens.max_pixels, tokens.min_pixels) == (5000 * 32 * 32, 4 * 32 * 32)
    assert image_limits(SETTINGS, MediaOptions(max_pixels=100_000)).max_pixels == 100_000
    with pytest.raises(ConfigError, match=r"minimum number of pixels of a picture \(65536\)"):
        image_limits(SETTINGS, MediaOptions(max_pixels=1000))


def test_multimodal_models_are_recognized() -> None:
    assert not is_multimodal({"model_type": "llama"})
    assert is_multimodal({"model_type": "qwen3_vl"})
    assert is_multimodal({"model_type": "internvl", "vision_config": {}})


def test_every_family_file_is_registered() -> None:
    names = (module.name for module in pkgutil.iter_modules(families.__path__, families.__name__ + "."))
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    records = {value.title: value for value in flat if isinstance(value, Family)}
    assert {family.title for family in FAMILIES} <= set(records)
    assert [title for title, record in records.items() if record not in (*FAMILIES, *REFUSED, OTHER)] == []
    claimed = [model_type for family in (*FAMILIES, *REFUSED) for model_type in family.model_types]
    assert len(claimed) == len(set(claimed))


def test_every_vision_model_of_transformers_is_supported_or_refused_with_a_reason() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    unknown = [name for name in NAMES if family_of({"model_type": name, "vision_config": {}}) is OTHER]
    # Text alone is what is trained of these: pictures are in their vocabulary, or they have none.
    assert [name for name in unknown if family_of(CONFIG_MAPPING[name]().to_dict()) is not TEXT] == []
    names = NAMES.keys() | {"phi4_multimodal"}  # which transformers lists as a model of text
    assert {name for family in REFUSED for name in family.model_types} <= names
