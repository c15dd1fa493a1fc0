"""Plans of all epochs of a run, dealt to the processes that there are, and dealt anew when these change."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import SplitIndex
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.plan.cost import CostModel
from packtool.plan.epoch import EpochPlan, PlanOptions, deal_packs, plan_epoch, reordered
from packtool.plan.packing import PackPlan
from packtool.plan.skrull_steps import SkrullOptions
from packtool.plan.step_time import StepTime
from packtool.simulate.model_sizes import ModelSizes
from packtool.train.prepare.schedule import Rest, Schedule, rest_of

_KEPT = 2


Dealing = tuple[int, int, int]
"""World size, gradient accumulation and batch size."""


def plan_options(
    options: PlanConfig | TrainConfig,
    *,
    packing: bool,
    max_length: int,
    world_size: int,
    bucket_size: int | None = None,
) -> PlanOptions:
    """What the planner needs to know of a run.

    Args:
        world_size: data-parallel ranks.
        bucket_size: what ``--bucket-size auto`` was found to be.

    Raises:
        ConfigError: if the size of Skrull's buckets is not known.
    """
    return PlanOptions(
        max_length=max_length,
        packing_length=options.packing_length or max_length,
        packing=packing,
        packing_num_proc=options.packing_num_proc,
        world_size=world_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        packs_per_micro_batch=options.per_device_train_batch_size,
        balance=options.balance,
        group_by_length=options.group_by_length,
        dynamic_batch_tokens=options.dynamic_batch_tokens,
        dynamic_max_batch_size=options.dynamic_max_batch_size,
        skrull=_skrull_options(options, bucket_size) if options.schedule == "skrull" else None,
        packing_algorithm=options.packing_algorithm,
        packing_window=options.packing_window,
        packing_batch_size=options.packing_batch_size,
        look_ahead=options.look_ahead,
        max_samples_per_pack=options.max_samples_per_pack,
        max_media_tokens_per_pack=options.max_media_tokens_per_pack,
        shuffle=options.shuffle,
    )


def _skrull_options(options: PlanConfig | TrainConfig, bucket_size: int | None) -> SkrullOptions:
    bucket_size = options.bucket_tokens or bucket_size
    if bucket_size is None:
        raise ConfigError("--bucket-size auto is not known here.", "Give a number of tokens, as in --bucket-size 8192.")
    num = options.num_sharing
    # Zigzag splits a sharded sequence into 2 P parts, a pair for each process, so that all have equal work.
    return SkrullOptions(bucket_size=bucket_size, context_parallel=num, alignment=2 * num)


def cost_of(config: Mapping[str, Any]) -> CostModel:
    """FLOPs of a model; of one of 8 billion weights where ``config.json`` does not tell the sizes."""
    try:
        return CostModel.of_config(config)
    except (KeyError, TypeError, ValueError):
        return CostModel.of_8b()


def with_model(options: PlanOptions, config: Mapping[str, Any]) -> PlanOptions:
    """The options with a model's FLOPs, and for Skrull what its keys and values take on their way."""
    options = dataclasses.replace(options, cost=cost_of(config))
    try:
        sizes = ModelSizes.of_config(config)
    except (KeyError, TypeError, ValueError):
        return options
    if options.skrull is None:
        return options
    times = StepTime.of_model(num_layers=sizes.num_layers, kv_bytes=sizes.kv_bytes)
    return dataclasses.replace(options, skrull=dataclasses.replace(options.skrull, times=times))


class Planner:
    """Plans of the epochs of a run, for any number of processes.

    Args:
        options: but for what packs are dealt to.
        targets: labels of each sample that carry loss.
        saved: packs to train instead of planning some.
    """

    def __init__(
        self,
        config: TrainConfig,
        options: PlanOptions,
        index: SplitIndex,
        targets: npt.NDArray[np.integer[Any]],
        saved: PackPlan | None,
    ) -> None:
        self.config, self.options, self.index, self.targets, self.saved = config, options, index, targets, saved
        self._plans: OrderedDict[tuple[int, Dealing], EpochPlan] = OrderedDict()

    def plan_of(self, epoch: int, dealing: Dealing) -> EpochPlan:
        """The plan of a whole epoch; the last two are kept."""
        if (epoch, dealing) not in self._plans:
            self._plans[epoch, dealing] = self._plan_of(epoch, dealing)
            while len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        return self._plans[epoch, dealing]

    def _plan_of(self, epoch: int, dealing: Dealing) -> EpochPlan:
        if self.saved is not None:
            is_first = epoch == 0 or not self.config.shuffle
            return self.deal(
                self.saved if is_first else reordered(self.saved, seed=self.config.seed, epoch=epoch), dealing
            )
        return plan_epoch(
            self.index.length,
            self.targets,
            self._options(dealing),
            seed=self.config.seed,
            epoch=epoch,
            media_tokens=self.index.media_tokens,
        )

    def deal(self, packs: PackPlan, dealing: Dealing) -> EpochPlan:
        """The plan that assigns these packs to ranks."""
        return deal_packs(packs, self.targets, self._options(dealing), media_tokens=self.index.media_tokens)

    def schedule(self, dealings: Sequence[tuple[int, int, int, int]]) -> Schedule:
        """The schedule of the run, with the rest of an epoch assigned anew wherever the number of processes changed."""
        config = self.config
        (_, *first), *others = dealings
        schedule = self._schedule(cast(Dealing, tuple(first)), None)
        for step, *again in others:
            dealing = cast(Dealing, tuple(again))
            rest = rest_of(schedule, step, partial(self.deal, dealing=dealing))
            schedule = self._schedule(dealing, rest)
        assert config.max_steps is None or schedule.num_steps == config.max_steps
        return schedule

    def _schedule(self, dealing: Dealing, rest: Rest | None) -> Schedule:
        plan_of = partial(self.plan_of, dealing=dealing)
        config = self.config
        return Schedule(plan_of, num_epochs=config.num_train_epochs, max_steps=config.max_steps, rest=rest)

    def _options(self, dealing: Dealing) -> PlanOptions:
        world_size, accumulation, batch_size = dealing
        return dataclasses.replace(
            self.options,
            world_size=world_size,
            gradient_accumulation_steps=accumulation,
            packs_per_micro_batch=batch_size,
        )
