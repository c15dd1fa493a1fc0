"""The micro-batches of a plan as tensors, for a training loop of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from packtool.batch.batch import Batch
from packtool.batch.dataset import MicroBatches, load_micro_batches
from packtool.batch.micro_batch import MicroBatch, PlannedEpoch
from packtool.config.data import AccessOptions, MediaCacheOptions
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError, PacktoolError, did_you_mean
from packtool.launch.world import World
from packtool.library.commands import settings_of
from packtool.library.planned import Plan
from packtool.library.training import Targets
from packtool.train.model.load import input_spec
from packtool.train.model.loss import label_positions
from packtool.train.prepare.checkpoint import RunState
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
"""Options of ``packtool train`` that determine the content of batches and are no options of a plan."""

_ELSEWHERE = {
    "on_bad_media": "a sample that is skipped changes what its whole step is divided by when gradients are there "
    "already, which packtool train --on-bad-media skip mends; export again without such rows",
}
"""Options of ``packtool train`` that need its training loop, with the reason."""


class Batches(Dataset[dict[str, Any]]):
    """The micro-batches of one rank through all steps of a plan, each a dictionary of the model's keyword arguments.

        for batch in packtool.Batches(plan, model="model"):
            packtool.loss(model(**batch), batch).backward()
            if batch["targets"].ends_step:
                optimizer.step()
                optimizer.zero_grad()

    Iterating loads ahead in worker processes. ``state_dict`` says how far the last iteration has come, and the next one
    after ``load_state_dict`` goes on there, with the very next micro-batch. With another number of ranks the packs that
    are left are assigned anew, if a step has just ended, and numbers count from there. By number, ``batches[i]``, it is
    a dataset for ``torch.utils.data.DataLoader`` and torchdata's ``StatefulDataLoader``, with ``batch_size=None``, or
    with 1 and a collate function that takes the only item. The order is the plan's: nobody may shuffle it.

    A micro-batch also holds ``labels`` and ``shift_labels``, for trainers that count them, and ``targets``
    (``packtool.Targets``), from which ``packtool.loss`` is made.

    Args:
        plan: from ``packtool.plan``; its ``num_train_epochs`` says how often every sample is seen.
        rank: 0-based data-parallel rank; by default this process's, as torchrun says. ``"all"`` is for trainers that
            divide a dataset in turn and count micro-batches, as accelerate and the Trainer do: it has those of all
            ranks, number i * world_size + rank, and every step as many, ``micro_batches_per_step``, with empty ones at
            the end of smaller steps.
        model: directory of the model that is trained; by default the plan's, or the one that the caches are for.
        device: where iterating puts the tensors; by default they stay on the host, in page-locked memory if there is a
            GPU.
        options: of ``packtool train``: ``loss_scale``, ``loss_reduction``, ``max_steps``, ``dataloader_num_workers``,
            ``media_root``, ``media_access``, ``max_media_bytes``, ``media_cache``, ``media_cache_size``;
            ``torch_compile`` pads micro-batches to a few lengths, for a model that you compile.

    Raises:
        ConfigError, DataError, MismatchError: as ``packtool train`` before its first step.
    Attributes:
        micro_batches_per_step: of a rank, in the steps that have most.
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
        self.plan, self.model, self.device, self.options = plan, model, device, options
        if rank is None:
            world = World.from_environment()
            if world.size != plan.world_size:
                raise ConfigError(
                    f"the plan is for {plan.world_size} ranks, and this process is one of {world.size}",
                    f"Plan with world_size={world.size}, or say which rank's batches these are.",
                )
            rank = world.rank
        elif rank != "all" and (not isinstance(rank, int) or not 0 <= rank < plan.world_size):
            raise ConfigError(f'rank {rank}: the plan has ranks 0 to {plan.world_size - 1}, or "all"')
        self.rank: int | Literal["all"] = rank
        self._config = _training(plan, model, options)
        self._prepare(None)
        if self._timeline.first.packs.fingerprint != plan.preview.timeline.first.packs.fingerprint:
            raise MismatchError(
                "the caches are not what they were when the plan was made", "Call packtool.plan again, and look at it."
            )

    def _prepare(self, before: RunState | None) -> None:
        """Prepare the micro-batches of the plan, or of what remains of it after a run with that state."""
        self._before = before
        world, planned = World(size=self.plan.world_size), self.plan.preview.inputs
        self._run = Run.of(self._config, world, ResumePoint(before=before), planned)
        self._source, self._timeline = self._run.caches, self._run.caches.timeline
        self._tensors = MicroBatches(
            self._source.read,
            input_spec(self._run),
            packing=self._config.removes_padding,
            min_shared=self._source.min_shared,
            multiple_of=self._run.length_multiple,
        )
        self._epoch = lru_cache(maxsize=2)(self._epoch_of)
        # The first step that was assigned to this number of ranks; micro-batches are numbered from there.
        self._base = self._run.state.assignments[-1][0] if self._run.state.assignments else 0
        self._first_epoch = self._timeline.locate(self._base)[0]
        self._ends, self._starts, self.micro_batches_per_step = self._count()
        self._begin = self._place = 0

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self._timeline.num_steps

    def __len__(self) -> int:
        """Micro-batches of the whole run, of this rank or of all."""
        if self.rank == "all":
            return (self.num_steps - self._base) * self.micro_batches_per_step * self.plan.world_size
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> dict[str, Any]:
        """A micro-batch by its number, on the host.

        Raises:
            IndexError: if there is no such micro-batch.
            PacktoolError: if its media cannot be loaded.
        """
        if not -len(self) <= number < len(self):
            raise IndexError(f"micro-batch {number} of {len(self)}")
        number %= len(self)
        batch = self._tensors[self._planned(number)]
        if isinstance(batch, PacktoolError):
            raise batch
        return self._inputs(number, batch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The micro-batches from where ``load_state_dict`` says, else from the first."""
        self._place = self._begin
        numbers = range(self._begin, len(self))
        batches = load_micro_batches(
            self._tensors,
            map(self._planned, numbers),
            num_workers=workers_of(self._run),
            pin_memory=torch.cuda.is_available(),
        )
        for number, batch in zip(numbers, batches, strict=True):
            self._place = number + 1
            if batch.media_reads.problem is not None:
                warnings.warn(f"media_cache: no more is kept: {batch.media_reads.problem}", stacklevel=2)
            moved = batch if self.device is None else batch.to(self.device, non_blocking=True)
            yield self._inputs(number, moved)
        self._begin = 0

    def state_dict(self) -> dict[str, Any]:
        """Position of the last iteration, and a description of its plan: numbers and text, the same on all ranks."""
        step, ends_step = self._base, True
        if self._place:
            epoch, in_epoch, _, place = self._locate(self._place - 1)
            ends_step = place + 1 == self._num_micro_batches(epoch, in_epoch)
            step = self._starts[epoch - self._first_epoch] + in_epoch + ends_step
        run = asdict(replace(self._run.state, step=step))
        return {"micro_batch": self._place, "of_all_ranks": self.rank == "all", "ends_step": ends_step, "run": run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on behind the micro-batch that was given last before ``state_dict``.

        Raises:
            MismatchError: if the state belongs to another plan or other caches, or, with another number of ranks, was
                taken within a step.
        """
        try:
            values = dict(state["run"])
            values["assignments"] = tuple(map(tuple, values["assignments"]))
            before, micro_batch = RunState(**values), int(state["micro_batch"])
            of_all_ranks, ends_step = bool(state["of_all_ranks"]), bool(state["ends_step"])
        except (KeyError, TypeError, ValueError) as error:
            raise MismatchError(f"this is no state of packtool.Batches: {error!r}") from error
        mine = replace(self._run.state, assignments=())
        is_reassigned = mine.is_assigned_anew_after(before)
        try:
            mine.check_continues("this state", before)
        except MismatchError as error:
            raise MismatchError(error.message, "Make plan and batches with the options that they had.") from None
        if of_all_ranks != (self.rank == "all") and not is_reassigned:
            raise MismatchError('this state counts the batches of all ranks (rank="all"), or these do, and not both.')
        if is_reassigned and not ends_step:
            raise MismatchError(
                f"this state is from within step {before.step}, whose other packs cannot be assigned to another number "
                f"of ranks: {before.world_size} there, {mine.world_size} now",
                'Take states where batch["targets"].ends_step.',
            )
        if is_reassigned or before.assignments != self._run.state.assignments:
            self._prepare(before)
        self._begin = self._place = 0 if is_reassigned else micro_batch

    def _count(self) -> tuple[npt.NDArray[np.int64], list[int], int]:
        """Count the micro-batches of a rank.

        Returns:
            micro-batches before each epoch and in total, (E + 1,); first step of each epoch; maximum of a step.
        """
        timeline, ends, starts, maximum = self._timeline, [0], [self._base], 1
        for epoch in count(self._first_epoch):
            # Epochs have equal counts, unless tokens fill micro-batches, the epoch is partial, or there are stages.
            is_like_first = epoch > self._first_epoch and self.plan.config.has_equal_epochs
            is_like_first = is_like_first and not timeline.inputs.stages
            steps = (timeline.first if is_like_first else timeline.plan_of(epoch)).steps
            trained = min(self.num_steps, timeline.stretch(starts[-1]).stop) - starts[-1]
            offsets = steps.step_offsets[: trained + 1] // steps.world_size
            ends.append(ends[-1] + int(offsets[-1]))
            starts.append(starts[-1] + trained)
            maximum = max(maximum, int(np.diff(offsets).max(initial=1)))
            if starts[-1] == self.num_steps:
                break
        return np.array(ends, np.int64), starts, maximum

    def _num_micro_batches(self, epoch: int, step: int) -> int:
        """Return the number of micro-batches of a rank in a step of an epoch."""
        if self.rank == "all":
            return self.micro_batches_per_step
        return self._epoch(epoch)[0].plan.steps.num_micro_batches(step)

    def _epoch_of(self, epoch: int) -> tuple[PlannedEpoch, npt.NDArray[np.int64]]:
        """Return the micro-batches of an epoch, and the divisor of the loss in each of its steps, (S,)."""
        plan = self._timeline.plan_of(epoch)
        return self._source.planned_epoch(plan, epoch), units_per_step(plan, self._source.figures)

    def _locate(self, number: int) -> tuple[int, int, int, int]:
        """Return epoch, step of the epoch, rank and position in the step of a micro-batch."""
        if self.rank == "all":
            number, rank = divmod(number, self.plan.world_size)
            step, place = divmod(number, self.micro_batches_per_step)
            return *self._timeline.locate(self._base + step), rank, place
        index = int(np.searchsorted(self._ends, number, side="right")) - 1
        epoch = self._first_epoch + index
        steps = self._epoch(epoch)[0].plan.steps
        offsets, number = steps.step_offsets // steps.world_size, number - int(self._ends[index])
        step = int(np.searchsorted(offsets, number, side="right")) - 1
        return epoch, step, self.rank, number - int(offsets[step])

    def _planned(self, number: int) -> MicroBatch:
        """Return a micro-batch by its samples, which are not read yet."""
        epoch, step, rank, place = self._locate(number)
        planned, _ = self._epoch(epoch)
        exists = place < planned.plan.steps.num_micro_batches(step)
        return planned.micro_batch(step, rank, place) if exists else MicroBatch([])

    def _inputs(self, number: int, batch: Batch) -> dict[str, Any]:
        """Return a micro-batch as the model's keyword arguments, with the targets of its loss."""
        epoch, step, _, place = self._locate(number)
        _, units = self._epoch(epoch)
        targets = Targets(
            batch.labels,
            batch.loss_weights,
            label_positions(batch),
            batch.num_target_tokens,
            num_items=int(units[step]),
            world_size=self.plan.world_size,
            step=self._starts[epoch - self._first_epoch] + step,
            ends_step=place + 1 == self._num_micro_batches(epoch, step),
        )
        return {
            **batch.model_inputs(),
            "logits_to_keep": targets.positions,
            # The label of the last position is -100, so rolling moves no target to the front.
            "labels": batch.labels.roll(1, dims=1),
            "shift_labels": batch.labels,
            "targets": targets,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild them in another process from plan and options."""
        made = partial(Batches, model=self.model, device=self.device, **self.options)
        return made, (self.plan, self.rank), self._before

    def __setstate__(self, before: RunState) -> None:
        self._prepare(before)


def _training(plan: Plan, model: str | None, options: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of the training run that has these batches."""
    config, reader = plan.config, plan.preview.inputs.reader
    if reader is None:
        raise ConfigError("a plan of lengths has no samples to make batches of", "Plan for caches.")
    if config.sequence_parallel_ranks > 1:
        raise ConfigError(
            f"batches are whole packs, and this plan has {config.sequence_parallel_ranks} processes share each",
            "Leave out --sequence-parallel-size, or train with packtool train, which divides them.",
        )
    if problems := [f"{name} is no option here: {why}" for name, why in _ELSEWHERE.items() if name in options]:
        raise ConfigError.from_problems(problems)
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ConfigError.from_problems([f"{name} is no option here{did_you_mean(name, OPTIONS)}" for name in unknown])
    if plan.preview.inputs.stages and options.get("max_steps", config.max_steps) != config.max_steps:
        raise ConfigError(
            f"max_steps={options['max_steps']}: the plan has stages, and how long these are depends on it",
            "Give it to packtool.plan, too.",
        )
    known = {field.name for field in fields(TrainConfig)}
    plan_options = {
        field.name: value
        for field in fields(config)
        if field.name in known and (value := getattr(config, field.name)) != field.default
    }
    made_for = model or config.model or str(reader.manifests[0].identity.spec["model"])
    fixed = {"model": made_for, "output_dir": "", "eval_strategy": "no"}
    return settings_of(TrainConfig, {**plan_options, **fixed, **options})
