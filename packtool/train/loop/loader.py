"""The micro-batches of every optimizer step, as one rank sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from packtool.batch.batch import Batch
from packtool.batch.dataset import PlannedMicroBatches, TowerUse, load_micro_batches
from packtool.batch.shard import Cut
from packtool.batch.spec import InputSpec, Tower
from packtool.cache.chosen import SampleReader
from packtool.config.train import TrainConfig
from packtool.launch.world import World
from packtool.plan.epoch import EpochPlan
from packtool.train.loop.batch_log import is_watched, packs_in_words, watched
from packtool.train.model.towers import frozen_parts
from packtool.train.prepare.cached import PreparedRun
from packtool.train.prepare.figures import SampleFigures, StepFigures, figures_of_steps
from packtool.train.prepare.schedule import Schedule
from packtool.train.prepare.streamed import PreparedStream


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


def cut_of(run: PreparedRun | PreparedStream) -> Cut | None:
    """How a run's rows are cut, and this rank's part; None where every rank has rows of its own."""
    if run.world.num_sharing == 1:
        return None
    return Cut(run.axes.ring_size, run.axes.ulysses_size, run.world.share_rank)


def use_of_towers(samples: SampleFigures, spec: InputSpec, config: TrainConfig) -> TowerUse:
    """Towers that are trained run in every micro-batch, others where some rank has something for them."""
    named = any(
        (config.trainable_parameters, config.trainable_parameters_regex, config.modules_to_save, config.target_regex)
    )
    if named or config.adapters or not {"vision tower", "aligner"} <= frozen_parts(config):
        return TowerUse(spec.towers, {})
    found: dict[Tower, npt.NDArray[np.bool_] | None] = {"vision": samples.is_seen, "sound": samples.is_heard}
    brings = {tower: found[tower] for tower in sorted(spec.towers)}
    return TowerUse(
        frozenset(tower for tower, known in brings.items() if known is None),
        {tower: known for tower, known in brings.items() if known is not None},
    )


class StepLoader:
    """The training steps of one rank from ``start`` on: what transformers' Trainer takes for its dataloader.

    Its length is that of the whole run, for the Trainer computes epochs from it; what was trained before ``start`` is
    not read again.

    Args:
        schedule: of the run.
        reader: of the samples that its plans number.
        spec: the model that they are collated for.
        world: this rank.
        samples: figures of all samples.
        config: how micro-batches are made.
        start: first step.
        cut: of rows that several ranks share.
    """

    def __init__(
        self,
        schedule: Schedule,
        reader: SampleReader,
        spec: InputSpec,
        world: World,
        *,
        samples: SampleFigures,
        config: TrainConfig,
        start: int = 0,
        cut: Cut | None = None,
    ) -> None:
        self.schedule = schedule
        self.reader = reader
        self.spec = spec
        self.world = world
        self.samples = samples
        self.config = config
        self.start = start
        self.cut = cut

    def __len__(self) -> int:
        return self.schedule.num_steps

    def __iter__(self) -> Iterator[TrainingStep]:
        step = self.start
        while step < self.schedule.num_steps:
            epoch, first = self.schedule.locate(step)
            plan = self.schedule.plan_of(epoch)
            batches = self._micro_batches(plan, first)
            figures = list(
                figures_of_steps(
                    plan, self.samples, is_dynamic=self.config.removes_padding and not plan.summary.packing
                )
            )
            last = min(plan.steps.num_steps, first + self.schedule.num_steps - step)
            for step_in_epoch in range(first, last):
                num = plan.steps.num_micro_batches(step_in_epoch)
                micro_batches: Iterator[Batch] = islice(batches, num)
                if is_watched():
                    rank = self.world.data.rank
                    packs = (packs_in_words(plan.samples(step_in_epoch, rank, number)) for number in range(num))
                    done = step + step_in_epoch - first
                    micro_batches = watched(micro_batches, packs, rank=rank, step=done, num=num)
                yield TrainingStep(figures[step_in_epoch], num, micro_batches)
            step += last - first

    def names(self, step: int, number: int) -> list[str]:
        """Where the samples of one of this rank's micro-batches came from, in words.

        Args:
            step: 0-based, of the whole run.
            number: of the micro-batch in it, 0-based.
        """
        epoch, step_in_epoch = self.schedule.locate(step)
        packs = self.schedule.plan_of(epoch).samples(step_in_epoch, self.world.data.rank, number)
        positions = [int(position) for pack in packs for position in pack]
        samples = [(position, self.reader.sample(position)) for position in positions]
        return [f"row {sample.row} of {sample.source} (sample {position})" for position, sample in samples]

    def _micro_batches(self, plan: EpochPlan, first_step: int) -> Iterator[Batch]:
        dataset = PlannedMicroBatches(
            self.reader,
            plan,
            rank=self.world.data.rank,
            spec=self.spec,
            packing=self.config.removes_padding,
            skip_bad_media=self.config.on_bad_media == "skip",
            cut=self.cut,
            use=use_of_towers(self.samples, self.spec, self.config),
        )
        return load_micro_batches(
            dataset,
            range(int(dataset.first[first_step]), len(dataset)),
            num_workers=self.config.dataloader_num_workers or 0,
            pin_memory=torch.cuda.is_available(),
        )
