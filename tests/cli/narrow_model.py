"""The demo's model with narrow layers, for commands whose results do not depend on its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packtool.demo import model as demo_model


def make_narrow_model(directory: Path) -> None:
    """Write the demo's model with a quarter of its width: training it takes a fraction of the CPU time.

    Tokenizer, template and processor are the demo's, so caches contain the same tokens.
    """
    config_of = demo_model._model_config

    def narrow_config(tokenizer: Any) -> Any:
        config = config_of(tokenizer)
        text, vision = config.text_config, config.vision_config
        text.hidden_size, text.intermediate_size, text.num_hidden_layers = 48, 96, 2
        text.num_attention_heads, text.num_key_value_heads = 4, 2
        vision.hidden_size, vision.intermediate_size, vision.num_heads = 48, 96, 4
        vision.out_hidden_size = 48
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "_model_config", narrow_config)
        demo_model.make_model(str(directory), 0)
