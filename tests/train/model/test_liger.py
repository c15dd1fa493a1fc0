"""Liger is tried on a model without weights, and refused by name where it would fail."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from packtool.errors import ConfigError, UnsupportedModelError
from packtool.train.model.compiled import refuse_without_liger


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
    refuse_without_liger(model, "qwen3", on_gpu=True)
    assert patched_models == [model]


def test_family_that_liger_cannot_patch_is_refused(patched_models: list[Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"fails for a qwen3_vl model .*ImportError: .*LigerOutput"):
        refuse_without_liger(nn.Identity(), "qwen3_vl", on_gpu=True)
    assert not patched_models


def test_family_that_liger_does_not_know_is_refused(patched_models: list[Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="no kernels for qwen2_5_omni_thinker models"):
        refuse_without_liger(nn.Linear(1, 1), "qwen2_5_omni_thinker", on_gpu=True)
    assert not patched_models


def test_liger_without_a_gpu_is_refused(patched_models: list[Any]) -> None:
    with pytest.raises(ConfigError, match="need a GPU"):
        refuse_without_liger(nn.Linear(1, 1), "qwen3", on_gpu=False)
    assert not patched_models


def test_missing_liger_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match="the package liger-kernel cannot be imported") as exc_info:
        refuse_without_liger(nn.Linear(1, 1), "qwen3", on_gpu=True)
    assert "pip install liger-kernel" in str(exc_info.value)
