"""The dataloader of the Trainer: each of its batches is a whole optimizer step of one rank, as it is planned."""

from __future__ import annotations

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
    """One optimizer step of one rank, whose micro-batches are loaded one at a time.

    Args:
        figures: of the whole step, over all ranks and micro-batches.
        planned: the samples of each micro-batch; every rank has as many micro-batches.
    """

    figures: StepFigures
    planned: Sequence[MicroBatch]
    micro_batches: Iterator[Batch]


def required_towers(spec: InputSpec, config: TrainConfig) -> frozenset[Tower]:
    """Return the towers that must run in every micro-batch: all if a tower may be trained, else none.

    A trained tower needs a backward pass on every rank, because ranks exchange its gradients; so do layers with
    cross-attention, which a forward pass without pictures skips.
    """
    is_named = any(
        (config.trainable_parameters, config.trainable_parameters_regex, config.modules_to_save, config.target_regex)
    )
    is_trained = is_named or config.adapters or not {"vision tower", "aligner"} <= config.frozen_parts
    return spec.towers if is_trained or spec.family.cross_attention else frozenset()


class StepLoader:
    """Dataloader of the Trainer: the training steps of one rank, from ``run.start`` on.

    Its length is the number of steps of the whole run. ``media_reads`` are this rank's reads of the media cache so far.
    """

    def __init__(self, run: Run, spec: InputSpec) -> None:
        self.run, self.spec = run, spec
        self.steps = run.steps(RankExchange(run.world))
        self.media_reads = MediaReads()
        self._current: Sequence[MicroBatch] = ()

    def __len__(self) -> int:
        return self.run.timeline.num_steps

    def __iter__(self) -> Iterator[TrainingStep]:
        run = self.run
        # Data workers load ahead of the current step, so they have their own iterator over the planned steps.
        steps_to_load, steps = tee(self.steps.rank_steps())
        batches = load_micro_batches(
            self._dataset(),
            (micro_batch for step in steps_to_load for micro_batch in step.micro_batches),
            num_workers=run.config.dataloader_num_workers or 0,
            pin_memory=torch.cuda.is_available(),
        )
        # A stream may end earlier; the range comes first in zip, so that no further step is taken from ``steps``.
        for number, step in zip(range(run.start, run.timeline.num_steps), steps, strict=False):
            figures = step.begin()
            self._current = step.micro_batches
            yield TrainingStep(figures, step.micro_batches, self._step_batches(batches, step, number))
            if self.steps.ended:
                return

    def _dataset(self) -> MicroBatches:
        """The reader of this rank's micro-batches, which runs in the data workers."""
        run = self.run
        splits = {}  # by number of ranks that share a sequence
        for size, axes in run.axes_by_size.items():
            if size > 1:
                splits[size] = SequenceSplit(axes.ring_size, axes.ulysses_size, rank=run.world.rank % size)
        return MicroBatches(
            run.source.read,
            self.spec,
            packing=run.config.removes_padding,
            skip_bad_media=run.config.on_bad_media == "skip",
            splits=splits,
            required_towers=required_towers(self.spec, run.config),
            min_shared=run.source.min_shared,
            pad_to_multiple_of=run.length_multiple,
        )

    def _step_batches(self, batches: Iterator[Batch], step: RankStep, number: int) -> Iterator[Batch]:
        """Yield the batches of step ``number`` (0-based), add up their media reads, and log each for ``--debug``.

        ``batches`` also has the batches of all later steps, which stay in the iterator.
        """
        for index, (planned, batch) in enumerate(zip(step.micro_batches, batches, strict=False), start=1):
            self.media_reads += batch.media_reads
            if _LOG.isEnabledFor(logging.DEBUG):
                position = self.run.world.data.rank, number + 1, index, len(step.micro_batches)
                samples = self.run.source.debug_text(planned)
                details = "; ".join(filter(None, [samples, *_debug_details(batch)]))
                _LOG.debug("rank %d, step %d, micro-batch %d of %d: %s", *position, details)
            yield batch

    def all_media_reads(self) -> MediaReads:
        """Return ``media_reads`` summed over all ranks; every rank must call this."""
        return sum(all_gather_objects(self.media_reads, self.run.world.size), MediaReads())

    def names(self) -> Callable[[int], list[str]]:
        """Return a function from a micro-batch's number in this step to its samples' names, also valid later."""
        current = self._current
        return lambda number: self.run.source.names(current[number])


def _debug_details(batch: Batch) -> Iterator[str]:
    """Describe a batch for ``--debug``: shapes of its tensors, lengths of its documents, and counts."""
    tensors = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, **batch.media}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            yield f"{name} {tuple(value.shape)}"
    lengths = getattr(batch, "lengths", None)
    if lengths is not None:
        yield "lengths " + "+".join(map(str, lengths))
    yield f"{batch.num_target_tokens} targets"
    if batch.skipped:
        yield f"{len(batch.skipped)} samples skipped"


class RankExchange:
    """Exchange of values between data-parallel ranks on the host; implements ``CountExchange``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def sums(self, counts: Sequence[int]) -> list[int]:
        """Return each number summed over the data-parallel ranks."""
        if self._world.size == 1:
            return list(counts)
        sums = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(sums, group=self._group)
        # Ranks that share a sequence all count it.
        return (sums // self._world.sequence_parallel_size).tolist()

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all data-parallel ranks, by rank."""
        if self._world.size == 1:
            return [value]
        return all_gather_objects(value, self._world.size, self._group)[:: self._world.sequence_parallel_size]

    @cached_property
    def _group(self) -> Any:
        """A process group on the host, created by all ranks at first use; None for the default group."""
        return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
