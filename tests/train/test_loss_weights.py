"""Loss scales: a weight multiplies a target's loss, packed, padded or alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from packtool.batch.collate import collate_packs, collate_padded
from packtool.train.model.loss import target_losses
from tests.batch.reduced import make_sample, reduced_model, reduced_spec


def weighted(seed: int, length: int) -> Any:
    sample = make_sample(length, seed=seed)
    weights = np.random.default_rng(seed).choice(np.array([0.5, 1, 2], np.float32), sample.length)
    return dataclasses.replace(sample, loss_scale=np.where(sample.labels == -100, 0, weights).astype(np.float32))


@pytest.mark.parametrize("label_logits_only", [True, False])
def test_a_weighted_pack_is_the_sum_of_its_samples(label_logits_only: bool) -> None:
    samples = [weighted(1, 9), make_sample(7, seed=2), weighted(3, 12)]
    spec, model = reduced_spec("qwen3"), reduced_model("qwen3")
    packed = collate_packs(samples, spec)
    assert packed.loss_weights is not None
    assert packed.loss_weights.shape == packed.labels.shape
    together = target_losses(model, packed, label_logits_only=label_logits_only).weighted_sum()
    losses = [
        target_losses(model, collate_packs([one], spec), label_logits_only=label_logits_only).weighted_sum()
        for one in samples
    ]
    torch.testing.assert_close(together, torch.stack(losses).sum())
    padded_model = reduced_model("qwen3", packed=False)
    padded = target_losses(
        padded_model, collate_padded(samples, spec), label_logits_only=label_logits_only
    ).weighted_sum()
    torch.testing.assert_close(padded, together)


def test_each_weight_applies_to_its_target() -> None:
    sample = weighted(1, 9)
    batch = collate_packs([sample], reduced_spec("qwen3"))
    assert batch.loss_weights is not None
    np.testing.assert_array_equal(batch.loss_weights[0, :-1].numpy(), sample.loss_scale[1:])
    doubled = dataclasses.replace(sample, loss_scale=sample.loss_scale * 2)
    model = reduced_model("qwen3")
    once = target_losses(model, batch, label_logits_only=True).weighted_sum()
    twice = target_losses(model, collate_packs([doubled], reduced_spec("qwen3")), label_logits_only=True).weighted_sum()
    torch.testing.assert_close(twice, once * 2)
    plain = collate_packs([dataclasses.replace(sample, loss_scale=None)], reduced_spec("qwen3"))
    assert plain.loss_weights is None
    assert plain.num_target_tokens == batch.num_target_tokens
