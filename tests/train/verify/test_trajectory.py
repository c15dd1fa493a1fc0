"""Steps trained packed and unpacked have the same losses and weights, unless samples leak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from packtool.attention.choose import KERNELS
from packtool.attention.kernel import Varlen
from packtool.attention.register import set_attention
from packtool.cache.reader import CacheReader
from packtool.config.commands import VerifyConfig
from packtool.encode.encoded import EncodedSample
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.verify.run import verify
from packtool.train.verify.trajectory import StepSamples, _check_weights, compare_trajectories
from tests.batch.reduced import VISION_MODELS, mixed_samples, reduced_model, reduced_spec, save_image_processor
from tests.train.tiny import TinyWorld

torch.set_num_threads(1)


def steps_of(samples: list[EncodedSample], num_steps: int) -> list[StepSamples]:
    """Return steps of all samples in two packs, which differ between steps."""
    num_targets = sum(int((sample.labels[1:] != -100).sum()) for sample in samples)
    turned = [[(step + place) % len(samples) for place in range(len(samples))] for step in range(num_steps)]
    return [StepSamples([numbers[:2], numbers[2:]], num_targets) for numbers in turned]


def loader(name: str) -> Callable[[], PreTrainedModel]:
    """Return a function that loads a reduced model with packed attention."""

    def load() -> PreTrainedModel:
        model = reduced_model(name)
        set_attention(model)
        return model

    return load


@pytest.mark.parametrize("name", VISION_MODELS)
def test_vision_models_train_the_same_packed_and_unpacked(name: str, tmp_path: Path) -> None:
    save_image_processor(name, str(tmp_path))
    samples, spec = mixed_samples(name), reduced_spec(name, str(tmp_path))
    trained, checks = compare_trajectories(
        loader(name), steps_of(samples, 3), samples.__getitem__, spec, SilentProgress()
    )
    assert [check.name for check in checks] == ["losses", "weights"]
    assert all(check.excess < 0.2 for check in checks), checks
    assert trained[2].packed < trained[0].packed
    assert [(step.step, step.num_samples, step.num_packs) for step in trained] == [
        (n, len(samples), 2) for n in (1, 2, 3)
    ]


def test_leak_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention that ignores sample boundaries."""
    save_image_processor(VISION_MODELS[-1], str(tmp_path))
    samples, spec = mixed_samples(VISION_MODELS[-1]), reduced_spec(VISION_MODELS[-1], str(tmp_path))
    attend = KERNELS["sdpa"].attend

    def leak(q: Any, k: Any, v: Any, varlen: Varlen, **kwargs: Any) -> Any:
        return attend(q, k, v, Varlen.of_lengths([len(q)]), **kwargs)

    monkeypatch.setattr(KERNELS["sdpa"], "attend", leak)
    compared = compare_trajectories(
        loader(VISION_MODELS[-1]), steps_of(samples, 1), samples.__getitem__, spec, SilentProgress()
    )
    assert [check.passed for check in compared[1]] == [False, False]
    assert all(check.excess > 50 for check in compared[1])
    assert "packed training differs from unpacked training: in step 1, loss" in compared[1][0].sentence()


def config(tiny: TinyWorld, **settings: Any) -> VerifyConfig:
    defaults = {"model": tiny.model, "cached_dataset": (tiny.cache,), "packing_length": 128, "trajectory": 2}
    return VerifyConfig(**defaults | settings)


def test_steps_equal_those_of_training(tiny: TinyWorld) -> None:
    """Also across the end of an epoch, and without samples that are too long for a pack."""
    num_short = int((CacheReader.open([tiny.cache]).index.length <= 56).sum())
    assert 14 < num_short < 28
    report = verify(config(tiny, samples_per_step=14, trajectory=3, packing_length=56))
    assert report.passed
    report.raise_if_failed()
    assert [step.num_samples for step in report.trajectory] == [14, num_short - 14, 14]
    assert report.num_samples == num_short + 14
    assert report.num_packs == sum(step.num_packs for step in report.trajectory) < report.num_samples
    assert report.dtype == "float32"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trajectory": None, "samples_per_step": 3}, "--samples-per-step requires --trajectory"),
        ({"torch_dtype": "bfloat16"}, "--trajectory computes in float32"),
        ({"sequence_parallel_size": 2}, "--trajectory trains in one process"),
        ({"num_packs": 3}, "--num-packs compares single packs"),
        ({"share_prefix": "true"}, "--share-prefix true cannot be combined with --trajectory"),
    ],
)
def test_conflicting_options(tiny: TinyWorld, settings: dict[str, Any], message: str) -> None:
    problems = config(tiny, **settings).problems()
    assert any(message in problem for problem in problems), problems


def test_steps_of_single_samples_are_refused(tiny: TinyWorld) -> None:
    with pytest.raises(ConfigError, match="no two samples of these steps share a pack"):
        verify(config(tiny, samples_per_step=1))


def test_nan_weights_fail_the_check() -> None:
    """Whether weights of later modules differ by more or less than allowed."""
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights["0.weight"] += torch.nan
    weights["2.weight"] += 1.0
    check = _check_weights(model, weights, 1)
    assert (check.where, check.passed) == ("in 0.weight", False)
