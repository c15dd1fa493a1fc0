"""The micro-batches of every optimizer step on one rank."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import tee
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packtool.batch.batch import Batch
from packtool.batch.dataset import MicroBatches, load_micro_batches
from packtool.batch.media_cache import MediaReads
from packtool.batch.micro_batch import MicroBatch, Tower
from packtool.batch.shard import SequenceSplit
from packtool.batch.spec import InputSpec
from packtool.config.train import TrainConfig
from packtool.launch.world import World, all_gather_objects
from packtool.train.prepare.figures import RankStep, StepFigures
from packtool.train.prepare.run import Run

_LOG = logging.getLogger("packtool.train.batches")


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step of one rank.

    Args:
        figures: over all ranks and micro-batches.
        num_micro_batches: of this rank, the same on every rank.
        micro_batches: loaded as they are needed, so that one at a time is in memory.
    """

    figures: StepFigures
    num_micro_batches: int
    micro_batches: Iterator[Batch]


def always_run(spec: InputSpec, config: TrainConfig) -> frozenset[Tower]:
    """Return the towers that run in every micro-batch because they are trained; others run only where needed."""
    named = any(
        (config.trainable_parameters, config.trainable_parameters_regex, config.modules_to_save, config.target_regex)
    )
    trains = named or config.adapters or not {"vision tower", "aligner"} <= config.frozen_parts
    return spec.towers if trains else frozenset()


def input_spec(run: Run) -> InputSpec:
    """Return the model's properties that collation needs."""
    spec = InputSpec.load(run.source.files.directory, run.source.media_limits, run.config)
    spec = spec.keeping_media(run.config, run.state.cache)
    return dataclasses.replace(spec, loss_reduction=run.config.loss_reduction)


def make_dataset(run: Run, spec: InputSpec, always: frozenset[Tower] | None = None) -> MicroBatches:
    """Create the dataset that turns a run's planned micro-batches into tensors.

    Args:
        always: towers that run in every micro-batch; by default all.
    """
    world, config = run.world, run.config
    return MicroBatches(
        run.source.read,
        spec,
        packing=config.removes_padding,
        skip_bad_media=config.on_bad_media == "skip",
        splits={
            size: SequenceSplit(axes.ring_size, axes.ulysses_size, world.rank % size)
            for size, axes in run.axes_by_size.items()
            if size > 1
        },
        always=always,
        min_shared=run.source.min_shared,
        multiple_of=run.length_multiple,
    )


class StepLoader:
    """Loads the training steps of one rank from ``run.start`` on; serves as the Trainer's dataloader.

    Its length is that of the whole run, from which the Trainer computes epochs.

    Attributes:
        steps: the planned steps of this rank.
        media_reads: reads of the media cache so far, by this rank.
    """

    def __init__(self, run: Run, spec: InputSpec) -> None:
        self.run, self.spec = run, spec
        self.steps = run.steps(RankExchange(run.world))
        self.media_reads = MediaReads()
        self._current: Sequence[MicroBatch] = ()

    def __len__(self) -> int:
        return self.run.timeline.num_steps

    def __iter__(self) -> Iterator[TrainingStep]:
        run, config = self.run, self.run.config
        # The workers that load ahead and the current step both iterate over the planned steps.
        ahead, steps = tee(self.steps.drawn())
        batches = load_micro_batches(
            make_dataset(run, self.spec, always_run(self.spec, config)),
            (micro_batch for step in ahead for micro_batch in step.micro_batches),
            num_workers=config.dataloader_num_workers or 0,
            pin_memory=torch.cuda.is_available(),
        )
        for number, step in zip(range(run.start, run.timeline.num_steps), steps, strict=False):
            figures = step.begin()
            self._current = step.micro_batches
            yield TrainingStep(figures, len(step.micro_batches), self._step_batches(batches, step, number))
            if self.steps.ended:
                return

    def _step_batches(self, batches: Iterator[Batch], step: RankStep, number: int) -> Iterator[Batch]:
        """Yield the batches of a step (0-based ``number``), and log each for ``--debug``."""
        for index, (planned, batch) in enumerate(zip(step.micro_batches, batches, strict=False), start=1):
            self.media_reads += batch.media_reads
            if _LOG.isEnabledFor(logging.DEBUG):
                text = "; ".join(filter(None, (self.run.source.words(planned), _describe(batch))))
                where = self.run.world.data.rank, number + 1, index, len(step.micro_batches)
                _LOG.debug("rank %d, step %d, micro-batch %d of %d: %s", *where, text)
            yield batch

    def all_media_reads(self) -> MediaReads:
        """Return ``media_reads`` summed over all ranks; every rank must call this."""
        return sum(all_gather_objects(self.media_reads, self.run.world.size), MediaReads())

    def names(self) -> Callable[[int], list[str]]:
        """Return a function from the number of a micro-batch in the current step to its samples' names.

        The function stays valid after later steps have begun.
        """
        current = self._current
        return lambda number: self.run.source.names(current[number])


def _describe(batch: Batch) -> str:
    tensors = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, **batch.media}
    parts = [f"{name} {tuple(value.shape)}" for name, value in tensors.items() if isinstance(value, Tensor)]
    if (lengths := getattr(batch, "lengths", None)) is not None:
        parts.append("lengths " + "+".join(map(str, lengths)))
    parts.append(f"{batch.num_target_tokens} targets")
    if batch.skipped:
        parts.append(f"{len(batch.skipped)} samples skipped")
    return "; ".join(parts)


class RankExchange:
    """Exchanges numbers between data-parallel ranks on the host, as ``NumberExchange`` requires."""

    def __init__(self, world: World) -> None:
        self._world = world

    def sums(self, counts: Sequence[int]) -> list[int]:
        """Return each number summed over the data-parallel ranks."""
        if self._world.size == 1:
            return list(counts)
        sums = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(sums, group=self._group)
        # Ranks that share sequences have read the same.
        return (sums // self._world.sequence_parallel_size).tolist()

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all data-parallel ranks, by rank."""
        if self._world.size == 1:
            return [value]
        return all_gather_objects(value, self._world.size, self._group)[:: self._world.sequence_parallel_size]

    @cached_property
    def _group(self) -> Any:
        """A group for the host, created on all ranks at first use; None for the default group."""
        return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
