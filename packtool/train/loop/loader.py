"""The micro-batches of every optimizer step, as one rank sees them.

What each micro-batch holds, for ``--debug``: its samples and packs, and the shapes of its tensors.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packtool.batch.batch import Batch
from packtool.batch.dataset import MicroBatches, load_micro_batches
from packtool.batch.media_cache import MediaReads
from packtool.batch.micro_batch import MicroBatch, Tower
from packtool.batch.shard import Cut
from packtool.batch.spec import InputSpec
from packtool.config.train import TrainConfig
from packtool.launch.world import World, all_gather_objects
from packtool.train.prepare.figures import StepFigures
from packtool.train.prepare.run import Run

_LOG = logging.getLogger("packtool.train.batches")


def is_watched() -> bool:
    """Whether anybody listens: what is told costs time."""
    return _LOG.isEnabledFor(logging.DEBUG)


def watched(batches: Iterable[Batch], held: Iterator[str], *, rank: int, step: int, num: int) -> Iterator[Batch]:
    """The same micro-batches, each told when it is handed out.

    Args:
        held: the samples of each, in words.
        rank: that trains them.
        step: optimizer steps done before.
        num: micro-batches of the step on this rank.
    """
    for number, batch in enumerate(batches, start=1):
        words = next(held, "")
        _LOG.debug("rank %d, step %d, micro-batch %d of %d: %s", rank, step + 1, number, num, described(batch, words))
        yield batch


def described(batch: Batch, held: str) -> str:
    """One line on a micro-batch."""
    shapes = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, **batch.media}
    told = [f"{name} {tuple(value.shape)}" for name, value in shapes.items() if isinstance(value, Tensor)]
    lengths = getattr(batch, "lengths", None)
    if lengths is not None:
        told.append("lengths " + "+".join(str(length) for length in lengths))
    told.append(f"{batch.num_target_tokens} targets")
    if batch.skipped:
        told.append(f"{len(batch.skipped)} samples skipped")
    return "; ".join([held, *told] if held else told)


@dataclass(frozen=True)
class TrainingStep:
    """What one rank does in one optimizer step.

    Args:
        figures: over all ranks and micro-batches.
        num_micro_batches: of this rank, the same on every rank.
        micro_batches: read as they are needed, so that one at a time is held.
    """

    figures: StepFigures
    num_micro_batches: int
    micro_batches: Iterator[Batch]


def always_run(spec: InputSpec, config: TrainConfig) -> frozenset[Tower]:
    """Towers that run in every micro-batch, because they are trained; others run where some rank has need of them."""
    named = any(
        (config.trainable_parameters, config.trainable_parameters_regex, config.modules_to_save, config.target_regex)
    )
    trains = named or config.adapters or not {"vision tower", "aligner"} <= config.frozen_parts
    return spec.towers if trains else frozenset()


def input_spec(run: Run) -> InputSpec:
    """The model of a run as collation sees it.

    Raises:
        ConfigError: for a multimodal model of an unknown family, or a media cache that cannot be.
    """
    spec = InputSpec.load(run.source.files.directory, run.source.media_limits, run.config)
    spec = spec.keeping_media(run.config, run.state.cache)
    return dataclasses.replace(spec, loss_reduction=run.config.loss_reduction)


def micro_batches(run: Run, spec: InputSpec, always: frozenset[Tower] | None = None) -> MicroBatches:
    """What turns the micro-batches of a run into tensors.

    Args:
        spec: the model that they are collated for.
        always: towers that run in every micro-batch; by default all.
    """
    world, config = run.world, run.config
    return MicroBatches(
        run.source.read,
        spec,
        packing=config.removes_padding,
        skip_bad_media=config.on_bad_media == "skip",
        cuts={
            size: Cut(axes.ring_size, axes.ulysses_size, world.rank % size)
            for size, axes in run.axes_by_size.items()
            if size > 1
        },
        always=always,
        min_shared=run.source.min_shared,
        multiple_of=run.length_multiple,
    )


class StepLoader:
    """The training steps of one rank from ``run.start`` on: what transformers' Trainer takes for its dataloader.

    Its length is that of the whole run, for the Trainer computes epochs from it; what was trained before is not read
    again.

    Args:
        run: of this rank.
        spec: the model that micro-batches are collated for.

    Attributes:
        steps: of this rank, as the run has them.
        media_reads: what was asked of the media cache so far, by this rank.
    """

    def __init__(self, run: Run, spec: InputSpec) -> None:
        self.run, self.spec = run, spec
        self.steps = run.steps(Ranks(run.world))
        self.media_reads = MediaReads()
        self._given: Sequence[MicroBatch] = ()

    def __len__(self) -> int:
        return self.run.timeline.num_steps

    def __iter__(self) -> Iterator[TrainingStep]:
        run, config = self.run, self.run.config
        # Drawn once: by those who load ahead, and by the step whose turn it is.
        ahead, steps = tee(self.steps.drawn())
        batches = load_micro_batches(
            micro_batches(run, self.spec, always_run(self.spec, config)),
            (micro_batch for step in ahead for micro_batch in step.micro_batches),
            num_workers=config.dataloader_num_workers or 0,
            pin_memory=torch.cuda.is_available(),
        )
        for number, step in zip(range(run.start, run.timeline.num_steps), steps, strict=False):
            figures = step.begin()
            self._given, num = step.micro_batches, len(step.micro_batches)
            given = self._counted(islice(batches, num))
            if is_watched():
                held = (run.source.words(micro_batch) for micro_batch in step.micro_batches)
                given = watched(given, held, rank=run.world.data.rank, step=number, num=num)
            yield TrainingStep(figures, num, given)
            if self.steps.ended:
                return

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.media_reads += batch.media_reads
            yield batch

    def all_media_reads(self) -> MediaReads:
        """``media_reads`` of all ranks, added up; every rank must call this."""
        return sum(all_gather_objects(self.media_reads, self.run.world.size), MediaReads())

    def names(self) -> Callable[[int], list[str]]:
        """What says, in words, where the samples of one of this rank's micro-batches came from.

        It takes the 0-based number of a micro-batch in the step that is given last now, also when others have followed.
        """
        given = self._given
        return lambda number: self.run.source.names(given[number])


class Ranks:
    """The exchange of numbers between steps, on the host: see ``NumberExchange``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: tuple[Any] | None = None

    def sums(self, counts: Sequence[int]) -> list[int]:
        """See ``NumberExchange``."""
        if self._world.size == 1:
            return list(counts)
        sums = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(sums, group=self._group())
        # Those that share sequences have read the same.
        return [int(number) for number in (sums // self._world.sequence_parallel_size).tolist()]

    def gathered(self, value: Any) -> list[Any]:
        """See ``NumberExchange``."""
        if self._world.size == 1:
            return [value]
        return all_gather_objects(value, self._world.size, self._group())[:: self._world.sequence_parallel_size]

    def _group(self) -> Any:
        """A group on the host, made when it is first needed, on all ranks; None is the default one."""
        if self._made is None:
            self._made = (None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo"),)
        return self._made[0]
