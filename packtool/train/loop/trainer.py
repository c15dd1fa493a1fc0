"""transformers' Trainer, told what a step is.

The Trainer gives a fixed number of micro-batches to every step but an epoch's last, and finds its place after a
resume by counting them. Here the plan says what a step is, so the Trainer is given whole steps: one "batch" of its
dataloader is a ``TrainingStep``, the whole run is one of its "epochs", and gradient accumulation happens in
``training_step``. What is left to it is what it is good at: devices, wrapping, optimizer, clipping, schedule, logging,
checkpoints.

Noise on the embeddings of training: NEFTune, for samples that share a sequence.

Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning": uniform noise of at most
alpha / sqrt(L d), with L tokens of a sample and d of width. L is here the sample's own, not the pack's or the padded
row's, so that a sample has the noise that it would have alone.

Micro-batches on their way to the device, beside its computation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from packtool.batch.batch import B, Batch, PackedBatch, PaddedBatch, ShardedBatch, SkippedSample, TreeBatch
from packtool.cache.evaluation_file import plain_json
from packtool.planning.mixture import share_figures
from packtool.train.loop.arguments import refused_by_transformers
from packtool.train.loop.loader import StepLoader, TrainingStep
from packtool.train.loop.meter import Meter
from packtool.train.loop.watch import StepNumbers
from packtool.train.model.loss import HeadLoss, StepMean, takes_logits_to_keep, target_losses
from packtool.train.model.precision import KahanAdamW, SavedPrecision, load_masters, save_masters
from packtool.train.model.router import RouterBalance
from packtool.train.model.sharding import load_optimizer, save_optimizer, whole_state
from packtool.train.model.towers import PartRates, split_groups
from packtool.train.prepare.checkpoint import PREFIX, loading, saving
from packtool.train.prepare.figures import StepFigures


class EmbeddingNoise:
    """Adds noise to what a model's embeddings return while it trains on ``batch``.

    Args:
        model: bare, or inside an adapter; not yet wrapped for several processes.
        alpha: NEFTune's.

    Attributes:
        batch: what the model is run on; None for no noise.
    """

    def __init__(self, model: nn.Module, alpha: float) -> None:
        inner: Any = model
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        self.alpha = alpha
        self.batch: Batch | None = None
        inner.get_input_embeddings().register_forward_hook(self._add)

    def _add(self, module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
        if self.batch is None or not module.training or embedded.shape[:2] != self.batch.input_ids.shape:
            return embedded
        lengths = sample_lengths(self.batch).to(embedded.device)
        most = self.alpha / (lengths * embedded.shape[-1]).sqrt()
        noise = torch.empty_like(embedded).uniform_(-1.0, 1.0)
        return embedded + noise * most[..., None].to(embedded.dtype)


def sample_lengths(batch: Batch) -> Tensor:
    """Tokens of the sample that each position belongs to, float32 (B, T)."""
    if isinstance(batch, PaddedBatch):
        return batch.attention_mask.sum(1, keepdim=True).clamp(min=1).float().expand(batch.input_ids.shape)
    assert isinstance(batch, (PackedBatch, ShardedBatch))
    assert not isinstance(batch, TreeBatch), "a shared prefix is of no one length"
    positions = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
    lengths = torch.tensor([*batch.lengths, 1], device=positions.device, dtype=torch.float32)
    return lengths[batch.documents_of(positions).clamp(max=len(batch.lengths))].view(batch.input_ids.shape)


class DeviceCopies:
    """Copies micro-batches to a device on a stream of their own.

    On the stream that computes, a copy would wait for everything that was given to the device before. The host is ahead
    of the device, so that a copy of its own stream runs while the micro-batch before is computed, or the optimizer's
    step; the computation waits for the copy alone. It takes page-locked memory, which the dataloader provides on CUDA.
    How long it waited is noted by the device itself, and read when the host has waited for the device anyway.

    Args:
        device: on which the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        self._waits: list[tuple[Any, Any]] = []

    def bring(self, batch: B) -> B:
        """The micro-batch on the device; the current stream may use it at once."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            on_device = batch.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        event: Any = torch.cuda.Event
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record(current)
        current.wait_stream(self._stream)
        end.record(current)
        self._waits.append((begin, end))
        # Else the memory could be given to the next copy while the computation still reads it.
        on_device.map(lambda tensor: _recorded(tensor, current))
        return on_device

    def waited(self) -> float | None:
        """Seconds that the computation waited for copies since this was asked last; None where there are none.

        Does not wait for the device: copies that it has not come to are counted the next time.
        """
        if self._stream is None:
            return None
        reached = [pair for pair in self._waits if pair[1].query()]
        self._waits = self._waits[len(reached) :]
        return sum(begin.elapsed_time(end) for begin, end in reached) / 1e3


def _recorded(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    tensor.record_stream(stream)
    return tensor


class PackTrainer(Trainer):
    """Trains what a ``StepLoader`` yields.

    Args:
        model: on the host or the device; see ``make_trainable``.
        args: from ``training_arguments``.
        loader: of this rank; it begins where the checkpoint ends that is resumed from.
        callbacks: further ones.
        saved: what checkpoints are saved as.
        numbers: takes the losses and the gradient norm of the step that is being computed.

    Attributes:
        skipped: samples of this rank that could not be loaded.
        skipped_in: the steps, 0-based, in which these were to be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        loader: StepLoader,
        callbacks: Sequence[TrainerCallback],
        *,
        saved: SavedPrecision,
        numbers: StepNumbers,
    ) -> None:
        settings = vars(model.config)
        had = settings.get("use_cache")
        self.shares_experts = loader.run.config.shares_experts
        only_model = args.save_only_model
        # The Trainer knows no way to save the optimizer of a model that was sharded while it was read; here is one.
        args.save_only_model = only_model or self.shares_experts
        super().__init__(model=model, args=args, callbacks=list(callbacks))
        args.save_only_model = only_model
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
        config = loader.run.config
        self.saved, self.numbers = saved, numbers
        self.kahan = config.master_weights == "kahan"
        self.part_rates = PartRates.of(config, model)
        self.by_samples, self.skips = config.loss_reduction == "sample", config.on_bad_media == "skip"
        # Not the Trainer's, which scales noise by the length of the pack.
        alpha, self.neftune_noise_alpha = args.neftune_noise_alpha, None
        self.noise = EmbeddingNoise(model, alpha) if alpha else None
        coefficient = config.router_aux_loss_coef
        self.balance = RouterBalance(model, coefficient) if coefficient else None
        self.skipped: list[SkippedSample] = []
        self.skipped_in: list[int] = []
        self._meter = Meter(by_channel=loader.run.source.logs_channels)
        self._copies = DeviceCopies(args.device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's, with parts of the model that have learning rates of their own in groups of their own."""
        is_new = self.optimizer is None
        if self.kahan:
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            settings = {"lr": self.args.learning_rate, "betas": betas, "eps": self.args.adam_epsilon}
            self.optimizer_cls_and_kwargs = (KahanAdamW, settings)
        with refused_by_transformers() if is_new else contextlib.nullcontext():
            optimizer = super().create_optimizer(model)
        if is_new and self.part_rates:
            whole = model or self.model
            assert whole is not None
            names = {id(parameter): name for name, parameter in whole.named_parameters()}
            optimizer.param_groups[:] = list(split_groups(optimizer.param_groups, names, self.part_rates))
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """The Trainer's, with a whole model in its checkpoint's own precision."""
        model: Any = self.model
        if self.shares_experts:
            state_dict = whole_state(model)
            if not self.args.should_save:
                return
        if isinstance(model, PeftModel) or not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        # Tied weights under each of their names.
        named = model.named_parameters(remove_duplicate=False)
        trained = frozenset(name for name, parameter in named if parameter.requires_grad)
        state = self.saved.cast(model.state_dict() if state_dict is None else state_dict, trained)
        super()._save(output_dir, state)
        # Saving writes the precision of the weights in memory into the config.
        model.config.dtype = self.saved.dtype
        model.config.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The Trainer's, and the digits that the saved model lacks; FSDP and DeepSpeed save theirs."""
        if self.shares_experts:
            self._save_shards(output_dir)
            return
        super()._save_optimizer_and_scheduler(output_dir)
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.args.should_save and not is_sharded and not isinstance(self.model, PeftModel):
            assert self.model is not None
            save_masters(self.model, self.saved, output_dir)

    def _save_shards(self, output_dir: str) -> None:
        """What ``_load_shards`` reads: the optimizer's states by rank, the schedule, trained weights in one piece."""
        model, optimizer, scheduler = self._parts()
        save_optimizer(model, optimizer, output_dir)
        whole = whole_state(model)
        if self.args.should_save:
            save_masters(model, self.saved, output_dir, whole)
            torch.save(scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_shards(self, checkpoint: str) -> None:
        model, optimizer, scheduler = self._parts()
        load_masters(model, checkpoint)
        load_optimizer(model, optimizer, checkpoint)
        scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _parts(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Model, optimizer without accelerate's wrapper, and scheduler."""
        model, wrapped = self.model, self.optimizer
        assert model is not None
        assert wrapped is not None
        return model, getattr(wrapped, "optimizer", wrapped), self.lr_scheduler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The Trainer's, and the digits that the saved model lacks."""
        if self.shares_experts:
            return  # they come with the optimizer's states
        with loading(resume_from_checkpoint, "the weights"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if not self.is_fsdp_enabled and not isinstance(self.model, PeftModel):
                whole = model or self.model
                assert whole is not None
                load_masters(whole, resume_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """No warning: tied and converted weights have other names in a checkpoint, and ``load_masters`` checks it."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with loading(str(checkpoint), "the optimizer's states or the schedule"):
            if self.shares_experts and checkpoint is not None:
                self._load_shards(checkpoint)
                return
            super()._load_optimizer_and_scheduler(checkpoint)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = os.path.join(str(self.args.output_dir), f"{PREFIX}{self.state.global_step}")
        with saving(checkpoint, num_bytes=self._checkpoint_bytes()):
            super()._save_checkpoint(model, trial)

    def _checkpoint_bytes(self) -> int | None:
        """About what a checkpoint holds: weights as saved and as kept, optimizer's states; None if they are sharded."""
        model, optimizer, _ = self._parts()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or self.shares_experts:
            return None
        is_adapter = isinstance(model, PeftModel)
        weights = [weight for weight in model.parameters() if weight.requires_grad or not is_adapter]
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        kept = sum(weight.nbytes for weight in weights)
        saved = 0 if is_adapter else sum(weight.numel() * self.saved.dtype.itemsize for weight in weights)
        masters = kept if is_adapter or self.saved.dtype.itemsize < 4 else 0
        return saved + masters + sum(state.nbytes for state in states)

    def get_train_dataloader(self) -> Any:
        """The steps as they are: already this rank's own, so accelerate must neither shard nor move them."""
        return self.loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[TrainingStep], num_batches: int, device: torch.device
    ) -> tuple[list[TrainingStep], None]:
        """The next step; its target tokens are known, so nothing is counted or gathered."""
        return list(islice(self._meter.waited_for(epoch_iterator), num_batches)), None

    def training_step(  # type: ignore[override]  # get_batch_samples gives it whole steps
        self, model: nn.Module, inputs: TrainingStep, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of all micro-batches of a step; gradients are exchanged in the last, with FSDP in each.

        Returns:
            this rank's share of the sum of losses, times the number of ranks; ``log`` divides by what the steps hold.
        """
        mean = StepMean(inputs.figures.units, self.args.world_size)
        total, skipped = torch.zeros((), device=self.args.device), list[SkippedSample]()
        batches = self._meter.waited_for(inputs.micro_batches)
        for number, batch in enumerate(batches, start=1):
            is_last = number == inputs.num_micro_batches
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            # FSDP would add up whole float32 gradients until the last: each rank gets its shard of the sum at once.
            exchanges = is_last or self.accelerator.is_fsdp2 or self.shares_experts
            moved = self._copies.bring(batch)
            balanced = self.balance.of(moved, inputs.figures.tokens, self.args.world_size) if self.balance else None
            alone = contextlib.nullcontext() if exchanges else self.accelerator.no_sync(model=model)
            with alone, balanced or contextlib.nullcontext():
                loss = super().training_step(model, {"batch": moved, "mean": mean})
            self._meter.run_over(batch)
            self.numbers.see_loss(loss)
            total += loss
            skipped += batch.skipped
        self.skipped += skipped
        if self.balance is not None:
            self._meter.see_balance(self.balance.taken())
        self.skipped_in += [self.state.global_step] * len(skipped)
        self._meter.add(self._without_skipped(inputs.figures, mean, skipped) if self.skips else inputs.figures)
        return mean.sum_over_ranks(total)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The Trainer's, shown to whoever watches the step's numbers."""
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        self.numbers.see_norm(0.0 if norm is None else norm, is_scaled=self.accelerator.scaler is not None)
        return norm

    def _without_skipped(self, figures: StepFigures, mean: StepMean, skipped: Sequence[SkippedSample]) -> StepFigures:
        """What a step trained without the samples that could not be loaded on any rank; mends the gradients, too."""
        counts = torch.tensor([len(skipped), sum(s.num_target_tokens for s in skipped)], device=self.args.device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(counts)
        num_samples, num_targets = counts.tolist()
        left = mean.without(num_samples if self.by_samples else num_targets)
        mean.mend_gradients(self.model.parameters(), left)  # type: ignore[union-attr]
        return dataclasses.replace(figures, units=left.num_units, target_tokens=figures.target_tokens - num_targets)

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
        mean: StepMean = inputs["mean"]
        if self.head_loss is None:
            losses = target_losses(model, batch, label_logits_only=self.label_logits_only)
        else:
            losses = self.head_loss.losses(model, batch)
        self._meter.see(losses, batch)
        return mean.contribution(losses.sum(batch.loss_weights))

    def log_evaluation(self, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Log what an evaluation says, and return it; its time is none of the training's."""
        begin = time.perf_counter()
        logs = evaluate()
        self._meter.leave_out(time.perf_counter() - begin)
        self.log(dict(logs))
        return logs

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's, with the time noted from which on a log line is made."""
        self._meter.begin_log()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log lines with the exact mean loss over the steps since the last one, and what these steps held."""
        if "train_loss" in logs:
            # The Trainer's last words: averages of what training_step returned, which are no means.
            return
        if "loss" in logs:
            logs.update(self._meter.logged(logs["loss"], self.accelerator, copying=self._copies.waited()))
            # The Trainer takes the sum away from itself, which does not help where it is no number.
            self._tr_loss.zero_()
        super().log(logs, start_time)
        if "loss" in logs:
            self._meter.end_log()
        # trainer_state.json is made of these, and JSON has no word for what is not a number.
        self.state.log_history[-1] = plain_json(self.state.log_history[-1])

    @property
    def trained_shares(self) -> dict[str, dict[str, float]]:
        """Figures of what this run has trained of each source of a mixture; of a resumed run, since it resumed."""
        return share_figures(self._meter.sources)

    def floating_point_ops(self, inputs: Any) -> int:
        """Always 0: the Trainer's estimate would need a batch of its own form."""
        return 0
