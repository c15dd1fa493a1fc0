"""The ledger of a run, kept while it trains."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtool.launch.exchange import all_gather_objects
from packtool.train.loop.trainer import PackTrainer
from packtool.train.loop.watch import StepWatch
from packtool.train.prepare.checkpoint import PREFIX
from packtool.train.prepare.record import RunRecord
from packtool.train.prepare.whole import saving


class RecordCallback(TrainerCallback):
    """Writes a run's history when it begins, and the ledger into its checkpoints; on every rank.

    Must come before ``CheckpointCallback``, which takes the sums of what is there.

    Args:
        record: of the run.
        trainer: knows the samples that this rank has skipped.
        watch: knows the steps that changed no weight.
    """

    def __init__(self, record: RunRecord, trainer: PackTrainer, watch: StepWatch) -> None:
        self.record, self.trainer, self.watch = record, trainer, watch
        self._num_told = 0  # skipped samples of this rank that the ledger has

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first step is next."""
        if state.is_world_process_zero:
            self.record.begin(str(args.output_dir))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint is being written."""
        trainer = self.trainer
        skipped: list[tuple[int, int]] = []
        if trainer.skips:
            steps, samples = trainer.skipped_in[self._num_told :], trainer.skipped[self._num_told :]
            found = zip(steps, samples, strict=True)
            mine = [(step, sample.sample) for step, sample in found if sample.sample is not None]
            self._num_told += len(samples)
            skipped = [each for rank in all_gather_objects(mine, args.world_size) for each in rank]
        if state.is_world_process_zero:
            checkpoint = os.path.join(str(args.output_dir), f"{PREFIX}{state.global_step}")
            with saving(checkpoint):
                self.record.save(checkpoint, state.global_step, skipped, self.watch.left_out)
        self.watch.left_out.clear()
