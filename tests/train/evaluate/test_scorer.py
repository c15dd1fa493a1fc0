"""Scores of tokens and samples of a packed sequence, for all kinds of models, which are restored afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from packtool.attention.recurrent import recurrent_layers
from packtool.batch.collate import collate_packs
from packtool.batch.positions import align_sample
from packtool.batch.spec import InputSpec
from packtool.cache.reader import SampleReader
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import MediaLimits
from packtool.train.evaluate.per_sample import (
    EvaluationBatch,
    EvaluationMicroBatches,
    Scorer,
    evaluating,
    is_packed,
    sample_scores,
)
from packtool.train.model.loss import head_of
from tests.attention.hybrids import hybrid_model
from tests.batch.reduced import (
    TEXT_MODELS,
    VISION_MODELS,
    mixed_samples,
    reduced_model,
    reduced_spec,
    save_image_processor,
)


class Samples(SampleReader):
    """A list of samples."""

    def __init__(self, samples: list[EncodedSample]) -> None:
        self.samples = samples

    def sample(self, position: int) -> EncodedSample:
        return self.samples[position]


def setting(name: str, directory: str = "") -> tuple[Any, InputSpec, list[EncodedSample]]:
    """Return a model with transformers' own attention, as for training on padded rows."""
    if name == "qwen3_next":
        model = hybrid_model(name)
        return model, InputSpec("", model.config, MediaLimits()), mixed_samples("qwen3")
    if name in VISION_MODELS:
        save_image_processor(name, directory)
    return reduced_model(name, packed=False), reduced_spec(name, directory), mixed_samples(name)


def scores(scorer: Scorer, spec: InputSpec, samples: list[EncodedSample], alignment: int = 1) -> np.ndarray:
    """Return the scores of samples in one packed sequence, (S, 4)."""
    dataset = EvaluationMicroBatches(Samples(samples), spec, [np.arange(len(samples))], alignment=alignment)
    item = dataset[0]
    assert isinstance(item, EvaluationBatch)
    losses, correct = scorer(item.batch)
    return sample_scores(*item.spans, item.batch.labels, losses, correct).numpy()


@pytest.mark.smoke
@pytest.mark.parametrize("name", [*TEXT_MODELS, *VISION_MODELS, "qwen3_next"])
def test_packed_and_aligned_scores_equal_unpacked_ones(name: str, tmp_path: Path) -> None:
    model, spec, samples = setting(name, str(tmp_path))
    model.train()
    assert not is_packed(model)
    with evaluating(model, packed=True) as scorer:
        assert is_packed(model)
        together, aligned = scores(scorer, spec, samples), scores(scorer, spec, samples, alignment=4)
        single_scores = np.concatenate([scores(scorer, spec, [sample]) for sample in samples])
    assert together == pytest.approx(single_scores, rel=1e-5, abs=1e-5)
    assert aligned == pytest.approx(single_scores, rel=1e-5, abs=1e-5)
    assert together[:, 1].tolist() == [np.count_nonzero(sample.labels[1:] >= 0) for sample in samples]
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    assert not any("forward" in vars(layer) for layer in recurrent_layers(model))
    assert model.training
    assert "forward" not in vars(head_of(model))


@torch.no_grad()
def test_first_wrong_and_sums_by_hand() -> None:
    """Targets in the middle and at the end of a sample; other tokens do not count."""
    model, spec, samples = setting("qwen3")
    with evaluating(model, packed=True):
        batch = collate_packs(samples[:1], spec)
        predicted = model(**batch.model_inputs()).logits[0]
    best = predicted.argmax(-1).tolist()
    for wrong_at in ([], [7], [3, 7], [8]):
        labels = np.full(9, -100, np.int32)
        labels[[3, 4, 7, 8]] = [best[place - 1] if place not in wrong_at else 50 + place for place in (3, 4, 7, 8)]
        sample = align_sample(EncodedSample(samples[0].input_ids, labels, np.zeros(0, np.int32), (), None, "", 0), 1)
        with evaluating(model, packed=True) as scorer:
            score = scores(scorer, spec, [samples[2], sample])[1]
        target_ids = torch.from_numpy(labels[1:].astype(np.int64))
        assert score[0] == pytest.approx(F.cross_entropy(predicted[:-1], target_ids, reduction="sum").item(), abs=1e-4)
        assert score[1:].tolist() == [4, 4 - len(wrong_at), wrong_at[0] if wrong_at else -1]
