"""transformers' Trainer, told what a step is.

The Trainer deals a fixed number of micro-batches to every step but an epoch's last, and finds its place after a resume
by counting them. Here the plan says what a step is, so the Trainer is given whole steps: one "batch" of its dataloader
is a ``TrainingStep``, the whole run is one of its "epochs", and gradient accumulation happens in ``training_step``.
What is left to it is what it is good at: devices, wrapping, optimizer, clipping, schedule, logging, checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import Batch, SkippedSample
from packtool.train.arguments import refused_by_transformers
from packtool.train.head_loss import HeadLoss
from packtool.train.loader import StepLoader, TrainingStep
from packtool.train.loss import sum_of_losses, takes_logits_to_keep
from packtool.train.meter import Meter
from packtool.train.noise import EmbeddingNoise
from packtool.train.part_rates import PartRates, split_groups
from packtool.train.stream_loader import StreamLoader


class PackTrainer(Trainer):
    """Trains what a ``StepLoader`` or a ``StreamLoader`` yields.

    Args:
        model: on the host or the device; see ``make_trainable``.
        args: from ``training_arguments``.
        loader: of this rank; ``loader.start`` must fit the checkpoint that is resumed from.
        callbacks: further ones.
        part_rates: learning rates of parts of the model that have their own.
        by_channel: log losses and accuracies of each channel.
        by_samples: the loss is divided by samples.
        skips: micro-batches may lack samples that could not be loaded.

    Attributes:
        parallel: ranks that share rows with this one, as the model was told; None for nobody.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        loader: StepLoader | StreamLoader,
        callbacks: list[TrainerCallback],
        *,
        by_channel: bool = False,
        by_samples: bool = False,
        skips: bool = False,
        part_rates: PartRates | None = None,
    ) -> None:
        settings = vars(model.config)
        had = settings.get("use_cache")
        super().__init__(model=model, args=args, callbacks=callbacks)
        # The Trainer switches the cache off in the config, which checkpoints would inherit; every batch does it too.
        if had is None:
            settings.pop("use_cache", None)
        else:
            settings["use_cache"] = had
        self.loader = loader
        self.head_loss = HeadLoss(model) if HeadLoss.applies_to(model) else None
        self.label_logits_only = takes_logits_to_keep(model)
        for printing in (PrinterCallback, ProgressCallback):
            self.remove_callback(printing)
        self.parallel: SequenceParallel | None = None
        self.part_rates, self.by_samples, self.skips = part_rates, by_samples, skips
        # Not the Trainer's, which scales noise by the length of the pack.
        alpha, self.neftune_noise_alpha = args.neftune_noise_alpha, None
        self.noise = EmbeddingNoise(model, alpha) if alpha else None
        self.skipped: list[SkippedSample] = []
        self._meter = Meter(by_channel=by_channel)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's, with parts of the model that have learning rates of their own in groups of their own."""
        is_new = self.optimizer is None
        with refused_by_transformers() if is_new else contextlib.nullcontext():
            optimizer = super().create_optimizer(model)
        if is_new and self.part_rates:
            whole = model or self.model
            assert whole is not None
            names = {id(parameter): name for name, parameter in whole.named_parameters()}
            optimizer.param_groups[:] = list(split_groups(optimizer.param_groups, names, self.part_rates))
        return optimizer

    def get_train_dataloader(self) -> Any:
        """The steps as they are: already this rank's own, so accelerate must neither shard nor move them."""
        return self.loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[TrainingStep], num_batches: int, device: torch.device
    ) -> tuple[list[TrainingStep], None]:
        """The next step; its target tokens are known, so nothing is counted or gathered."""
        return list(islice(epoch_iterator, num_batches)), None

    def training_step(  # type: ignore[override]  # get_batch_samples gives it whole steps
        self, model: nn.Module, inputs: TrainingStep, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of all micro-batches of a step; gradients are exchanged in the last one.

        Returns:
            this rank's share of the sum of losses, times the number of ranks; ``log`` divides by what the steps hold.
        """
        scale = self.args.world_size / max(inputs.figures.units, 1)
        total, num_skipped = torch.zeros((), device=self.args.device), 0
        batches = self._meter.waited_for(inputs.micro_batches)
        for number, batch in enumerate(batches, start=1):
            is_last = number == inputs.num_micro_batches
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(model=model):
                on_device = batch.to(self.args.device, non_blocking=True)
                loss = super().training_step(model, {"batch": on_device, "scale": scale})
            total += loss
            self.skipped += batch.skipped
            num_skipped += sum(1 if self.by_samples else sample.num_target_tokens for sample in batch.skipped)
        units = inputs.figures.units
        if self.skips:
            units = self._without_skipped(num_skipped, inputs.figures.units)
        self._meter.add(dataclasses.replace(inputs.figures, units=units))
        return total / scale * self.args.world_size

    def _without_skipped(self, num_skipped: int, units: int) -> int:
        """What a step's loss is divided by without the samples that no rank could load; mends the gradients, too."""
        count = torch.tensor(num_skipped, device=self.args.device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(count)
        left = units - int(count)
        if left != units and left > 0:
            for parameter in self.model.parameters():  # type: ignore[union-attr]
                if parameter.grad is not None:
                    parameter.grad.mul_(units / left)
        return left

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """A micro-batch's contribution to the mean over the target tokens of the whole step."""
        assert not return_outputs, "packtool evaluates by itself"
        batch: Batch = inputs["batch"]
        if self.noise is not None:
            self.noise.batch = batch
        if self.head_loss is None:
            return sum_of_losses(model, batch, label_logits_only=self.label_logits_only) * inputs["scale"]
        found = self.head_loss.losses(model, batch)
        self._meter.see(found, batch)
        return found.sum(batch.loss_weights) * inputs["scale"]

    def log_evaluation(self, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Log what an evaluation says, and return it; its time is none of the training's."""
        begin = time.perf_counter()
        logs = evaluate()
        self._meter.leave_out(time.perf_counter() - begin)
        self.log(dict(logs))
        return logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log lines with the exact mean loss over the steps since the last one, and what these steps held."""
        if "train_loss" in logs:
            # The Trainer's last words: averages of what training_step returned, which are no means.
            return
        if "loss" in logs:
            logs.update(self._meter.logged(logs["loss"], self.accelerator))
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the Trainer's estimate would need a batch of its own form."""
        return 0
