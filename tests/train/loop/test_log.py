"""The shares of a log line: what is counted as waiting, and that nothing is counted twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.batch.batch import Batch, TreeBatch
from packtool.batch.collate import collate_packs, collate_padded, collate_tree
from packtool.encode.encoded import EncodedSample
from packtool.train.loop import log
from packtool.train.loop.log import Meter
from packtool.train.model.loss import LossFunction, TargetLosses, target_losses
from packtool.train.prepare.figures import StepFigures
from tests.batch.reduced import reduced_model, reduced_spec, samples_with_prefixes

ACCELERATOR = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
seconds = st.integers(0, 1000).map(float)


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@given(lines=st.lists(st.lists(seconds, min_size=7, max_size=7), min_size=1, max_size=5))
def test_waits_and_computation_add_up_to_the_time_of_a_line(lines: list[list[float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(log, "time", clock)
        measured = Meter(by_channel=False)
        written = 0.0
        for load, compute, unlogged, evaluate, reach, make, write in lines:

            def loaded(load: float = load) -> Iterator[str]:
                clock.now += load
                yield "a micro-batch"

            assert list(measured.timed(loaded())) == ["a micro-batch"]
            clock.now += compute
            measured.add_step(StepFigures())
            # A step without a line of its own.
            measured.begin_log()
            clock.now += unlogged
            clock.now += evaluate
            measured.exclude(evaluate)
            measured.begin_log()
            clock.now += reach
            line = measured.take_log_line(0.0, ACCELERATOR, copy_seconds=None)
            assert "copy_wait" not in line
            assert line["seconds"] == written + load + compute + unlogged + reach
            assert line["data_wait"] * line["seconds"] == pytest.approx(load)
            assert line["log_wait"] * line["seconds"] == pytest.approx(written + reach)
            clock.now += write
            measured.end_log()
            # An evaluation between two lines is none of either.
            clock.now += make
            measured.exclude(make)
            written = write


def test_copy_wait_is_a_share_of_the_time_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    measured = Meter(by_channel=False)
    measured.add_step(StepFigures())
    clock.now += 8.0
    measured.begin_log()
    assert measured.take_log_line(0.0, ACCELERATOR, copy_seconds=2.0)["copy_wait"] == 0.25


@pytest.mark.parametrize("by_channel", [True, False])
def test_target_in_a_shared_prefix_counts_for_each_sample(by_channel: bool) -> None:
    model, spec = reduced_model("qwen3"), reduced_spec("qwen3")
    channels = ("a", "b", "a", "a", None, "b", "a")
    samples = [
        dataclasses.replace(sample, channel=channel)
        for sample, channel in zip(samples_with_prefixes("qwen3"), channels, strict=True)
    ]
    # Some predictions must be right, for accuracies to differ.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)
        batch = collate_packs(samples, spec)
        model.lm_head.weight[int(batch.labels[0, batch.target_positions[0]])] += 1.0

    def logged_figures(batch: Batch) -> dict[str, float]:
        measured = Meter(by_channel=by_channel)
        with LossFunction.temporary(model) as loss_function:
            assert loss_function.head_loss is not None
            measured.add_losses(loss_function(model, batch), batch)
        line = measured.take_log_line(0.0, ACCELERATOR, copy_seconds=None)
        return {name: value for name, value in line.items() if name.startswith(("loss_", "token_accuracy"))}

    tree = collate_tree(samples, spec, min_shared=1)
    assert isinstance(tree, TreeBatch)
    assert tree.target_counts.max() > 1
    assert (tree.target_counts > 0).sum(dim=0).max() > 1, "a target of samples of several channels"
    figures = logged_figures(tree)
    assert figures == pytest.approx(logged_figures(batch), rel=1e-4)
    assert len(figures) == (7 if by_channel else 1)


@pytest.mark.smoke
@settings(max_examples=30)
@given(
    weights=st.lists(st.sampled_from([None, 1.0, 0.5, 2.0]), min_size=7, max_size=7),
    kind=st.sampled_from(["packed", "padded", "tree"]),
    reduction=st.sampled_from(["token", "sample"]),
    by_channel=st.booleans(),
    in_head=st.booleans(),
)
def test_loss_is_the_unweighted_mean_and_objective_the_weighted_one(
    weights: list[float | None], kind: str, reduction: str, by_channel: bool, in_head: bool
) -> None:
    spec = dataclasses.replace(reduced_spec("qwen3"), loss_reduction=reduction)
    model = reduced_model("qwen3", packed=kind != "padded")
    samples = [
        dataclasses.replace(
            sample,
            channel="ab"[index % 2],
            loss_scale=None if weight is None else np.full(sample.length, weight, np.float32),
        )
        for index, (sample, weight) in enumerate(zip(samples_with_prefixes("qwen3"), weights, strict=True))
    ]
    collate = {"packed": collate_packs, "padded": collate_padded, "tree": partial(collate_tree, min_shared=1)}[kind]
    batch = collate(samples, spec)

    def losses_of(batch: Batch) -> TargetLosses:
        if not in_head:
            return target_losses(model, batch, label_logits_only=by_channel)
        with LossFunction.temporary(model) as loss_function:
            assert loss_function.head_loss is not None
            return loss_function(model, batch)

    def losses_alone(sample: EncodedSample) -> list[float]:
        return losses_of(collate([sample], spec)).losses.tolist()

    losses_by_sample = [losses_alone(sample) for sample in samples]
    counts = [len(losses) for losses in losses_by_sample]
    units = len(samples) if reduction == "sample" else sum(counts)
    measured = Meter(by_channel=by_channel)
    losses = losses_of(batch)
    measured.add_losses(losses, batch)
    measured.add_step(StepFigures(target_tokens=sum(counts), units=units))
    line = measured.take_log_line(losses.weighted_sum().item(), ACCELERATOR, copy_seconds=None)
    assert line["loss"] == pytest.approx(sum(map(sum, losses_by_sample)) / sum(counts), rel=1e-4)
    has_weights = reduction == "sample" or any(weight not in (None, 1.0) for weight in weights)
    assert ("objective" in line) == has_weights
    if has_weights:
        each = np.array(counts) if reduction == "sample" else np.ones(len(samples))
        scaled = [sum(losses) * (1.0 if w is None else w) for losses, w in zip(losses_by_sample, weights, strict=True)]
        assert line["objective"] == pytest.approx((scaled / each).sum() / units, rel=1e-4)
    assert ("loss_a" in line) == by_channel
