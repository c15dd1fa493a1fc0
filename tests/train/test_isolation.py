"""A packed sample computes what it computes alone: logits, influence and gradients, for every family."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from packtool.attention.register import ATTENTION_NAME
from packtool.batch.collate import collate_packs, collate_padded
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.train.model.loss import takes_logits_to_keep, target_losses
from tests.batch.reduced import (
    FIRST_CONTROL,
    IMAGE_PAD,
    TEXT_MODELS,
    VISION_MODELS,
    make_picture,
    mixed_samples,
    reduced_model,
    reduced_spec,
    save_image_processor,
)

torch.set_num_threads(1)
Setting = tuple[PreTrainedModel, InputSpec, list[EncodedSample]]


@pytest.fixture(scope="module", params=[*TEXT_MODELS, *VISION_MODELS])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    name = request.param
    directory = str(tmp_path_factory.mktemp(name))
    if name in VISION_MODELS:
        save_image_processor(name, directory)
    return reduced_model(name), reduced_spec(name, directory), mixed_samples(name)


@torch.no_grad()
def packed_logits(model: PreTrainedModel, spec: InputSpec, samples: list[EncodedSample]) -> list[Tensor]:
    """Logits of each sample out of one packed sequence."""
    batch = collate_packs(samples, spec)
    logits = model(**batch.model_inputs()).logits[0]
    return list(logits.split(batch.lengths))[: len(samples)]


def unpacked_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with transformers' own attention; of the configuration too, which says which attention is used."""
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="sdpa").eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.fixture(autouse=True)
def _attention_stays_packed(setting: Setting) -> Iterator[None]:
    yield
    assert setting[0].config.get_text_config()._attn_implementation == ATTENTION_NAME


@torch.no_grad()
def plain_logits(model: PreTrainedModel, spec: InputSpec, sample: EncodedSample) -> Tensor:
    """Logits of one sample by transformers' own way: its attention, its mask, its positions."""
    ids = torch.from_numpy(sample.input_ids).long().unsqueeze(0)
    inputs = {"input_ids": ids}
    if sample.images:
        single_batch = collate_packs([sample], spec)
        inputs |= {"pixel_values": single_batch.pixel_values, "image_grid_thw": single_batch.image_grid_thw}
        inputs["mm_token_type_ids"] = (ids == IMAGE_PAD).int()
    return unpacked_copy(model)(**inputs).logits[0]


@pytest.mark.smoke
def test_packed_logits_equal_those_of_single_samples(setting: Setting) -> None:
    model, spec, samples = setting
    for sample, logits in zip(samples, packed_logits(model, spec, samples), strict=True):
        torch.testing.assert_close(logits, plain_logits(model, spec, sample), rtol=0, atol=1e-5)


def test_changed_sample_does_not_affect_others(setting: Setting) -> None:
    model, spec, samples = setting
    before = packed_logits(model, spec, samples)
    for changed in range(len(samples)):
        ids = samples[changed].input_ids
        ids = (ids + 7) % FIRST_CONTROL * (ids < FIRST_CONTROL) + ids * (ids >= FIRST_CONTROL)
        altered = dataclasses.replace(samples[changed], input_ids=ids.astype("int32"))
        after = packed_logits(model, spec, [*samples[:changed], altered, *samples[changed + 1 :]])
        check_only_change(changed, before, after)


def test_changed_image_does_not_affect_others(setting: Setting) -> None:
    model, spec, samples = setting
    before = packed_logits(model, spec, samples)
    for changed, sample in enumerate(samples):
        if sample.images:
            images = tuple(
                dataclasses.replace(image, data=make_picture(image.width, image.height, seed=99))
                for image in sample.images
            )
            altered = dataclasses.replace(sample, images=images)
            after = packed_logits(model, spec, [*samples[:changed], altered, *samples[changed + 1 :]])
            check_only_change(changed, before, after)


def check_only_change(changed: int, before: list[Tensor], after: list[Tensor]) -> None:
    moved = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    assert moved[changed] > 1e-2
    assert max([0.0, *moved[:changed], *moved[changed + 1 :]]) <= 1e-6


def gradients(model: PreTrainedModel, losses: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("label_logits_only", [True, False])
def test_gradients_of_the_pack_are_the_sum_over_its_samples(setting: Setting, label_logits_only: bool) -> None:
    model, spec, samples = setting
    assert takes_logits_to_keep(model)

    def loss(samples_of_pack: list[EncodedSample]) -> Tensor:
        return target_losses(
            model, collate_packs(samples_of_pack, spec), label_logits_only=label_logits_only
        ).weighted_sum()

    packed = gradients(model, [loss(samples)])
    expected = gradients(model, [loss([sample]) for sample in samples])
    assert packed.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, gradient in packed.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_padded_rows_have_the_packs_loss_and_gradients(setting: Setting) -> None:
    model, spec, samples = setting
    padded_model = unpacked_copy(model)
    packed_loss = target_losses(model, collate_packs(samples, spec), label_logits_only=True).weighted_sum()
    for label_logits_only in (True, False):
        batch = collate_padded(samples, spec)
        padded_loss = target_losses(padded_model, batch, label_logits_only=label_logits_only).weighted_sum()
        torch.testing.assert_close(padded_loss, packed_loss, rtol=1e-6, atol=0)
    packed, padded = gradients(model, [packed_loss]), gradients(padded_model, [padded_loss])
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, padded[name], rtol=1e-4, atol=2e-5)


def test_without_targets_the_loss_is_zero_but_reaches_every_parameter(setting: Setting) -> None:
    model, spec, _ = setting
    loss = target_losses(model, collate_packs([], spec), label_logits_only=True).weighted_sum()
    parameter_gradients = gradients(model, [loss])
    assert loss.item() == 0.0
    assert parameter_gradients.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in parameter_gradients.values())


def test_a_pack_of_text_alone_reaches_the_vision_tower_with_zero_gradients(setting: Setting) -> None:
    model, spec, samples = setting
    text = [sample for sample in samples if not sample.images]
    parameter_gradients = gradients(
        model, [target_losses(model, collate_packs(text, spec), label_logits_only=True).weighted_sum()]
    )
    assert parameter_gradients.keys() == dict(model.named_parameters()).keys()
    if spec.has_vision:
        assert not any(gradient.any() for name, gradient in parameter_gradients.items() if "visual" in name)
        assert any(gradient.any() for name, gradient in parameter_gradients.items() if "visual" not in name)
