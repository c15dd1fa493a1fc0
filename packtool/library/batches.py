"""The micro-batches of a plan as tensors, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from packtool.batch.batch import Batch
from packtool.batch.dataset import load_micro_batches
from packtool.batch.micro_batch import MicroBatch, PlannedEpoch
from packtool.config.rows import AccessOptions
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError, PacktoolError
from packtool.launch.world import World
from packtool.library.planned import Plan
from packtool.library.settings import refuse_others, settings_of
from packtool.library.training import Targets
from packtool.train.loop.loader import input_spec, micro_batches
from packtool.train.model.loss import label_positions
from packtool.train.prepare.cached import CachedRun, prepare_cached
from packtool.train.prepare.figures import units_per_step
from packtool.train.prepare.prepared import Beginning
from packtool.train.prepare.workers import workers_of

if TYPE_CHECKING:
    from packtool.library.options import BatchKeywords

OPTIONS = frozenset(
    {
        *("loss_scale", "loss_reduction", "max_steps", "dataloader_num_workers", "media_root"),
        *(field.name for field in fields(AccessOptions)),
    }
)
"""Options of ``packtool train`` that decide what batches hold, and that a plan does not know."""


class Batches(Dataset[dict[str, Any]]):
    """The micro-batches of one rank through all steps of a plan, each a dictionary of the model's keyword arguments.

        for batch in packtool.Batches(plan, model="model"):
            packtool.loss(model(**batch), batch).backward()
            if batch["targets"].ends_step:
                optimizer.step()
                optimizer.zero_grad()

    Iterating loads ahead in worker processes. ``state_dict`` says how far the last iteration has come, and the next one
    after ``load_state_dict`` goes on there, with the very next micro-batch. By number, ``batches[i]``, it is a dataset
    for ``torch.utils.data.DataLoader`` and torchdata's ``StatefulDataLoader``, with ``batch_size=None``, or with 1 and
    a collate function that takes the only item. The order is the plan's: nobody may shuffle it.

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
            ``media_root``, ``media_access``, ``max_media_bytes``.

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
        self.rank = _rank(rank, plan.world_size)
        config = _training(plan, model, options)
        self._run: CachedRun = prepare_cached(config, World(size=plan.world_size), Beginning(None, None, None, ()))
        if self._run.schedule.first.packs.fingerprint != plan.preview.plan.packs.fingerprint:
            raise MismatchError(
                "the caches are not what they were when the plan was made", "Call packtool.plan again, and look at it."
            )
        self._tensors = micro_batches(self._run, input_spec(self._run))
        self._epoch = lru_cache(maxsize=2)(self._epoch_of)
        self._ends, self.micro_batches_per_step = self._count()
        self._begin = self._place = 0

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self._run.schedule.num_steps

    def __len__(self) -> int:
        """Micro-batches of the whole run, of this rank or of all."""
        if self.rank == "all":
            return self.num_steps * self.micro_batches_per_step * self.plan.world_size
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
        found = self._tensors[self._planned(number)]
        if isinstance(found, PacktoolError):
            raise found
        return self._inputs(number, found)

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
            moved = batch if self.device is None else batch.to(self.device, non_blocking=True)
            yield self._inputs(number, moved)
        self._begin = 0

    def state_dict(self) -> dict[str, Any]:
        """How far the last iteration has come, and what it goes through; plain numbers and text."""
        return {"micro_batch": self._place, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on behind the micro-batch that was given last before ``state_dict``.

        Raises:
            MismatchError: if the state belongs to another plan, other caches, or another number of ranks.
        """
        mine = self._identity
        different = [
            f"  - {name}: {state.get(name)} there, {mine[name]} here" for name in mine if mine[name] != state.get(name)
        ]
        if different:
            lines = "\n".join(different)
            raise MismatchError(
                f"this state belongs to other batches:\n{lines}",
                "Make the plan and the batches with the options that they had, for as many ranks.",
            )
        self._begin = self._place = int(state["micro_batch"])

    @property
    def _identity(self) -> dict[str, Any]:
        state = self._run.state
        return {
            "plan": self._run.schedule.first.fingerprint,
            "cache": state.cache,
            "world_size": self.plan.world_size,
            "rank": self.rank,
            "loss_scale": state.loss_scale,
            "loss_reduction": state.loss_reduction,
        }

    def _count(self) -> tuple[npt.NDArray[np.int64], int]:
        """Micro-batches of a rank before each epoch and in all of them, (epochs + 1,); most of a step."""
        schedule, ends, most, left = self._run.schedule, [0], 1, self.num_steps
        for epoch in count():
            # Other epochs have as many as the first, but for micro-batches that are filled by tokens.
            is_first = self.plan.config.has_as_many_micro_batches
            steps = (schedule.first if is_first else schedule.plan_of(epoch)).steps
            trained = min(left, steps.num_steps)
            offsets = steps.step_offsets[: trained + 1] // steps.world_size
            ends.append(ends[-1] + int(offsets[-1]))
            most = max(most, int(np.diff(offsets).max()))
            left -= trained
            if not left:
                break
        return np.array(ends, np.int64), most

    def _epoch_of(self, epoch: int) -> tuple[PlannedEpoch, npt.NDArray[np.int64]]:
        """The micro-batches of an epoch, and what the loss of each of its steps is divided by, (S,)."""
        plan = self._run.schedule.plan_of(epoch)
        return self._run.planned_epoch(plan), units_per_step(plan, self._run.figures)

    def _locate(self, number: int) -> tuple[int, int, int, int]:
        """Epoch, step of the epoch, rank and number in the step of a micro-batch."""
        if self.rank == "all":
            number, rank = divmod(number, self.plan.world_size)
            step, place = divmod(number, self.micro_batches_per_step)
            return *self._run.schedule.locate(step), rank, place
        epoch = int(np.searchsorted(self._ends, number, side="right")) - 1
        steps = self._epoch(epoch)[0].plan.steps
        offsets, number = steps.step_offsets // steps.world_size, number - int(self._ends[epoch])
        step = int(np.searchsorted(offsets, number, side="right")) - 1
        return epoch, step, self.rank, number - int(offsets[step])

    def _planned(self, number: int) -> MicroBatch:
        """A micro-batch before anything of it is read."""
        epoch, step, rank, place = self._locate(number)
        planned, _ = self._epoch(epoch)
        is_there = place < planned.plan.steps.num_micro_batches(step)
        return planned.micro_batch(step, rank, place) if is_there else MicroBatch([])

    def _inputs(self, number: int, batch: Batch) -> dict[str, Any]:
        """A micro-batch as the model's keyword arguments, with what its loss is made of."""
        epoch, step, _, place = self._locate(number)
        planned, units = self._epoch(epoch)
        num = self.micro_batches_per_step if self.rank == "all" else planned.plan.steps.num_micro_batches(step)
        targets = Targets(
            batch.labels,
            batch.loss_weights,
            label_positions(batch),
            batch.num_target_tokens,
            num_items=int(units[step]),
            world_size=self.plan.world_size,
            step=epoch * self._run.schedule.steps_per_epoch + step,
            ends_step=place + 1 == num,
        )
        return {
            **batch.model_inputs(),
            "logits_to_keep": targets.positions,
            # The last position predicts nothing, so nothing comes round.
            "labels": batch.labels.roll(1, dims=1),
            "shift_labels": batch.labels,
            "targets": targets,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process makes them anew from plan and options."""
        return _made, (self.plan, self.rank, self.model, self.device, self.options)


def _made(plan: Plan, rank: Any, model: str | None, device: Any, options: Mapping[str, Any]) -> Batches:
    return Batches(plan, rank, model=model, device=device, **options)


def _rank(given: int | str | None, world_size: int) -> int | Literal["all"]:
    if given == "all":
        return "all"
    if given is None:
        world = World.from_environment()
        if world.size != world_size:
            raise ConfigError(
                f"the plan is for {world_size} ranks, and this process is one of {world.size}",
                f"Plan with world_size={world.size}, or say which rank's batches these are.",
            )
        return world.rank
    if not isinstance(given, int) or not 0 <= given < world_size:
        raise ConfigError(f'rank {given}: the plan has ranks 0 to {world_size - 1}, or "all"')
    return given


def _training(plan: Plan, model: str | None, options: Mapping[str, Any]) -> TrainConfig:
    """The training run that has these batches."""
    asked, reader = plan.config, plan.preview.reader
    if reader is None:
        raise ConfigError("a plan of lengths has no samples to make batches of", "Plan for caches.")
    if asked.sequence_parallel_ranks > 1:
        raise ConfigError(
            f"batches are whole packs, and this plan has {asked.sequence_parallel_ranks} processes share each",
            "Leave out --sequence-parallel-size, or train with packtool train, which divides them.",
        )
    refuse_others(options, OPTIONS)
    known = {field.name for field in fields(TrainConfig)}
    given = {
        field.name: value
        for field in fields(asked)
        if field.name in known and (value := getattr(asked, field.name)) != field.default
    }
    made_for = model or asked.model or str(reader.manifests[0].identity.spec["model"])
    fixed = {"model": made_for, "output_dir": "", "eval_strategy": "no"}
    return settings_of(TrainConfig, {**given, **fixed, **options})
