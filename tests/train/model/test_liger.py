"""Liger is tried on a model without weights; where it would fail, a warning says so."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.loop import checks
from packtool.train.model import compiled
from packtool.train.model.compiled import liger_warning, refuse_without_liger
from packtool.train.run import train
from tests.train.tiny import TinyWorld


@pytest.fixture
def patched_models(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A Liger that knows two families, of which it fails for one; the models that it patched."""
    models: list[Any] = []

    def apply(model: nn.Module, **settings: Any) -> None:
        assert settings == {"fused_linear_cross_entropy": False, "cross_entropy": False}
        if isinstance(model, nn.Identity):
            raise ImportError("cannot import name 'LigerOutput'")
        models.append(model)

    known: Any = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"qwen3": None, "qwen3_vl": None})
    liger: Any = ModuleType("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance = apply
    package: Any = ModuleType("liger_kernel")
    package.transformers = liger
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", known)
    return models


def test_family_that_liger_patches_passes(patched_models: list[Any]) -> None:
    model = nn.Linear(1, 1)
    refuse_without_liger(on_gpu=True)
    assert liger_warning(model, "qwen3") is None
    assert patched_models == [model]


def test_family_that_liger_cannot_patch_is_trained_without_it(patched_models: list[Any]) -> None:
    warning = liger_warning(nn.Identity(), "qwen3_vl")
    assert warning is not None
    assert "--use-liger-kernel has no effect" in warning
    assert "fails for a qwen3_vl model" in warning
    assert "ImportError: cannot import name 'LigerOutput'" in warning
    assert not patched_models


def test_family_that_liger_does_not_know_is_trained_without_it(patched_models: list[Any]) -> None:
    warning = liger_warning(nn.Linear(1, 1), "qwen2_5_omni_thinker")
    assert warning is not None
    assert "no kernels for qwen2_5_omni_thinker models" in warning
    assert not patched_models


def test_a_run_whose_model_liger_cannot_patch_trains(
    patched_models: list[Any], tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer, which would patch the model too, and fail, does not try."""
    monkeypatch.setattr(compiled, "base_model", lambda _: nn.Identity())
    monkeypatch.setattr(checks, "refuse_without_liger", lambda **_: None)
    monkeypatch.setattr(TrainConfig, "missing_packages", lambda _: [])
    losses = []
    for use_liger_kernel in (True, False):
        config = tiny.config(tmp_path / str(use_liger_kernel), use_liger_kernel=use_liger_kernel, max_steps=1)
        losses.append(train(config, SilentProgress()).last_loss)
    assert losses[0] == losses[1]
    assert losses[0] is not None
    assert not patched_models


def test_liger_without_a_gpu_is_refused(patched_models: list[Any]) -> None:
    with pytest.raises(ConfigError, match="need a GPU"):
        refuse_without_liger(on_gpu=False)
    assert not patched_models


def test_missing_liger_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match="the package liger-kernel cannot be imported") as exc_info:
        refuse_without_liger(on_gpu=True)
    assert "pip install liger-kernel" in str(exc_info.value)
