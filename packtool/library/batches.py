"""Micro-batches of a plan as tensors, for custom training loops."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from packtool.batch.batch import Batch
from packtool.batch.dataset import MicroBatches, load_micro_batches
from packtool.batch.micro_batch import MicroBatch, PlannedEpoch
from packtool.config.data import AccessOptions, MediaCacheOptions
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError, PacktoolError, did_you_mean
from packtool.launch.world import World
from packtool.library.commands import settings_of
from packtool.library.planned import Plan
from packtool.library.training import Targets
from packtool.planning.steps import StepPlan
from packtool.train.model.load import input_spec
from packtool.train.model.loss import label_positions
from packtool.train.prepare.checkpoint import Assignment, RunState
from packtool.train.prepare.figures import units_per_step
from packtool.train.prepare.output_dir import ResumePoint
from packtool.train.prepare.run import Run
from packtool.train.prepare.workers import workers_of

if TYPE_CHECKING:
    from packtool.library.options import BatchKeywords

OPTIONS = frozenset(
    {
        *("loss_scale", "loss_reduction", "max_steps", "dataloader_num_workers", "media_root", "torch_compile"),
        *(field.name for field in (*fields(AccessOptions), *fields(MediaCacheOptions))),
    }
)
"""Options of ``packtool train`` that determine the content of batches and are not options of a plan."""

_TRAIN_ONLY = {
    "on_bad_media": "a skipped sample changes the divisor of its step after some gradients are computed, which only "
    "packtool train --on-bad-media skip corrects; export again without such rows",
}
"""Options of ``packtool train`` that need its training loop, with the reason."""


class Batches(Dataset[dict[str, Any]]):
    """Micro-batches of one rank in all steps of a plan, each a dictionary of keyword arguments of the model.

        for batch in packtool.Batches(plan, model="model"):
            packtool.loss(model(**batch), batch).backward()
            if batch["targets"].ends_step:
                optimizer.step()
                optimizer.zero_grad()

    Iterating loads ahead in worker processes. ``state_dict`` describes the position of the last iteration; after
    ``load_state_dict``, the next iteration starts with the following micro-batch. With another number of ranks, which
    is possible at the end of a step, the remaining packs are assigned again, and micro-batches are numbered from there.
    By number, ``batches[i]``, it is a dataset for ``torch.utils.data.DataLoader`` and torchdata's
    ``StatefulDataLoader``, with ``batch_size=None``, or with 1 and a collate function that returns the only item. The
    plan defines the order, so it must not be shuffled.

    A micro-batch also contains ``labels`` and ``shift_labels``, for trainers that count them, and ``targets``
    (``packtool.Targets``), for ``packtool.loss``.

    Args:
        plan: from ``packtool.plan``; it also determines the number of epochs (``num_train_epochs``).
        rank: 0-based data-parallel rank; by default that of this process, from torchrun. ``"all"`` is for trainers that
            divide a dataset in turn and count micro-batches, as accelerate and the Trainer do: it has the micro-batches
            of all ranks, with number i * world_size + rank, and ``micro_batches_per_step`` in every step, with empty
            ones at the end of smaller steps.
        model: directory of the trained model; by default that of the plan or of the caches.
        device: of the tensors when iterating; by default they stay on the host, in page-locked memory if there is a
            GPU.
        options: of ``packtool train``: ``loss_scale``, ``loss_reduction``, ``max_steps``, ``dataloader_num_workers``,
            ``media_root``, ``media_access``, ``max_media_bytes``, ``media_cache``, ``media_cache_size``;
            ``torch_compile`` pads micro-batches to a few lengths, for a model that you compile.

    Raises:
        ConfigError, DataError, MismatchError: as ``packtool train`` before its first step.
    Attributes:
        micro_batches_per_step: of one rank, in the largest steps.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int | Literal["all"] | None = None,
        *,
        model: str | None = None,
        device: str | torch.device | None = None,
        **options: Unpack[BatchKeywords],
    ) -> None:
        if not isinstance(plan, Plan):
            raise ConfigError(f"packtool.Batches takes a plan, not {plan!r}.", "Make one: packtool.plan(caches, ...).")
        self.plan = plan
        self.model = model
        self.device = device
        self.options = options
        self.rank: int | Literal["all"] = _rank_in_plan(plan, rank)
        self._config = _train_config(plan, model, options)
        self._prepare(resume_state=None)  # sets the other attributes
        planned_packs = plan.preview.timeline.first_plan.packs
        if self._timeline.first_plan.packs.fingerprint != planned_packs.fingerprint:
            raise MismatchError(
                "the caches have changed since the plan was made", "Call packtool.plan again, and check the new plan."
            )

    def _prepare(self, resume_state: RunState | None) -> None:
        """Prepare the micro-batches of the plan, or of the packs that remain after the steps of ``resume_state``.

        Sets all attributes that depend on it; the next iteration starts at the first of these micro-batches.
        """
        self._resume_state = resume_state
        all_ranks = World(size=self.plan.world_size)
        resume_point = ResumePoint(saved_state=resume_state)
        self._run = Run.of(self._config, all_ranks, resume_point, self.plan.preview.inputs)
        self._caches = self._run.caches
        self._timeline = self._caches.timeline
        self._tensors = MicroBatches(
            self._caches.read,
            input_spec(self._run),
            packing=self._config.removes_padding,
            min_shared=self._caches.min_shared,
            pad_to_multiple_of=self._run.length_multiple,
        )
        self._planned_epoch = lru_cache(maxsize=2)(self._compute_epoch)  # two, for steps around the end of an epoch
        current_assignment = self._run.state.all_assignments[-1]  # of the remaining packs to ranks
        self._first_step = current_assignment.first_step  # of micro-batch 0
        self._first_epoch, _ = self._timeline.locate(self._first_step)
        self._count_micro_batches()

        self._start_number = 0  # of the first micro-batch of the next iteration
        self._next_number = 0  # of the micro-batch after the one that was returned last

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self._timeline.num_steps

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run, of this rank or of all."""
        if self.rank == "all":
            return (self.num_steps - self._first_step) * self.micro_batches_per_step * self.plan.world_size
        return int(self._epoch_offsets[-1])

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a micro-batch by its number, on the host.

        Raises:
            IndexError: if there is no such micro-batch.
            PacktoolError: if its media cannot be loaded.
        """
        if not -len(self) <= number < len(self):
            raise IndexError(f"micro-batch {number} of {len(self)}")
        number %= len(self)
        batch = self._tensors[self._micro_batch(number)]
        if isinstance(batch, PacktoolError):
            raise batch
        return self._model_kwargs(number, batch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the micro-batches from the position of ``load_state_dict`` on, else from the first."""
        self._next_number = self._start_number
        numbers = range(self._start_number, len(self))
        batches = load_micro_batches(
            self._tensors,
            map(self._micro_batch, numbers),
            num_workers=workers_of(self._run),
            pin_memory=torch.cuda.is_available(),
        )
        for number, batch in zip(numbers, batches, strict=True):
            self._next_number = number + 1
            if (problem := batch.media_reads.problem) is not None:
                warnings.warn(f"media_cache: nothing more is added to the cache: {problem}", stacklevel=2)
            moved = batch if self.device is None else batch.to(self.device, non_blocking=True)
            yield self._model_kwargs(number, moved)
        self._start_number = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the last iteration and a description of its plan, in numbers and text.

        It is the same on all ranks.
        """
        num_steps_done, ends_step = self._first_step, True
        if self._next_number:
            last_step, ends_step = self._step_of(self._next_number - 1)
            num_steps_done = last_step + 1 if ends_step else last_step
        position = {"micro_batch": self._next_number, "of_all_ranks": self.rank == "all", "ends_step": ends_step}
        run = asdict(replace(self._run.state, step=num_steps_done))
        run["assignments"] = tuple(map(tuple, run["assignments"]))  # plain, for ``torch.load`` with ``weights_only``
        return {**position, "run": run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: let the next iteration start after the last micro-batch that was returned before ``state_dict``.

        The number of data-parallel ranks may have changed if the state was saved at the end of an optimizer step. Then
        the remaining packs are divided among the new ranks, and micro-batches are numbered from 0 again.

        Raises:
            MismatchError: if the state belongs to another plan or other caches, or was taken within a step and the
                number of ranks has changed.
        """
        saved = _parse_state(state)
        current_run = self._run.state
        _check_same_plan(current_run, saved.run)

        if current_run.needs_reassignment(saved.run):  # the number of ranks has changed
            _check_saved_at_step_end(saved, current_run.world_size)
            self._prepare(resume_state=saved.run)
            start_number = 0
        else:
            _check_same_numbering(saved, self.rank)
            if saved.run.assignments != current_run.assignments:  # packs were assigned again before the state was saved
                self._prepare(resume_state=saved.run)
            start_number = saved.num_returned

        # ``_prepare`` resets both numbers, so they are set last.
        self._start_number = start_number
        self._next_number = start_number

    def _count_micro_batches(self) -> None:
        """Count the micro-batches of one rank in the E epochs of the run, from ``_first_step`` on.

        Sets ``_epoch_offsets``, int64 (E + 1,): micro-batches before each epoch and in total; ``_epoch_starts``: first
        step by epoch; and ``micro_batches_per_step``.
        """
        self._epoch_starts: dict[int, int] = {}
        self.micro_batches_per_step = 1
        epoch_sizes = []
        for span in self._timeline.spans(self._first_step):
            steps = self._steps_of_epoch(span.epoch)
            # ``step_offsets`` counts the micro-batches of all ranks, and all have equally many.
            step_sizes = np.diff(steps.step_offsets)[: span.num_steps] // steps.world_size
            epoch_sizes.append(step_sizes.sum())
            self._epoch_starts[span.epoch] = span.first_step
            self.micro_batches_per_step = max(self.micro_batches_per_step, int(step_sizes.max()))
        self._epoch_offsets = np.cumsum([0, *epoch_sizes], dtype=np.int64)

    def _steps_of_epoch(self, epoch: int) -> StepPlan:
        """Return steps with as many micro-batches as those of an epoch; plans only epochs that may differ from others.

        These are epochs with token budgets, a partial first epoch, and stages.
        """
        config = self.plan.config
        timeline = self._timeline
        epochs_differ = config.has_unpadded_batches or config.samples_per_step is not None or timeline.inputs.stages
        if epochs_differ or epoch == self._first_epoch:
            return timeline.plan_of(epoch).steps
        return timeline.first_plan.steps

    def _num_micro_batches(self, epoch: int, step: int) -> int:
        """Return the number of a rank's micro-batches in a step of an epoch, with empty ones for rank "all"."""
        if self.rank == "all":
            return self.micro_batches_per_step
        planned, _ = self._planned_epoch(epoch)
        return planned.plan.steps.num_micro_batches(step)

    def _compute_epoch(self, epoch: int) -> tuple[PlannedEpoch, npt.NDArray[np.int64]]:
        """Return the micro-batches of an epoch, and the divisor of the loss in each of its steps, (S,)."""
        plan = self._timeline.plan_of(epoch)
        return self._caches.planned_epoch(plan, epoch), units_per_step(plan, self._caches.figures)

    def _locate(self, number: int) -> tuple[int, int, int, int]:
        """Return the epoch of a micro-batch, its step in the epoch, its rank, and its index in the rank's step."""
        if self.rank == "all":
            number_of_rank, rank = divmod(number, self.plan.world_size)
            step, micro_batch = divmod(number_of_rank, self.micro_batches_per_step)
            epoch, step_in_epoch = self._timeline.locate(self._first_step + step)
            return epoch, step_in_epoch, rank, micro_batch
        epoch_index = int(np.searchsorted(self._epoch_offsets, number, side="right")) - 1
        epoch = self._first_epoch + epoch_index
        number_in_epoch = number - int(self._epoch_offsets[epoch_index])
        planned, _ = self._planned_epoch(epoch)
        step_offsets = planned.plan.steps.step_offsets // planned.plan.steps.world_size
        step = int(np.searchsorted(step_offsets, number_in_epoch, side="right")) - 1
        return epoch, step, self.rank, number_in_epoch - int(step_offsets[step])

    def _step_of(self, number: int) -> tuple[int, bool]:
        """Return the step of the run with a micro-batch, and whether this is the rank's last one in the step."""
        epoch, step_in_epoch, _rank, micro_batch = self._locate(number)
        is_last = micro_batch + 1 == self._num_micro_batches(epoch, step_in_epoch)
        return self._epoch_starts[epoch] + step_in_epoch, is_last

    def _micro_batch(self, number: int) -> MicroBatch:
        """Return a micro-batch as the samples to read; an empty one after the last of a smaller step."""
        epoch, step, rank, micro_batch = self._locate(number)
        planned, _ = self._planned_epoch(epoch)
        exists = micro_batch < planned.plan.steps.num_micro_batches(step)
        return planned.micro_batch(step, rank, micro_batch) if exists else MicroBatch([])

    def _model_kwargs(self, number: int, batch: Batch) -> dict[str, Any]:
        """Return collated micro-batch ``number`` as keyword arguments of the model, with the targets of its loss."""
        step, ends_step = self._step_of(number)
        shift_labels = batch.labels  # of each token the next one; the last label is -100
        targets = Targets(
            labels=shift_labels,
            weights=batch.loss_weights,
            positions=label_positions(batch),
            num_targets=batch.num_target_tokens,
            num_items=self._loss_divisor(number),
            world_size=self.plan.world_size,
            step=step,
            ends_step=ends_step,
        )
        return {
            **batch.model_inputs(),
            "logits_to_keep": targets.positions,
            "labels": shift_labels.roll(1, dims=1),  # of each token itself; the first label is -100
            "shift_labels": shift_labels,
            "targets": targets,
        }

    def _loss_divisor(self, number: int) -> int:
        epoch, step_in_epoch, _, _ = self._locate(number)
        _, loss_divisors = self._planned_epoch(epoch)
        return int(loss_divisors[step_in_epoch])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle plan and options, from which another process prepares the same micro-batches."""
        create = partial(Batches, model=self.model, device=self.device, **self.options)
        return create, (self.plan, self.rank), self._resume_state

    def __setstate__(self, resume_state: RunState) -> None:
        self._prepare(resume_state)


class _SavedState(NamedTuple):
    """A result of ``Batches.state_dict``.

    Args:
        num_returned: micro-batches returned before.
        counts_all_ranks: whether these are counted over all ranks.
        ends_step: whether the last one ended an optimizer step.
    """

    run: RunState
    num_returned: int
    counts_all_ranks: bool
    ends_step: bool


def _parse_state(state: Mapping[str, Any]) -> _SavedState:
    """Check a result of ``Batches.state_dict``, which may have been in a file; MismatchError if it is none."""
    try:
        assignments = tuple(Assignment(*each) for each in state["run"]["assignments"])  # JSON makes lists of tuples
        run = RunState(**{**state["run"], "assignments": assignments})
        return _SavedState(run, int(state["micro_batch"]), bool(state["of_all_ranks"]), bool(state["ends_step"]))
    except (KeyError, TypeError, ValueError) as error:
        raise MismatchError(f"this is not a state of packtool.Batches: {error!r}") from error


def _check_same_plan(current_run: RunState, saved_run: RunState) -> None:
    """Raise MismatchError if a saved run has another plan or other caches than the current one."""
    try:
        current_run.check_continues("this state", saved_run)
    except MismatchError as error:
        raise MismatchError(error.message, "Create plan and batches with the same options as then.") from None


def _check_same_numbering(saved: _SavedState, rank: int | Literal["all"]) -> None:
    """Raise MismatchError if only one of state and batches numbers the micro-batches of all ranks."""
    if saved.counts_all_ranks != (rank == "all"):
        raise MismatchError(
            'either this state or these batches count those of all ranks (rank="all"), but not both',
            "Use the same rank= as for the state.",
        )


def _check_saved_at_step_end(saved: _SavedState, num_ranks: int) -> None:
    """Raise MismatchError if a state was saved within a step; its packs cannot be assigned to other ranks."""
    if not saved.ends_step:
        raise MismatchError(
            f"this state was taken within step {saved.run.step}, whose remaining packs cannot be assigned to "
            f"another number of ranks: {saved.run.world_size} then, {num_ranks} now",
            'Take states where batch["targets"].ends_step is true.',
        )


def _train_config(plan: Plan, model: str | None, options: Mapping[str, Any]) -> TrainConfig:
    """Return the settings with which ``packtool train`` would train these batches: of the plan and ``options``."""
    config = plan.config
    reader = plan.preview.inputs.reader
    if reader is None:
        raise ConfigError("a plan of --lengths has no samples for batches", "Plan for caches.")
    if config.sequence_parallel_ranks > 1:
        raise ConfigError(
            f"in this plan {config.sequence_parallel_ranks} processes share each pack, which Batches does not support",
            "Plan without sequence_parallel_size, or use packtool train.",
        )
    _check_options(plan, options)
    model_of_cache = str(reader.manifests[0].identity.spec["model"])
    settings = {
        **_changed_settings(config),
        "model": model or config.model or model_of_cache,
        "output_dir": "",  # batches write nothing and evaluate nothing
        "eval_strategy": "no",
        **options,
    }
    return settings_of(TrainConfig, settings)


def _changed_settings(config: PlanConfig) -> dict[str, Any]:
    """Return the options of a plan that are not at their defaults, without those that training does not have."""
    train_names = {field.name for field in fields(TrainConfig)}
    settings = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in train_names and value != field.default:
            settings[field.name] = value
    return settings


def _check_options(plan: Plan, options: Mapping[str, Any]) -> None:
    """Raise a ConfigError that names the options which need the training loop, or else those that are unknown."""
    problems = [f"{name} is not supported here: {reason}" for name, reason in _TRAIN_ONLY.items() if name in options]
    if not problems:
        unknown_names = [name for name in options if name not in OPTIONS]
        problems = [f"{name} is not an option of Batches{did_you_mean(name, OPTIONS)}" for name in unknown_names]
    if problems:
        raise ConfigError.from_problems(problems)
    if plan.preview.inputs.stages and "max_steps" in options and options["max_steps"] != plan.config.max_steps:
        raise ConfigError(
            f"max_steps={options['max_steps']}: the plan has stages, whose lengths depend on max_steps",
            "Pass the same max_steps to packtool.plan.",
        )


def _rank_in_plan(plan: Plan, rank: int | Literal["all"] | None) -> int | Literal["all"]:
    """Return the rank, None for that of this process; raise a ConfigError if the plan does not have it."""
    if rank is None:
        world = World.from_environment()
        if world.size != plan.world_size:
            raise ConfigError(
                f"the plan is for {plan.world_size} ranks, and this process is one of {world.size}",
                f"Plan with world_size={world.size}, or pass rank=.",
            )
        return world.rank
    if rank != "all" and (not isinstance(rank, int) or not 0 <= rank < plan.world_size):
        raise ConfigError(f'rank {rank}: the plan has ranks 0 to {plan.world_size - 1}, or "all"')
    return rank
