"""One call of the vision tower for pictures and videos, merged by index: the numbers of transformers' own way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from packtool.attention.features import install_tower_hooks, original_features
from packtool.attention.register import route_towers
from packtool.batch.tower_inputs import tower_inputs
from tests.batch.reduced import IMAGE_PAD, VISION_END, VISION_MODELS, VISION_START, reduced_model, reduced_spec

VIDEO_PAD = 93
TOKENS = [5, VISION_START, *[IMAGE_PAD] * 2, VISION_END, 7, VISION_START, *[VIDEO_PAD] * 4, VISION_END, 8, 9]


def inputs_for(model: PreTrainedModel, name: str, kinds: set[str]) -> dict[str, Any]:
    """Two pictures of a token each and a video of four, or some of them."""
    vision = model.config.vision_config
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    random = torch.Generator().manual_seed(1)
    model_inputs: dict[str, Any] = {"input_ids": torch.tensor([TOKENS]), "use_cache": False}
    model_inputs["position_ids"] = torch.arange(len(TOKENS)).view(1, 1, -1).expand(4, 1, -1)
    if "image" in kinds:
        model_inputs["pixel_values"] = torch.randn(8, patch_dim, generator=random)
        model_inputs["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 2]])
    if "video" in kinds:
        model_inputs["pixel_values_videos"] = torch.randn(16, patch_dim, generator=random)
        model_inputs["video_grid_thw"] = torch.tensor([[2, 2, 4]])
    return model_inputs | {"towers": tower_inputs(reduced_spec(name), model_inputs, model_inputs["input_ids"])}


def looks_and_gradients(model: PreTrainedModel, name: str, kinds: set[str]) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Calls of the tower, logits, and gradients of their squares."""
    calls: list[int] = []
    tower: Any = model.model.visual  # type: ignore[union-attr]  # a model that sees
    handle = tower.register_forward_pre_hook(lambda *_: calls.append(1))
    logits = model(**inputs_for(model, name, kinds)).logits
    logits.square().mean().backward()
    handle.remove()
    return len(calls), logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", VISION_MODELS)
@pytest.mark.parametrize("kinds", [{"image", "video"}, {"image"}, {"video"}, set()])
def test_one_call_equals_two(name: str, kinds: set[str]) -> None:
    model = reduced_model(name, packed=False)
    other = copy.deepcopy(model)
    for _ in range(2):  # once is enough, twice does no harm
        install_tower_hooks(model)
        route_towers(model)
    looks, logits, gradients = looks_and_gradients(model, name, kinds)
    _, expected, others = looks_and_gradients(other, name, kinds)
    assert looks == bool(kinds)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert gradients.keys() == others.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", VISION_MODELS)
def test_original_vision_forward_is_available_temporarily(name: str) -> None:
    model = reduced_model(name, packed=False)
    install_tower_hooks(model)
    with original_features(model):
        looks, expected, _ = looks_and_gradients(model, name, {"image", "video"})
    assert looks == 2
    looks, logits, _ = looks_and_gradients(model, name, {"image", "video"})
    assert looks == 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", VISION_MODELS)
def test_copied_model_uses_its_own_tower(name: str) -> None:
    model = reduced_model(name, packed=False)
    install_tower_hooks(model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.model.visual.parameters():  # type: ignore[union-attr]
            parameter.mul_(1.5)
    model_inputs = inputs_for(model, name, {"image", "video"})
    with torch.no_grad():
        before, other = model(**model_inputs).logits, changed(**model_inputs).logits
        assert not torch.allclose(before, other)
        assert torch.equal(model(**model_inputs).logits, before)


@pytest.mark.parametrize("name", VISION_MODELS)
def test_interrupted_forward_pass_leaves_no_state(name: str) -> None:
    model: Any = reduced_model(name, packed=False)
    install_tower_hooks(model)
    model_inputs = inputs_for(model, name, {"image", "video"})
    with torch.no_grad():
        expected = model(**inputs_for(model, name, set())).logits
        with pytest.raises(AttributeError):
            model(**model_inputs | {"position_ids": "none"})
        assert torch.equal(model(**inputs_for(model, name, set())).logits, expected)
