"""The inputs of a run's plans: caches opened and checked, targets, mixture, shared prefixes and costs."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.plan_file import SavedPlan
from packtool.cache.reader import CacheReader, MixedSamples, RelabeledReader, SampleReader
from packtool.config.mixture import Recipe
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.encode.targets import TargetChoice
from packtool.errors import ConfigError, MismatchError
from packtool.planning.epoch import EpochPlan, assign_packs, plan_epoch, plan_mixture, reorder_saved_packs
from packtool.planning.ledger import DataChange, Ledger
from packtool.planning.mixture import Mixture, make_mixture
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Int64Array, PackPlan
from packtool.planning.prefix_trees import select_samples
from packtool.planning.summary import PlanSummary
from packtool.planning.towers import TowerWork
from packtool.train.prepare.caches import packs_of
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.shared_prefixes import SharedPrefixes, find_shared, load_shared_prefixes, parts_of

_KEPT_PLANS = 2
"""Plans that are cached, tens of megabytes each: of the epoch in training, and of the one read ahead."""

TargetChoices = tuple[TargetChoice | None, ...]
"""One for each cache of a run; None for the targets of its export."""

BatchShape = tuple[int, int, int]
"""World size, gradient accumulation and batch size: what the packs of an epoch are assigned to."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """The inputs of the plans of a run, or of one of its stages, for any number of ranks.

    Args:
        config: the command's settings; of a training run, with ``--eval-strategy`` decided.
        options: of the plan, with costs; each ``BatchShape`` replaces ranks, accumulation and batch size.
        lengths, targets, media_tokens: all, target and media tokens of each sample, (N,); media may be unknown (None).
        towers: cost of the media of each sample, or of those that it adds to a shared prefix; None for lengths.
        reader: of the caches; None for a file of lengths.
        recipe: of the mixture; None if every sample is trained once per epoch.
        model: its ``config.json``.
        files: of the model; None for the costs of a preset.
        target_choices: of each cache, where ``--loss-scale`` or the recipe differ from its export.
        saved_plan: the plan of ``--plan``, whose packs are trained.
        shared: prefixes that are computed once; None if every sample is computed in full.
        no_sharing_reason: message if prefixes could be shared, and are not.
        mixture: samples of an epoch; with stages, the samples of all stages; None without a recipe.
        stages: inputs of each stage of the recipe; empty without stages.
        sequence_parallel_size: ranks that share a sequence.
        planner: equal inputs whose cached plans are reused; None to plan.
    """

    config: PlanConfig | TrainConfig
    options: PlanOptions
    lengths: npt.NDArray[np.integer[Any]]
    targets: npt.NDArray[np.integer[Any]]
    media_tokens: npt.NDArray[np.integer[Any]] | None = None
    towers: TowerWork | None = None
    reader: CacheReader | None = None
    recipe: Recipe | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    files: ModelFiles | None = None
    target_choices: TargetChoices = ()
    saved_plan: SavedPlan | None = None
    shared: SharedPrefixes | None = None
    no_sharing_reason: str | None = None
    mixture: Mixture | None = None
    stages: tuple[Inputs, ...] = ()
    sequence_parallel_size: int = 1
    planner: Inputs | None = None
    notes: tuple[str, ...] = ()

    def prepared(self) -> Inputs:
        """Find shared prefixes and make the mixtures of a recipe; inputs of a file of lengths stay unchanged."""
        if self.reader is None:
            return self
        assert self.options.cost is not None, "caches are planned with costs"
        if self.saved_plan is not None:
            packs, parts = packs_of(self.saved_plan), self.saved_plan.parts
            shared, message = load_shared_prefixes(packs, parts, self.model, self.reader), None
        else:
            shared, message = find_shared(
                self.config,
                self.model,
                self.reader,
                capacity=self.options.packing_length,
                max_length=self.options.max_length,
                max_samples=self.config.max_rows_per_tree,
                max_media_tokens=self.config.max_media_tokens_per_pack,
            )
            if shared is not None:
                trees = dataclasses.replace(shared.trees, parts=parts_of(self.config))
                shared = dataclasses.replace(shared, trees=trees)
        inputs = dataclasses.replace(self, shared=shared, no_sharing_reason=message)
        if shared is not None:
            inputs = dataclasses.replace(inputs, towers=shared.towers(self.options.cost, self.targets))
        if self.recipe is None:
            return inputs
        max_length = self.config.max_length or max(manifest.max_length for manifest in self.reader.manifests)
        return inputs.with_mixture(self.recipe, max_length)

    def reuse_plans(self, planned: Inputs) -> Inputs:
        """Reuse prefixes, mixtures and plans of ``planned`` if they would be the same; else ``prepared``."""
        options = planned.options
        same = dataclasses.replace(
            self.options,
            max_length=options.max_length,
            packing_length=options.packing_length,
            world_size=options.world_size,
        )
        # Samples longer than a pack are left out by ``packtool plan``, and are an error in training.
        is_too_long = (self.lengths > options.max_length) & (self.lengths <= self.options.max_length)
        if (
            self.reader is None
            or planned.reader is None
            or self.reader.fingerprint != planned.reader.fingerprint
            or same != options
            or self.recipe != planned.recipe
            or not np.array_equal(self.targets, planned.targets)
            or (is_too_long.any() and not planned.stages)
        ):
            return self.prepared()
        return dataclasses.replace(
            self,
            options=options if planned.stages else self.options,
            towers=planned.towers,
            shared=planned.shared,
            no_sharing_reason=planned.no_sharing_reason,
            mixture=planned.mixture,
            stages=planned.stages,
            planner=planned,
        )

    def with_mixture(self, recipe: Recipe, max_length: int) -> Inputs:
        """Add the mixture of a recipe, or those of its stages; ``max_length`` limits the samples of every stage."""
        if not recipe.stages:
            return dataclasses.replace(self, recipe=recipe, mixture=self._mixture_of(recipe, self.options.max_length))
        if problems := _stage_problems(recipe, self):
            raise ConfigError.from_problems(problems)
        stages = []
        for stage in recipe.stages:
            length = stage.packing_length or self.options.packing_length
            options = dataclasses.replace(self.options, packing_length=length, max_length=min(max_length, length))
            size = stage.sequence_parallel_size or self.config.sequence_parallel_ranks
            mixture = self._mixture_of(stage, options.max_length)
            stages.append(
                dataclasses.replace(self, options=options, mixture=mixture, sequence_parallel_size=size, shared=None)
            )
        longest = max((stage.options for stage in stages), key=lambda options: options.packing_length)
        # The mixture of the run has the samples of all stages; it gives names, weights and epochs of sources.
        mixtures = [stage.mixture for stage in stages if stage.mixture is not None]
        of_sources = zip(*(mixture.candidates for mixture in mixtures), strict=True)
        candidates = tuple(np.unique(np.concatenate(of_stages)) for of_stages in of_sources)
        joined = dataclasses.replace(mixtures[0], candidates=candidates, counts=tuple(map(len, candidates)))
        return dataclasses.replace(self, recipe=recipe, options=longest, mixture=joined, stages=tuple(stages))

    def _mixture_of(self, recipe: Recipe, max_length: int) -> Mixture:
        assert self.reader is not None, "recipes mix caches"
        index, offsets, seed = self.reader.index, self.reader.offsets, self.config.seed
        return make_mixture(
            recipe, offsets, index.length, index.media_tokens, self.targets, max_length=max_length, seed=seed
        )

    @property
    def for_training(self) -> tuple[TrainConfig, ModelFiles, CacheReader]:
        """Settings, model files and caches of a training run, which ``packtool plan`` may lack."""
        assert isinstance(self.config, TrainConfig), "the inputs of a training run"
        assert self.files is not None, "a model is trained"
        assert self.reader is not None, "checked with the settings"
        return self.config, self.files, self.reader

    @cached_property
    def samples(self) -> SampleReader:
        """Reader of the samples, whose targets follow ``--loss-scale`` or that of their source."""
        assert self.reader is not None, "a file of lengths has no samples"
        samples: SampleReader = (
            RelabeledReader(self.reader, self.target_choices) if any(self.target_choices) else self.reader
        )
        if self.mixture is None:
            return samples
        keeps_channels = isinstance(self.config, TrainConfig) and self.config.enable_channel_loss
        names, weights = self.mixture.names, self.mixture.loss_weights
        return MixedSamples(samples, self.mixture.offsets, names, weights, keeps_channels=keeps_channels)

    def plan_of(self, epoch: int, assignment: BatchShape) -> EpochPlan:
        """The plan of a full epoch; the last ones are cached."""
        return (self.planner or self)._cached_plan_of(epoch, assignment)

    @cached_property
    def _cached_plan_of(self) -> Callable[[int, BatchShape], EpochPlan]:
        return lru_cache(maxsize=_KEPT_PLANS)(self._plan_of)

    def _plan_of(self, epoch: int, assignment: BatchShape) -> EpochPlan:
        if self.saved_plan is not None:
            packs = packs_of(self.saved_plan)
            is_first = epoch == 0 or not self.config.shuffle
            return self.assign(
                packs if is_first else reorder_saved_packs(packs, seed=self.config.seed, epoch=epoch), assignment
            )
        if self.mixture is not None:
            return self.plan_mixture(self.mixture, epoch, assignment)
        return self._plan(epoch, assignment, self.shared)

    def _plan(
        self, epoch: int, assignment: BatchShape, shared: SharedPrefixes | None, samples: Int64Array | None = None
    ) -> EpochPlan:
        """The plan of an epoch without a mixture, or of the given ``samples``, int64 (M,), ascending."""
        options, towers = self._assigned(assignment), self.towers
        if shared is not None and samples is not None:
            assert options.cost is not None, "training knows costs"
            towers = shared.towers(options.cost, self.targets)
        return plan_epoch(
            self.lengths,
            self.targets,
            options,
            seed=self.config.seed,
            epoch=epoch,
            media_tokens=self.media_tokens if shared is None else shared.media_tokens,
            towers=towers,
            trees=None if shared is None else shared.trees,
            untrained=samples,
        )

    def plan_mixture(self, mixture: Mixture, epoch: int, assignment: BatchShape) -> EpochPlan:
        """The plan of the samples that a mixture draws in an epoch."""
        options, seed = self._assigned(assignment), self.config.seed
        return plan_mixture(
            mixture, options, seed=seed, epoch=epoch, media_tokens=self.media_tokens, towers=self.towers
        )

    def plan_left(self, change: DataChange, assignment: BatchShape) -> EpochPlan | None:
        """The plan of the samples left of the epoch in which the data changed; None if all were trained."""
        samples = np.repeat(np.arange(len(self.lengths)), change.samples())
        if not (self.lengths[samples] <= self.options.max_length).any():
            return None
        shared = self.shared
        if shared is not None:
            shared = dataclasses.replace(shared, trees=select_samples(shared.trees, change.samples() > 0))
        return self._plan(change.epoch, assignment, shared, samples)

    def assign(self, packs: PackPlan, assignment: BatchShape) -> EpochPlan:
        """The plan that assigns given packs to steps and ranks."""
        options, trees = self._assigned(assignment), None if self.shared is None else self.shared.trees
        media_tokens = self.media_tokens
        return assign_packs(packs, self.targets, options, media_tokens=media_tokens, towers=self.towers, trees=trees)

    def unshared_summary(self, assignment: BatchShape) -> PlanSummary:
        """Packs and steps of the first epoch if no prefix were shared; packs it once more, without costs."""
        options = dataclasses.replace(self._assigned(assignment), cost=None, balance="none")
        seed, media_tokens = self.config.seed, self.media_tokens
        return plan_epoch(self.lengths, self.targets, options, seed=seed, media_tokens=media_tokens).summary

    def _assigned(self, assignment: BatchShape) -> PlanOptions:
        world_size, accumulation, batch_size = assignment
        return dataclasses.replace(
            self.options,
            world_size=world_size,
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=batch_size,
        )

    def epoch_counts(self, epoch: int, trained: Int64Array | None = None) -> Int64Array:
        """Occurrences of each sample of the caches in an epoch, int64 (N,), including samples that are too long.

        Args:
            trained: how often the epoch trained each before the data changed, (N,); None without a change.
        """
        trained = np.zeros(len(self.lengths), np.int64) if trained is None else trained
        return np.ones(len(trained), np.int64) if self.mixture is None else self.mixture.epoch_counts(epoch, trained)

    def state(self, assignment: BatchShape) -> RunState:
        """The state of a run before its first step, to compare with checkpoints; plans the first epoch."""
        config, _, reader = self.for_training
        plan, steps = self.fingerprints(assignment)
        skrull, num_samples = self.options.skrull, self.options.samples_per_step
        step_rule = "" if num_samples is None else f"{num_samples} samples a step"
        if skrull is not None:
            # "a row", where a sequence is meant: checkpoints hold this text, and are compared with it to the letter.
            step_rule = f"skrull, buckets of {skrull.bucket_size} tokens, a row on {skrull.sequence_parallel_size}"
            step_rule += f", for {skrull.times.device}"
        return RunState.of(
            config,
            plan=plan,
            steps=steps,
            cache=reader.fingerprint,
            max_length=self.options.max_length,
            packing_length=self.options.packing_length,
            world_size=assignment[0],
            loss_scale=config.loss_scale or "",
            loss_reduction=config.loss_reduction,
            shares_prefixes=self.shared is not None,
            schedule=step_rule,
            learning=config.training_summary,
        )

    def fingerprints(self, assignment: BatchShape) -> tuple[str, str]:
        """Fingerprints of the packs, equal for any number of ranks, and of the steps.

        With stages, the first includes the end of each stage, which decides the samples that it draws.
        """
        if not self.stages:
            plan = self.plan_of(0, assignment)
            return plan.lasting_fingerprint, plan.steps.fingerprint if plan.placement is None else plan.fingerprint
        lasting, steps = self.stages[0].fingerprints(self.stage_assignment(0, assignment))
        digest = hashlib.sha256(lasting.encode())
        for number, stage in enumerate(self.stages):
            assert stage.mixture is not None, "made with one"
            length, size = stage.options.packing_length, stage.sequence_parallel_size
            digest.update(f"{stage.mixture.fingerprint} {length} {size} {self.stage_end(number)}\n".encode())
        return digest.hexdigest(), steps

    def stage_end(self, number: int) -> float:
        """Steps of the run that are done when a stage ends; without ``--max-steps``, the stage's number of epochs."""
        assert self.recipe is not None, "stages are a recipe's"
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

    def first_epoch_fraction(self, number: int, step: int, assignment: BatchShape) -> tuple[float, int]:
        """The fraction of an epoch, in (0, 1], that a stage starting at ``step`` trains first; its epochs, rounded up.

        A stage of 2.3 epochs has a first epoch of 0.3 and two full ones, (0.3, 3).
        """
        epochs = self.stage_end(number)
        if self.config.max_steps is not None:
            steps = self.stages[number].plan_of(0, self.stage_assignment(number, assignment)).steps
            epochs = (epochs - step) / steps.num_steps
        num_epochs = max(math.ceil(epochs - 1e-9), 1)
        return epochs - (num_epochs - 1), num_epochs

    def stage_assignment(self, number: int, assignment: BatchShape) -> BatchShape:
        """The assignment of the run, with the data-parallel ranks of a stage, which may share sequences differently."""
        world_size, accumulation, batch_size = assignment
        ranks = world_size * self.config.sequence_parallel_ranks // self.stages[number].sequence_parallel_size
        return ranks, accumulation, batch_size

    def epoch_to_resume(
        self, ledger: Ledger, assignment: BatchShape
    ) -> tuple[Callable[[Int64Array, Int64Array], Int64Array], int, tuple[int, int] | None]:
        """Find the epoch in which a run with changed data resumes.

        Returns:
            a function ``count_samples(before, trained)`` of the training counts of each sample before the epoch and in
            it, that returns how often the epoch has each sample, all int64 (N,); the maximum tokens of a sample; and
            (number of the stage, first epoch of the stage), or None without stages.
        """
        if not self.stages:
            if ledger.stage is not None and self.config.max_steps is None:
                raise MismatchError(
                    "the run had stages and now has none, so the number of epochs left is unknown",
                    "Set its end with --max-steps N, or keep stages in the recipe.",
                )
            return lambda _, trained: self.epoch_counts(ledger.epoch, trained), self.options.max_length, None
        number = self._stage_at(ledger)
        is_same = ledger.stage is not None and ledger.stage[0] == number
        first_epoch = ledger.stage[1] if ledger.stage is not None and is_same else ledger.epoch
        stage = self.stages[number]

        def count_samples(before: Int64Array, trained: Int64Array) -> Int64Array:
            mixture = stage.mixture
            assert mixture is not None, "every stage has a mixture"
            if ledger.epoch == first_epoch:
                start = self.stage_end(number - 1) if number and self.config.max_steps is not None else 0
                fraction, _ = self.first_epoch_fraction(number, int(start), assignment)
                mixture = mixture.partial_epoch(fraction, before)
            # Samples trained by another stage do not count for this one.
            return mixture.epoch_counts(ledger.epoch, trained if is_same else np.zeros_like(trained))

        return count_samples, stage.options.max_length, (number, first_epoch)

    def _stage_at(self, ledger: Ledger) -> int:
        """The 0-based number of the stage in which a run resumes with changed data."""
        if self.config.max_steps is not None:
            last = len(self.stages) - 1
            return next((number for number in range(last) if ledger.step < self.stage_end(number)), last)
        if ledger.stage is None or ledger.stage[0] >= len(self.stages):
            before = "none" if ledger.stage is None else f"at least {ledger.stage[0] + 1}"
            assert self.recipe is not None, "stages are a recipe's"
            raise MismatchError(
                f"{self.recipe.place} has {len(self.stages)} stages, and the run had {before}: its present stage is "
                "unknown",
                "Give the ends of stages in steps, with --max-steps; or keep the stages that the run had.",
            )
        return ledger.stage[0]


def _stage_problems(recipe: Recipe, inputs: Inputs) -> list[str]:
    """Conflicts of stages with the settings of the run, a message for each."""
    config, place, problems = inputs.config, recipe.place, []
    stages, size = recipe.stages, config.sequence_parallel_ranks
    if inputs.options.skrull is not None:
        problems.append(f"{place}, stages: they cannot be combined with --schedule skrull; leave out one of them")
    before = 0
    for number, stage in enumerate(stages):
        key = f"{place}, stages[{number}]"
        if stage.packing_length is not None and not config.packing:
            problems.append(f"{key}.packing_length: it cannot be combined with --packing false; leave out one of them")
        shared = stage.sequence_parallel_size
        if shared is not None and size % shared:
            problems.append(
                f"{key}.sequence_parallel_size: {shared} does not divide the {size} processes of the run that "
                "share a sequence: give --sequence-parallel-size the largest size, and each stage a divisor of it"
            )
        if stage.until is not None and config.max_steps is None:
            problems.append(
                f"{key}.until: {stage.until:,} steps need --max-steps: add it, or give a share of the run (until: 30%)"
            )
        if (max_steps := config.max_steps) is None:
            continue
        end = stage.until or max(round((stage.until_share or 0) * max_steps), 1)
        if number + 1 == len(stages):
            if before >= max_steps:
                problems.append(f"{key}: the run ends after step {max_steps:,} (--max-steps), before this stage begins")
        elif not stage.end:
            problems.append(f"{key}.until is missing: with --max-steps, every stage but the last needs its end")
        elif end <= before:
            problems.append(
                f"{key}.until: {stage.end} is step {end:,}, not after step {before:,}, where the previous stage ends"
            )
        before = stage.until or round((stage.until_share or 0) * max_steps)
    return problems
