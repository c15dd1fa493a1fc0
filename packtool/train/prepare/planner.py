"""Plans of all epochs of a run, assigned to the processes that there are, and assigned anew when these change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import SplitIndex
from packtool.config.plan import PlanConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError
from packtool.plan.epoch import EpochPlan, assign_packs, plan_epoch, plan_mixture, reordered
from packtool.plan.ledger import DataChange, Ledger
from packtool.plan.mixture import Mixture
from packtool.plan.options import PlanOptions, SkrullOptions
from packtool.plan.pack_plan import Int64Array, PackPlan
from packtool.plan.prefix_trees import trees_of_some
from packtool.plan.towers import TowerWork
from packtool.train.prepare.schedule import PlannedSchedule, Rest, rest_of
from packtool.train.prepare.shared_prefixes import SharedPrefixes

# A plan of millions of samples is tens of megabytes: that of the epoch in training, and of the one read ahead.
_KEPT = 2

Assignment = tuple[int, int, int]
"""World size, gradient accumulation and batch size."""


def plan_options(options: PlanConfig | TrainConfig, *, max_length: int, world_size: int) -> PlanOptions:
    """What the planner needs to know of a run.

    Args:
        max_length: longer samples are left out.
        world_size: data-parallel ranks.

    Raises:
        ConfigError: if the size of Skrull's buckets is not known.
    """
    return part_of(
        PlanOptions,
        options,
        max_length=max_length,
        packing_length=options.packing_length or max_length,
        world_size=world_size,
        skrull=_skrull_options(options) if options.schedule == "skrull" else None,
    )


def _skrull_options(options: PlanConfig | TrainConfig) -> SkrullOptions:
    bucket_size = options.bucket_tokens
    if bucket_size is None:
        raise ConfigError("--bucket-size auto is not known here.", "Give a number of tokens, as in --bucket-size 8192.")
    num = options.sequence_parallel_ranks
    # Zigzag splits a sharded sequence into 2 P parts, a pair for each process, so that all have equal work.
    return SkrullOptions(bucket_size=bucket_size, sequence_parallel_size=num, alignment=2 * num)


@dataclass(frozen=True, eq=False)
class Coming:
    """The epoch that a run with other data is in.

    Args:
        wanted: how often it has each sample of the caches, int64 (N,), given how often each was trained before it, and
            in it.
        max_length: longer samples are left out.
        stage: as ``Ledger`` has it.
    """

    wanted: Callable[[Int64Array, Int64Array], Int64Array]
    max_length: int
    stage: tuple[int, int] | None = None


class Planner:
    """Plans of the epochs of a run, for any number of processes.

    Args:
        options: but for what packs are assigned to.
        targets: labels of each sample that carry loss.
        towers: what the samples' media cost, or what each adds to the prefix that it shares.
        saved: packs to train instead of planning some.
        shared: prefixes that samples share; None where all are computed whole.
        mixture: what an epoch takes of the samples; None for each once.
    """

    def __init__(
        self,
        config: PlanConfig | TrainConfig,
        options: PlanOptions,
        index: SplitIndex,
        targets: npt.NDArray[np.integer[Any]],
        towers: TowerWork,
        saved: PackPlan | None,
        shared: SharedPrefixes | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        self.config, self.options, self.index, self.saved = config, options, index, saved
        self.targets, self.towers, self.shared, self.mixture = targets, towers, shared, mixture
        self._remembered = lru_cache(maxsize=_KEPT)(self._plan_of)

    def plan_of(self, epoch: int, assignment: Assignment) -> EpochPlan:
        """The plan of a whole epoch; the last ones are remembered, here and nowhere else."""
        return self._remembered(epoch, assignment)

    def fingerprints(self, assignment: Assignment) -> tuple[str, str]:
        """What tells a run's packs from those of others, however many ranks there are, and how steps have them."""
        plan = self.plan_of(0, assignment)
        return plan.lasting_fingerprint, plan.steps.fingerprint if plan.places is None else plan.fingerprint

    def coming(self, ledger: Ledger, assignment: Assignment) -> Coming:
        """The epoch that a run is in which goes on with other data than it had.

        Raises:
            MismatchError: if nothing tells where that is.
        """
        if ledger.stage is not None and self.config.max_steps is None:
            raise MismatchError(
                "the run had stages, and has none now: nothing says how many epochs are left",
                "Say where it ends, --max-steps N; or keep stages in the recipe.",
            )
        return Coming(lambda _, trained: self.wanted_of(ledger.epoch, trained), self.options.max_length)

    def wanted_of(self, epoch: int, trained: Int64Array | None = None) -> Int64Array:
        """How often an epoch has each sample of the caches, int64 (N,); what is too long for it counts, too.

        Args:
            trained: how often it has trained each with other data, (N,); None if it has trained none so.
        """
        trained = np.zeros(len(self.index.length), np.int64) if trained is None else trained
        return np.ones(len(trained), np.int64) if self.mixture is None else self.mixture.wanted(epoch, trained)

    def plan_left(self, change: DataChange, assignment: Assignment) -> EpochPlan | None:
        """The plan of what was left of an epoch when the data changed; None if that was nothing."""
        wanted = np.repeat(np.arange(len(self.index.length)), change.samples())
        if not (self.index.length[wanted] <= self.options.max_length).any():
            return None
        shared = self.shared
        if shared is not None:
            shared = dataclasses.replace(shared, trees=trees_of_some(shared.trees, change.samples() > 0))
        return self._planned(change.epoch, assignment, shared, wanted)

    def _plan_of(self, epoch: int, assignment: Assignment) -> EpochPlan:
        if self.saved is not None:
            is_first = epoch == 0 or not self.config.shuffle
            return self.assign(
                self.saved if is_first else reordered(self.saved, seed=self.config.seed, epoch=epoch), assignment
            )
        return self._planned(epoch, assignment, self.shared)

    def _planned(
        self, epoch: int, assignment: Assignment, shared: SharedPrefixes | None, wanted: Int64Array | None = None
    ) -> EpochPlan:
        options, towers, seed = self._options(assignment), self.towers, self.config.seed
        # What is left of an epoch whose data changed is drawn already.
        if self.mixture is not None and wanted is None:
            return self.plan_drawn(self.mixture, epoch, assignment)
        if shared is not None and wanted is not None:
            assert options.cost is not None, "training knows costs"
            towers = shared.towers(options.cost, self.targets)
        return plan_epoch(
            self.index.length,
            self.targets,
            options,
            seed=seed,
            epoch=epoch,
            media_tokens=self.index.media_tokens if shared is None else shared.media_tokens,
            towers=towers,
            trees=None if shared is None else shared.trees,
            wanted=wanted,
        )

    def plan_drawn(self, mixture: Mixture, epoch: int, assignment: Assignment) -> EpochPlan:
        """The plan of what a mixture draws in an epoch."""
        return plan_mixture(
            mixture,
            self._options(assignment),
            seed=self.config.seed,
            epoch=epoch,
            media_tokens=self.index.media_tokens,
            towers=self.towers,
        )

    def num_steps_whole(self, assignment: Assignment) -> int:
        """Optimizer steps of the first epoch if no prefix were shared; it is packed once more to know them."""
        options = dataclasses.replace(self._options(assignment), cost=None, balance="none")
        media_tokens = self.index.media_tokens
        plan = plan_epoch(self.index.length, self.targets, options, seed=self.config.seed, media_tokens=media_tokens)
        return plan.summary.num_steps

    def assign(self, packs: PackPlan, assignment: Assignment) -> EpochPlan:
        """The plan that assigns these packs to ranks."""
        options, media_tokens = self._options(assignment), self.index.media_tokens
        trees = None if self.shared is None else self.shared.trees
        return assign_packs(packs, self.targets, options, media_tokens=media_tokens, towers=self.towers, trees=trees)

    def schedule(
        self, assignments: Sequence[tuple[int, int, int, int]], change: DataChange | None = None
    ) -> PlannedSchedule:
        """The schedule of the run, with the rest of an epoch assigned anew wherever the number of processes changed.

        Args:
            assignments: since the data last changed, if they did.
            change: the last change of the data, from which on steps can be asked for; None if there was none.
        """
        config = self.config
        (_, *first), *others = assignments
        assignment, rest = cast(Assignment, tuple(first)), None
        if change is not None:
            rest = Rest(change.step, change.epoch, self.plan_left(change, assignment))
        num_epochs, max_steps = config.num_train_epochs, config.max_steps
        schedule = self.schedule_of(assignment, num_epochs, max_steps, rest)
        for step, *again in others:
            assignment = cast(Assignment, tuple(again))
            rest = rest_of(schedule, step, partial(self.assign, assignment=assignment))
            schedule = self.schedule_of(assignment, num_epochs, max_steps, rest)
        assert config.max_steps is None or schedule.num_steps == config.max_steps
        return schedule

    def schedule_of(
        self, assignment: Assignment, num_epochs: float, max_steps: int | None, rest: Rest | None
    ) -> PlannedSchedule:
        """Epochs whose packs are assigned so; arguments as ``PlannedSchedule`` has them."""
        plan_of, mixture = partial(self.plan_of, assignment=assignment), self.mixture
        return PlannedSchedule(
            plan_of,
            num_epochs=num_epochs,
            max_steps=max_steps,
            rest=rest,
            targets_of=None if mixture is None else lambda epoch: int(self.targets[mixture.drawn(epoch)].sum()),
        )

    def _options(self, assignment: Assignment) -> PlanOptions:
        world_size, accumulation, batch_size = assignment
        return dataclasses.replace(
            self.options,
            world_size=world_size,
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=batch_size,
        )
