"""The inputs of a run's plans: caches opened and checked, targets, mixture, shared prefixes and costs."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

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
from packtool.planning.cost import CostModel
from packtool.planning.epoch import (
    EpochPlan,
    assign_packs,
    pack_drawn,
    pack_epoch,
    plan_epoch,
    plan_mixture,
    reorder_saved_packs,
)
from packtool.planning.ledger import DataChange, Ledger
from packtool.planning.mixture import Mixture, make_mixture
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Int64Array, PackPlan
from packtool.planning.prefix_trees import DrawnPrefixes, select_samples
from packtool.planning.summary import PlanSummary
from packtool.planning.towers import TowerWork
from packtool.train.prepare.caches import packs_of, stage_problems
from packtool.train.prepare.checkpoint import BatchShape, RunState
from packtool.train.prepare.shared_prefixes import (
    SharedPrefixes,
    decide_sharing,
    find_shared_prefixes,
    load_shared_prefixes,
    part_placement,
    tower_work,
)

_SPARE_PACKS = 0.01
"""Fraction of packs that epochs of a mixture have in reserve, because each draws other prefixes."""
_MAX_CACHED_PLANS = 2
"""Plans have tens of megabytes each; one is of the epoch in training, the other of the one read ahead."""

TargetChoices = tuple[TargetChoice | None, ...]
"""One for each cache of a run; None for the targets of its export."""


class TrainInputs(NamedTuple):
    """The inputs that every training run has, and ``packtool plan`` may lack."""

    config: TrainConfig
    files: ModelFiles
    reader: CacheReader


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """Everything that the plans of a run, or of one of its stages, depend on, except the number of ranks.

    Args:
        config: the command's settings; of a training run, with ``--eval-strategy`` decided.
        options: of the plan, with costs; a ``BatchShape`` replaces ranks, accumulation and batch size for each plan.
        lengths, targets, media_tokens: all, target and media tokens of each sample, (N,); media may be unknown (None).
        towers: cost of the media of each sample, or of those that it adds to a shared prefix; None for lengths.
        reader: None for a file of lengths.
        recipe: None if every sample is trained once per epoch.
        files: of the model; None for the costs of a preset.
        target_choices: of each cache, where ``--loss-scale`` or the recipe differ from its export.
        shared: prefixes that are computed once; None if every sample is computed in full.
        no_sharing_reason: message if prefixes could be shared, and are not.
        mixture: samples of an epoch; with stages, the samples of all stages; None without a recipe.
        plan_source: equal inputs whose cached plans are reused; None to plan.
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
    plan_source: Inputs | None = None
    notes: tuple[str, ...] = ()

    def prepared(self) -> Inputs:
        """Find shared prefixes and make the mixtures of a recipe; inputs of a file of lengths stay unchanged."""
        if self.reader is None:
            return self
        shared = no_sharing_reason = None
        if self.saved_plan is not None:
            shared = load_shared_prefixes(packs_of(self.saved_plan), self.saved_plan.parts, self.reader)
        elif not self.plans_trees_per_epoch:
            shared, no_sharing_reason = self._find_shared_prefixes(self.reader)
        towers = tower_work(self.cost, self.reader.index) if shared is None else shared.towers(self.cost, self.targets)
        inputs = dataclasses.replace(self, shared=shared, no_sharing_reason=no_sharing_reason, towers=towers)
        if self.recipe is not None:
            max_length = self.config.max_length or max(manifest.max_length for manifest in self.reader.manifests)
            inputs = inputs.with_mixture(self.recipe, max_length)
        return inputs._with_drawn_prefixes(self.reader) if self.plans_trees_per_epoch else inputs

    @property
    def plans_trees_per_epoch(self) -> bool:
        """True if each epoch has other prefix trees: with a mixture, or a number of samples per step.

        ``shared`` then has the trees of the first epoch, ``shared_in`` those of any. ``towers`` are of full samples.
        """
        return self.saved_plan is None and (self.recipe is not None or self.options.samples_per_step is not None)

    def _with_drawn_prefixes(self, reader: CacheReader) -> Inputs:
        """Decide on sharing by the first epochs of all stages."""
        candidate = SharedPrefixes.undrawn(self.config, self.model, reader)
        if candidate is None:
            return self
        if self.config.max_rows_per_tree is not None:
            problem = "--max-rows-per-tree cannot be combined with prefixes of mixtures or of --samples-per-step"
            if self.config.share_prefix == "true":
                raise ConfigError(problem, "Leave it out.")
            return dataclasses.replace(
                self, no_sharing_reason=f"shared prefixes: each sample is computed in full: {problem}"
            )
        stages = [dataclasses.replace(stage, shared=candidate) for stage in self.stages or (self,)]
        first_epochs = [candidate.in_packs(stage._first_groups()) for stage in stages]
        shared, no_sharing_reason = decide_sharing(self.config, self.model, first_epochs)
        stages = [dataclasses.replace(stage, shared=shared) for stage in self.stages]
        return dataclasses.replace(self, shared=shared, no_sharing_reason=no_sharing_reason, stages=tuple(stages))

    @cached_property
    def _drawn_prefixes(self) -> DrawnPrefixes | None:
        """Prefixes for the trees of each epoch; None if all epochs have the trees of ``shared``."""
        if self.shared is None or not self.plans_trees_per_epoch:
            return None
        return self.shared.drawn(self.config.max_media_tokens_per_pack)

    def shared_in(self, packs: PackPlan) -> SharedPrefixes | None:
        """The prefixes that are computed once in the packs of an epoch; None if the run shares none."""
        if self.shared is None or not self.plans_trees_per_epoch:
            return self.shared
        return self.shared.in_packs(packs)

    def _find_shared_prefixes(self, reader: CacheReader) -> tuple[SharedPrefixes | None, str | None]:
        """Find the prefixes to share; None, possibly with the reason, if every sample is computed in full."""
        shared, no_sharing_reason = find_shared_prefixes(
            self.config,
            self.model,
            reader,
            capacity=self.options.packing_length,
            max_length=self.options.max_length,
            max_samples=self.config.max_rows_per_tree,
            max_media_tokens=self.config.max_media_tokens_per_pack,
        )
        if shared is not None:
            trees = dataclasses.replace(shared.trees, part_placement=part_placement(self.config))
            shared = dataclasses.replace(shared, trees=trees)
        return shared, no_sharing_reason

    def prepared_with(self, planned: Inputs) -> Inputs:
        """``prepared``, with the prefixes, mixtures and cached plans of ``planned`` if its plans are the same."""
        if not self._plans_same_steps_as(planned):
            return self.prepared()
        options = planned.options if planned.stages else self.options  # stages have their own, as in ``with_mixture``
        return dataclasses.replace(
            self,
            options=options,
            towers=planned.towers,
            shared=planned.shared,
            no_sharing_reason=planned.no_sharing_reason,
            mixture=planned.mixture,
            stages=planned.stages,
            plan_source=planned,
        )

    def _plans_same_steps_as(self, planned: Inputs) -> bool:
        """Return whether the plans of ``planned`` are those of these inputs, for any number of ranks."""
        if self.reader is None or planned.reader is None or self.reader.fingerprint != planned.reader.fingerprint:
            return False
        if self.recipe != planned.recipe or not np.array_equal(self.targets, planned.targets):
            return False
        if _options_except_sizes(self.options) != _options_except_sizes(planned.options):
            return False
        if planned.stages:
            return True  # each has its own lengths
        # ``packtool plan`` leaves out samples that are longer than a pack; in training they are an error.
        is_trained = self.lengths <= self.options.max_length
        is_planned = self.lengths <= planned.options.max_length
        return not (is_trained & ~is_planned).any()

    def with_mixture(self, recipe: Recipe, max_length: int) -> Inputs:
        """Add the mixture of a recipe, or the inputs of each of its stages; these have samples up to ``max_length``."""
        if not recipe.stages:
            return dataclasses.replace(self, recipe=recipe, mixture=self._mixture_of(recipe, self.options.max_length))
        if problems := stage_problems(recipe, self.config):
            raise ConfigError.from_problems(problems)
        stages = tuple(self._inputs_of_stage(stage, max_length) for stage in recipe.stages)
        mixture = _joined_mixture([stage.mixture for stage in stages if stage.mixture is not None])
        longest_stage = max(stages, key=lambda stage: stage.options.packing_length)
        return dataclasses.replace(self, recipe=recipe, options=longest_stage.options, mixture=mixture, stages=stages)

    def _inputs_of_stage(self, stage: Recipe, max_length: int) -> Inputs:
        """The inputs of one stage of a recipe, whose settings override those of the run."""
        packing_length = stage.packing_length or self.options.packing_length
        options = dataclasses.replace(
            self.options, packing_length=packing_length, max_length=min(max_length, packing_length)
        )
        return dataclasses.replace(
            self,
            options=options,
            mixture=self._mixture_of(stage, options.max_length),
            sequence_parallel_size=stage.sequence_parallel_size or self.config.sequence_parallel_ranks,
        )

    def _mixture_of(self, recipe: Recipe, max_length: int) -> Mixture:
        """The mixture of a recipe, or of one of its stages, without samples longer than ``max_length``."""
        assert self.reader is not None, "recipes mix caches"
        index, offsets, seed = self.reader.index, self.reader.offsets, self.config.seed
        return make_mixture(
            recipe, offsets, index.length, index.media_tokens, self.targets, max_length=max_length, seed=seed
        )

    @property
    def cost(self) -> CostModel:
        assert self.options.cost is not None, "caches are planned with costs"
        return self.options.cost

    @property
    def for_training(self) -> TrainInputs:
        assert isinstance(self.config, TrainConfig), "the inputs of a training run"
        assert self.files is not None, "a model is trained"
        assert self.reader is not None, "a run without --streaming has caches"
        return TrainInputs(self.config, self.files, self.reader)

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

    def plan_of(self, epoch: int, batch_shape: BatchShape) -> EpochPlan:
        """The plan of a full epoch; the last ones are cached."""
        return (self.plan_source or self)._cached_plan_of(epoch, batch_shape)

    @cached_property
    def _cached_plan_of(self) -> Callable[[int, BatchShape], EpochPlan]:
        return lru_cache(maxsize=_MAX_CACHED_PLANS)(self._plan_of)

    def _plan_of(self, epoch: int, batch_shape: BatchShape) -> EpochPlan:
        if self.saved_plan is not None:
            packs = packs_of(self.saved_plan)
            if epoch > 0 and self.config.shuffle:
                packs = reorder_saved_packs(packs, seed=self.config.seed, epoch=epoch)
            return self.assign(packs, batch_shape)
        if self.mixture is not None:
            return self.plan_mixture(self.mixture, epoch, batch_shape, self._num_drawn_packs)
        if self._drawn_prefixes is not None:
            return self.assign(self._drawn_packs(epoch), batch_shape)
        return self._plan(epoch, batch_shape, self.shared, self.towers)

    def _drawn_packs(self, epoch: int, untrained: Int64Array | None = None) -> PackPlan:
        """The packs of an epoch with a mixture, or a number of samples per step; or of ``untrained`` samples, (M,)."""
        shared: dict[str, Any] = {"seed": self.config.seed, "epoch": epoch, "prefixes": self._drawn_prefixes}
        if self.mixture is not None and untrained is None:
            return pack_drawn(self.mixture, self.options, **shared)
        return pack_epoch(self.lengths, self.options, media_tokens=self.media_tokens, samples=untrained, **shared)

    def _first_groups(self) -> PackPlan:
        """The samples of the first epoch, each group that shares a prefix as a pack; or their steps, if these do."""
        drawn = self._drawn_prefixes
        if self.mixture is None or self.options.samples_per_step is not None or drawn is None:
            return self._drawn_packs(0)
        samples = np.sort(self.mixture.draw(0))
        trees = drawn.build_trees(samples, self.lengths[samples], self.options.packing_length)
        tokens, samples = trees.new_tokens(self.lengths[samples]), samples[trees.samples]
        return PackPlan(samples, trees.offsets, tokens, self.options.packing_length, trees.shared_tokens)

    @cached_property
    def _num_drawn_packs(self) -> int | None:
        """Packs of each full epoch of a mixture with shared prefixes; None if the packs do not depend on these.

        Epochs save different numbers of tokens, and must have equally many steps. So they have some packs more than the
        first needs. If one needs even more, its last step trains them.
        """
        if self._drawn_prefixes is None or self.mixture is None or self.options.samples_per_step is not None:
            return None
        num_packs = self._drawn_packs(0).num_packs
        if self.mixture.varies:
            num_packs += math.ceil(_SPARE_PACKS * num_packs)
        return min(num_packs, self.mixture.num_drawn)

    def _plan(
        self,
        epoch: int,
        batch_shape: BatchShape,
        shared: SharedPrefixes | None,
        towers: TowerWork | None,
        samples: Int64Array | None = None,
    ) -> EpochPlan:
        """Plan the packs and steps of all samples, or of given ones, which may repeat.

        Args:
            shared: prefixes that these samples have in common, computed once; None to compute each sample in full.
            towers: FLOPs to encode the images, videos and sounds of these samples.
            samples: their positions in the caches, (M,); None for all.
        """
        trees = None if shared is None else shared.trees
        media_tokens = self.media_tokens if shared is None else shared.media_tokens
        return plan_epoch(
            self.lengths,
            self.targets,
            self._options_for(batch_shape),
            seed=self.config.seed,
            epoch=epoch,
            media_tokens=media_tokens,
            towers=towers,
            trees=trees,
            samples=samples,
        )

    def plan_mixture(
        self, mixture: Mixture, epoch: int, batch_shape: BatchShape, num_packs: int | None = None
    ) -> EpochPlan:
        """The plan of the samples that a mixture draws in an epoch, with as many steps as for ``num_packs`` packs."""
        options, seed, prefixes = self.options, self.config.seed, self._drawn_prefixes
        packs = pack_drawn(mixture, options, seed=seed, epoch=epoch, prefixes=prefixes, min_packs=num_packs or 0)
        plan = self.assign(packs, batch_shape, num_packs=num_packs)
        return dataclasses.replace(plan, summary=dataclasses.replace(plan.summary, num_filtered=mixture.num_filtered))

    def plan_remaining(self, change: DataChange, batch_shape: BatchShape) -> EpochPlan | None:
        """The plan of the samples left of the epoch in which the data changed; None if all were trained."""
        remaining_counts = change.samples()
        samples = np.repeat(np.arange(len(self.lengths)), remaining_counts)
        if not (self.lengths[samples] <= self.options.max_length).any():
            return None
        if self._drawn_prefixes is not None:
            return self.assign(self._drawn_packs(change.epoch, samples), batch_shape)
        shared, towers = self.shared, self.towers
        if shared is not None:
            shared = dataclasses.replace(shared, trees=select_samples(shared.trees, remaining_counts > 0))
            towers = shared.towers(self.cost, self.targets)
        return self._plan(change.epoch, batch_shape, shared, towers, samples)

    def assign(
        self, packs: PackPlan, batch_shape: BatchShape, *, keeps_steps: bool = False, num_packs: int | None = None
    ) -> EpochPlan:
        """Assign packs to optimizer steps, and to the micro-batches and ranks of ``batch_shape``.

        ``keeps_steps`` and ``num_packs`` are options of ``assign_packs``: packs stay in their steps; an epoch has no
        more steps than for ``num_packs`` packs.
        """
        media_tokens, towers, trees = self.media_tokens, self.towers, None
        if self.shared is not None and self.plans_trees_per_epoch:
            # Epochs differ in the groups of samples that share prefixes; those of ``self.shared`` are of the first.
            shared_in_packs = self.shared.in_packs(packs)
            media_tokens = shared_in_packs.media_tokens
            towers = shared_in_packs.towers(self.cost, self.targets)
        elif self.shared is not None:
            trees = self.shared.trees
        return assign_packs(
            packs,
            self.targets,
            self._options_for(batch_shape),
            media_tokens=media_tokens,
            towers=towers,
            trees=trees,
            keeps_steps=keeps_steps,
            num_packs=num_packs,
        )

    def summary_without_sharing(self, batch_shape: BatchShape) -> PlanSummary:
        """Packs and steps of the first epoch if no prefix were shared; packs it once more, without costs."""
        options = dataclasses.replace(self._options_for(batch_shape), cost=None, balance="none")
        seed, media_tokens = self.config.seed, self.media_tokens
        if self.mixture is not None:
            return plan_mixture(self.mixture, options, seed=seed, media_tokens=media_tokens).summary
        return plan_epoch(self.lengths, self.targets, options, seed=seed, media_tokens=media_tokens).summary

    def _options_for(self, batch_shape: BatchShape) -> PlanOptions:
        return dataclasses.replace(
            self.options,
            world_size=batch_shape.world_size,
            gradient_accumulation_steps=batch_shape.gradient_accumulation_steps,
            per_device_train_batch_size=batch_shape.batch_size,
        )

    def epoch_counts(self, epoch: int, trained: Int64Array | None = None) -> Int64Array:
        """Occurrences of each sample in an epoch, int64 (N,); ``trained``, (N,), counts those before a data change."""
        trained = np.zeros(len(self.lengths), np.int64) if trained is None else trained
        return np.ones(len(trained), np.int64) if self.mixture is None else self.mixture.epoch_counts(epoch, trained)

    def state(self, batch_shape: BatchShape) -> RunState:
        """Return the state of a new run at step 0, with everything that is compared with checkpoints.

        ``batch_shape``: numbers of ranks, micro-batches and packs of a step.
        """
        config, _, reader = self.for_training
        packs_fingerprint, steps_fingerprint = self.fingerprints(batch_shape)
        return RunState.of(
            config,
            plan=packs_fingerprint,
            steps=steps_fingerprint,
            cache=reader.fingerprint,
            max_length=self.options.max_length,
            packing_length=self.options.packing_length,
            world_size=batch_shape.world_size,
            gradient_accumulation_steps=batch_shape.gradient_accumulation_steps,
            loss_scale=config.loss_scale or "",
            loss_reduction=config.loss_reduction,
            shares_prefixes=self.shared is not None,
            schedule=_describe_schedule(self.options),
            learning=config.training_summary,
        )

    def fingerprints(self, batch_shape: BatchShape) -> tuple[str, str]:
        """Fingerprints of the packs, equal for any number of ranks, and of the steps."""
        if not self.stages:
            plan = self.plan_of(0, batch_shape)
            return plan.packs_fingerprint, plan.steps.fingerprint if plan.placement is None else plan.fingerprint
        packs, steps = self.stages[0].fingerprints(self.stage_batch_shape(0, batch_shape))
        digest = hashlib.sha256(packs.encode())
        for number, stage in enumerate(self.stages):
            assert stage.mixture is not None, "made with one"
            length, size = stage.options.packing_length, stage.sequence_parallel_size
            end = self._stage_epochs(number) if self.config.max_steps is None else self.stage_stop_step(number)
            digest.update(f"{stage.mixture.fingerprint} {length} {size} {end}\n".encode())
        return digest.hexdigest(), steps

    def stage_stop_step(self, number: int) -> int:
        """Steps of the run that are done when a stage ends, with ``--max-steps``."""
        assert self.recipe is not None, "stages are a recipe's"
        assert self.config.max_steps is not None, "stages that end at steps"
        return self.recipe.stages[number].stop_step(self.config.max_steps)

    def _stage_epochs(self, number: int) -> float:
        """Epochs that a stage trains, without ``--max-steps``."""
        assert self.recipe is not None, "stages are a recipe's"
        shares = [stage.until_share for stage in self.recipe.stages]
        if all(share is None for share in shares):
            return self.config.num_train_epochs  # every stage trains all epochs
        ends = [0.0, *(1.0 if share is None else share for share in shares)]
        return (ends[number + 1] - ends[number]) * self.config.num_train_epochs

    def first_epoch_fraction(self, number: int, step: int, batch_shape: BatchShape) -> tuple[float, int]:
        """The fraction of an epoch that a stage from ``step`` on trains first, and its epochs; (0.3, 3) for 2.3."""
        if self.config.max_steps is None:
            epochs = self._stage_epochs(number)
        else:
            full_epoch = self.stages[number].plan_of(0, self.stage_batch_shape(number, batch_shape))
            epochs = (self.stage_stop_step(number) - step) / full_epoch.steps.num_steps
        num_epochs = max(math.ceil(epochs - 1e-9), 1)
        return epochs - (num_epochs - 1), num_epochs

    def stage_batch_shape(self, number: int, batch_shape: BatchShape) -> BatchShape:
        """The run's batch shape with the data-parallel ranks of a stage, which may share sequences differently."""
        num_processes = batch_shape.world_size * self.config.sequence_parallel_ranks
        num_ranks = num_processes // self.stages[number].sequence_parallel_size
        if self.config.packs_per_step is not None:
            return BatchShape.of(self.config, num_ranks)
        return batch_shape._replace(world_size=num_ranks)

    def epoch_to_resume(self, ledger: Ledger, batch_shape: BatchShape) -> EpochToResume:
        """Find the epoch in which a run with changed data resumes; ``ledger`` is that of the checkpoint."""
        if self.stages:
            return self._stage_epoch_to_resume(ledger, batch_shape)
        if ledger.stage is not None and self.config.max_steps is None:
            raise MismatchError(
                "the run had stages and now has none, so the number of epochs left is unknown",
                "Set its end with --max-steps N, or keep stages in the recipe.",
            )

        def count_samples(_before_epoch: Int64Array, in_epoch: Int64Array) -> Int64Array:
            return self.epoch_counts(ledger.epoch, in_epoch)

        return EpochToResume(count_samples, self.options.max_length, stage=None)

    def _stage_epoch_to_resume(self, ledger: Ledger, batch_shape: BatchShape) -> EpochToResume:
        """Find the epoch in which a run with stages resumes with changed data.

        Stages are trained one after the other, each with its own mixture of samples. Each starts a new epoch, of which
        it may train only a part. ``ledger`` is that of the checkpoint, with the stage and epoch of the next step.
        """
        number = self._stage_at(ledger)
        stage = self.stages[number]
        first_epoch = ledger.epoch
        begins_stage = True
        if ledger.stage is not None:
            ledger_stage, ledger_first_epoch = ledger.stage
            if ledger_stage == number:
                first_epoch = ledger_first_epoch
                begins_stage = False

        def count_samples(before_epoch: Int64Array, in_epoch: Int64Array) -> Int64Array:
            mixture = stage.mixture
            assert mixture is not None, "every stage has a mixture"
            if ledger.epoch == first_epoch:
                mixture = mixture.partial_epoch(self._first_fraction(number, batch_shape), before_epoch)
            # Before a stage begins, the counts in this epoch are those of another stage.
            trained_by_stage = np.zeros_like(in_epoch) if begins_stage else in_epoch
            return mixture.epoch_counts(ledger.epoch, trained_by_stage)

        return EpochToResume(count_samples, stage.options.max_length, stage=(number, first_epoch))

    def _first_fraction(self, number: int, batch_shape: BatchShape) -> float:
        """The fraction of an epoch that a stage trains first, if it starts where the stage before it ends."""
        first_step = 0
        if number > 0 and self.config.max_steps is not None:
            first_step = self.stage_stop_step(number - 1)
        fraction, _ = self.first_epoch_fraction(number, first_step, batch_shape)
        return fraction

    def _stage_at(self, ledger: Ledger) -> int:
        """The 0-based number of the stage in which a run resumes with changed data."""
        if self.config.max_steps is not None:
            last = len(self.stages) - 1
            return next((number for number in range(last) if ledger.step < self.stage_stop_step(number)), last)
        number = None if ledger.stage is None else ledger.stage[0]
        if number is None or number >= len(self.stages):
            before = "none" if number is None else f"at least {number + 1}"
            assert self.recipe is not None, "stages are a recipe's"
            raise MismatchError(
                f"{self.recipe.place} has {len(self.stages)} stages, and the run had {before}: its present stage is "
                "unknown",
                "Give the ends of stages in steps, with --max-steps; or keep the stages that the run had.",
            )
        return number


def _options_except_sizes(options: PlanOptions) -> PlanOptions:
    """The options without lengths and ranks, for comparisons."""
    return dataclasses.replace(options, max_length=0, packing_length=0, world_size=0)


def _describe_schedule(options: PlanOptions) -> str:
    """Describe how packs become steps, where that is not the default; empty for the default.

    Checkpoints hold this text and are compared with it, so it must not change: "a row" means a sequence.
    """
    skrull = options.skrull
    if skrull is not None:
        return (
            f"skrull, buckets of {skrull.bucket_size} tokens, a row on {skrull.sequence_parallel_size}, "
            f"for {skrull.step_time.device}"
        )
    if options.samples_per_step is not None:
        return f"{options.samples_per_step} samples a step"
    return ""


def _joined_mixture(mixtures: Sequence[Mixture]) -> Mixture:
    """The mixture of the samples of all stages; it gives names, weights and epochs of sources."""
    candidates = []  # of each source, the positions of its samples in any stage, ascending
    for stage_candidates in zip(*(mixture.candidates for mixture in mixtures), strict=True):
        candidates.append(np.unique(np.concatenate(stage_candidates)))
    return dataclasses.replace(mixtures[0], candidates=tuple(candidates), counts=tuple(map(len, candidates)))


class EpochToResume(NamedTuple):
    """The epoch in which a run with changed data resumes."""

    # Counts each sample in the epoch, (N,). The arguments count how often each was trained before the epoch, and in it.
    count_samples: Callable[[Int64Array, Int64Array], Int64Array]
    max_length: int  # maximum tokens of a sample
    stage: tuple[int, int] | None  # 0-based number, and first epoch; None without stages
