"""A few optimizer steps trained twice: with packed samples, and with each sample alone.

Both trainings start with the same weights and use AdamW in float32 without dropout, which needs 16 bytes per weight.
Packed steps are those that ``packtool train`` plans with ``--samples-per-step``; unpacked steps accumulate gradients of
one sample at a time with transformers' own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from packtool.attention.register import original_attention
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
from packtool.planning.epoch import EpochPlan
from packtool.planning.options import PlanOptions
from packtool.progress import Progress
from packtool.train.model.loss import sum_of_losses
from packtool.train.model.trainable import without_dropout
from packtool.train.prepare.checkpoint import Assignment, BatchShape
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.timeline import Timeline
from packtool.train.verify.checks import Check, collate_alone, tolerances, worst_of

_SAMPLES_PER_STEP = 16
_LEARNING_RATE, _WEIGHT_DECAY, _MAX_GRAD_NORM = 1e-4, 0.1, 1.0
_EPSILON = 1e-6
"""Epsilon of AdamW, larger than gradients that are only rounding errors, such as those of key biases."""
_ROUNDING = 1e-2
"""Allowed difference of a weight, as a fraction of the distance that AdamW can move it; a leak uses all of it."""


class StepSamples(NamedTuple):
    """The samples of an optimizer step: positions in the caches, by pack; and their number of target tokens."""

    packs: list[list[int]]
    num_targets: int


@dataclass(frozen=True)
class TrainedStep:
    """One optimizer step (1-based), trained packed and unpacked: mean losses over target tokens before its update."""

    step: int
    num_samples: int
    num_targets: int
    num_packs: int
    packed: float
    unpacked: float


def plan_steps(config: VerifyConfig, packing_length: int, reader: CacheReader) -> list[StepSamples]:
    """Return the first ``--trajectory`` steps that training would plan on one process."""
    steps: list[StepSamples] = []
    for span in _plan_timeline(config, packing_length, reader).spans():  # one for each epoch
        num_steps = span.num_steps
        steps += [_step_samples(span.plan, plan_step) for plan_step in range(num_steps)]
    if all(len(pack) == 1 for step in steps for pack in step.packs):
        raise ConfigError(
            f"--packing-length {packing_length}: no two samples of these steps share a pack, so there is nothing to "
            "compare",
            "Raise --packing-length or --samples-per-step.",
        )
    return steps


def _plan_timeline(config: VerifyConfig, packing_length: int, reader: CacheReader) -> Timeline:
    """Plan ``--trajectory`` steps of training on one process."""
    index = reader.index
    num_samples = config.samples_per_step or _SAMPLES_PER_STEP
    options = PlanOptions(max_length=packing_length, packing_length=packing_length, samples_per_step=num_samples)
    train_config = part_of(TrainConfig, config, packing=True, max_steps=config.trajectory)
    inputs = Inputs(config=train_config, options=options, lengths=index.length, targets=index.target_tokens)
    one_rank = BatchShape(world_size=1, gradient_accumulation_steps=1, batch_size=1)
    return Timeline.of(inputs, (Assignment.of(0, one_rank),))  # from step 0 on


def _step_samples(plan: EpochPlan, step: int) -> StepSamples:
    """Return the samples of a step of a plan for one rank."""
    packs: list[list[int]] = []
    for micro_batch in range(plan.steps.num_micro_batches(step)):
        packs += [pack.tolist() for pack in plan.samples(step, rank=0, micro_batch=micro_batch)]
    return StepSamples(packs, plan.steps.target_tokens(step))


def compare_trajectories(
    load_new_model: Callable[[], PreTrainedModel],
    steps: Sequence[StepSamples],
    read: Callable[[int], EncodedSample],
    spec: InputSpec,
    progress: Progress,
) -> tuple[tuple[TrainedStep, ...], tuple[Check, Check]]:
    """Train the same steps twice, with packed samples and with each sample alone, and compare losses and weights.

    Args:
        load_new_model: returns a model with packed attention and the initial weights, in float32.
        read: returns a sample by its position in the caches.

    Returns:
        The losses of each step; and the checks of all losses, and of the weights after the last step.
    """
    read_packed = partial(_packed_batches, read, spec)
    read_unpacked = partial(_unpacked_batches, read, spec)
    progress.start("verify", 2 * len(steps))

    model = load_new_model()
    packed_losses = list(_train(model, steps, read_packed, progress))
    packed_weights = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    del model  # frees its memory before the second model is loaded

    model = load_new_model()
    with original_attention(model):
        unpacked_losses = list(_train(model, steps, read_unpacked, progress))
    progress.finish()

    trained_steps = _trained_steps(steps, packed_losses, unpacked_losses)
    loss_check = _check_losses(trained_steps)
    weight_check = _check_weights(model, packed_weights, len(steps))
    return tuple(trained_steps), (loss_check, weight_check)


def _trained_steps(
    steps: Sequence[StepSamples], packed_losses: Sequence[float], unpacked_losses: Sequence[float]
) -> list[TrainedStep]:
    """Return the steps with their losses."""
    trained_steps = []
    for number, samples in enumerate(steps):
        trained_steps.append(
            TrainedStep(
                step=number + 1,
                num_samples=sum(len(pack) for pack in samples.packs),
                num_targets=samples.num_targets,
                num_packs=len(samples.packs),
                packed=packed_losses[number],
                unpacked=unpacked_losses[number],
            )
        )
    return trained_steps


def _packed_batches(
    read: Callable[[int], EncodedSample], spec: InputSpec, packs: Sequence[Sequence[int]]
) -> Iterator[Batch]:
    """Yield a batch for each pack."""
    for pack in packs:
        batch = collate_packs([read(position) for position in pack], spec)
        refuse_leaky_inputs(batch.model_inputs())
        yield batch


def _unpacked_batches(
    read: Callable[[int], EncodedSample], spec: InputSpec, packs: Sequence[Sequence[int]]
) -> Iterator[Batch]:
    """Yield a batch for each sample of the packs."""
    for pack in packs:
        for position in pack:
            yield collate_alone(read(position), spec)


def _check_losses(steps: Sequence[TrainedStep]) -> Check:
    """Compare the losses of the steps, relative to the largest unpacked one."""
    allowed = tolerances(torch.float32)["loss"] * max(1.0, *(abs(step.unpacked) for step in steps))
    checks = []
    for step in steps:
        where = f"in step {step.step}, loss {step.packed:.7g} packed and {step.unpacked:.7g} unpacked,"
        checks.append(Check("losses", abs(step.packed - step.unpacked), allowed, where))
    return worst_of(checks)[0]


def _train(
    model: PreTrainedModel,
    steps: Sequence[StepSamples],
    batches_of: Callable[[Sequence[Sequence[int]]], Iterator[Batch]],
    progress: Progress,
) -> Iterator[float]:
    """Train the steps; yield each step's mean loss before its update. ``batches_of`` makes micro-batches of packs."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, eps=_EPSILON, weight_decay=_WEIGHT_DECAY)
    with without_dropout(model):
        for step in steps:
            step_loss = _accumulate_gradients(model, batches_of(step.packs), step.num_targets)
            torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.advance(1)
            yield step_loss


def _accumulate_gradients(model: PreTrainedModel, batches: Iterator[Batch], num_targets: int) -> float:
    """Run forward and backward of all micro-batches of a step; return its mean loss over ``num_targets`` targets."""
    device = next(model.parameters()).device
    step_loss = 0.0
    for batch in batches:
        loss = sum_of_losses(model, batch.to(device)) / num_targets
        torch.autograd.backward(loss)
        step_loss += float(loss.detach())
    return step_loss


def _check_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], num_steps: int) -> Check:
    """Compare the weights of a trained model with others by name, after this number of steps."""
    checks = [Check("weights", 0.0, _ROUNDING * _LEARNING_RATE * num_steps, "nowhere")]
    for name, parameter in model.named_parameters():
        error = float((parameter.detach().cpu() - weights[name]).abs().max())
        checks.append(Check("weights", error, checks[0].allowed, f"in {name}"))
    return worst_of(checks)[0]
