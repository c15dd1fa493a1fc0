"""Estimated memory of training steps against what the CPU allocates for them; ``scripts/bench_memory.py`` has all."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtool.train.prepare.figures import RankTokens
from tests.train.model.real_steps import (
    SHARED,
    SmallModel,
    batch_of,
    compare,
    compare_shared,
    predicted_bytes,
    small_model,
    tokens_of,
)
from tests.train.real_models import has_experts, traces_float32_experts

# Text, latent attention with experts, DeepStack, tiles without padding, windows in the tower, and sounds.
OF_FAMILY = {
    "gemma3_text": ("packs", "checkpointing"),
    "deepseek_v3": ("packs", "adapters"),
    "qwen3_vl": ("packs", "adapters", "checkpointing", "frozen towers", "trees"),
    "llava_next": ("packs", "frozen towers", "trees"),
    "minicpmv4_6": ("packs", "adapters"),
    "exaone4_5": ("packs", "checkpointing"),
    "qwen2.5-omni": ("packs", "frozen towers"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model_of(name: str, drawn_data: Path, folder: Path) -> SmallModel:
    model = small_model(name, drawn_data, folder)
    if has_experts(model.config) and not traces_float32_experts():
        pytest.skip("this torch gives no shapes for the products of float32 experts")
    return model


@pytest.mark.parametrize(
    ("name", "setting"), [(name, each) for name, settings in OF_FAMILY.items() for each in settings]
)
def test_estimate_equals_the_measured_step(name: str, setting: str, drawn_data: Path, folder: Path) -> None:
    estimated, measured = compare(model_of(name, drawn_data, folder), setting)
    assert estimated == pytest.approx(measured, rel=0.05)


def test_estimate_equals_the_measured_step_of_shared_sequences(drawn_data: Path, folder: Path) -> None:
    models = [model_of(name, drawn_data, folder) for name in ("qwen3", "qwen3_vl")]
    for estimated, measured in compare_shared(models, folder).values():
        assert estimated == pytest.approx(measured, rel=0.05)


def test_batches_have_pictures_and_shared_prefixes(drawn_data: Path, folder: Path) -> None:
    """Without them, the other tests would show little; and an estimate without them differs."""
    model = model_of("qwen3_vl", drawn_data, folder)
    tokens = tokens_of(batch_of(model, "trees"), model.spec)
    assert tokens.vision > 30
    assert tokens.keys > 2 * tokens.computed
    text = RankTokens(computed=tokens.computed)
    assert predicted_bytes(model, "trees", text) < 0.9 * predicted_bytes(model, "trees", tokens)
    assert model.settings[-1] == SHARED
