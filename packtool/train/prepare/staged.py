"""The stages of a curriculum: each has epochs of its own mixture, packing length and sequence parallel size.

    until: 30%    | 30% of --max-steps, or of --num-train-epochs: 0.3 epochs of the first stage's mixture
    stage 1       | part of an epoch   epoch 0
    stage 2       | part of an epoch   epoch 1      from what was trained least often before
                  | whole epochs       epochs 2, 3  drawn as ever

Every stage begins a new epoch, for seeds and for the ledger: nothing comes again in an epoch until all of it has come.
What a stage has beside whole epochs comes first, so that all that is drawn is trained, and what was trained in the
stages before comes last: a part of an epoch is a mixture of its own (``Mixture.part``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import CacheReader
from packtool.config.mixture import Recipe, Stage
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError
from packtool.plan.ledger import DataChange, Ledger, joined_counts
from packtool.plan.mixture import Mixture
from packtool.plan.options import PlanOptions
from packtool.plan.pack_plan import Int64Array, PackPlan
from packtool.plan.towers import TowerWork
from packtool.train.prepare.mixtures import mixture_in
from packtool.train.prepare.planner import Assignment, Coming, Planner
from packtool.train.prepare.schedule import Rest, rest_of
from packtool.train.prepare.shared_prefixes import SharedPrefixes
from packtool.train.prepare.staged_schedule import StagedSchedule, StagePart


class StagedPlanner(Planner):
    """Plans of the stages of a run.

    Args:
        whole: planner of the same caches, with the options of the run; its mixture is not asked for.
        recipe: with stages.
        mixture_of: what makes a mixture of a recipe, without samples of more tokens than the second.

    Raises:
        ConfigError: naming what of a stage does not go with the run.
    """

    def __init__(self, whole: Planner, recipe: Recipe, mixture_of: Callable[[Recipe, int], Mixture | None]) -> None:
        config = whole.config
        problems = _problems(recipe, whole)
        if problems:
            raise ConfigError.from_problems(problems)
        self.recipe = recipe
        self.sizes = [stage.sequence_parallel_size or config.sequence_parallel_ranks for stage in recipe.stages]
        self.planners: list[Planner] = []
        for stage in recipe.stages:
            room = stage.packing_length or whole.options.packing_length
            options = dataclasses.replace(
                whole.options, packing_length=room, max_length=min(whole.options.max_length, room)
            )
            mixture = mixture_of(stage.recipe, options.max_length)
            self.planners.append(
                Planner(config, options, whole.index, whole.targets, whole.towers, None, mixture=mixture)
            )
        longest = max((planner.options for planner in self.planners), key=lambda options: options.packing_length)
        super().__init__(config, longest, whole.index, whole.targets, whole.towers, None, mixture=self._joined())

    def _joined(self) -> Mixture:
        """A mixture of all that any stage takes, for names and weights of sources, and for counts of their epochs."""
        found = [planner.mixture for planner in self.planners]
        mixtures = [mixture for mixture in found if mixture is not None]
        own = zip(*(mixture.candidates for mixture in mixtures), strict=True)
        candidates = tuple(np.unique(np.concatenate(each)) for each in own)
        return dataclasses.replace(mixtures[0], candidates=candidates, counts=tuple(map(len, candidates)))

    def fingerprints(self, assignment: Assignment) -> tuple[str, str]:
        """See ``Planner``; they tell of where stages end, for what these draw depends on it."""
        plan, steps = self.planners[0].fingerprints(self._scaled(0, assignment))
        digest = hashlib.sha256(plan.encode())
        for number, (planner, size) in enumerate(zip(self.planners, self.sizes, strict=True)):
            assert planner.mixture is not None, "made with one"
            words = f"{planner.mixture.fingerprint} {planner.options.packing_length} {size} {self._end(number)}\n"
            digest.update(words.encode())
        return digest.hexdigest(), steps

    def coming(self, ledger: Ledger, assignment: Assignment) -> Coming:
        """See ``Planner``."""
        number = self._number_at(ledger)
        same = ledger.stage is not None and ledger.stage[0] == number
        begun = ledger.stage[1] if ledger.stage is not None and same else ledger.epoch
        planner = self.planners[number]

        def wanted(before: Int64Array, trained: Int64Array) -> Int64Array:
            mixture = planner.mixture
            assert mixture is not None, "made with one"
            if ledger.epoch == begun:
                start = self._end(number - 1) if number and self._has_steps else 0
                share, _ = self._share(number, int(start), assignment)
                mixture = mixture.part(share, before)
            # What another stage has trained is no part of what this one is to have.
            return mixture.wanted(ledger.epoch, trained if same else np.zeros_like(trained))

        return Coming(wanted, planner.options.max_length, (number, begun))

    def schedule(
        self, assignments: Sequence[tuple[int, int, int, int]], change: DataChange | None = None
    ) -> StagedSchedule:
        """See ``Planner``."""
        step, epoch, number = 0, 0, 0
        trained = np.zeros(len(self.index.length), np.int64)
        if change is not None:
            assert change.stage is not None, "a change of a run with stages"
            step, epoch, number = change.step, change.epoch, change.stage[0]
            trained = joined_counts(change.trained)
        parts: list[StagePart] = []
        while True:
            parts.append(self._part(number, step, epoch, trained, assignments, change))
            number += 1
            if number == len(self.planners):
                return StagedSchedule(parts)
            if parts[-1].stop > step:
                step = parts[-1].stop
                epoch = parts[-1].schedule.locate(step - 1)[0]
            trained, epoch, change = trained + parts[-1].trained(), epoch + 1, None

    def _part(
        self,
        number: int,
        step: int,
        epoch: int,
        trained: Int64Array,
        assignments: Sequence[tuple[int, int, int, int]],
        change: DataChange | None,
    ) -> StagePart:
        """A stage from a step on.

        Args:
            epoch: that is begun, or goes on after a change of the data.
            trained: how often each sample was before.
            change: of the data, at that step.
        """
        planner = self.planners[number]
        *_, (_, *here) = (each for each in assignments if each[0] <= step)
        now = cast(Assignment, tuple(here))
        later = [each for each in assignments if each[0] > step]
        assignment = self._scaled(number, now)
        share, num_epochs = self._share(number, step, now)
        begun = epoch
        if change is not None:
            assert change.stage is not None, "a change of a run with stages"
            begun = change.stage[1]
            rest = Rest(change.step, epoch, planner.plan_left(change, assignment))
        else:
            rest = self._first(number, step, epoch, share, trained, assignment)
        stop = int(self._end(number)) if self._has_steps else None
        schedules = [(step, planner.schedule_of(assignment, begun + num_epochs, stop, rest))]
        for at, *again in later:
            if at >= schedules[-1][1].num_steps:
                break
            assignment = self._scaled(number, cast(Assignment, tuple(again)))
            rest = rest_of(schedules[-1][1], at, partial(planner.assign, assignment=assignment))
            schedules.append((at, planner.schedule_of(assignment, begun + num_epochs, stop, rest)))
        return StagePart(number, begun, step, tuple(schedules), planner, self.sizes[number])

    def _first(
        self, number: int, step: int, epoch: int, share: float, trained: Int64Array, assignment: Assignment
    ) -> Rest:
        """The first epoch of a stage, or the part of one that it has: where steps are told, not one too few."""
        planner = self.planners[number]
        assert planner.mixture is not None, "made with one"
        if not self._has_steps:
            return Rest(step, epoch, planner.plan_drawn(planner.mixture.part(share, trained), epoch, assignment))
        each = planner.plan_of(0, assignment).steps.num_steps
        wanted = round(share * each)
        while True:
            plan = planner.plan_drawn(planner.mixture.part(share, trained), epoch, assignment)
            if plan.steps.num_steps >= wanted:
                return Rest(step, epoch, plan, wanted)
            share += (wanted - plan.steps.num_steps + 0.5) / each

    @property
    def _has_steps(self) -> bool:
        """Whether stages end after so many steps, and not after so many epochs."""
        return self.config.max_steps is not None

    def _end(self, number: int) -> float:
        """Steps of the run that are done when a stage ends; without ``--max-steps`` the epochs that it has."""
        stages, config = self.recipe.stages, self.config
        if config.max_steps is not None:
            stage = stages[number]
            if stage.until is not None or stage.until_share is None:
                return stage.until or config.max_steps
            return max(round(stage.until_share * config.max_steps), 1)
        if all(stage.until_share is None for stage in stages):
            return config.num_train_epochs
        before = stages[number - 1].until_share if number else 0.0
        return ((stages[number].until_share or 1.0) - (before or 0.0)) * config.num_train_epochs

    def _share(self, number: int, step: int, assignment: Assignment) -> tuple[float, int]:
        """What part of an epoch a stage from a step on begins with, above 0 and at most 1, and all of its epochs."""
        epochs = self._end(number)
        if self._has_steps:
            each = self.planners[number].plan_of(0, self._scaled(number, assignment)).steps.num_steps
            epochs = (epochs - step) / each
        num = max(math.ceil(epochs - 1e-9), 1)
        return epochs - (num - 1), num

    def _scaled(self, number: int, assignment: Assignment) -> Assignment:
        """An assignment to the data-parallel ranks of a stage, given that of the run."""
        world_size, accumulation, batch_size = assignment
        return world_size * self.config.sequence_parallel_ranks // self.sizes[number], accumulation, batch_size

    def _number_at(self, ledger: Ledger) -> int:
        """The stage that a run is in which goes on with other data."""
        if self._has_steps:
            last = len(self.planners) - 1
            return next((number for number in range(last) if ledger.step < self._end(number)), last)
        if ledger.stage is None or ledger.stage[0] >= len(self.planners):
            had = "none" if ledger.stage is None else f"at least {ledger.stage[0] + 1}"
            raise MismatchError(
                f"{self.recipe.place} has {len(self.planners)} stages, and the run had {had}: nothing says in which of "
                "them it is",
                "Say where stages end in steps, with --max-steps; or keep those that the run has had.",
            )
        return ledger.stage[0]


def planner_of(
    config: PlanConfig | TrainConfig,
    options: PlanOptions,
    reader: CacheReader,
    targets: npt.NDArray[np.integer[Any]],
    towers: TowerWork,
    recipe: Recipe | None,
    saved: PackPlan | None = None,
    shared: SharedPrefixes | None = None,
) -> Planner:
    """The planner of a run; other arguments as ``Planner`` has them.

    Args:
        targets: (N,), labels of each sample that carry loss.
        recipe: of a mixture; None for every sample once.

    Raises:
        ConfigError, DataError: naming what does not go with the run, or of which source nothing is left.
    """
    mixture_of = partial(mixture_in, reader=reader, target_tokens=targets, seed=config.seed)
    is_staged = recipe is not None and bool(recipe.stages)
    mixture = None if is_staged else mixture_of(recipe, max_length=options.max_length)
    whole = Planner(config, options, reader.index, targets, towers, saved, shared, mixture)
    if recipe is None or not is_staged:
        return whole
    return StagedPlanner(whole, recipe, lambda each, longest: mixture_of(each, max_length=longest))


def staged_schedule(
    config: PlanConfig,
    options: PlanOptions,
    reader: CacheReader | None,
    targets: npt.NDArray[np.integer[Any]],
    towers: TowerWork | None,
    recipe: Recipe | None,
) -> StagedSchedule | None:
    """The steps of a run with stages that is only planned; None without stages. Arguments as for ``planner_of``."""
    if reader is None or towers is None or recipe is None or not recipe.stages:
        return None
    if config.sweep is not None:
        raise ConfigError(f"--sweep compares packing lengths, and {recipe.place} has stages", "Plan without it.")
    # Samples may be as long as the longest pack of a stage, which may be longer than those of the options.
    longest = max(manifest.max_length for manifest in reader.manifests)
    options = dataclasses.replace(options, max_length=config.max_length or longest)
    planner = planner_of(config, options, reader, targets, towers, recipe)
    assert isinstance(planner, StagedPlanner), "asked before"
    assigned = options.world_size, options.gradient_accumulation_steps, options.per_device_train_batch_size
    return planner.schedule(((0, *assigned),))


def _problems(recipe: Recipe, whole: Planner) -> list[str]:
    """What of stages does not go with the run that has them, a line for each."""
    config, place, found = whole.config, recipe.place, []
    stages, size = recipe.stages, config.sequence_parallel_ranks
    if whole.options.skrull is not None:
        found.append(f"{place}, stages: --schedule skrull plans one kind of step: leave out one of them")
    before = 0
    for number, stage in enumerate(stages):
        key = f"{place}, stages[{number}]"
        if stage.packing_length is not None and not config.packing:
            found.append(f"{key}.packing_length: --packing false makes no packs: leave out one of them")
        shared = stage.sequence_parallel_size
        if shared is not None and size % shared:
            found.append(
                f"{key}.sequence_parallel_size: {shared} is no part of the {size} processes of the run that share a "
                f"sequence: give --sequence-parallel-size the largest, and stages that need fewer a divisor of it"
            )
        if stage.until is not None and config.max_steps is None:
            found.append(
                f"{key}.until: {stage.until:,} steps of how many? Give --max-steps, or a share of the run: until: 30%"
            )
        if config.max_steps is not None:
            found += _step_problems(key, stage, before, config.max_steps, is_last=number + 1 == len(stages))
            before = stage.until or round((stage.until_share or 0) * config.max_steps)
    return found


def _step_problems(key: str, stage: Stage, before: int, max_steps: int, *, is_last: bool) -> Iterator[str]:
    """What of a stage does not go with ``--max-steps``."""
    end = stage.until or max(round((stage.until_share or 0) * max_steps), 1)
    if is_last:
        if before >= max_steps:
            yield f"{key}: the run ends with step {max_steps:,} (--max-steps), before this stage begins"
    elif not stage.end:
        yield f"{key}.until: it is missing: with --max-steps every stage but the last says where it ends"
    elif end <= before:
        yield f"{key}.until: {stage.end} is step {end:,}, not behind step {before:,}, where the stage before ends"
