"""A few steps trained twice: packed with ``--samples-per-step``, and unpacked, each sample by itself.

Both begin with the same weights, in float32 and without dropout, and take the same steps of AdamW. Packed steps are
those that ``packtool train`` plans. Unpacked ones go through transformers' own attention, one sample after the other,
with their gradients added up: what a trainer that packs nothing does with a batch of these samples.

Price: two trainings, each with weights, gradients and two moments in float32, 16 bytes for each weight; the weights of
the first are kept on the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from packtool.attention.register import own_attention
from packtool.attention.support import refuse_leaky_inputs
from packtool.batch.batch import Batch
from packtool.batch.collate import collate_packs
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.config.commands import VerifyConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.encode.encoded import EncodedSample
from packtool.errors import ConfigError
from packtool.planning.options import PlanOptions
from packtool.progress import Progress
from packtool.train.model.loss import takes_logits_to_keep
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.timeline import Timeline
from packtool.train.verify.checks import Check, without_dropout
from packtool.train.verify.pack_under_test import Tolerances, as_transformers_has_it, batch_loss

_LEARNING_RATE, _WEIGHT_DECAY, _MAX_GRAD_NORM = 1e-4, 0.1, 1.0
_EPSILON = 1e-6
"""AdamW's, above gradients that are nothing but rounding: those of keys' biases are 0, and would go either way."""
_ROUNDING = 1e-2
"""Part of the way that AdamW can move a weight which rounding explains; a leak changes the way altogether."""


@dataclass(frozen=True)
class TrainedStep:
    """One optimizer step, both ways.

    Args:
        step: from 1.
        num_samples, num_targets: of the step.
        num_packs: that its samples were packed in.
        packed, unpacked: mean loss over the target tokens, before the step.
    """

    step: int
    num_samples: int
    num_targets: int
    num_packs: int
    packed: float
    unpacked: float


@dataclass(frozen=True)
class StepSamples:
    """What a step trains: the samples of each pack, and labels that carry loss of all of them."""

    packs: Sequence[Sequence[int]]
    num_targets: int


def plan_steps(config: VerifyConfig, options: PlanOptions, reader: CacheReader) -> list[StepSamples]:
    """The first ``--trajectory`` steps that training would plan on one process.

    Raises:
        ConfigError: if no two samples of them share a pack.
        DataError: if no sample fits into one.
    """
    lengths, targets = reader.index.length, reader.index.target_tokens
    run = part_of(TrainConfig, config, packing=True, max_steps=config.trajectory)
    inputs = Inputs(config=run, options=options, lengths=lengths, targets=targets)
    steps: list[StepSamples] = []
    for stretch in Timeline.of(inputs, ((0, 1, 1, 1),)).stretches():
        plan = stretch.plan
        for step in range(stretch.stop - stretch.first):
            batches = range(plan.steps.num_micro_batches(step))
            packs = [pack.tolist() for number in batches for pack in plan.samples(step, 0, number)]
            steps.append(StepSamples(packs, plan.steps.target_tokens(step)))
    if all(len(pack) == 1 for step in steps for pack in step.packs):
        raise ConfigError(
            f"--packing-length {options.packing_length}: no two samples of these steps share a pack, so there is "
            "nothing to compare",
            "Raise it, or --samples-per-step.",
        )
    return steps


def compare_trajectories(
    load: Callable[[], PreTrainedModel],
    steps: Sequence[StepSamples],
    read: Callable[[int], EncodedSample],
    spec: InputSpec,
    progress: Progress,
) -> tuple[tuple[TrainedStep, ...], tuple[Check, Check]]:
    """Train steps packed and unpacked; returns their losses, and the checks ``losses`` and ``weights``.

    Args:
        load: a model with packed attention and its first weights, in float32.
        steps: what they train.
        read: a sample by its number.
        spec: the model as collation sees it.

    Raises:
        MismatchError: if the inputs of packs could leak.
    """

    def packed(step: StepSamples) -> Iterator[Batch]:
        for pack in step.packs:
            batch = collate_packs([read(number) for number in pack], spec)
            refuse_leaky_inputs(batch.model_inputs())
            yield batch

    def unpacked(step: StepSamples) -> Iterator[Batch]:
        for number in (number for pack in step.packs for number in pack):
            yield as_transformers_has_it(collate_packs([read(number)], spec))

    progress.start("verify", 2 * len(steps))
    model = load()
    losses = list(_losses(model, steps, packed, progress))
    weights = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    del model
    model = load()
    with own_attention(model):
        others = list(_losses(model, steps, unpacked, progress))
    progress.finish()
    trained = tuple(
        TrainedStep(number, sum(map(len, step.packs)), step.num_targets, len(step.packs), loss, other)
        for number, (step, loss, other) in enumerate(zip(steps, losses, others, strict=True), start=1)
    )
    return trained, (_check_losses(trained), _check_weights(model, weights, len(steps)))


def _losses(
    model: PreTrainedModel,
    steps: Sequence[StepSamples],
    batches_of: Callable[[StepSamples], Iterator[Batch]],
    progress: Progress,
) -> Iterator[float]:
    """The loss of each step, before its weights are moved."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, eps=_EPSILON, weight_decay=_WEIGHT_DECAY)
    label_logits_only, device = takes_logits_to_keep(model), parameters[0].device
    with without_dropout(model):
        for step in steps:
            total = 0.0
            for batch in batches_of(step):
                loss = batch_loss(model, batch.to(device), label_logits_only=label_logits_only) / step.num_targets
                torch.autograd.backward(loss)
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.advance(1)
            yield total


def _check_losses(trained: Sequence[TrainedStep]) -> Check:
    """The largest difference of the losses of any step."""
    worst = max(trained, key=lambda step: _as_key(step.packed - step.unpacked))
    largest = max(1.0, *(abs(step.unpacked) for step in trained))
    where = f"in step {worst.step}, loss {worst.packed:.7g} packed and {worst.unpacked:.7g} unpacked,"
    return Check("losses", abs(worst.packed - worst.unpacked), Tolerances.of(torch.float32).loss * largest, where)


def _check_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], num_steps: int) -> Check:
    """The largest difference of any weight, beside what so many steps of AdamW can move it."""
    worst = Check("weights", 0.0, _ROUNDING * _LEARNING_RATE * num_steps, "nowhere")
    for name, parameter in model.named_parameters():
        error = float((parameter.detach().cpu() - weights[name]).abs().max())
        if not error <= worst.error:
            worst = dataclasses.replace(worst, error=error, where=f"in {name}")
    return worst


def _as_key(difference: float) -> float:
    return math.inf if math.isnan(difference) else abs(difference)
