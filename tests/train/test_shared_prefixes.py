"""A prefix computed once computes what its samples compute alone: logits, loss, gradients and influence."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from packtool.attention.register import set_attention
from packtool.attention.support import refuse_leaky_inputs
from packtool.batch.batch import Batch, PackedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_tree
from packtool.batch.prefix_tree import find_tree
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.train.model.loss import LossFunction, target_losses
from packtool.train.model.trainable import enable_checkpointing
from tests.batch.reduced import (
    FIRST_CONTROL,
    TEXT_MODELS,
    VISION_MODELS,
    make_picture,
    reduced_model,
    reduced_spec,
    samples_with_prefixes,
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
    return reduced_model(name), reduced_spec(name, directory), samples_with_prefixes(name)


def tree_of(samples: list[EncodedSample], spec: InputSpec) -> TreeBatch:
    batch = collate_tree(samples, spec, min_shared=1)
    assert isinstance(batch, TreeBatch)
    return batch


@torch.no_grad()
def tree_logits(model: PreTrainedModel, spec: InputSpec, samples: list[EncodedSample]) -> list[Tensor]:
    """Logits of each sample out of one tree."""
    batch = tree_of(samples, spec)
    parts = model(**batch.model_inputs()).logits[0].split(batch.lengths)
    nodes = find_tree(samples, spec, min_shared=1)
    return [
        torch.cat([part for node, part in zip(nodes, parts, strict=False) if sample_index in node.samples])
        for sample_index in range(len(samples))
    ]


def unpacked_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with transformers' own attention."""
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="sdpa").eval()
    other.load_state_dict(model.state_dict())
    return other


def batch_of(batch: PackedBatch) -> Batch:
    """A batch of one sample without boundaries."""
    return Batch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(Batch)})


def test_tree_logits_equal_those_of_single_samples(setting: Setting) -> None:
    model, spec, samples = setting
    plain = unpacked_copy(model)
    for sample, logits in zip(samples, tree_logits(model, spec, samples), strict=True):
        with torch.no_grad():
            sample_logits = plain(**batch_of(collate_packs([sample], spec)).model_inputs()).logits[0, : sample.length]
        torch.testing.assert_close(logits, sample_logits, rtol=0, atol=1e-5)


def gradients(model: PreTrainedModel, losses: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def same(gradients_found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert gradients_found.keys() == expected.keys()
    for name, gradient in gradients_found.items():
        unit = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(
            gradient, expected[name], rtol=0, atol=tolerance * unit, msg=lambda text, n=name: n + text
        )


@pytest.mark.parametrize("reduction", ["token", "sample"])
def test_tree_loss_and_gradients_are_sums_over_single_samples(setting: Setting, reduction: str) -> None:
    model, spec, samples = setting
    spec = dataclasses.replace(spec, loss_reduction=reduction)
    scales = np.random.default_rng(0)
    samples = [
        dataclasses.replace(sample, loss_scale=scales.uniform(0.1, 2, sample.length).astype(np.float32))
        for sample in samples
    ]
    for tree_samples in (setting[2], samples):
        plain = unpacked_copy(model)
        sample_losses = [
            target_losses(plain, batch_of(collate_packs([sample], spec)), label_logits_only=False).weighted_sum()
            for sample in tree_samples
        ]
        batch = tree_of(tree_samples, spec)
        expected, total = gradients(plain, sample_losses), sum(float(loss.detach()) for loss in sample_losses)
        assert expected.keys() == dict(model.named_parameters()).keys()
        with LossFunction.temporary(model) as loss_function:
            assert loss_function.head_loss is not None
            by_head = loss_function(model, batch).weighted_sum()
            assert float(by_head.detach()) == pytest.approx(total, rel=1e-5)
            same(gradients(model, [by_head]), expected)
        for label_logits_only in (True, False):
            loss = target_losses(model, batch, label_logits_only=label_logits_only).weighted_sum()
            assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
            same(gradients(model, [loss]), expected)


def test_float64_results_differ_only_by_rounding(setting: Setting) -> None:
    model, spec, samples = copy.deepcopy(setting[0]).double(), *setting[1:]
    if spec.has_vision:
        samples = [sample for sample in samples if sample.images]
    loss = target_losses(model, tree_of(samples, spec), label_logits_only=True).weighted_sum()
    tree_gradients = gradients(model, [loss])
    sample_losses = [
        target_losses(model, collate_packs([sample], spec), label_logits_only=True).weighted_sum() for sample in samples
    ]
    assert float(loss.detach()) == pytest.approx(sum(float(one.detach()) for one in sample_losses), rel=1e-6)
    # Losses and rotary angles are computed in float32.
    same(tree_gradients, gradients(model, sample_losses), tolerance=2e-6)


def test_gradient_checkpointing_keeps_the_gradients(setting: Setting) -> None:
    model, spec, samples = setting
    batch = tree_of(samples, spec)
    expected = gradients(model, [target_losses(model, batch, label_logits_only=True).weighted_sum()])
    checkpointed = copy.deepcopy(model).train()
    set_attention(checkpointed)
    enable_checkpointing(checkpointed)
    same(gradients(checkpointed, [target_losses(checkpointed, batch, label_logits_only=True).weighted_sum()]), expected)


def changed_from(sample: EncodedSample, start: int) -> EncodedSample:
    """Other words from a place on, and no other targets than before."""
    ids = sample.input_ids.copy()
    words = ids < FIRST_CONTROL
    words[:start] = False
    ids[words] = (ids[words] + 7) % FIRST_CONTROL
    return dataclasses.replace(sample, input_ids=ids, labels=np.where(sample.labels == -100, -100, ids))


def test_changed_branch_does_not_affect_others(setting: Setting) -> None:
    model, spec, samples = setting
    before = tree_logits(model, spec, samples)
    nodes = find_tree(samples, spec, min_shared=1)
    leaves = [node for node in nodes if len(node.samples) == 1 and node.length > 1]
    assert len(leaves) >= 4
    for leaf in leaves:
        sample_index = leaf.samples[0]
        # Behind its first token: the tree stays as it is.
        altered = [changed_from(one, leaf.start + 1) if i == sample_index else one for i, one in enumerate(samples)]
        assert [node.samples for node in find_tree(altered, spec, min_shared=1)] == [node.samples for node in nodes]
        moved = [float((a - b).abs().max()) for a, b in zip(tree_logits(model, spec, altered), before, strict=True)]
        assert moved.pop(sample_index) > 1e-2
        assert max(moved) == 0.0


def test_changed_prefix_affects_all_its_samples(setting: Setting) -> None:
    model, spec, samples = setting
    before, plain = tree_logits(model, spec, samples), unpacked_copy(model)
    node = max(find_tree(samples, spec, min_shared=1), key=lambda node: len(node.samples))
    assert len(node.samples) >= 3
    assert node.start == 0
    altered = [
        changed_from(one, 0) if sample_index in node.samples else one for sample_index, one in enumerate(samples)
    ]
    if spec.has_vision:
        picture = altered[node.samples[0]].images[0]
        other = dataclasses.replace(picture, data=make_picture(picture.width, picture.height, seed=99))
        altered = [
            dataclasses.replace(one, images=(other, *one.images[1:])) if sample_index in node.samples else one
            for sample_index, one in enumerate(altered)
        ]
    for sample_index, (after, expected) in enumerate(zip(tree_logits(model, spec, altered), before, strict=True)):
        moved = float((after - expected).abs().max())
        assert moved > 1e-2 if sample_index in node.samples else moved == 0.0
        with torch.no_grad():
            sample_logits = plain(**batch_of(collate_packs([altered[sample_index]], spec)).model_inputs()).logits[
                0, : len(after)
            ]
        torch.testing.assert_close(after, sample_logits, rtol=0, atol=1e-5)


def test_tree_inputs_pass_the_leak_check(setting: Setting) -> None:
    _, spec, samples = setting
    refuse_leaky_inputs(tree_of(samples, spec).model_inputs())
